"""A DCP checkpoint's directory as a state whose arrays lie in its files. PyTorch is not needed, and nothing is run."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from savestream.arrays import dtype_from_name, dtype_itemsize
from savestream.arrays.file_arrays import FileArray
from savestream.arrays.file_sources import ByteSource, EndOfSourceError, PooledFile
from savestream.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    SavestreamError,
    StorageError,
    UnsafeObjectError,
)
from savestream.interchange.dcp_metadata import DcpChunk, DcpItem, DcpMetadata, DcpTensor, parse_metadata
from savestream.interchange.decoded_items import DecodedItem
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported, file_within, locating
from savestream.interchange.nesting import nest
from savestream.interchange.read_limits import ReadLimits
from savestream.interchange.stored_zip import EDGE_BYTES
from savestream.interchange.torch_archives import ArchiveReader
from savestream.interchange.torch_pickles import UNSUPPORTED_DTYPES
from savestream.planners import ShardedArray
from savestream.planners.geometry import in_bounds, overlapping_pairs
from savestream.planners.metadata import ChunkStorageMetadata

__all__ = ["read_dcp"]

_METADATA_NAME = ".metadata"
_MAXIMUM_METADATA_BYTES = 256 * 1024 * 1024
_ZSTD = "stream.zstd"
# What an archive holds beside the elements, and what objects may decompress to.
_ARCHIVE_SLACK_BYTES = 1024 * 1024
_OBJECT_BYTES = 64 * 1024 * 1024
_OBJECT_RATIO = 1000
_PREFETCHED_ITEMS = 10_000


def read_dcp(directory: str, files: ForeignFiles, on_unsupported: OnUnsupported) -> ForeignState:
    """Read what the checkpoint says of itself; no element is read.

    Raises
    ------
    CheckpointNotFoundError
        The directory holds no DCP checkpoint, or one of a kind that is read in another way; the message says which.
    CorruptCheckpointError, UnsafeObjectError
        It contradicts itself or its files, or holds what only running code could rebuild.
    """
    metadata = _read_metadata(directory, files)
    reader = _Reader(directory, files)
    with contextlib.suppress(SavestreamError):  # whatever is wrong is found, and named, when it is read
        reader.prefetch(metadata)
    leaves: dict[str, object] = {}
    skipped: dict[str, str] = {}
    for key, entry in metadata.entries.items():
        files.check_stop()
        try:
            with locating(f"{directory}: {key}"):
                leaves[key] = reader.leaf(key, entry)
        except UnsafeObjectError as error:
            if on_unsupported != "skip":
                raise UnsafeObjectError(f"{error}; on_unsupported='skip' leaves such keys out") from error
            skipped[key] = str(error)
    return ForeignState(_state(leaves, metadata, directory), None, skipped)


def _state(leaves: dict[str, object], metadata: DcpMetadata, directory: str) -> object:
    if metadata.paths is None:
        return leaves
    with locating(directory):
        return nest(leaves, metadata.paths)


def _read_metadata(directory: str, files: ForeignFiles) -> DcpMetadata:
    if not os.path.isdir(directory):
        raise PlanError(f"{directory}: a DCP checkpoint is a directory; this is a file")
    path = os.path.join(directory, _METADATA_NAME)
    if not os.path.lexists(path):
        raise CheckpointNotFoundError(f"{directory}: {_absence(directory)}")
    with locating(directory):
        source = files.pool.file(file_within(directory, _METADATA_NAME))
    with locating(path):
        nbytes = _size(source)
        if nbytes > _MAXIMUM_METADATA_BYTES:
            raise CorruptCheckpointError(f"it has {nbytes} bytes; up to {_MAXIMUM_METADATA_BYTES} are read")
        return parse_metadata(source.read(0, nbytes), files.check_stop)


def _absence(directory: str) -> str:
    """Why there is no metadata, and what to do."""
    names = os.listdir(directory)
    if any(name.endswith(_METADATA_NAME) and name.startswith("__") for name in names):
        return (
            "each rank wrote metadata of its own (use_collectives=False), which does not say how the ranks' tensors "
            "belong together; load it with PyTorch and save it with collectives"
        )
    if any(name.endswith(".safetensors") for name in names):
        return (
            "no DCP metadata, but safetensors files: import_safetensors reads them (DCP's sharded ones after "
            "torch.distributed.checkpoint's consolidate_safetensors_files)"
        )
    return f"no DCP checkpoint; there is no {_METADATA_NAME} in it"


def _size(source: PooledFile) -> int:
    try:
        return source.size_bytes()
    except OSError as error:
        place = source.describe()
        if isinstance(error, FileNotFoundError):
            raise CorruptCheckpointError(f"{place}: missing, although the metadata names it") from error
        raise StorageError(error.errno, f"opening {place}: {error.strerror}") from error


class _Reader:
    def __init__(self, directory: str, files: ForeignFiles) -> None:
        self._directory = directory
        self._files = files
        self._limits = ReadLimits(check_stop=files.check_stop)
        self._sources: dict[str, tuple[PooledFile, int]] = {}

    def prefetch(self, metadata: DcpMetadata) -> None:
        """Let the edges of all items, which is what is looked at, come from the device at once instead of in turn."""
        items = [entry for entry in metadata.entries.values() if isinstance(entry, DcpItem)]
        for entry in metadata.entries.values():
            if isinstance(entry, DcpTensor):
                items += [chunk.item for chunk in entry.chunks]
        for item in items[:_PREFETCHED_ITEMS]:
            source, size = self._source(item.path)
            for offset in (item.offset, item.offset + item.nbytes - EDGE_BYTES):
                if 0 <= offset < size:
                    source.prefetch(offset, EDGE_BYTES)

    def leaf(self, key: str, entry: DcpTensor | DcpItem) -> object:
        """An entry's value: an array, a sharded array, or an object."""
        if isinstance(entry, DcpItem):
            limit = max(_OBJECT_BYTES, _OBJECT_RATIO * entry.nbytes)
            with locating(entry.path):
                return self._open(entry, limit, key).value(stored_bytes=entry.nbytes)
        if entry.dtype in UNSUPPORTED_DTYPES:
            raise UnsafeObjectError(f"its dtype is torch.{entry.dtype}, which savestream cannot store")
        chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        _check_coverage(entry, chunks)
        if not chunks:
            return np.empty(entry.shape, dtype_from_name(entry.dtype))
        shards = [(chunk.offsets, self._chunk(key, entry, chunk)) for chunk in chunks]
        return shards[0][1] if len(shards) == 1 else ShardedArray(entry.shape, shards)

    def _chunk(self, key: str, tensor: DcpTensor, chunk: DcpChunk) -> FileArray:
        nbytes = math.prod(chunk.sizes) * dtype_itemsize(tensor.dtype)
        with locating(f"{chunk.item.path}, bytes {chunk.item.offset}-{chunk.item.offset + chunk.item.nbytes}"):
            array = self._open(chunk.item, nbytes + _ARCHIVE_SLACK_BYTES, key).tensor()
            if (array.dtype, array.shape) != (tensor.dtype, chunk.sizes):
                raise CorruptCheckpointError(
                    f"a tensor of dtype {array.dtype} and shape {array.shape} is stored, where the metadata says "
                    f"{tensor.dtype} and {chunk.sizes}"
                )
            return array

    def _open(self, item: DcpItem, limit_bytes: int, key: str) -> ArchiveReader:
        source, size = self._source(item.path)
        if item.offset + item.nbytes > size:
            missing = item.offset + item.nbytes - max(size, item.offset)
            raise CorruptCheckpointError(
                f"truncated: the item ends at byte {item.offset + item.nbytes}, the file at byte {size}; "
                f"{missing} bytes are missing"
            )
        if item.transforms:
            return self._open_transformed(item, source, limit_bytes, key)
        try:
            return ArchiveReader(source, item.offset, item.nbytes, key, self._limits)
        except CorruptCheckpointError:
            if _is_safetensors(source, item.offset):
                raise UnsafeObjectError(
                    "the checkpoint was written in DCP's safetensors mode, in which items cannot be told apart; load "
                    "it with PyTorch, and save it in the default mode"
                ) from None
            raise

    def _open_transformed(self, item: DcpItem, source: ByteSource, limit_bytes: int, key: str) -> ArchiveReader:
        for transform in item.transforms:
            name, _, version = transform.partition("/")
            if name != _ZSTD or version.partition(".")[0] != "1":
                raise UnsafeObjectError(f"it is stored with the extension {transform[:100]!r}, which is not known here")
        decoded, nbytes = source, item.nbytes
        offset = item.offset
        for _ in item.transforms:
            decoded = DecodedItem(self._files.decoded, decoded, offset, nbytes, limit_bytes)
            offset, nbytes = 0, decoded.size_bytes()
        return ArchiveReader(decoded, offset, nbytes, key, self._limits)

    def _source(self, path: str) -> tuple[PooledFile, int]:
        found = self._sources.get(path)
        if found is None:
            source = self._files.pool.file(file_within(self._directory, path))
            found = self._sources[path] = source, _size(source)
        return found


def _check_coverage(tensor: DcpTensor, chunks: Sequence[DcpChunk]) -> None:
    """Every element is in exactly one chunk."""
    boxes = [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in chunks]
    for box in boxes:
        if not in_bounds(box, tensor.shape):
            raise CorruptCheckpointError(f"a chunk at {box.offsets} of {box.sizes} lies outside shape {tensor.shape}")
    overlaps = overlapping_pairs(boxes, 1)
    if overlaps:
        first, second = (boxes[place] for place in overlaps[0])
        raise CorruptCheckpointError(f"its chunks at {first.offsets} and at {second.offsets} overlap")
    absent = math.prod(tensor.shape) - sum(math.prod(box.sizes) for box in boxes)
    if absent:
        raise CorruptCheckpointError(f"its chunks leave {absent} elements of shape {tensor.shape} out")


def _is_safetensors(source: ByteSource, offset: int) -> bool:
    try:
        begin: Any = source.read(offset, 9)
    except (EndOfSourceError, OSError):
        return False
    return begin[8:] == b"{" and int.from_bytes(begin[:8], "little") < 1 << 30
