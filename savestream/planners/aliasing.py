"""Which array leaves are the same memory, seen the same way."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from savestream.arrays import ArrayInfo
from savestream.arrays.dtypes import interned_dtype_name
from savestream.planners.flattening import ARRAY, SHARDED, FlatState

__all__ = ["alias_partition"]


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
    described, tied = flat.described_arrays(), {}
    places: dict[tuple[Any, ...], int] = {}
    for position, first, address in zip(described.positions, described.firsts, described.addresses, strict=True):
        info = described.infos[first]
        if address and info.nbytes and not info.variant:
            places.setdefault((address, info.dtype, info.shape, info.strides), aliases.get(position, position))
    for position, leaf in enumerate(flat.leaves):
        if type(leaf) is np.ndarray and flat.kinds[position] == ARRAY and position not in aliases:
            address, name = leaf.__array_interface__["data"][0], interned_dtype_name(leaf.dtype)
            other = places.get((address, name, leaf.shape, leaf.strides))
            if other is not None:
                tied[max(position, other)] = min(position, other)
    aliases.update({position: tied.get(first, first) for position, first in aliases.items()})
    aliases.update(tied)


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
    """A number for each description, equal for equal ones."""
    numbers: dict[ArrayInfo, int] = {}
    return {position: numbers.setdefault(info, len(numbers)) for position, info in infos.items()}


def _numpy_aliases(flat: FlatState) -> dict[int, int]:
    aliases: dict[int, int] = {}
    first_of: dict[int, int] = {}
    groups: dict[Any, list[int]] = {}
    for position, leaf in enumerate(flat.leaves):
        if type(leaf) is not np.ndarray or flat.kinds[position] != ARRAY:
            continue
        if leaf.size:
            base = leaf if leaf.base is None else leaf.base
            groups.setdefault((id(base), leaf.dtype, leaf.shape, leaf.strides), []).append(position)
        elif (first := first_of.setdefault(id(leaf), position)) != position:
            aliases[position] = first
    for group in groups.values():
        if len(group) > 1:
            _split_by_address(flat, group, aliases)
    return aliases


def _split_by_address(flat: FlatState, group: list[int], aliases: dict[int, int]) -> None:
    by_address: dict[int, int] = {}
    for position in group:
        address = flat.leaves[position].__array_interface__["data"][0]
        first = by_address.setdefault(address, position)
        if first != position:
            aliases[position] = first
