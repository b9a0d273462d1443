"""Arrays of which a rank holds boxes: the protocol that such leaves follow, and the one for plain arrays.

A leaf is sharded when it has ``global_shape``, unless it is a plain array of numpy's or torch's. Its boxes are
``zip(global_offsets, local_sizes)``; the elements of a box come from ``__get_tensor_shard__(index)`` where the leaf has
it, else from slicing the leaf at ``local_offsets``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from savestream.arrays import adapter_of, array_info, as_plain_array, is_array, plain_array_types
from savestream.errors import PlanError, UnsafeObjectError
from savestream.planners.metadata import ChunkStorageMetadata, MetadataIndex, Shape

__all__ = [
    "CheckpointableTensor",
    "ShardedArray",
    "check_boxes",
    "find_shard",
    "flatten_shards",
    "is_sharded",
    "shard_array",
    "shard_chunks",
    "shard_dtype",
]


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A local array that holds boxes of a global one.

    Attributes
    ----------
    global_shape
        Elements of the whole array in each dimension.
    global_offsets, local_offsets
        Where each box starts in the global array, and in the local one.
    local_sizes
        Elements of each box in each dimension.
    """

    global_shape: Shape
    global_offsets: Sequence[Shape]
    local_offsets: Sequence[Shape]
    local_sizes: Sequence[Shape]


class ShardedArray:
    """Boxes of a global array, held as separate arrays.

    Parameters
    ----------
    global_shape
        Elements of the whole array in each dimension.
    shards
        ``(offsets, array)`` pairs: where each box starts, and its elements. A rank may hold several, or none. An array
        may be a ShardedArray itself, whose boxes then count from ``offsets``.
    replicated
        Other ranks may hold the same boxes with the same content; one of them writes each.
    dtype
        Dtype name; needed only where ``shards`` is empty.

    Raises
    ------
    PlanError
        A box lies outside the global array or has another number of dimensions; dtypes differ.
    """

    def __init__(
        self,
        global_shape: Sequence[int],
        shards: Sequence[tuple[Sequence[int], Any]],
        *,
        replicated: bool = False,
        dtype: str | None = None,
    ) -> None:
        self.global_shape: Shape = tuple(map(int, global_shape))
        self.global_offsets: tuple[Shape, ...] = tuple(tuple(map(int, offsets)) for offsets, _ in shards)
        self.shards: tuple[Any, ...] = tuple(array for _, array in shards)
        self.local_sizes: tuple[Shape, ...] = tuple(_shape_of(array) for array in self.shards)
        self.replicated = replicated
        self.dtype = self._common_dtype(dtype)
        check_boxes(self, "a ShardedArray")

    @property
    def shape(self) -> Shape:
        return self.global_shape

    def _common_dtype(self, dtype: str | None) -> str:
        found = {_dtype_of(array) for array in self.shards} | ({dtype} if dtype is not None else set())
        if len(found) != 1:
            raise PlanError(
                f"a ShardedArray of shape {self.global_shape} has shards of dtypes {sorted(found)}; they must be equal"
                if found
                else f"a ShardedArray of shape {self.global_shape} without shards needs dtype="
            )
        return str(found.pop())

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        return self.shards[find_shard(self, index)]

    def __repr__(self) -> str:
        boxes = ", ".join(f"{o}+{s}" for o, s in zip(self.global_offsets, self.local_sizes, strict=True))
        return f"ShardedArray({self.global_shape}, {self.dtype}, boxes [{boxes}])"


def _shape_of(array: Any) -> Shape:
    if isinstance(array, ShardedArray):
        return array.global_shape
    if not is_array(array):
        raise UnsafeObjectError(f"a shard is a {type(array).__module__}.{type(array).__qualname__}, which is no array")
    return tuple(map(int, array.shape))


def _dtype_of(array: Any) -> str:
    if isinstance(array, ShardedArray):
        return array.dtype
    return adapter_of(array, "a shard").target_info(array, "a shard").dtype  # it may be a target without data


def is_sharded(value: object) -> bool:
    """Whether a leaf is sharded: it has ``global_shape``, and is no plain array to which someone gave that name.

    One probe for most; ``isinstance`` on the protocol is ten times slower.
    """
    return hasattr(value, "global_shape") and type(value) not in plain_array_types()


