"""What a save or load may be told: frozen, keyword-only, validated when made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from savestream.errors import PlanError
from savestream.pipeline.arguments import check_flag
from savestream.pipeline.buffers import StagingPool

__all__ = ["Compression", "LoadOptions", "SaveOptions"]

Compression: TypeAlias = Literal["auto", "none", "zstd"]

MEBIBYTE = 1024 * 1024
DEFAULT_MEMORY_BUDGET_BYTES = 256 * MEBIBYTE
MINIMUM_MEMORY_BUDGET_BYTES = 4 * MEBIBYTE


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a state is saved.

    Parameters
    ----------
    compression
        ``"none"``, ``"zstd"`` (byte planes and zstd, where it shrinks) or ``"auto"``, which compresses only
        while that does not slow the save.
    memory_budget_bytes
        What staging may hold beyond the state. Default: 256 MiB, or the limit of ``staging_pool``.
    threads
        Worker threads that copy, digest, encode and write at once.
    write_bytes_per_second
        Upper bound for the rate of writing; None for no bound.
    timeout_seconds
        A save that takes longer fails with ``TimeoutError`` and leaves nothing behind; None for no bound.
    allow_pickle
        Store objects that savestream cannot encode with pickle. Loading them needs the same opt-in.
    staging_pool
        Buffers that outlive one save, so that the next stages into warm memory.
    switch_interval_seconds
        Python's thread switch interval while ``start_save`` stages, process-wide and restored afterwards. A shorter
        one shortens the stall beside busy Python threads. None leaves it alone.
    """

    compression: Compression = "auto"
    memory_budget_bytes: int | None = None
    threads: int = 3
    write_bytes_per_second: float | None = None
    timeout_seconds: float | None = None
    allow_pickle: bool = False
    staging_pool: StagingPool | None = None
    switch_interval_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.compression not in ("auto", "none", "zstd"):
            raise PlanError(f"compression={self.compression!r}: use 'auto', 'none' or 'zstd'")
        _check_count("threads", self.threads, 1)
        if self.memory_budget_bytes is not None:
            _check_count("memory_budget_bytes", self.memory_budget_bytes, MINIMUM_MEMORY_BUDGET_BYTES)
        check_flag("allow_pickle", self.allow_pickle)
        if self.staging_pool is not None and not isinstance(self.staging_pool, StagingPool):
            raise PlanError(f"staging_pool={self.staging_pool!r}: must be a StagingPool")
        for name in ("write_bytes_per_second", "timeout_seconds", "switch_interval_seconds"):
            _check_positive(name, getattr(self, name))

    @property
    def staging_limit_bytes(self) -> int:
        """The budget in force."""
        if self.memory_budget_bytes is not None:
            return self.memory_budget_bytes
        return self.staging_pool.limit_bytes if self.staging_pool is not None else DEFAULT_MEMORY_BUDGET_BYTES


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is loaded.

    Parameters
    ----------
    types
        Classes (namedtuples, dataclasses, enums) that may be rebuilt where no target gives them. Others come back as
        plain values that carry the recorded name.
    allow_pickle
        Unpickle objects that were stored so. This executes code from the file: only for files you trust.
    threads
        Worker threads that read, check and place at once.
    verify_digests
        Check the digest of every frame that is read. Leave it on.
    """

    types: Sequence[type] = ()
    allow_pickle: bool = False
    threads: int = 4
    verify_digests: bool = True

    def __post_init__(self) -> None:
        _check_count("threads", self.threads, 1)
        for name in ("allow_pickle", "verify_digests"):
            check_flag(name, getattr(self, name))
        if isinstance(self.types, type) or not isinstance(self.types, Iterable):
            raise PlanError(f"types={self.types!r}: must be a list of classes")
        msgspec.structs.force_setattr(self, "types", tuple(self.types))
        for kind in self.types:
            if not isinstance(kind, type):
                raise PlanError(f"types holds {kind!r}, which is not a class")


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise PlanError(f"{name}={value!r}: must be an integer of at least {minimum}")


def _check_positive(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise PlanError(f"{name}={value!r}: must be a positive number or None")
