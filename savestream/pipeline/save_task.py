"""One save from state to commit, as it runs on the engine."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import anyio

from savestream.errors import SaveTimeoutError
from savestream.events import OperationFailed, SaveCommitted, SavePlanned, SaveStaged, Statistics, notify
from savestream.pipeline.arguments import exclusive
from savestream.pipeline.commit import describe, new_save_id
from savestream.pipeline.index_part import PartEntry
from savestream.pipeline.preparation import Prepared, no_sources, prepare
from savestream.pipeline.rank_commit import (
    RootContent,
    commit_root,
    discard_quietly,
    examine_destination,
    may_be_visible,
)
from savestream.pipeline.rank_data import RankChunks, RankData, StageMode
from savestream.pipeline.save_request import CheckpointInfo, Progress, SaveRequest
from savestream.pipeline.stage_clock import StageClock
from savestream.pipeline.staging import StagingQueue
from savestream.planners.default import DefaultSavePlanner
from savestream.planners.metadata import StorageMeta
from savestream.threads import forget_frames, run_in_worker

__all__ = ["SaveTask"]

logger = logging.getLogger("savestream")


class SaveTask:
    """Runs one save. ``milestone`` resolves when the state may be mutated, or (lazily staged) when it is planned."""

    def __init__(self, request: SaveRequest, mode: StageMode) -> None:
        self._request = request
        self._mode = mode
        self.milestone: Future[None] = Future()
        self.staged: Future[None] = Future()
        self._save_id = new_save_id()
        self._clock = StageClock(request.observer)
        self._prepared: Prepared | None = None
        self._data: RankData | None = None
        self._final_progress = Progress(0, 0, 0)
        self._staged_seconds: float | None = None

    @property
    def place(self) -> str:
        return describe(self._request.location)

    @property
    def _queue(self) -> StagingQueue | None:
        data = self._data
        return data.queue if data is not None else None

    def progress(self) -> Progress:
        """Safe from any thread."""
        queue = self._queue
        if queue is None:
            return self._final_progress
        return Progress(queue.staged_bytes, queue.written_bytes, queue.layout.raw_bytes)

    async def run(self) -> CheckpointInfo:
        """Save, or raise and leave nothing visible behind."""
        timeout = self._request.options.timeout_seconds
        try:
            with exclusive(self._request.planner):
                try:
                    return await self._run_within(timeout)
                finally:
                    self._release_state()
        except BaseException as error:
            notify(self._request.observer, OperationFailed("save", self.place, repr(error)))
            forget_frames(error)
            raise
        finally:
            # A handle, or an error's traceback, that outlives the save keeps none of its memory.
            self._final_progress = self.progress()
            self._request.state = self._data = self._prepared = None

    async def _run_within(self, timeout_seconds: float | None) -> CheckpointInfo:
        with anyio.move_on_after(timeout_seconds):
            return await self._run()
        raise SaveTimeoutError(
            f"{self.place}: the save took longer than timeout_seconds={timeout_seconds} and was abandoned; nothing "
            "became visible"
        )

    def _release_state(self) -> None:
        """Let go of the caller's arrays; only while the planner serves this save."""
        self._request.state = None
        if self._prepared is not None:
            self._prepared.release()
        elif isinstance(self._request.planner, DefaultSavePlanner):  # planning failed
            self._request.planner.release_state()
        if (queue := self._queue) is not None:
            queue.make_sources = no_sources

    async def _run(self) -> CheckpointInfo:
        request = self._request
        standing = await examine_destination(request.location, overwrite=request.overwrite)
        prepared = self._prepared = await run_in_worker(self._prepare)
        self._request.state = None
        if self._mode == "lazy":
            self.milestone.set_result(None)
        raw_bytes = prepared.compiled.layout.raw_bytes
        items = len(prepared.compiled.chunk_items) + len(prepared.compiled.value_items)
        notify(request.observer, SavePlanned(self.place, items, raw_bytes, prepared.from_cache))
        committing = False
        try:
            data = self._data = self._rank_data()
            objects = await data.write(_chunks(prepared))
            with self._clock.measure("commit", 0, 0):
                content = self._root_content(prepared, await data.put_index(objects))
            section = prepared.compiled.section
            await self.check_before_commit(content, section)
            with self._clock.measure("commit", 0, 0):
                committing = True
                await commit_root(request.location, content, section, standing=standing, overwrite=request.overwrite)
        except BaseException as error:
            if not (committing and may_be_visible(error)):
                await discard_quietly(request.location, self._save_id)
            raise
        await self._tell_planner()
        return self._committed(prepared)

    async def check_before_commit(self, content: RootContent, section: bytes) -> None:
        """Called when everything but the root is durable; to raise is to give the save up. For subclasses."""

    def _rank_data(self) -> RankData:
        request = self._request
        return RankData(
            request.location,
            self._save_id,
            request.coordinator.rank,
            request.options,
            self._clock,
            mode=self._mode,
            on_staged=self._mark_staged,
        )

    def _root_content(self, prepared: Prepared, part: PartEntry) -> RootContent:
        return RootContent(
            save_id=self._save_id,
            parts=[part],
            values=prepared.values,
            world_size=self._request.coordinator.world_size,
            user=prepared.user,
            step=self._request.step,
            metrics=prepared.metrics,
            fingerprint=prepared.fingerprint,
        )

    def _prepare(self) -> Prepared:
        with self._clock.measure("plan", 0, 0):
            return prepare(self._request, StorageMeta(checkpoint_id=self.place, save_id=self._save_id))

    def _mark_staged(self) -> None:
        self._staged_seconds = self._clock.elapsed_seconds
        self._release_state()
        for future in (self.staged, self.milestone):
            if not future.done():
                future.set_result(None)
        notify(self._request.observer, SaveStaged(self.place, self._staged_seconds))

    async def _tell_planner(self) -> None:
        planner = self._request.planner
        if planner is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                await run_in_worker(planner.commit_plan)
            except Exception:  # the checkpoint stands, so the save has not failed, whatever the planner says afterwards
                logger.exception("%s: committed, but the planner's commit_plan failed", self.place)

    def _committed(self, prepared: Prepared) -> CheckpointInfo:
        request = self._request
        if request.plan_cache is not None and prepared.fingerprint is not None:
            request.plan_cache.put(prepared.fingerprint, prepared.compiled)
        queue = self._queue
        statistics = Statistics(
            stages=self._clock.snapshot(),
            total_seconds=self._clock.elapsed_seconds,
            staged_seconds=self._staged_seconds,
            raw_bytes=prepared.compiled.layout.raw_bytes,
            stored_bytes=queue.stored_bytes if queue is not None else 0,
            plan_cached=prepared.from_cache,
            compression_choice=queue.chooser.explain() if queue is not None else "nothing to compress",
        )
        notify(request.observer, SaveCommitted(self.place, self._save_id, statistics))
        return CheckpointInfo(self.place, self._save_id, request.step, statistics)


def _chunks(prepared: Prepared) -> RankChunks:
    compiled = prepared.compiled
    made = [item.chunk_nbytes for item in compiled.chunk_items] if prepared.creates else None
    return RankChunks(compiled.layout, compiled.blocks, prepared.sources, made)
