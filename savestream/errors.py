"""The exception tree.

Every error that savestream raises on purpose derives from :class:`SavestreamError`. Classes are named for
what the caller can do about them, and inherit from the builtin that callers already catch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CoordinationError",
    "CorruptCheckpointError",
    "LoadMismatchError",
    "PlanError",
    "SaveTimeoutError",
    "SavestreamError",
    "StorageError",
    "UnsafeObjectError",
    "UnsupportedFormatError",
    "UsageError",
]


class SavestreamError(Exception):
    """Base of every error that savestream raises on purpose."""


class PlanError(SavestreamError, ValueError):
    """The state, the plan or an option is invalid; nothing has been written."""


class SaveTimeoutError(SavestreamError, TimeoutError):
    """The save took longer than ``SaveOptions(timeout_seconds=)``; nothing became visible."""


class UsageError(SavestreamError, RuntimeError):
    """The call cannot work from here: after a fork, inside a running loop, under trio, after a close."""


class UnsafeObjectError(SavestreamError, TypeError):
    """A leaf can be stored or rebuilt only by executing code, and nobody opted in; the message names its key."""


class UnsupportedFormatError(SavestreamError):
    """The checkpoint needs a newer savestream: its format version or a required feature is unknown here."""


class CorruptCheckpointError(SavestreamError):
    """Stored bytes differ from what was written, or the manifest contradicts itself or the objects it names.

    Parameters
    ----------
    message
        What is damaged: object, byte range and keys.
    problems
        One line for each damage found; a load stops at the first, ``verify`` collects all.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(problems))
        self.message = message
        self.problems = tuple(problems) or (message,)

    def __str__(self) -> str:
        return self.message


class LoadMismatchError(SavestreamError, ValueError):
    """Checkpoint and request differ; all differences are listed, and no target has been touched.

    Attributes
    ----------
    missing
        Keys that the target (or ``keys``) asks for and the checkpoint lacks.
    unexpected
        Keys that the checkpoint holds and the target lacks.
    shape_mismatches, dtype_mismatches
        One line for each key whose shape or dtype differs.
    problems
        Other reasons why a target cannot be filled: read-only, self-overlapping, tied differently.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shape_mismatches: Sequence[str] = (),
        dtype_mismatches: Sequence[str] = (),
        problems: Sequence[str] = (),
        source: str = "the checkpoint",
    ) -> None:
        super().__init__(source)
        self.source = source
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.shape_mismatches = tuple(shape_mismatches)
        self.dtype_mismatches = tuple(dtype_mismatches)
        self.problems = tuple(problems)
        self.hint = ""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_mismatch, (dict(self.__dict__),))

    def __str__(self) -> str:
        cures = {
            "missing from the checkpoint (strict=False leaves them as they are)": self.missing,
            "in the checkpoint but not in the target (strict=False ignores them)": self.unexpected,
            "of another shape": self.shape_mismatches,
            "of another dtype (cast=True converts)": self.dtype_mismatches,
            "unusable as a target": self.problems,
        }
        parts = [f"{len(found)} {cure}: {_listed(found)}" for cure, found in cures.items() if found]
        return f"{self.source} does not match what was asked for; " + "; ".join(parts) + self.hint


def _listed(entries: Sequence[str], limit: int = 40) -> str:
    shown = ", ".join(entries[:limit])
    return shown if len(entries) <= limit else f"{shown}, ... and {len(entries) - limit} more"


def _rebuild_mismatch(fields: dict[str, object]) -> LoadMismatchError:
    error = LoadMismatchError()
    error.__dict__.update(fields)
    return error


class CheckpointNotFoundError(SavestreamError, FileNotFoundError):
    """There is no committed checkpoint at that place; the message says whether an unfinished save is."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "checkpoint not found"


class CheckpointExistsError(SavestreamError, FileExistsError):
    """A committed checkpoint is already at the destination; ``overwrite=True`` replaces it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "checkpoint exists"


class StorageError(SavestreamError, OSError):
    """Storage refused or failed an operation; ``errno`` is kept.

    Parameters
    ----------
    error_number
        The operating system's ``errno``, or None where the storage has none.
    message
        Operation, object and cause.
    outcome
        ``"failed"``: nothing became visible. ``"unknown"``: the commit was sent and its result could not be
        learnt; look again before saving to the same place.
    """

    def __init__(
        self,
        error_number: int | None,
        message: str,
        outcome: Literal["failed", "unknown"] = "failed",
    ) -> None:
        super().__init__(error_number, message)
        self.message = message
        self.outcome = outcome

    def __reduce__(self) -> tuple[object, ...]:
        return (StorageError, (self.errno, self.message, self.outcome))

    def __str__(self) -> str:
        return self.message


class CoordinationError(SavestreamError):
    """A rank failed, disagreed or stayed silent; the message names it and the phase."""
