"""Memory for staging and for results: page-aligned buffers, their pool, and the byte budget that admits work."""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias

import anyio
import numpy as np
import numpy.typing as npt

from savestream.errors import PlanError, StorageError, UsageError

__all__ = ["PAGE_BYTES", "Bytes", "StagingBuffer", "StagingPool", "aligned_bytes", "allocate_array", "round_up"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_OWN_PAGES_FROM_BYTES = _HUGE_PAGE_BYTES


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def aligned_bytes(nbytes: int, *, share_with_forks: bool = True) -> Bytes:
    """Fresh zeroed memory that starts on a page; large ones on huge pages, so that the first touch costs less.

    Buffers that live only for staging pass ``share_with_forks=False``: a forked child would otherwise pay for them.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows: its anonymous maps start on a 64 KiB boundary anyway
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = [getattr(mmap, "MADV_HUGEPAGE", None) if nbytes >= _HUGE_PAGE_BYTES else None]
    if not share_with_forks:
        advice.append(getattr(mmap, "MADV_DONTFORK", None))
    for option in advice:
        if option is not None:
            _advise(memory, option)
    return np.frombuffer(memory, np.uint8)[:nbytes]


def _advise(memory: mmap.mmap, option: int) -> None:
    try:
        memory.madvise(option)
    except OSError:
        return  # advice is optional: kernels without huge pages answer EINVAL, and the memory works all the same


def allocate_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An array for a load without a target; from 2 MiB on it has its own pages, so that storage reads straight in.

    Raises
    ------
    StorageError
        The memory is not to be had (``ENOMEM``); a manifest may state any size.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _OWN_PAGES_FROM_BYTES:
        # Not numpy.empty, which makes one character out of none: <U0 would come back as <U1.
        return np.empty(shape, dtype) if dtype.itemsize else np.ndarray(shape, dtype)
    try:
        memory = aligned_bytes(round_up(nbytes, PAGE_BYTES))
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise StorageError(
            errno.ENOMEM,
            f"the checkpoint states an array of dtype {dtype} and shape {shape}, and {nbytes} bytes of memory could "
            "not be allocated; load the other keys alone (keys=), or into a target",
        ) from error
    return memory[:nbytes].view(dtype).reshape(shape)


class StagingBuffer:
    """One page-aligned block; ``data`` is its memory as bytes."""

    __slots__ = ("__weakref__", "capacity_bytes", "data")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.data = aligned_bytes(capacity_bytes, share_with_forks=False)


class _Meter:
    """Bytes of buffers that are alive, pooled or in use. It knows no pool, so it keeps none alive."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def count(self, buffer: StagingBuffer) -> None:
        """Count a buffer until it is freed, also one that a cancelled save dropped."""
        self._add(buffer.capacity_bytes)
        weakref.finalize(buffer, self._add, -buffer.capacity_bytes).atexit = False

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes


class StagingPool:
    """Staging memory that outlives one save, and the budget for all saves that share it.

    A pool makes the next save stage into warm pages. Buffers belong to one save until its commit or discard; a second
    save in flight gets other buffers or waits, it never reuses them.

    Parameters
    ----------
    limit_bytes
        Upper bound for the staging memory of all saves in flight together.
    """

    def __init__(self, limit_bytes: int) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes <= 0:
            raise PlanError(f"limit_bytes={limit_bytes!r}: must be a positive number of bytes")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, anyio.Event]] = deque()
        self._free: dict[int, list[StagingBuffer]] = {}
        self._process_id = os.getpid()
        self._alive = _Meter()
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"StagingPool(limit_bytes={self.limit_bytes}, used_bytes={self.used_bytes})"

    # --- budget: touched only on the engine's loop ---

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` of the budget; waits its turn, first come first served.

        A reservation larger than the whole budget is admitted when nothing else is held, so that an item of any size
        goes through. Whoever holds a reservation must not wait for another one.
        """
        self._check_process()
        if not nbytes:  # whoever holds a reservation already must not queue behind those who wait for it
            yield
            return
        await self._admit(nbytes)
        try:
            yield
        finally:
            self.used_bytes -= nbytes
            self._wake()

    async def _admit(self, nbytes: int) -> None:
        if not self._waiting and self._fits(nbytes):
            self.used_bytes += nbytes
            return
        entry = (nbytes, anyio.Event())
        self._waiting.append(entry)
        try:
            await entry[1].wait()
        except BaseException:
            if entry[1].is_set():
                self.used_bytes -= nbytes
            else:
                self._waiting.remove(entry)
            self._wake()
            raise

    def _fits(self, nbytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + nbytes <= self.limit_bytes

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, event = self._waiting.popleft()
            self.used_bytes += nbytes
            event.set()

    # --- buffers: from any thread ---

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:  # a forked child does not have the memory (MADV_DONTFORK)
            raise UsageError("the staging pool was made before this process was forked; make a new one here")

    def take(self, capacity_bytes: int) -> StagingBuffer:
        """A buffer of that capacity: a pooled one where there is one, else fresh memory (faulted in as it is used)."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise UsageError("the staging pool is closed; make a new one, or save without staging_pool")
            free = self._free.get(capacity_bytes)
            if free:
                return free.pop()
            self._drop_excess(capacity_bytes)
        buffer = StagingBuffer(capacity_bytes)
        self._alive.count(buffer)
        return buffer

    def give(self, buffer: StagingBuffer) -> None:
        """Return a buffer that nothing reads or writes any more."""
        with self._lock:
            if not self._closed:
                self._free.setdefault(buffer.capacity_bytes, []).append(buffer)
                self._drop_excess(0)

    def _drop_excess(self, coming_bytes: int) -> None:
        """Free pooled buffers of capacities that are no longer asked for, until all memory is within the limit."""
        for free in self._free.values():
            while free and self._alive.bytes + coming_bytes > self.limit_bytes:
                free.pop()

    def prefault(self, nbytes: int, capacity_bytes: int) -> None:
        """Touch ``nbytes`` of buffers of that capacity, so that the first save finds warm pages. Blocks.

        Pages are touched with numpy, which gives up the GIL; populating them by ``mmap`` flags or advice would hold
        it for up to seconds.
        """
        buffers = [self.take(capacity_bytes) for _ in range(-(-min(nbytes, self.limit_bytes) // capacity_bytes))]
        for buffer in buffers:
            buffer.data[::PAGE_BYTES] = 0
            self.give(buffer)

    def close(self) -> None:
        """Free the pooled memory; buffers in use are freed when their save ends. Harmless twice."""
        with self._lock:
            self._closed = True
            self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
