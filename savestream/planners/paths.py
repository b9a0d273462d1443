"""Typed paths into a state, their text, and selection by them.

A path is a tuple of parts: a str dict key or field name as it is, :class:`Index` for a position in a sequence, any
other dict key as it is. Its text, the *fqn*, is injective: str parts joined by ``.``, their own ``.``, ``\\`` and ``[``
escaped by a backslash; everything else in brackets: ``[3]``, ``[int:3]``, ``[bool:true]``, ``[float:0.5]``, ``[none]``,
``[bytes:6162]``, ``[str:]`` for the empty str, and ``[value:<JSON>]`` for other keys. ``]`` and ``\\`` in brackets are
escaped by a backslash. The path () has the text "".
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.planners.value_decoding import decode_value_bytes
from savestream.planners.value_encoding import encode_value_bytes
from savestream.planners.value_refusals import describe_type

__all__ = [
    "Index",
    "Path",
    "Selection",
    "SelectionKey",
    "parse_fqn",
    "part_suffix",
    "part_text",
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
        fqn += part_suffix(part, first=not fqn, beneath=fqn)
    return fqn


def part_suffix(part: object, *, first: bool, beneath: str = "") -> str:
    """What one part adds to the text of the path before it, ``beneath``, which names in errors where it stands."""
    text = part_text(part, beneath)
    return text if first or not (type(part) is str and part) else "." + text


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\u{ord(character):04x}" if character >= "\ud800" else "\\" + character


def _key_part(part: object, beneath: str) -> str:
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
    # Not its repr, which may be as long as a tensor's.
    text = encode_value_bytes(part, f"{beneath or 'the state'}: a dict key of class {describe_type(part)}").decode()
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


def part_text(part: object, beneath: str = "") -> str:
    """One part as text that compares and hashes without mixing up 1, 1.0 and True."""
    if type(part) is str and part:
        if part.isascii():  # replacing three characters is several times faster than the pattern
            return part.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")
        return _SPECIAL.sub(_escape, part) if _SPECIAL.search(part) else part
    return _key_part(part, beneath)


# --- selection ---

SelectionKey: TypeAlias = str | Sequence[object]


class Selection:
    """Leaves at or beneath some keys.

    Parameters
    ----------
    keys
        Fqns, or tuples of raw parts in which an int stands for a position or an int key. Whole parts are compared:
        ``params`` selects ``params.w`` and not ``params2``. A str that is no fqn is a top-level key as it stands.
    """

    def __init__(self, keys: Iterable[SelectionKey]) -> None:
        if isinstance(keys, str):
            keys = [keys]
        self._alternatives = [_key_paths(key) for key in keys]
        self._wanted: dict[tuple[str, ...], list[int]] = {}  # several keys may name the same place
        for number, paths in enumerate(self._alternatives):
            for path in paths:
                self._wanted.setdefault(_texts(path), []).append(number)
        self._longest = max(map(len, self._wanted), default=0)
        self._found: set[int] = set()

    def matches(self, path: Path) -> bool:
        """Whether ``path`` is one of the keys or lies beneath one; remembers which keys have matched."""
        texts = _texts(path[: self._longest])
        hits = [numbers for length in range(len(texts) + 1) if (numbers := self._wanted.get(texts[:length]))]
        self._found.update(*hits)
        return bool(hits)

    def inside(self, path: Path) -> list[Path]:
        """What the keys that lead into the value at ``path`` name there, as paths from it on."""
        texts = _texts(path)
        return [
            option[len(path) :]
            for options in self._alternatives
            for option in options
            if len(option) > len(path) and _texts(option)[: len(path)] == texts
        ]

    def mark(self, path: Path) -> None:
        """Remember that the key ``path`` has matched."""
        self._found.update(self._wanted[_texts(path)])

    def unmatched(self) -> list[str]:
        """Fqns of the keys that have matched nothing."""
        return [path_to_fqn(paths[-1]) for number, paths in enumerate(self._alternatives) if number not in self._found]


def select_names(
    names: Iterable[str] | Mapping[str, Path], keys: Iterable[SelectionKey]
) -> tuple[list[str], list[str]]:
    """Select leaves by key.

    Parameters
    ----------
    names
        Fqns, or a mapping from fqn to typed path (which saves parsing).
    keys
        As for :class:`Selection`.

    Returns
    -------
    selected, unmatched
        The selected names in order, and the fqns of keys that matched nothing.
    """
    mappings = names if isinstance(names, Mapping) else {name: parse_fqn(name) for name in names}
    selection = Selection(keys)
    return [name for name, path in mappings.items() if selection.matches(path)], selection.unmatched()


def _texts(path: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(part_text, path))


def _key_paths(key: SelectionKey) -> list[Path]:
    if isinstance(key, str):
        try:
            return [parse_fqn(key)]
        except PlanError:
            return [(key,)]
    return list(
        itertools.product(*[(Index(part), part) if type(part) is int and part >= 0 else (part,) for part in key])
    )