def check_boxes(leaf: Any, key: str) -> None:
    """Raise PlanError unless the leaf's boxes lie inside its global shape (and its local one)."""
    count = len(leaf.global_offsets)
    local_offsets = getattr(leaf, "local_offsets", None)
    if len(leaf.local_sizes) != count or (local_offsets is not None and len(local_offsets) != count):
        raise PlanError(f"{key}: global_offsets, local_offsets and local_sizes name different numbers of shards")
    for position in range(count):
        where, size = leaf.global_offsets[position], leaf.local_sizes[position]
        _check_box(where, size, leaf.global_shape, f"{key}: shard {position}", "global_shape")
        if local_offsets is not None:
            shape = tuple(getattr(leaf, "shape", ()))
            _check_box(local_offsets[position], size, shape, f"{key}: shard {position}", "the local shape")


def _check_box(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], what: str, outer: str) -> None:
    if not len(offsets) == len(sizes) == len(shape):
        raise PlanError(f"{what} has {len(offsets)} offsets and {len(sizes)} sizes in a shape of rank {len(shape)}")
    for offset, size, dimension in zip(offsets, sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > dimension:
            raise PlanError(f"{what} at {tuple(offsets)} of sizes {tuple(sizes)} is outside {outer} {tuple(shape)}")


def shard_chunks(leaf: Any, key: str) -> tuple[Shape, list[ChunkStorageMetadata]]:
    """Global shape and boxes of a sharded leaf, checked; everything as tuples of int."""
    if not isinstance(leaf, ShardedArray):
        check_boxes(leaf, key)
    shape = tuple(map(int, leaf.global_shape))
    boxes = zip(leaf.global_offsets, leaf.local_sizes, strict=True)
    return shape, [ChunkStorageMetadata(tuple(map(int, where)), tuple(map(int, size))) for where, size in boxes]


def find_shard(leaf: Any, index: MetadataIndex) -> int:
    """Which of the leaf's boxes ``index`` means: by its hint where that is right, else by its offset."""
    offsets = leaf.global_offsets
    if index.offset is None:
        if len(offsets) == 1:
            return 0
        raise PlanError(f"{index.fqn}: the leaf has {len(offsets)} shards, so an offset is needed to name one")
    hint = index.index
    places = range(len(offsets)) if hint is None or not 0 <= hint < len(offsets) else (hint, *range(len(offsets)))
    found = [place for place in places if tuple(offsets[place]) == index.offset]
    # An empty box may start where another one does.
    for place in found:
        if 0 not in leaf.local_sizes[place]:
            return place
    if found:
        return found[0]
    raise PlanError(f"{index.fqn}: no shard starts at {index.offset}")


def shard_array(leaf: Any, index: MetadataIndex) -> Any:
    """The array (a view) with the elements of one box of a sharded leaf."""
    if hasattr(leaf, "__get_tensor_shard__"):
        return leaf.__get_tensor_shard__(index)
    position = find_shard(leaf, index)
    where, size = leaf.local_offsets[position], leaf.local_sizes[position]
    view = leaf[tuple(slice(o, o + s) for o, s in zip(where, size, strict=True))] if len(where) else leaf
    return as_plain_array(view)  # a slice keeps its subclass


def shard_dtype(leaf: Any, key: str) -> str:
    """Dtype name of a sharded leaf."""
    if isinstance(leaf, ShardedArray):
        return leaf.dtype
    offsets = leaf.global_offsets
    array = shard_array(leaf, MetadataIndex(key, tuple(offsets[0]), 0)) if len(offsets) else leaf
    return array_info(array, key).dtype


def flatten_shards(leaf: ShardedArray) -> ShardedArray:
    """A ShardedArray whose shards are ShardedArrays, as one level of boxes; others are returned as they are."""
    if not any(isinstance(shard, ShardedArray) for shard in leaf.shards):
        return leaf
    boxes: list[tuple[Shape, Any]] = []
    for outer, shard in zip(leaf.global_offsets, leaf.shards, strict=True):
        if not isinstance(shard, ShardedArray):
            boxes.append((outer, shard))
            continue
        inner = flatten_shards(shard)
        for offset, array in zip(inner.global_offsets, inner.shards, strict=True):
            boxes.append((tuple(a + b for a, b in zip(outer, offset, strict=True)), array))
    return ShardedArray(leaf.global_shape, boxes, replicated=leaf.replicated, dtype=leaf.dtype)
