"""The directories beneath one root: walked without following links, made durably, pruned when empty."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from savestream.storage_backends.base import ObjectInfo
from savestream.storage_backends.directories import Directory, etag_of, make_path

__all__ = ["FileTree", "Parts"]

Parts = tuple[str, ...]
Result = TypeVar("Result")

# A concurrent cleanup may remove a directory between its mkdir and its use, as often as it is lucky.
ATTEMPTS = 50
# Reasons why a directory stays: it is in use, it is a link or mount point, or it is not ours to remove.
DIRECTORY_STAYS = {
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENOENT,
    errno.EBUSY,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.EINVAL,
}


class FileTree:
    """Blocking directory operations beneath ``root``; safe from several threads.

    Parameters
    ----------
    root
        Absolute path; it may be a link, and need not exist yet. Nothing beneath it is reached through links.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._made: set[Parts] = set()
        self._made_lock = threading.Lock()

    def full_path(self, parts: Parts) -> str:
        """For messages."""
        return os.path.join(self.root, *parts)

    def existing(self, parts: Parts) -> Directory:
        """Open an existing directory; ``ENOENT`` where there is none, ``ELOOP`` where a link stands in the way."""
        try:
            return self._walk(parts)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "one of its parents is not a directory") from error

    def in_made_directory(self, parts: Parts, action: Callable[[Directory], Result]) -> Result:
        """Run ``action`` in a directory that is made, durably, where it is missing.

        ``action`` runs again where a concurrent cleanup removed the directory under its hands (``ENOENT``). On any
        other failure directories that were made and are empty go again.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self._make(parts) as directory:
                    return action(directory)
            except FileNotFoundError:
                if attempt == ATTEMPTS - 1:
                    raise
            except OSError:
                with contextlib.suppress(OSError):  # the error at hand is the one to report
                    self.prune(parts, only_made_here=True)
                raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def sync_chain(self, parts: Parts) -> None:
        """Make the entries of a directory, and of each directory from there up to the root, durable."""
        for depth in range(len(parts), -1, -1):
            with self.existing(parts[:depth]) as directory:
                directory.sync()

    def prune(self, parts: Parts, *, only_made_here: bool) -> None:
        """Remove a directory if it is empty, then its parents, up to and including the root.

        Parameters
        ----------
        only_made_here
            Leave directories that this object did not make.
        """
        for depth in range(len(parts), -1, -1):
            directory = parts[:depth]
            with self._made_lock:
                if only_made_here and directory not in self._made:
                    continue  # if it is there, its parent will not be empty
            try:
                self._remove_directory(directory)
            except OSError as error:
                if error.errno in DIRECTORY_STAYS:
                    return
                raise
            with self._made_lock:
                self._made.discard(directory)

    def describe(self, parts: Parts) -> ObjectInfo | None:
        """Describe a regular file, None where there is none."""
        try:
            with self.existing(parts[:-1]) as directory:
                status = directory.status(parts[-1])
        except FileNotFoundError:
            return None
        return _object_info("/".join(parts), status) if stat.S_ISREG(status.st_mode) else None

    def objects(self, prefix: Parts) -> list[ObjectInfo]:
        """All regular files beneath a directory, sorted by path; what vanishes meanwhile is left out."""
        found: list[ObjectInfo] = []
        waiting = [prefix]
        while waiting:
            parts = waiting.pop()
            try:
                with self.existing(parts) as directory:
                    for entry in directory.entries():
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((*parts, entry.name))
                        elif entry.is_file(follow_symlinks=False):
                            found.extend(_entry_info(directory, (*parts, entry.name)))
            except OSError as error:
                # A directory may vanish, or be swapped for a link, after its parent was read.
                if error.errno == errno.ENOENT or (error.errno == errno.ELOOP and parts != prefix):
                    continue
                raise
        return sorted(found, key=lambda info: info.path)

    def directories(self, prefix: Parts) -> list[str]:
        """Names of the directories directly in a directory, sorted."""
        try:
            with self.existing(prefix) as directory:
                return sorted(entry.name for entry in directory.entries() if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def remove_files(self, parts: Parts, names: Sequence[str]) -> None:
        """Remove files of one directory, durably; absent ones, and an absent directory, are fine."""
        try:
            with self.existing(parts) as directory:
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        directory.unlink(name)
                directory.sync()
        except FileNotFoundError:
            return

    def _walk(self, parts: Parts) -> Directory:
        directory = Directory.open(self.root)
        for name in parts:
            with directory:
                directory = directory.enter(name)
        return directory

    def _make(self, parts: Parts) -> Directory:
        directory = self._make_root()
        for depth, name in enumerate(parts, start=1):
            with directory:
                try:
                    directory = directory.enter(name)
                except FileNotFoundError:
                    self._make_entry(directory, name, parts[:depth])
                    directory = directory.enter(name)
        return directory

    def _make_root(self) -> Directory:
        try:
            return Directory.open(self.root)
        except FileNotFoundError:
            make_path(self.root)
            self._remember(
                (),
            )
            return Directory.open(self.root)

    def _make_entry(self, directory: Directory, name: str, parts: Parts) -> None:
        try:
            directory.make(name)
        except FileExistsError:
            pass
        else:
            self._remember(parts)
        # Also where another writer made it: its own sync may not have happened yet, and we are about to rely on it.
        directory.sync()

    def _remember(self, parts: Parts) -> None:
        with self._made_lock:
            self._made.add(parts)

    def _remove_directory(self, parts: Parts) -> None:
        if parts:
            with self.existing(parts[:-1]) as parent:
                parent.remove_directory(parts[-1])
                parent.sync()
            return
        os.rmdir(self.root)
        with Directory.open(os.path.dirname(self.root)) as parent:
            parent.sync()


def _object_info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path, status.st_size, status.st_mtime, etag_of(status))


def _entry_info(directory: Directory, parts: Parts) -> list[ObjectInfo]:
    # Not DirEntry.stat: on Windows it is cached by the listing and lacks the inode.
    try:
        status = directory.status(parts[-1])
    except FileNotFoundError:
        return []
    return [_object_info("/".join(parts), status)] if stat.S_ISREG(status.st_mode) else []
