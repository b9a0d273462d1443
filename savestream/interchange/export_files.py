"""Files that appear whole or not at all: written under names of their own, made durable, then given their names."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Sequence

from savestream.errors import CheckpointExistsError
from savestream.storage_backends.translation import translated

__all__ = ["ExportDirectory", "ScratchFile", "require_absent"]

# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class ScratchFile:
    """A file under a private name. Writes at offsets, from any thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        with translated("creating", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(path, flags, 0o666)
        self._is_open = True

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``."""
        done = 0
        with translated(f"writing {len(data)} bytes at offset {offset} of", self.path):
            while done < len(data):
                count = os.pwrite(self._descriptor, data[done:], offset + done)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                done += count

    def finish(self) -> None:
        """Make it durable."""
        with translated("making durable", self.path):
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close it; harmless twice."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


class ExportDirectory:
    """The directory of an export, and the files that were begun in it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._token = secrets.token_hex(8)
        self._scratch: dict[str, ScratchFile] = {}
        self._made_from: str | None = None

    def path(self, name: str) -> str:
        """The path of a file in the directory."""
        return os.path.join(self._directory, name)

    def prepare(self) -> None:
        """Make the directory where it is missing."""
        place = self._directory
        while not os.path.lexists(place):
            self._made_from, place = place, os.path.dirname(place)
        with translated("creating", self._directory):
            os.makedirs(self._directory, exist_ok=True)

    def begin(self, name: str) -> ScratchFile:
        """A file that is to have that name."""
        scratch = self._scratch[name] = ScratchFile(self.path(f".{name}.{self._token}.tmp"))
        return scratch

    def put(self, name: str, data: bytes) -> None:
        """A small file, written and durable, still without its name."""
        scratch = self.begin(name)
        scratch.write(0, memoryview(data))
        scratch.finish()

    def publish(self, names: Sequence[str], *, overwrite: bool) -> None:
        """Give the files their names, in this order; those already given are taken back where that fails."""
        given: list[str] = []
        try:
            for name in names:
                self._rename(name, overwrite)
                given.append(name)
            self.sync()
        except BaseException:
            if not overwrite:
                self.remove(given)
            raise

    def _rename(self, name: str, overwrite: bool) -> None:
        scratch, path = self._scratch[name].path, self.path(name)
        with translated("publishing", path):
            if overwrite:
                os.replace(scratch, path)
                return
            if _rename_to_new(scratch, path):
                return
        raise CheckpointExistsError(f"{path}: it appeared meanwhile; export elsewhere, or pass overwrite=True")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of these names; absent ones are fine."""
        for name in names:
            with translated("removing", self.path(name)), contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(name))

    def sync(self) -> None:
        """Make the names durable, and those of directories that were made."""
        place = self._directory
        top = os.path.dirname(self._made_from) if self._made_from is not None else place
        while True:
            with translated("making durable", place):
                descriptor = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            if place in (top, os.path.dirname(place)):
                return
            place = os.path.dirname(place)

    def clean_up(self) -> None:
        """Close and remove whatever has not got its name, and directories that were made and are empty."""
        for scratch in self._scratch.values():
            scratch.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch.path)
        place = self._directory
        while self._made_from is not None and len(place) >= len(self._made_from):
            try:
                os.rmdir(place)
            except OSError:  # it holds what was exported, or what somebody else has put there
                return
            place = os.path.dirname(place)


def _rename_to_new(source: str, target: str) -> bool:
    """Rename, unless something has that name: then False. Without hard links others could still come in between."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            return False
        os.rename(source, target)
    else:
        os.unlink(source)
    return True


def require_absent(directory: str, names: Iterable[str]) -> None:
    """Refuse to touch files that are there."""
    for name in names:
        path = os.path.join(directory, name)
        if os.path.lexists(path):
            raise CheckpointExistsError(f"{path}: it is already there; export elsewhere, or pass overwrite=True")
