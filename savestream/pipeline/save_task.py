"""One save from state to commit, as it runs on the engine."""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

import anyio

from savestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveTimeoutError,
    StorageError,
)
from savestream.events import OperationFailed, SaveCommitted, SavePlanned, SaveStaged, Statistics, notify
from savestream.pipeline.arguments import exclusive
from savestream.pipeline.buffers import StagingPool
from savestream.pipeline.codecs import CODECS
from savestream.pipeline.commit import (
    describe,
    discard,
    join_path,
    new_save_id,
    own_root,
    publish,
    read_root,
)
from savestream.pipeline.compiled_plan import CompiledPlan
from savestream.pipeline.compression_choice import CompressionChooser
from savestream.pipeline.data_objects import DataObjects
from savestream.pipeline.layout import FRAME_BYTES, plan_layout
from savestream.pipeline.manifest import IndexPart, ObjectEntry, PartEntry, Root, encode_part, encode_root
from savestream.pipeline.preparation import Prepared, created_bytes, no_sources, prepare
from savestream.pipeline.save_request import CheckpointInfo, Progress, SaveRequest
from savestream.pipeline.stage_clock import StageClock
from savestream.pipeline.staging import StagingQueue, group_blocks, lane_bytes, new_frames
from savestream.pipeline.writer import RateLimit, fill_queue, write_queue
from savestream.planners.default import DefaultSavePlanner
from savestream.planners.metadata import StorageMeta
from savestream.storage_backends.base import Capabilities, ObjectInfo
from savestream.threads import forget_frames, run_in_worker
from savestream.version import __version__

__all__ = ["SaveTask"]

logger = logging.getLogger("savestream")

STREAM_BLOCK_BYTES = 16 * 1024 * 1024
STAGED_BLOCK_BYTES = 32 * 1024 * 1024
_STAGING_THREADS = 2

