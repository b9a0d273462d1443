"""Proof that chunks cover their arrays exactly once, for whole tables at a time.

Sum the indicator functions of an array's chunks: the cover is exact where that sum is the indicator of the whole array.
A sum of boxes is determined by its mixed derivative, which lives on the boxes' corners: +1 or -1 at each, by parity.
So the cover is exact if and only if all signed corners of the chunks and of the negated whole cancel. Sorting finds
that out in O(n log n), where a comparison of pairs would be quadratic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from savestream.pipeline.limits import MAXIMUM_SPLIT_DIMENSIONS, MAXIMUM_TENSOR_BYTES, FormatViolation
from savestream.pipeline.strict_json import require

__all__ = ["Boxes", "check_bounds", "check_cover", "volumes"]

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_BATCH_CORNERS = 1 << 21
_MAXIMUM_CORNERS = 1 << 26  # of one array


class Boxes(msgspec.Struct, frozen=True):
    """Arrays of one number of dimensions and their chunks, in elements.

    Attributes
    ----------
    shapes
        Shape ``(arrays, ndim)``.
    owners
        Shape ``(chunks,)``, ascending: the row of ``shapes`` that each chunk belongs to.
    offsets, sizes
        Shape ``(chunks, ndim)``.
    name
        Leads from a row of ``shapes`` to the array's name, for errors.
    """

    shapes: Integers
    owners: Integers
    offsets: Integers
    sizes: Integers
    name: Callable[[int], str]

    def refuse_arrays(self, wrong: Mask, problem: str) -> None:
        """Raise :class:`FormatViolation` naming the first array for which ``wrong`` is true."""
        if wrong.any():
            raise FormatViolation(f"{self.name(int(wrong.argmax()))}: {problem}")

    def refuse_chunks(self, wrong: Mask, problem: str) -> None:
        """Raise :class:`FormatViolation` naming the array of the first chunk for which ``wrong`` is true."""
        if wrong.any():
            raise FormatViolation(f"{self.name(int(self.owners[wrong.argmax()]))}: {problem}")


def volumes(sizes: Integers) -> Integers:
    """Elements of boxes, shape ``(n, ndim)``, whose products are known to fit 62 bits."""
    return np.asarray(np.prod(sizes, axis=1, dtype=np.int64))


def _any(mask: npt.NDArray[np.bool_]) -> Mask:
    """Rows of a two-dimensional mask in which anything is true."""
    return np.asarray(np.any(mask, axis=1))


def check_bounds(boxes: Boxes, itemsizes: Integers) -> None:
    """Refuse shapes whose bytes do not fit 62 bits, and chunks that are negative or reach outside their array."""
    boxes.refuse_arrays(_any(boxes.shapes < 0), "its shape is negative")
    nbytes = np.prod(np.maximum(boxes.shapes, 1).astype(np.float64), axis=1) * np.maximum(itemsizes, 1)
    boxes.refuse_arrays(nbytes > MAXIMUM_TENSOR_BYTES, "its shape has more than 2**62 bytes")
    negative = (boxes.offsets < 0) | (boxes.sizes < 0)
    boxes.refuse_chunks(_any(negative), "the offsets or sizes of a chunk are negative")
    outside = boxes.sizes > boxes.shapes[boxes.owners] - boxes.offsets
    boxes.refuse_chunks(_any(outside), "a chunk reaches outside of it")


def check_cover(boxes: Boxes) -> None:
    """Refuse arrays that their chunks do not cover exactly once. Call :func:`check_bounds` first."""
    counts = np.bincount(boxes.owners, minlength=len(boxes.shapes))
    filled = volumes(boxes.shapes) > 0
    boxes.refuse_arrays(filled & (counts == 0), "it has no chunk")
    partial = _any(boxes.sizes != boxes.shapes[boxes.owners])
    single = (counts[boxes.owners] == 1) & filled[boxes.owners]
    boxes.refuse_chunks(partial & single, "its only chunk does not cover it")
    arrays = np.flatnonzero((counts > 1) & filled)
    for dimensions, group in _split_patterns(boxes, arrays):
        for members in _batches(boxes, counts, group, len(dimensions)):
            _check_split(boxes, members, dimensions)


def _split_patterns(boxes: Boxes, arrays: Integers) -> Iterator[tuple[npt.NDArray[np.intp], Integers]]:
    """``arrays``, grouped by the dimensions along which any of their chunks is shorter than the array."""
    if not len(arrays):
        return
    chunks = _chunks_of(boxes, arrays)
    owners = boxes.owners[chunks]
    shorter = boxes.sizes[chunks] != boxes.shapes[owners]
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    split = np.logical_or.reduceat(shorter, starts, axis=0)
    patterns, group_of = np.unique(split, axis=0, return_inverse=True)
    for group, pattern in enumerate(patterns):
        yield np.flatnonzero(pattern), arrays[group_of.reshape(-1) == group]


def _chunks_of(boxes: Boxes, arrays: Integers) -> Integers:
    chosen = np.zeros(len(boxes.shapes), bool)
    chosen[arrays] = True
    return np.flatnonzero(chosen[boxes.owners])


def _batches(boxes: Boxes, counts: Integers, arrays: Integers, split: int) -> Iterator[Integers]:
    """``arrays`` in pieces whose corners fit memory, where their chunks are cut along ``split`` dimensions."""
    name = boxes.name(int(arrays[0]))
    require(
        split <= MAXIMUM_SPLIT_DIMENSIONS,
        f"{name}: it is cut along {split} dimensions, more than {MAXIMUM_SPLIT_DIMENSIONS}",
    )
    corners = (counts[arrays] + 1) << split
    largest = int(corners.argmax())
    name = boxes.name(int(arrays[largest]))
    require(corners[largest] <= _MAXIMUM_CORNERS, f"{name}: it has too many chunks along {split} dimensions")
    batch_of = (np.cumsum(corners) - corners) // _BATCH_CORNERS
    return (arrays[batch_of == batch] for batch in np.unique(batch_of))


def _check_split(boxes: Boxes, arrays: Integers, dimensions: npt.NDArray[np.intp]) -> None:
    """Check that the corners of ``arrays``, split along ``dimensions`` only, cancel."""
    chunks = _chunks_of(boxes, arrays)
    low = np.concatenate([boxes.offsets[chunks][:, dimensions], np.zeros((len(arrays), len(dimensions)), np.int64)])
    length = np.concatenate([boxes.sizes[chunks][:, dimensions], boxes.shapes[arrays][:, dimensions]])
    owners = np.concatenate([boxes.owners[chunks], arrays])
    signs = np.repeat(np.array([1, -1]), [len(chunks), len(arrays)])
    bad = _uncancelled(owners, low, low + length, signs)
    if len(bad):
        raise FormatViolation(f"{boxes.name(int(bad[0]))}: its chunks overlap or leave a hole")


def _uncancelled(owners: Integers, low: Integers, high: Integers, signs: Integers) -> Integers:
    """Owners of corners at which signed boxes do not sum to zero."""
    corners: list[npt.NDArray[Any]] = []
    corner_signs = []
    dimensions = low.shape[1]
    for corner in range(1 << dimensions):
        upper = (corner >> np.arange(dimensions)) & 1
        corners.append(np.where(upper, high, low))
        corner_signs.append(signs * (-1) ** int(upper.sum()))
    points = np.concatenate(corners)
    keys = [np.tile(owners, 1 << dimensions), *points.T]
    order = np.lexsort(keys[::-1])
    changed = np.zeros(len(order), bool)
    changed[0] = True
    for key in keys:
        ordered = key[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(changed)
    sums = np.add.reduceat(np.concatenate(corner_signs)[order], starts)
    return np.asarray(keys[0][order][starts[sums != 0]])
