"""A backend that fails, or stops, where a test tells it to."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias, TypeVar

from anyio import from_thread

from savestream.errors import StorageError
from savestream.storage_backends.base import StorageBackend
from savestream.storage_backends.wrappers import Operation, OperationKind, WrapperBackend
from savestream.threads import run_in_worker

__all__ = ["Fault", "FaultyBackend", "Gate", "Hook"]

Hook: TypeAlias = Callable[[Operation], Awaitable[None] | None]
Result = TypeVar("Result")


class Gate:
    """A hook that stops an operation until the test opens it; a deadline keeps a wrong test from hanging.

    Parameters
    ----------
    patience_seconds
        How long either side waits before it raises TimeoutError.
    """

    def __init__(self, patience_seconds: float = 30.0) -> None:
        self.patience_seconds = patience_seconds
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, operation: Operation) -> None:
        self._reached.set()
        self._wait(self._opened, f"{operation.kind} {operation.path} was never let through")

    async def reached(self) -> None:
        """Wait until an operation stands at the gate."""
        await run_in_worker(self._wait, self._reached, "no operation came to the gate")

    @property
    def was_reached(self) -> bool:
        return self._reached.is_set()

    def open(self) -> None:
        """Let everything through, now and later."""
        self._opened.set()

    def _wait(self, event: threading.Event, message: str) -> None:
        if not event.wait(self.patience_seconds):
            raise TimeoutError(message)


class Fault:
    """What happens at some operations of one kind.

    Parameters
    ----------
    kind
        Of operation; None for every kind.
    error
        An errno (raised as StorageError), an exception, or a function that makes one from the operation. None
        raises nothing, which is of use with ``hook``.
    nth
        The first matching operation that is hit, counted from 1.
    times
        How many are hit in a row; None for all from there on.
    after
        Let the inner operation take effect first: its result is lost, as when a connection breaks.
    path_contains
        Only operations whose path contains this.
    hook
        Called with the operation before ``error`` is raised. A plain function runs in a worker thread and may block;
        a coroutine function is awaited on the event loop.
    """

    def __init__(
        self,
        kind: OperationKind | None,
        error: int | BaseException | Callable[[Operation], BaseException] | None = None,
        *,
        nth: int = 1,
        times: int | None = 1,
        after: bool = False,
        path_contains: str = "",
        hook: Hook | None = None,
    ) -> None:
        self.kind = kind
        self.error = error
        self.nth = nth
        self.times = times
        self.after = after
        self.path_contains = path_contains
        self.hook = hook
        self.hits = 0
        self._seen = 0
        self._lock = threading.Lock()

    def strikes(self, operation: Operation) -> bool:
        """Count ``operation`` if it matches, and say whether this fault hits it."""
        if self.kind not in (None, operation.kind) or self.path_contains not in operation.path:
            return False
        with self._lock:
            self._seen += 1
            hit = self._seen >= self.nth and (self.times is None or self._seen < self.nth + self.times)
            self.hits += hit
        return hit

    def exception(self, operation: Operation) -> BaseException | None:
        """What to raise for ``operation``."""
        if self.error is None or isinstance(self.error, BaseException):
            return self.error
        if isinstance(self.error, int):
            place = f"{operation.kind} {operation.path} at offset {operation.offset}"
            return StorageError(self.error, f"{place} failed: {os.strerror(self.error)} (injected)")
        return self.error(operation)


class FaultyBackend(WrapperBackend):
    """Fails as its faults tell; everything else passes to ``inner``.

    Parameters
    ----------
    faults
        Each counts operations on its own; more may be appended to :attr:`faults` at any time.
    """

    def __init__(self, inner: StorageBackend, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self.faults: list[Fault] = list(faults)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        struck = [fault for fault in self.faults if fault.strikes(operation)]
        await _strike(operation, [fault for fault in struck if not fault.after])
        result = await call()
        await _strike(operation, [fault for fault in struck if fault.after])
        return result

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        struck = [fault for fault in self.faults if fault.strikes(operation)]
        _strike_blocking(operation, [fault for fault in struck if not fault.after])
        call()
        _strike_blocking(operation, [fault for fault in struck if fault.after])


async def _strike(operation: Operation, faults: list[Fault]) -> None:
    for fault in faults:
        if fault.hook is not None:
            if inspect.iscoroutinefunction(fault.hook):
                await fault.hook(operation)
            else:
                await run_in_worker(fault.hook, operation)
        error = fault.exception(operation)
        if error is not None:
            raise error


def _strike_blocking(operation: Operation, faults: list[Fault]) -> None:
    for fault in faults:
        if fault.hook is not None:
            if inspect.iscoroutinefunction(fault.hook):
                from_thread.run(fault.hook, operation)
            else:
                fault.hook(operation)
        error = fault.exception(operation)
        if error is not None:
            raise error
