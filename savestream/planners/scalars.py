"""Python numbers and arrays of no dimension, which take each other's place where no bit is lost.

A jitted step makes arrays of the numbers that a new training state holds: counters, rates, flags. Such a state has to
load into a new one, and the other way round. What the target has there decides what comes back.

Only arrays that a load replaces take a number, as JAX's and those without memory are. One that would be changed where
it lies may share its memory with other targets, which take something else.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from savestream.arrays import HostArray, adapter_for, dtype_from_name, is_opaque_dtype
from savestream.errors import SavestreamError
from savestream.planners.metadata import Shape
from savestream.planners.open_targets import Allocate

__all__ = ["NUMBERS", "OpenNumber", "array_of_number", "number_type", "takes_number"]

NUMBERS: frozenset[type] = frozenset({bool, int, float, complex})
_BY_KIND = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def number_type(dtype: str, shape: Shape) -> type | None:
    """The class of Python's numbers that holds every element of a dtype, for an array of one element; else None."""
    if shape or is_opaque_dtype(dtype):
        return None
    host = dtype_from_name(dtype)
    if host.kind == "V" and host.type is not np.void:  # of ml_dtypes
        return float if "float" in dtype else int if "int" in dtype else None
    precise = host.itemsize <= {"f": 8, "c": 16}.get(host.kind, 8)
    return _BY_KIND.get(host.kind) if precise else None


def takes_number(target: Any, number: object) -> bool:
    """Whether ``target`` is an array of no dimension that holds ``number`` exactly, and that a load replaces."""
    if type(number) not in NUMBERS:
        return False
    adapter = adapter_for(type(target))
    try:
        if adapter is None or adapter.fill_problem(target) is not None or adapter.is_filled_in_place(target):
            return False
        info = adapter.target_info(target, "")
    except SavestreamError:
        return False
    return number_type(info.dtype, info.shape) is type(number) and _holds(info.dtype, number)


def _holds(dtype: str, number: Any) -> bool:
    try:
        with np.errstate(over="ignore"):
            element = _element(dtype, number)
    except (OverflowError, ValueError):
        return False
    return repr(type(number)(element[()])) == repr(number)  # which shows every bit, but for those of a NaN


def _element(dtype: str, number: Any) -> HostArray:
    return np.array(number).astype(dtype_from_name(dtype))


def array_of_number(target: Any, number: Any) -> Any:
    """The array that takes the target's place, with the number in it."""
    adapter = adapter_for(type(target))
    assert adapter is not None  # noqa: S101 - what takes a number is an array
    element = _element(adapter.target_info(target, "").dtype, number)
    boxes = adapter.target_boxes(target, "")
    return adapter.filled(target, [((), element)] if boxes is None else [(offsets, element) for offsets, _ in boxes])


class OpenNumber(msgspec.Struct):
    """A number of the target's for which an array was saved."""

    kind: type
    dtype: str
    _buffer: HostArray | None = None

    def open(self, allocate: Allocate) -> Any:
        """The array to fill."""
        self._buffer = allocate(self.dtype, ())
        return self._buffer

    def close(self) -> Any:
        """The number that was read."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None  # noqa: S101 - opened before
        return self.kind(buffer[()])
