"""From bytes of a stored chunk to the box of an array that was asked for. Pure geometry on numpy views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from savestream.arrays import HostArray

__all__ = ["box_spans", "place_elements"]

_SPAN_GAP_BYTES = 256 * 1024

Shape = tuple[int, ...]


def box_spans(shape: Shape, offsets: Shape, lengths: Shape, itemsize: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a chunk (C order) that hold the box; ranges closer than 256 KiB come as one.

    Parameters
    ----------
    shape
        Elements of the chunk in each dimension.
    offsets, lengths
        The box in the chunk, in elements.
    """
    if not all(lengths):
        return
    strides = [math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape))]
    far = [dimension for dimension, stride in enumerate(strides) if stride > _SPAN_GAP_BYTES]
    while far and lengths[far[-1]] == shape[far[-1]] and _is_full(shape, lengths, far[-1] + 1):
        far.pop()  # whole rows follow each other without a gap
    if far and _is_full(shape, lengths, far[-1] + 1):
        far.pop()  # a run of whole rows is one range
    first_near = len(far)
    low = sum(offsets[d] * strides[d] for d in range(first_near, len(shape)))
    high = sum((offsets[d] + lengths[d] - 1) * strides[d] for d in range(first_near, len(shape))) + itemsize
    for outer in itertools.product(*(range(offsets[d], offsets[d] + lengths[d]) for d in far)):
        base = sum(index * strides[d] for d, index in enumerate(outer))
        yield base + low, base + high


def _is_full(shape: Shape, lengths: Shape, first: int) -> bool:
    return shape[first:] == lengths[first:]


def place_elements(
    source: HostArray, start: int, stop: int, shape: Shape, offsets: Shape, lengths: Shape, target: HostArray
) -> None:
    """Put elements ``start:stop`` (C order) of a chunk of ``shape`` where they belong in ``target``.

    Parameters
    ----------
    source
        Those elements, flat.
    offsets, lengths
        The box of the chunk that ``target`` (of shape ``lengths``) holds; elements outside it are passed over.
    """
    if start >= stop:
        return
    if not shape:
        np.copyto(target, source[0], casting="unsafe")
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        _place_in_row(source, last, start - last * row, stop - last * row, shape, offsets, lengths, target)
        return
    head = first * row - start
    body = (last - first) * row
    if head:
        _place_in_row(source[:head], first - 1, row - head, row, shape, offsets, lengths, target)
    _place_rows(source[head : head + body], first, last, shape, offsets, lengths, target)
    if stop > last * row:
        _place_in_row(source[head + body :], last, 0, stop - last * row, shape, offsets, lengths, target)


def _place_in_row(
    source: HostArray, row: int, start: int, stop: int, shape: Shape, offsets: Shape, lengths: Shape, target: HostArray
) -> None:
    inside = row - offsets[0]
    if 0 <= inside < lengths[0]:
        place_elements(source, start, stop, shape[1:], offsets[1:], lengths[1:], target[inside : inside + 1][0, ...])


def _place_rows(
    source: HostArray, first: int, last: int, shape: Shape, offsets: Shape, lengths: Shape, target: HostArray
) -> None:
    low, high = max(first, offsets[0]), min(last, offsets[0] + lengths[0])
    if low >= high:
        return
    rows = source.reshape(last - first, *shape[1:])[low - first : high - first]
    inner = tuple(slice(offset, offset + length) for offset, length in zip(offsets[1:], lengths[1:], strict=True))
    np.copyto(target[low - offsets[0] : high - offsets[0]], rows[(slice(None), *inner)], casting="unsafe")
