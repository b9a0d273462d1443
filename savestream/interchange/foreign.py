"""What all readers of foreign checkpoints share: the state they find, where files may lie, how errors name them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import msgspec

from savestream.arrays.file_sources import EndOfSourceError, FilePool
from savestream.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    StorageError,
    UnsafeObjectError,
    UsageError,
)
from savestream.interchange.decoded_items import DecodedPool

__all__ = ["ForeignFiles", "ForeignState", "OnUnsupported", "file_within", "local_path", "locating", "require_source"]

OnUnsupported: TypeAlias = Literal["raise", "skip"]


class ForeignState(msgspec.Struct):
    """A foreign checkpoint as a state to save.

    Attributes
    ----------
    state
        Containers whose arrays lie in the foreign files.
    metadata
        Plain data that the new checkpoint's manifest carries.
    skipped
        Keys that were left out, with the reason, where that was asked for.
    """

    state: Any
    metadata: object = None
    skipped: dict[str, str] = {}


class ForeignFiles:
    """The open files of a conversion, and the order to stop."""

    def __init__(self) -> None:
        self.pool = FilePool()
        self.decoded = DecodedPool()
        self.stop = threading.Event()

    def check_stop(self) -> None:
        """End a long reading that nobody waits for any more."""
        if self.stop.is_set():
            raise UsageError("the conversion was cancelled")

    def close(self) -> None:
        """Close everything, as soon as nobody reads any more."""
        try:
            self.decoded.close()
        finally:
            self.pool.close()


def local_path(source: str | os.PathLike[str]) -> str:
    """A foreign checkpoint's path, made absolute."""
    try:
        path = os.path.abspath(os.fspath(source))
    except TypeError:
        raise PlanError(f"src={source!r}: a foreign checkpoint is named by a local path") from None
    if not isinstance(path, str) or "\0" in path or not os.fspath(source):
        raise PlanError(f"src={source!r}: a foreign checkpoint is named by a local path")
    return path


def require_source(path: str) -> str:
    """The path again, if something is there."""
    if not os.path.exists(path):
        hint = "; only local files are read, so download it first" if ":/" in path else ""
        raise CheckpointNotFoundError(f"{path}: there is no such file or directory{hint}")
    return path


def file_within(directory: str, relative: str, *, follow_links: bool = False) -> str:
    """The path of a file that a foreign checkpoint names; it must not lead out of the directory.

    ``follow_links``: links may lead anywhere, as in caches that keep each file once.
    """
    parts = relative.replace("\\", "/").split("/")
    if os.path.isabs(relative) or ":" in parts[0] or "\0" in relative or {"", ".", ".."} & set(parts):
        raise CorruptCheckpointError(f"it names the file {relative[:200]!r}, which is not inside of {directory}")
    path = os.path.join(directory, relative)
    root = os.path.realpath(directory)
    if not follow_links and os.path.commonpath([root, os.path.realpath(path)]) != root:
        raise CorruptCheckpointError(f"it names the file {relative[:200]!r}, a link that leads out of {directory}")
    return path


@contextmanager
def locating(place: str) -> Iterator[None]:
    """Put the place in front of what the block has to complain about."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{place}: {error}") from error
    except UnsafeObjectError as error:
        raise UnsafeObjectError(f"{place}: {error}") from error
    except EndOfSourceError as error:
        raise CorruptCheckpointError(f"{place}: truncated; it ends at byte {error.end}") from error
    except OSError as error:
        reason = str(error) if isinstance(error, StorageError) else f"reading it failed: {error.strerror}"
        raise StorageError(error.errno, f"{place}: {reason}") from error
