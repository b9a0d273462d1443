"""The contract between the pipeline and storage.

A backend stores *objects* under relative, slash-separated paths. Data objects are written as extents at offsets, in
any order and concurrently (a file at offsets, or the parts of a multipart upload); small objects are put and got whole;
the root manifest is created conditionally, which is the commit. Backends know nothing of planners or checkpoints.

Errors are :class:`~savestream.errors.StorageError` with the ``errno`` kept (``ENOENT`` for an absent object,
``EEXIST`` for a lost conditional create), naming operation and object. No method may leave a thread running when it
raises or is cancelled, and none may keep a buffer after it has returned.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

__all__ = ["Capabilities", "ObjectInfo", "ObjectReader", "ObjectWriter", "StorageBackend"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do and what it wants.

    Attributes
    ----------
    conditional_create
        ``create`` has exactly one winner among racing writers. Where False, the documented weaker promise holds.
    extent_alignment_bytes
        Extents start at multiples of this (a power of two); buffers handed to ``write`` have a capacity padded to it.
    minimum_extent_bytes
        Every extent but the last of an object is at least this long (multipart uploads); 0 where any length goes.
    maximum_object_bytes
        An object is closed and the next one opened before it would grow beyond this.
    contiguous_extents
        Extents must leave no gap between them (multipart uploads), so alignment padding is part of an extent.
    blocking_io
        ``write_blocking`` and ``read_into_blocking`` may be called from worker threads, which saves a thread hop.
    write_concurrency, read_concurrency
        Extents and ranges worth keeping in flight.
    read_gap_bytes
        Two wanted ranges of an object closer than this are fetched as one.
    read_range_bytes
        Preferred size of one ranged read.
    """

    conditional_create: bool = True
    extent_alignment_bytes: int = 1
    minimum_extent_bytes: int = 0
    maximum_object_bytes: int = 1 << 62
    contiguous_extents: bool = False
    blocking_io: bool = False
    write_concurrency: int = 3
    read_concurrency: int = 4
    read_gap_bytes: int = 64 * 1024
    read_range_bytes: int = 8 * 1024 * 1024


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object as a listing shows it; ``etag`` changes whenever the content does."""

    path: str
    size_bytes: int
    modified_seconds: float | None = None
    etag: str | None = None


class ObjectWriter(abc.ABC):
    """Writes one new data object by extents. Leaving it without ``finish`` aborts it."""

    path: str

    @abc.abstractmethod
    async def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` (bytes, C-contiguous) at ``offset``; extents never overlap and may finish in any order.

        ``offset`` is a multiple of the extent alignment. When cancelled, returns only after the request has ended.
        """

    def write_blocking(self, offset: int, data: memoryview) -> None:
        """Like :meth:`write`, from a worker thread; only where ``Capabilities.blocking_io`` is True."""
        raise NotImplementedError(f"{type(self).__name__} has no blocking write (Capabilities.blocking_io is False)")

    @abc.abstractmethod
    async def finish(self, size_bytes: int) -> None:
        """Make the object durable with exactly ``size_bytes`` bytes."""

    @abc.abstractmethod
    async def abort(self) -> None:
        """Release everything and remove what was written, best effort; harmless after ``finish`` or twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await self.abort()
        if kind is None:
            await checkpoint_if_cancelled()


class ObjectReader(abc.ABC):
    """Reads ranges of one object."""

    path: str
    size_bytes: int

    @abc.abstractmethod
    async def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable bytes) from ``offset``; a range beyond the end is a StorageError (``EIO``)."""

    def read_into_blocking(self, offset: int, buffer: memoryview) -> None:
        """Like :meth:`read_into`, from a worker thread; only where ``Capabilities.blocking_io`` is True."""
        raise NotImplementedError(f"{type(self).__name__} has no blocking read (Capabilities.blocking_io is False)")

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the object; harmless twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await self.close()
        if kind is None:
            await checkpoint_if_cancelled()


class StorageBackend(abc.ABC):
    """A place that keeps objects. All paths are relative, ``/``-separated, without ``.`` or ``..`` parts."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The place, without credentials, for messages and logs."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abc.abstractmethod
    async def open_writer(self, path: str) -> ObjectWriter:
        """Begin a new data object; its parent directories appear as needed. ``EEXIST`` if it is there already."""

    @abc.abstractmethod
    async def open_reader(self, path: str) -> ObjectReader:
        """Open an object for ranged reads; ``ENOENT`` where it is absent. Links below the root are not followed."""

    @abc.abstractmethod
    async def get(self, path: str, *, maximum_bytes: int) -> bytes:
        """Read a small object whole; one longer than ``maximum_bytes`` is refused (``EFBIG``) before it is read."""

    @abc.abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a small object whole, replacing any; durable on return, with every entry of its directory."""

    @abc.abstractmethod
    async def create(self, path: str, data: bytes, *, scratch: str) -> None:
        """Make a small object appear atomically and durably, unless one is there (``EEXIST``).

        ``scratch`` is a path private to this writer that a backend may use on the way; its directory's entries become
        durable before ``path`` appears. Never partially visible. A failure whose outcome cannot be learnt raises
        ``StorageError(outcome="unknown")``.
        """

    @abc.abstractmethod
    async def replace(self, path: str, data: bytes, *, scratch: str, expected_etag: str | None) -> None:
        """Like :meth:`create`, replacing what is there.

        Where the store can compare, an object whose etag is not ``expected_etag`` is left alone (``EEXIST``).
        """

    @abc.abstractmethod
    async def head(self, path: str) -> ObjectInfo | None:
        """Describe an object, or None where it is absent."""

    @abc.abstractmethod
    async def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects beneath the directory ``prefix`` ("" is everything), sorted by path. Links are not followed."""

    @abc.abstractmethod
    async def list_directories(self, prefix: str) -> list[str]:
        """Names (one path part each) of the directories directly beneath ``prefix``, sorted."""

    @abc.abstractmethod
    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; those already absent are fine. Directories left empty beneath the root disappear.

        The removal of each object is durable on return.
        """
