"""Reads and writes at offsets: past the page cache where file, memory and system allow, buffered elsewhere.

Direct I/O moves whole pages between page-aligned memory and page-aligned offsets. Extents of one file start at page
boundaries, so direct and buffered extents never share a page.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import threading
import warnings
from collections.abc import Iterator

import numpy as np

__all__ = ["ALIGNMENT_BYTES", "DescriptorPair", "read_range", "write_extent"]

ALIGNMENT_BYTES = 4096
# Linux moves at most 2 GiB less a page per call, and smaller pieces end sooner when a limit is hit.
MAXIMUM_CALL_BYTES = 1 << 30


class DescriptorPair:
    """The descriptors of one open file, shared by the threads that read or write it.

    Parameters
    ----------
    buffered
        A descriptor through the page cache.
    direct
        One opened with ``O_DIRECT``, or None.
    """

    def __init__(self, buffered: int, direct: int | None) -> None:
        self.buffered = buffered
        self.seek_lock = threading.Lock()
        self._direct = direct
        self._direct_refused = False
        self._users = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the descriptors open during the body; ``EBADF`` once :meth:`close` was called."""
        with self._changed:
            if self._closed:
                raise OSError(errno.EBADF, "it is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Close both when their last user is done: a closed number may be another file's at once. Harmless twice."""
        with self._changed:
            already, self._closed = self._closed, True
            self._changed.wait_for(lambda: self._users == 0)
        if not already:
            self._close_both()

    def direct_for(self, offset: int, data: memoryview) -> int | None:
        """The direct descriptor if it can serve this range from this memory."""
        if self._direct is None or self._direct_refused or len(data) == 0:
            return None
        address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return None if (offset | address) % ALIGNMENT_BYTES else self._direct

    def refuse_direct(self) -> None:
        """Go buffered from now on: the file system does not take direct I/O of this alignment."""
        self._direct_refused = True

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"descriptor {self.buffered} was never closed", ResourceWarning, source=self, stacklevel=1)
            self._closed = True
            self._close_both()

    def _close_both(self) -> None:
        try:
            if self._direct is not None:
                os.close(self._direct)
        finally:
            os.close(self.buffered)


def write_extent(pair: DescriptorPair, offset: int, data: memoryview) -> None:
    """Write all of ``data`` at ``offset``.

    A direct write pads the last page with zeros, so the file may end up to 4095 bytes too late. What direct I/O
    refuses (``EINVAL``, which can hide ``EFBIG``) or leaves unaligned is written buffered, whose errno is reported.
    """
    direct = pair.direct_for(offset, data)
    done = 0 if direct is None else _write_direct(pair, direct, offset, data)
    while done < len(data):
        count = _write_buffered(pair, data[done : done + MAXIMUM_CALL_BYTES], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"nothing was written at offset {offset + done}")
        done += count


def read_range(pair: DescriptorPair, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer`` from ``offset``; ``EIO`` where the file ends before that."""
    direct = pair.direct_for(offset, buffer)
    done = 0 if direct is None else _read_direct(pair, direct, offset, buffer)
    while done < len(buffer):
        count = _read_buffered(pair, buffer[done : done + MAXIMUM_CALL_BYTES], offset + done)
        if count == 0:
            raise OSError(
                errno.EIO,
                f"it is truncated: it ends at byte {offset + done}, bytes up to {offset + len(buffer)} wanted",
            )
        done += count


def _write_direct(pair: DescriptorPair, direct: int, offset: int, data: memoryview) -> int:
    """Return how many bytes went out; the rest is for the buffered descriptor."""
    body = len(data) - len(data) % ALIGNMENT_BYTES
    done = 0
    try:
        while done < body:
            count = os.pwrite(direct, data[done : min(body, done + MAXIMUM_CALL_BYTES)], offset + done)
            done += count
            if count == 0 or count % ALIGNMENT_BYTES:
                return done
        if done < len(data):
            done += _write_tail(direct, offset + done, data[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pair.refuse_direct()
    return done


def _write_tail(direct: int, offset: int, tail: memoryview) -> int:
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        page[: len(tail)] = bytes(tail)
        count = os.pwrite(direct, page, offset)
    return len(tail) if count == ALIGNMENT_BYTES else 0


def _read_direct(pair: DescriptorPair, direct: int, offset: int, buffer: memoryview) -> int:
    """Return how many bytes came in; the rest, or the end of the file, is for the buffered descriptor."""
    body = len(buffer) - len(buffer) % ALIGNMENT_BYTES
    done = 0
    try:
        while done < body:
            count = os.preadv(direct, [buffer[done : min(body, done + MAXIMUM_CALL_BYTES)]], offset + done)
            done += count
            if count == 0 or count % ALIGNMENT_BYTES:
                return done
        if done < len(buffer):
            done += _read_tail(direct, offset + done, buffer[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pair.refuse_direct()
    return done


def _read_tail(direct: int, offset: int, tail: memoryview) -> int:
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        count = min(os.preadv(direct, [page], offset), len(tail))
        tail[:count] = page[:count]
    return count


def _write_buffered(pair: DescriptorPair, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(pair.buffered, data, offset)
    with pair.seek_lock:
        os.lseek(pair.buffered, offset, os.SEEK_SET)
        return os.write(pair.buffered, data)


def _read_buffered(pair: DescriptorPair, buffer: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(pair.buffered, [buffer], offset)
    with pair.seek_lock, io.FileIO(pair.buffered, "rb", closefd=False) as file:
        file.seek(offset)
        return file.readinto(buffer) or 0
