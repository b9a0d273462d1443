"""Plans: what is to be written or read, as values that can be compared, merged and sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from savestream.arrays import dtype_itemsize
from savestream.planners.metadata import ChunkStorageMetadata, MetadataIndex, Shape, TensorProperties

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "ReadItem",
    "SavePlan",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class WriteItemType(Enum):
    """What a write item holds: a whole array, one shard of an array, or bytes."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """What a read item fills: a box of an array, or a value from bytes."""

    TENSOR = auto()
    BYTE_IO = auto()


class BytesIOWriteData(msgspec.Struct, frozen=True, gc=False):
    """Size and meaning of an item of bytes.

    ``encoding`` is ``"json"`` for savestream's safe encoding of plain values (stored inline where small),
    ``"stored-json"`` for the same stored like an array (where large), ``"pickle"`` where the user opted in, or
    ``"bytes"`` for large bytes and for what a planner of the user's produces.
    """

    nbytes: int
    encoding: str = "bytes"


class TensorWriteData(msgspec.Struct, frozen=True, gc=False):
    """A chunk to write: its box, the array's properties and the array's global size."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: Shape


class WriteItem(msgspec.Struct, frozen=True, gc=False):
    """One thing to write.

    ``alias_of`` names the item whose memory this one shares: the bytes are stored once. It is honoured only where
    both items still have the same dtype and box in the final plan.

    ``replicated`` declares that other ranks may hold the same box with the same content; one of them writes it.
    """

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None
    alias_of: MetadataIndex | None = None
    replicated: bool = False

    def tensor_storage_size(self) -> int | None:
        """Bytes of the whole (global) array, or None where the item holds no array."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * dtype_itemsize(self.tensor_data.properties.dtype)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that this item writes: its own chunk, not the global array."""
        if self.tensor_data is None:
            return self.bytes_io_data.nbytes if self.bytes_io_data is not None else 0
        return math.prod(self.tensor_data.chunk.sizes) * dtype_itemsize(self.tensor_data.properties.dtype)


class ReadItem(msgspec.Struct, frozen=True, gc=False):
    """One box to read: ``lengths`` elements from ``storage_offsets`` of a stored chunk to ``dest_offsets``."""

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: Shape
    storage_index: MetadataIndex
    storage_offsets: Shape
    lengths: Shape


class SavePlan(msgspec.Struct, frozen=True):
    """A rank's write items; ``usable=False`` says "as last time" and carries none."""

    items: Sequence[WriteItem]
    storage_data: object = None
    planner_data: object = None
    usable: bool = True


class LoadPlan(msgspec.Struct):
    """A rank's read items."""

    items: Sequence[ReadItem]
    storage_data: object = None
    planner_data: object = None
