"""PyTorch's archives, without PyTorch: their tensors as arrays in the file, their other objects as plain values."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import numpy as np

from savestream.arrays import dtype_itemsize
from savestream.arrays.file_arrays import FileArray
from savestream.arrays.file_sources import ByteSource
from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import UnreadObject, show
from savestream.interchange.inert_pickle import read_pickle
from savestream.interchange.numpy_pickles import PickledArray
from savestream.interchange.stored_zip import StoredZip, Window
from savestream.interchange.torch_pickles import (
    TENSOR_NAMES,
    VALUE_NAMES,
    VALUE_NAMES_WITH_UNREAD,
    StoredTensor,
    TorchDtype,
    storage_id,
    storage_id_or_unread,
)
from savestream.planners import RecordedObject

__all__ = ["ArchiveReader"]

_MAXIMUM_PICKLE_BYTES = 64 * 1024 * 1024
_MAXIMUM_DEPTH = 128
_REMEMBERED_BYTES = 1024
_MAXIMUM_CONTAINERS = 1_000_000
# Elements that lie over each other may be more than what is stored, up to here.
_MAXIMUM_EXPANDED_BYTES = 64 * 1024 * 1024
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, np.generic)


class ArchiveReader:
    """One archive at ``offset`` of a source. ``name`` is what errors and arrays are called."""

    def __init__(self, source: ByteSource, offset: int, nbytes: int, name: str) -> None:
        self._name = name
        self._window = Window(source, offset, nbytes)
        self._zip = StoredZip(self._window)
        self._prefix = self._find_prefix()
        self._swapped = self._is_big_endian()
        self._containers = 0
        self._arrays: dict[StoredTensor, FileArray] = {}
        self._with_unread = False

    def _find_prefix(self) -> str:
        """The directory in the archive that all of its members lie in."""
        for name in self._zip.members:
            if name.endswith("/data.pkl") and name.count("/") == 1:
                break
        else:
            raise CorruptCheckpointError("it holds no data.pkl, so torch.save did not write it")
        prefix = name.removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in self._zip.members:
            raise UnsafeObjectError("it is a TorchScript archive, which holds code; save the module's state_dict()")
        return prefix

    def _is_big_endian(self) -> bool:
        member = self._zip.members.get(f"{self._prefix}byteorder")
        order = b"little" if member is None else self._zip.read(member, 100)
        if order not in (b"little", b"big"):
            raise CorruptCheckpointError(f"its byte order is {order[:20]!r}")
        return order == b"big"

    def tensor(self) -> FileArray:
        """The tensor that is all that the archive holds."""
        found = _read_tensor(self._pickle())
        if not isinstance(found, StoredTensor):
            raise CorruptCheckpointError(f"it holds {show(found)}, not a tensor")
        return self._array(found, self._name)

    def value(self) -> object:
        """What the archive holds: plain values, containers and tensors."""
        return self._convert(read_pickle(self._pickle(), VALUE_NAMES, storage_id), _Place(None, self._name), 0)

    def value_with_unread(self) -> object:
        """The same, but what only running code could make is an :class:`UnreadObject` in its place."""
        self._with_unread = True
        found = read_pickle(self._pickle(), VALUE_NAMES_WITH_UNREAD, storage_id_or_unread)
        return self._convert(found, _Place(None, self._name), 0)

    def _pickle(self) -> bytes:
        return self._zip.read(self._zip.members[f"{self._prefix}data.pkl"], _MAXIMUM_PICKLE_BYTES)

    def _array(self, tensor: StoredTensor, name: str) -> FileArray:
        """The tensor as an array; one that is there twice is one array, as tied weights are."""
        found = self._arrays.get(tensor)
        if found is None:
            found = self._arrays[tensor] = self._new_array(tensor, name)
        return found

    def _new_array(self, tensor: StoredTensor, name: str) -> FileArray:
        storage = tensor.storage
        member = self._zip.members.get(f"{self._prefix}data/{storage.key}")
        if member is None:
            raise CorruptCheckpointError(f"its storage {storage.key[:100]!r} is not in the archive")
        if member.nbytes != storage.nbytes:
            raise CorruptCheckpointError(
                f"its storage {storage.key[:100]!r} is said to have {storage.nbytes} bytes and has {member.nbytes}"
            )
        array = FileArray(
            self._window.source,
            self._window.offset + self._zip.data_offset(member) + tensor.offset,
            tensor.dtype,
            tensor.shape,
            tensor.strides,
            name=name,
            conjugated=tensor.conjugated,
            negated=tensor.negated,
            swapped=self._swapped and dtype_itemsize(tensor.dtype) > 1,
        )
        if array.info.nbytes > max(storage.nbytes, _MAXIMUM_EXPANDED_BYTES):
            raise CorruptCheckpointError(
                f"a tensor of shape {tensor.shape} spreads {storage.nbytes} stored bytes over {array.info.nbytes}"
            )
        return array

    def _convert(self, value: Any, place: _Place, depth: int) -> object:
        """The pickle's objects as values of a state; what is no plain value is refused."""
        kind = type(value)
        if kind is StoredTensor:
            return self._array(value, place.name())
        if kind is PickledArray:
            return value.array
        if kind is TorchDtype:
            return RecordedObject("torch.dtype", value.name)
        if kind in (set, frozenset, RecordedObject) or isinstance(value, _PLAIN):
            return value
        self._containers += 1
        if depth > _MAXIMUM_DEPTH or self._containers > _MAXIMUM_CONTAINERS:
            raise CorruptCheckpointError("its values nest too deeply, contain themselves, or are too many")
        if kind in (list, tuple):
            items = [self._convert(item, _Place(place, part), depth + 1) for part, item in enumerate(value)]
            return items if kind is list else tuple(items)
        if kind in (dict, OrderedDict):
            pairs = [(key, self._convert(item, _Place(place, key), depth + 1)) for key, item in value.items()]
            return dict(pairs) if kind is dict else self._ordered(value, pairs, place, depth)
        if self._with_unread:
            return value if kind is UnreadObject else UnreadObject(show(value))
        raise UnsafeObjectError(f"it holds {show(value)}, which is no plain value")

    def _ordered(self, value: Any, pairs: list[tuple[Any, object]], place: _Place, depth: int) -> OrderedDict[Any, Any]:
        """An OrderedDict, with what a module's state_dict() says of its own format."""
        found: OrderedDict[Any, Any] = OrderedDict(pairs)
        if hasattr(value, "_metadata"):
            metadata = self._convert(value._metadata, _Place(place, "_metadata"), depth + 1)
            found._metadata = metadata  # type: ignore[attr-defined]
        return found


def _read_tensor(pickled: bytes) -> object:
    """What the pickle of a single tensor says; those of tensors that are alike are equal, so most were read before."""
    return _remembered_tensor(pickled) if len(pickled) <= _REMEMBERED_BYTES else _described_tensor(pickled)


def _described_tensor(pickled: bytes) -> object:
    return read_pickle(pickled, TENSOR_NAMES, storage_id)


_remembered_tensor = functools.lru_cache(maxsize=1024)(_described_tensor)


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
