"""A foreign state saved as a checkpoint, and compared with its source before it becomes visible."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import anyio
import msgspec

from savestream.errors import SaveTimeoutError
from savestream.events import Observer, OperationFailed, StageStatistics, Statistics, notify
from savestream.interchange.comparison import compare_with_source
from savestream.interchange.foreign import ForeignFiles, ForeignState
from savestream.pipeline.commit import describe
from savestream.pipeline.coordination import choose_coordinator
from savestream.pipeline.manifest import decode_root
from savestream.pipeline.open_checkpoint import OpenCheckpoint
from savestream.pipeline.options import SaveOptions
from savestream.pipeline.rank_commit import RootContent, encode_content, examine_destination
from savestream.pipeline.save_request import CheckpointInfo, SaveRequest
from savestream.pipeline.save_task import SaveTask
from savestream.storage_backends import Location
from savestream.threads import run_in_worker, stopping

__all__ = ["Conversion", "ConversionInfo"]

logger = logging.getLogger("savestream")


class ConversionInfo(CheckpointInfo, frozen=True):
    """A committed conversion.

    Attributes
    ----------
    statistics
        With two stages more than those of a save: ``inspect``, what went before it, and ``verify``.
    skipped
        Keys that ``on_unsupported="skip"`` left out.
    """

    skipped: tuple[str, ...] = ()


class Conversion(msgspec.Struct):
    """The caller's arguments, and ``read``, which finds the foreign state (in a worker thread)."""

    operation: str
    read: Callable[[ForeignFiles], ForeignState]
    location: Location
    options: SaveOptions
    overwrite: bool
    verify: bool
    observer: Observer | None

    async def run(self) -> ConversionInfo:
        """Convert, or raise and leave nothing behind."""
        files = ForeignFiles()
        started = perf_counter()
        try:
            foreign = await self._read_within(self.options.timeout_seconds, files)
            seconds = perf_counter() - started
            info = await self._save(foreign, seconds)
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_worker(files.close)
        if foreign.skipped:
            reasons = "; ".join(foreign.skipped.values())
            logger.warning("%s: %d key(s) were left out: %s", info.location, len(foreign.skipped), reasons[:2000])
        statistics = _with_inspection(info.statistics, seconds)
        return ConversionInfo(info.location, info.save_id, info.step, statistics, tuple(foreign.skipped))

    async def _read_within(self, timeout_seconds: float | None, files: ForeignFiles) -> ForeignState:
        with anyio.move_on_after(timeout_seconds):
            return await self._read(files)
        raise SaveTimeoutError(
            f"{describe(self.location)}: looking at the source took longer than timeout_seconds={timeout_seconds}; "
            "nothing was written"
        )

    async def _read(self, files: ForeignFiles) -> ForeignState:
        try:
            await examine_destination(self.location, overwrite=self.overwrite)
            found: list[ForeignState] = []
            async with stopping(files.stop) as group:
                group.start_soon(functools.partial(run_in_worker, lambda: found.append(self.read(files))))
        except BaseException as error:
            notify(self.observer, OperationFailed(self.operation, describe(self.location), repr(error)))
            raise
        files.stop.clear()
        return found[0]

    async def _save(self, foreign: ForeignState, seconds_gone: float) -> CheckpointInfo:
        timeout = self.options.timeout_seconds
        left = None if timeout is None else max(timeout - seconds_gone, 1e-9)
        request = SaveRequest(
            state=foreign.state,
            location=self.location,
            options=msgspec.structs.replace(self.options, timeout_seconds=left),
            planner=None,
            plan_cache=None,
            coordinator=choose_coordinator(None),
            metadata=foreign.metadata,
            metrics=None,
            step=None,
            overwrite=self.overwrite,
            observer=self.observer,
        )
        return await _ConversionTask(request, foreign.state, self.verify).run()


def _with_inspection(statistics: Statistics, seconds: float) -> Statistics:
    """Count the time that went before the save."""
    stages = {"inspect": StageStatistics(busy_seconds=seconds, operations=1), **statistics.stages}
    return msgspec.structs.replace(statistics, stages=stages, total_seconds=statistics.total_seconds + seconds)


class _ConversionTask(SaveTask):
    """A save that reads back what it wrote and compares it with the source, before anybody else can see it."""

    def __init__(self, request: SaveRequest, state: Any, verify: bool) -> None:
        super().__init__(request, "stream")
        self._state = state
        self._verify = verify

    async def check_before_commit(self, content: RootContent, section: bytes) -> None:
        if not self._verify:
            return
        with self._clock.measure("verify", 0, sum(part.raw_bytes for part in content.parts)):
            root = decode_root(await run_in_worker(encode_content, content, section))
            checkpoint = OpenCheckpoint(self._request.location, root)
            await compare_with_source(checkpoint, self._state, self._request.options.allow_pickle)
