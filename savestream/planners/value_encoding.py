"""Encoding of plain Python values; :mod:`savestream.planners.values` lists the forms."""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import math
import pathlib
import struct
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from savestream.arrays import array_refusal, dtype_name, is_array
from savestream.errors import PlanError, SavestreamError, UnsafeObjectError
from savestream.planners.framework_values import dtype_round_trips, form_by_name, form_of
from savestream.planners.pytrees import is_pytree, open_pytree
from savestream.planners.recorded import (
    RecordedDataclass,
    RecordedEnum,
    RecordedObject,
    RecordedTuple,
    class_name,
    is_dataclass_type,
    is_namedtuple_type,
)
from savestream.planners.value_refusals import describe_type, pickle_object, refusal

__all__ = [
    "FACTORIES",
    "LARGEST_JSON_INT",
    "MAXIMUM_DEPTH",
    "MAXIMUM_INT_DIGITS",
    "SCALAR_TYPES",
    "Node",
    "dataclass_fields",
    "describe_type",
    "encode_value",
    "encode_value_bytes",
    "factory_name",
    "pickle_object",
    "plain_class",
    "refusal",
]

MAXIMUM_DEPTH = 128  # containers within containers, of a value and of a tree alike; the reader refuses more
MAXIMUM_INT_DIGITS = 1 << 20  # hexadecimal
LARGEST_JSON_INT = 1 << 53  # every JSON reader keeps integers up to here

FACTORIES: Mapping[str, type] = types.MappingProxyType(
    {kind.__name__: kind for kind in (list, dict, int, float, str, set, tuple, bool)}
)

Node: TypeAlias = Any  # JSON: None, bool, int, float, str, list or dict


def encode_value(value: object, key: str, *, allow_pickle: bool = False) -> object:
    """Encode a plain value as a JSON-able tree.

    Parameters
    ----------
    value
        Anything of the kinds that the module lists, nested at most :data:`MAXIMUM_DEPTH` deep.
    key
        Names the value in errors.
    allow_pickle
        Store objects of other classes with pickle instead of refusing them.

    Raises
    ------
    UnsafeObjectError
        An object has no safe encoding; the message names key, type and cure.
    PlanError
        The value contains itself, nests too deeply or holds an int that is too large.
    """
    return _Encoder(key, allow_pickle).encode(value, 0)


def encode_value_bytes(value: object, key: str, *, allow_pickle: bool = False) -> bytes:
    """:func:`encode_value` as UTF-8 JSON text."""
    return msgspec.json.encode(encode_value(value, key, allow_pickle=allow_pickle))


def factory_name(mapping: collections.defaultdict[Any, Any], key: str) -> str | None:
    """The recorded name of a defaultdict's factory: that of a builtin, or None where there is none."""
    factory = mapping.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is factory:
        return str(name)
    raise UnsafeObjectError(
        f"{key or 'the state'}: the default_factory {factory!r} of a defaultdict cannot be stored safely; use one of "
        f"{', '.join(FACTORIES)}, or convert it to a dict"
    )


def plain_class(value: object) -> bool:
    """Whether a value that is no container of the exact known types has a safe encoding of its own."""
    kind = type(value)
    return kind in _ENCODERS or _other_encoder(value) is not None


