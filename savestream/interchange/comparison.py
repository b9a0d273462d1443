"""Whether a new checkpoint holds what its source holds: every element of every leaf, with little memory.

The checkpoint is read back, and its bytes must have the digests that its index states; the source is read once more,
key by key, and its bytes must have them too.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np

from savestream.arrays import adapter_of, array_info, as_plain_elements, dtype_from_name
from savestream.errors import CorruptCheckpointError
from savestream.pipeline.codecs import digest
from savestream.pipeline.manifest import Frames
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint, metadata_of
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.rank_reads import BoxRead, read_boxes
from savestream.pipeline.verification import verify_opened
from savestream.planners.flattening import SHARDED, VALUE, flatten
from savestream.planners.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from savestream.planners.save_plans import capture_value
from savestream.planners.sharding import flatten_shards, is_sharded, shard_array, shard_chunks, shard_dtype
from savestream.threads import run_in_worker, stopping

__all__ = ["compare_with_source"]

_UNIT_BYTES = 8 * 1024 * 1024
_JOINED_BYTES = 16 * 1024
_JOINED_LEAVES = 4096
_THREADS = 2


async def compare_with_source(checkpoint: OpenCheckpoint, state: Any, allow_pickle: bool) -> None:
    """Read both sides and compare.

    Raises
    ------
    CorruptCheckpointError
        They differ; the message names the key.
    """
    await checkpoint.fetch_parts(range(len(checkpoint.root.parts)))
    source = await run_in_worker(_Source, state, allow_pickle)
    await run_in_worker(_compare_values, checkpoint, source)
    parts = [await run_in_worker(_SourcePart, checkpoint, source, number) for number in checkpoint.parts]
    stop = threading.Event()
    limiter = anyio.CapacityLimiter(_THREADS)
    async with stopping(stop) as group:
        group.start_soon(functools.partial(verify_opened, checkpoint, LoadOptions(), None))
        for part in parts:
            for _ in range(_THREADS):
                group.start_soon(functools.partial(run_in_worker, part.compare, stop, limiter=limiter))
    for part in parts:
        for candidates in part.differing[:1]:
            raise _difference(checkpoint, await _differing_key(checkpoint, candidates))


async def _differing_key(checkpoint: OpenCheckpoint, chunks: Sequence[_Chunk]) -> str:
    """Which of the chunks that share a frame differs from its source."""
    for chunk in chunks if len(chunks) > 1 else ():
        location = checkpoint.chunk_location(chunk.name, chunk.offset)
        stored = np.empty(location.sizes, dtype_from_name(location.dtype))
        box = BoxRead(chunk.name, location, (0,) * len(location.sizes), location.sizes, stored)
        await read_boxes(checkpoint, [box], LoadOptions())
        if not await run_in_worker(_is_same, chunk, stored):
            return chunk.name
    return chunks[0].name


def _is_same(chunk: _Chunk, stored: np.ndarray[Any, Any]) -> bool:
    source = np.empty(chunk.nbytes, np.uint8)
    _copy(chunk, 0, chunk.nbytes, source)
    return source.tobytes() == stored.tobytes()


class _Source:
    """The leaves of a state by key: arrays, and values as the bytes that are stored for them."""

    def __init__(self, state: Any, allow_pickle: bool) -> None:
        flat = flatten(state, allow_pickle=allow_pickle)
        self.arrays: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        for name, leaf, kind in zip(flat.names, flat.leaves, flat.kinds, strict=True):
            if kind == VALUE:
                self.values[name] = leaf
            else:
                self.arrays[name] = flatten_shards(leaf) if kind == SHARDED else leaf
        self._allow_pickle = allow_pickle

    def chunk(self, name: str, offset: tuple[int, ...]) -> Any:
        """The array that a stored chunk was made of."""
        if name in self.values:
            return np.frombuffer(self.encoded(name), np.uint8)
        leaf = self.arrays[name]
        return shard_array(leaf, MetadataIndex(name, offset)) if is_sharded(leaf) else leaf

    def encoded(self, name: str) -> bytes:
        """The bytes that are stored for a value."""
        return capture_value(self.values[name], name, self._allow_pickle).data


def _compare_values(checkpoint: OpenCheckpoint, source: _Source) -> None:
    """Keys of both sides, what each is, and the values that stand in the root."""
    stored = metadata_of(checkpoint).state_dict_metadata
    given = {*source.arrays, *source.values}
    if stored.keys() != given:
        name = min(stored.keys() ^ given)
        side = "only the source has" if name in given else "only the new checkpoint has"
        raise CorruptCheckpointError(f"{checkpoint.place}: {side} {name}; nothing was committed")
    different = [name for name, entry in stored.items() if not _is_alike(entry, source, name)]
    for name, value in zip(checkpoint.root.plan.value_names, checkpoint.root.values, strict=True):
        if not different and msgspec.json.encode(value) != source.encoded(name):
            different.append(name)
    if different:
        raise _difference(checkpoint, different[0])


def _is_alike(entry: TensorStorageMetadata | BytesStorageMetadata, source: _Source, name: str) -> bool:
    """Whether both are values, or arrays of one dtype and shape."""
    if not isinstance(entry, TensorStorageMetadata):
        return name in source.values
    leaf = source.arrays.get(name)
    if leaf is None:
        return False
    if is_sharded(leaf):
        return (shard_dtype(leaf, name), shard_chunks(leaf, name)[0]) == (entry.properties.dtype, entry.size)
    info = array_info(leaf, name)
    return (info.dtype, info.shape) == (entry.properties.dtype, entry.size)


def _difference(checkpoint: OpenCheckpoint, name: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{checkpoint.place}: {name} is not what its source holds (did that change meanwhile?); nothing was committed"
    )


class _Chunk(msgspec.Struct, gc=False):
    """A stored chunk as the source has it."""

    name: str
    offset: tuple[int, ...]
    leaf: Any
    raw_offset: int
    nbytes: int
    dtype: np.dtype[Any]  # records as opaque bytes

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def _chunks_of(checkpoint: OpenCheckpoint, source: _Source, part: int) -> list[_Chunk]:
    """The chunks of a part in the order of its raw stream; empty ones are everywhere and nowhere."""
    chunks: list[_Chunk] = []
    for name in checkpoint.root.plan.tensor_names:
        for number in checkpoint.chunk_numbers(name):
            offset = checkpoint.chunk_offsets(number)
            place = checkpoint.chunk_location(name, offset)
            if place.part == part and place.nbytes:
                leaf = source.chunk(name, offset)
                _check_description(checkpoint, name, leaf, place)
                dtype = as_plain_elements(np.empty(0, dtype_from_name(place.dtype))).dtype
                chunks.append(_Chunk(name, offset, leaf, place.raw_offset, place.nbytes, dtype))
    chunks.sort(key=lambda chunk: chunk.raw_offset)
    return chunks


def _check_description(checkpoint: OpenCheckpoint, name: str, leaf: Any, place: ChunkLocation) -> None:
    info = array_info(leaf, name)
    if (info.dtype, info.shape) != (place.dtype, place.sizes):
        raise _difference(checkpoint, name)


class _SourcePart:
    """The source of everything in one part's raw stream. Works through it in units of whole frames."""

    def __init__(self, checkpoint: OpenCheckpoint, source: _Source, number: int) -> None:
        self._checkpoint = checkpoint
        self._frames: Frames = checkpoint.parts[number].frames
        chunks = _chunks_of(checkpoint, source, number)
        self._chunks = [
            chunk for chunk, before in zip(chunks, [None, *chunks], strict=False) if not _tied(chunk, before)
        ]
        self._tied = iter([pair for pair in itertools.pairwise(chunks) if _tied(pair[1], pair[0])])
        self.differing: list[list[_Chunk]] = []
        self._starts = np.fromiter((chunk.raw_offset for chunk in self._chunks), np.int64, len(self._chunks))
        self._units = _units(self._frames)
        self._lock = threading.Lock()

    def compare(self, stop: threading.Event) -> None:
        """Compare units until none is left. Runs in worker threads."""
        buffer = np.empty(_UNIT_BYTES, np.uint8)
        while not (stop.is_set() or self.differing):
            with self._lock:
                unit, pair = next(self._units, None), next(self._tied, None)
            if unit is None and pair is None:
                return
            if pair is not None and not _equal_sources(*pair):
                self.differing.append([pair[1]])
            if unit is not None:
                start, end = (int(self._frames.raw_starts[frame]) for frame in unit)
                if end - start > len(buffer):
                    buffer = np.empty(end - start, np.uint8)
                self._fill(start, buffer[: end - start])
                self._check(unit, start, buffer)

    def _fill(self, start: int, data: np.ndarray[Any, Any]) -> None:
        """Read the source of a range of the raw stream."""
        end = start + len(data)
        first = max(int(np.searchsorted(self._starts, start, "right")) - 1, 0)
        last = int(np.searchsorted(self._starts, end, "left"))
        whole: list[_Chunk] = []
        for chunk in self._chunks[first:last]:
            low, high = max(start, chunk.raw_offset), min(end, chunk.raw_offset + chunk.nbytes)
            if (low, high) == (chunk.raw_offset, chunk.raw_offset + chunk.nbytes) and chunk.nbytes <= _JOINED_BYTES:
                whole.append(chunk)
            elif low < high:
                target = data[low - start : high - start]
                _copy(chunk, low - chunk.raw_offset, high - chunk.raw_offset, target)
        for _, alike in itertools.groupby(whole, lambda chunk: type(chunk.leaf)):
            self._join(list(alike), start, data)

    def _join(self, chunks: Sequence[_Chunk], start: int, data: np.ndarray[Any, Any]) -> None:
        """Many small chunks of one class of leaves."""
        for at in range(0, len(chunks), _JOINED_LEAVES):
            group = chunks[at : at + _JOINED_LEAVES]
            joined = adapter_of(group[0].leaf).join([chunk.leaf for chunk in group])
            position = 0
            for chunk in group:
                place = chunk.raw_offset - start
                data[place : place + chunk.nbytes] = joined[position : position + chunk.nbytes]
                position += chunk.nbytes

    def _check(self, unit: tuple[int, int], start: int, data: np.ndarray[Any, Any]) -> None:
        frames = self._frames
        for frame in range(*unit):
            low, high = (int(frames.raw_starts[number]) - start for number in (frame, frame + 1))
            if digest(data[low:high]) != frames.raw_digest[frame].tobytes():
                low, high = low + start, high + start
                inside = [c for c in self._chunks if c.raw_offset < high and c.raw_offset + c.nbytes > low]
                self.differing.append(inside)


