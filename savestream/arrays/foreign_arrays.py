"""Arrays of any other library: what offers DLPack, and what offers the buffer protocol.

They are stored like all arrays, filled in place where their memory may be written, and come back as numpy arrays where
a load has no target.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, HostArray, Shape
from savestream.arrays.dlpack_memory import ExportedArray, export, export_to_host
from savestream.arrays.dtypes import dtype_itemsize, interned_dtype_name
from savestream.arrays.elements import copy_elements
from savestream.errors import PlanError, UnsafeObjectError

__all__ = ["BufferAdapter", "DlpackAdapter", "foreign_adapter_for"]

T = TypeVar("T")

# Whatever else these offer, they are plain values, or refused with a cure of their own.
_OTHERS = (
    *(np.ndarray, np.generic, str, bytes, bytearray, int, float, complex, enum.Enum),
    *(tuple, list, dict, set, frozenset),
)
_SIMPLE_FORMATS = frozenset("?bBhHiIlLqQefdgc")
_READ_ONLY = "the target is read-only; load into a copy of it"


def foreign_adapter_for(kind: type) -> ArrayAdapter | None:
    """The adapter for a class of arrays that no other adapter knows, or None where it is no such class."""
    if issubclass(kind, _OTHERS) or dataclasses.is_dataclass(kind) or hasattr(kind, "global_shape"):
        return None
    if callable(getattr(kind, "__dlpack__", None)) and callable(getattr(kind, "__dlpack_device__", None)):
        return _DLPACK
    return _BUFFERS if kind is array.array or kind is memoryview or issubclass(kind, ctypes.Array) else None


def _describe(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _asked(question: Callable[[Any], T], value: Any) -> T:
    """What a foreign object answers, its failures as errors of ours; whoever asks knows the key."""
    try:
        return question(value)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise PlanError(
            f"{_describe(value)} does not give its elements: {problem}; convert it to a numpy array"
        ) from error


def _asked_first(question: Callable[[Any], T], value: Any, key: str) -> T:
    """:func:`_asked` of an object that has not answered yet: one that fails here is no array to store."""
    try:
        return _asked(question, value)
    except PlanError as error:
        raise UnsafeObjectError(f"{key}: {error}") from error.__cause__


def _asked_again(question: Callable[[Any], T], value: Any, otherwise: T) -> T:
    """:func:`_asked` where a failure can wait: the next question is asked by someone who names the key."""
    try:
        return _asked(question, value)
    except PlanError:
        return otherwise


class _ForeignAdapter(ArrayAdapter):
    def from_host(self, array: HostArray, dtype: str) -> Any:
        del dtype
        return array


class DlpackAdapter(_ForeignAdapter):
    """Arrays that offer ``__dlpack__`` and ``__dlpack_device__``, on any device."""

    framework = "dlpack"

    def info(self, array: Any, key: str) -> ArrayInfo:
        exported = _asked_first(export, array, key)
        variant = "" if exported.is_host else "device {}:{}".format(*exported.device)
        return ArrayInfo(exported.dtype, exported.shape, exported.strides, dtype_itemsize(exported.dtype), variant)

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [_asked_again(_address, array, 0) for array in arrays]

    def host_view(self, array: Any) -> HostArray:
        exported = _asked(export, array)
        return exported.view() if exported.is_host else _from_device(array).view()

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        exported = _asked(export, array)
        if exported.is_host:
            copy_elements(exported.view(), start, stop, target)
            return
        size = max(int(np.prod(exported.shape[1:])), 1)  # of a row; only whole rows can be had from a device
        first, last = start // size, -(-stop // size)
        rows = _rows(array, first, last, exported) if exported.shape else None
        if rows is None:
            copy_elements(self.host_view(array), start, stop, target)
        else:
            copy_elements(rows, start - first * size, stop - first * size, target)

    def fill_problem(self, array: Any) -> str | None:
        try:
            exported = _asked(export, array)
        except PlanError as error:
            return str(error)
        if not exported.is_host:
            return "the target is on a device to which DLPack gives no way; load without it and copy the result there"
        return None if _is_writable(array, exported) else _READ_ONLY

    def own_memory(self, array: Any) -> HostArray | None:
        return _asked_again(_writable_view, array, None)

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        """Only for targets that gave their memory when they were described, and not when it was asked for."""
        memory = _asked(_writable_view, array)
        if memory is None or memory.shape != parts[0][1].shape:
            raise PlanError(f"a {_describe(array)} changed while a load was to fill it; load again")
        np.copyto(memory, parts[0][1])
        return array


def _address(array: Any) -> int:
    return export(array).address


def _writable_view(array: Any) -> HostArray | None:
    exported = export(array)
    return exported.view(writable=True) if exported.is_host and _is_writable(array, exported) else None


def _is_writable(array: Any, exported: ExportedArray) -> bool:
    """Whether the memory may be written. Exports without a version do not say; then it is as the class behaves."""
    return not exported.read_only if exported.read_only is not None else hasattr(type(array), "__setitem__")


def _from_device(array: Any) -> ExportedArray:
    try:
        return export_to_host(array)
    except Exception as error:
        raise PlanError(
            f"{_describe(array)} on a device does not copy itself to host memory through DLPack: "
            f"{type(error).__name__}: {error}; copy it to a numpy array before saving"
        ) from error


def _rows(array: Any, first: int, last: int, whole: ExportedArray) -> HostArray | None:
    """Rows of a device array in host memory; None where slicing it does not give just these rows."""
    try:
        part = array[first:last]
        exported = export(part)
    except Exception:  # slices are a convenience: without them the whole array is copied
        return None
    alike = (exported.dtype, exported.device) == (whole.dtype, whole.device)
    if not alike or exported.shape != (last - first, *whole.shape[1:]):
        return None
    if exported.address != whole.address + first * whole.strides[0]:
        return None
    return _from_device(part).view()


class BufferAdapter(_ForeignAdapter):
    """``array.array``, ``memoryview`` and ctypes arrays; no view outlives the call that needs it, so they may grow.

    Hence none is given to a load either, not even while it runs: an error that refers to it would keep it.
    """

    framework = "buffer"

    def info(self, array: Any, key: str) -> ArrayInfo:
        view = _asked_first(_buffer_view, array, key)
        try:
            name = interned_dtype_name(view.dtype)
        except UnsafeObjectError as error:
            raise UnsafeObjectError(f"{key}: {error}") from None
        if name is None:
            raise UnsafeObjectError(f"{key}: {_describe(array)} holds Python objects, which only pickle could store")
        return ArrayInfo(name, view.shape, view.strides, view.dtype.itemsize)

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [_asked_again(_buffer_address, array, 0) for array in arrays]

    def host_view(self, array: Any) -> HostArray:
        return _asked(_buffer_view, array)

    def fill_problem(self, array: Any) -> str | None:
        try:
            return None if self.host_view(array).flags.writeable else _READ_ONLY
        except PlanError as error:
            return str(error)

    def is_filled_in_place(self, array: Any) -> bool:
        del array
        return True

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        view = self.host_view(array)
        ((_, content),) = parts
        if view.shape != content.shape:
            raise PlanError(f"a {_describe(array)} was resized while a load was to fill it; load again")
        if view.dtype.names is not None:  # an assignment of records would leave their padding behind
            view, content = (records.view((np.void, records.dtype.itemsize)) for records in (view, content))
        np.copyto(view, content)
        return array


def _buffer_view(value: Any) -> HostArray:
    view = memoryview(value)
    if not isinstance(value, memoryview) and view.format.lstrip("<>=@") not in _SIMPLE_FORMATS:
        raise ValueError(f"elements of the format {view.format!r} have no dtype")
    return np.asarray(view)


def _buffer_address(value: Any) -> int:
    address: int = _buffer_view(value).__array_interface__["data"][0]
    return address


_DLPACK = DlpackAdapter()
_BUFFERS = BufferAdapter()