class _Encoder:
    __slots__ = ("_active", "_allow_pickle", "_hashing", "key")

    def __init__(self, key: str, allow_pickle: bool) -> None:
        self.key = key
        self._allow_pickle = allow_pickle
        self._active: set[int] = set()
        self._hashing = 0

    def encode(self, value: Any, depth: int) -> Node:
        encoder = _ENCODERS.get(type(value)) or _other_encoder(value)
        if encoder is None:
            return self._pickled(value)
        if type(value) in SCALAR_TYPES:
            return encoder(self, value, depth)
        if depth >= MAXIMUM_DEPTH:
            raise PlanError(f"{self.key}: nested more than {MAXIMUM_DEPTH} levels deep; flatten it")
        if id(value) in self._active:
            raise PlanError(f"{self.key}: {describe_type(value)} contains itself; break the cycle")
        self._active.add(id(value))
        try:
            return encoder(self, value, depth + 1)
        except UnsafeObjectError:
            if self._allow_pickle and type(value) is collections.defaultdict:
                return self._pickled(value)
            raise
        finally:
            self._active.discard(id(value))

    def items(self, values: Iterable[Any], depth: int) -> list[Node]:
        return [self.encode(value, depth) for value in values]

    def key_node(self, value: Any, depth: int) -> Node:
        """Encode what a dict or set hashes; a dataclass instance would come back unhashable without its class."""
        self._hashing += 1
        try:
            return self.encode(value, depth)
        finally:
            self._hashing -= 1

    def pairs(self, mapping: Mapping[Any, Any], depth: int) -> list[Node]:
        return [[self.key_node(key, depth), self.encode(value, depth)] for key, value in mapping.items()]

    def hashed(self, values: Iterable[Any], depth: int) -> list[Node]:
        # Sorted, since the order of a set differs between processes.
        return sorted((self.key_node(value, depth) for value in values), key=msgspec.json.encode)

    def record(self, value: Any, fields: Sequence[str], values: Iterable[Any], depth: int) -> list[Node]:
        return [class_name(type(value)), list(fields), self.items(values, depth)]

    def refuse_hashing(self, value: Any) -> None:
        if self._hashing:
            raise refusal(value, self.key)

    def _pickled(self, value: Any) -> Node:
        if not self._allow_pickle or is_array(value) or array_refusal(value) is not None:
            raise refusal(value, self.key)
        return {"$pickle": _base64(pickle_object(value, self.key))}


