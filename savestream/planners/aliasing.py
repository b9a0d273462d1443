"""Which array leaves are the same memory, seen the same way."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from savestream.arrays import ArrayInfo, HostArray
from savestream.arrays.adapter import Layout, effective_strides
from savestream.arrays.dtypes import interned_dtype_name
from savestream.planners.flattening import ARRAY, SHARDED, FlatState

__all__ = ["alias_partition", "numpy_address", "numpy_layout"]


def alias_partition(flat: FlatState) -> dict[int, int]:
    """For each array leaf that repeats an earlier one: its position and that of the first.

    A sharded leaf repeats another where both are the same object. Of the others, two are the same where address, dtype,
    shape, strides and the variant (device, conjugation) are equal and there is at least one byte. Reading numpy's
    addresses costs far more than everything else here, so only leaves that can be aliases are asked for theirs: arrays
    that own their memory are told apart by identity.
    """
    arrays = [leaf for leaf in flat.leaves if type(leaf) is np.ndarray] if np.ndarray in flat.types else []
    owners = set(map(type, map(attrgetter("base"), arrays))) <= {type(None)}
    aliases = {} if owners and len(set(map(id, arrays))) == len(arrays) else _numpy_aliases(flat)
    if len(arrays) < flat.kinds.count(ARRAY):
        aliases.update(_other_aliases(flat))
        if arrays:
            _join_frameworks(flat, aliases)
    first_of: dict[int, int] = {}
    for position in flat.positions(SHARDED):
        if (first := first_of.setdefault(id(flat.leaves[position]), position)) != position:
            aliases[position] = first
    return aliases


def _join_frameworks(flat: FlatState, aliases: dict[int, int]) -> None:
    """Add what is an array of numpy's and a leaf of another framework at once, as a tensor and its ``numpy()`` are."""
    described = flat.described_arrays()
    places: dict[tuple[int, Layout], list[int]] = {}
    for position, first, address in zip(described.positions, described.firsts, described.addresses, strict=True):
        info = described.infos[first]
        if address and info.nbytes and not info.variant and position not in aliases:
            places.setdefault((address, info.layout), []).append(position)
    for position, leaf in enumerate(flat.leaves):
        if type(leaf) is np.ndarray and flat.kinds[position] == ARRAY and position not in aliases:
            partners = places.get((numpy_address(leaf), numpy_layout(leaf)))
            if partners is not None:
                partners.append(position)
    tied = {position: min(partners) for partners in places.values() for position in partners}
    aliases.update({position: tied.get(first, first) for position, first in aliases.items()})
    aliases.update({position: first for position, first in tied.items() if position != first})


def _other_aliases(flat: FlatState) -> dict[int, int]:
    described = flat.described_arrays()
    if len(set(described.addresses)) == len(described.addresses):
        return {}
    alike = _numbered(described.infos)
    aliases: dict[int, int] = {}
    first_of: dict[tuple[int, int], int] = {}
    identical: dict[int, int] = {}
    columns = zip(described.positions, described.firsts, described.addresses, strict=True)
    for position, like, address in sorted(columns):  # several frameworks may have leaves in one memory
        first = identical.setdefault(id(flat.leaves[position]), position)
        if address and first == position and described.infos[like].nbytes:
            first = first_of.setdefault((address, alike[like]), position)
        if first != position:
            aliases[position] = first
    return aliases


def _numbered(infos: dict[int, ArrayInfo]) -> dict[int, int]:
    """A number for each description, equal for those of equal layout."""
    numbers: dict[Layout, int] = {}
    return {position: numbers.setdefault(info.layout, len(numbers)) for position, info in infos.items()}


def _numpy_aliases(flat: FlatState) -> dict[int, int]:
    """Aliases among numpy's arrays. An array's base does not tell whose memory it is: several may lie over the same."""
    aliases: dict[int, int] = {}
    first_of: dict[int, int] = {}
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(flat.leaves):
        if type(leaf) is not np.ndarray or flat.kinds[position] != ARRAY:
            continue
        if (first := first_of.setdefault(id(leaf), position)) != position:
            aliases[position] = first
        elif leaf.size:
            strides = effective_strides(leaf.shape, leaf.strides)
            groups.setdefault((leaf.dtype, leaf.shape, strides), []).append(position)
    for group in groups.values():
        if len(group) > 1:
            _split_by_memory(flat, group, aliases)
    return aliases


def _split_by_memory(flat: FlatState, group: list[int], aliases: dict[int, int]) -> None:
    """Find aliases among arrays that differ in nothing but where they begin."""
    memories: dict[int | None, list[int]] = {}
    for position in group:
        memories.setdefault(_owner(flat.leaves[position]), []).append(position)
    for positions in [group] if None in memories else memories.values():
        if len(positions) > 1:
            by_address: dict[int, int] = {}
            for position in positions:
                first = by_address.setdefault(numpy_address(flat.leaves[position]), position)
                if first != position:
                    aliases[position] = first


def _owner(array: HostArray) -> int | None:
    """Which of numpy's arrays has the memory; None where something else has it, of which anything may be a part."""
    base = array.base
    if base is None:
        return id(array)
    return id(base) if type(base) is np.ndarray and base.base is None else None


def numpy_address(array: HostArray) -> int:
    """Where the first element is. Slow, as everything is that numpy tells about addresses."""
    address: int = array.__array_interface__["data"][0]
    return address


def numpy_layout(array: HostArray) -> Layout:
    """As :attr:`savestream.arrays.ArrayInfo.layout`, without a description."""
    return interned_dtype_name(array.dtype) or "", array.shape, effective_strides(array.shape, array.strides), ""
