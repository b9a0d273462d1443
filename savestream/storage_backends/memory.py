"""Objects in this process's memory: for tests, and for pipelines that keep a last checkpoint at hand."""

from __future__ import annotations

import bisect
import errno
import hashlib
import threading
import time
from collections.abc import Sequence

import msgspec
from anyio.lowlevel import checkpoint

from savestream.errors import StorageError
from savestream.storage_backends.base import Capabilities, ObjectInfo, ObjectReader, ObjectWriter, StorageBackend
from savestream.storage_backends.paths import directory_parts, object_parts

__all__ = ["MemoryBackend"]


class MemoryBackend(StorageBackend):
    """Objects in memory, visible once finished; every byte is copied in and out. Safe from several threads.

    Parameters
    ----------
    name
        For messages; ``resolve_location("memory://name/path")`` finds one store per name and process.
    capabilities
        What the store says of itself, and enforces: extent alignment and minimum, gaps, object size. Its ``create`` is
        always conditional, and it never offers blocking calls.

    Notes
    -----
    A cancelled operation has not happened: each yields to the event loop once, before it does anything.
    """

    def __init__(self, name: str = "", *, capabilities: Capabilities | None = None) -> None:
        stated = capabilities if capabilities is not None else Capabilities()
        self.name = name
        self._capabilities = msgspec.structs.replace(stated, blocking_io=False, conditional_create=True)
        self._objects: dict[str, _Stored] = {}
        self._open_paths: set[str] = set()
        self._lock = threading.Lock()
        self._generation = 0

    @property
    def url(self) -> str:
        return f"memory://{self.name}"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open_writer(self, path: str) -> ObjectWriter:
        object_parts(path)
        await checkpoint()
        with self._lock:
            if path in self._objects or path in self._open_paths:
                raise self._error(errno.EEXIST, "creating", path, "it is there already, by another writer")
            self._open_paths.add(path)
        return _MemoryWriter(self, path)

    async def open_reader(self, path: str) -> ObjectReader:
        return _MemoryReader(path, await self._stored("opening", path), self.url)

    async def get(self, path: str, *, maximum_bytes: int) -> bytes:
        data = await self._stored("reading", path)
        if len(data) > maximum_bytes:
            reason = f"it has {len(data)} bytes, more than the {maximum_bytes} allowed here"
            raise self._error(errno.EFBIG, "reading", path, reason)
        return data

    async def put(self, path: str, data: bytes) -> None:
        object_parts(path)
        self._check_size(path, len(data))
        await checkpoint()
        with self._lock:
            self._store(path, bytes(data))

    async def create(self, path: str, data: bytes, *, scratch: str) -> None:
        object_parts(path)
        object_parts(scratch)
        self._check_size(path, len(data))
        await checkpoint()
        with self._lock:
            present = self._objects.get(path)
            if present is None:
                self._store(path, bytes(data))
            elif present.data != data:
                raise self._error(errno.EEXIST, "creating", path, "it is there already, by another writer")

    async def replace(self, path: str, data: bytes, *, scratch: str, expected_etag: str | None) -> None:
        object_parts(path)
        object_parts(scratch)
        self._check_size(path, len(data))
        await checkpoint()
        with self._lock:
            present = self._objects.get(path)
            etag = present.etag if present is not None else "absent"
            if expected_etag is not None and etag != expected_etag:
                reason = f"another writer changed it meanwhile (etag {etag}, expected {expected_etag})"
                raise self._error(errno.EEXIST, "replacing", path, reason)
            self._store(path, bytes(data))

    async def head(self, path: str) -> ObjectInfo | None:
        object_parts(path)
        await checkpoint()
        with self._lock:
            present = self._objects.get(path)
        return None if present is None else present.describe(path)

    async def list_objects(self, prefix: str) -> list[ObjectInfo]:
        directory_parts(prefix)
        await checkpoint()
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            return [self._objects[path].describe(path) for path in sorted(self._objects) if path.startswith(start)]

    async def list_directories(self, prefix: str) -> list[str]:
        beneath = len(directory_parts(prefix))
        paths = [info.path.split("/") for info in await self.list_objects(prefix)]
        return sorted({parts[beneath] for parts in paths if len(parts) > beneath + 1})

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            object_parts(path)
        await checkpoint()
        with self._lock:
            for path in paths:
                self._objects.pop(path, None)

    async def _stored(self, operation: str, path: str) -> bytes:
        object_parts(path)
        await checkpoint()
        with self._lock:
            present = self._objects.get(path)
        if present is None:
            raise self._error(errno.ENOENT, operation, path, "there is no such object")
        return present.data

    def _store(self, path: str, data: bytes) -> None:
        self._generation += 1
        etag = f"{hashlib.blake2b(data, digest_size=8).hexdigest()}-{self._generation}"
        self._objects[path] = _Stored(data, etag, time.time())

    def _finish(self, path: str, data: bytes) -> None:
        with self._lock:
            self._open_paths.discard(path)
            if path in self._objects:
                raise self._error(errno.EEXIST, "finishing", path, "another writer put it there meanwhile")
            self._store(path, data)

    def _abandon(self, path: str) -> None:
        with self._lock:
            self._open_paths.discard(path)

    def _check_size(self, path: str, size_bytes: int) -> None:
        limit = self._capabilities.maximum_object_bytes
        if size_bytes > limit:
            raise self._error(errno.EFBIG, "writing", path, f"{size_bytes} bytes exceed the {limit} of an object here")

    def _error(self, number: int, operation: str, path: str, reason: str) -> StorageError:
        return StorageError(number, f"{operation} {self.url}/{path} failed: {reason}")


