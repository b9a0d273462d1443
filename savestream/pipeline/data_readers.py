"""The data objects of a load: each opened once, checked, and closed whatever happens."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Self

import anyio

from savestream.errors import CorruptCheckpointError, StorageError
from savestream.pipeline.open_checkpoint import OpenCheckpoint, VanishedDataError
from savestream.storage_backends.base import ObjectReader

__all__ = ["DataReaders"]


class DataReaders:
    """Open readers by part and index of the object in it.

    Parameters
    ----------
    wanted
        (part, object index) pairs.
    check_sizes
        Refuse objects shorter than their part states. Without it the caller asks only for what is there.
    """

    def __init__(self, checkpoint: OpenCheckpoint, wanted: Iterable[tuple[int, int]], *, check_sizes: bool) -> None:
        self._checkpoint = checkpoint
        self._check_sizes = check_sizes
        self._wanted = sorted(set(wanted))
        self._open: dict[tuple[int, int], ObjectReader] = {}

    def of(self, part: int, object_index: int) -> ObjectReader:
        """The reader of a wanted object."""
        return self._open[part, object_index]

    async def __aenter__(self) -> Self:
        try:
            for part, index in self._wanted:
                self._open[part, index] = await self._open_one(part, index)
        except BaseException as error:
            await self.__aexit__(type(error))
            raise
        return self

    async def _open_one(self, part: int, index: int) -> ObjectReader:
        entry = self._checkpoint.parts[part].objects[index]
        place = f"{self._checkpoint.place}/{entry.path}"
        path = self._checkpoint.object_path(part, index)
        try:
            reader = await self._checkpoint.location.backend.open_reader(path)
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise VanishedDataError(f"{place}: missing, although the manifest names it") from error
            raise
        if self._check_sizes and reader.size_bytes < entry.bytes:
            size = reader.size_bytes
            await reader.close()
            raise CorruptCheckpointError(f"{place}: truncated, {size} of {entry.bytes} bytes are there")
        return reader

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close them all, whatever happens; an error of the load goes before one of closing."""
        failures: list[StorageError] = []
        with anyio.CancelScope(shield=True):
            for reader in self._open.values():
                try:
                    await reader.close()
                except StorageError as error:
                    failures.append(error)
        if failures and kind is None:
            raise failures[0]
