"""Targets of other frameworks than numpy, opened for a load: the memory to fill, and the leaf that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayAdapter, HostArray, dtype_from_name
from savestream.planners.metadata import ChunkStorageMetadata, Shape
from savestream.planners.sharding import ShardedArray

__all__ = ["Allocate", "OpenShards", "OpenTarget", "Shard", "allocate_plain"]

Allocate = Callable[[str, Shape], HostArray]


def allocate_plain(dtype: str, shape: Shape) -> HostArray:
    """A new array of a dtype name, in ordinary memory."""
    return np.empty(shape, dtype_from_name(dtype))


class OpenTarget(msgspec.Struct):
    """A leaf that is one array: filled in its own memory, or through buffers of which a new leaf is made."""

    adapter: ArrayAdapter
    leaf: Any
    dtype: str
    shape: Shape
    boxes: Sequence[ChunkStorageMetadata] | None
    memory: HostArray | None
    _parts: list[tuple[Shape, HostArray]] = []

    def open(self, allocate: Allocate) -> Any:
        """What to fill: an array, or the boxes of one."""
        if self.boxes is not None:
            self._parts = [(box.offsets, allocate(self.dtype, box.sizes)) for box in self.boxes]
            return ShardedArray(self.shape, self._parts, dtype=self.dtype)
        memory = allocate(self.dtype, self.shape) if self.memory is None else self.memory
        self._parts = [((0,) * len(self.shape), memory)]
        return memory

    def close(self) -> Any:
        """The leaf that belongs in the target, now that everything is read."""
        parts, self._parts, self.memory = self._parts, [], None
        return self.adapter.filled(self.leaf, parts)


class Shard(msgspec.Struct):
    """One box of a leaf, and the array that holds it."""

    offsets: Shape
    sizes: Shape
    array: Any
    adapter: ArrayAdapter
    memory: HostArray | None


class OpenShards(msgspec.Struct):
    """A leaf of several boxes, of which some are no numpy arrays."""

    leaf: Any
    dtype: str
    shape: Shape
    shards: Sequence[Shard]
    _filled: list[HostArray] = []

    def open(self, allocate: Allocate) -> Any:
        """The boxes to fill."""
        self._filled = [
            allocate(self.dtype, shard.sizes) if shard.memory is None else shard.memory for shard in self.shards
        ]
        pairs = [(shard.offsets, array) for shard, array in zip(self.shards, self._filled, strict=True)]
        return ShardedArray(self.shape, pairs, dtype=self.dtype)

    def close(self) -> Any:
        """The leaf itself; a ShardedArray whose shards had to be made anew is made anew too."""
        filled, self._filled = self._filled, []
        arrays = [
            shard.adapter.filled(shard.array, [((0,) * len(shard.sizes), array)])
            for shard, array in zip(self.shards, filled, strict=True)
        ]
        if all(array is shard.array for array, shard in zip(arrays, self.shards, strict=True)):
            return self.leaf
        pairs = [(shard.offsets, array) for shard, array in zip(self.shards, arrays, strict=True)]
        return ShardedArray(self.shape, pairs, replicated=self.leaf.replicated, dtype=self.dtype)
