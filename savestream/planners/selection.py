"""Selecting leaves by key: a key stands for the leaf of that name and for everything beneath it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from savestream.errors import PlanError
from savestream.planners.paths import Index, Path, parse_fqn, part_text, path_to_fqn

__all__ = ["Selection", "SelectionKey", "select_names"]

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
        self._wanted = {_texts(path): number for number, paths in enumerate(self._alternatives) for path in paths}
        self._longest = max(map(len, self._wanted), default=0)
        self._found: set[int] = set()

    def matches(self, path: Path) -> bool:
        """Whether ``path`` is one of the keys or lies beneath one; remembers which keys have matched."""
        texts = _texts(path[: self._longest])
        hits = [number for length in range(len(texts) + 1) if (number := self._wanted.get(texts[:length])) is not None]
        self._found.update(hits)
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
        self._found.add(self._wanted[_texts(path)])

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
