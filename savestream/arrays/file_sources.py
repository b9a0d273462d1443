"""Bytes at offsets: files whose descriptors are shared and bounded in number. Safe from any thread."""

from __future__ import annotations

import abc
import contextlib
import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from savestream.errors import CorruptCheckpointError, UsageError

__all__ = ["ByteSource", "EndOfSourceError", "FilePool", "PooledFile", "UnpooledFile"]

# Per call through the page cache: larger ones let the device wait for the copying.
_CALL_BYTES = 4 * 1024 * 1024
DIRECT = getattr(os, "O_DIRECT", 0)
DIRECT_FROM_BYTES = 1024 * 1024
BOUNCE_BYTES = 4 * 1024 * 1024
PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


Bytes: TypeAlias = npt.NDArray[np.uint8]


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
        with self._pool.lend(self._path) as file:
            done = 0
            direct = file.direct(self._path) if len(buffer) >= DIRECT_FROM_BYTES else None
            if direct is not None:
                with self._pool.lend_bounce() as bounce:
                    done = file.fill_direct(direct, offset, buffer, bounce)
            _fill(file.descriptor, offset + done, buffer[done:])

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Say that a small range will be read soon; nothing waits for it."""
        if hasattr(os, "posix_fadvise"):
            with self._pool.lend(self._path) as file, contextlib.suppress(OSError):  # advice is optional
                os.posix_fadvise(file.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def size_bytes(self) -> int:
        """The file's size now."""
        with self._pool.lend(self._path) as file:
            return os.fstat(file.descriptor).st_size


class _OpenFile:
    """One open file and how many threads use it.

    Large ranges go past the page cache where the file system has direct I/O: filling the cache can take longer than
    reading twice, and pushes out what others need.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self._direct: int | None = None
        self._direct_refused = False
        self._asked_for_direct = not DIRECT
        self._lock = threading.Lock()

    def direct(self, path: str) -> int | None:
        """A descriptor for direct I/O, opened when it is first needed; None where there is none."""
        with self._lock:
            if not self._asked_for_direct:
                self._asked_for_direct = True
                self._direct = _open_direct(path, self.descriptor)
            return None if self._direct_refused else self._direct

    def fill_direct(self, direct: int, offset: int, buffer: memoryview, bounce: Bytes) -> int:
        """Read as much as direct I/O gives; how many bytes that is. The rest, or the end of the file, is for others."""
        target, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(target):
            start = (offset + done) // PAGE_BYTES * PAGE_BYTES
            lead = offset + done - start
            wanted = min(-(-(lead + len(target) - done) // PAGE_BYTES) * PAGE_BYTES, len(bounce))
            try:
                count = min(os.preadv(direct, [bounce[:wanted].data], start) - lead, len(target) - done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct_refused = True  # another alignment than pages is asked for
                return done
            if count <= 0:
                return done
            np.copyto(target[done : done + count], bounce[lead : lead + count])
            done += count
        return done

    def close(self) -> None:
        try:
            if self._direct is not None:
                os.close(self._direct)
        finally:
            os.close(self.descriptor)


class FilePool:
    """Opens files for reading and keeps the most recently used ones open, at most ``limit`` at once.

    An open file has one descriptor, or two where large ranges of it were read. A file that was closed meanwhile must be
    the same when it is opened again. A thread uses one file at a time.
    """

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._bounces: list[Bytes] = []
        self._identities: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def file(self, path: str) -> PooledFile:
        """A file as a source; it is opened when it is first read."""
        return PooledFile(self, path)

    @contextmanager
    def lend(self, path: str) -> Iterator[_OpenFile]:
        """Keep a file open for the time of the block."""
        with self._changed:
            file = self._take(path)
            file.users += 1
        try:
            yield file
        finally:
            with self._changed:
                file.users -= 1
                self._changed.notify_all()

    @contextmanager
    def lend_bounce(self) -> Iterator[Bytes]:
        """Page-aligned memory for direct I/O, for the time of the block; there is as much as threads read at once."""
        with self._changed:
            bounce = self._bounces.pop() if self._bounces else None
        if bounce is None:
            bounce = _bounce_memory()
        try:
            yield bounce
        finally:
            with self._changed:
                self._bounces.append(bounce)

    def _take(self, path: str) -> _OpenFile:
        while True:
            if self._closed:
                raise UsageError(f"{path}: the files of this conversion are closed")
            file = self._open.get(path)
            if file is not None:
                self._open.move_to_end(path)
                return file
            if len(self._open) < self.limit or self._close_idle():
                file = self._open[path] = _OpenFile(self._open_checked(path))
                return file
            self._changed.wait()

    def _close_idle(self) -> bool:
        """Close the least recently used file that nobody reads; False where all are being read."""
        idle = next((path for path, file in self._open.items() if not file.users), None)
        if idle is None:
            return False
        self._open.pop(idle).close()
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
            self._changed.wait_for(lambda: not any(file.users for file in self._open.values()))
            while self._open:
                self._open.popitem()[1].close()
            self._bounces.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: str, flags: int = 0) -> int:
    """Open a regular file; a pipe of that name must neither block the opening nor be read."""
    flags |= os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def _bounce_memory() -> Bytes:
    """Memory for direct I/O, on huge pages where there are any: devices take few large pieces twice as fast."""
    memory = mmap.mmap(-1, BOUNCE_BYTES + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # advice is optional
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    first = -data.ctypes.data % _HUGE_PAGE_BYTES
    return data[first : first + BOUNCE_BYTES]


def _open_direct(path: str, buffered: int) -> int | None:
    """The same file for direct I/O; None where its file system has none, or another file has its name by now."""
    try:
        descriptor = _open(path, DIRECT)
    except OSError:  # whatever is wrong with the file, its first descriptor is the one that counts
        return None
    if os.path.sameopenfile(descriptor, buffered):
        return descriptor
    os.close(descriptor)
    return None


def _fill(descriptor: int, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _CALL_BYTES]], offset + done)
        if not count:
            raise EndOfSourceError(offset + done)
        done += count
