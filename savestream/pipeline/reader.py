"""Executes the data side of a load: which frames are needed, in which ranges they are read, checked and placed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np

from savestream.arrays import HostArray, as_plain_elements, dtype_from_name
from savestream.errors import CorruptCheckpointError
from savestream.events import RangeRead, notify
from savestream.pipeline.buffers import PAGE_BYTES, Bytes, StagingBuffer, round_up
from savestream.pipeline.codecs import RAW, FrameDecoder, digest
from savestream.pipeline.data_readers import DataReaders
from savestream.pipeline.limits import MAXIMUM_FRAME_BYTES
from savestream.pipeline.manifest import Frames
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint
from savestream.pipeline.placement import box_spans, place_elements
from savestream.pipeline.stage_clock import StageClock
from savestream.storage_backends.base import ObjectReader
from savestream.threads import run_in_worker, stopping

__all__ = [
    "Destination",
    "FrameRange",
    "affected_keys",
    "destination",
    "plan_ranges",
    "preferred_range_bytes",
    "read_ranges",
]

_BOUNCE_BYTES = 4 * 1024 * 1024
_DIRECT_FROM_BYTES = 1024 * 1024


class Destination(msgspec.Struct, gc=False):
    """A box of a stored chunk and the array that takes it.

    ``array`` has the shape ``lengths``. ``plain``: it takes the whole chunk as it is stored, byte for byte, in C order;
    ``direct`` is then its memory as bytes where storage can read straight into it.
    """

    key: str
    array: HostArray
    chunk: ChunkLocation
    dtype: np.dtype[Any]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    whole: bool
    plain: bool = False
    direct: Bytes | None = None


class FrameRange(msgspec.Struct, gc=False):
    """Neighbouring frames of one object, read at once. ``direct`` is where their bytes belong, if they are raw."""

    part: int
    object_index: int
    offset: int
    nbytes: int
    frames: list[int]
    direct: Bytes | None = None


def destination(
    key: str, array: HostArray, chunk: ChunkLocation, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> Destination:
    """Describe where a box goes; ``array`` may have another dtype than the chunk, then elements are cast."""
    stored = dtype_from_name(chunk.dtype)
    whole = lengths == chunk.sizes
    if array.dtype is not stored and array.dtype != stored:
        return Destination(key, array, chunk, stored, offsets, lengths, whole)
    if stored.names is not None:
        array, stored = as_plain_elements(array), np.dtype((np.void, stored.itemsize))
    plain = whole and array.flags.c_contiguous
    direct = None
    if plain and chunk.nbytes >= _DIRECT_FROM_BYTES and array.ctypes.data % PAGE_BYTES == 0:
        direct = array.reshape(-1).view(np.uint8)
    return Destination(key, array, chunk, stored, offsets, lengths, whole, plain, direct)


def plan_ranges(
    frames: Frames, part: int, targets: Sequence[Destination], *, range_bytes: int, gap_bytes: int
) -> tuple[list[FrameRange], dict[int, list[int]]]:
    """The ranges to read for one part, and which destinations each frame feeds."""
    users: dict[int, list[int]] = {}
    offsets = np.fromiter((target.chunk.raw_offset for target in targets), np.int64, len(targets))
    sizes = np.fromiter((target.chunk.nbytes for target in targets), np.int64, len(targets))
    firsts = (np.searchsorted(frames.raw_starts, offsets, "right") - 1).tolist()
    lasts = np.searchsorted(frames.raw_starts, offsets + sizes, "left").tolist()
    for number, target in enumerate(targets):
        first, last = firsts[number], lasts[number]
        if last - first == 1 and target.chunk.nbytes:
            users.setdefault(first, []).append(number)
            continue
        for start, stop in [(first, last)] if target.whole else _frame_spans(frames, target):
            for frame in range(start, stop):
                users.setdefault(frame, []).append(number)
    needed = sorted(users, key=lambda frame: (int(frames.object[frame]), int(frames.offset[frame])))
    return _coalesce(frames, part, needed, users, targets, range_bytes, gap_bytes), users


def _frame_spans(frames: Frames, target: Destination) -> Iterator[tuple[int, int]]:
    """Runs of frames that hold the box; none twice."""
    spans = box_spans(target.chunk.sizes, target.offsets, target.lengths, target.dtype.itemsize)
    seen = -1
    for start, stop in spans:
        base = target.chunk.raw_offset
        first = int(np.searchsorted(frames.raw_starts, base + start, "right")) - 1
        last = int(np.searchsorted(frames.raw_starts, base + stop, "left"))
        yield max(first, seen), last
        seen = max(seen, last)


def _coalesce(
    frames: Frames,
    part: int,
    needed: Sequence[int],
    users: dict[int, list[int]],
    targets: Sequence[Destination],
    range_bytes: int,
    gap_bytes: int,
) -> list[FrameRange]:
    ranges: list[FrameRange] = []
    objects, offsets, lengths = frames.object.tolist(), frames.offset.tolist(), frames.stored_length.tolist()
    owner: int | None = None
    for frame in needed:
        taker = _direct_taker(frames, frame, users[frame], targets)
        current = ranges[-1] if ranges else None
        if current is not None and current.object_index == objects[frame] and owner == taker:
            gap = offsets[frame] - current.offset - current.nbytes
            end = offsets[frame] + lengths[frame] - current.offset
            follows = gap == 0 and frame == current.frames[-1] + 1
            if end <= range_bytes and (follows if taker is not None else 0 <= gap <= gap_bytes):
                current.frames.append(frame)
                current.nbytes = end
                continue
        ranges.append(FrameRange(part, objects[frame], offsets[frame], lengths[frame], [frame]))
        owner = taker
        if taker is not None:
            memory = targets[taker].direct
            start = int(frames.raw_starts[frame]) - targets[taker].chunk.raw_offset
            ranges[-1].direct = memory[start:] if memory is not None else None
    return ranges


def _direct_taker(frames: Frames, frame: int, users: Sequence[int], targets: Sequence[Destination]) -> int | None:
    """The one destination whose memory can be read into as the frame lies in storage, or None."""
    target = targets[users[0]]
    if len(users) != 1 or target.direct is None or int(frames.codec[frame]) != RAW:
        return None
    start = int(frames.raw_starts[frame]) - target.chunk.raw_offset
    stop = int(frames.raw_starts[frame + 1]) - target.chunk.raw_offset
    inside = start >= 0 and stop <= target.chunk.nbytes
    aligned = start % PAGE_BYTES == 0 and int(frames.offset[frame]) % PAGE_BYTES == 0
    return users[0] if inside and aligned else None


class _RangeReader:
    """Works through ranges; one object for each thread, since it owns a buffer and a decoder."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]],
        clock: StageClock,
        verify: bool,
        on_problem: Callable[[CorruptCheckpointError], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._targets = targets
        self._clock = clock
        self._verify = verify
        self._on_problem = on_problem
        self._decoder = FrameDecoder()
        self._buffer: StagingBuffer | None = None
        self._decoded: StagingBuffer | None = None

    def window(self, piece: FrameRange, size_bytes: int) -> tuple[int, Bytes, Bytes]:
        """Where to read: start, the memory to fill, and the part of it that is the range itself."""
        if piece.direct is not None:
            memory = piece.direct[: piece.nbytes]
            return piece.offset, memory, memory
        start = piece.offset // PAGE_BYTES * PAGE_BYTES
        stop = min(round_up(piece.offset + piece.nbytes, PAGE_BYTES), size_bytes)
        capacity = round_up(stop - start, PAGE_BYTES)
        if self._buffer is None or len(self._buffer.data) < capacity:
            self._buffer = StagingBuffer(max(capacity, _BOUNCE_BYTES + 2 * PAGE_BYTES))
        memory = self._buffer.data[: stop - start]
        return start, memory, memory[piece.offset - start : piece.offset - start + piece.nbytes]

    def process(self, piece: FrameRange, data: Bytes) -> None:
        """Check, decode and place the frames of a range that has been read."""
        frames = self._checkpoint.parts[piece.part].frames
        for frame in piece.frames:
            start = int(frames.offset[frame]) - piece.offset
            stored = data[start : start + int(frames.stored_length[frame])]
            try:
                self._process_frame(piece, frame, frames, stored)
            except CorruptCheckpointError as error:
                located = self._locate(piece, frame, frames, error)
                if self._on_problem is None:
                    raise located from error
                self._on_problem(located)

    def _process_frame(self, piece: FrameRange, frame: int, frames: Frames, stored: Bytes) -> None:
        codec, length = int(frames.codec[frame]), int(frames.raw_length[frame])
        if codec == RAW:
            if self._verify and digest(stored) != frames.raw_digest[frame].tobytes():
                raise CorruptCheckpointError("its digest does not match")
            raw = stored
        else:
            raw = self._decode(frame, frames, stored, codec, length)
        if piece.direct is None and self._on_problem is None:  # verification only checks
            with self._clock.measure("place", frame, length):
                self._place(piece.part, frame, int(frames.raw_starts[frame]), raw)

    def _decode(self, frame: int, frames: Frames, stored: Bytes, codec: int, length: int) -> Bytes:
        if length > MAXIMUM_FRAME_BYTES:
            raise CorruptCheckpointError(f"it claims {length} bytes, more than any coded frame may hold")
        if self._decoded is None or len(self._decoded.data) < length:
            self._decoded = StagingBuffer(round_up(max(length, _BOUNCE_BYTES), PAGE_BYTES))
        raw = self._decoded.data[:length]
        width = int(frames.itemsize[frame])
        with self._clock.measure("decode", frame, length):
            if self._verify:
                digests = frames.stored_digest[frame].tobytes(), frames.raw_digest[frame].tobytes()
                self._decoder.decode_checked(stored, codec, width, length, raw, *digests)
            else:
                self._decoder.decode(stored, codec, width, length, raw)
        return raw

    def _place(self, part: int, frame: int, frame_start: int, raw: Bytes) -> None:
        targets, users = self._targets[part]
        frame_stop = frame_start + len(raw)
        for number in users.get(frame, ()):
            target = targets[number]
            start = target.chunk.raw_offset
            stop = start + target.chunk.nbytes
            if target.plain and start >= frame_start and stop <= frame_stop:
                source = raw[start - frame_start : stop - frame_start].view(target.dtype)
                target.array[...] = source if len(target.lengths) == 1 else source.reshape(target.lengths)
            else:
                _place_part(target, frame_start, frame_stop, raw)

    def _locate(
        self, piece: FrameRange, frame: int, frames: Frames, error: CorruptCheckpointError
    ) -> CorruptCheckpointError:
        start = int(frames.offset[frame])
        stop = start + int(frames.stored_length[frame])
        targets, users = self._targets[piece.part]
        shown = _list_keys(targets[number].key for number in users.get(frame, ()))
        path = self._checkpoint.parts[piece.part].objects[piece.object_index].path
        return CorruptCheckpointError(
            f"{self._checkpoint.place}/{path}: bytes {start}-{stop} are damaged ({error}); keys affected: {shown}. A "
            "target that was being filled has undefined content; load an earlier checkpoint, or the other keys alone"
        )


def affected_keys(
    frames: Frames,
    object_index: int,
    size_bytes: int,
    targets: Sequence[Destination],
    users: Mapping[int, Sequence[int]],
) -> str:
    """For messages: whose frames lie in an object beyond its first ``size_bytes``."""
    lost = (frames.object == object_index) & (frames.offset + frames.stored_length > size_bytes)
    keys = (targets[number].key for frame in np.flatnonzero(lost).tolist() for number in users.get(frame, ()))
    return f"keys affected: {_list_keys(keys) or 'none'}"


def _list_keys(keys: Iterable[str]) -> str:
    names = sorted(set(keys))
    return ", ".join(repr(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _place_part(target: Destination, frame_start: int, frame_stop: int, raw: Bytes) -> None:
    """The elements of a frame that belong to a destination."""
    base, itemsize = target.chunk.raw_offset, target.dtype.itemsize
    start, stop = max(frame_start, base), min(frame_stop, base + target.chunk.nbytes)
    with np.errstate(all="ignore"):  # a cast that was asked for may overflow or meet nan, quietly
        place_elements(
            raw[start - frame_start : stop - frame_start].view(target.dtype),
            (start - base) // itemsize,
            (stop - base) // itemsize,
            target.chunk.sizes,
            target.offsets,
            target.lengths,
            target.array,
        )


async def read_ranges(
    checkpoint: OpenCheckpoint,
    targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]],
    ranges: Sequence[FrameRange],
    clock: StageClock,
    *,
    threads: int,
    verify: bool,
    on_problem: Callable[[CorruptCheckpointError], None] | None = None,
) -> None:
    """Read all ranges, concurrently. The first damage ends it, unless ``on_problem`` collects them."""
    if not ranges:
        return
    stop = threading.Event()
    wanted: dict[tuple[int, int], int] = {}
    for piece in ranges:
        place = piece.part, piece.object_index
        wanted[place] = max(wanted.get(place, 0), piece.offset + piece.nbytes)

    def lost(part: int, object_index: int, size_bytes: int) -> str:
        return affected_keys(checkpoint.parts[part].frames, object_index, size_bytes, *targets[part])

    async with DataReaders(checkpoint, wanted, lost) as readers:
        pending = iter(ranges)
        lock = threading.Lock()

        def next_range() -> FrameRange | None:
            with lock:
                return None if stop.is_set() else next(pending, None)

        blocking = checkpoint.location.backend.capabilities.blocking_io
        limiter = anyio.CapacityLimiter(threads)
        async with stopping(stop) as group:
            for _ in range(min(threads, len(ranges))):
                worker = _RangeReader(checkpoint, targets, clock, verify, on_problem)
                if blocking:
                    work = functools.partial(_read_blocking, worker, readers, next_range, clock)
                    group.start_soon(functools.partial(run_in_worker, work, limiter=limiter))
                else:
                    group.start_soon(_read_async, worker, readers, next_range, clock)


def _read_blocking(
    worker: _RangeReader, readers: DataReaders, next_range: Callable[[], FrameRange | None], clock: StageClock
) -> None:
    while (piece := next_range()) is not None:
        reader = readers.of(piece.part, piece.object_index)
        started = time.perf_counter()
        offset, memory, data = worker.window(piece, reader.size_bytes)
        reader.read_into_blocking(offset, memory.data)
        _report(clock, reader, piece, started)
        worker.process(piece, data)


async def _read_async(
    worker: _RangeReader, readers: DataReaders, next_range: Callable[[], FrameRange | None], clock: StageClock
) -> None:
    while (piece := next_range()) is not None:
        reader = readers.of(piece.part, piece.object_index)
        started = time.perf_counter()
        offset, memory, data = worker.window(piece, reader.size_bytes)
        await reader.read_into(offset, memory.data)
        _report(clock, reader, piece, started)
        await run_in_worker(worker.process, piece, data)


def _report(clock: StageClock, reader: ObjectReader, piece: FrameRange, started: float) -> None:
    ended = time.perf_counter()
    clock.add("read", piece.nbytes, ended - started)
    if clock.observer is not None:
        event = RangeRead(reader.path, piece.offset, piece.nbytes, started, ended, threading.get_ident())
        notify(clock.observer, event)


def preferred_range_bytes(blocking: bool, capability_bytes: int, direct: bool) -> int:
    """Ranges that bounce stay small enough to remain in cache between digest and copy."""
    return capability_bytes if direct or not blocking else min(capability_bytes, _BOUNCE_BYTES)
