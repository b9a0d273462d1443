"""A pickle's objects as values of a state: what is there several times is converted once, and counted each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import UnreadObject, show
from savestream.interchange.numpy_pickles import PickledArray
from savestream.interchange.read_limits import STEPS_BETWEEN_CHECKS, ReadLimits
from savestream.interchange.torch_pickles import StoredTensor, TorchDtype
from savestream.planners import RecordedObject

__all__ = ["ValueConverter"]

_MAXIMUM_DEPTH = 128
_MAXIMUM_CONTAINERS = 1_000_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, np.generic)
# A leaf that is in the pickle once, and what a further one takes that is only referred to.
_LEAF_BYTES = 16
_REPEATED_LEAF_BYTES = 256


class _Converted(NamedTuple):
    """A value, and what it becomes in a checkpoint: how many leaves, and how many bytes with all their names."""

    value: Any
    leaves: int = 1
    nbytes: int = _LEAF_BYTES

    def again(self) -> _Converted:
        return self._replace(nbytes=self.nbytes + self.leaves * _REPEATED_LEAF_BYTES)


class ValueConverter:
    """Converts what one archive's pickle made.

    Parameters
    ----------
    array
        Makes the array of a tensor; its second argument names its place.
    limits
        What the values may take.
    with_unread
        Whether what cannot be read stays in its place as an :class:`UnreadObject`, instead of being refused.
    """

    def __init__(
        self, array: Callable[[StoredTensor, str], object], limits: ReadLimits, *, with_unread: bool = False
    ) -> None:
        self._array = array
        self._limits = limits
        self._with_unread = with_unread
        self._known: dict[int, _Converted] = {}
        self._steps = 0

    def convert(self, value: object, name: str) -> object:
        """The value of a state; what is no plain value is refused."""
        found = self._convert(value, _Place(None, name), 0)
        self._limits.charge(found.nbytes)
        return found.value

    def _convert(self, value: Any, place: _Place, depth: int) -> _Converted:
        self._steps += 1
        if not self._steps % STEPS_BETWEEN_CHECKS:
            self._limits.check_stop()
        kind = type(value)
        if kind is StoredTensor:
            return _Converted(self._array(value, place.name()))
        if kind is PickledArray:
            return _Converted(value.array, 1, _LEAF_BYTES + _text_bytes(value.array))
        if kind is TorchDtype:
            return _Converted(RecordedObject("torch.dtype", value.name))
        if kind is RecordedObject:
            return _Converted(value)
        if isinstance(value, _PLAIN):
            return _Converted(value, 1, _LEAF_BYTES + _plain_bytes(value))
        if kind in (list, tuple, dict, OrderedDict, set, frozenset):
            known = self._known.get(id(value))
            if known is None:
                known = self._known[id(value)] = self._convert_container(kind, value, place, depth)
                return known
            return known.again()
        if self._with_unread:
            return _Converted(value if kind is UnreadObject else UnreadObject(show(value)))
        raise UnsafeObjectError(f"it holds {show(value)}, which is no plain value")

    def _convert_container(self, kind: type, value: Any, place: _Place, depth: int) -> _Converted:
        if depth > _MAXIMUM_DEPTH or len(self._known) > _MAXIMUM_CONTAINERS:
            raise CorruptCheckpointError("its values nest too deeply, contain themselves, or are too many")
        if kind in (set, frozenset):
            return _Converted(value, 1, sum(map(_key_bytes, value)))
        if kind in (list, tuple):
            items = [self._convert(item, _Place(place, part), depth + 1) for part, item in enumerate(value)]
            values = [item.value for item in items]
            return _Converted(values if kind is list else tuple(values), *_total(items, [0] * len(items)))
        items = [self._convert(item, _Place(place, key), depth + 1) for key, item in value.items()]
        leaves, nbytes = _total(items, map(_key_bytes, value))
        found = kind(zip(value, [item.value for item in items], strict=True))
        if kind is OrderedDict and hasattr(value, "_metadata"):  # what a module's state_dict() says of its own format
            metadata = self._convert(value._metadata, _Place(place, "_metadata"), depth + 1)
            found._metadata = metadata.value
            return _Converted(found, leaves + metadata.leaves, nbytes + metadata.nbytes)
        return _Converted(found, leaves, nbytes)


def _total(items: list[_Converted], key_bytes: Any) -> tuple[int, int]:
    """Leaves and bytes of a container; each leaf's name repeats the keys that lead to it."""
    leaves, nbytes = 1, _LEAF_BYTES
    for item, name_bytes in zip(items, key_bytes, strict=True):
        leaves += item.leaves
        nbytes += item.nbytes + name_bytes * item.leaves
    return leaves, nbytes


def _plain_bytes(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, np.generic):
        return value.nbytes
    return value.bit_length() // 2 if isinstance(value, int) else 0


def _text_bytes(array: np.ndarray[Any, Any]) -> int:
    """What an array of text takes wherever it stands; arrays of numbers are stored once."""
    return array.nbytes if array.dtype.kind in "SU" else 0


def _key_bytes(key: Any) -> int:
    """What a key, or a member of a set, takes."""
    if isinstance(key, tuple | frozenset):
        return _LEAF_BYTES + sum(map(_key_bytes, key))
    return _LEAF_BYTES + _plain_bytes(key)


class _Place:
    """Where a value stands in an archive; its text is made only when it is needed."""

    __slots__ = ("outer", "part")

    def __init__(self, outer: _Place | None, part: object) -> None:
        self.outer = outer
        self.part = part

    def name(self) -> str:
        if self.outer is None:
            return str(self.part)
        part = f".{self.part[:100]}" if isinstance(self.part, str) else f"[{show(self.part)}]"
        return self.outer.name() + part
