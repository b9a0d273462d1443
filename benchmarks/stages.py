"""Where the time of a save and a load goes, by savestream's own statistics. Taken apart from the timed rounds."""

from __future__ import annotations

import functools

from benchmarks.machine import Machine
from benchmarks.states import Tree
from savestream import Event, LoadFinished, SaveOptions, Statistics, blocking

__all__ = ["Stages", "stages_of_one_run"]

Stages = dict[str, dict[str, dict[str, float]]]


def stages_of_one_run(machine: Machine, directory: str, state: Tree, target: Tree, options: SaveOptions) -> Stages:
    """Save and load once more and return each stage's seconds, summed over its threads; ``wall`` is the total."""
    place = f"{directory}/checkpoint"
    machine.clear(directory)
    _, info = machine.timed(lambda: blocking.save(state, place, options=options))
    found = {"save": _table(info.statistics)}
    for name, destination in (("load into target", target), ("load new", None)):
        finished: list[Statistics] = []

        def observe(event: Event, finished: list[Statistics] = finished) -> None:
            if isinstance(event, LoadFinished):
                finished.append(event.statistics)

        machine.evict(directory)
        machine.timed(functools.partial(blocking.load, place, destination, observer=observe))
        found[name] = _table(finished[0])
    machine.clear(directory)
    return found


def _table(statistics: Statistics) -> dict[str, dict[str, float]]:
    rows = {
        name: {"busy_seconds": stage.busy_seconds, "wait_seconds": stage.wait_seconds, "GB": stage.bytes / 1e9}
        for name, stage in statistics.stages.items()
    }
    rows["wall"] = {"busy_seconds": statistics.total_seconds, "wait_seconds": 0.0, "GB": statistics.raw_bytes / 1e9}
    return rows
