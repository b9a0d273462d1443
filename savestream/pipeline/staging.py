"""The staging queue: blocks are filled from the state, digested or encoded, and leave as extents.

Every lane owns its buffers and takes one block after the other. Where storage writes from worker threads, a whole lane
is one thread hop: next to a busy Python thread every hop costs a switch interval. A save that returns early first fills
all blocks (only copies; that is the trainer's stall) and then runs the same lanes over the filled buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import msgspec
import numpy as np

from savestream.pipeline.buffers import PAGE_BYTES, Bytes, StagingBuffer, StagingPool, round_up
from savestream.pipeline.codecs import RAW, FrameEncoder, digest, worst_case_bytes
from savestream.pipeline.compression_choice import CompressionChooser
from savestream.pipeline.layout import Block, Layout, Piece
from savestream.pipeline.manifest import Frames
from savestream.pipeline.sources import ChunkSources, fill_block
from savestream.pipeline.stage_clock import StageClock
from savestream.storage_backends.base import Capabilities

__all__ = ["EXTENT_TARGET_BYTES", "Extent", "Lane", "StagingQueue", "group_blocks", "lane_bytes", "new_frames"]

EXTENT_TARGET_BYTES = 8 * 1024 * 1024


class Extent(msgspec.Struct, frozen=True):
    """Bytes for one backend write. ``data`` is padded with zeros to a page; the first ``nbytes`` count.

    ``frames`` lie at ``offsets`` from its start.
    """

    data: Bytes
    nbytes: int
    frames: Sequence[int]
    offsets: Sequence[int]
    raw_bytes: int


def new_frames(layout: Layout) -> Frames:
    """Columns for every frame of the stream; lanes fill in where each went."""
    count = len(layout.frame_lengths)
    return Frames(
        raw_length=layout.frame_lengths,
        object=np.zeros(count, np.uint32),
        offset=np.zeros(count, np.int64),
        stored_length=np.zeros(count, np.int64),
        codec=np.zeros(count, np.uint8),
        itemsize=layout.frame_widths.astype(np.uint32),
        stored_digest=np.zeros((count, 16), np.uint8),
        raw_digest=np.zeros((count, 16), np.uint8),
    )


def lane_bytes(blocks: Sequence[Block], layout: Layout, *, encodes: bool, capabilities: Capabilities) -> int:
    """What one lane holds at once: its raw block and its output extent."""
    raw = max((block.buffer_bytes for block in blocks), default=0)
    return raw + (_output_bytes(layout, capabilities) if encodes or capabilities.minimum_extent_bytes else 0)


def _output_bytes(layout: Layout, capabilities: Capabilities) -> int:
    """Room for an extent; at least for one frame, and otherwise for no more than an object may hold."""
    largest = worst_case_bytes(int(layout.frame_lengths.max()) if len(layout.frame_lengths) else 0)
    wanted = round_up(max(EXTENT_TARGET_BYTES, capabilities.minimum_extent_bytes) + largest, PAGE_BYTES)
    allowed = capabilities.maximum_object_bytes // PAGE_BYTES * PAGE_BYTES
    return max(min(wanted, allowed), round_up(largest, PAGE_BYTES))


def group_blocks(blocks: Sequence[Block], *, by_chunk: bool) -> list[list[int]]:
    """Units of work for one lane. ``by_chunk`` joins blocks that share a chunk, so that it is made only once."""
    units: list[list[int]] = []
    for index, block in enumerate(blocks):
        first = block.pieces[0]
        previous = blocks[index - 1].pieces[-1] if index else None
        joins = isinstance(first, Piece) and isinstance(previous, Piece) and first.chunk == previous.chunk
        if by_chunk and joins:
            units[-1].append(index)
        else:
            units.append([index])
    return units


class StagingQueue:
    """Hands blocks to lanes and keeps what they share: frame columns, filled buffers, progress, the stop flag."""

    def __init__(
        self,
        *,
        layout: Layout,
        blocks: Sequence[Block],
        units: Sequence[Sequence[int]],
        make_sources: Callable[[], ChunkSources],
        pool: StagingPool,
        chooser: CompressionChooser,
        encodes: bool,
        capabilities: Capabilities,
        clock: StageClock,
        on_staged: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.order = layout.order.tolist()
        self.make_sources = make_sources
        self.pool = pool
        self.chooser = chooser
        self.encodes = encodes
        self.capabilities = capabilities
        self.minimum_extent_bytes = capabilities.minimum_extent_bytes
        self.clock = clock
        self.frames = new_frames(layout)
        self.stop = threading.Event()
        self.staged_bytes = 0
        self.written_bytes = 0
        self.stored_bytes = 0
        self.leftovers: list[Extent] = []
        self._on_staged = on_staged
        self._units = units
        self._next_unit = 0
        self._filled: dict[int, StagingBuffer] = {}
        self._unfilled = len(blocks)
        self._lock = threading.Lock()

    def next_unit(self) -> Sequence[int] | None:
        """The next blocks to process, or None at the end or when the save is being stopped."""
        with self._lock:
            if self.stop.is_set() or self._next_unit >= len(self._units):
                return None
            self._next_unit += 1
            return self._units[self._next_unit - 1]

    def rewind(self) -> None:
        """Start over with the first unit: the blocks are filled, now they are written."""
        self._next_unit = 0

    def fill(self, index: int, sources: ChunkSources, data: Bytes) -> None:
        """Copy one block from the state; after the last one the state may be mutated."""
        block = self.blocks[index]
        with self.clock.measure("stage", index, block.raw_bytes):
            fill_block(block, self.order, sources, data)
        sources.retain_only(self._continued_chunk(index))
        with self._lock:
            self.staged_bytes += block.raw_bytes
            self._unfilled -= 1
            all_filled = self._unfilled == 0
        if all_filled:
            self._on_staged()

    def _continued_chunk(self, index: int) -> int | None:
        """The chunk that goes on in the next block; all others have been copied and must not be held any longer."""
        pieces = [block.pieces[end] for block, end in zip(self.blocks[index : index + 2], (-1, 0), strict=False)]
        chunks = [piece.chunk if isinstance(piece, Piece) else None for piece in pieces]
        return chunks[0] if len(chunks) == 2 and chunks[0] == chunks[1] else None

    def fill_all(self) -> None:
        """Fill blocks into buffers of their own until none is left. Runs in a worker thread, several at once."""
        sources = self.make_sources()
        while (unit := self.next_unit()) is not None:
            for index in unit:
                buffer = self.pool.take(self.blocks[index].buffer_bytes)
                self.fill(index, sources, buffer.data)
                with self._lock:
                    self._filled[index] = buffer

    def take_filled(self, index: int) -> StagingBuffer | None:
        """The buffer of a block that is already filled."""
        with self._lock:
            return self._filled.pop(index, None)

    def record_written(self, extent: Extent, object_index: int, offset: int) -> None:
        """Note where an extent's frames went."""
        frames = np.asarray(extent.frames)
        self.frames.object[frames] = object_index
        self.frames.offset[frames] = np.asarray(extent.offsets, np.int64) + offset
        with self._lock:
            self.written_bytes += extent.raw_bytes
            self.stored_bytes += int(self.frames.stored_length[frames].sum())

    def drop_filled(self) -> None:
        """Give back the buffers of a save that ends early."""
        with self._lock:
            buffers, self._filled = list(self._filled.values()), {}
        for buffer in buffers:
            self.pool.give(buffer)

    def merge_leftovers(self) -> Iterator[Extent]:
        """Join the lanes' last, short extents into extents of the minimum length.

        Shorter are the last one, and one to which nothing could be added without making it larger than an object.
        """
        pending: list[Extent] = []
        held = 0
        for extent in self.leftovers:
            if pending and held + extent.nbytes > self.capabilities.maximum_object_bytes:
                yield _join(pending)
                pending, held = [], 0
            pending.append(extent)
            held += extent.nbytes
            if held >= self.minimum_extent_bytes:
                yield _join(pending)
                pending, held = [], 0
        if pending:
            yield _join(pending)
        self.leftovers = []


