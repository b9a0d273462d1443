"""Bytes at offsets: files whose descriptors are shared and bounded in number. Safe from any thread."""

from __future__ import annotations

import abc
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from savestream.errors import CorruptCheckpointError, UsageError

__all__ = ["ByteSource", "EndOfSourceError", "FilePool", "PooledFile", "UnpooledFile"]

# Linux moves less than 2 GiB per call, and smaller pieces end sooner when the reader is to stop.
_CALL_BYTES = 1 << 30


class EndOfSourceError(EOFError):
    """A range reaches beyond the end; ``end`` is the first byte that is not there."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


class ByteSource(abc.ABC):
    """Something with bytes at offsets."""

    @abc.abstractmethod
    def describe(self) -> str:
        """What messages call it."""

    @abc.abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable bytes) from ``offset``; :class:`EndOfSourceError` where it ends before that."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes themselves; for small ranges."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)


class UnpooledFile(ByteSource):
    """A file that is opened for each range."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def describe(self) -> str:
        return self._path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        descriptor = _open(self._path)
        try:
            _fill(descriptor, offset, buffer)
        finally:
            os.close(descriptor)


class PooledFile(ByteSource):
    """A file whose descriptor a :class:`FilePool` lends."""

    __slots__ = ("_path", "_pool")

    def __init__(self, pool: FilePool, path: str) -> None:
        self._pool = pool
        self._path = path

    def describe(self) -> str:
        return self._path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._pool.descriptor(self._path) as descriptor:
            _fill(descriptor, offset, buffer)

    def size_bytes(self) -> int:
        """The file's size now."""
        with self._pool.descriptor(self._path) as descriptor:
            return os.fstat(descriptor).st_size


class _Lent:
    """One open descriptor and how many threads use it."""

    __slots__ = ("descriptor", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0


class FilePool:
    """Opens files for reading and keeps the most recently used ones open, at most ``limit`` at once.

    A file that was closed meanwhile must be the same when it is opened again. A thread uses one descriptor at a time.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self._open: OrderedDict[str, _Lent] = OrderedDict()
        self._identities: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def file(self, path: str) -> PooledFile:
        """A file as a source; it is opened when it is first read."""
        return PooledFile(self, path)

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """Lend a descriptor for the time of the block."""
        with self._changed:
            lent = self._take(path)
            lent.users += 1
        try:
            yield lent.descriptor
        finally:
            with self._changed:
                lent.users -= 1
                self._changed.notify_all()

    def _take(self, path: str) -> _Lent:
        while True:
            if self._closed:
                raise UsageError(f"{path}: the files of this conversion are closed")
            lent = self._open.get(path)
            if lent is not None:
                self._open.move_to_end(path)
                return lent
            if len(self._open) < self.limit or self._close_idle():
                lent = self._open[path] = _Lent(self._open_checked(path))
                return lent
            self._changed.wait()

    def _close_idle(self) -> bool:
        """Close the least recently used file that nobody reads; False where all are being read."""
        idle = next((path for path, lent in self._open.items() if not lent.users), None)
        if idle is None:
            return False
        os.close(self._open.pop(idle).descriptor)
        return True

    def _open_checked(self, path: str) -> int:
        descriptor = _open(path)
        status = os.fstat(descriptor)
        found = (status.st_dev, status.st_ino)
        if self._identities.setdefault(path, found) != found:
            os.close(descriptor)
            raise CorruptCheckpointError(f"{path}: it was replaced by another file while it was being read")
        return descriptor

    def close(self) -> None:
        """Close everything, as soon as nobody reads any more. Harmless twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(lent.users for lent in self._open.values()))
            while self._open:
                os.close(self._open.popitem()[1].descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: str) -> int:
    """Open a regular file; a pipe of that name must neither block the opening nor be read."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def _fill(descriptor: int, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _CALL_BYTES]], offset + done)
        if not count:
            raise EndOfSourceError(offset + done)
        done += count