def _base64(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_int(encoder: _Encoder, value: int, _: int) -> Node:
    if -LARGEST_JSON_INT <= value <= LARGEST_JSON_INT:
        return value
    if value.bit_length() > 4 * MAXIMUM_INT_DIGITS:
        raise PlanError(f"{encoder.key}: an int of {value.bit_length()} bits is too large; store it as bytes")
    return {"$int": hex(value)}


def _encode_float(_: _Encoder, value: float, __: int) -> Node:
    if math.isfinite(value) and (value or math.copysign(1.0, value) > 0):
        return value
    return {"$float": struct.pack(">d", value).hex()}


def _encode_str(_: _Encoder, value: str, __: int) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _encode_dict(encoder: _Encoder, value: dict[Any, Any], depth: int) -> Node:
    if all(type(key) is str and not key.startswith("$") and key.isprintable() for key in value):
        return {key: encoder.encode(item, depth) for key, item in value.items()}
    return {"$dict": encoder.pairs(value, depth)}


def _encode_ordered_dict(encoder: _Encoder, value: collections.OrderedDict[Any, Any], depth: int) -> Node:
    pairs, metadata = encoder.pairs(value, depth), getattr(value, "_metadata", None)
    if metadata is None:
        return {"$odict": pairs}
    try:
        return {"$state_dict": [pairs, encoder.encode(metadata, depth)]}
    except UnsafeObjectError:  # it only helps loading into newer modules, so the entries are stored without it
        return {"$odict": pairs}


def _encode_defaultdict(encoder: _Encoder, value: collections.defaultdict[Any, Any], depth: int) -> Node:
    return {"$defaultdict": [factory_name(value, encoder.key), encoder.pairs(value, depth)]}


def _encode_dataclass(encoder: _Encoder, value: Any, depth: int) -> Node:
    encoder.refuse_hashing(value)
    names = dataclass_fields(value, encoder.key)
    return {"$dataclass": encoder.record(value, names, [getattr(value, name) for name in names], depth)}


def dataclass_fields(value: Any, key: str) -> list[str]:
    """The field names of a dataclass instance that holds nothing else and lacks none."""
    names = [field.name for field in dataclasses.fields(value)]
    absent = [name for name in names if not hasattr(value, name)]
    if absent:
        raise UnsafeObjectError(f"{key}: {describe_type(value)} has no value for its field {absent[0]!r}; set it")
    extra = sorted(name for name in set(getattr(value, "__dict__", ())) - set(names) if not _is_cached(value, name))
    if extra and not hasattr(value, "__post_init__"):  # which would make it again
        raise UnsafeObjectError(
            f"{key}: {describe_type(value)} has the attribute {extra[0]!r}, which is no field and would be lost; make "
            "it a field, or delete it"
        )
    return names


def _is_cached(value: Any, name: str) -> bool:
    """Whether an attribute is what a cached property left; it is computed again."""
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _encode_namedtuple(encoder: _Encoder, value: Any, depth: int) -> Node:
    return {"$namedtuple": encoder.record(value, value._fields, value, depth)}


def _encode_pytree(encoder: _Encoder, value: Any, depth: int) -> Node:
    encoder.refuse_hashing(value)
    node = open_pytree(value, encoder.key)
    if node.category == "mapping":
        return _encode_dict(encoder, dict(zip(node.parts, node.children, strict=True)), depth)
    if node.category == "sequence":
        return {"$tuple": encoder.items(node.children, depth)}
    return {"$dataclass": encoder.record(value, node.parts, node.children, depth)}


def _encode_recorded_tuple(encoder: _Encoder, value: RecordedTuple, depth: int) -> Node:
    return {"$namedtuple": [value.type_name, list(value._fields), encoder.items(value, depth)]}


def _encode_recorded_dataclass(encoder: _Encoder, value: RecordedDataclass, depth: int) -> Node:
    return {"$dataclass": [value.type_name, list(value), encoder.items(value.values(), depth)]}


def _encode_enum(encoder: _Encoder, value: enum.Enum, depth: int) -> Node:
    return {"$enum": [class_name(type(value)), value.name, encoder.encode(value.value, depth)]}


def _encode_recorded_enum(encoder: _Encoder, value: RecordedEnum, depth: int) -> Node:
    return {"$enum": [value.type_name, value.name, encoder.encode(value.value, depth)]}


def _encode_object(encoder: _Encoder, value: Any, depth: int) -> Node:
    form = form_of(value)
    assert form is not None  # noqa: S101 - what chose this encoder has found it
    if form.keeps_identity:  # which is all that a generator's hash tells
        encoder.refuse_hashing(value)
    try:
        state = form.state(value)
    except UnsafeObjectError as error:
        raise UnsafeObjectError(f"{encoder.key or 'the state'}: {describe_type(value)}: {error}") from error
    return {"$object": [form.name, encoder.encode(state, depth)]}


def _encode_recorded_object(encoder: _Encoder, value: RecordedObject, depth: int) -> Node:
    form = form_by_name(value.type_name)
    try:
        if form is not None:
            form.check(value.state)
    except (ValueError, TypeError, LookupError, SavestreamError) as error:
        raise UnsafeObjectError(f"{encoder.key or 'the state'}: no {value.type_name} is like this: {error}") from error
    return {"$object": [value.type_name, encoder.encode(value.state, depth)]}


def _encode_scalar(_: _Encoder, value: np.generic, __: int) -> Node:
    return {"$scalar": [dtype_name(value.dtype), _base64(value.tobytes())]}


def _encode_dtype(_: _Encoder, value: np.dtype[Any], __: int) -> Node:
    return {"$dtype": dtype_name(value)}


def _encode_timezone(encoder: _Encoder, zone: datetime.tzinfo | None) -> Node:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise UnsafeObjectError(
            f"{encoder.key}: the time zone {describe_type(zone)} depends on a database that differs between machines; "
            "convert the time to UTC or to a fixed offset (datetime.timezone)"
        )
    arguments = zone.__getinitargs__()  # type: ignore[attr-defined]  # (offset,) or (offset, name)
    offset = arguments[0]
    return [offset.days, offset.seconds, offset.microseconds, arguments[1] if len(arguments) > 1 else None]


def _encode_datetime(encoder: _Encoder, value: datetime.datetime, _: int) -> Node:
    date = [value.year, value.month, value.day]
    return {"$datetime": [*date, *_time_fields(value), _encode_timezone(encoder, value.tzinfo)]}


def _encode_time(encoder: _Encoder, value: datetime.time, _: int) -> Node:
    return {"$time": [*_time_fields(value), _encode_timezone(encoder, value.tzinfo)]}


def _time_fields(value: datetime.datetime | datetime.time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _other_encoder(value: object) -> Callable[[_Encoder, Any, int], Node] | None:
    """The encoder for a class that only its bases or its shape tell."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _encode_enum
    if isinstance(value, np.generic):
        return _encode_scalar if dtype_round_trips(value.dtype, kind) else None
    if isinstance(value, np.dtype):
        return _encode_dtype if dtype_round_trips(value, value.type) else None
    if is_namedtuple_type(kind):
        return _encode_namedtuple if not getattr(value, "__dict__", None) else None
    if is_pytree(value):
        return _encode_pytree
    if is_dataclass_type(kind):
        return _encode_dataclass
    return _encode_object if form_of(value) is not None else None


_SIMPLE: dict[type, Callable[[_Encoder, Any, int], Node]] = {
    type(None): lambda _, value, __: value,
    bool: lambda _, value, __: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda encoder, v, depth: {"$complex": encoder.items((v.real, v.imag), depth)},
    bytes: lambda _, value, __: {"$bytes": _base64(value)},
    bytearray: lambda _, value, __: {"$bytearray": _base64(value)},
    datetime.datetime: _encode_datetime,
    datetime.date: lambda _, value, __: {"$date": [value.year, value.month, value.day]},
    datetime.time: _encode_time,
    datetime.timedelta: lambda _, value, __: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    range: lambda encoder, v, depth: {"$range": encoder.items((v.start, v.stop, v.step), depth)},
    type(...): lambda _, __, ___: {"$ellipsis": None},
    decimal.Decimal: lambda _, value, __: {"$decimal": str(value)},
    fractions.Fraction: lambda encoder, v, depth: {"$fraction": encoder.items((v.numerator, v.denominator), depth)},
    uuid.UUID: lambda _, value, __: {"$uuid": value.hex},
    np.str_: lambda encoder, v, depth: {"$npstr": _encode_str(encoder, str.__str__(v), depth)},  # str(v) strips nulls
    np.bytes_: lambda _, value, __: {"$npbytes": _base64(bytes(value))},
    **dict.fromkeys(
        (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        lambda encoder, v, depth: {"$path": [type(v).__name__, _encode_str(encoder, str(v), depth)]},
    ),
}

SCALAR_TYPES: frozenset[type] = frozenset(_SIMPLE)

_ENCODERS: dict[type, Callable[[_Encoder, Any, int], Node]] = {
    **_SIMPLE,
    list: lambda encoder, value, depth: encoder.items(value, depth),
    tuple: lambda encoder, value, depth: {"$tuple": encoder.items(value, depth)},
    set: lambda encoder, value, depth: {"$set": encoder.hashed(value, depth)},
    frozenset: lambda encoder, value, depth: {"$frozenset": encoder.hashed(value, depth)},
    slice: lambda encoder, v, depth: {"$slice": encoder.items((v.start, v.stop, v.step), depth)},
    dict: _encode_dict,
    collections.OrderedDict: _encode_ordered_dict,
    collections.Counter: lambda encoder, value, depth: {"$counter": encoder.pairs(value, depth)},
    collections.defaultdict: _encode_defaultdict,
    collections.deque: lambda encoder, v, depth: {"$deque": [encoder.items(v, depth), v.maxlen]},
    RecordedTuple: _encode_recorded_tuple,
    RecordedDataclass: _encode_recorded_dataclass,
    RecordedEnum: _encode_recorded_enum,
    RecordedObject: _encode_recorded_object,
}
