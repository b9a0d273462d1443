"""Which boxes of sharded leaves are the same memory as another box, or as a plain array."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from savestream.arrays import ArrayAdapter, adapter_of
from savestream.arrays.adapter import Layout
from savestream.planners.aliasing import numpy_address, numpy_layout
from savestream.planners.flattening import ARRAY, SHARDED, FlatState
from savestream.planners.sharding import ShardedArray

__all__ = ["BoxPlace", "shard_aliases"]

BoxPlace: TypeAlias = tuple[int, int | None]  # the position of a leaf, and which of its boxes; None for a plain array
_Memory: TypeAlias = tuple[int, Layout]


def shard_aliases(flat: FlatState, aliases: Mapping[int, int]) -> dict[int, dict[int, BoxPlace]]:
    """For each sharded leaf by position, and each box of it that is the same memory as another: which that is.

    Parameters
    ----------
    flat
        The state.
    aliases
        Its leaves that repeat an earlier one; of a sharded one all boxes do.
    """
    if SHARDED not in flat.kinds:
        return {}
    found: dict[int, dict[int, BoxPlace]] = {position: {} for position in flat.positions(SHARDED)}
    boxes = dict(_boxes(flat, aliases))
    places: dict[_Memory, BoxPlace] = {}
    for memory, position in _plain_arrays(flat, aliases, {layout for _, layout in boxes.values()}):
        places.setdefault(memory, (position, None))
    for place, memory in boxes.items():
        if (first := places.setdefault(memory, place)) != place:
            position, box = place
            found[position][box] = first
    for position, own in found.items():
        if (leaf := aliases.get(position)) is not None:
            for box in range(len(flat.leaves[position].global_offsets)):
                own[box] = found[leaf].get(box, (leaf, box))
    return found


def _boxes(flat: FlatState, aliases: Container[int]) -> Iterator[tuple[tuple[int, int], _Memory]]:
    """The boxes whose memory is known. Only of a ShardedArray: other leaves may make theirs anew at each look."""
    groups: dict[int, tuple[ArrayAdapter, list[tuple[int, int]], list[Any]]] = {}
    for position in flat.positions(SHARDED):
        leaf = flat.leaves[position]
        if position in aliases or not isinstance(leaf, ShardedArray):
            continue
        for box, array in enumerate(leaf.shards):
            if 0 not in leaf.local_sizes[box]:
                adapter = adapter_of(array)
                _, places, arrays = groups.setdefault(id(adapter), (adapter, [], []))
                places.append((position, box))
                arrays.append(array)
    for adapter, places, arrays in groups.values():
        infos = adapter.infos(arrays, [flat.names[position] for position, _ in places])
        for place, info, address in zip(places, infos, adapter.addresses(arrays), strict=True):
            if address and info.nbytes:
                yield place, (address, info.layout)


def _plain_arrays(flat: FlatState, aliases: Container[int], wanted: set[Layout]) -> Iterator[tuple[_Memory, int]]:
    described = flat.described_arrays()
    for position, first, address in zip(described.positions, described.firsts, described.addresses, strict=True):
        layout = described.infos[first].layout
        if address and layout in wanted and position not in aliases:
            yield (address, layout), position
    for position, leaf in enumerate(flat.leaves):
        if type(leaf) is np.ndarray and flat.kinds[position] == ARRAY and position not in aliases:
            layout = numpy_layout(leaf)
            if layout in wanted:
                yield (numpy_address(leaf), layout), position
