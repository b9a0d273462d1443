"""JSON without surprises: duplicate keys, NaN, endless numbers and deep nesting are refused, not resolved.

Output is compact and pure ASCII, so lone surrogates in keys survive. The nesting is measured by a linear scan before
a parser sees the text: no input reaches the interpreter's stack limit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from savestream.pipeline.limits import MAXIMUM_INTEGER_DIGITS, MAXIMUM_JSON_NESTING, FormatViolation

__all__ = [
    "JsonValue",
    "checked_json",
    "json_list_text",
    "json_text",
    "member",
    "nesting_depth",
    "parse_json",
    "require",
]

JsonValue: TypeAlias = Any  # None, bool, int, float, str, list or dict of these: checked where it is used

T = TypeVar("T")

_SCAN_BYTES = 1 << 20
_NOT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")


def require(condition: object, problem: str) -> None:
    """Raise :class:`FormatViolation` with ``problem`` unless ``condition`` holds."""
    if not condition:
        raise FormatViolation(problem)


def member(members: JsonValue, name: str, kind: type[T]) -> T:
    """The member ``name`` of a parsed object, which must be there and of exactly this type."""
    if type(members) is not dict or name not in members:
        raise FormatViolation(f"{name} is missing")
    value = members[name]
    if type(value) is not kind:
        raise FormatViolation(f"{name} is of type {type(value).__name__} where {kind.__name__} is expected")
    return value


# --- writing ----------------------------------------------------------------------------------------------


def json_text(value: JsonValue) -> str:
    """Compact ASCII JSON of ``value``; what JSON cannot hold is a :class:`FormatViolation`."""
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatViolation(f"JSON cannot hold it: {error}") from error


def checked_json(value: JsonValue) -> str:
    """Like :func:`json_text`, but only for what comes back equal: no tuples, no keys other than strings."""
    text = json_text(value)
    require(parse_json(text.encode()) == value, "JSON would not give it back: use lists, and strings as keys")
    return text


def json_list_text(values: Sequence[object]) -> str:
    """:func:`checked_json` of a list in which :class:`msgspec.Raw` stands for JSON that is encoded already."""
    if not any(isinstance(value, msgspec.Raw) for value in values):
        return checked_json(list(values))
    encoded = [bytes(value) if isinstance(value, msgspec.Raw) else checked_json(value).encode() for value in values]
    parsed = parse_json(b"[" + b",".join(encoded) + b"]")
    require(len(parsed) == len(values), "an encoded value is not one JSON value")
    return json_text(parsed)  # in one form, whoever encoded it


# --- reading ----------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> JsonValue:
    """Parse UTF-8 JSON text.

    Raises
    ------
    FormatViolation
        It is no JSON, nests deeper than :data:`MAXIMUM_JSON_NESTING`, repeats a key in an object, or holds a number
        that is not finite or has more than :data:`MAXIMUM_INTEGER_DIGITS` digits.
    """
    depth = nesting_depth(data)
    require(depth <= MAXIMUM_JSON_NESTING, f"JSON nests {depth} deep, more than {MAXIMUM_JSON_NESTING}")
    try:
        return _decoder().decode(data.decode())
    except FormatViolation:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatViolation(f"not JSON: {error}") from error


def nesting_depth(data: bytes) -> int:
    """How deep arrays and objects nest, in one linear pass with bounded memory.

    Exact for JSON. In any other text it is exact up to the place where a parser would stop.
    """
    depth = deepest = start = 0
    inside_string = False
    while start < len(data):
        stop = _scan_stop(data, start)
        window = data[start:stop]
        if b"\\" in window:
            window = window.replace(b"\\\\", b"").replace(b'\\"', b"")
        segments = window.split(b'"')
        brackets = b"".join(segments[inside_string::2]).translate(None, _NOT_BRACKETS)
        inside_string ^= len(segments) % 2 == 0
        if brackets:
            codes = np.frombuffer(brackets, np.uint8)
            levels = np.cumsum(np.where((codes == ord("[")) | (codes == ord("{")), 1, -1))
            deepest = max(deepest, depth + int(levels.max()))
            depth += int(levels[-1])
        start = stop
    return deepest


def _scan_stop(data: bytes, start: int) -> int:
    """End of the window that begins at ``start``: never inside a run of backslashes and what they escape."""
    stop = min(start + _SCAN_BYTES, len(data))
    while data[stop - 1 : stop] == b"\\" and stop < len(data):
        stop += 1
    return stop


def _decoder() -> json.JSONDecoder:
    # A hook for every integer costs as much as parsing it, so only where Python's own limit has been lifted.
    bounded = 0 < sys.get_int_max_str_digits() <= MAXIMUM_INTEGER_DIGITS
    return json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_int=None if bounded else _integer,
        parse_float=_finite,
        parse_constant=_refuse_constant,
    )


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise FormatViolation(f"an object has the key {repeated[:100]!r} more than once")
    return members


def _integer(text: str) -> int:
    if len(text) > MAXIMUM_INTEGER_DIGITS:
        raise FormatViolation(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise FormatViolation(f"the number {text[:40]} is too large")
    return number


def _refuse_constant(text: str) -> JsonValue:
    raise FormatViolation(f"{text} is not JSON")
