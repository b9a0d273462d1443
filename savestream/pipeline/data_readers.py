"""The data objects of a load: each opened once, checked, and closed whatever happens."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
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
        By (part, object index): up to which byte the object will be read; shorter ones are refused.
    affected
        Names, for messages, what is lost of a (part, object index) beyond a byte.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        wanted: Mapping[tuple[int, int], int],
        affected: Callable[[int, int, int], str],
    ) -> None:
        self._checkpoint = checkpoint
        self._wanted = wanted
        self._affected = affected
        self._open: dict[tuple[int, int], ObjectReader] = {}

    def of(self, part: int, object_index: int) -> ObjectReader:
        """The reader of a wanted object."""
        return self._open[part, object_index]

    async def __aenter__(self) -> Self:
        try:
            for part, index in sorted(self._wanted):
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
                affected = self._affected(part, index, 0)
                raise VanishedDataError(f"{place}: missing, although the manifest names it; {affected}") from error
            raise
        if reader.size_bytes < self._wanted[part, index]:
            counts = f"{reader.size_bytes} of {entry.bytes} bytes are there"
            affected = self._affected(part, index, reader.size_bytes)
            await reader.close()
            raise CorruptCheckpointError(f"{place}: truncated, {counts}; {affected}")
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
