"""What a checkpoint holds: names, shapes, chunks. Pure values, the vocabulary of every planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from savestream.planners.structure import StateTree

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "PlannerData",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]

Shape: TypeAlias = tuple[int, ...]


class MetadataIndex(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Names one stored thing: a whole value, or the chunk of an array that starts at ``offset``.

    Two indices are equal when ``fqn`` and ``offset`` are; ``index`` is only a hint where to look first.
    """

    fqn: str
    offset: Shape | None = None
    index: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataIndex):
            return NotImplemented
        return self.fqn == other.fqn and self.offset == other.offset

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))


class ChunkStorageMetadata(msgspec.Struct, frozen=True, gc=False):
    """A box of an array: ``sizes`` elements from ``offsets`` on, one entry a dimension."""

    offsets: Shape
    sizes: Shape


class TensorProperties(msgspec.Struct, frozen=True, gc=False):
    """What an array is besides its shape; ``dtype`` is a name of :func:`savestream.arrays.dtype_name`."""

    dtype: str
    requires_grad: bool = False


class TensorStorageMetadata(msgspec.Struct, frozen=True, gc=False):
    """A stored array: global ``size`` in elements and the chunks that cover it exactly once."""

    properties: TensorProperties
    size: Shape
    chunks: Sequence[ChunkStorageMetadata]


class BytesStorageMetadata(msgspec.Struct, frozen=True, gc=False):
    """A stored value that is not an array; ``encoding`` is that of its ``BytesIOWriteData``."""

    encoding: str = "json"


class StorageMeta(msgspec.Struct, frozen=True, gc=False):
    """Where and for which operation a planner plans."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None


class PlannerData(msgspec.Struct, frozen=True):
    """What the default planners keep beside the items.

    Attributes
    ----------
    tree
        The nesting of the state.
    mappings
        From each leaf's ``fqn`` to its typed path.
    values
        On a load: encoded values (JSON text or its tree) that are known before anything is read, by ``fqn``. They let
        a load planner compare the insides of plain values with the target before it touches anything.
    shardless
        On a save: sharded arrays of which this rank holds no part.
    fingerprint
        On a save with plan caching: which of the rank's plans this is.
    """

    tree: StateTree | None = None
    mappings: Mapping[str, tuple[object, ...]] = {}
    values: Mapping[str, object] = {}
    shardless: tuple[str, ...] = ()
    fingerprint: bytes | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Everything that a load planner needs to know of a checkpoint.

    ``planner_data`` is a :class:`PlannerData` when the default planners made it. ``storage_data`` belongs to the
    pipeline: it maps a :class:`MetadataIndex` to where the chunk lies.
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: object = None
    storage_data: object = None
    storage_meta: StorageMeta | None = None
    version: str | None = None
