"""One translation of the operating system's errors: errno kept, operation, object and cure named."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Literal

from savestream.errors import StorageError

__all__ = ["storage_error", "translated"]

PERMISSION_CURE = "check owner and permissions, or choose another place"
CURES = {
    errno.ENOSPC: "free space there or choose another place",
    errno.EDQUOT: "the quota is used up: free space or raise it",
    errno.EROFS: "it is mounted read-only: choose another place",
    errno.EACCES: PERMISSION_CURE,
    errno.EPERM: PERMISSION_CURE,
    errno.EMFILE: "raise this process's limit of open descriptors (ulimit -n)",
    errno.ENFILE: "the system has too many open files",
    errno.EFBIG: "the size limit is reached (ulimit -f, or the file system's maximum)",
}


def storage_error(
    error: OSError, operation: str, place: str, outcome: Literal["failed", "unknown"] = "failed"
) -> StorageError:
    """Describe ``error`` as a StorageError with the same ``errno``."""
    reason = error.strerror or (os.strerror(error.errno) if error.errno is not None else str(error))
    cure = CURES.get(error.errno) if error.errno is not None else None
    named = "" if error.filename is None or str(error.filename) in place else f" ({error.filename!r})"
    message = f"{operation} {place} failed: {reason}{named}"
    if cure is not None:
        message += f"; {cure}"
    if outcome == "unknown":
        message += "; it may or may not have become visible: look again before saving to the same place"
    return StorageError(error.errno, message, outcome)


@contextlib.contextmanager
def translated(operation: str, place: str, outcome: Literal["failed", "unknown"] = "failed") -> Iterator[None]:
    """Turn an OSError of the body into a StorageError; one that is a StorageError already passes."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, operation, place, outcome) from error
