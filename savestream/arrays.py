"""Array leaves of any framework, seen as dtype name, shape and host bytes. Imports no framework.

Each framework has an adapter, found by the leaf's type; everything behind it works on numpy views. A dtype *name* is

- numpy's own name for native, little-endian and byte-order-free numbers: ``float32``, ``int64``, ``bool``;
- the name in ``ml_dtypes`` for its types: ``bfloat16``, ``float8_e4m3fn``, ``int4`` (one byte an element);
- numpy's type string for all other simple types: ``>u4``, ``<M8[ns]``, ``<U5``, ``|S3``, ``|V4``;
- compact JSON for records: ``{"fields":[[name, dtype name, offset, shape], ...],"itemsize":n}``.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from savestream.errors import CorruptCheckpointError, UnsafeObjectError

__all__ = [
    "ArrayAdapter",
    "ArrayInfo",
    "HostArray",
    "adapter_for",
    "array_info",
    "copy_elements",
    "dtype_from_name",
    "dtype_itemsize",
    "dtype_name",
    "host_view",
    "is_array",
]

HostArray: TypeAlias = npt.NDArray[Any]  # the element type is whatever the state holds

_EXTENSION_NAME = re.compile(r"bfloat16|float[468]_[a-z0-9]{3,16}|u?int[124]")
_SIMPLE_TYPE_STRING = re.compile(r"[<>|=]?[biufcSUV]\d{1,9}|[<>][mM]8(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")
_MAXIMUM_RECORD_DEPTH = 16


class ArrayInfo(msgspec.Struct, frozen=True, gc=False):
    """What planning needs of a leaf; ``strides`` in bytes, ``address`` of the first element."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class ArrayAdapter(Protocol):
    """One framework's leaves."""

    framework: str

    def info(self, array: Any, key: str) -> ArrayInfo:
        """Describe a leaf, or refuse it by ``key`` (:class:`UnsafeObjectError`)."""
        ...

    def host_view(self, array: Any) -> HostArray:
        """A numpy view of the leaf's elements, without a copy where it lies in host memory."""
        ...

    def is_writable(self, array: Any) -> bool:
        """Whether a load may fill the leaf in place."""
        ...


class _NumpyAdapter:
    framework = "numpy"

    def info(self, array: Any, key: str) -> ArrayInfo:
        dtype = array.dtype
        try:
            name = _interned_dtype_name(dtype)
        except UnsafeObjectError as error:
            raise UnsafeObjectError(f"{key}: {error}") from None
        if name is None:
            raise UnsafeObjectError(
                f"{key}: arrays of dtype {dtype} hold Python objects, which only pickle could store; "
                "convert it to a numeric or fixed-width dtype, or to a list of plain values"
            )
        address = array.__array_interface__["data"][0]
        return ArrayInfo(name, array.shape, array.strides, address, dtype.itemsize)

    def host_view(self, array: Any) -> HostArray:
        return np.asarray(array)

    def is_writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)


_NUMPY = _NumpyAdapter()
_NUMPY_TYPES: frozenset[type] = frozenset({np.ndarray, np.memmap, np.recarray})


def adapter_for(kind: type) -> ArrayAdapter | None:
    """The adapter for leaves of exactly this type, or None where it is no supported array."""
    return _NUMPY if kind in _NUMPY_TYPES else None


def is_array(value: object) -> bool:
    """Whether ``value`` is an array leaf that savestream stores as bytes."""
    return adapter_for(type(value)) is not None


def array_info(array: object, key: str) -> ArrayInfo:
    """Describe a leaf; ``key`` names it in errors."""
    return _adapter(array).info(array, key)


def host_view(array: object) -> HostArray:
    """The leaf's elements as a numpy view."""
    return _adapter(array).host_view(array)


def _adapter(array: object) -> ArrayAdapter:
    adapter = adapter_for(type(array))
    if adapter is None:
        raise UnsafeObjectError(f"{type(array).__module__}.{type(array).__qualname__} is not a supported array")
    return adapter


# --- dtype names ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _interned_dtype_name(dtype: np.dtype[Any]) -> str | None:
    return None if dtype.hasobject else dtype_name(dtype)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name under which ``dtype`` is stored; :func:`dtype_from_name` leads back to an equal dtype."""
    if dtype.hasobject:
        raise UnsafeObjectError(f"dtype {dtype} holds Python objects, which only pickle could store")
    if dtype.names is not None:
        return json.dumps(_record_name(dtype), separators=(",", ":"), ensure_ascii=False)
    if dtype.subdtype is not None:
        raise UnsafeObjectError(f"dtype {dtype}: a bare subarray dtype cannot stand alone")
    if type(dtype).__module__ == "numpy.dtypes" and dtype.kind in "biufc":
        return dtype.name if dtype.isnative else dtype.str
    if dtype.kind in "mMSUV" and not _is_extension(dtype):
        return dtype.str
    if _is_extension(dtype) and _EXTENSION_NAME.fullmatch(dtype.name):
        return dtype.name
    raise UnsafeObjectError(f"dtype {dtype} has no portable name; convert it to one of numpy's or ml_dtypes' types")


def _is_extension(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__.partition(".")[0] == "ml_dtypes"


def _record_name(dtype: np.dtype[Any]) -> dict[str, Any]:
    fields = []
    if dtype.fields is not None and len(dtype.fields) > len(dtype.names or ()):
        raise UnsafeObjectError(f"dtype {dtype} has field titles, which would be lost; make a dtype without titles")
    for name in dtype.names or ():
        field, offset = dtype[name], dtype.fields[name][1] if dtype.fields is not None else 0
        base, shape = field.subdtype or (field, ())
        inner = _record_name(base) if base.names is not None else dtype_name(base)
        fields.append([name, inner, offset, list(shape)])
    return {"fields": fields, "itemsize": dtype.itemsize}


@functools.lru_cache(maxsize=1024)
def dtype_from_name(name: str) -> np.dtype[Any]:
    """The numpy dtype behind a stored name; an unknown or unsafe name is a :class:`CorruptCheckpointError`."""
    try:
        return _parse_dtype(json.loads(name) if name.startswith("{") else name, 0)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"the manifest names a dtype that does not exist: {name[:200]!r}") from error


def _parse_dtype(spec: Any, depth: int) -> np.dtype[Any]:
    if isinstance(spec, dict):
        return _parse_record(spec, depth + 1)
    if not isinstance(spec, str):
        raise TypeError("a dtype is a string or a record")
    if _EXTENSION_NAME.fullmatch(spec):
        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spec))
        return extension
    if _SIMPLE_TYPE_STRING.fullmatch(spec) or spec in _NUMPY_NAMES:
        dtype = np.dtype(spec)
        if not dtype.hasobject:
            return dtype
    raise TypeError("not a dtype that savestream writes")


def _parse_record(spec: dict[str, Any], depth: int) -> np.dtype[Any]:
    if depth > _MAXIMUM_RECORD_DEPTH:
        raise ValueError("records nest too deeply")
    names, formats, offsets = [], [], []
    for name, inner, offset, shape in spec["fields"]:
        base = _parse_dtype(inner, depth)
        names.append(name)
        formats.append(np.dtype((base, tuple(shape))) if shape else base)
        offsets.append(offset)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": spec["itemsize"]})


_NUMPY_NAMES = frozenset(np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")


@functools.lru_cache(maxsize=1024)
def dtype_itemsize(name: str) -> int:
    """Bytes of one element of the named dtype."""
    return int(dtype_from_name(name).itemsize)


# --- ranges of elements -----------------------------------------------------------------------------------


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
