"""``python -m benchmarks small``: tens of thousands of small arrays, where planning and metadata are what costs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import Machine, count_files, describe_machine, working_directory
from benchmarks.measuring import Goal, Ratio, Samples, Turn, judge_ratio, paired_ratio, run_rounds
from benchmarks.replans import dcp_replan_turn, replan_label, replan_turn
from benchmarks.report import Report
from benchmarks.stages import stages_of_one_run
from benchmarks.states import as_tensor, many_arrays, map_leaves
from benchmarks.systems import LOAD_INTO, LOAD_NEW, SAVE, peer_systems, run_system, savestream_system
from savestream import PlanCache, SaveOptions, blocking

__all__ = ["add_arguments", "run"]

_GROWTH = 4
_GROWTH_LIMIT = 4.5
_WARM_UP_LEAVES = 1000
_QUICK_LEAVES = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--leaves", type=int, default=50_000, help="how many arrays (default 50000)")
    parser.set_defaults(default_rounds=3)


def run(arguments: argparse.Namespace, rounds: int) -> Report:
    """Measure and judge."""
    leaves = _QUICK_LEAVES if arguments.quick else arguments.leaves
    with working_directory(arguments.root) as directory:
        bench = _Bench(directory, drop_all_caches=not arguments.quick)
        turns, absent = bench.turns(leaves)
        warm_up, _ = bench.turns(min(leaves, _WARM_UP_LEAVES))
        samples = run_rounds(turns, rounds, warm_up=warm_up)
        state = many_arrays(leaves)
        target = map_leaves(np.zeros_like, state)
        return Report(
            command="small",
            parameters={"leaves": leaves, "rounds": rounds, "quick": arguments.quick},
            machine={**describe_machine(directory), "eviction": bench.machine.eviction},
            samples=samples,
            absent=absent,
            ratios=_ratios(samples),
            goals=_goals(samples),
            stages=stages_of_one_run(
                bench.machine, f"{directory}/stages", state, target, SaveOptions(compression="none")
            ),
            notes=[f"files of a checkpoint of {leaves} arrays: {bench.count_files(state)}"],
        )


class _Bench:
    """Builds the turns of one run."""

    def __init__(self, directory: str, *, drop_all_caches: bool) -> None:
        self._directory = directory
        self.machine = Machine(512 << 20 if drop_all_caches else 1 << 20, drop_all_caches=drop_all_caches)

    def turns(self, leaves: int) -> tuple[list[Turn], dict[str, str]]:
        """Every system on ``leaves`` arrays, savestream on four times as many too, and both replans."""
        state = many_arrays(leaves)
        target = map_leaves(np.zeros_like, state)
        larger = many_arrays(_GROWTH * leaves)
        larger_target = map_leaves(np.zeros_like, larger)
        peers, absent = peer_systems(state, target)
        systems = [savestream_system(state, target, compression="none"), *peers]
        turns = [
            Turn(
                system.name,
                functools.partial(run_system, system, self.machine, self._place(system.name), state, target),
            )
            for system in systems
        ]
        grown = savestream_system(larger, larger_target, compression="none", name=_grown("savestream"))
        turns.append(
            Turn(
                grown.name,
                functools.partial(run_system, grown, self.machine, self._place("grown"), larger, larger_target),
            )
        )
        turns.append(Turn("savestream replan", self._replan_turn(state)))
        if "DCP" not in absent:
            turns.append(Turn("DCP replan", dcp_replan_turn(self.machine, map_leaves(as_tensor, state))))
        return turns, absent

    def _place(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def _replan_turn(self, state: dict[str, Any]) -> Callable[[], dict[str, float]]:
        """What a save of an unchanged state does before it stages, and a whole save that finds its plan cached."""
        replan = replan_turn(self.machine, state, "savestream")

        def run() -> dict[str, float]:
            return {**replan(), **self._cached_save(state, saves_cache)}

        saves_cache = PlanCache()
        self._cached_save(state, saves_cache)
        return run

    def _cached_save(self, state: dict[str, Any], cache: PlanCache) -> dict[str, float]:
        """A whole save that finds its plan cached, and what it counts as planning."""
        directory = self._place("cached")
        self.machine.clear(directory)
        options = SaveOptions(compression="none")
        seconds, info = self.machine.timed(
            lambda: blocking.save(state, f"{directory}/checkpoint", options=options, plan_cache=cache)
        )
        self.machine.clear(directory)
        return {
            "savestream: save, plan cached": seconds,
            "savestream: planning within it": info.statistics.stages["plan"].busy_seconds,
        }

    def count_files(self, state: dict[str, Any]) -> int:
        """How many files savestream writes for ``state``."""
        directory = self._place("files")
        self.machine.clear(directory)
        blocking.save(state, f"{directory}/checkpoint")
        return count_files(directory)


def _grown(name: str) -> str:
    return f"{name}, {_GROWTH}x the leaves"


def _ratios(samples: Samples) -> list[Ratio]:
    pairs = [
        (f"DCP: {SAVE}", f"savestream: {SAVE}"),
        (f"DCP: {LOAD_INTO}", f"savestream: {LOAD_INTO}"),
        (f"torch.save: {SAVE}", f"savestream: {SAVE}"),
        (f"torch.save: {LOAD_NEW}", f"savestream: {LOAD_NEW}"),
        (f"torchsnapshot: {SAVE}", f"savestream: {SAVE}"),
        (f"torchsnapshot: {LOAD_INTO}", f"savestream: {LOAD_INTO}"),
        (replan_label("DCP"), replan_label("savestream")),
        (f"savestream: {SAVE}", "savestream: save, plan cached"),
    ]
    return [ratio for pair in pairs if (ratio := paired_ratio(samples, *pair)) is not None]


def _goals(samples: Samples) -> list[Goal]:
    goals = []
    for operation in (SAVE, LOAD_INTO, LOAD_NEW):
        ratio = paired_ratio(samples, f"{_grown('savestream')}: {operation}", f"savestream: {operation}")
        assert ratio is not None
        text = f"{operation}: time for {_GROWTH} times the leaves"
        goals.append(judge_ratio(text, ratio, at_most=_GROWTH_LIMIT))
    return goals
