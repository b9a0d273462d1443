"""Memory that an array of another library exports through DLPack, as numpy arrays.

numpy's own ``from_dlpack`` knows neither bfloat16 nor fp8, and takes everything that speaks the protocol without a
version for read-only. So the description inside the exported capsule is read here. The capsule is never consumed: a
view of the memory keeps it, and when both are gone the capsule's destructor gives the memory back.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from savestream.arrays.dtypes import dtype_from_name
from savestream.arrays.elements import HostArray

__all__ = ["ExportedArray", "export", "export_to_host"]

HOST_DEVICES = frozenset({1, 3, 11})  # CPU, and pinned host memory of CUDA and ROCm
_CPU = (1, 0)
_NEWEST_VERSION = (1, 0)
_READ_ONLY, _PADDED = 1, 4  # flags of an exported tensor
_MAXIMUM_DIMENSIONS = 64

_DTYPES: Mapping[tuple[int, int], str] = MappingProxyType(
    {
        **{(0, bits): f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
        **{(1, bits): f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
        **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
        (4, 16): "bfloat16",
        **{(5, bits): f"complex{bits}" for bits in (32, 64, 128)},
        (6, 8): "bool",
        (7, 8): "float8_e3m4",
        (8, 8): "float8_e4m3",
        (9, 8): "float8_e4m3b11fnuz",
        (10, 8): "float8_e4m3fn",
        (11, 8): "float8_e4m3fnuz",
        (12, 8): "float8_e5m2",
        (13, 8): "float8_e5m2fnuz",
        (14, 8): "float8_e8m0fnu",
        (15, 6): "float6_e2m3fn",
        (16, 6): "float6_e3m2fn",
        (17, 4): "float4_e2m1fn",
    }
)


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``; the one without a version begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Prototypes of our own: argument types set on ctypes.pythonapi's functions would be everybody's.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


class ExportedArray(msgspec.Struct, frozen=True):
    """What an array exports.

    Attributes
    ----------
    dtype, shape, strides
        A stored dtype name; elements; bytes.
    address
        Of the first element, on the device.
    device
        Type and number, as DLPack counts them.
    read_only
        None where the exporter does not say.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: tuple[int, int]
    read_only: bool | None
    capsule: Any

    @property
    def is_host(self) -> bool:
        """Whether the processor can read the memory."""
        return self.device[0] in HOST_DEVICES

    def view(self, *, writable: bool = False) -> HostArray:
        """The memory as a numpy array, which keeps the export alive."""
        dtype = dtype_from_name(self.dtype)
        if not math.prod(self.shape):
            return np.empty(self.shape, dtype)
        return np.asarray(_Memory(self, dtype.itemsize, writable)).view(dtype)


class _Memory:
    """Hands exported memory to numpy as opaque elements of the right size; numpy keeps this object."""

    def __init__(self, exported: ExportedArray, itemsize: int, writable: bool) -> None:
        self._exported = exported
        self.__array_interface__ = {
            "version": 3,
            "data": (exported.address, not writable),
            "shape": exported.shape,
            "strides": exported.strides,
            "typestr": f"|V{itemsize}",
        }


def export(array: Any) -> ExportedArray:
    """What an array exports from where it lies; whatever its library raises passes through.

    Raises
    ------
    ValueError
        The export is of a newer version, or of a dtype that has no name.
    """
    try:
        capsule = array.__dlpack__(max_version=_NEWEST_VERSION)
    except TypeError:  # how a library that knows no versions refuses the argument
        capsule = array.__dlpack__()
    return _read(capsule)


def export_to_host(array: Any) -> ExportedArray:
    """A copy, in host memory, of an array on a device."""
    exported = _read(array.__dlpack__(max_version=_NEWEST_VERSION, dl_device=_CPU))
    if not exported.is_host:
        raise ValueError("it was asked for a copy in host memory and exported device memory")
    return exported


def _read(capsule: Any) -> ExportedArray:
    if _is_capsule(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if managed.major != _NEWEST_VERSION[0]:
            raise ValueError(f"it exports version {managed.major}.{managed.minor} of DLPack, which is not known here")
        return _describe(managed.tensor, managed.flags, bool(managed.flags & _READ_ONLY), capsule)
    if _is_capsule(capsule, b"dltensor"):
        return _describe(_Tensor.from_address(_pointer_of(capsule, b"dltensor")), 0, None, capsule)
    raise ValueError(f"__dlpack__() returned {type(capsule).__name__}, no capsule of a tensor")


def _describe(tensor: Any, flags: int, read_only: bool | None, capsule: Any) -> ExportedArray:
    name = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if name is None or (tensor.bits < 8 and not flags & _PADDED):
        raise ValueError(f"it exports elements of DLPack type {tensor.code} with {tensor.bits} x {tensor.lanes} bits")
    if not 0 <= tensor.ndim <= _MAXIMUM_DIMENSIONS:
        raise ValueError(f"it exports {tensor.ndim} dimensions")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    itemsize = dtype_from_name(name).itemsize
    if tensor.ndim and tensor.strides:
        strides = tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
    else:
        strides = tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))
    address = (tensor.data or 0) + tensor.byte_offset
    device = (tensor.device_type, tensor.device_id)
    return ExportedArray(name, shape, strides, address, device, read_only, capsule)
