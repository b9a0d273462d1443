"""Whether a load may fill its targets: no array may overlap itself or part of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayInfo, array_info
from savestream.planners.metadata import Shape

__all__ = ["TargetArray", "examine_targets"]

_MAXIMUM_WORK = 100_000  # of numpy's exact test for common elements


class TargetArray(msgspec.Struct, frozen=True):
    """An array to fill: the leaf's name, which of its boxes it is, and the array."""

    name: str
    offsets: Shape
    array: Any


def examine_targets(targets: Sequence[TargetArray]) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
    """Look for common memory among arrays that are to be filled.

    Returns
    -------
    ties
        Pairs of positions ``(first, later)`` whose memory, dtype, shape and strides are the same.
    problems
        ``(position, message)`` for each array that overlaps itself, or a part of another.
    """
    if _all_independent(targets):
        return [], []
    infos = [array_info(target.array, target.name) for target in targets]
    problems = [
        (position, f"{targets[position].name}: the target's elements overlap each other; load into a copy of it")
        for position, info in enumerate(infos)
        if not _is_contiguous(targets[position].array) and _overlaps_itself(info)
    ]
    ties: list[tuple[int, int]] = []
    first_of: dict[ArrayInfo, int] = {}
    for position, info in enumerate(infos):
        if info.nbytes and (first := first_of.setdefault(info, position)) != position:
            ties.append((first, position))
    wrong = {position for position, _ in problems}
    distinct = [position for info, position in first_of.items() if position not in wrong]
    for first, second in _overlapping(infos, distinct):
        text = f"{targets[first].name} and {targets[second].name}: the targets share a part of their memory"
        problems.append((second, text))
    return ties, problems


def _all_independent(targets: Sequence[TargetArray]) -> bool:
    """Whether all are distinct numpy arrays that own their memory, which is the usual case and quick to see."""
    if not all(type(target.array) is np.ndarray and target.array.base is None for target in targets):
        return False
    return len({id(target.array) for target in targets}) == len(targets)


def _is_contiguous(array: Any) -> bool:
    return type(array) is np.ndarray and bool(array.flags.c_contiguous)


def _overlaps_itself(info: ArrayInfo) -> bool:
    extent = info.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(info.strides, info.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < extent:
                return info.nbytes > 0
            extent += stride * (size - 1)
    return False


def _bounds(info: ArrayInfo) -> tuple[int, int]:
    reach = [stride * (size - 1) for stride, size in zip(info.strides, info.shape, strict=True)]
    low = info.address + sum([step for step in reach if step < 0])
    return low, info.address + sum([step for step in reach if step > 0]) + info.itemsize


def _overlapping(infos: Sequence[ArrayInfo], positions: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs that share memory, by a sweep over the addresses."""
    spans = sorted([(*_bounds(infos[position]), position) for position in positions])
    found: list[tuple[int, int]] = []
    active: list[tuple[int, int]] = []
    reached = 0
    for low, high, position in spans:
        if low < reached:
            active = [(end, other) for end, other in active if end > low]
            for _, other in active:
                if _share_memory(infos[other], infos[position]):
                    found.append((min(other, position), max(other, position)))
        else:
            active = []
        active.append((high, position))
        reached = max(reached, high)
    return sorted(found)


def _share_memory(first: ArrayInfo, second: ArrayInfo) -> bool:
    try:
        # numpy's stubs allow only two special values for max_work
        return bool(np.shares_memory(_shadow(first), _shadow(second), max_work=_MAXIMUM_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """Gives numpy the layout of an array whose elements are never looked at (they may lie on a device)."""

    def __init__(self, info: ArrayInfo) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (info.address, True),
            "shape": info.shape,
            "strides": info.strides,
            "typestr": f"|V{info.itemsize}",
        }


def _shadow(info: ArrayInfo) -> Any:
    return np.asarray(_Interface(info))
