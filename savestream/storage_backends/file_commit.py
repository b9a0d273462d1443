"""Making a small file appear atomically and durably: the commit. docs/design/0002 lists each step and failure."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import Literal

from savestream.errors import StorageError
from savestream.storage_backends.directories import Directory, etag_of
from savestream.storage_backends.file_tree import FileTree, Parts
from savestream.storage_backends.small_files import discard, write_new
from savestream.storage_backends.translation import storage_error, translated
from savestream.threads import run_in_worker

__all__ = ["FileCommitter"]

logger = logging.getLogger("savestream")

LINK_REFUSED = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

Found = Literal["absent", "ours", "other"]


class FileCommitter:
    """Creates and replaces whole files in one tree. Its coroutines run shielded by their caller.

    Attributes
    ----------
    links_refused
        Whether this file system has refused a hard link, so that :meth:`create` keeps only the weaker promise.
    """

    def __init__(self, tree: FileTree) -> None:
        self.links_refused = False
        self._tree = tree
        self._warn_lock = threading.Lock()
        # For threads of this process where directories cannot be locked.
        self._exchange_lock = threading.Lock()

    async def put(self, parts: Parts, data: bytes) -> None:
        """Write a file under a private name and move it into place: readers find the old or the new one, whole."""
        private = (*parts[:-1], f".{parts[-1]}.{os.urandom(8).hex()}.tmp")
        await write_new(self._tree, private, data)
        await run_in_worker(self._put_in_place, private, parts)

    async def create(self, parts: Parts, data: bytes, scratch: Parts) -> None:
        """Make a file appear unless one is there (``EEXIST``); one with the same content is our own."""
        await write_new(self._tree, scratch, data)
        await run_in_worker(self._publish_new, parts, data, scratch)

    async def replace(self, parts: Parts, data: bytes, scratch: Parts, expected_etag: str | None) -> None:
        """Make a file appear, replacing one whose etag is ``expected_etag`` (None: any, or none)."""
        await write_new(self._tree, scratch, data)
        await run_in_worker(self._publish_replacement, parts, data, scratch, expected_etag)

    def _put_in_place(self, private: Parts, parts: Parts) -> None:
        try:
            with translated("writing", self._tree.full_path(parts)), self._tree.existing(parts[:-1]) as directory:
                directory.move(private[-1], directory, parts[-1], replace=True)
                directory.sync()
        except BaseException:
            discard(self._tree, private)
            raise

    def _publish_new(self, parts: Parts, data: bytes, scratch: Parts) -> None:
        full_path = self._tree.full_path(parts)
        try:
            with translated("creating", full_path):
                self._tree.sync_chain(scratch[:-1])
                self._tree.in_made_directory(
                    parts[:-1], lambda directory: self._create_in(directory, parts, data, scratch)
                )
        finally:
            discard(self._tree, scratch)

    def _create_in(self, directory: Directory, parts: Parts, data: bytes, scratch: Parts) -> None:
        """From here on a failure may leave the file visible: what is there decides, not the error."""
        if scratch[: len(parts) - 1] != parts[:-1]:
            self._tree.sync_chain(parts[:-1])
        with self._tree.existing(scratch[:-1]) as source:
            try:
                source.link(scratch[-1], directory, parts[-1])
            except OSError as error:
                if error.errno in LINK_REFUSED:
                    self._create_without_link(source, directory, parts, data, scratch)
                else:
                    self._settle(error, directory, parts, data)
        self._sync_published(directory, parts)

    def _create_without_link(
        self, source: Directory, directory: Directory, parts: Parts, data: bytes, scratch: Parts
    ) -> None:
        self._warn_about_links()
        with self._exchange_lock, directory.locked():
            found = self._find(directory, parts, data)
            if found == "other":
                raise self._exists(parts)
            if found == "absent":
                self._move(source, directory, parts, data, scratch, replace=False)

    def _publish_replacement(self, parts: Parts, data: bytes, scratch: Parts, expected_etag: str | None) -> None:
        full_path = self._tree.full_path(parts)

        def replace_in(directory: Directory) -> None:
            if scratch[: len(parts) - 1] != parts[:-1]:
                self._tree.sync_chain(parts[:-1])
            with self._tree.existing(scratch[:-1]) as source, self._exchange_lock, directory.locked():
                self._check_etag(directory, parts, expected_etag)
                self._move(source, directory, parts, data, scratch, replace=True)
            self._sync_published(directory, parts)

        try:
            with translated("replacing", full_path):
                self._tree.sync_chain(scratch[:-1])
                self._tree.in_made_directory(parts[:-1], replace_in)
        finally:
            discard(self._tree, scratch)

    def _check_etag(self, directory: Directory, parts: Parts, expected_etag: str | None) -> None:
        if expected_etag is None:
            return
        try:
            etag = etag_of(directory.status(parts[-1]))
        except FileNotFoundError:
            etag = "absent"
        if etag != expected_etag:
            raise StorageError(
                errno.EEXIST,
                f"replacing {self._tree.full_path(parts)} refused: another writer changed it meanwhile "
                f"(etag {etag}, expected {expected_etag})",
            )

    def _move(
        self, source: Directory, directory: Directory, parts: Parts, data: bytes, scratch: Parts, *, replace: bool
    ) -> None:
        try:
            source.move(scratch[-1], directory, parts[-1], replace=replace)
        except OSError as error:
            self._settle(error, directory, parts, data)

    def _settle(self, error: OSError, directory: Directory, parts: Parts, data: bytes) -> None:
        """Return if our file is there in spite of ``error`` (a repeated request of a network file system)."""
        found = self._find(directory, parts, data)
        if found == "other" and error.errno == errno.EEXIST:
            raise self._exists(parts) from error
        if found != "ours":
            raise error

    def _find(self, directory: Directory, parts: Parts, data: bytes) -> Found:
        """What stands in the file's place. Where that cannot be learnt the outcome is unknown."""
        try:
            descriptor = directory.open_file(parts[-1])
        except FileNotFoundError:
            return "absent"
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.EINVAL):
                return "other"
            raise self._unknown(error, parts) from error
        try:
            with os.fdopen(descriptor, "rb") as file:
                return "ours" if file.read(len(data) + 1) == data else "other"
        except OSError as error:
            raise self._unknown(error, parts) from error

    def _sync_published(self, directory: Directory, parts: Parts) -> None:
        try:
            directory.sync()
        except OSError as error:
            raise self._unknown(error, parts) from error

    def _exists(self, parts: Parts) -> StorageError:
        return StorageError(
            errno.EEXIST, f"creating {self._tree.full_path(parts)} refused: it is there already, by another writer"
        )

    def _unknown(self, error: OSError, parts: Parts) -> StorageError:
        return storage_error(error, "publishing", self._tree.full_path(parts), "unknown")

    def _warn_about_links(self) -> None:
        with self._warn_lock:
            already, self.links_refused = self.links_refused, True
        if not already:
            logger.warning(
                "%s is on a file system without hard links: two savers racing for one checkpoint from different "
                "machines may both be told that they won; give each save its own place",
                self._tree.root,
            )
