"""The default plans of a save: items of a flattened state, and the global plan of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from savestream.arrays import ArrayInfo, array_info, array_refusal
from savestream.errors import PlanError
from savestream.planners.aliasing import alias_partition
from savestream.planners.containers import category_of
from savestream.planners.flattening import ARRAY, SHARDED, VALUE, FlatState, flatten_top_level
from savestream.planners.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    PlannerData,
    Shape,
    TensorProperties,
    TensorStorageMetadata,
)
from savestream.planners.plan import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from savestream.planners.shard_aliases import BoxPlace, shard_aliases
from savestream.planners.sharding import shard_chunks, shard_dtype
from savestream.planners.trees import merge_trees, structure_for_items, tree_mappings
from savestream.planners.value_encoding import encode_value_bytes, pickle_object, plain_class

__all__ = [
    "CapturedValue",
    "capture_value",
    "create_default_global_save_plan",
    "create_default_local_save_plan",
    "create_write_items",
    "merge_planner_data",
    "shardless_names",
]


# Larger values are stored like arrays: the root stays small, and every load of anything reads the root.
_INLINE_BYTES = 64 * 1024
_INLINE_JSON_BYTES = 1024 * 1024


class CapturedValue(msgspec.Struct, frozen=True, gc=False):
    """A plain value as the bytes to store."""

    encoding: str
    data: bytes


def capture_value(value: object, name: str, allow_pickle: bool) -> CapturedValue:
    """Encode a value leaf; what has no safe encoding is pickled where the caller opted in."""
    if allow_pickle and category_of(value) is None and not plain_class(value) and not array_refusal(value):
        return CapturedValue("pickle", pickle_object(value, name))
    if type(value) is bytes and len(value) > _INLINE_BYTES:
        return CapturedValue("bytes", value)
    encoded = encode_value_bytes(value, name, allow_pickle=allow_pickle)
    return CapturedValue("json" if len(encoded) <= _INLINE_JSON_BYTES else "stored-json", encoded)


def create_write_items(flat: FlatState, values: Mapping[str, CapturedValue]) -> list[WriteItem]:
    """One item for each plain array and value, and one for each shard that is not empty.

    Raises
    ------
    UnsafeObjectError
        An array cannot be stored; the message names its key.
    """
    builder = _ItemBuilder()
    items: list[WriteItem] = []
    aliases = alias_partition(flat)
    boxes = shard_aliases(flat, aliases)
    indices: list[MetadataIndex | None] = []
    described = flat.described_arrays()
    infos = dict(zip(described.positions, map(described.infos.__getitem__, described.firsts), strict=True))
    for position, (name, leaf, kind) in enumerate(zip(flat.names, flat.leaves, flat.kinds, strict=True)):
        if kind == ARRAY:
            item = builder.tensor(name, leaf, infos.get(position))
            first = aliases.get(position) if aliases else None
            if first is not None:
                item = msgspec.structs.replace(item, alias_of=indices[first])
            indices.append(item.index)
            items.append(item)
            continue
        indices.append(None)
        if kind == SHARDED:
            first_of = {box: _index_of(flat, place) for box, place in boxes[position].items()}
            items += builder.shards(name, leaf, first_of)
        else:
            data = values[name]
            written = BytesIOWriteData(len(data.data), data.encoding)
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, written))
    return items


def _index_of(flat: FlatState, place: BoxPlace) -> MetadataIndex:
    position, box = place
    name, leaf = flat.names[position], flat.leaves[position]
    if box is None:
        return MetadataIndex(name, (0,) * len(leaf.shape), 0)
    return MetadataIndex(name, tuple(map(int, leaf.global_offsets[box])), box)


class _ItemBuilder:
    def __init__(self) -> None:
        self._properties: dict[Any, TensorProperties] = {}
        self._boxes: dict[Shape, ChunkStorageMetadata] = {}
        self._data: dict[tuple[int, Shape], TensorWriteData] = {}  # arrays of equal dtype and shape share one

    def _properties_of(self, dtype: str, requires_grad: bool) -> TensorProperties:
        return self._properties.setdefault((dtype, requires_grad), TensorProperties(dtype, requires_grad))

    def _whole(self, shape: Shape) -> ChunkStorageMetadata:
        box = self._boxes.get(shape)
        if box is None:
            box = self._boxes[shape] = ChunkStorageMetadata((0,) * len(shape), shape)
        return box

    def tensor(self, name: str, leaf: Any, info: ArrayInfo | None) -> WriteItem:
        if info is None:  # numpy's
            dtype, shape = leaf.dtype, leaf.shape
            properties = self._properties.get(dtype)
            if properties is None:
                properties = self._properties_of(array_info(leaf, name).dtype, False)
                self._properties[dtype] = properties
        else:
            shape = info.shape
            properties = self._properties_of(info.dtype, bool(getattr(leaf, "requires_grad", False)))
        data = self._data.get((id(properties), shape))
        if data is None:
            data = self._data[id(properties), shape] = TensorWriteData(self._whole(shape), properties, shape)
        return WriteItem(MetadataIndex(name, data.chunk.offsets, 0), WriteItemType.TENSOR, None, data)

    def shards(self, name: str, leaf: Any, first_of: Mapping[int, MetadataIndex]) -> list[WriteItem]:
        """The items of a sharded leaf; ``first_of`` tells of each box that is stored already as which it is."""
        shape, chunks = shard_chunks(leaf, name)
        replicated = bool(getattr(leaf, "replicated", False))
        if 0 in shape:  # every rank describes an empty array the same way
            chunks, replicated = [self._whole(shape)], True
        if not chunks:
            return []
        properties = self._properties_of(shard_dtype(leaf, name), bool(getattr(leaf, "requires_grad", False)))
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, position),
                WriteItemType.SHARD,
                None,
                TensorWriteData(chunk, properties, shape),
                None if 0 in shape else first_of.get(position),
                replicated,
            )
            for position, chunk in enumerate(chunks)
            if 0 in shape or 0 not in chunk.sizes
        ]


def shardless_names(flat: FlatState, items: Sequence[WriteItem]) -> tuple[str, ...]:
    """Sharded leaves for which this rank has no item."""
    if SHARDED not in flat.kinds:
        return ()
    planned = {item.index.fqn for item in items}
    pairs = zip(flat.names, flat.kinds, strict=True)
    return tuple([name for name, kind in pairs if kind == SHARDED and name not in planned])


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool = True) -> SavePlan:
    """The plan of a flat state: a dict from name to array, sharded array or plain value.

    Replicated leaves are planned on every rank alike, so ``is_coordinator`` makes no difference.
    """
    del is_coordinator
    flat = flatten_top_level(state_dict)
    values = {
        name: capture_value(leaf, name, allow_pickle=False)
        for name, leaf, kind in zip(flat.names, flat.leaves, flat.kinds, strict=True)
        if kind == VALUE
    }
    return SavePlan(create_write_items(flat, values))


def create_default_global_save_plan(
    all_plans: Sequence[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Describe what the plans write together; the plans come back with the position of each chunk as its hint.

    Nothing is checked here: see :func:`~savestream.planners.validation.validate_global_plan`.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    several: dict[str, list[ChunkStorageMetadata]] = {}
    known: dict[int, TensorStorageMetadata] = {}  # one entry for all arrays of equal description
    for plan in all_plans:
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                encoding = item.bytes_io_data.encoding if item.bytes_io_data is not None else "bytes"
                entries.setdefault(name, BytesStorageMetadata(encoding))
                continue
            entry = known.get(id(data))
            if entry is None:
                entry = known[id(data)] = TensorStorageMetadata(data.properties, data.size, (data.chunk,))
            before = len(entries)
            first = entries.setdefault(name, entry)
            if len(entries) > before or not isinstance(first, TensorStorageMetadata):
                continue
            several.setdefault(name, list(first.chunks)).append(data.chunk)
    hints: dict[str, dict[Shape, int]] = {}
    for name, held in several.items():
        held.sort(key=_offsets)
        entries[name] = msgspec.structs.replace(entries[name], chunks=held)
        hints[name] = {chunk.offsets: position for position, chunk in enumerate(held)}
    plans = list(all_plans)
    if rewrite_index_hints:
        plans = [_with_hints(plan, hints) for plan in plans]
    return plans, Metadata(entries)


def _offsets(chunk: ChunkStorageMetadata) -> Shape:
    return chunk.offsets


def _with_hints(plan: SavePlan, hints: Mapping[str, Mapping[Shape, int]]) -> SavePlan:
    if not hints and all(item.tensor_data is None or item.index.index == 0 for item in plan.items):
        return plan
    return msgspec.structs.replace(plan, items=[_with_hint(item, hints.get(item.index.fqn)) for item in plan.items])


def _with_hint(item: WriteItem, positions: Mapping[Shape, int] | None) -> WriteItem:
    if item.tensor_data is None:
        return item
    position = 0 if positions is None else positions[item.tensor_data.chunk.offsets]
    if item.index.index == position:
        return item
    index = msgspec.structs.replace(item.index, index=position)
    return msgspec.structs.replace(item, index=index)


def merge_planner_data(plans: Sequence[SavePlan], metadata: Metadata) -> PlannerData:
    """Structure and paths of all ranks' leaves, fitted to the items that are planned.

    Raises
    ------
    PlanError
        The ranks' structures contradict each other, no rank holds any part of a sharded array, or a planner skipped
        an element of a sequence or record.
    """
    data = [plan.planner_data for plan in plans if isinstance(plan.planner_data, PlannerData)]
    entries = metadata.state_dict_metadata
    absent = [name for one in data for name in one.shardless if name not in entries]
    if absent:
        raise PlanError(f"{absent[0]}: no rank holds any part of this sharded array")
    tree = merge_trees([one.tree for one in data])
    mappings = dict(data[0].mappings) if data else {}
    for one in data[1:]:
        mappings.update(one.mappings)
    if mappings.keys() == entries.keys() and tree is not None:
        return PlannerData(tree, mappings)
    tree = structure_for_items(tree, entries)
    return PlannerData(tree, tree_mappings(tree))
