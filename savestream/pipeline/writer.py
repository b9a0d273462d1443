"""Executes the data side of a save: runs the lanes of the staging queue against the backend's data objects."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from anyio import CapacityLimiter, from_thread

from savestream.pipeline.data_objects import DataObjects, Placement
from savestream.pipeline.staging import Extent, Lane, StagingQueue
from savestream.threads import run_in_worker, stopping

__all__ = ["RateLimit", "fill_queue", "switch_interval", "write_queue"]


class RateLimit:
    """Spaces writes so that their rate stays under a bound; shared by all lanes of a save."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def delay(self, nbytes: int) -> float:
        """Seconds to wait before writing ``nbytes``: until the bound would let them have been written."""
        if self._bytes_per_second is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_second
            return self._free_at - now


@contextmanager
def switch_interval(seconds: float | None) -> Iterator[None]:
    """Python's thread switch interval, restored on leaving."""
    if seconds is None:
        yield
        return
    previous = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)


async def fill_queue(queue: StagingQueue, *, threads: int, switch_interval_seconds: float | None) -> None:
    """Copy the whole state into staging buffers; on return it may be mutated."""
    with switch_interval(switch_interval_seconds):
        async with stopping(queue.stop) as group:
            limiter = CapacityLimiter(threads)
            for _ in range(threads):
                group.start_soon(functools.partial(run_in_worker, queue.fill_all, limiter=limiter))
        queue.stop.clear()
    queue.rewind()


async def write_queue(
    queue: StagingQueue, objects: DataObjects, *, lanes: int, rate: RateLimit, blocking_io: bool, reserve_bytes: int
) -> None:
    """Run the lanes until every block is written; each holds ``reserve_bytes`` of the budget while it runs."""
    limiter = CapacityLimiter(lanes)  # of its own: lanes hold their threads for long, others' short calls must go on

    async def drive(lane: Lane) -> None:
        waited = time.perf_counter()
        async with queue.pool.reserve(reserve_bytes):
            queue.clock.add_wait("stage", time.perf_counter() - waited)
            if blocking_io:
                await run_in_worker(_drive_blocking, lane, queue, objects, rate, limiter=limiter)
            else:
                await _drive_async(lane, queue, objects, rate)

    async with stopping(queue.stop) as group:
        for _ in range(lanes):
            group.start_soon(drive, Lane(queue))
    for extent in queue.merge_leftovers():
        await _write(extent, queue, objects, rate)


def _drive_blocking(lane: Lane, queue: StagingQueue, objects: DataObjects, rate: RateLimit) -> None:
    """A whole lane in one thread hop."""
    for extent in lane.extents():
        delay = rate.delay(extent.nbytes)
        if delay:
            queue.clock.add_wait("write", delay)
        if queue.stop.wait(delay) if delay else queue.stop.is_set():
            return
        placement = objects.place(extent.nbytes)
        while isinstance(placement, int):
            from_thread.run(objects.open, placement)
            placement = objects.place(extent.nbytes)
        started = time.perf_counter()
        with queue.clock.measure("write", _block_of(extent), extent.nbytes):
            placement.writer.write_blocking(placement.offset, objects.payload(extent.data, extent.nbytes))
        _written(extent, queue, placement, started)


async def _drive_async(lane: Lane, queue: StagingQueue, objects: DataObjects, rate: RateLimit) -> None:
    """One hop for each extent's staging and encoding; the write is awaited on the engine's loop."""
    extents = lane.extents()
    while (extent := await run_in_worker(next, extents, None)) is not None:
        await _write(extent, queue, objects, rate)


async def _write(extent: Extent, queue: StagingQueue, objects: DataObjects, rate: RateLimit) -> None:
    delay = rate.delay(extent.nbytes)
    if delay:
        queue.clock.add_wait("write", delay)
        await anyio.sleep(delay)
    placement = objects.place(extent.nbytes)
    while isinstance(placement, int):
        await objects.open(placement)
        placement = objects.place(extent.nbytes)
    started = time.perf_counter()
    with queue.clock.measure("write", _block_of(extent), extent.nbytes):
        await placement.writer.write(placement.offset, objects.payload(extent.data, extent.nbytes))
    _written(extent, queue, placement, started)


def _written(extent: Extent, queue: StagingQueue, placement: Placement, started: float) -> None:
    queue.chooser.record_write(extent.nbytes, time.perf_counter() - started)
    queue.record_written(extent, placement.object_index, placement.offset)


def _block_of(extent: Extent) -> int:
    return int(extent.frames[0]) if len(extent.frames) else 0
