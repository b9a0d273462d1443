"""Arrays whose elements lie in a file: leaves that are saved without ever being in memory as a whole."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, HostArray, Shape
from savestream.arrays.dtypes import dtype_from_name
from savestream.arrays.file_sources import ByteSource, EndOfSourceError, UnpooledFile
from savestream.arrays.strided_reads import covered_bytes, read_strided
from savestream.errors import CorruptCheckpointError, PlanError, StorageError

__all__ = ["FileArray", "FileArrayAdapter"]


class FileArray:
    """An array in a file. Nothing is read, and nothing opened, before its elements are asked for.

    Parameters
    ----------
    source
        The file, or any :class:`~savestream.arrays.file_sources.ByteSource`.
    offset
        Where its first element lies, in bytes.
    dtype
        A dtype name, see :mod:`savestream.arrays.dtypes`.
    shape
        Elements in each dimension.
    strides
        Bytes from one element to the next in each dimension, none negative; default: C order without gaps.
    name
        What errors call the array.
    conjugated, negated, swapped
        What becomes of the elements as they are read: complex conjugates, negatives, the other byte order.

    Raises
    ------
    PlanError
        Shape and strides do not fit, or a number is negative.
    CorruptCheckpointError
        The dtype does not exist.
    """

    __slots__ = ("conjugated", "contiguous", "dtype", "info", "name", "negated", "offset", "shape", "source", "swapped")

    def __init__(
        self,
        source: ByteSource | str | os.PathLike[str],
        offset: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        name: str = "the array",
        conjugated: bool = False,
        negated: bool = False,
        swapped: bool = False,
    ) -> None:
        itemsize = dtype_from_name(dtype).itemsize
        self.source: ByteSource = source if isinstance(source, ByteSource) else UnpooledFile(source)
        self.offset = offset
        self.dtype = dtype
        self.shape: Shape = tuple(map(int, shape))
        dense = _dense_strides(self.shape, itemsize)
        steps = dense if strides is None else tuple(map(int, strides))
        if len(steps) != len(self.shape) or offset < 0 or min((*self.shape, *steps), default=0) < 0:
            raise PlanError(f"{name}: offset {offset}, shape {self.shape} and strides {steps} describe no array")
        self.name = name
        self.conjugated, self.negated, self.swapped = conjugated, negated, swapped
        self.contiguous = _same_order(self.shape, steps, dense)
        self.info = ArrayInfo(dtype, self.shape, steps, itemsize, self._variant())

    def _variant(self) -> str:
        marks = {"conj": self.conjugated, "neg": self.negated, "swapped": self.swapped}
        return " ".join(["file", *(mark for mark, present in marks.items() if present)])

    @property
    def covered_bytes(self) -> int:
        """Bytes from the first element to the end of the last; 0 for an empty array."""
        return covered_bytes(self.shape, self.info.strides, self.info.itemsize)

    def __repr__(self) -> str:
        return f"FileArray({self.source.describe()!r}, {self.offset}, {self.dtype!r}, {self.shape})"


def _dense_strides(shape: Shape, itemsize: int) -> Shape:
    return tuple(math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape)))


def _same_order(shape: Shape, strides: Shape, dense: Shape) -> bool:
    """Whether elements lie in C order without gaps; strides of dimensions that hold one element do not count."""
    if 0 in shape:
        return True
    return all(a == b or size == 1 for size, a, b in zip(shape, strides, dense, strict=True))


class FileArrayAdapter(ArrayAdapter):
    """Files as leaves: ranges are read straight into the memory that takes them."""

    framework = "file"

    # --- saving ---

    def info(self, array: Any, key: str) -> ArrayInfo:
        del key
        found: ArrayInfo = array.info
        return found

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [0] * len(arrays)  # what lies where in a file says nothing about memory

    def host_view(self, array: Any) -> HostArray:
        elements = np.empty(array.shape, dtype_from_name(array.dtype))
        self.copy_elements(array, 0, elements.size, elements.reshape(-1))
        return elements

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        if start >= stop:
            return
        itemsize = array.info.itemsize
        if array.contiguous:
            _read(array, array.offset + start * itemsize, target.view(np.uint8).data)
        else:
            read_strided(
                lambda offset, buffer: _read(array, offset, buffer),
                array.offset,
                array.shape,
                array.info.strides,
                start,
                stop,
                target.view(np.dtype((np.void, itemsize))),
            )
        _finish(array, target)

    def join(self, arrays: Sequence[Any]) -> HostArray:
        sizes = [array.info.nbytes for array in arrays]
        joined = np.empty(sum(sizes), np.uint8)
        position = 0
        for array, nbytes in zip(arrays, sizes, strict=True):
            target = joined[position : position + nbytes].view(np.dtype((np.void, array.info.itemsize)))
            self.copy_elements(array, 0, len(target), target)
            position += nbytes
        return joined

    # --- loading ---

    def fill_problem(self, array: Any) -> str | None:
        del array
        return "an array in a file cannot be filled; load into an array in memory"

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        del parts
        raise PlanError(f"{array!r} cannot be filled; load into an array in memory")

    def from_host(self, array: HostArray, dtype: str) -> Any:
        del array
        raise PlanError(f"no array of dtype {dtype} can be made in a file by a load")


def _read(array: FileArray, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer``, or say which array lacks which bytes of which file."""
    place = array.source.describe()
    try:
        array.source.read_into(offset, buffer)
    except EndOfSourceError as error:
        end = offset + len(buffer)
        raise CorruptCheckpointError(
            f"{place}: truncated; {array.name} needs its bytes {offset}-{end}, it ends at byte {error.end}, so "
            f"{end - max(error.end, offset)} bytes are missing"
        ) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        message = f"reading {len(buffer)} bytes at offset {offset} of {place} for {array.name}: {error.strerror}"
        raise StorageError(error.errno, message) from error


def _finish(array: FileArray, target: HostArray) -> None:
    """What the stored elements lack to be the array's."""
    if not (array.conjugated or array.negated or array.swapped):
        return
    elements = target.view(dtype_from_name(array.dtype))
    if array.swapped:
        width = array.info.itemsize // (2 if array.dtype.startswith("complex") else 1)
        elements.view(f"u{width}").byteswap(inplace=True)
    if array.conjugated:
        np.conjugate(elements, out=elements)
    if array.negated:
        np.negative(elements, out=elements)
