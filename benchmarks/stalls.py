"""How long ``start_save`` holds a trainer up, next to a plain copy of the same state."""

from __future__ import annotations

import statistics
import time

from benchmarks.floors import COPY, MemoryFloor
from benchmarks.machine import Machine, make_durable
from benchmarks.states import Tree, poison, require_equal
from savestream import PlanCache, SaveOptions, StagingPool, blocking
from savestream.pipeline.options import Compression

__all__ = ["StallTurn", "background_label", "pool_for", "stall_label"]

_MEBIBYTE = 1 << 20
_STALLS_PER_ROUND = 3


def stall_label(name: str) -> str:
    return f"{name}: start_save stall, warm pool"


def background_label(name: str) -> str:
    return f"{name}: start_save until durable"


def pool_for(nbytes: int) -> StagingPool:
    """Room for the whole state and what the writing lanes hold beside it."""
    return StagingPool(nbytes + nbytes // 4 + 256 * _MEBIBYTE)


class StallTurn:
    """What a trainer waits for: ``start_save`` into a warm pool, next to a plain copy of the same state.

    ``saved`` are the same values as leaves of another kind, where not the numpy arrays themselves are saved.
    """

    def __init__(
        self,
        machine: Machine,
        directory: str,
        state: Tree,
        target: Tree,
        pool: StagingPool,
        compression: Compression,
        name: str = "savestream",
        saved: Tree | None = None,
    ) -> None:
        self._machine = machine
        self._name = name
        self._directory = directory
        self._place = f"{directory}/checkpoint"
        self._state = state
        self._saved = state if saved is None else saved
        self._target = target
        self._options = SaveOptions(compression=compression, staging_pool=pool)
        self._cache = PlanCache()
        self._floor = MemoryFloor(state)

    def run(self) -> dict[str, float]:
        """A few copies and saves in alternation, since each is so short; their medians are the round's samples."""
        samples: dict[str, list[float]] = {COPY: [], stall_label(self._name): [], background_label(self._name): []}
        for _ in range(_STALLS_PER_ROUND):
            self._once(samples)
        require_equal(blocking.load(self._place, self._target), self._state, "start_save")
        self._machine.clear(self._directory)
        return {name: statistics.median(values) for name, values in samples.items()}

    def _once(self, samples: dict[str, list[float]]) -> None:
        self._machine.clear(self._directory)
        poison(self._target)
        samples[COPY].append(self._floor.seconds())
        stalled, handle = self._machine.timed(
            lambda: blocking.start_save(self._saved, self._place, options=self._options, plan_cache=self._cache)
        )
        started = time.perf_counter()
        handle.result()
        make_durable(self._directory)
        samples[stall_label(self._name)].append(stalled)
        samples[background_label(self._name)].append(stalled + time.perf_counter() - started)
