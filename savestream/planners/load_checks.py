"""Checks of a load's targets against the checkpoint, before anything is touched."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import (
    ArrayAdapter,
    ArrayInfo,
    HostArray,
    adapter_for,
    array_info,
    dtype_from_name,
    is_opaque_dtype,
)
from savestream.errors import PlanError, SavestreamError
from savestream.planners.load_plans import same_chunk, same_storage
from savestream.planners.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Shape,
    TensorStorageMetadata,
)
from savestream.planners.open_targets import OpenShards, OpenTarget, Shard
from savestream.planners.scalars import NUMBERS, OpenNumber
from savestream.planners.sharding import ShardedArray, shard_array, shard_chunks, shard_dtype
from savestream.planners.target_memory import TargetArray, examine_targets

__all__ = ["LoadRequest", "TargetChecker", "is_castable"]

_NUMERIC_KINDS = frozenset("biufc")


class LoadRequest(msgspec.Struct, frozen=True):
    """What the checks depend on."""

    metadata: Metadata
    cast: bool


class _Group(msgspec.Struct):
    """Arrays of one framework, column by column."""

    adapter: ArrayAdapter
    infos: Sequence[ArrayInfo]
    addresses: Sequence[int]
    memories: Sequence[HostArray | None]


class TargetChecker:
    """Compares array leaves of a target with the checkpoint's entries.

    Attributes
    ----------
    boxes
        The boxes to fill of each array leaf.
    shape_mismatches, dtype_mismatches, problems
        One line for each fault.
    repeated
        ``(name, offset)`` of boxes whose memory is filled through another leaf already.
    memories
        Leaves of other frameworks than numpy, as numpy views of their own memory.
    open_targets
        Leaves that have no such memory, and how each is filled.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._entries = request.metadata.state_dict_metadata
        self.boxes: dict[str, list[ChunkStorageMetadata]] = {}
        self.shape_mismatches: list[str] = []
        self.dtype_mismatches: list[str] = []
        self.problems: list[str] = []
        self.repeated: set[tuple[str, Shape | None]] = set()
        self.memories: dict[str, HostArray] = {}
        self.open_targets: dict[str, OpenTarget | OpenShards | OpenNumber] = {}
        self._arrays: list[TargetArray] = []
        self._identities: dict[Hashable, str] = {}
        self._names: dict[np.dtype[Any], str] = {}
        self._whole: dict[Shape, list[ChunkStorageMetadata]] = {}

    def check(self, targets: Mapping[str, Any]) -> None:
        """Check all array leaves among the targets."""
        groups: dict[int, tuple[ArrayAdapter, list[str]]] = {}
        for name, leaf in targets.items():
            entry = self._entries[name]
            if not isinstance(entry, TensorStorageMetadata):
                continue
            adapter = None if type(leaf) is np.ndarray else adapter_for(type(leaf))
            if adapter is not None:
                groups.setdefault(id(adapter), (adapter, []))[1].append(name)
                continue
            with self._noting_problems():
                if type(leaf) is np.ndarray:
                    self._check_numpy(name, leaf, entry)
                elif type(leaf) in NUMBERS:
                    self.boxes[name] = self._whole_box(())
                    self.open_targets[name] = OpenNumber(type(leaf), entry.properties.dtype)
                else:
                    self._check_shards(name, leaf, entry)
        for adapter, names in groups.values():
            self._check_group(adapter, names, [targets[name] for name in names])
        self._check_memory()

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except SavestreamError as error:
            self.problems.append(str(error))

    def _check_numpy(self, name: str, leaf: Any, entry: TensorStorageMetadata) -> None:
        dtype = self._names.get(leaf.dtype)
        if dtype is None:
            dtype = self._names[leaf.dtype] = array_info(leaf, name).dtype
        self._compare(name, leaf.shape, dtype, entry)
        self.boxes[name] = self._whole_box(leaf.shape)
        self._arrays.append(TargetArray(name, (), leaf))
        if not leaf.flags.writeable:
            self._note_problem(name, "the target is read-only; load into a copy of it")

    def _check_group(self, adapter: ArrayAdapter, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Check all leaves of one framework; all at once where none of them is wrong, which is far quicker."""
        try:
            infos = adapter.target_infos(leaves, names)
        except SavestreamError:
            self._check_one_by_one(adapter, names, leaves)
            return
        group = _Group(adapter, infos, adapter.addresses(leaves), adapter.own_memories(leaves))
        self._check_arrays(group, names, leaves)

    def _check_one_by_one(self, adapter: ArrayAdapter, names: Sequence[str], leaves: Sequence[Any]) -> None:
        for name, leaf in zip(names, leaves, strict=True):
            with self._noting_problems():
                info = adapter.target_info(leaf, name)
                self._check_arrays(_Group(adapter, [info], adapter.addresses([leaf]), [None]), [name], [leaf])

    def _check_arrays(self, group: _Group, names: Sequence[str], leaves: Sequence[Any]) -> None:
        adapter = group.adapter
        columns = zip(names, leaves, group.infos, group.addresses, group.memories, strict=True)
        for name, leaf, info, address, memory in columns:
            self._compare(name, info.shape, info.dtype, self._entries[name])
            self.boxes[name] = self._whole_box(info.shape)
            if problem := adapter.fill_problem(leaf):
                self._note_problem(name, problem)
            elif memory is not None:
                self.memories[name] = memory
                self._arrays.append(TargetArray(name, (), leaf, info, address))
            else:
                with self._noting_problems():
                    self._open_target(adapter, name, leaf, info, address)

    def _open_target(self, adapter: ArrayAdapter, name: str, leaf: Any, info: ArrayInfo, address: int) -> None:
        boxes = adapter.target_boxes(leaf, name)
        chunks = None
        if boxes is not None:
            chunks = self.boxes[name] = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in boxes]
        target = self.open_targets[name] = OpenTarget(adapter, leaf, info.dtype, info.shape, chunks)
        if not adapter.is_filled_in_place(leaf):
            self._tie_replaced(name, target)
            return
        if chunks is None:
            self._arrays.append(TargetArray(name, (), leaf, info, address))
        elif chunks:  # its memory is that of the boxes only
            self._arrays.append(TargetArray(name, chunks[0].offsets, adapter.local_array(leaf)))

    def _tie_replaced(self, name: str, target: OpenTarget) -> None:
        """Give targets that were tied without memory one memory, where the checkpoint has them tied too."""
        identity = target.adapter.identity(target.leaf)
        first = name if identity is None else self._identities.setdefault(identity, name)
        if first == name or not same_storage(first, name, self._entries, self._request.metadata.storage_data):
            return
        earlier = self.open_targets[first]
        if isinstance(earlier, OpenTarget):
            target.same = earlier
            self.repeated |= {(name, box.offsets) for box in self.boxes[name]}

    def _check_shards(self, name: str, leaf: Any, entry: TensorStorageMetadata) -> None:
        shape, boxes = shard_chunks(leaf, name)
        dtype = shard_dtype(leaf, name)
        self.boxes[name] = boxes
        self._compare(name, shape, dtype, entry)
        shards = []
        for position, box in enumerate(boxes):
            if isinstance(leaf, ShardedArray):
                array = leaf.shards[position]
            elif 0 in box.sizes:
                continue  # nothing to fill, and another box may start at the same place
            else:
                array = shard_array(leaf, MetadataIndex(name, box.offsets, position))
            shards.append(self._check_shard(name, leaf, box, array))
        if any(type(shard.array) is not np.ndarray for shard in shards):
            self.open_targets[name] = OpenShards(leaf, dtype, shape, shards)

    def _check_shard(self, name: str, leaf: Any, box: ChunkStorageMetadata, array: Any) -> Shard:
        adapter = adapter_for(type(array))
        if adapter is None:
            raise PlanError(f"{name}: {type(array).__qualname__} is no array that a load can fill")
        info = adapter.target_info(array, name)
        in_place = adapter.is_filled_in_place(array)
        problem = adapter.fill_problem(array)
        if problem is None and not in_place and not isinstance(leaf, ShardedArray):
            problem = "its shards cannot be changed in place; make the target a ShardedArray of them"
        if problem is not None:
            self._note_problem(name, problem)
        if in_place and info.nbytes:
            self._arrays.append(TargetArray(name, box.offsets, array, info, adapter.addresses([array])[0]))
        return Shard(box.offsets, box.sizes, array, adapter, adapter.own_memory(array))

    def _note_problem(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")

    def _whole_box(self, shape: Shape) -> list[ChunkStorageMetadata]:
        boxes = self._whole.get(shape)
        if boxes is None:
            boxes = self._whole[shape] = [ChunkStorageMetadata((0,) * len(shape), shape)]
        return boxes

    def _compare(self, name: str, shape: Shape, dtype: str, entry: Any) -> None:
        if shape != entry.size:
            self.shape_mismatches.append(f"{name} (checkpoint {entry.size}, target {shape})")
        stored = entry.properties.dtype
        if dtype != stored and not (self._request.cast and is_castable(stored, dtype)):
            self.dtype_mismatches.append(f"{name} (checkpoint {stored}, target {dtype})")

    def _check_memory(self) -> None:
        ties, problems = examine_targets(self._arrays)
        self.problems += [text for _, text in problems]
        for first, later in ties:
            one, other = self._arrays[first], self._arrays[later]
            if self._are_stored_alike(one, other):
                box = self._box_of(other)
                self.repeated.add((other.name, box))
                opened = self.open_targets.get(other.name)
                if isinstance(opened, OpenTarget | OpenShards):
                    opened.mark_repeated(box)
            elif one.name != other.name:
                self.problems.append(
                    f"{one.name} and {other.name}: the targets are the same memory, but the checkpoint stores them "
                    "apart; untie them, or load only one of them with keys="
                )
            else:
                self.problems.append(f"{one.name}: two boxes of the target are the same memory")

    def _are_stored_alike(self, one: TargetArray, other: TargetArray) -> bool:
        """Whether the checkpoint has the same elements for two targets of one memory, since it stores them once."""
        first, second = self._box_of(one), self._box_of(other)
        stored = self._request.metadata.storage_data
        if one.name != other.name and first == second and same_storage(one.name, other.name, self._entries, stored):
            return True
        indices = MetadataIndex(one.name, first), MetadataIndex(other.name, second)
        shape = one.array.shape if one.info is None else one.info.shape  # not every array has one
        return same_chunk(*indices, tuple(shape), self._entries, stored)

    def _box_of(self, target: TargetArray) -> Shape:
        """Where the target's elements begin in the whole array; a plain array says nothing of it."""
        return target.offsets or (0,) * len(self._entries[target.name].size)  # type: ignore[union-attr]


def is_castable(stored: str, wanted: str) -> bool:
    """Whether a conversion between two dtypes makes sense: numbers to numbers, never from complex to real."""
    if is_opaque_dtype(stored) or is_opaque_dtype(wanted):
        return False
    source, target = dtype_from_name(stored), dtype_from_name(wanted)
    if source.newbyteorder("=") == target.newbyteorder("="):
        return True
    return _is_numeric(source) and _is_numeric(target) and (_is_complex(target) or not _is_complex(source))


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether elements are numbers; those of ml_dtypes have kinds of their own, or share them with other types."""
    return dtype.kind in _NUMERIC_KINDS or dtype.type.__module__ == "ml_dtypes"


def _is_complex(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32")
