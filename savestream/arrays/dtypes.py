"""Names of dtypes, as they are stored, and the numpy dtypes behind them.

A dtype *name* is

- numpy's own name for native, little-endian and byte-order-free numbers: ``float32``, ``int64``, ``bool``;
- the name in ``ml_dtypes`` for its types: ``bfloat16``, ``float8_e4m3fn``, ``complex32``, ``int4`` (one byte each);
- numpy's type string for all other simple types: ``>u4``, ``<M8[ns]``, ``<U5``, ``|S3``, ``|V4``;
- compact JSON for records: ``{"fields":[[name, dtype name, offset, shape], ...],"itemsize":n}``;
- PyTorch's name for its types that exist nowhere else: ``float4_e2m1fn_x2``, ``uint3``, ``bits8``. numpy sees them as
  unsigned integers that hold the same bytes;
- ``prng_key<implementation>`` for JAX's typed random keys. numpy sees a record of one field, ``key_data``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from savestream.errors import CorruptCheckpointError, UnsafeObjectError

__all__ = [
    "OPAQUE_DTYPES",
    "PRNG_KEY_WORDS",
    "dtype_from_name",
    "dtype_itemsize",
    "dtype_name",
    "interned_dtype_name",
    "is_opaque_dtype",
]

_EXTENSION_NAME = re.compile(r"bfloat16|float[468]_[a-z0-9]{3,16}|b?complex32|u?int[124]")
_SIMPLE_TYPE_STRING = re.compile(r"[<>|=]?[biufcSUV]\d{1,9}|[<>][mM]8(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")
_PRNG_KEY_NAME = re.compile(r"prng_key<([a-z0-9_]{1,40})>")
_MAXIMUM_RECORD_DEPTH = 16

OPAQUE_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        **{f"{sign}int{bits}": np.dtype(np.uint8) for sign in ("", "u") for bits in (3, 5, 6, 7)},
        **{name: np.dtype(np.uint8) for name in ("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2")},
        "bits16": np.dtype(np.uint16),
    }
)
PRNG_KEY_WORDS: Mapping[str, int] = MappingProxyType({"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4})


@functools.lru_cache(maxsize=1024)
def interned_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """:func:`dtype_name`, remembered; None for a dtype that holds Python objects."""
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
    if spec in OPAQUE_DTYPES:
        return OPAQUE_DTYPES[spec]
    if implementation := _PRNG_KEY_NAME.fullmatch(spec):
        return np.dtype([("key_data", "<u4", (PRNG_KEY_WORDS[implementation[1]],))])
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


def is_opaque_dtype(name: str) -> bool:
    """Whether elements of the named dtype are no numbers to numpy, so that nothing can be converted to or from it."""
    return name in OPAQUE_DTYPES or name.startswith("prng_key<")


_NUMPY_NAMES = frozenset(np.dtype(code).name for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?")


@functools.lru_cache(maxsize=1024)
def dtype_itemsize(name: str) -> int:
    """Bytes of one element of the named dtype."""
    return int(dtype_from_name(name).itemsize)
