"""A committed checkpoint opened for reading: its root, the index parts that are needed, and where each chunk lies."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import TypeVar

import msgspec
import numpy as np

from savestream.arrays import dtype_itemsize
from savestream.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError
from savestream.pipeline.commit import describe, join_path, read_root
from savestream.pipeline.manifest import IndexPart, PartEntry, Root, decode_part
from savestream.planners.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    PlannerData,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from savestream.planners.state_dict import tree_mappings
from savestream.storage_backends import Location
from savestream.threads import run_in_worker, task_group

__all__ = [
    "ChunkLocation",
    "OpenCheckpoint",
    "VanishedDataError",
    "following_overwrites",
    "metadata_of",
    "open_checkpoint",
]

Result = TypeVar("Result")

_OVERWRITES_FOLLOWED = 8
_KIND_ENCODINGS = {1: "bytes", 2: "pickle", 3: "stored-json"}


class VanishedDataError(CorruptCheckpointError):
    """An object that the root names is gone: damage, unless the checkpoint was overwritten meanwhile."""


class ChunkLocation(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk's raw bytes lie: part, position in that part's raw stream, box, dtype name."""

    part: int
    raw_offset: int
    sizes: tuple[int, ...]
    dtype: str
    nbytes: int


class OpenCheckpoint:
    """What a load knows after two kinds of small reads; data objects are opened by the reader."""

    def __init__(self, location: Location, root: Root) -> None:
        self.location = location
        self.root = root
        self.parts: dict[int, IndexPart] = {}
        self._chunk_starts = np.concatenate([[0], np.cumsum(root.plan.tensors.n_chunks, dtype=np.int64)])
        self._dimension_starts = np.concatenate(
            [[0], np.cumsum(np.repeat(root.plan.tensors.ndim, root.plan.tensors.n_chunks), dtype=np.int64)]
        )
        self._chunks = root.plan.chunks
        self._by_offset: dict[str, dict[tuple[int, ...], int]] = {}
        self._tensor_numbers = {name: number for number, name in enumerate(root.plan.tensor_names)}
        self._columns = (
            self._chunks.part.tolist(),
            self._chunks.raw_offset.tolist(),
            self._chunks.offsets.tolist(),
            self._chunks.sizes.tolist(),
            self._dimension_starts.tolist(),
            self._chunk_starts.tolist(),
            root.plan.tensors.dtype.tolist(),
        )

    @property
    def place(self) -> str:
        """The checkpoint in messages."""
        return describe(self.location)

    def object_path(self, part: int, object_index: int) -> str:
        """Path of a data object in the backend."""
        return join_path(self.location.path, self.parts[part].objects[object_index].path)

    def chunk_numbers(self, name: str) -> range:
        """The chunks of a tensor, as rows of the chunk table."""
        number = self._tensor_numbers[name]
        starts = self._columns[5]
        return range(starts[number], starts[number + 1])

    def chunk_offsets(self, chunk: int) -> tuple[int, ...]:
        dimensions = self._columns[4]
        return tuple(self._columns[2][dimensions[chunk] : dimensions[chunk + 1]])

    def chunk_sizes(self, chunk: int) -> tuple[int, ...]:
        dimensions = self._columns[4]
        return tuple(self._columns[3][dimensions[chunk] : dimensions[chunk + 1]])

    def _chunk_at(self, name: str, offset: tuple[int, ...]) -> int:
        """The chunk of a tensor that begins at ``offset``: the one that is not empty, where there are several."""
        numbers = self._by_offset.get(name)
        if numbers is None:
            numbers = self._by_offset[name] = {}
            for number in self.chunk_numbers(name):
                if prod(self.chunk_sizes(number)):
                    numbers[self.chunk_offsets(number)] = number
                else:
                    numbers.setdefault(self.chunk_offsets(number), number)
        return numbers[offset]

    def chunk_location(self, name: str, offset: tuple[int, ...] | None) -> ChunkLocation:
        """Where the chunk of ``name`` that starts at ``offset`` lies; a KeyError where none does."""
        parts, raw_offsets, _, sizes, dimensions, starts, dtypes = self._columns
        tensor = self._tensor_numbers[name]
        chunk = starts[tensor]
        if offset is not None and starts[tensor + 1] - chunk > 1:
            chunk = self._chunk_at(name, offset)
        shape = tuple(sizes[dimensions[chunk] : dimensions[chunk + 1]])
        dtype = self.root.plan.dtypes[dtypes[tensor]]
        return ChunkLocation(parts[chunk], raw_offsets[chunk], shape, dtype, prod(shape) * dtype_itemsize(dtype))

    def parts_of(self, names: Iterable[str]) -> set[int]:
        """Numbers of the parts that hold chunks of these tensors."""
        table = self._columns[0]
        return {table[chunk] for name in names for chunk in self.chunk_numbers(name)}

    async def fetch_parts(self, numbers: Iterable[int]) -> None:
        """Read and check index parts that are not here yet."""
        wanted = [number for number in sorted(set(numbers)) if number not in self.parts]
        async with task_group() as group:
            for number in wanted:
                group.start_soon(self._fetch_part, number)

    async def _fetch_part(self, number: int) -> None:
        entry = self.root.parts[number]
        path = join_path(self.location.path, entry.path)
        place = describe(self.location, entry.path)
        try:
            data = await self.location.backend.get(path, maximum_bytes=entry.bytes)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise VanishedDataError(
                    f"{place}: missing, although the manifest names it; the data of rank {entry.rank} cannot be read"
                ) from error
            if error.errno == errno.EFBIG:
                raise CorruptCheckpointError(f"{place}: longer than the manifest says ({entry.bytes} bytes)") from error
            raise
        self.parts[number] = await run_in_worker(_check_part, data, entry, place)


