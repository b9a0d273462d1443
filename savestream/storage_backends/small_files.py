"""Small files read and written whole, through aiofiles."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

import aiofiles
import aiofiles.os

from savestream.storage_backends.directories import Directory, sync_descriptor
from savestream.storage_backends.file_tree import FileTree, Parts
from savestream.storage_backends.translation import translated
from savestream.threads import run_in_worker

__all__ = ["discard", "read_whole", "write_new"]

logger = logging.getLogger("savestream")


async def read_whole(tree: FileTree, parts: Parts, maximum_bytes: int) -> bytes:
    """Read a file; ``EFBIG`` before anything is read if it is longer than ``maximum_bytes``. Run it shielded."""
    size = 0

    def opener(_path: str, _flags: int) -> int:
        nonlocal size
        with tree.existing(parts[:-1]) as directory:
            descriptor = directory.open_file(parts[-1])
        size = os.fstat(descriptor).st_size
        if size > maximum_bytes:
            os.close(descriptor)
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than the {maximum_bytes} allowed here")
        return descriptor

    full_path = tree.full_path(parts)
    with translated("reading", full_path):
        async with aiofiles.open(full_path, "rb", opener=opener) as file:
            data = await file.read(size + 1)
        if len(data) != size:
            raise OSError(errno.EIO, f"it changed from {size} bytes while it was read")
        return data


async def write_new(tree: FileTree, parts: Parts, data: bytes) -> None:
    """Write and fsync a file that this writer alone knows, in directories made as needed. Run it shielded.

    One left there by an earlier attempt is removed first, never overwritten: it may be linked elsewhere. The
    directory is not synced. On failure nothing is left.
    """

    created = False

    def create(directory: Directory) -> int:
        nonlocal created
        with contextlib.suppress(FileNotFoundError):
            directory.unlink(parts[-1])
        descriptor = directory.create_file(parts[-1])
        created = True
        return descriptor

    full_path = tree.full_path(parts)
    with translated("writing", full_path):
        try:
            async with aiofiles.open(
                full_path,
                "xb",
                opener=lambda _path, _flags: tree.in_made_directory(parts[:-1], create),
            ) as file:
                await file.write(data)
                await file.flush()
                await aiofiles.os.wrap(sync_descriptor)(file.fileno())
        except BaseException:
            if created:
                await run_in_worker(discard, tree, parts)
            raise


def discard(tree: FileTree, parts: Parts) -> None:
    """Remove a private file. One that stays is garbage, and no reason to change the outcome of a commit."""
    try:
        with tree.existing(parts[:-1]) as directory:
            directory.unlink(parts[-1])
        tree.prune(parts[:-1], only_made_here=True)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("a scratch file stays behind: removing %s failed: %s", tree.full_path(parts), error)
