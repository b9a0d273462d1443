"""``python -m benchmarks large``: a GPT-2 and its two Adam moments, saved and loaded by every system in turn."""

from __future__ import annotations

import argparse
import functools

import numpy as np

from benchmarks.floors import COPY, READ, WRITE, DiskFloors
from benchmarks.machine import Machine, describe_machine, working_directory
from benchmarks.measuring import Goal, Ratio, Samples, Turn, judge_ratio, paired_ratio, run_rounds
from benchmarks.report import Report
from benchmarks.stages import stages_of_one_run
from benchmarks.stalls import StallTurn, background_label, pool_for, stall_label
from benchmarks.states import gpt2_layers_for, gpt2_train_state, map_leaves, total_bytes
from benchmarks.systems import LOAD_INTO, LOAD_NEW, SAVE, peer_systems, run_system, savestream_system
from savestream import SaveOptions
from savestream.pipeline.options import Compression

__all__ = ["add_arguments", "run"]

STALL, BACKGROUND = stall_label("savestream"), background_label("savestream")
_QUICK = {"layers": 1, "width": 96, "vocabulary": 4096}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--layers", type=int, default=12, help="transformer layers; GPT-2 small has 12 (default)")
    size.add_argument("--gib", type=float, help="choose the number of layers by the size of the state")
    parser.add_argument("--compression", choices=["none", "auto", "zstd"], default="none", help="savestream's codec")
    parser.set_defaults(default_rounds=5)


def run(arguments: argparse.Namespace, rounds: int) -> Report:
    """Measure and judge."""
    shape = {"layers": gpt2_layers_for(arguments.gib * 2**30) if arguments.gib else arguments.layers}
    if arguments.quick:
        shape = _QUICK
    state = gpt2_train_state(**shape)
    target = map_leaves(np.zeros_like, state)
    nbytes = total_bytes(state)
    machine = Machine(2 * nbytes, drop_all_caches=not arguments.quick)
    with working_directory(arguments.root) as directory, pool_for(nbytes) as pool:
        compression: Compression = arguments.compression
        own = savestream_system(state, target, compression=compression)
        peers, absent = peer_systems(state, target)
        floors = DiskFloors(machine, f"{directory}/floors", nbytes)
        stall = StallTurn(machine, f"{directory}/stall", state, target, pool, compression)
        turns = [Turn("floors", floors.run), Turn("savestream start_save", stall.run)]
        for system in [own, *peers]:
            place = f"{directory}/{system.name}"
            turns.append(Turn(system.name, functools.partial(run_system, system, machine, place, state, target)))
        # Two saves warm the pool: the first takes fresh memory, the second finds it.
        samples = run_rounds(turns, rounds, warm_up=[*turns, turns[1]])
        return Report(
            command="large",
            parameters={**shape, "rounds": rounds, "compression": compression, "quick": arguments.quick},
            machine={**describe_machine(directory), "eviction": machine.eviction},
            samples=samples,
            data_bytes=nbytes,
            absent=absent,
            ratios=_ratios(samples),
            goals=_goals(samples),
            stages=stages_of_one_run(
                machine, f"{directory}/stages", state, target, SaveOptions(compression=compression)
            ),
            notes=[f"state: {nbytes / 2**30:.3f} GiB; cold loads by {machine.eviction}"],
        )


def _ratios(samples: Samples) -> list[Ratio]:
    own_save, own_load = f"savestream: {SAVE}", f"savestream: {LOAD_INTO}"
    own_new = f"savestream: {LOAD_NEW}"
    pairs = [
        (f"DCP: {SAVE}", own_save),
        (f"torch.save: {SAVE}", own_save),
        (f"torchsnapshot: {SAVE}", own_save),
        (f"DCP: {LOAD_INTO}", own_load),
        (f"torchsnapshot: {LOAD_INTO}", own_load),
        (f"torch.save: {LOAD_NEW}", own_load),
        (f"torch.save: {LOAD_NEW}", own_new),
        (own_save, WRITE),
        (own_load, READ),
        (own_new, READ),
        (STALL, COPY),
        (BACKGROUND, WRITE),
    ]
    return [ratio for pair in pairs if (ratio := paired_ratio(samples, *pair)) is not None]


def _goals(samples: Samples) -> list[Goal]:
    faster = paired_ratio(samples, f"DCP: {SAVE}", f"savestream: {SAVE}")
    stall = paired_ratio(samples, STALL, COPY)
    cold = paired_ratio(samples, f"savestream: {LOAD_INTO}", f"torch.save: {LOAD_NEW}")
    goals = []
    if faster is not None:
        goals.append(judge_ratio("durable save, times as fast as DCP", faster, at_least=2.0))
    if stall is not None:
        goals.append(judge_ratio("warm stall over a two-thread copy", stall, at_most=1.5))
    if cold is not None:
        goals.append(judge_ratio("cold load into a target over torch.load", cold, at_most=1.0))
    return goals
