"""Compressed ranges of files, decompressed when they are read: small ones to memory, large ones to temporary files.

Whatever a stream claims or holds, no more comes out of it than its reader allows.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Self

import zstandard

from savestream.arrays.file_sources import ByteSource, EndOfSourceError
from savestream.errors import CorruptCheckpointError, UsageError

__all__ = ["DecodedItem", "DecodedPool"]

_IN_MEMORY_BYTES = 1024 * 1024
_READ_BYTES = 1024 * 1024
_MAXIMUM_WINDOW_BYTES = 8 * 1024 * 1024


class DecodedItem(ByteSource):
    """What a zstd stream at ``offset`` of a source decompresses to, at most ``limit_bytes`` of it."""

    def __init__(self, pool: DecodedPool, source: ByteSource, offset: int, nbytes: int, limit_bytes: int) -> None:
        self._pool = pool
        self.source = source
        self.offset = offset
        self.nbytes = nbytes
        self.limit_bytes = limit_bytes

    def describe(self) -> str:
        return f"{self.source.describe()}, decompressed from offset {self.offset}"

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._pool.content(self) as content:
            content.read_into(offset, buffer)

    def size_bytes(self) -> int:
        """How many bytes come out."""
        with self._pool.content(self) as content:
            return content.nbytes


class _Content:
    """Decompressed bytes: in memory until they are many, then in a file that has no name."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.file: IO[bytes] | None = None
        self._parts: list[bytes] = []
        self._data = b""

    def append(self, part: bytes) -> None:
        self._parts.append(part)
        self.nbytes += len(part)
        if self.nbytes > _IN_MEMORY_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self.file is None:
            self.file = tempfile.TemporaryFile(prefix="savestream-", buffering=0)  # noqa: SIM115 - closed by the pool
        for part in self._parts:
            view = memoryview(part)
            while view:
                view = view[self.file.write(view) :]
        self._parts.clear()

    def finish(self) -> None:
        if self.file is None:
            self._data = b"".join(self._parts)
            self._parts.clear()
        else:
            self._flush()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > self.nbytes:
            raise EndOfSourceError(self.nbytes)
        if self.file is None:
            buffer[:] = self._data[offset : offset + len(buffer)]
            return
        done = 0
        while done < len(buffer):
            count = os.preadv(self.file.fileno(), [buffer[done:]], offset + done)
            if not count:
                raise EndOfSourceError(offset + done)
            done += count

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class _Entry:
    __slots__ = ("content", "users")

    def __init__(self) -> None:
        self.content: _Content | None = None  # until it is decompressed
        self.users = 1


class _Held:
    """Temporary files, and bytes in memory."""

    def __init__(self, files: int = 0, memory_bytes: int = 0) -> None:
        self.files = files
        self.memory_bytes = memory_bytes

    def count(self, content: _Content, sign: int) -> None:
        self.files += sign * (content.file is not None)
        self.memory_bytes += sign * content.nbytes * (content.file is None)

    def exceeds(self, limits: _Held) -> bool:
        return self.files > limits.files or self.memory_bytes > limits.memory_bytes

    def is_excessive(self, content: _Content, limits: _Held) -> bool:
        """Whether there are too many of a content's kind."""
        return self.files > limits.files if content.file is not None else self.memory_bytes > limits.memory_bytes


class DecodedPool:
    """Keeps what was decompressed last; the rest is decompressed again when it is read again.

    Parameters
    ----------
    files
        Temporary files kept at once.
    memory_bytes
        Small items kept in memory at once.
    """

    def __init__(self, files: int = 4, memory_bytes: int = 32 * 1024 * 1024) -> None:
        self._limits = _Held(files, memory_bytes)
        self._held = _Held()
        self._entries: OrderedDict[DecodedItem, _Entry] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def content(self, item: DecodedItem) -> Iterator[_Content]:
        """What an item decompresses to, for the time of the block."""
        entry = self._enter(item)
        try:
            if entry.content is None:
                self._decode(item, entry)
            assert entry.content is not None  # noqa: S101 - decoding sets it or raises
            yield entry.content
        finally:
            with self._changed:
                entry.users -= 1
                self._evict()
                self._changed.notify_all()

    def _enter(self, item: DecodedItem) -> _Entry:
        """The item's entry; one thread gets it without content and must decompress, others wait."""
        with self._changed:
            while True:
                if self._closed:
                    raise UsageError(f"{item.describe()}: the files of this conversion are closed")
                entry = self._entries.get(item)
                if entry is None:
                    entry = self._entries[item] = _Entry()
                    return entry
                if entry.content is not None:
                    entry.users += 1
                    self._entries.move_to_end(item)
                    return entry
                self._changed.wait()

    def _decode(self, item: DecodedItem, entry: _Entry) -> None:
        try:
            content = _decompress(item)
        except BaseException:
            with self._changed:
                del self._entries[item]
            raise
        with self._changed:
            entry.content = content
            self._held.count(content, 1)
            self._changed.notify_all()

    def _evict(self) -> None:
        """Drop the least recently used contents that nobody reads, until the rest is within the limits."""
        while self._held.exceeds(self._limits):
            found = next((pair for pair in self._entries.items() if self._is_spare(pair[1])), None)
            if found is None:
                return
            del self._entries[found[0]]
            self._drop(found[1])

    def _is_spare(self, entry: _Entry) -> bool:
        return entry.content is not None and not entry.users and self._held.is_excessive(entry.content, self._limits)

    def _drop(self, entry: _Entry) -> None:
        if entry.content is not None:
            self._held.count(entry.content, -1)
            entry.content.close()

    def close(self) -> None:
        """Forget everything, as soon as nobody reads any more. Harmless twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(entry.users for entry in self._entries.values()))
            while self._entries:
                self._drop(self._entries.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Range:
    """A range of a source as the file that the decompressor reads from."""

    def __init__(self, item: DecodedItem) -> None:
        self._item = item
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        left = self._item.nbytes - self._position
        count = left if size < 0 else min(size, left)
        data = self._item.source.read(self._item.offset + self._position, count)
        self._position += count
        return data


def _check_limit(item: DecodedItem, nbytes: int) -> None:
    if nbytes > item.limit_bytes:
        raise CorruptCheckpointError(f"it decompresses to more than the {item.limit_bytes} bytes that it can need")


def _decompress(item: DecodedItem) -> _Content:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAXIMUM_WINDOW_BYTES)
    content = _Content()
    try:
        with decompressor.stream_reader(_Range(item), read_size=_READ_BYTES) as reader:  # type: ignore[arg-type]
            while part := reader.read(_READ_BYTES):
                _check_limit(item, content.nbytes + len(part))
                content.append(part)
        content.finish()
    except zstandard.ZstdError as error:
        content.close()
        raise CorruptCheckpointError(f"its zstd stream is damaged ({error})") from error
    except BaseException:
        content.close()
        raise
    return content
