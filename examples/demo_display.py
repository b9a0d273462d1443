"""What the demo shows of one training run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

__all__ = ["RunDisplay", "megabytes", "milliseconds"]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


@dataclasses.dataclass
class _Save:
    """What is known of one save so far."""

    stall: str = ""
    durable: str = ""
    stored: str = ""

    @property
    def complete(self) -> bool:
        return bool(self.stall and self.durable)


class RunDisplay:
    """Shows the reports of one training run."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._saves: dict[int, _Save] = {}
        self._progress = Progress(
            TextColumn("  training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
        )
        self._task = self._progress.add_task("training", total=steps, loss="-")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Take in one report of the trainer."""
        step = event["step"]
        match event["event"]:
            case "started":
                self._progress.update(self._task, completed=step)
            case "step":
                self._progress.update(self._task, completed=step, loss=f"{event['loss']:.4f}")
            case "staged":
                self._save(step).stall = milliseconds(event["stall_seconds"])
                self._print_when_complete(step)
            case "committed":
                save = self._save(step)
                save.durable = milliseconds(event["seconds"])
                save.stored = f"{megabytes(event['stored'])} of {megabytes(event['raw'])}"
                self._print_when_complete(step)

    def show_kill(self, step: int) -> None:
        """Say that the trainer died in the save of ``step``."""
        self._save(step).durable = "killed"
        if not self._console.is_terminal:
            print(f"  step {step}: killed in mid-save")

    def _save(self, step: int) -> _Save:
        return self._saves.setdefault(step, _Save())

    def _print_when_complete(self, step: int) -> None:
        save = self._save(step)
        if save.complete and not self._console.is_terminal:
            print(f"  step {step}: training stood still {save.stall}, durable after {save.durable}, {save.stored}")

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for heading in ("  save of step", "training stood still", "durable after", "stored"):
            table.add_column(heading, justify="right")
        for step, save in self._saves.items():
            style = "red" if save.durable == "killed" else None
            table.add_row(str(step), save.stall or "...", save.durable or "...", save.stored, style=style)
        return Group(self._progress, table)
