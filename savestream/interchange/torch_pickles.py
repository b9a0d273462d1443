"""What the pickles inside of PyTorch's archives mean: tensors become descriptions of where their elements lie."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from savestream.arrays.dtypes import OPAQUE_DTYPES, dtype_itemsize
from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import NamedGlobal, UnreadObject, WithUnread, show
from savestream.interchange.numpy_pickles import NUMPY_NAMES
from savestream.interchange.pickle_keys import PLAIN_KEYS, refuse_many_predictable
from savestream.planners import RecordedObject

__all__ = [
    "METADATA_DTYPES",
    "TENSOR_NAMES",
    "UNSUPPORTED_DTYPES",
    "VALUE_NAMES",
    "VALUE_NAMES_WITH_UNREAD",
    "StorageClass",
    "StorageId",
    "StoredTensor",
    "TorchDtype",
    "storage_id",
    "storage_id_or_unread",
]

_MAXIMUM_DIMENSIONS = 64
_DEVICE = re.compile(r"[a-z]{1,40}(:\d{1,5})?")
_MAXIMUM_EXTENT = 1 << 62
_NATIVE = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("uint1", "uint2", "uint4", "int1", "int2", "int4"),
)
UNSUPPORTED_DTYPES = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bit"})
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


class TorchDtype(msgspec.Struct, frozen=True):
    """A dtype of torch's; savestream stores it under the same name."""

    name: str


class StorageClass(msgspec.Struct, frozen=True):
    """A class of storages; ``dtype`` is None for one that holds bytes."""

    dtype: str | None


class StorageId(msgspec.Struct, frozen=True):
    """A storage in the archive: the member that holds it, and how much there must be."""

    key: str
    dtype: str | None
    nbytes: int


class StoredTensor(msgspec.Struct, frozen=True):
    """Where a tensor's elements lie in a storage; offset and strides in bytes."""

    storage: StorageId
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugated: bool = False
    negated: bool = False


def storage_id(identifier: object) -> StorageId:
    """What a persistent id names: ``("storage", class, key, device, elements)``."""
    match identifier:
        case ("storage", StorageClass(dtype=dtype), str(key), str(), int(count)) if count >= 0:
            return StorageId(key, dtype, count * (1 if dtype is None else dtype_itemsize(dtype)))
        case _:
            raise CorruptCheckpointError(f"it refers to {show(identifier)}, which is no storage")


def storage_id_or_unread(identifier: object) -> StorageId | UnreadObject:
    """The same where storages may be of classes that are not read, such as those of quantised tensors."""
    match identifier:
        case ("storage", NamedGlobal(name=name), str(), str(), int()):
            return UnreadObject(name)
        case _:
            return storage_id(identifier)


