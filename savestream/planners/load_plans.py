"""The default plans of a load: which boxes of stored chunks fill which boxes of the target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.planners.geometry import match_boxes, narrow
from savestream.planners.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, Shape, TensorStorageMetadata
from savestream.planners.plan import LoadItemType, LoadPlan, ReadItem
from savestream.planners.validation import check_chunks, is_whole

__all__ = [
    "box_of",
    "create_default_global_load_plan",
    "create_read_items",
    "plan_reads",
    "same_chunk",
    "same_storage",
    "value_read_item",
]


def create_read_items(
    name: str, entry: TensorStorageMetadata, wanted: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """The reads that fill the boxes ``wanted`` of one array from its stored chunks.

    Every element of every wanted box is read exactly once; empty boxes need no read.

    Raises
    ------
    CorruptCheckpointError
        The stored chunks overlap or leave elements out.
    """
    chunks = entry.chunks
    if len(chunks) == 1 and len(wanted) == 1 and chunks[0] == wanted[0] and is_whole(chunks[0], entry.size):
        if 0 in entry.size:
            return []
        box = chunks[0]
        index = MetadataIndex(name, box.offsets, 0)
        return [ReadItem(LoadItemType.TENSOR, index, box.offsets, index, box.offsets, box.sizes)]
    faults = check_chunks(name, entry.size, chunks)
    if faults:
        raise CorruptCheckpointError(f"the checkpoint does not hold all of {name}: {faults[0]}", faults)
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name, wanted[target].offsets, target),
            _minus(offsets, wanted[target].offsets),
            MetadataIndex(name, chunks[stored].offsets, stored),
            _minus(offsets, chunks[stored].offsets),
            sizes,
        )
        for stored, target, offsets, sizes in match_boxes(chunks, wanted)
    ]


def _minus(first: Shape, second: Shape) -> Shape:
    return tuple([a - b for a, b in zip(first, second, strict=True)])


def value_read_item(name: str) -> ReadItem:
    """The read of a plain value."""
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())


def same_storage(first: str, second: str, entries: Mapping[str, object], storage_data: object) -> bool:
    """Whether two arrays of a checkpoint are the same stored chunks, by what the pipeline says of their places."""
    one, other = entries[first], entries[second]
    if not isinstance(one, TensorStorageMetadata) or not isinstance(other, TensorStorageMetadata):
        return False
    if (
        one.size != other.size
        or one.properties.dtype != other.properties.dtype
        or list(one.chunks) != list(other.chunks)
    ):
        return False
    if not isinstance(storage_data, Mapping):
        return False
    for chunk in one.chunks:
        place = storage_data.get(MetadataIndex(first, chunk.offsets))
        if place is None or place != storage_data.get(MetadataIndex(second, chunk.offsets)):
            return False
    return True


def same_chunk(
    first: MetadataIndex, second: MetadataIndex, sizes: Shape, entries: Mapping[str, object], storage_data: object
) -> bool:
    """Whether two boxes of as many elements are one stored chunk, each of them the whole of it."""
    if not isinstance(storage_data, Mapping):
        return False
    dtypes = set()
    for index in (first, second):
        entry = entries[index.fqn]
        box = ChunkStorageMetadata(index.offset or (), sizes)
        if not isinstance(entry, TensorStorageMetadata) or box not in entry.chunks:
            return False
        dtypes.add(entry.properties.dtype)
    place = storage_data.get(first)
    return len(dtypes) == 1 and place is not None and place == storage_data.get(second)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Each rank reads what it planned."""
    return all_plans


def plan_reads(
    metadata: Metadata,
    targets: Iterable[str],
    boxes: Mapping[str, Sequence[ChunkStorageMetadata]],
    repeated: Collection[tuple[str, Shape | None]],
) -> list[ReadItem]:
    """The reads of all targets; none for the ``(name, offset)`` that are ``repeated``, filled through another leaf."""
    items: list[ReadItem] = []
    for name in targets:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            items += create_read_items(name, entry, boxes[name])
        else:
            items.append(value_read_item(name))
    if repeated:
        items = [item for item in items if (item.dest_index.fqn, item.dest_index.offset) not in repeated]
    return items


def box_of(found: Any, item: ReadItem) -> Any:
    """The item's box of what was looked up. A view of it, so never numpy's of a copy that another framework made."""
    if isinstance(found, np.ndarray):
        return narrow(np.asarray(found), item.dest_offsets, item.lengths)
    if not any(item.dest_offsets) and tuple(getattr(found, "shape", ())) == item.lengths:
        return found
    try:
        return narrow(found, item.dest_offsets, item.lengths)
    except Exception as error:  # whatever another library says of it
        key, kind = item.dest_index.fqn, f"{type(found).__module__}.{type(found).__qualname__}"
        problem = f"a box of a {kind} at {item.dest_offsets} of sizes {item.lengths} cannot be had"
        raise PlanError(f"{key}: {problem}: {type(error).__name__}: {error}") from error
