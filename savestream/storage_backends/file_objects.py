"""Writers and readers of data objects that are files."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from savestream.errors import StorageError
from savestream.storage_backends.base import ObjectReader, ObjectWriter
from savestream.storage_backends.direct_io import ALIGNMENT_BYTES, DescriptorPair, read_range, write_extent
from savestream.storage_backends.directories import Directory, sync_descriptor
from savestream.storage_backends.file_tree import FileTree, Parts
from savestream.storage_backends.translation import translated
from savestream.threads import run_in_worker

__all__ = ["FileReader", "FileWriter"]

logger = logging.getLogger("savestream")

DIRECT = getattr(os, "O_DIRECT", 0)
# What file systems without direct I/O answer at open.
DIRECT_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class FileWriter(ObjectWriter):
    """Writes one new file by extents; made by :meth:`open`, in a worker thread."""

    def __init__(self, tree: FileTree, parts: Parts, pair: DescriptorPair) -> None:
        self.path = "/".join(parts)
        self._tree = tree
        self._parts = parts
        self._pair = pair
        self._full_path = tree.full_path(parts)
        status = os.fstat(pair.buffered)
        self._identity = (status.st_dev, status.st_ino)
        self._settled = False

    @classmethod
    def open(cls, tree: FileTree, parts: Parts) -> FileWriter:
        """Create the file and, where missing, its directories; ``EEXIST`` if it is there already."""
        with translated("creating", tree.full_path(parts)):
            pair = tree.in_made_directory(parts[:-1], lambda directory: _create_pair(directory, parts[-1]))
            return cls(tree, parts, pair)

    async def write(self, offset: int, data: memoryview) -> None:
        await run_in_worker(self.write_blocking, offset, data)

    def write_blocking(self, offset: int, data: memoryview) -> None:
        view = _as_bytes(data)
        with translated(f"writing {len(view)} bytes at offset {offset} of", self._full_path):
            if offset < 0 or offset % ALIGNMENT_BYTES:
                raise OSError(errno.EINVAL, f"extents start at multiples of {ALIGNMENT_BYTES} bytes")
            with self._pair.in_use():
                write_extent(self._pair, offset, view)

    async def finish(self, size_bytes: int) -> None:
        await run_in_worker(self._finish_blocking, size_bytes)

    async def abort(self) -> None:
        await run_in_worker(self._abort_blocking)

    def _finish_blocking(self, size_bytes: int) -> None:
        with translated(f"making {size_bytes} bytes durable in", self._full_path):
            try:
                with self._pair.in_use():
                    os.ftruncate(self._pair.buffered, size_bytes)
                    # After a failed fsync the kernel forgets which pages were lost; trying again would lie.
                    sync_descriptor(self._pair.buffered)
            finally:
                self._pair.close()
            with self._tree.existing(self._parts[:-1]) as directory:
                directory.sync()
            self._settled = True

    def _abort_blocking(self) -> None:
        self._pair.close()
        if self._settled:
            return
        self._settled = True
        try:
            with self._tree.existing(self._parts[:-1]) as directory:
                status = directory.status(self._parts[-1])
                # Somebody may have removed our file and put another in its place.
                if (status.st_dev, status.st_ino) == self._identity:
                    directory.unlink(self._parts[-1])
            self._tree.prune(self._parts[:-1], only_made_here=True)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("an unfinished object stays behind: removing %s failed: %s", self._full_path, error)


class FileReader(ObjectReader):
    """Reads ranges of one file; made by :meth:`open`, in a worker thread. Needs no write access."""

    def __init__(self, path: str, full_path: str, pair: DescriptorPair) -> None:
        self.path = path
        self.size_bytes = os.fstat(pair.buffered).st_size
        self._full_path = full_path
        self._pair = pair

    @classmethod
    def open(cls, tree: FileTree, parts: Parts) -> FileReader:
        full_path = tree.full_path(parts)
        with translated("opening", full_path), tree.existing(parts[:-1]) as directory:
            return cls("/".join(parts), full_path, _open_pair(directory, parts[-1]))

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        await run_in_worker(self.read_into_blocking, offset, buffer)

    def read_into_blocking(self, offset: int, buffer: memoryview) -> None:
        view = _as_bytes(buffer)
        with translated(f"reading {len(view)} bytes at offset {offset} of", self._full_path):
            if offset < 0:
                raise OSError(errno.EINVAL, "the offset is negative")
            with self._pair.in_use():
                if offset + len(view) > self.size_bytes:
                    raise OSError(errno.EIO, f"it is truncated: it has only {self.size_bytes} bytes")
                read_range(self._pair, offset, view)

    async def close(self) -> None:
        await run_in_worker(self._pair.close)


def _as_bytes(view: memoryview) -> memoryview:
    try:
        return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")
    except TypeError as error:
        raise StorageError(errno.EINVAL, f"storage moves C-contiguous memory only: {error}") from error


def _create_pair(directory: Directory, name: str) -> DescriptorPair:
    buffered = directory.create_file(name)
    try:
        return DescriptorPair(buffered, _direct(buffered, lambda flags: directory.open_to_write(name, flags)))
    except BaseException:
        os.close(buffered)
        directory.unlink(name)
        raise


def _open_pair(directory: Directory, name: str) -> DescriptorPair:
    buffered = directory.open_file(name)
    try:
        return DescriptorPair(buffered, _direct(buffered, lambda flags: directory.open_file(name, flags)))
    except BaseException:
        os.close(buffered)
        raise


def _direct(buffered: int, reopen: Callable[[int], int]) -> int | None:
    """Open the same file once more for direct I/O; None where the system or the file system has none."""
    if not DIRECT:
        return None
    try:
        direct = reopen(DIRECT)
    except OSError as error:
        if error.errno in DIRECT_REFUSED:
            return None
        raise
    if os.path.sameopenfile(direct, buffered):
        return direct
    os.close(direct)  # the name was given to another file in between; the first descriptor is the one that counts
    return None
