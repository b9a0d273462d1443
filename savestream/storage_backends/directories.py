"""Handles of directories: every operation is relative to one, so that no link can be put in its way.

Where the operating system lacks ``dir_fd`` (Windows) a handle is a path, and links are refused by looking first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

__all__ = ["Directory", "etag_of", "make_path", "sync_descriptor"]

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
BINARY = getattr(os, "O_BINARY", 0)
# A named pipe in an object's place must not block the opening thread; regular files ignore the flag.
NON_BLOCKING = getattr(os, "O_NONBLOCK", 0)
DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
USE_DESCRIPTORS = hasattr(os, "O_DIRECTORY") and (
    {os.open, os.mkdir, os.unlink, os.rmdir, os.stat, os.link, os.rename} <= os.supports_dir_fd
)
LOCK_PATIENCE_SECONDS = 2.0
LOCK_POLL_SECONDS = 0.01


def sync_descriptor(descriptor: int) -> None:
    """Make what was written to ``descriptor`` durable, past the drive's own cache where the system can."""
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            # Network file systems know only fsync; any other failure is final.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def etag_of(status: os.stat_result) -> str:
    """A text that changes whenever a file is replaced or rewritten."""
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


class Directory:
    """One open directory; entries are named by a single path part. Close it, or use it as a context manager.

    Attributes
    ----------
    path
        Where it was when it was opened, for messages (and for access where there is no ``dir_fd``).
    descriptor
        Its file descriptor, or None where the system has none for directories.
    """

    def __init__(self, path: str, descriptor: int | None) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: str) -> Directory:
        """Open the directory at ``path``, which may be a link."""
        if USE_DESCRIPTORS:
            return cls(path, os.open(path, DIRECTORY_FLAGS))
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return cls(path, None)

    def enter(self, name: str) -> Directory:
        """Open a directory in this one; a link is refused (``ELOOP``)."""
        path = os.path.join(self.path, name)
        if self.descriptor is not None:
            try:
                return Directory(path, os.open(name, DIRECTORY_FLAGS | NO_FOLLOW, dir_fd=self.descriptor))
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):
                    self._refuse_link(name)
                raise
        self._refuse_link(name)
        return Directory.open(path)

    def make(self, name: str) -> None:
        """Make a directory, with the mode that the umask leaves."""
        os.mkdir(self._at(name), 0o777, dir_fd=self.descriptor)

    def open_file(self, name: str, extra_flags: int = 0) -> int:
        """Open an existing regular file to read; ``ELOOP`` for a link, ``EINVAL`` or ``EISDIR`` for anything else."""
        if not NO_FOLLOW:
            self._refuse_link(name)
        try:
            descriptor = os.open(
                self._at(name), os.O_RDONLY | NO_FOLLOW | NON_BLOCKING | BINARY | extra_flags, dir_fd=self.descriptor
            )
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                self._refuse_link(name)
            raise
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "it is not a regular file")

    def create_file(self, name: str) -> int:
        """Create a file to write, with the mode that the umask leaves; ``EEXIST`` if anything has that name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | BINARY
        return os.open(self._at(name), flags, 0o666, dir_fd=self.descriptor)

    def open_to_write(self, name: str, extra_flags: int) -> int:
        """Open a file that :meth:`create_file` has made once more."""
        return os.open(self._at(name), os.O_WRONLY | NO_FOLLOW | BINARY | extra_flags, dir_fd=self.descriptor)

    def status(self, name: str) -> os.stat_result:
        """Describe an entry, a link as itself."""
        return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self.descriptor)

    def link(self, name: str, target: Directory, target_name: str) -> None:
        """Give the file ``name`` a second name in ``target``, unless something has that name (``EEXIST``)."""
        follow = os.link not in os.supports_follow_symlinks
        os.link(
            self._at(name),
            target._at(target_name),
            src_dir_fd=self.descriptor,
            dst_dir_fd=target.descriptor,
            follow_symlinks=follow,
        )

    def move(self, name: str, target: Directory, target_name: str, *, replace: bool) -> None:
        """Move the file ``name``; with ``replace=False`` Windows refuses an existing target, POSIX replaces it."""
        call = os.replace if replace else os.rename
        call(self._at(name), target._at(target_name), src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def entries(self) -> list[os.DirEntry[str]]:
        """What is in it now; use the entries before this handle is closed."""
        with os.scandir(self.path if self.descriptor is None else self.descriptor) as found:
            return list(found)

    def sync(self) -> None:
        """Make its entries durable."""
        if self.descriptor is not None:
            sync_descriptor(self.descriptor)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other holders of this lock out, as well as the file system can.

        An advisory lock: it ends with its process, and whoever cannot have it within two seconds goes on without.
        """
        if sys.platform == "win32" or self.descriptor is None:
            yield
            return
        import fcntl

        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        held = False
        while not held and time.monotonic() < deadline:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
            except OSError:  # no such locks on this file system: the promise is best effort there
                break
        try:
            yield
        finally:
            if held:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close it; harmless twice."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else os.path.join(self.path, name)

    def _refuse_link(self, name: str) -> None:
        try:
            is_link = stat.S_ISLNK(self.status(name).st_mode)
        except FileNotFoundError:
            return
        if is_link:
            raise OSError(
                errno.ELOOP,
                f"{os.path.join(self.path, name)} is a symbolic link, and links beneath the root are not followed",
            )


def make_path(path: str) -> None:
    """Make the directory ``path`` and its missing parents, each durable in its parent; existing ones are fine."""
    parent = os.path.dirname(path)
    try:
        os.mkdir(path, 0o777)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if parent == path:
            raise
        make_path(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o777)
    with Directory.open(parent) as opened:
        opened.sync()
