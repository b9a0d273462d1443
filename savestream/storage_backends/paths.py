"""Object paths: relative, slash-separated, unable to name anything outside their root."""

from __future__ import annotations

import errno
import os

from savestream.errors import StorageError

__all__ = ["directory_parts", "object_parts"]

# On Windows these would be separators, drive letters or alternate streams.
WINDOWS_REFUSED = "\\:"


def object_parts(path: str) -> tuple[str, ...]:
    """Split an object's path into its parts, refusing every form that could leave the root.

    Parameters
    ----------
    path
        Relative path, parts separated by ``/``.

    Returns
    -------
    tuple of str
        At least one part.

    Raises
    ------
    StorageError
        ``EINVAL`` for an empty or absolute path, an empty, ``.`` or ``..`` part, a NUL byte, and on Windows a
        backslash or colon.
    """
    if not isinstance(path, str) or not path:
        raise _refused(path, "it is empty or no text")
    if path.startswith("/"):
        raise _refused(path, "it is absolute")
    parts = tuple(path.split("/"))
    for part in parts:
        if part in ("", ".", ".."):
            raise _refused(path, f"it has the part {part!r}")
        if "\0" in part:
            raise _refused(path, "it holds a NUL byte")
        if os.name == "nt" and any(character in part for character in WINDOWS_REFUSED):
            raise _refused(path, "it holds a backslash or a colon")
    return parts


def directory_parts(prefix: str) -> tuple[str, ...]:
    """Like :func:`object_parts`, for a directory: ``""`` is the root itself."""
    return object_parts(prefix) if prefix != "" else ()


def _refused(path: object, reason: str) -> StorageError:
    return StorageError(
        errno.EINVAL, f"object path {path!r} refused: {reason}; paths are relative to the root, like 'a/b.bin'"
    )
