"""What pickled numpy scalars and arrays mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import InertObject, NamedGlobal, show

__all__ = ["NUMPY_NAMES", "PickledArray"]

_CODE = re.compile(r"[biufcSU]\d{1,9}")


class _PickledDtype(InertObject):
    """A dtype of numbers, bytes or text."""

    __slots__ = ("_code",)

    def __init__(self, code: object, *_: object) -> None:
        super().__init__("numpy.dtype")
        if type(code) is not str or not _CODE.fullmatch(code):
            raise UnsafeObjectError(f"it holds numpy values of dtype {show(code)}, which is not read here")
        self._code = code
        self.state = np.dtype(code)

    def set_state(self, state: object) -> None:
        """Its byte order; everything else that a dtype's state may say belongs to records and objects."""
        if type(state) is not tuple or len(state) < 8 or any(part is not None for part in state[2:5]) or state[7] & 1:
            raise UnsafeObjectError("it holds a numpy dtype of records or objects, which is not read here")
        if state[1] not in ("<", ">", "|", "="):
            raise CorruptCheckpointError(f"a numpy dtype has the byte order {show(state[1])}")
        self.state = np.dtype(self._code) if state[1] == "|" else np.dtype(self._code).newbyteorder(state[1])


class PickledArray(InertObject):
    """An array of numpy's; ``array`` is there when its state was set."""

    __slots__ = ()

    def __init__(self, *_: object) -> None:
        super().__init__("numpy.ndarray")

    def set_state(self, state: object) -> None:
        match state:
            case (_, tuple(shape), _PickledDtype(state=dtype), bool(fortran), bytes(data)):
                self.state = _elements(shape, dtype, data, "F" if fortran else "C")
            case _:
                raise UnsafeObjectError(
                    "it holds a numpy array of objects or of an unknown form, which is not read here"
                )

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The elements."""
        if self.state is None:
            raise CorruptCheckpointError("a numpy array has no content")
        found: np.ndarray[Any, Any] = self.state
        return found


def _elements(shape: Any, dtype: np.dtype[Any], data: bytes, order: Any) -> np.ndarray[Any, Any]:
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise CorruptCheckpointError(f"a numpy array of shape {show(shape)} and dtype {dtype} has {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


def _scalar(dtype: object, data: object) -> object:
    if not isinstance(dtype, _PickledDtype) or type(data) is not bytes:
        raise UnsafeObjectError("it holds a numpy scalar of an unknown form, which is not read here")
    return _elements((), dtype.state, data, "C")[()]


def _reconstruct(kind: object, shape: object, code: object) -> PickledArray:
    del shape, code
    if not isinstance(kind, NamedGlobal) or kind.name != "numpy.ndarray":
        raise UnsafeObjectError(f"it holds an array of class {show(kind)}, which is not read here")
    return PickledArray()


def _from_buffer(data: object, dtype: object, shape: object, order: object, axes: object = None) -> PickledArray:
    """How protocol 5 writes arrays."""
    array = PickledArray()
    known = isinstance(dtype, _PickledDtype) and type(data) in (bytes, bytearray) and type(shape) is tuple
    if not known or order not in ("C", "F", "K") or (order == "K") != (type(axes) is tuple):
        raise UnsafeObjectError("it holds a numpy array of an unknown form, which is not read here")
    elements = _elements(shape, dtype.state, bytes(data), "F" if order == "F" else "C")  # type: ignore[attr-defined, call-overload]
    array.state = elements.transpose(axes) if order == "K" else elements  # type: ignore[call-overload]
    return array


NUMPY_NAMES: Mapping[str, object] = MappingProxyType(
    {
        "numpy.dtype": NamedGlobal("numpy.dtype", _PickledDtype),
        "numpy.ndarray": NamedGlobal("numpy.ndarray"),
        **{
            f"numpy.{core}.multiarray.{name}": NamedGlobal(f"numpy.{core}.multiarray.{name}", constructor)
            for core in ("core", "_core")
            for name, constructor in (("scalar", _scalar), ("_reconstruct", _reconstruct))
        },
        **{
            f"numpy.{core}.numeric._frombuffer": NamedGlobal(f"numpy.{core}.numeric._frombuffer", _from_buffer)
            for core in ("core", "_core")
        },
    }
)
