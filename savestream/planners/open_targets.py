"""Targets of other frameworks than numpy, opened for a load: the memory to fill, and the leaf that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayAdapter, HostArray, adapter_for, dtype_from_name
from savestream.planners.metadata import ChunkStorageMetadata, Shape
from savestream.planners.sharding import ShardedArray

__all__ = ["Allocate", "OpenShards", "OpenTarget", "Shard", "allocate_plain", "tell_changed"]

Allocate = Callable[[str, Shape], HostArray]


def allocate_plain(dtype: str, shape: Shape) -> HostArray:
    """A new array of a dtype name, in ordinary memory."""
    return np.empty(shape, dtype_from_name(dtype))


class OpenTarget(msgspec.Struct):
    """A leaf that is one array without host memory of its own: buffers are read, and a leaf is made of them."""

    adapter: ArrayAdapter
    leaf: Any
    dtype: str
    shape: Shape
    boxes: Sequence[ChunkStorageMetadata] | None
    repeated: bool = False  # its memory is filled through another leaf
    same: OpenTarget | None = None  # one that was opened before, and whose memory it shares
    _parts: list[tuple[Shape, HostArray]] = []
    _made: Any = None

    def open(self, allocate: Allocate) -> Any:
        """What to fill: an array, or the boxes of one."""
        if self.same is not None:
            self._parts = self.same._parts
            return self._parts[0][1] if self.boxes is None else _buffers(self.shape, self._parts, self.dtype)
        if self.boxes is not None:
            self._parts = [(box.offsets, allocate(self.dtype, box.sizes)) for box in self.boxes]
            return _buffers(self.shape, self._parts, self.dtype)
        buffer = allocate(self.dtype, self.shape)
        self._parts = [((0,) * len(self.shape), buffer)]
        return buffer

    def close(self) -> Any:
        """The leaf that belongs in the target, now that everything is read."""
        parts, self._parts = self._parts, []
        if self.repeated:
            return self.leaf
        if self.same is not None:
            made = self.same._made
            return made if self.same.leaf is self.leaf else self.adapter.tied(self.leaf, made)
        self._made = self.adapter.filled(self.leaf, parts)
        return self._made

    def mark_repeated(self, offsets: Shape) -> None:
        """Note that what would be filled is filled through another leaf already."""
        del offsets
        self.repeated = True


def _buffers(shape: Shape, parts: Sequence[tuple[Shape, HostArray]], dtype: str) -> ShardedArray:
    """Boxes to fill. Their dtype is numpy's, which has other names for what numpy has no such type for."""
    return ShardedArray(shape, parts, dtype=None if parts else dtype)


class Shard(msgspec.Struct):
    """One box of a leaf, and the array that holds it."""

    offsets: Shape
    sizes: Shape
    array: Any
    adapter: ArrayAdapter
    memory: HostArray | None
    repeated: bool = False  # its memory is filled through another leaf

    def close(self, filled: HostArray) -> Any:
        """The array that holds the box, now that it is read."""
        if self.repeated:
            return self.array
        if self.memory is None:
            return self.adapter.filled(self.array, [((0,) * len(self.sizes), filled)])
        return self.array


class OpenShards(msgspec.Struct):
    """A leaf of several boxes, of which some are no numpy arrays."""

    leaf: Any
    dtype: str
    shape: Shape
    shards: Sequence[Shard]
    _filled: list[HostArray] = []

    def mark_repeated(self, offsets: Shape) -> None:
        """Note that the box there is filled through another leaf already."""
        for shard in self.shards:
            if shard.offsets == offsets:
                shard.repeated = True

    @property
    def filled_in_place(self) -> list[Any]:
        """The arrays whose own memory is filled."""
        return [shard.array for shard in self.shards if shard.memory is not None and not shard.repeated]

    def open(self, allocate: Allocate) -> Any:
        """The boxes to fill."""
        self._filled = [
            allocate(self.dtype, shard.sizes) if shard.memory is None else shard.memory for shard in self.shards
        ]
        pairs = [(shard.offsets, array) for shard, array in zip(self.shards, self._filled, strict=True)]
        return _buffers(self.shape, pairs, self.dtype)

    def close(self) -> Any:
        """The leaf itself; a ShardedArray whose shards had to be made anew is made anew too."""
        filled, self._filled = self._filled, []
        arrays = [shard.close(array) for shard, array in zip(self.shards, filled, strict=True)]
        if all(array is shard.array for array, shard in zip(arrays, self.shards, strict=True)):
            return self.leaf
        pairs = [(shard.offsets, array) for shard, array in zip(self.shards, arrays, strict=True)]
        return ShardedArray(self.shape, pairs, replicated=self.leaf.replicated, dtype=self.dtype)


def tell_changed(arrays: Iterable[Any]) -> None:
    """Tell the frameworks of arrays that their own memory is being filled."""
    groups: dict[type, list[Any]] = {}
    for array in arrays:
        groups.setdefault(type(array), []).append(array)
    for kind, alike in groups.items():
        adapter = adapter_for(kind)
        if adapter is not None:
            adapter.changed(alike)
