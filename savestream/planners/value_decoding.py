"""The way back from :mod:`savestream.planners.values`: never executes, imports or allocates what a file claims."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle  # only behind the explicit opt-in of the caller
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from savestream.arrays import dtype_from_name
from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError
from savestream.planners.framework_values import form_by_name
from savestream.planners.object_forms import ObjectUnavailableError
from savestream.planners.recorded import (
    RecordedDataclass,
    RecordedEnum,
    RecordedObject,
    RecordedTuple,
    index_types,
    rebuild_dataclass,
    rebuild_enum,
    rebuild_namedtuple,
)
from savestream.planners.value_encoding import FACTORIES, MAXIMUM_DEPTH, MAXIMUM_INT_DIGITS, Node

__all__ = ["decode_value", "decode_value_bytes", "unpickle_object"]

_FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, struct.error)


def decode_value(encoded: object, *, types: Sequence[type] = (), allow_pickle: bool = False, key: str = "") -> Any:
    """Decode what :func:`~savestream.planners.values.encode_value` made, from a source that is not trusted.

    Parameters
    ----------
    encoded
        The JSON tree.
    types
        Classes (namedtuples, dataclasses, enums) that may be rebuilt. Others come back as
        :class:`~savestream.planners.recorded.RecordedTuple`, ``RecordedDataclass`` and ``RecordedEnum``.
    allow_pickle
        Unpickle pickled objects. This executes code from the file.
    key
        Names the value in errors.

    Raises
    ------
    CorruptCheckpointError
        The tree has a wrong shape, nests too deeply or claims something absurd.
    UnsafeObjectError
        The value holds a pickle and ``allow_pickle`` is False.
    PlanError
        A class in ``types`` does not fit what was recorded.
    """
    return _Decoder(key, index_types(types), allow_pickle).decode(encoded, 0)


def decode_value_bytes(data: bytes, *, types: Sequence[type] = (), allow_pickle: bool = False, key: str = "") -> Any:
    """:func:`decode_value` of UTF-8 JSON text."""
    try:
        encoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{key or 'a value'}: not JSON: {error}") from error
    return decode_value(encoded, types=types, allow_pickle=allow_pickle, key=key)


def unpickle_object(data: bytes, *, allow_pickle: bool, key: str) -> Any:
    """Unpickle a stored object, or refuse it by key where the caller has not opted in."""
    if not allow_pickle:
        raise UnsafeObjectError(
            f"{key or 'a value'}: stored with pickle, and unpickling executes code from the file; if you trust it, "
            "load with allow_pickle=True"
        )
    try:
        return pickle.load(io.BytesIO(data))  # noqa: S301 - the caller opted in
    except Exception as error:
        raise CorruptCheckpointError(f"{key}: the stored pickle cannot be loaded: {error}") from error


class _Decoder:
    __slots__ = ("allow_pickle", "key", "types")

    def __init__(self, key: str, types: dict[str, type], allow_pickle: bool) -> None:
        self.key = key
        self.types = types
        self.allow_pickle = allow_pickle

    def decode(self, node: Node, depth: int) -> Any:
        kind = type(node)
        if kind is str or kind is int or kind is float or kind is bool or node is None:
            return node
        if depth >= MAXIMUM_DEPTH:
            # A cycle cannot be in JSON, but the caller's tree need not come from there.
            self.corrupt(f"nested more than {MAXIMUM_DEPTH} levels deep")
        if kind is list:
            return [self.decode(item, depth + 1) for item in node]
        if kind is not dict:
            self.corrupt(f"{kind.__name__} is no JSON")
        if any(type(name) is not str or name.startswith("$") for name in node):
            return self._tagged(node, depth + 1)
        return {name: self.decode(item, depth + 1) for name, item in node.items()}

    def corrupt(self, why: str) -> NoReturn:
        raise CorruptCheckpointError(f"{self.key or 'a value'}: damaged value: {why}")

    def _tagged(self, node: dict[str, Node], depth: int) -> Any:
        (tag,) = node if len(node) == 1 else ("",)
        decoder = _DECODERS.get(tag)
        if decoder is None:
            self.corrupt(f"unknown or mixed tags {str(list(node))[:100]}")
        try:
            return decoder(self, node[tag], depth)
        except CorruptCheckpointError as error:
            if self.key in error.message:
                raise
            raise CorruptCheckpointError(f"{self.key}: {error}") from error
        except SavestreamError:
            raise
        except _FAULTS as error:
            raise CorruptCheckpointError(f"{self.key or 'a value'}: damaged {tag}: {error}") from error

    def items(self, nodes: Node, depth: int) -> list[Any]:
        return [self.decode(item, depth) for item in _typed(nodes, list)]

    def pairs(self, nodes: Node, depth: int) -> list[tuple[Any, Any]]:
        pairs = []
        for key, value in _typed(nodes, list):
            pairs.append((self.decode(key, depth), self.decode(value, depth)))
        if len({key for key, _ in pairs}) != len(pairs):
            self.corrupt("two equal keys")
        return pairs


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} is due")
    return value


def _bytes(node: Node) -> bytes:
    return base64.b64decode(_typed(node, str), validate=True)


def _decode_int(_: _Decoder, node: Node, __: int) -> int:
    text = _typed(node, str)
    if len(text) > MAXIMUM_INT_DIGITS + 3 or not text.lstrip("-").startswith("0x") or "_" in text:
        raise ValueError("not a hexadecimal integer of bounded length")
    return int(text, 16)


def _decode_float(_: _Decoder, node: Node, __: int) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(_typed(node, str)))[0]
    return value


def _decode_complex(decoder: _Decoder, node: Node, depth: int) -> complex:
    real, imaginary = decoder.items(node, depth)
    return complex(_typed(real, float), _typed(imaginary, float))


def _decode_str(_: _Decoder, node: Node, __: int) -> str:
    return _bytes(node).decode("utf-8", "surrogatepass")


def _unique(decoder: _Decoder, node: Node, depth: int) -> frozenset[Any]:
    items = decoder.items(node, depth)
    found = frozenset(items)
    if len(found) != len(items):
        decoder.corrupt("a set with two equal members")
    return found


def _decode_defaultdict(decoder: _Decoder, node: Node, depth: int) -> collections.defaultdict[Any, Any]:
    name, pairs = _typed(node, list)
    factory = None if name is None else FACTORIES[_typed(name, str)]
    return collections.defaultdict(factory, decoder.pairs(pairs, depth))


def _decode_counter(decoder: _Decoder, node: Node, depth: int) -> collections.Counter[Any]:
    found: collections.Counter[Any] = collections.Counter()
    for key, value in decoder.pairs(node, depth):
        found[key] = value
    return found


def _decode_deque(decoder: _Decoder, node: Node, depth: int) -> collections.deque[Any]:
    items, maximum = _typed(node, list)
    if maximum is not None and _typed(maximum, int) < len(items):
        raise ValueError("a deque longer than its maxlen")
    return collections.deque(decoder.items(items, depth), maximum)


def _record(decoder: _Decoder, node: Node, depth: int) -> tuple[str, list[str], list[Any]]:
    name, fields, values = _typed(node, list)
    for field in _typed(fields, list):
        _typed(field, str)
    if len(set(fields)) != len(fields) or len(fields) != len(_typed(values, list)):
        raise ValueError("fields and values do not pair up")
    return _typed(name, str), fields, decoder.items(values, depth)


def _decode_namedtuple(decoder: _Decoder, node: Node, depth: int) -> Any:
    name, fields, values = _record(decoder, node, depth)
    kind = decoder.types.get(name)
    return RecordedTuple(name, fields, values) if kind is None else rebuild_namedtuple(kind, fields, values)


def _decode_dataclass(decoder: _Decoder, node: Node, depth: int) -> Any:
    name, fields, values = _record(decoder, node, depth)
    kind = decoder.types.get(name)
    if kind is None:
        return RecordedDataclass(name, zip(fields, values, strict=True))
    return rebuild_dataclass(kind, fields, values)


def _decode_enum(decoder: _Decoder, node: Node, depth: int) -> Any:
    name, member, value = _typed(node, list)
    if member is not None:
        _typed(member, str)
    kind, value = decoder.types.get(_typed(name, str)), decoder.decode(value, depth)
    return RecordedEnum(name, member, value) if kind is None else rebuild_enum(kind, member, value)


def _decode_object(decoder: _Decoder, node: Node, depth: int) -> Any:
    name, encoded = _typed(node, list)
    form, state = form_by_name(_typed(name, str)), decoder.decode(encoded, depth)
    if form is None:
        return RecordedObject(name, state)
    form.check(state)
    try:
        return form.make(state)
    except ObjectUnavailableError:
        return RecordedObject(name, state)


def _decode_state_dict(decoder: _Decoder, node: Node, depth: int) -> Any:
    pairs, metadata = _typed(node, list)
    found: Any = collections.OrderedDict(decoder.pairs(pairs, depth))
    found._metadata = decoder.decode(metadata, depth)
    return found


def _decode_scalar(_: _Decoder, node: Node, __: int) -> Any:
    name, data = _typed(node, list)
    dtype, content = dtype_from_name(_typed(name, str)), _bytes(data)
    if dtype.itemsize != len(content):
        raise ValueError("as many bytes as the dtype has are due")
    return np.ndarray((), dtype, content)[()] if content else np.zeros((), dtype)[()]


def _decode_timezone(node: Node) -> datetime.tzinfo | None:
    if node is None:
        return None
    days, seconds, microseconds, name = _typed(node, list)
    offset = datetime.timedelta(_typed(days, int), _typed(seconds, int), _typed(microseconds, int))
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, _typed(name, str))


def _decode_datetime(_: _Decoder, node: Node, __: int) -> datetime.datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = _typed(node, list)
    return datetime.datetime(
        year, month, day, hour, minute, second, microsecond, tzinfo=_decode_timezone(zone), fold=fold
    )


def _decode_time(_: _Decoder, node: Node, __: int) -> datetime.time:
    hour, minute, second, microsecond, fold, zone = _typed(node, list)
    return datetime.time(hour, minute, second, microsecond, tzinfo=_decode_timezone(zone), fold=fold)


def _decode_date(_: _Decoder, node: Node, __: int) -> datetime.date:
    year, month, day = _typed(node, list)
    return datetime.date(year, month, day)


def _decode_timedelta(_: _Decoder, node: Node, __: int) -> datetime.timedelta:
    days, seconds, microseconds = (_typed(item, int) for item in _typed(node, list))
    return datetime.timedelta(days, seconds, microseconds)


def _decode_range(decoder: _Decoder, node: Node, depth: int) -> range:
    start, stop, step = (_typed(item, int) for item in decoder.items(node, depth))
    return range(start, stop, step)


def _decode_slice(decoder: _Decoder, node: Node, depth: int) -> slice:
    start, stop, step = decoder.items(node, depth)
    return slice(start, stop, step)


def _decode_ellipsis(_: _Decoder, node: Node, __: int) -> Any:
    if node is not None:
        raise TypeError("an ellipsis holds nothing")
    return ...


def _decode_path(decoder: _Decoder, node: Node, depth: int) -> pathlib.PurePath:
    name, text = _typed(node, list)
    pure = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}
    kinds = {**pure, **{kind.__name__: kind for kind in pure.values()}}
    native = type(pathlib.Path())  # only paths of this system can be concrete
    kind = native if name == native.__name__ else kinds[_typed(name, str)]
    return kind(_typed(decoder.decode(text, depth), str))


def _decode_decimal(_: _Decoder, node: Node, __: int) -> decimal.Decimal:
    return decimal.Decimal(_typed(node, str))


def _decode_fraction(decoder: _Decoder, node: Node, depth: int) -> fractions.Fraction:
    numerator, denominator = (_typed(item, int) for item in decoder.items(node, depth))
    return fractions.Fraction(numerator, denominator)


_DECODERS: dict[str, Callable[[_Decoder, Node, int], Any]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$str": _decode_str,
    "$bytes": lambda _, node, __: _bytes(node),
    "$bytearray": lambda _, node, __: bytearray(_bytes(node)),
    "$tuple": lambda decoder, node, depth: tuple(decoder.items(node, depth)),
    "$set": lambda decoder, node, depth: set(_unique(decoder, node, depth)),
    "$frozenset": _unique,
    "$dict": lambda decoder, node, depth: dict(decoder.pairs(node, depth)),
    "$odict": lambda decoder, node, depth: collections.OrderedDict(decoder.pairs(node, depth)),
    "$state_dict": _decode_state_dict,
    "$counter": _decode_counter,
    "$defaultdict": _decode_defaultdict,
    "$deque": _decode_deque,
    "$namedtuple": _decode_namedtuple,
    "$dataclass": _decode_dataclass,
    "$enum": _decode_enum,
    "$object": _decode_object,
    "$scalar": _decode_scalar,
    "$npstr": lambda decoder, node, depth: np.str_(_typed(decoder.decode(node, depth), str)),
    "$npbytes": lambda _, node, __: np.bytes_(_bytes(node)),
    "$dtype": lambda _, node, __: dtype_from_name(_typed(node, str)),
    "$datetime": _decode_datetime,
    "$date": _decode_date,
    "$time": _decode_time,
    "$timedelta": _decode_timedelta,
    "$range": _decode_range,
    "$slice": _decode_slice,
    "$ellipsis": _decode_ellipsis,
    "$path": _decode_path,
    "$decimal": _decode_decimal,
    "$fraction": _decode_fraction,
    "$uuid": lambda _, node, __: uuid.UUID(hex=_typed(node, str)),
    "$pickle": lambda decoder, node, _: unpickle_object(
        _bytes(node), allow_pickle=decoder.allow_pickle, key=decoder.key
    ),
}
