"""``python -m benchmarks interchange``: a GPT-2 train state converted from DCP, and from and to safetensors.

DCP's own cold load of the same files into memory that is there already is what a conversion is compared with. Every
operation has a process of its own, which also shows how much memory it takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.interchange_probe import CONVERSIONS, DCP_LOAD, PREPARE, PREPARE_DCP
from benchmarks.machine import describe_machine, working_directory
from benchmarks.measuring import Goal, Ratio, Samples, Turn, judge, judge_ratio, paired_ratio, run_rounds
from benchmarks.report import Report
from benchmarks.systems import import_problem

__all__ = ["add_arguments", "run"]

_MEBIBYTE = 1 << 20
_PEAK_LIMIT_MIB = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12, help="transformer layers; GPT-2 small has 12 (default)")
    parser.add_argument("--compression", choices=["none", "auto", "zstd"], default="none", help="savestream's codec")
    parser.set_defaults(default_rounds=5)


def run(arguments: argparse.Namespace, rounds: int) -> Report:
    """Measure and judge."""
    layers = 0 if arguments.quick else arguments.layers
    problem = import_problem("torch")
    absent = {} if problem is None else {"DCP": problem}
    with working_directory(arguments.root) as directory:
        probe = _Probe(directory, layers, arguments.compression)
        probe(PREPARE)
        steps = [name for name, conversion in CONVERSIONS.items() if not (absent and conversion.needs_dcp)]
        if not absent:
            probe(PREPARE_DCP)
            steps.insert(0, DCP_LOAD)
        turns = [Turn(step, _StepTurn(probe, step)) for step in steps]
        samples = run_rounds(turns, rounds, warm_up=turns)
        peaks = {step: probe.peaks[step][1:] for step in steps}  # without the warm-up
        return Report(
            command="interchange",
            parameters={
                "layers": layers,
                "rounds": rounds,
                "compression": arguments.compression,
                "quick": arguments.quick,
            },
            machine={**describe_machine(directory), "eviction": probe.eviction},
            samples=samples,
            data_bytes=probe.data_bytes,
            absent=absent,
            ratios=_ratios(samples, steps),
            goals=_goals(samples, peaks),
            notes=[
                f"state: {probe.data_bytes / 2**30:.3f} GiB; every operation starts cold, by {probe.eviction}",
                *(
                    f"peak of resident memory, {name}: {max(found) / _MEBIBYTE:.0f} MiB"
                    for name, found in peaks.items()
                ),
            ],
        )


class _Probe:
    """Runs one step in a process of its own."""

    def __init__(self, directory: str, layers: int, compression: str) -> None:
        self._arguments = [directory, str(layers), compression]
        self.peaks: dict[str, list[int]] = {}
        self.data_bytes = 0
        self.eviction = ""

    def __call__(self, step: str) -> float:
        command = [sys.executable, "-m", "benchmarks.interchange_probe", step, *self._arguments]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{outcome.stderr}")
        found = json.loads(outcome.stdout)
        self.peaks.setdefault(step, []).append(found["peak_bytes"])
        self.data_bytes, self.eviction = found["data_bytes"], found["eviction"]
        return float(found["seconds"])


class _StepTurn:
    def __init__(self, probe: _Probe, step: str) -> None:
        self._probe = probe
        self._step = step

    def __call__(self) -> Mapping[str, float]:
        return {self._step: self._probe(self._step)}


def _ratios(samples: Samples, steps: list[str]) -> list[Ratio]:
    found = [paired_ratio(samples, DCP_LOAD, step) for step in steps if step != DCP_LOAD]
    return [ratio for ratio in found if ratio is not None]


def _goals(samples: Samples, peaks: Mapping[str, list[int]]) -> list[Goal]:
    goals = []
    for name, conversion in CONVERSIONS.items():
        ratio = paired_ratio(samples, DCP_LOAD, name) if conversion.needs_dcp else None
        if ratio is not None:
            goals.append(judge_ratio(f"{name}: times as fast as DCP's own load", ratio, at_least=1.0))
        if name in peaks:
            values = [peak / _MEBIBYTE for peak in peaks[name]]
            text = f"{name}: peak beyond the process after its imports within {_PEAK_LIMIT_MIB} MiB"
            goals.append(judge(text, max(values), min(values), max(values), at_most=_PEAK_LIMIT_MIB, unit=" MiB"))
    return goals