class _Stored(msgspec.Struct, frozen=True):
    data: bytes
    etag: str
    modified_seconds: float

    def describe(self, path: str) -> ObjectInfo:
        return ObjectInfo(path, len(self.data), self.modified_seconds, self.etag)


class _MemoryWriter(ObjectWriter):
    def __init__(self, backend: MemoryBackend, path: str) -> None:
        self.path = path
        self._backend = backend
        self._extents: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False

    async def write(self, offset: int, data: memoryview) -> None:
        await checkpoint()
        extent = bytes(data)
        with self._lock:
            self._check_open("writing")
            alignment = self._backend.capabilities.extent_alignment_bytes
            if offset < 0 or offset % alignment:
                raise self._error(errno.EINVAL, "writing", f"extents start at multiples of {alignment} bytes")
            self._backend._check_size(self.path, offset + len(extent))
            if extent:
                self._check_overlap(offset, len(extent))
                self._extents[offset] = extent

    async def finish(self, size_bytes: int) -> None:
        await checkpoint()
        with self._lock:
            self._check_open("finishing")
            self._check_extents(size_bytes)
            data = bytearray(size_bytes)
            for offset, extent in self._extents.items():
                kept = extent[: max(0, size_bytes - offset)]
                data[offset : offset + len(kept)] = kept
            self._backend._finish(self.path, bytes(data))
            self._closed = True

    async def abort(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._extents.clear()
                self._backend._abandon(self.path)

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise self._error(errno.EBADF, operation, "it is closed")

    def _check_overlap(self, offset: int, length: int) -> None:
        starts = sorted(self._extents)
        position = bisect.bisect_right(starts, offset)
        before = starts[position - 1] if position else None
        after = starts[position] if position < len(starts) else None
        if (before is not None and before + len(self._extents[before]) > offset) or (
            after is not None and offset + length > after
        ):
            reason = f"bytes {offset} to {offset + length} overlap an extent written before"
            raise self._error(errno.EINVAL, "writing", reason)

    def _check_extents(self, size_bytes: int) -> None:
        """Hold the writer to what a multipart upload would hold it to, where the capabilities say so."""
        stated = self._backend.capabilities
        self._backend._check_size(self.path, size_bytes)
        ordered = sorted((offset, len(extent)) for offset, extent in self._extents.items())
        for offset, length in ordered[:-1]:
            if length < stated.minimum_extent_bytes:
                reason = f"the extent at {offset} has {length} bytes, fewer than {stated.minimum_extent_bytes}"
                raise self._error(errno.EINVAL, "finishing", reason)
        if not stated.contiguous_extents:
            return
        end = 0
        for offset, length in ordered:
            if offset != end:
                raise self._error(errno.EINVAL, "finishing", f"bytes {end} to {offset} were never written")
            end = offset + length
        if end != size_bytes:
            raise self._error(errno.EINVAL, "finishing", f"its extents end at {end}, not at {size_bytes}")

    def _error(self, number: int, operation: str, reason: str) -> StorageError:
        return self._backend._error(number, operation, self.path, reason)


class _MemoryReader(ObjectReader):
    def __init__(self, path: str, data: bytes, url: str) -> None:
        self.path = path
        self.size_bytes = len(data)
        self._data: bytes | None = data
        self._url = url

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        await checkpoint()
        place = f"reading {buffer.nbytes} bytes at offset {offset} of {self._url}/{self.path} failed"
        if self._data is None:
            raise StorageError(errno.EBADF, f"{place}: it is closed")
        if offset < 0:
            raise StorageError(errno.EINVAL, f"{place}: the offset is negative")
        if offset + buffer.nbytes > self.size_bytes:
            raise StorageError(errno.EIO, f"{place}: it is truncated: it has only {self.size_bytes} bytes")
        buffer.cast("B")[:] = memoryview(self._data)[offset : offset + buffer.nbytes]

    async def close(self) -> None:
        self._data = None