StageMode = Literal["stream", "eager", "lazy"]


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
        self._queue: StagingQueue | None = None
        self._final_progress = Progress(0, 0, 0)
        self._staged_seconds: float | None = None

    @property
    def place(self) -> str:
        return describe(self._request.location)

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
            self._request.state = self._queue = self._prepared = None

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
        if self._queue is not None:
            self._queue.make_sources = no_sources

    async def _run(self) -> CheckpointInfo:
        request = self._request
        replaces, superseded = await self._examine_destination()
        prepared = self._prepared = await run_in_worker(self._prepare)
        self._request.state = None
        if self._mode == "lazy":
            self.milestone.set_result(None)
        raw_bytes = prepared.compiled.layout.raw_bytes
        items = len(prepared.compiled.chunk_items) + len(prepared.compiled.value_items)
        notify(request.observer, SavePlanned(self.place, items, raw_bytes, prepared.from_cache))
        committing = False
        try:
            objects = await self._write_data(prepared)
            with self._clock.measure("commit", 0, 0):
                root = await self._write_index(prepared, objects)
                committing = True
                await publish(
                    request.location,
                    root,
                    save_id=self._save_id,
                    overwrite=request.overwrite,
                    replaces=replaces,
                    superseded=superseded,
                )
        except BaseException as error:
            if not (committing and isinstance(error, StorageError) and error.outcome == "unknown"):
                await self._discard()
            raise
        await self._tell_planner()
        return self._committed(prepared)

    async def _examine_destination(self) -> tuple[ObjectInfo | None, str | None]:
        request = self._request
        existing = await own_root(request.location)
        if existing is None:
            return None, None
        if not request.overwrite:
            raise CheckpointExistsError(
                f"{self.place}: a checkpoint is already there; save elsewhere, or pass overwrite=True to replace it"
            )
        try:
            return existing, (await read_root(request.location)).checkpoint_id
        except CheckpointNotFoundError:
            return None, None  # deleted just now
        except CorruptCheckpointError:
            return existing, None  # replaced all the same; data that a damaged root cannot name stays

    def _prepare(self) -> Prepared:
        with self._clock.measure("plan", 0, 0):
            return prepare(self._request, StorageMeta(checkpoint_id=self.place, save_id=self._save_id))

    async def _write_data(self, prepared: Prepared) -> list[ObjectEntry]:
        request, options = self._request, self._request.options
        objects = DataObjects(request.location.backend, self._object_path)
        pool = options.staging_pool or StagingPool(options.staging_limit_bytes)
        try:
            if len(prepared.compiled.layout.frame_lengths):
                await objects.open(-1)
                await self._run_queue(prepared, objects, pool)
            else:
                self._mark_staged()
            return await objects.finish()
        except BaseException:
            await objects.abort()
            raise
        finally:
            if options.staging_pool is None:
                pool.close()

    async def _run_queue(self, prepared: Prepared, objects: DataObjects, pool: StagingPool) -> None:
        options = self._request.options
        capabilities = self._request.location.backend.capabilities
        encodes = options.compression != "none"
        lanes = min(options.threads, max(capabilities.write_concurrency, 1))
        limit = min(pool.limit_bytes, options.staging_limit_bytes)
        preferred = STREAM_BLOCK_BYTES if self._mode == "stream" else STAGED_BLOCK_BYTES
        preferred = max(min(preferred, capabilities.maximum_object_bytes), 1)
        lanes, block_bytes = _fit(prepared.compiled, lanes, preferred, limit, encodes, capabilities)
        blocks = prepared.compiled.blocks(block_bytes)
        lanes = min(lanes, len(blocks))
        layout = prepared.compiled.layout
        queue = self._queue = StagingQueue(
            layout=layout,
            blocks=blocks,
            units=group_blocks(blocks, by_chunk=prepared.creates),
            make_sources=prepared.sources,
            pool=pool,
            chooser=CompressionChooser(options.compression, lanes=lanes),
            encodes=encodes,
            capabilities=capabilities,
            clock=self._clock,
            on_staged=self._mark_staged,
        )
        created = created_bytes(prepared, blocks)
        per_lane = lane_bytes(blocks, layout, encodes=encodes, capabilities=capabilities) + created
        output = per_lane - max(block.buffer_bytes for block in blocks)
        whole = sum(block.buffer_bytes for block in blocks) + lanes * output
        rate = RateLimit(options.write_bytes_per_second)
        blocking = capabilities.blocking_io
        try:
            if self._mode != "stream" and whole + _STAGING_THREADS * created <= limit:
                async with pool.reserve(whole):
                    threads = min(_STAGING_THREADS, options.threads)
                    await fill_queue(queue, threads=threads, switch_interval_seconds=options.switch_interval_seconds)
                    await write_queue(queue, objects, lanes=lanes, rate=rate, blocking_io=blocking, reserve_bytes=0)
            else:
                await write_queue(queue, objects, lanes=lanes, rate=rate, blocking_io=blocking, reserve_bytes=per_lane)
        finally:
            queue.drop_filled()

    def _mark_staged(self) -> None:
        self._staged_seconds = self._clock.elapsed_seconds
        self._release_state()
        for future in (self.staged, self.milestone):
            if not future.done():
                future.set_result(None)
        notify(self._request.observer, SaveStaged(self.place, self._staged_seconds))

    def _object_path(self, number: int) -> str:
        return join_path(self._request.location.path, self._relative(f"-{number:04d}.bin"))

    def _relative(self, suffix: str) -> str:
        return f"{self._save_id}/r{self._request.coordinator.rank:05d}{suffix}"

    async def _write_index(self, prepared: Prepared, objects: Sequence[ObjectEntry]) -> bytes:
        """Put this rank's index part and return the root that commits it."""
        location = self._request.location
        part = await run_in_worker(self._encode_part, objects)
        path = self._relative(".index.json")
        await location.backend.put(join_path(location.path, path), part)
        return await run_in_worker(self._encode_root, prepared, part, path)

    def _encode_part(self, objects: Sequence[ObjectEntry]) -> bytes:
        frames = self._queue.frames if self._queue is not None else new_frames(plan_layout([]))
        prefix = join_path(self._request.location.path, "")
        relative = [ObjectEntry(path=entry.path.removeprefix(prefix), bytes=entry.bytes) for entry in objects]
        part = IndexPart(
            checkpoint_id=self._save_id,
            rank=self._request.coordinator.rank,
            values=[],
            objects=relative,
            frames=frames,
        )
        return encode_part(part)

    def _encode_root(self, prepared: Prepared, part: bytes, path: str) -> bytes:
        request = self._request
        entry = PartEntry(
            rank=request.coordinator.rank,
            path=path,
            bytes=len(part),
            raw_bytes=prepared.compiled.layout.raw_bytes,
            sha256=hashlib.sha256(part).hexdigest(),
        )
        root = Root(
            checkpoint_id=self._save_id,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            writer=f"savestream {__version__}",
            step=request.step,
            metrics=prepared.metrics,
            user=prepared.user,
            world_size=request.coordinator.world_size,
            fingerprint=prepared.fingerprint.hex() if prepared.fingerprint is not None else "",
            codecs=list(CODECS),
            parts=[entry],
            values=prepared.values,
        )
        return encode_root(root, prepared.compiled.section)

    async def _discard(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await discard(self._request.location, self._save_id)
            except Exception:  # the error that led here must reach the caller; what is left bears this save's id alone
                logger.warning("%s: data of a failed save stays behind", self.place, exc_info=True)

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


def _fit(
    compiled: CompiledPlan, lanes: int, block_bytes: int, limit: int, encodes: bool, capabilities: Capabilities
) -> tuple[int, int]:
    """Lanes and block size that the budget allows; below the smallest of both a save runs alone in the budget."""
    while True:
        blocks = compiled.blocks(block_bytes)
        each = lane_bytes(blocks, compiled.layout, encodes=encodes, capabilities=capabilities)
        if lanes * each <= limit or (lanes == 1 and block_bytes <= FRAME_BYTES):
            return lanes, block_bytes
        if lanes > 1 and (lanes - 1) * each <= limit:
            lanes -= 1
        elif block_bytes > FRAME_BYTES:
            block_bytes //= 2
        else:
            lanes -= 1
