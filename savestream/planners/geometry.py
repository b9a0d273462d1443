"""Boxes in arrays: intersection, bounds, narrowing, and finding all intersecting pairs among many boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from savestream.planners.metadata import ChunkStorageMetadata, Shape

__all__ = [
    "BoxJoin",
    "Match",
    "in_bounds",
    "intersect",
    "match_boxes",
    "narrow",
    "overlapping_pairs",
    "volume",
]

Box: TypeAlias = ChunkStorageMetadata
Match: TypeAlias = tuple[int, int, Shape, Shape]  # stored, wanted, offsets and sizes of the common box
Integers: TypeAlias = npt.NDArray[np.int64]

_LEAF_PAIRS = 1024  # pairs that are cheaper to test at once than to divide further
_BLOCK_PAIRS = 1 << 18  # pairs tested at once where dividing does not help: bounds the memory


def volume(sizes: Sequence[int]) -> int:
    """Elements of a box."""
    return math.prod(sizes)


def in_bounds(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies inside an array of this shape (and has as many dimensions)."""
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= dimension
        for offset, size, dimension in zip(box.offsets, box.sizes, shape, strict=True)
    )


def intersect(first: Box, second: Box) -> Box | None:
    """The common box, or None where it has no element."""
    offsets, sizes = [], []
    for a, n, b, m in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return ChunkStorageMetadata(tuple(offsets), tuple(sizes))


def narrow(array: Any, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
    """The view of ``lengths`` elements from ``offsets``; a zero length yields zero elements."""
    if not offsets:
        return array
    return array[tuple([slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)])]