def _check_part(data: bytes, entry: PartEntry, place: str) -> IndexPart:
    try:
        part = decode_part(data, path=place, entry=entry)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error}; bytes 0-{len(data)}, every key of rank {entry.rank} is affected; load an earlier checkpoint"
        ) from error
    if any(item.source for item in part.objects):
        raise UnsupportedFormatError(f"{place}: its data lies in other checkpoints; a newer savestream is needed")
    return part


class _ChunkPlaces(Mapping[MetadataIndex, tuple[int, int]]):
    """Where each chunk lies, looked up when asked; leaves that were the same memory have equal places."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, index: MetadataIndex) -> tuple[int, int]:
        chunk = self._checkpoint.chunk_location(index.fqn, index.offset)
        return chunk.part, chunk.raw_offset

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name in self._checkpoint.root.plan.tensor_names:
            for number in self._checkpoint.chunk_numbers(name):
                yield MetadataIndex(name, self._checkpoint.chunk_offsets(number))

    def __len__(self) -> int:
        return len(self._checkpoint.root.plan.chunks.part)


async def open_checkpoint(location: Location) -> OpenCheckpoint:
    """Read the root of the checkpoint at ``location``."""
    root = await read_root(location)
    if root.depends_on:
        raise UnsupportedFormatError(
            f"{describe(location)}: it needs data of {len(root.depends_on)} other checkpoint(s) (depends_on), which "
            "this savestream cannot read; a newer one is needed"
        )
    return await run_in_worker(OpenCheckpoint, location, root)


async def following_overwrites(location: Location, attempt: Callable[[OpenCheckpoint], Awaitable[Result]]) -> Result:
    """Run ``attempt`` on the checkpoint at ``location``; again where what it was reading has been replaced meanwhile.

    Each repetition needs another save to have been committed, so a reader beside one writer repeats once as a rule.
    """
    for _ in range(_OVERWRITES_FOLLOWED):
        checkpoint = await open_checkpoint(location)
        try:
            return await attempt(checkpoint)
        except (VanishedDataError, StorageError) as error:
            vanished = isinstance(error, VanishedDataError) or error.errno in (errno.ENOENT, errno.ESTALE)
            if not vanished or (await read_root(location)).checkpoint_id == checkpoint.root.checkpoint_id:
                raise
    return await attempt(await open_checkpoint(location))


def _chunk_boxes(checkpoint: OpenCheckpoint) -> list[tuple[ChunkStorageMetadata, ...]]:
    """The chunks of every tensor; equal boxes are one object, since most tensors of a kind are alike."""
    _, _, offsets, sizes, dimensions, starts, _ = checkpoint._columns
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[ChunkStorageMetadata, ...]] = {}
    boxes: list[tuple[ChunkStorageMetadata, ...]] = []
    for first, last in pairwise(starts):
        if last - first != 1:
            boxes.append(
                tuple(
                    ChunkStorageMetadata(checkpoint.chunk_offsets(chunk), checkpoint.chunk_sizes(chunk))
                    for chunk in range(first, last)
                )
            )
            continue
        low, high = dimensions[first], dimensions[last]
        box = (tuple(offsets[low:high]), tuple(sizes[low:high]))
        chunks = known.get(box)
        if chunks is None:
            chunks = known[box] = (ChunkStorageMetadata(*box),)
        boxes.append(chunks)
    return boxes


def metadata_of(checkpoint: OpenCheckpoint) -> Metadata:
    """What planners see of a checkpoint."""
    root = checkpoint.root
    plan = root.plan
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    kinds = plan.tensors.kind.tolist()
    dtypes = plan.tensors.dtype.tolist()
    boxes = _chunk_boxes(checkpoint)
    known: dict[tuple[int, int], TensorStorageMetadata] = {}  # by dtype and chunks: most tensors of a kind are alike
    starts = np.concatenate([[0], np.cumsum(plan.tensors.ndim, dtype=np.int64)]).tolist()
    shape = plan.tensors.shape.tolist()
    for number, name in enumerate(plan.tensor_names):
        if kinds[number]:
            entries[name] = BytesStorageMetadata(_KIND_ENCODINGS[kinds[number]])
        else:
            alike = (dtypes[number], id(boxes[number]))
            entry = known.get(alike)
            size = shape[starts[number] : starts[number + 1]]
            if entry is None or entry.size != tuple(size):
                properties = TensorProperties(plan.dtypes[dtypes[number]])
                entry = known[alike] = TensorStorageMetadata(properties, tuple(size), boxes[number])
            entries[name] = entry
    entries.update(dict.fromkeys(plan.value_names, BytesStorageMetadata()))
    mappings: Mapping[str, tuple[object, ...]] = tree_mappings(plan.tree)
    return Metadata(
        state_dict_metadata=entries,
        planner_data=PlannerData(plan.tree, mappings, dict(zip(plan.value_names, root.values, strict=True))),
        storage_data=_ChunkPlaces(checkpoint),
        storage_meta=StorageMeta(checkpoint_id=checkpoint.place, save_id=root.checkpoint_id),
        version=".".join(str(number) for number in root.version),
    )
