"""``python -m benchmarks memory``: how far a save or a load raises a process's memory above the state itself."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.machine import describe_machine, working_directory
from benchmarks.measuring import Goal, Samples, Turn, judge, run_rounds
from benchmarks.report import Report
from benchmarks.systems import import_problem
from savestream.pipeline.options import DEFAULT_MEMORY_BUDGET_BYTES

__all__ = ["add_arguments", "run"]

_MEBIBYTE = 1 << 20
_SAVE_ALLOWANCE_MIB = 100
_LOAD_LIMIT_MIB = 300
# Operations of the probe that follow each other in one directory.
_OWN = {"savestream": ["save", "load"], "savestream zstd": ["save-zstd", "load"]}
_PEERS = {"DCP": ["dcp-save", "dcp-load"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12, help="transformer layers; GPT-2 small has 12 (default)")
    parser.set_defaults(default_rounds=3)


def run(arguments: argparse.Namespace, rounds: int) -> Report:
    """Measure and judge; every operation has a process of its own."""
    layers = 0 if arguments.quick else arguments.layers
    problem = import_problem("torch")
    absent = {} if problem is None else {"DCP": problem}
    systems = {**_OWN, **({} if absent else _PEERS)}
    with working_directory(arguments.root) as directory:
        turns = [
            Turn(name, _ProbeTurn(name, list(steps), f"{directory}/{name}", layers)) for name, steps in systems.items()
        ]
        samples = run_rounds(turns, rounds, warm_up=[])
        return Report(
            command="memory",
            parameters={"layers": layers, "rounds": rounds, "quick": arguments.quick},
            machine=describe_machine(directory),
            samples=samples,
            unit="MiB",
            absent=absent,
            goals=_goals(samples),
            notes=["peak resident memory beyond what the process held, state and target included, before the call"],
        )


class _ProbeTurn:
    """Runs probes one after the other in one directory."""

    def __init__(self, name: str, steps: list[str], directory: str, layers: int) -> None:
        self._name = name
        self._steps = steps
        self._directory = directory
        self._layers = layers

    def __call__(self) -> Mapping[str, float]:
        found = {}
        for step in self._steps:
            command = [sys.executable, "-m", "benchmarks.memory_probe", step, self._directory, str(self._layers)]
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
            if outcome.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{outcome.stderr}")
            operation = "load into target" if step.endswith("load") else "save"
            found[f"{self._name}: {operation}"] = json.loads(outcome.stdout)["peak_bytes"] / _MEBIBYTE
        return found


def _goals(samples: Samples) -> list[Goal]:
    budget = DEFAULT_MEMORY_BUDGET_BYTES // _MEBIBYTE
    limits = {
        "save": (budget + _SAVE_ALLOWANCE_MIB, f"budget of {budget} + {_SAVE_ALLOWANCE_MIB} MiB"),
        "load into target": (_LOAD_LIMIT_MIB, f"{_LOAD_LIMIT_MIB} MiB"),
    }
    goals = []
    for name in _OWN:
        for operation, (limit, said) in limits.items():
            values = samples[f"{name}: {operation}"]
            text = f"{name}: {operation}: peak beyond the state within {said}"
            goals.append(judge(text, max(values), min(values), max(values), at_most=limit, unit=" MiB"))
    return goals
