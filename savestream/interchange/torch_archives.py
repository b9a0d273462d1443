"""PyTorch's archives, without PyTorch: their tensors as arrays in the file, their other objects as plain values."""

from __future__ import annotations

import functools

from savestream.arrays import dtype_itemsize
from savestream.arrays.file_arrays import FileArray
from savestream.arrays.file_sources import ByteSource
from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.archive_values import ValueConverter
from savestream.interchange.inert_objects import show
from savestream.interchange.inert_pickle import read_pickle
from savestream.interchange.read_limits import ReadLimits
from savestream.interchange.stored_zip import StoredZip, Window
from savestream.interchange.torch_pickles import (
    TENSOR_NAMES,
    VALUE_NAMES,
    VALUE_NAMES_WITH_UNREAD,
    StoredTensor,
    storage_id,
    storage_id_or_unread,
)

__all__ = ["ArchiveReader"]

_MAXIMUM_PICKLE_BYTES = 64 * 1024 * 1024
_REMEMBERED_BYTES = 1024
# Elements that lie over each other may be more than what is stored, up to here.
_VIEWS_RATIO = 16
_MAXIMUM_EXPANDED_BYTES = 64 * 1024 * 1024


class ArchiveReader:
    """One archive at ``offset`` of a source. ``name`` is what errors and arrays are called."""

    def __init__(
        self, source: ByteSource, offset: int, nbytes: int, name: str, limits: ReadLimits | None = None
    ) -> None:
        self._name = name
        self._limits = ReadLimits() if limits is None else limits
        self._window = Window(source, offset, nbytes)
        self._zip = StoredZip(self._window)
        self._prefix = self._find_prefix()
        self._swapped = self._is_big_endian()
        self._arrays: dict[StoredTensor, FileArray] = {}
        self._elements_bytes = 0

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

    def value(self, *, with_unread: bool = False, stored_bytes: int | None = None) -> object:
        """What the archive holds: plain values, containers and tensors.

        ``with_unread``: what only running code could make is an :class:`~.inert_objects.UnreadObject` in its place.
        ``stored_bytes``: how long the archive is in its file, where it was compressed there.
        """
        names, persistent = (
            (VALUE_NAMES_WITH_UNREAD, storage_id_or_unread) if with_unread else (VALUE_NAMES, storage_id)
        )
        data = self._pickle()
        granted = len(data) if stored_bytes is None else min(stored_bytes, len(data))
        self._limits.grant(granted, self._window.source.describe(), self._pickle_offset())
        found = read_pickle(data, names, persistent, ReadLimits(len(data), self._limits.check_stop))
        return ValueConverter(self._array, self._limits, with_unread=with_unread).convert(found, self._name)

    def _pickle_offset(self) -> int:
        return self._window.offset + self._zip.data_offset(self._zip.members[f"{self._prefix}data.pkl"])

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
        self._limits.charge(max(array.info.nbytes - storage.nbytes, 0))
        self._elements_bytes += array.info.nbytes
        if self._elements_bytes > _VIEWS_RATIO * self._window.nbytes + _MAXIMUM_EXPANDED_BYTES:
            raise CorruptCheckpointError(
                f"its tensors show the same stored bytes again and again, {self._elements_bytes} bytes so far"
            )
        return array


def _read_tensor(pickled: bytes) -> object:
    """What the pickle of a single tensor says; those of tensors that are alike are equal, so most were read before."""
    return _remembered_tensor(pickled) if len(pickled) <= _REMEMBERED_BYTES else _described_tensor(pickled)


def _described_tensor(pickled: bytes) -> object:
    return read_pickle(pickled, TENSOR_NAMES, storage_id)


_remembered_tensor = functools.lru_cache(maxsize=1024)(_described_tensor)
