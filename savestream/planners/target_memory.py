"""Whether a load may fill its targets: no array may overlap itself or part of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayInfo, adapter_of
from savestream.planners.metadata import Shape

__all__ = ["TargetArray", "examine_targets"]

_MAXIMUM_WORK = 100_000  # of numpy's exact test for common elements


class TargetArray(msgspec.Struct, frozen=True):
    """An array to fill in place: the leaf's name, which of its boxes it is, the array, and where that lies."""

    name: str
    offsets: Shape
    array: Any
    info: ArrayInfo | None = None  # looked up where it is asked for
    address: int = 0


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
    spans = [_span(target) for target in targets]
    problems = [
        (position, f"{targets[position].name}: the target's elements overlap each other; load into a copy of it")
        for position, span in enumerate(spans)
        if not _is_contiguous(span.info) and _overlaps_itself(span.info)
    ]
    ties: list[tuple[int, int]] = []
    first_of: dict[tuple[Any, ...], int] = {}
    for position, span in enumerate(spans):
        key = (span.address, span.info.dtype, span.info.shape, span.info.strides, span.info.variant)
        if span.info.nbytes and (first := first_of.setdefault(key, position)) != position:
            ties.append((first, position))
    wrong = {position for position, _ in problems}
    distinct = [position for position in first_of.values() if position not in wrong]
    for first, second in _overlapping(spans, distinct):
        text = f"{targets[first].name} and {targets[second].name}: the targets share a part of their memory"
        problems.append((second, text))
    return ties, problems


class _Span(msgspec.Struct, frozen=True, gc=False):
    info: ArrayInfo
    address: int


def _span(target: TargetArray) -> _Span:
    if target.info is not None:
        return _Span(target.info, target.address)
    adapter = adapter_of(target.array)
    return _Span(adapter.info(target.array, target.name), adapter.addresses([target.array])[0])


def _all_independent(targets: Sequence[TargetArray]) -> bool:
    """Whether all are distinct numpy arrays that own their memory, which is the usual case and quick to see."""
    if not all(type(target.array) is np.ndarray and target.array.base is None for target in targets):
        return False
    return len({id(target.array) for target in targets}) == len(targets)


def _is_contiguous(info: ArrayInfo) -> bool:
    """Whether the elements lie in C order without gaps."""
    expected = info.itemsize
    for size, stride in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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


def _bounds(span: _Span) -> tuple[int, int]:
    info = span.info
    reach = [stride * (size - 1) for stride, size in zip(info.strides, info.shape, strict=True)]
    low = span.address + sum([step for step in reach if step < 0])
    return low, span.address + sum([step for step in reach if step > 0]) + info.itemsize


def _overlapping(targets: Sequence[_Span], positions: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs that share memory, by a sweep over the addresses."""
    spans = sorted([(*_bounds(targets[position]), position) for position in positions])
    found: list[tuple[int, int]] = []
    active: list[tuple[int, int]] = []
    reached = 0
    for low, high, position in spans:
        if low < reached:
            active = [(end, other) for end, other in active if end > low]
            for _, other in active:
                if _share_memory(targets[other], targets[position]):
                    found.append((min(other, position), max(other, position)))
        else:
            active = []
        active.append((high, position))
        reached = max(reached, high)
    return sorted(found)


def _share_memory(first: _Span, second: _Span) -> bool:
    try:
        # numpy's stubs allow only two special values for max_work
        return bool(np.shares_memory(_shadow(first), _shadow(second), max_work=_MAXIMUM_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """Gives numpy the layout of an array whose elements are never looked at (they may lie on a device)."""

    def __init__(self, span: _Span) -> None:
        info = span.info
        self.__array_interface__ = {
            "version": 3,
            "data": (span.address, True),
            "shape": info.shape,
            "strides": info.strides,
            "typestr": f"|V{info.itemsize}",
        }


def _shadow(span: _Span) -> Any:
    return np.asarray(_Interface(span))
