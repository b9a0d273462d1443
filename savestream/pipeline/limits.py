"""What a manifest may hold: one set of limits that the writer enforces and the reader checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from savestream.errors import CorruptCheckpointError, PlanError

__all__ = [
    "DIGEST_BYTES",
    "MAXIMUM_COLUMN_ROWS",
    "MAXIMUM_DEPTH",
    "MAXIMUM_DIMENSIONS",
    "MAXIMUM_FRAME_BYTES",
    "MAXIMUM_INTEGER_DIGITS",
    "MAXIMUM_JSON_NESTING",
    "MAXIMUM_ROOT_BYTES",
    "MAXIMUM_SPLIT_DIMENSIONS",
    "MAXIMUM_TABLE_ROWS",
    "MAXIMUM_TENSOR_BYTES",
    "MAXIMUM_WINDOW_BYTES",
    "FormatViolation",
    "violations_are_corruption",
    "violations_are_plan_errors",
]

DIGEST_BYTES = 16
MAXIMUM_ROOT_BYTES = 1024**3  # of a root, and of a part
MAXIMUM_DEPTH = 128  # containers inside containers, in the state's tree and in values
MAXIMUM_JSON_NESTING = (
    4 * MAXIMUM_DEPTH + 16
)  # a container of a state is at most four of JSON: {"$defaultdict":[f,[[k,v]]]}
MAXIMUM_INTEGER_DIGITS = 4300  # Python's own default limit
MAXIMUM_TABLE_ROWS = 1 << 24  # tensors, chunks, frames of a part
MAXIMUM_COLUMN_ROWS = 1 << 25  # flat columns: shape, offsets, sizes
MAXIMUM_DIMENSIONS = 64  # numpy's limit
MAXIMUM_SPLIT_DIMENSIONS = 8  # dimensions along which one tensor is cut into chunks
MAXIMUM_TENSOR_BYTES = 1 << 62  # dimensions of size 0 counted as 1: no product overflows
MAXIMUM_FRAME_BYTES = (1 << 31) - 1  # only an element of more than 4 MiB makes a frame of more than 4 MiB
MAXIMUM_WINDOW_BYTES = 8 * 1024**2  # of a zstd frame


class FormatViolation(ValueError):  # noqa: N818 - it never leaves the manifest modules under this name
    """Something that format version 1 does not allow; says what and where."""


@contextlib.contextmanager
def violations_are_corruption(what: str) -> Iterator[None]:
    """Raise a violation inside the block as :class:`CorruptCheckpointError` about ``what``."""
    try:
        yield
    except (FormatViolation, CorruptCheckpointError) as violation:
        raise CorruptCheckpointError(f"{what}: {violation}") from violation


@contextlib.contextmanager
def violations_are_plan_errors(what: str) -> Iterator[None]:
    """Raise a violation inside the block as :class:`PlanError` about ``what``: a reader would refuse it."""
    try:
        yield
    except (FormatViolation, CorruptCheckpointError) as violation:
        raise PlanError(f"{what} cannot be stored: {violation}") from violation
