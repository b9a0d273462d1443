"""Backends that are slower than they need to be, and one that keeps a record."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import msgspec

from savestream.errors import PlanError
from savestream.storage_backends.base import StorageBackend
from savestream.storage_backends.wrappers import Operation, OperationKind, WrapperBackend

__all__ = ["LatencyBackend", "ThrottledBackend", "TraceRecord", "TracingBackend"]

Result = TypeVar("Result")


class LatencyBackend(WrapperBackend):
    """Every operation takes longer, like requests to a store far away.

    Parameters
    ----------
    seconds
        Added before each operation, or a function that tells it from the :class:`Operation`.
    """

    def __init__(self, inner: StorageBackend, seconds: float | Callable[[Operation], float]) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        await anyio.sleep(self._delay_seconds(operation))
        return await call()

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        time.sleep(self._delay_seconds(operation))
        call()

    def _delay_seconds(self, operation: Operation) -> float:
        return self.seconds(operation) if callable(self.seconds) else self.seconds


class ThrottledBackend(WrapperBackend):
    """All operations together move at most ``bytes_per_second``, reads and writes alike."""

    def __init__(self, inner: StorageBackend, bytes_per_second: float) -> None:
        super().__init__(inner)
        if not bytes_per_second > 0:
            raise PlanError(f"bytes_per_second={bytes_per_second!r}: must be positive")
        self.bytes_per_second = bytes_per_second
        self._free_at_seconds = 0.0
        self._lock = threading.Lock()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        if operation.kind not in ("finish", "get"):
            await anyio.sleep(self._wait_seconds(operation.bytes))
        result = await call()
        if isinstance(result, bytes):
            await anyio.sleep(self._wait_seconds(len(result)))
        return result

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        time.sleep(self._wait_seconds(operation.bytes))
        call()

    def _wait_seconds(self, count: int) -> float:
        """Reserve the link for ``count`` bytes; how long until they are through."""
        if count == 0:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at_seconds = max(now, self._free_at_seconds) + count / self.bytes_per_second
            return self._free_at_seconds - now


class TraceRecord(msgspec.Struct, frozen=True):
    """One operation that ended; times are ``time.perf_counter()`` seconds, ``error`` is None on success."""

    kind: OperationKind
    path: str
    offset: int
    bytes: int
    started_seconds: float
    ended_seconds: float
    error: str | None


class TracingBackend(WrapperBackend):
    """Records every operation when it ends: how many requests, of what, how large, how long.

    Attributes
    ----------
    records
        In the order in which the operations ended.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.records: list[TraceRecord] = []

    def count(self, kind: OperationKind | None = None) -> int:
        """Number of operations of ``kind``, or of all."""
        return sum(1 for record in self.records if kind in (None, record.kind))

    def bytes_moved(self, kind: OperationKind) -> int:
        """Bytes of the operations of ``kind`` that succeeded."""
        return sum(record.bytes for record in self.records if record.kind == kind and record.error is None)

    def clear(self) -> None:
        """Forget the records."""
        self.records.clear()

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        started = time.perf_counter()
        try:
            result = await call()
        except BaseException as error:
            self._record(operation, started, operation.bytes, repr(error))
            raise
        self._record(operation, started, len(result) if isinstance(result, bytes) else operation.bytes, None)
        return result

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            call()
        except BaseException as error:
            self._record(operation, started, operation.bytes, repr(error))
            raise
        self._record(operation, started, operation.bytes, None)

    def _record(self, operation: Operation, started: float, count: int, error: str | None) -> None:
        ended = time.perf_counter()
        self.records.append(TraceRecord(operation.kind, operation.path, operation.offset, count, started, ended, error))
