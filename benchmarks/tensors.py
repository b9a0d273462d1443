"""``python -m benchmarks tensors``: the same values as numpy arrays and as torch tensors, through savestream alone."""

from __future__ import annotations

import argparse
import functools

import numpy as np

from benchmarks.machine import Machine, describe_machine, working_directory
from benchmarks.measuring import Goal, Ratio, Samples, Turn, judge_ratio, paired_ratio, run_rounds
from benchmarks.replans import dcp_replan_turn, replan_label, replan_turn
from benchmarks.report import Report
from benchmarks.stages import Stages, stages_of_one_run
from benchmarks.stalls import StallTurn, background_label, pool_for, stall_label
from benchmarks.states import Tree, as_tensor, gpt2_train_state, many_arrays, map_leaves, total_bytes
from benchmarks.systems import LOAD_INTO, SAVE, import_problem, run_system, savestream_system
from savestream import SaveOptions

__all__ = ["add_arguments", "run"]

_NUMPY, _TORCH = "numpy", "torch"
_QUICK = {"layers": 1, "width": 96, "vocabulary": 4096}
_QUICK_LEAVES = 500
_SAME = 1.05
_REPLAN_FACTOR = 16.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12, help="transformer layers of the large state (default 12)")
    parser.add_argument("--leaves", type=int, default=50_000, help="tensors of the small state (default 50000)")
    parser.set_defaults(default_rounds=9)


def run(arguments: argparse.Namespace, rounds: int) -> Report:
    """Measure and judge."""
    if problem := import_problem("torch"):
        raise SystemExit(f"tensors: this benchmark is about PyTorch, which is not there ({problem})")
    shape = _QUICK if arguments.quick else {"layers": arguments.layers}
    leaves = _QUICK_LEAVES if arguments.quick else arguments.leaves
    state = gpt2_train_state(**shape)
    target = map_leaves(np.zeros_like, state)
    nbytes = total_bytes(state)
    machine = Machine(2 * nbytes, drop_all_caches=not arguments.quick)
    many = map_leaves(as_tensor, many_arrays(leaves))
    with working_directory(arguments.root) as directory, pool_for(nbytes) as pool:
        turns = [
            Turn("savestream replan", replan_turn(machine, many, _TORCH)),
            Turn("DCP replan", dcp_replan_turn(machine, many)),
        ]
        for name in (_NUMPY, _TORCH):
            own, into = (tree if name == _NUMPY else map_leaves(as_tensor, tree) for tree in (state, target))
            stall = StallTurn(machine, f"{directory}/stall", state, target, pool, "none", name, own)
            system = savestream_system(own, into, compression="none", name=name)
            place = f"{directory}/{name}"
            turns.append(Turn(f"{name} start_save", stall.run))
            turns.append(Turn(name, functools.partial(run_system, system, machine, place, state, target)))
        samples = run_rounds(turns, rounds, warm_up=[*turns, turns[2]])
        return Report(
            command="tensors",
            parameters={**shape, "leaves": leaves, "rounds": rounds, "quick": arguments.quick},
            machine={**describe_machine(directory), "eviction": machine.eviction},
            samples=samples,
            data_bytes=nbytes,
            absent={},
            ratios=_ratios(samples),
            goals=_goals(samples),
            stages=_stages(machine, directory, state, target),
            notes=[f"state: {nbytes / 2**30:.3f} GiB, and {leaves} tensors for the replans"],
        )


def _stages(machine: Machine, directory: str, state: Tree, target: Tree) -> Stages:
    tensors = [map_leaves(as_tensor, tree) for tree in (state, target)]
    return stages_of_one_run(machine, f"{directory}/stages", tensors[0], tensors[1], SaveOptions(compression="none"))


_PAIRS = (
    ("stall of start_save", stall_label),
    ("start_save until durable", background_label),
    ("durable save", lambda name: f"{name}: {SAVE}"),
    ("load into a target", lambda name: f"{name}: {LOAD_INTO}"),
)


def _ratios(samples: Samples) -> list[Ratio]:
    found = [paired_ratio(samples, label(_TORCH), label(_NUMPY)) for _, label in _PAIRS]
    found.append(paired_ratio(samples, replan_label("DCP"), replan_label(_TORCH)))
    return [ratio for ratio in found if ratio is not None]


def _goals(samples: Samples) -> list[Goal]:
    *same, replan = _ratios(samples)
    goals = [
        judge_ratio(f"{text}, torch over numpy", ratio, at_most=_SAME)
        for (text, _), ratio in zip(_PAIRS, same, strict=True)
    ]
    goals.append(judge_ratio("replan, times as fast as DCP's cached one", replan, at_least=_REPLAN_FACTOR))
    return goals
