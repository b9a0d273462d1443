"""Which array leaves are the same memory, seen the same way."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from savestream.arrays import array_info
from savestream.planners.flattening import ARRAY, FlatState

__all__ = ["alias_partition"]


def alias_partition(flat: FlatState) -> dict[int, int]:
    """For each array leaf that repeats an earlier one: its position and that of the first.

    Two leaves are the same where address, dtype, shape and strides are equal and there is at least one byte. Reading
    an address costs far more than everything else here, so only leaves that can be aliases are asked for theirs:
    arrays that own their memory are told apart by identity.
    """
    arrays = [leaf for leaf in flat.leaves if type(leaf) is np.ndarray]
    simple = len(arrays) + flat.kinds.count(2) == len(flat.leaves)
    owners = simple and set(map(type, map(attrgetter("base"), arrays))) <= {type(None)}
    if owners and len(set(map(id, arrays))) == len(arrays):
        return {}
    return _grouped(flat)


def _grouped(flat: FlatState) -> dict[int, int]:
    aliases: dict[int, int] = {}
    first_of: dict[int, int] = {}
    groups: dict[Any, list[int]] = {}
    others: dict[Any, int] = {}
    for position, leaf in enumerate(flat.leaves):
        if flat.kinds[position] != ARRAY:
            continue
        first = first_of.setdefault(id(leaf), position)
        if type(leaf) is not np.ndarray:
            info = array_info(leaf, flat.names[position])
            if info.nbytes:
                first = others.setdefault((info.address, info.dtype, info.shape, info.strides), position)
        elif leaf.size:
            base = leaf if leaf.base is None else leaf.base
            groups.setdefault((id(base), leaf.dtype, leaf.shape, leaf.strides), []).append(position)
            continue
        if first != position:
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