class BoxJoin:
    """Finds the intersecting pairs between two sets of boxes by dividing space.

    Each step cuts at a median edge, along the dimension that separates best; boxes that cross the cut go to both
    sides, and a pair is reported by the side where its common box begins. For boxes that do not overlap within their
    set this takes near ``n log n`` tests, plus the pairs found.

    Parameters
    ----------
    on_pairs
        Called with two arrays of indices (first set, second set); returns False to stop.

    Attributes
    ----------
    tests
        Pairs of boxes that were compared, for tests of complexity.
    """

    def __init__(self, on_pairs: Callable[[Integers, Integers], bool]) -> None:
        self._on_pairs = on_pairs
        self.tests = 0

    def run(self, first: tuple[Integers, Integers], second: tuple[Integers, Integers]) -> None:
        """Join two sets given as ``(starts, stops)``, each of shape (boxes, dimensions); no box may be empty."""
        self._first, self._second = first, second
        pending = [(np.arange(len(first[0])), np.arange(len(second[0])), np.full(first[0].shape[1], _LOWEST))]
        while pending:
            rows, columns, low = pending.pop()
            if not len(rows) or not len(columns):
                continue
            halves = self._divide(rows, columns, low) if len(rows) * len(columns) > _LEAF_PAIRS else None
            if halves is not None:
                pending += halves
            elif not self._test(rows, columns, low):
                return

    def _divide(
        self, rows: Integers, columns: Integers, low: Integers
    ) -> list[tuple[Integers, Integers, Integers]] | None:
        """The two halves of the best cut, or None where none makes both sides clearly smaller."""
        best, halves = 0.8 * (len(rows) + len(columns)), None
        for dimension in range(len(low)):
            starts = np.concatenate([self._first[0][rows, dimension], self._second[0][columns, dimension]])
            stops = np.concatenate([self._first[1][rows, dimension], self._second[1][columns, dimension]])
            for edges in (starts, stops):
                cut = np.partition(edges, len(edges) // 2)[len(edges) // 2]
                left, right = int(np.count_nonzero(starts < cut)), int(np.count_nonzero(stops > cut))
                if max(left, right) < best and left and right:
                    best, halves = float(max(left, right)), (dimension, cut)
        if halves is None:
            return None
        dimension, cut = halves
        upper = low.copy()
        upper[dimension] = cut
        sides = []
        for bound, side in ((low, 0), (upper, 1)):
            kept = [
                chosen[boxes[0][chosen, dimension] < cut] if side == 0 else chosen[boxes[1][chosen, dimension] > cut]
                for boxes, chosen in ((self._first, rows), (self._second, columns))
            ]
            sides.append((kept[0], kept[1], bound))
        return sides

    def _test(self, rows: Integers, columns: Integers, low: Integers) -> bool:
        """Compare all pairs, in blocks; False to stop."""
        step = max(1, _BLOCK_PAIRS // len(columns))
        return all(self._test_block(rows[at : at + step], columns, low) for at in range(0, len(rows), step))

    def _test_block(self, rows: Integers, columns: Integers, low: Integers) -> bool:
        self.tests += len(rows) * len(columns)
        hits = np.ones((len(rows), len(columns)), dtype=bool)
        for dimension in range(len(low)):
            begin = np.maximum(self._first[0][rows, dimension][:, None], self._second[0][columns, dimension])
            end = np.minimum(self._first[1][rows, dimension][:, None], self._second[1][columns, dimension])
            hits &= begin < end
            # A common box that begins before this region was or will be found by the other side of a cut.
            hits &= begin >= low[dimension]
        left, right = np.nonzero(hits)
        return self._on_pairs(rows[left], columns[right]) if len(left) else True


_LOWEST = np.iinfo(np.int64).min


def _edges(boxes: Sequence[Box], chosen: Sequence[int]) -> tuple[Integers, Integers]:
    rank = len(boxes[chosen[0]].offsets)
    starts = np.array([boxes[index].offsets for index in chosen], dtype=np.int64).reshape(len(chosen), rank)
    sizes = np.array([boxes[index].sizes for index in chosen], dtype=np.int64).reshape(len(chosen), rank)
    return starts, starts + sizes


def _not_empty(boxes: Sequence[Box]) -> list[int]:
    return [index for index, box in enumerate(boxes) if 0 not in box.sizes]


def match_boxes(stored: Sequence[Box], wanted: Sequence[Box]) -> list[Match]:
    """All intersections between stored and wanted boxes of one array.

    Returns
    -------
    list of (stored index, wanted index, offsets, sizes)
        Sorted; offsets are in the global array. Empty boxes intersect nothing.
    """
    if len(stored) == 1 or len(wanted) == 1:
        pairs = [(s, w) for s in range(len(stored)) for w in range(len(wanted))]
    else:
        pairs = sorted(_join(stored, wanted, None)[0])
    found = [(s, w, intersect(stored[s], wanted[w])) for s, w in pairs]
    return [(s, w, box.offsets, box.sizes) for s, w, box in found if box is not None]


def overlapping_pairs(boxes: Sequence[Box], limit: int = 8) -> list[tuple[int, int]]:
    """Pairs of boxes with common elements, sorted, at most ``limit``."""
    if len(boxes) < 2:
        return []
    return sorted(_join(boxes, boxes, limit)[0])


def _join(first: Sequence[Box], second: Sequence[Box], limit: int | None) -> tuple[set[tuple[int, int]], int]:
    """Intersecting pairs and the number of tests; with a ``limit`` the sets are one, and only ``i < j`` counts."""
    pairs: set[tuple[int, int]] = set()
    rows, columns = _not_empty(first), _not_empty(second)
    if not rows or not columns:
        return pairs, 0

    def collect(left: Integers, right: Integers) -> bool:
        if limit is not None:
            smaller = left < right
            left, right = left[smaller][: limit - len(pairs)], right[smaller][: limit - len(pairs)]
        pairs.update(zip([rows[i] for i in left.tolist()], [columns[i] for i in right.tolist()], strict=True))
        return limit is None or len(pairs) < limit

    join = BoxJoin(collect)
    join.run(_edges(first, rows), _edges(second, columns))
    return pairs, join.tests
