"""Ranges of an array's elements, counted in C order."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["HostArray", "as_plain_elements", "copy_elements"]

HostArray: TypeAlias = npt.NDArray[Any]  # the element type is whatever the state holds


def as_plain_elements(array: HostArray) -> HostArray:
    """The same elements, records seen as opaque bytes: an assignment of records would leave their padding behind."""
    return array if array.dtype.names is None else array.view(np.dtype((np.void, array.dtype.itemsize)))


def copy_elements(source: HostArray, start: int, stop: int, target: HostArray) -> None:
    """Copy elements ``start:stop`` of ``source``, counted in C order, into the flat array ``target``.

    Works in whole rows wherever it can, since a flat slice of a transposed array is many times slower.
    """
    if start >= stop:
        return
    if source.flags.c_contiguous:
        np.copyto(target, source.reshape(-1)[start:stop])
        return
    row = math.prod(source.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        copy_elements(source[last], start - last * row, stop - last * row, target)
        return
    head, body = first * row - start, (last - first) * row
    copy_elements(source[first - 1], row - head, row, target[:head])
    np.copyto(target[head : head + body].reshape(last - first, *source.shape[1:]), source[first:last])
    copy_elements(source[min(last, len(source) - 1)], 0, stop - last * row, target[head + body :])
