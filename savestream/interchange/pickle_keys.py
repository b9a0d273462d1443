"""Keys of dicts and members of sets in foreign pickles: only those that cannot make hashing slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import InertObject, UnreadObject, show
from savestream.interchange.read_limits import STEPS_BETWEEN_CHECKS, ReadLimits

__all__ = ["PLAIN_KEYS", "KeyChecker", "refuse_many_predictable"]

PLAIN_KEYS: frozenset[type] = frozenset({str, int, float, bool, complex, bytes, type(None)})
_MAXIMUM_PARTS = 1000
# So many keys of one hash are told apart within seconds.
_MAXIMUM_PREDICTABLE = 10_000
# Integers have their own value as their hash up to here, and from here on it repeats.
_HASH_MODULUS = (1 << 61) - 1


class KeyChecker:
    """Lets through the keys of one pickle.

    Texts and bytes are hashed with a secret, and small numbers by their value. Of everything else many can be chosen to
    have the same hash, so that each is compared with all others: it is let through in limited number.

    Parameters
    ----------
    text_only
        Let through texts, and objects of the table, which are themselves.
    """

    def __init__(self, limits: ReadLimits, *, text_only: bool) -> None:
        self._check_stop = limits.check_stop
        self._text_only = text_only
        self._steps = 0
        self._predictable = 0

    def __call__(self, key: object) -> object:
        """The key again."""
        self._steps += 1
        if not self._steps % STEPS_BETWEEN_CHECKS:
            self._check_stop()
        kind = type(key)
        if kind is str or kind is InertObject:
            return key
        if isinstance(key, UnreadObject):
            raise UnsafeObjectError(f"a key is {show(key)}, which is not among what is read without running code")
        if self._text_only:
            raise TypeError(f"a key is a {kind.__name__}, no text")
        if kind in (tuple, frozenset):
            _check_parts(key)
        elif kind not in PLAIN_KEYS:
            raise TypeError(f"a key is a {kind.__name__}")
        if _is_predictable(key):
            self._check_stop()
            self._predictable += 1
            _check_number(self._predictable)
        return key


def refuse_many_predictable(members: Iterable[object]) -> None:
    """The same limit for a set that is made at once."""
    _check_number(sum(map(_is_predictable, members)))


def _check_number(count: int) -> None:
    if count > _MAXIMUM_PREDICTABLE:
        raise CorruptCheckpointError(
            f"it has more than {_MAXIMUM_PREDICTABLE} keys that are tuples, frozensets, complex or very large numbers"
        )


def _is_predictable(key: Any) -> bool:
    kind = type(key)
    if kind is int:
        return not -_HASH_MODULUS < key < _HASH_MODULUS
    return kind in (tuple, frozenset, complex)


def _check_parts(key: object) -> None:
    pending, seen = [key], 0
    while pending:
        part: Any = pending.pop()
        seen += 1
        if type(part) is tuple:
            pending.extend(part)
        elif type(part) not in PLAIN_KEYS and type(part) is not frozenset:
            raise TypeError(f"a key holds a {type(part).__name__}")
        if seen + len(pending) > _MAXIMUM_PARTS:
            raise ValueError("a key has too many parts")
