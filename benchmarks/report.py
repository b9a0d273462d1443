"""What a run prints and what it writes as JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import Goal, Ratio, Samples

__all__ = ["Report"]


@dataclasses.dataclass
class Report:
    """Everything that one command found out."""

    command: str
    parameters: dict[str, object]
    machine: dict[str, object]
    samples: Samples
    unit: str = "s"
    data_bytes: int | None = None
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    ratios: list[Ratio] = dataclasses.field(default_factory=list)
    goals: list[Goal] = dataclasses.field(default_factory=list)
    stages: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def write_json(self, path: str) -> None:
        content = dataclasses.asdict(self)
        content["medians"] = {name: statistics.median(values) for name, values in self.samples.items()}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print tables, notes and goals."""
        print(f"savestream benchmarks: {self.command} " + " ".join(f"{k}={v}" for k, v in self.parameters.items()))
        machine = self.machine
        print(f"{machine['processor']}, {machine['cores']} cores, {machine['file_system']}, {machine['system']}")
        print(
            ", ".join(
                f"{name} {version}" for name, version in {"Python": machine["python"], **_packages(machine)}.items()
            )
        )
        for name, problem in self.absent.items():
            print(f"{name} is not measured: {problem}")
        _print_table("medians", self._sample_header(), self._sample_rows())
        if self.ratios:
            rows = [[r.label, f"{r.value:.2f}", f"{r.low:.2f} to {r.high:.2f}"] for r in self.ratios]
            _print_table("paired within each round", ["ratio", "median", "95% interval"], rows)
        for operation, stages in self.stages.items():
            rows = [[name, *(f"{value:.3f}" for value in fields.values())] for name, fields in stages.items()]
            _print_table(f"where the time of one {operation} goes", ["stage", *_fields(stages)], rows)
        for line in self.notes:
            print(line)
        for goal in self.goals:
            verdict = "holds" if goal.holds else "does not hold"
            doubt = "" if goal.clear else " (its interval spans the limit)"
            print(f"goal {verdict}: {goal.text}: {goal.value:.2f}{goal.unit}, {goal.low:.2f} to {goal.high:.2f}{doubt}")

    def _sample_header(self) -> list[str]:
        rate = ["GB/s"] if self.data_bytes else []
        return ["operation", f"median {self.unit}", f"min {self.unit}", f"max {self.unit}", *rate, "n"]

    def _sample_rows(self) -> list[list[str]]:
        rows = []
        for name, values in sorted(self.samples.items(), key=lambda entry: entry[0].split(": ")[-1]):
            median = statistics.median(values)
            numbers = [
                f"{number:.3f}" if self.unit == "s" else f"{number:.1f}"
                for number in (median, min(values), max(values))
            ]
            rate = [f"{self.data_bytes / median / 1e9:.2f}"] if self.data_bytes else []
            rows.append([name, *numbers, *rate, str(len(values))])
        return rows


def _packages(machine: dict[str, object]) -> dict[str, object]:
    packages = machine["packages"]
    return dict(packages) if isinstance(packages, dict) else {}


def _fields(stages: dict[str, dict[str, float]]) -> list[str]:
    return list(next(iter(stages.values()))) if stages else []


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(title, header, rows)
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def _print_plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        first, *others = (
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
    print()
