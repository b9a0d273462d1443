"""Executes the data side of a save: runs the lanes of the staging queue against the backend's data objects."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio import from_thread

from savestream.errors import SavestreamError
from savestream.pipeline.data_objects import DataObjects, Placement
from savestream.pipeline.staging import Extent, Lane, StagingQueue
from savestream.threads import run_in_worker

__all__ = ["RateLimit", "fill_queue", "first_error", "stopping", "write_queue"]


class RateLimit:
    """Spaces writes so that their rate stays under a bound; shared by all lanes of a save."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def delay(self, nbytes: int) -> float:
        """Seconds to wait before writing ``nbytes``."""
        if self._bytes_per_second is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_second
            return start - now


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The error that a task group's failure began with: one of savestream's own before any other."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, SavestreamError)), leaves[0])


@asynccontextmanager
async def stopping(stop: threading.Event) -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group whose worker threads learn of an error or a cancellation through ``stop``; errors come unwrapped."""

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stop.set()

    try:
        async with anyio.create_task_group() as outer:
            outer.start_soon(watch)
            async with anyio.create_task_group() as group:
                yield group
            outer.cancel_scope.cancel()
    except BaseExceptionGroup as error:
        cause = first_error(error)
        raise cause from cause.__cause__


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
            for _ in range(threads):
                group.start_soon(run_in_worker, queue.fill_all)
        queue.stop.clear()
    queue.rewind()


async def write_queue(
    queue: StagingQueue, objects: DataObjects, *, lanes: int, rate: RateLimit, blocking_io: bool
) -> None:
    """Run the lanes until every block is written."""
    drive: Callable[[Lane], Awaitable[None]]
    if blocking_io:

        async def drive(lane: Lane) -> None:
            await run_in_worker(_drive_blocking, lane, queue, objects, rate)
    else:

        async def drive(lane: Lane) -> None:
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
        while placement is None:
            from_thread.run(objects.open, objects.last_index)
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
    while placement is None:
        await objects.open(objects.last_index)
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