def _integers(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > _MAXIMUM_DIMENSIONS:
        raise CorruptCheckpointError(f"a tensor's {what} is {show(values)}")
    if not all(type(value) is int and 0 <= value < _MAXIMUM_EXTENT for value in values):
        raise CorruptCheckpointError(f"a tensor's {what} is {show(values)}")
    return tuple(values)


def _size(*arguments: object) -> tuple[int, ...]:
    return _integers(arguments[0] if arguments else (), "size")


def _tensor(
    storage: object, offset: object, shape: object, strides: object, dtype: str, metadata: object
) -> StoredTensor:
    if not isinstance(storage, StorageId):
        raise CorruptCheckpointError(f"a tensor's storage is {show(storage)}")
    itemsize = dtype_itemsize(dtype)
    steps = tuple(step * itemsize for step in _integers(strides, "strides"))
    first = _integers((offset,), "storage offset")[0] * itemsize
    sizes = _integers(shape, "shape")
    if len(sizes) != len(steps):
        raise CorruptCheckpointError(f"a tensor of shape {sizes} has {len(steps)} strides")
    end = first + itemsize + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if math.prod(sizes) and end > storage.nbytes:
        raise CorruptCheckpointError(
            f"a tensor of shape {sizes} reaches to byte {end} of its storage, which has {storage.nbytes}"
        )
    marks = _flags(metadata)
    return StoredTensor(storage, dtype, first, sizes, steps, marks.get("conj", False), marks.get("neg", False))


def _flags(metadata: object) -> Mapping[str, bool]:
    if metadata is None:
        return {}
    if type(metadata) is not dict or set(metadata) - {"conj", "neg"} or not set(map(type, metadata.values())) <= {bool}:
        raise UnsafeObjectError(f"a tensor carries {show(metadata)}, which is not read here")
    return metadata


def _refuse_hooks(hooks: object) -> None:
    if hooks not in (None, {}):
        raise UnsafeObjectError("a tensor carries hooks, which are code")


def _rebuild_v1(storage: Any, offset: object, shape: object, strides: object) -> StoredTensor:
    return _tensor(storage, offset, shape, strides, _typed(storage), None)


def _rebuild_v2(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> StoredTensor:
    del requires_grad
    _refuse_hooks(hooks)
    return _tensor(storage, offset, shape, strides, _typed(storage), metadata)


def _rebuild_v3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> StoredTensor:
    del requires_grad
    _refuse_hooks(hooks)
    if not isinstance(dtype, TorchDtype):
        raise CorruptCheckpointError(f"a tensor's dtype is {show(dtype)}")
    return _tensor(storage, offset, shape, strides, dtype.name, metadata)


def _typed(storage: object) -> str:
    if not isinstance(storage, StorageId) or storage.dtype is None:
        raise CorruptCheckpointError("a tensor's storage has no dtype")
    return storage.dtype


def _rebuild_parameter(tensor: object, requires_grad: object, hooks: object) -> StoredTensor:
    del requires_grad
    _refuse_hooks(hooks)
    if not isinstance(tensor, StoredTensor):
        raise CorruptCheckpointError("a parameter holds no tensor")
    return tensor


def _rebuild_parameter_with_state(tensor: object, requires_grad: object, hooks: object, state: object) -> StoredTensor:
    """A parameter with attributes of its own, which are no part of a checkpoint."""
    del state
    return _rebuild_parameter(tensor, requires_grad, hooks)


def _rebuild_from_type(function: object, kind: object, arguments: object, state: object) -> object:
    """A tensor with attributes of its own, which are no part of a checkpoint; subclasses may mean anything."""
    del state
    if not isinstance(function, NamedGlobal) or not isinstance(kind, NamedGlobal):
        raise CorruptCheckpointError(f"{show(kind)} stands where a tensor's class belongs")
    if kind.name not in _TENSOR_CLASSES:
        return UnreadObject(kind.name)
    found = function.apply(arguments)
    if not isinstance(found, StoredTensor | UnreadObject):
        raise CorruptCheckpointError(f"{show(found)} stands where a tensor belongs")
    return found


def _ordered_dict(*arguments: Any) -> OrderedDict[Any, Any]:
    if arguments:
        raise CorruptCheckpointError("an OrderedDict is made of arguments")
    return OrderedDict()


def _encode(text: object, encoding: object) -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding != "latin1":
        raise CorruptCheckpointError("bytes are not written in the way of pickle")
    return text.encode("latin1")


def _bytes_like(kind: type[bytes | bytearray]) -> NamedGlobal:
    """bytes and bytearray, as the protocols write them: of nothing, of bytes, or of text and its encoding."""

    def make(*arguments: object) -> object:
        if len(arguments) == 2:
            return kind(_encode(*arguments))
        if len(arguments) > 1 or not set(map(type, arguments)) <= {bytes}:
            raise CorruptCheckpointError(f"a {kind.__name__} is made of something else than bytes")
        return kind(*arguments)

    return NamedGlobal(kind.__name__, make)


def _collection(kind: type[Any]) -> NamedGlobal:
    """Sets, which protocol 2 makes of one list."""

    def make(*arguments: object) -> object:
        if len(arguments) > 1 or not set(map(type, arguments)) <= {list}:
            raise CorruptCheckpointError(f"a {kind.__name__} is made of something else than a list")
        items: Any = arguments[0] if arguments else []
        _check_members(items)
        return kind(items)

    return NamedGlobal(kind.__name__, make)


def _recorded_size(*arguments: object) -> RecordedObject:
    return RecordedObject("torch.Size", _size(*arguments))


def _recorded_device(kind: object, index: object = None) -> RecordedObject:
    name = kind if index is None else f"{show(kind)[1:-1]}:{show(index)}"
    if type(name) is not str or not _DEVICE.fullmatch(name):
        raise CorruptCheckpointError(f"a device is {show(kind)}, {show(index)}")
    return RecordedObject("torch.device", name)


def _check_members(items: Any) -> None:
    for item in items:
        parts = item if type(item) is tuple else (item,)
        if not PLAIN_KEYS.issuperset(map(type, parts)):
            raise CorruptCheckpointError("a set holds something else than plain values and tuples of them")
    refuse_many_predictable(items)


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise CorruptCheckpointError("a complex number is made of something else than floats")
    return complex(real, imaginary)


_TENSOR_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_DTYPES = {f"torch.{name}": TorchDtype(name) for name in (*_NATIVE, *OPAQUE_DTYPES)}

# For the items of tensors: the rebuilding functions and nothing else.
TENSOR_NAMES: Mapping[str, object] = MappingProxyType(
    {
        **_DTYPES,
        **{f"torch.{name}": StorageClass(dtype) for name, dtype in _STORAGES.items()},
        "torch.storage.UntypedStorage": StorageClass(None),
        "torch._utils._rebuild_tensor": NamedGlobal("torch._utils._rebuild_tensor", _rebuild_v1),
        "torch._utils._rebuild_tensor_v2": NamedGlobal("torch._utils._rebuild_tensor_v2", _rebuild_v2),
        "torch._utils._rebuild_tensor_v3": NamedGlobal("torch._utils._rebuild_tensor_v3", _rebuild_v3),
        "torch._utils._rebuild_parameter": NamedGlobal("torch._utils._rebuild_parameter", _rebuild_parameter),
        "torch._utils._rebuild_parameter_with_state": NamedGlobal(
            "torch._utils._rebuild_parameter_with_state", _rebuild_parameter_with_state
        ),
        "torch._tensor._rebuild_from_type_v2": NamedGlobal("torch._tensor._rebuild_from_type_v2", _rebuild_from_type),
        **{name: NamedGlobal(name) for name in _TENSOR_CLASSES},
        "collections.OrderedDict": NamedGlobal("collections.OrderedDict", _ordered_dict),
        "torch.Size": NamedGlobal("torch.Size", _size),
    }
)

# For the items of other objects: plain values as well.
VALUE_NAMES: Mapping[str, object] = MappingProxyType(
    {
        **TENSOR_NAMES,
        **NUMPY_NAMES,
        "torch.Size": NamedGlobal("torch.Size", _recorded_size),
        "torch.device": NamedGlobal("torch.device", _recorded_device),
        "_codecs.encode": NamedGlobal("_codecs.encode", _encode),
        **{
            f"{module}.{kind.__name__}": _collection(kind)
            for module in ("builtins", "__builtin__")
            for kind in (set, frozenset)
        },
        **{
            f"{module}.{kind.__name__}": _bytes_like(kind)
            for module in ("builtins", "__builtin__")
            for kind in (bytes, bytearray)
        },
        **{f"{module}.complex": NamedGlobal("complex", _complex) for module in ("builtins", "__builtin__")},
    }
)

# For whole files, of which a part may be of use where another cannot be read.
VALUE_NAMES_WITH_UNREAD: Mapping[str, object] = MappingProxyType(WithUnread(VALUE_NAMES))

METADATA_DTYPES: Mapping[str, object] = MappingProxyType(
    {**_DTYPES, **{f"torch.{name}": TorchDtype(name) for name in UNSUPPORTED_DTYPES}}
)
