"""Reading elements that do not lie side by side in a file, with few reads and little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from savestream.arrays.elements import HostArray

__all__ = ["Read", "covered_bytes", "element_boxes", "read_strided"]

Shape: TypeAlias = tuple[int, ...]
Read: TypeAlias = Callable[[int, memoryview], None]  # fills the buffer from an offset, or raises
Axis: TypeAlias = tuple[int, int]  # elements and bytes from one to the next

_PIECE_BYTES = 4 * 1024 * 1024  # read at once
_GAP_BYTES = 64 * 1024  # rather read over than around
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def covered_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; 0 where there is none."""
    if 0 in shape:
        return 0
    return itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def read_strided(
    read: Read, offset: int, shape: Shape, strides: Shape, start: int, stop: int, target: HostArray
) -> None:
    """Read elements ``start:stop``, counted in C order, of a strided array into the flat array ``target``.

    Memory beyond the target is at most 4 MiB. Elements further apart than 64 KiB are read one by one, so that no more
    than a bounded multiple of what is wanted is read.
    """
    itemsize = target.dtype.itemsize
    words = target.view(_WORDS[itemsize]) if itemsize in _WORDS else target
    scratch = np.empty(min(_PIECE_BYTES, covered_bytes(shape, strides, itemsize)), np.uint8)
    reader = _BoxReader(read, scratch)
    for offsets, sizes, position in element_boxes(shape, start, stop):
        box = words[position : position + math.prod(sizes)].reshape(sizes)
        order = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
        base = offset + sum(index * stride for index, stride in zip(offsets, strides, strict=True))
        reader.read(base, [(sizes[axis], strides[axis]) for axis in order], box.transpose(order))


def element_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Boxes (offsets, sizes) that hold elements ``start:stop`` in C order, and where each begins among these."""
    if start >= stop:
        return
    if not shape:
        yield (), (), 0
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, last, start - last * row, stop - last * row, 0)
        return
    head, body = first * row - start, (last - first) * row
    if head:
        yield from _in_row(shape, first - 1, row - head, row, 0)
    if body:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), head
    yield from _in_row(shape, last, 0, stop - last * row, head + body)


def _in_row(shape: Shape, row: int, start: int, stop: int, position: int) -> Iterator[tuple[Shape, Shape, int]]:
    for offsets, sizes, inside in element_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes), position + inside


class _BoxReader:
    """Reads boxes whose axes are sorted by falling stride."""

    def __init__(self, read: Read, scratch: HostArray) -> None:
        self._read = read
        self._scratch = scratch

    def read(self, base: int, axes: Sequence[Axis], target: HostArray) -> None:
        axes, target = _without_single(axes, target)
        itemsize = target.dtype.itemsize
        extent = covered_bytes([size for size, _ in axes], [stride for _, stride in axes], itemsize)
        if not axes or extent <= min(_GAP_BYTES, _PIECE_BYTES):
            self._cover(base, axes, extent, target)
            return
        size, stride = axes[0]
        inner = extent - (size - 1) * stride
        if stride - inner <= _GAP_BYTES and inner <= _PIECE_BYTES:
            group = max(1, (_PIECE_BYTES - inner) // stride + 1) if stride else size
            for first in range(0, size, group):
                count = min(group, size - first)
                covered = (count - 1) * stride + inner
                part = target[first : first + count]
                self._cover(base + first * stride, [(count, stride), *axes[1:]], covered, part)
        else:
            for index in range(size):
                self.read(base + index * stride, axes[1:], target[index : index + 1].reshape(target.shape[1:]))

    def _cover(self, base: int, axes: Sequence[Axis], extent: int, target: HostArray) -> None:
        """Read everything between the first and the last element, and pick."""
        self._read(base, self._scratch[:extent].data)
        strides = tuple([stride for _, stride in axes])
        source: HostArray = np.ndarray(target.shape, target.dtype, self._scratch.data, 0, strides)
        target[...] = source


def _without_single(axes: Sequence[Axis], target: HostArray) -> tuple[Sequence[Axis], HostArray]:
    """Leave out axes of one element."""
    if all(size != 1 for size, _ in axes):
        return axes, target
    index = tuple([0 if size == 1 else slice(None) for size, _ in axes])
    return [axis for axis in axes if axis[0] != 1], target[(*index, ...)]
