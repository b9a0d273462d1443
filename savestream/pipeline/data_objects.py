"""A save's data objects: who gets which offset, opening the next object, finishing and aborting them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
from anyio import CancelScope, Lock

from savestream.errors import StorageError
from savestream.pipeline.buffers import Bytes, round_up
from savestream.pipeline.manifest import ObjectEntry
from savestream.storage_backends.base import ObjectWriter, StorageBackend

__all__ = ["DataObjects", "Placement"]

logger = logging.getLogger("savestream")


class Placement(msgspec.Struct, frozen=True):
    """Where an extent goes."""

    object_index: int
    offset: int
    writer: ObjectWriter


class DataObjects:
    """The objects that one rank writes, filled one after the other, each by several lanes at once."""

    def __init__(self, backend: StorageBackend, name: Callable[[int], str]) -> None:
        self._backend = backend
        self._capabilities = backend.capabilities
        self._alignment_bytes = (
            1 if self._capabilities.contiguous_extents else self._capabilities.extent_alignment_bytes
        )
        self._name = name
        self._writers: list[ObjectWriter] = []
        self._ends: list[int] = []
        self._next_offset = 0
        self._is_complete = False
        self._lock = threading.Lock()
        self._opening = Lock()

    async def open(self, after: int) -> None:
        """Open the object that follows object ``after`` (-1 for the first), unless another lane already did."""
        async with self._opening:
            if len(self._writers) > after + 1:
                return
            writer = await self._backend.open_writer(self._name(after + 1))
            with self._lock:
                self._writers.append(writer)
                self._ends.append(0)
                self._next_offset = 0
                self._is_complete = False

    def place(self, nbytes: int) -> Placement | int:
        """Take room for an extent in the current object; its number where it takes no more: open the next.

        It must not grow too large, and an extent shorter than the minimum must be its last.
        """
        capabilities = self._capabilities
        with self._lock:
            offset = self._next_offset
            if offset and (self._is_complete or offset + nbytes > capabilities.maximum_object_bytes):
                return len(self._writers) - 1
            self._is_complete = nbytes < capabilities.minimum_extent_bytes
            self._next_offset = offset + round_up(nbytes, self._alignment_bytes)
            self._ends[-1] = offset + nbytes
            return Placement(len(self._writers) - 1, offset, self._writers[-1])

    def payload(self, data: Bytes, nbytes: int) -> memoryview:
        """What to hand to the backend: the extent with its zero padding up to the alignment."""
        return data[: round_up(nbytes, self._alignment_bytes)].data

    async def finish(self) -> list[ObjectEntry]:
        """Make every object durable."""
        entries = []
        for number, (writer, end) in enumerate(zip(self._writers, self._ends, strict=True)):
            await writer.finish(end)
            entries.append(ObjectEntry(path=self._name(number), bytes=end))  # a backend may call it otherwise
        return entries

    async def abort(self) -> None:
        """Release and remove everything, best effort, even while the save is being cancelled."""
        with CancelScope(shield=True):
            for writer in self._writers:
                try:
                    await writer.abort()
                except StorageError as error:  # the others still have to go, and the save's own error is the one to see
                    logger.warning("%s: an unfinished object could not be removed: %s", writer.path, error)
