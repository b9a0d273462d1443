"""Objects as files beneath a directory."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from savestream.storage_backends.base import Capabilities, ObjectInfo, ObjectReader, ObjectWriter, StorageBackend
from savestream.storage_backends.direct_io import ALIGNMENT_BYTES
from savestream.storage_backends.file_commit import FileCommitter
from savestream.storage_backends.file_objects import FileReader, FileWriter
from savestream.storage_backends.file_tree import FileTree, Parts
from savestream.storage_backends.paths import directory_parts, object_parts
from savestream.storage_backends.small_files import read_whole
from savestream.storage_backends.translation import translated
from savestream.threads import run_in_worker, run_shielded

__all__ = ["FileBackend"]

Result = TypeVar("Result")
Opened = TypeVar("Opened", FileReader, FileWriter)


class FileBackend(StorageBackend):
    """Objects as files beneath ``root``, in files that other users may read as the umask allows.

    Parameters
    ----------
    root
        A directory, made absolute at once. It may be a symbolic link and need not exist yet; beneath it links are
        never followed.

    Notes
    -----
    Data objects are written and read past the page cache where the system allows (``O_DIRECT``). What has been
    finished, put, created or replaced survives a power failure: files are fsynced, and so are the directories that
    name them. ``create`` has one winner wherever the file system has hard links; :attr:`links_refused` tells
    whether it turned out to have none. Reading needs no write access.

    Every coroutine waits for its worker thread when it is cancelled, so no descriptor stays open and nothing is
    written later; the operation has then either run to its end or not begun.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._tree = FileTree(str(pathlib.Path(root).absolute()))
        self._committer = FileCommitter(self._tree)

    @property
    def root(self) -> str:
        """The absolute path of the root."""
        return self._tree.root

    @property
    def url(self) -> str:
        return pathlib.Path(self._tree.root).as_uri()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            extent_alignment_bytes=ALIGNMENT_BYTES, blocking_io=True, write_concurrency=3, read_concurrency=4
        )

    @property
    def links_refused(self) -> bool:
        """Whether a hard link has been refused here, so that racing creates may have two winners.

        Known only after the first ``create``; racing processes of one machine are still kept apart by a lock.
        """
        return self._committer.links_refused

    async def open_writer(self, path: str) -> ObjectWriter:
        return await _open(FileWriter.open, self._tree, object_parts(path), FileWriter.abort)

    async def open_reader(self, path: str) -> ObjectReader:
        return await _open(FileReader.open, self._tree, object_parts(path), FileReader.close)

    async def get(self, path: str, *, maximum_bytes: int) -> bytes:
        parts = object_parts(path)
        return await run_shielded(lambda: read_whole(self._tree, parts, maximum_bytes))

    async def put(self, path: str, data: bytes) -> None:
        parts = object_parts(path)
        await run_shielded(lambda: self._committer.put(parts, data))

    async def create(self, path: str, data: bytes, *, scratch: str) -> None:
        parts, scratch_parts = object_parts(path), object_parts(scratch)
        await run_shielded(lambda: self._committer.create(parts, data, scratch_parts))

    async def replace(self, path: str, data: bytes, *, scratch: str, expected_etag: str | None) -> None:
        parts, scratch_parts = object_parts(path), object_parts(scratch)
        await run_shielded(lambda: self._committer.replace(parts, data, scratch_parts, expected_etag))

    async def head(self, path: str) -> ObjectInfo | None:
        return await self._in_worker("describing", self._tree.describe, object_parts(path))

    async def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return await self._in_worker("listing", self._tree.objects, directory_parts(prefix))

    async def list_directories(self, prefix: str) -> list[str]:
        return await self._in_worker("listing", self._tree.directories, directory_parts(prefix))

    async def delete(self, paths: Sequence[str]) -> None:
        by_directory: dict[Parts, list[str]] = {}
        for path in paths:
            parts = object_parts(path)
            by_directory.setdefault(parts[:-1], []).append(parts[-1])
        await run_in_worker(self._delete_blocking, by_directory)

    def _delete_blocking(self, by_directory: dict[Parts, list[str]]) -> None:
        for directory, names in by_directory.items():
            with translated("deleting from", self._tree.full_path(directory)):
                self._tree.remove_files(directory, names)
        # Deepest first, so that a parent is looked at when its children are gone.
        for directory in sorted(by_directory, key=len, reverse=True):
            with translated("removing", self._tree.full_path(directory)):
                self._tree.prune(directory, only_made_here=False)

    async def _in_worker(self, operation: str, function: Callable[[Parts], Result], parts: Parts) -> Result:
        def call() -> Result:
            with translated(operation, self._tree.full_path(parts)):
                return function(parts)

        return await run_in_worker(call)


async def _open(
    function: Callable[[FileTree, Parts], Opened],
    tree: FileTree,
    parts: Parts,
    discard: Callable[[Opened], Awaitable[None]],
) -> Opened:
    """Open in a worker thread; what it opened for a caller that was cancelled meanwhile is released again."""
    opened: list[Opened] = []
    try:
        await run_in_worker(lambda: opened.append(function(tree, parts)))
    except BaseException:
        for leftover in opened:
            await discard(leftover)
        raise
    return opened[0]
