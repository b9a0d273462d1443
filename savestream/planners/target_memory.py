"""Whether a load may fill its targets: no array may overlap itself or part of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayInfo, adapter_of
from savestream.planners.interleaving import Placed, candidates
from savestream.planners.metadata import Shape

__all__ = ["TargetArray", "examine_targets", "overlapping"]

_MAXIMUM_WORK = 100_000  # of numpy's exact test for common elements


class TargetArray(msgspec.Struct, frozen=True, gc=False):
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
        Pairs of positions ``(first, later)`` whose memory and :attr:`~savestream.arrays.ArrayInfo.layout` are the same.
    problems
        ``(position, message)`` for each array that overlaps itself, or a part of another.
    """
    if _all_independent(targets):
        return [], []
    spans = [_placed(target) for target in targets]
    if _all_apart(spans):
        return [], []
    problems = [
        (position, f"{targets[position].name}: the target's elements overlap each other; load into a copy of it")
        for position, span in enumerate(spans)
        if not _is_contiguous(span.info) and _overlaps_itself(span.info)
    ]
    ties: list[tuple[int, int]] = []
    first_of: dict[tuple[Any, ...], int] = {}
    for position, span in enumerate(spans):
        key = (span.address, span.info.layout)
        if span.info.nbytes and (first := first_of.setdefault(key, position)) != position:
            ties.append((first, position))
    wrong = {position for position, _ in problems}
    distinct = [position for position in first_of.values() if position not in wrong]
    for first, second in overlapping(spans, distinct):
        text = f"{targets[first].name} and {targets[second].name}: the targets share a part of their memory"
        problems.append((second, text))
    return ties, problems


def _placed(target: TargetArray) -> Placed:
    if target.info is not None:
        return Placed(target.info, target.address)
    adapter = adapter_of(target.array)
    return Placed(adapter.info(target.array, target.name), adapter.addresses([target.array])[0])


def _all_apart(spans: Sequence[Placed]) -> bool:
    """Whether no array overlaps itself or reaches into another one's range: one sort tells, for any number."""
    reaches = {id(info): _reach(info) for info in {id(span.info): span.info for span in spans}.values()}
    if any(_overlaps_itself(span.info) for span in {id(span.info): span for span in spans}.values()):
        return False
    bounds = np.array([reaches[id(span.info)] for span in spans], np.int64).reshape(-1, 2)
    bounds += np.fromiter((span.address for span in spans), np.int64, len(spans))[:, None]
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    return bool((bounds[1:, 0] >= np.maximum.accumulate(bounds[:, 1])[:-1]).all())


def _reach(info: ArrayInfo) -> tuple[int, int]:
    """Where the elements begin and end, from the address of the first one on."""
    if not info.nbytes:
        return 0, 0
    reach = [stride * (size - 1) for stride, size in zip(info.strides, info.shape, strict=True)]
    return sum([step for step in reach if step < 0]), sum([step for step in reach if step > 0]) + info.itemsize


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


def overlapping(targets: Sequence[Placed], positions: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of positions, the smaller one first, whose arrays share memory; none of them is empty."""
    likely = candidates(targets, positions)
    pairs = itertools.chain(likely.pairs, *[_reaching_over(targets, group) for group in likely.groups])
    return sorted({(min(pair), max(pair)) for pair in pairs if _share_memory(targets[pair[0]], targets[pair[1]])})


def _reaching_over(targets: Sequence[Placed], positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of which one begins before the other ends, by a sweep over the addresses."""
    active: list[tuple[int, int]] = []
    for (low, high), position in sorted([(targets[position].interval(), position) for position in positions]):
        active = [(end, other) for end, other in active if end > low]
        for _, other in active:
            yield other, position
        active.append((high, position))


def _share_memory(first: Placed, second: Placed) -> bool:
    try:
        # numpy's stubs allow only two special values for max_work
        return bool(np.shares_memory(_shadow(first), _shadow(second), max_work=_MAXIMUM_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """Gives numpy the layout of an array whose elements are never looked at (they may lie on a device)."""

    def __init__(self, span: Placed) -> None:
        info = span.info
        self.__array_interface__ = {
            "version": 3,
            "data": (span.address, True),
            "shape": info.shape,
            "strides": info.strides,
            "typestr": f"|V{info.itemsize}",
        }


def _shadow(span: Placed) -> Any:
    return np.asarray(_Interface(span))
