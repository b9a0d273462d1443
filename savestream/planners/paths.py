"""Typed paths into a state, and their text.

A path is a tuple of parts: a str dict key or field name as it is, :class:`Index` for a position in a sequence, any
other dict key as it is. Its text, the *fqn*, is injective: str parts joined by ``.``, their own ``.``, ``\\`` and ``[``
escaped by a backslash; everything else in brackets: ``[3]``, ``[int:3]``, ``[bool:true]``, ``[float:0.5]``, ``[none]``,
``[bytes:6162]``, ``[str:]`` for the empty str, and ``[value:<JSON>]`` for other keys. ``]`` and ``\\`` in brackets are
escaped by a backslash. The path () has the text "".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.planners.value_decoding import decode_value_bytes
from savestream.planners.value_encoding import encode_value_bytes

__all__ = ["Index", "Path", "key_part", "parse_fqn", "part_suffix", "part_text", "path_to_fqn"]


class Index(msgspec.Struct, frozen=True, gc=False, order=True):
    """A position in a list, tuple or deque; never equal to an int dict key."""

    position: int

    def __repr__(self) -> str:
        return f"Index({self.position})"


Path: TypeAlias = tuple[object, ...]

_SPECIAL = re.compile(r"[.\\\[\ud800-\udfff]")
_ESCAPED = re.compile(r"[\]\\]")
_TOKEN = re.compile(
    r"(?P<dot>\.)?(?:(?P<bracket>\[(?:[^\]\\]|\\.)*\])|(?P<text>(?:[^.\\\[]|\\u[0-9a-f]{4}|\\[.\\\[])+))", re.DOTALL
)
_TEXT_ESCAPE = re.compile(r"\\(?:u([0-9a-f]{4})|(.))")


def path_to_fqn(path: Sequence[object]) -> str:
    """The text of a typed path; different paths have different texts."""
    fqn = ""
    for part in path:
        fqn += part_suffix(part, first=not fqn)
    return fqn


def part_suffix(part: object, *, first: bool) -> str:
    """What one part adds to the text of the path before it."""
    text = part_text(part)
    return text if first or not (type(part) is str and part) else "." + text


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\u{ord(character):04x}" if character >= "\ud800" else "\\" + character


def key_part(part: object) -> str:
    """The bracketed text of a part that is no str (or an empty one)."""
    kind = type(part)
    if isinstance(part, Index):
        return f"[{part.position}]"
    if part is None:
        return "[none]"
    if kind is str:
        return f"[str:{_ESCAPED.sub(_backslash, str(part))}]"
    if kind is bool:
        return "[bool:true]" if part else "[bool:false]"
    if isinstance(part, int) and kind is int:
        return f"[int:{part if -(1 << 64) < part < 1 << 64 else hex(part)}]"
    if isinstance(part, float) and kind is float and not math.isnan(part):
        return f"[float:{part!r}]"
    if isinstance(part, bytes) and kind is bytes:
        return f"[bytes:{part.hex()}]"
    text = encode_value_bytes(part, f"the dict key {part!r}").decode()
    return f"[value:{_ESCAPED.sub(_backslash, text)}]"


def _backslash(match: re.Match[str]) -> str:
    return "\\" + match[0]


def parse_fqn(text: str) -> Path:
    """The typed path behind an fqn.

    Raises
    ------
    PlanError
        ``text`` is not the text of any path.
    """
    path: list[object] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or bool(match["dot"]) != bool(match["text"] and position):
            raise _not_an_fqn(text)
        bracket = match["bracket"]
        path.append(_parse_bracket(bracket[1:-1], text) if bracket else _TEXT_ESCAPE.sub(_unescape, match["text"]))
        position = match.end()
    try:
        canonical = path_to_fqn(path) == text
    except PlanError:
        canonical = False
    if not canonical:
        raise _not_an_fqn(text)
    return tuple(path)


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else match[2]


def _not_an_fqn(text: str) -> PlanError:
    return PlanError(
        f"{text[:200]!r} is not the name of a leaf; escape '.', '\\' and '[' in str keys with a backslash, and write "
        "other keys like [3], [int:3] or [none]; a tuple of raw keys needs no escaping"
    )


def _parse_bracket(content: str, text: str) -> object:
    content = re.sub(r"\\(.)", r"\1", content, flags=re.DOTALL)
    kind, _, value = content.partition(":")
    try:
        if content.isdecimal():
            return Index(int(content))
        if content == "none":
            return None
        return _KEY_PARSERS[kind](value)
    except (ValueError, KeyError, CorruptCheckpointError) as error:
        raise _not_an_fqn(text) from error


_KEY_PARSERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "bool": lambda value: {"true": True, "false": False}[value],
    "int": lambda value: int(value, 0),
    "float": float,
    "bytes": bytes.fromhex,
    "value": lambda value: decode_value_bytes(value.encode()),
}


def part_text(part: object) -> str:
    """One part as text that compares and hashes without mixing up 1, 1.0 and True."""
    if type(part) is str and part:
        return _SPECIAL.sub(_escape, part) if _SPECIAL.search(part) else part
    return key_part(part)