def _join(extents: Sequence[Extent]) -> Extent:
    total = sum(extent.nbytes for extent in extents)
    data = np.zeros(round_up(total, PAGE_BYTES), np.uint8)
    frames: list[int] = []
    offsets: list[int] = []
    position = 0
    for extent in extents:
        data[position : position + extent.nbytes] = extent.data[: extent.nbytes]
        frames.extend(extent.frames)
        offsets.extend(position + offset for offset in extent.offsets)
        position += extent.nbytes
    return Extent(data, total, frames, offsets, sum(extent.raw_bytes for extent in extents))


class Lane:
    """One worker of the queue. ``extents`` yields what is to be written; asking for the next one means it was."""

    def __init__(self, queue: StagingQueue) -> None:
        self._queue = queue
        self._encoder = FrameEncoder()
        self._output: StagingBuffer | None = None
        self._used = 0
        self._frames: list[int] = []
        self._offsets: list[int] = []
        self._raw_bytes = 0

    def extents(self) -> Iterator[Extent]:
        """Stage, digest or encode until the queue is empty. Runs in a worker thread, one step at a time."""
        queue = self._queue
        sources = queue.make_sources()
        capacity = max((block.buffer_bytes for block in queue.blocks), default=0)
        own: StagingBuffer | None = None
        while (unit := queue.next_unit()) is not None:
            for index in unit:
                buffer = queue.take_filled(index)
                if buffer is None:
                    own = own or queue.pool.take(capacity)
                    queue.fill(index, sources, own.data)
                    yield from self._emit(index, own.data)
                else:
                    yield from self._emit(index, buffer.data)
                    queue.pool.give(buffer)
        if not queue.stop.is_set():
            yield from self._finish()
        for used in (own, self._output):
            if used is not None:
                queue.pool.give(used)

    def _emit(self, index: int, data: Bytes) -> Iterator[Extent]:
        block = self._queue.blocks[index]
        if self._queue.encodes and self._queue.chooser.choose():
            yield from self._encode(index, block, data)
        else:
            self._digest(index, block, data)
            if block.positions and self._ends_at(block) < self._queue.minimum_extent_bytes:
                yield from self._append_raw(block, data)
            else:
                frames = range(block.first_frame, block.last_frame)
                end = self._ends_at(block)
                yield Extent(data[: block.buffer_bytes], end, frames, block.positions, block.raw_bytes)

    def _ends_at(self, block: Block) -> int:
        return int(block.positions[-1] + self._queue.layout.frame_lengths[block.last_frame - 1])

    def _digest(self, index: int, block: Block, data: Bytes) -> None:
        """Digests of frames that are stored as they are."""
        frames = self._queue.frames
        lengths = self._queue.layout.frame_lengths[block.first_frame : block.last_frame].tolist()
        with self._queue.clock.measure("digest", index, block.raw_bytes):
            joined = b"".join(
                [
                    digest(data[position : position + length])
                    for position, length in zip(block.positions, lengths, strict=True)
                ]
            )
        digests = np.frombuffer(joined, np.uint8).reshape(-1, 16)
        span = slice(block.first_frame, block.last_frame)
        frames.raw_digest[span] = digests
        frames.stored_digest[span] = digests
        frames.codec[span] = RAW
        frames.stored_length[span] = lengths

    def _append_raw(self, block: Block, data: Bytes) -> Generator[Extent, None, None]:
        """A raw block too short for an extent of its own: collect it."""
        lengths = self._queue.frames.raw_length
        for frame, position in zip(range(block.first_frame, block.last_frame), block.positions, strict=True):
            length = int(lengths[frame])
            target = yield from self._room_for(length)
            target[:length] = data[position : position + length]
            self._append(frame, length)
            self._raw_bytes += length

    def _encode(self, index: int, block: Block, data: Bytes) -> Iterator[Extent]:
        queue = self._queue
        frames = queue.frames
        stored = 0
        seconds = 0.0
        for frame, position in zip(range(block.first_frame, block.last_frame), block.positions, strict=True):
            length, width = int(frames.raw_length[frame]), int(frames.itemsize[frame])
            target = yield from self._room_for(worst_case_bytes(length))
            started = time.perf_counter()
            with queue.clock.measure("encode", index, length):
                coded = self._encoder.encode(data[position : position + length], width, width > 1, target)
            seconds += time.perf_counter() - started
            frames.codec[frame] = coded.codec
            frames.stored_length[frame] = coded.stored_length
            frames.stored_digest[frame] = np.frombuffer(coded.stored_digest, np.uint8)
            frames.raw_digest[frame] = np.frombuffer(coded.raw_digest, np.uint8)
            self._append(frame, coded.stored_length)
            self._raw_bytes += length
            stored += coded.stored_length
        queue.chooser.record_encode(block.raw_bytes, stored, seconds)
        if self._used >= max(EXTENT_TARGET_BYTES, queue.minimum_extent_bytes):
            yield self._take_extent()

    def _room_for(self, nbytes: int) -> Generator[Extent, None, Bytes]:
        if self._output is None:
            self._output = self._queue.pool.take(_output_bytes(self._queue.layout, self._queue.capabilities))
        if self._used + nbytes > len(self._output.data):
            yield self._take_extent()
        return self._output.data[self._used :]

    def _append(self, frame: int, stored_length: int) -> None:
        self._frames.append(frame)
        self._offsets.append(self._used)
        self._used += stored_length

    def _take_extent(self) -> Extent:
        assert self._output is not None  # noqa: S101 - only called with bytes in the output
        padded = round_up(self._used, PAGE_BYTES)
        self._output.data[self._used : padded] = 0
        extent = Extent(self._output.data[:padded], self._used, self._frames, self._offsets, self._raw_bytes)
        self._used, self._frames, self._offsets, self._raw_bytes = 0, [], [], 0
        return extent

    def _finish(self) -> Iterator[Extent]:
        if not self._used:
            return
        extent = self._take_extent()
        if extent.nbytes < self._queue.minimum_extent_bytes:
            self._queue.leftovers.append(_join([extent]))  # copied: the buffer goes back to the pool
        else:
            yield extent
