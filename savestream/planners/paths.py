"""Typed paths into a state, and their text.

A path is a tuple of parts: a str dict key or field name as it is, :class:`Index` for a position in a sequence, any
other dict key as it is. Its text, the *fqn*, is injective: str parts joined by ``.`` with ``.``, ``\\`` and ``[`` escaped
by a backslash; everything else in brackets: ``[3]``, ``[int:3]``, ``[bool:true]``, ``[float:0.5]``, ``[none]``,
``[bytes:6162]``, ``[str:]`` for the empty str, and ``[value:<JSON>]`` for other keys. ``]`` and ``\\`` in brackets are
escaped by a backslash. The path () has the text "".
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.planners.value_decoding import decode_value_bytes
from savestream.planners.value_encoding import encode_value_bytes

__all__ = [
    "Index",
    "Path",
    "key_part",
    "key_texts",
    "match_keys",
    "parse_fqn",
    "part_suffix",
    "path_texts",
    "path_to_fqn",
    "select_names",
]


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
    if type(part) is str and part:
        text = _SPECIAL.sub(_escape, part) if _SPECIAL.search(part) else part
        return text if first else "." + text
    return key_part(part)


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


def match_keys(paths: Iterable[Path], keys: Iterable[str | Sequence[object]]) -> tuple[list[bool], list[str]]:
    """Which of ``paths`` lie at or beneath one of ``keys``, and the fqn of each key that matched none.

    A key is an fqn, or a tuple of raw parts in which an int also stands for a position. Whole parts are compared:
    ``params`` matches ``params.w`` and not ``params2``.
    """
    alternatives = [key_texts(key) for key in keys]
    wanted = {texts for group in alternatives for texts in group}
    longest = max(map(len, wanted), default=0)
    found: set[tuple[str, ...]] = set()
    flags = []
    for path in paths:
        texts = path_texts(path[:longest])
        hits = [texts[:length] for length in range(len(texts) + 1) if texts[:length] in wanted]
        found.update(hits)
        flags.append(bool(hits))
    return flags, ["".join(group[0]) for group in alternatives if found.isdisjoint(group)]


def path_texts(path: Sequence[object]) -> tuple[str, ...]:
    """A path as texts of its parts, which compare and hash without mixing up 1, 1.0 and True."""
    return tuple([part_suffix(part, first=not position) for position, part in enumerate(path)])


def key_texts(key: str | Sequence[object]) -> list[tuple[str, ...]]:
    """The texts of a selection key; several where an int may be a position or a dict key."""
    if isinstance(key, str):
        try:
            return [path_texts(parse_fqn(key))]
        except PlanError:
            return [path_texts((key,))]  # a top-level key as it stands in the dict
    options = [(Index(part), part) if type(part) is int and part >= 0 else (part,) for part in key]
    return [path_texts(path) for path in itertools.product(*options)]


def select_names(
    names: Iterable[str] | dict[str, Path], keys: Iterable[str | Sequence[object]]
) -> tuple[list[str], list[str]]:
    """Select leaves by key.

    Parameters
    ----------
    names
        Fqns, or a mapping from fqn to typed path (which saves parsing).
    keys
        Fqns or tuples of raw parts; each selects the leaf of that name and all beneath it.

    Returns
    -------
    selected, unmatched
        The selected names in order, and the fqns of keys that matched nothing.
    """
    mappings = names if isinstance(names, dict) else {name: parse_fqn(name) for name in names}
    flags, unmatched = match_keys(mappings.values(), keys)
    return [name for name, selected in zip(mappings, flags, strict=True) if selected], unmatched