def _tied(chunk: _Chunk, before: _Chunk | None) -> bool:
    """Whether a chunk is stored where another one is, since they were the same memory."""
    return before is not None and chunk.raw_offset == before.raw_offset


def _equal_sources(first: _Chunk, second: _Chunk) -> bool:
    """Whether two chunks that are stored as one are one in the source."""
    if first.leaf is second.leaf or first.nbytes != second.nbytes:
        return first.nbytes == second.nbytes
    step = max(_UNIT_BYTES // first.itemsize, 1) * first.itemsize
    for start in range(0, first.nbytes, step):
        stop = min(start + step, first.nbytes)
        one, other = np.empty(stop - start, np.uint8), np.empty(stop - start, np.uint8)
        _copy(first, start, stop, one)
        _copy(second, start, stop, other)
        if not np.array_equal(one, other):
            return False
    return True


def _copy(chunk: _Chunk, start: int, stop: int, target: np.ndarray[Any, Any]) -> None:
    adapter_of(chunk.leaf).copy_elements(
        chunk.leaf, start // chunk.itemsize, stop // chunk.itemsize, target.view(chunk.dtype)
    )


def _units(frames: Frames) -> Iterator[tuple[int, int]]:
    """Runs of frames of at most 8 MiB, or single frames that are larger."""
    starts = frames.raw_starts.tolist()
    first = 0
    for frame in range(1, len(starts)):
        if frame > first + 1 and starts[frame] - starts[first] > _UNIT_BYTES:
            yield first, frame - 1
            first = frame - 1
    if first < len(starts) - 1:
        yield first, len(starts) - 1
