"""The data side of one rank's save: its chunks staged, encoded and written, and the index part that says where.

A save of one process and each rank of a save of many run this alike; they differ in who plans and who commits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from savestream.pipeline.buffers import StagingPool
from savestream.pipeline.commit import join_path
from savestream.pipeline.compression_choice import CompressionChooser
from savestream.pipeline.data_objects import DataObjects
from savestream.pipeline.index_part import IndexPart, ObjectEntry, PartEntry, encode_part
from savestream.pipeline.layout import FRAME_BYTES, Block, Layout, Piece, plan_layout
from savestream.pipeline.options import SaveOptions
from savestream.pipeline.sources import ChunkSources
from savestream.pipeline.stage_clock import StageClock
from savestream.pipeline.staging import StagingQueue, group_blocks, lane_bytes, new_frames
from savestream.pipeline.writer import RateLimit, fill_queue, write_queue
from savestream.storage_backends import Location
from savestream.storage_backends.base import Capabilities
from savestream.threads import run_in_worker

__all__ = ["RankChunks", "RankData", "StageMode"]

STREAM_BLOCK_BYTES = 16 * 1024 * 1024
STAGED_BLOCK_BYTES = 32 * 1024 * 1024
_STAGING_THREADS = 2

StageMode = Literal["stream", "eager", "lazy"]


class RankChunks(msgspec.Struct):
    """What a rank writes, and where its bytes come from.

    Attributes
    ----------
    layout
        Positions in the rank's raw stream.
    blocks
        Gives the layout's blocks of a size in bytes.
    sources
        Gives the elements of each chunk; called once for each thread that stages.
    made_bytes
        Bytes of each chunk, where the sources make what they give (casts, pickles), which counts as memory; None where
        they show the state's own.
    """

    layout: Layout
    blocks: Callable[[int], list[Block]]
    sources: Callable[[], ChunkSources]
    made_bytes: Sequence[int] | None


class RankData:
    """Writes one rank's data objects and its index part beneath ``save_id``; one use each.

    ``on_staged`` is called when the state may be mutated, from whatever thread finds that out.
    """

    def __init__(
        self,
        location: Location,
        save_id: str,
        rank: int,
        options: SaveOptions,
        clock: StageClock,
        *,
        mode: StageMode,
        on_staged: Callable[[], None],
    ) -> None:
        self._location = location
        self._save_id = save_id
        self._rank = rank
        self._options = options
        self._clock = clock
        self._mode = mode
        self._on_staged = on_staged
        self._raw_bytes = 0
        self.queue: StagingQueue | None = None

    async def write(self, chunks: RankChunks) -> list[ObjectEntry]:
        """Stage and write all chunks; the data objects are durable on return, and removed where this fails."""
        objects = DataObjects(self._location.backend, self._object_path)
        self._raw_bytes = chunks.layout.raw_bytes
        pool = self._options.staging_pool or StagingPool(self._options.staging_limit_bytes)
        try:
            if len(chunks.layout.frame_lengths):
                await objects.open(-1)
                await self._run_queue(chunks, objects, pool)
            else:
                self._on_staged()
            return await objects.finish()
        except BaseException:
            await objects.abort()
            raise
        finally:
            if self._options.staging_pool is None:
                pool.close()

    async def _run_queue(self, chunks: RankChunks, objects: DataObjects, pool: StagingPool) -> None:
        options = self._options
        capabilities = self._location.backend.capabilities
        encodes = options.compression != "none"
        lanes = min(options.threads, max(capabilities.write_concurrency, 1))
        limit = min(pool.limit_bytes, options.staging_limit_bytes)
        preferred = STREAM_BLOCK_BYTES if self._mode == "stream" else STAGED_BLOCK_BYTES
        preferred = max(min(preferred, capabilities.maximum_object_bytes), 1)
        lanes, block_bytes = _fit(chunks, lanes, preferred, limit, encodes, capabilities)
        blocks = chunks.blocks(block_bytes)
        lanes = min(lanes, len(blocks))
        layout = chunks.layout
        queue = self.queue = StagingQueue(
            layout=layout,
            blocks=blocks,
            units=group_blocks(blocks, by_chunk=chunks.made_bytes is not None),
            make_sources=chunks.sources,
            pool=pool,
            chooser=CompressionChooser(options.compression, lanes=lanes),
            encodes=encodes,
            capabilities=capabilities,
            clock=self._clock,
            on_staged=self._on_staged,
        )
        made = _largest_made_bytes(chunks, blocks)
        per_lane = lane_bytes(blocks, layout, encodes=encodes, capabilities=capabilities) + made
        output = per_lane - max(block.buffer_bytes for block in blocks)
        whole = sum(block.buffer_bytes for block in blocks) + lanes * output
        rate = RateLimit(options.write_bytes_per_second)
        blocking = capabilities.blocking_io
        try:
            if self._mode != "stream" and whole + _STAGING_THREADS * made <= limit:
                async with pool.reserve(whole):
                    threads = min(_STAGING_THREADS, options.threads)
                    await fill_queue(queue, threads=threads, switch_interval_seconds=options.switch_interval_seconds)
                    await write_queue(queue, objects, lanes=lanes, rate=rate, blocking_io=blocking, reserve_bytes=0)
            else:
                await write_queue(queue, objects, lanes=lanes, rate=rate, blocking_io=blocking, reserve_bytes=per_lane)
        finally:
            queue.drop_filled()

    async def put_index(self, objects: Sequence[ObjectEntry]) -> PartEntry:
        """Put the index part; what the root has to say of it."""
        data = await run_in_worker(self._encode_part, objects)
        path = self._relative(".index.json")
        await self._location.backend.put(join_path(self._location.path, path), data)
        digest = await run_in_worker(_sha256, data)
        return PartEntry(rank=self._rank, path=path, bytes=len(data), raw_bytes=self._raw_bytes, sha256=digest)

    def _encode_part(self, objects: Sequence[ObjectEntry]) -> bytes:
        frames = self.queue.frames if self.queue is not None else new_frames(plan_layout([]))
        prefix = join_path(self._location.path, "")
        relative = [ObjectEntry(path=entry.path.removeprefix(prefix), bytes=entry.bytes) for entry in objects]
        part = IndexPart(checkpoint_id=self._save_id, rank=self._rank, values=[], objects=relative, frames=frames)
        return encode_part(part)

    def _object_path(self, number: int) -> str:
        return join_path(self._location.path, self._relative(f"-{number:04d}.bin"))

    def _relative(self, suffix: str) -> str:
        return f"{self._save_id}/r{self._rank:05d}{suffix}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _largest_made_bytes(chunks: RankChunks, blocks: Sequence[Block]) -> int:
    """The most that one lane's made chunks hold at once."""
    if chunks.made_bytes is None:
        return 0
    order, largest = chunks.layout.order.tolist(), 0
    for block in blocks:
        made: set[int] = set()
        for piece in block.pieces:
            made.update([piece.chunk] if isinstance(piece, Piece) else order[piece.first : piece.last])
        largest = max(largest, sum(chunks.made_bytes[chunk] for chunk in made))
    return largest


def _fit(
    chunks: RankChunks, lanes: int, block_bytes: int, limit: int, encodes: bool, capabilities: Capabilities
) -> tuple[int, int]:
    """Lanes and block size that the budget allows; below the smallest of both a save runs alone in the budget."""
    while True:
        blocks = chunks.blocks(block_bytes)
        each = lane_bytes(blocks, chunks.layout, encodes=encodes, capabilities=capabilities)
        if lanes * each <= limit or (lanes == 1 and block_bytes <= FRAME_BYTES):
            return lanes, block_bytes
        if lanes > 1 and (lanes - 1) * each <= limit:
            lanes -= 1
        elif block_bytes > FRAME_BYTES:
            block_bytes //= 2
        else:
            lanes -= 1
