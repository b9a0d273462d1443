"""The one way to run blocking work: in a worker thread that is never abandoned, and is told when to stop."""

from __future__ import annotations

import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar, TypeVarTuple, Unpack

from anyio import CancelScope, CapacityLimiter, create_task_group, sleep_forever, to_thread
from anyio.abc import TaskGroup

from savestream.errors import SavestreamError

__all__ = [
    "StoppingGroup",
    "WorkerExecutor",
    "first_error",
    "forget_frames",
    "run_in_worker",
    "run_shielded",
    "stopping",
    "task_group",
]

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
Parameters = ParamSpec("Parameters")


class WorkerExecutor(ThreadPoolExecutor):
    """A thread for each call: the default executor of the engine's loop, for libraries that use that (aiofiles).

    The standard pool refuses work as soon as the main thread has ended, while saves are still being finished.
    """

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Run ``fn`` in a new thread."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever waits for the future
                future.set_exception(error)

        threading.Thread(target=run, name="savestream-file", daemon=True).start()
        return future


async def run_in_worker(
    function: Callable[[Unpack[Arguments]], Result],
    *arguments: *Arguments,
    limiter: CapacityLimiter | None = None,
) -> Result:
    """Run ``function(*arguments)`` in a worker thread and wait for it, whatever happens to the caller.

    A plain asyncio cancel abandons ``to_thread.run_sync`` even inside a shielded scope: the thread goes on and
    may write from a buffer that has been reused. As a child of a task group the thread is always waited for;
    the cancellation is delivered afterwards. What would end a program (``SystemExit``, ``KeyboardInterrupt``) must not
    end the engine's loop, and what a future takes for a cancellation (``CancelledError``) is none: both come as a
    :class:`SavestreamError` with that cause.
    """

    def guarded() -> Result:
        try:
            return function(*arguments)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, CancelledError):
                raise
            raise SavestreamError(f"{type(error).__name__} was raised in a worker thread: {error!r}") from error

    async def call() -> Result:
        return await to_thread.run_sync(guarded, limiter=limiter)

    return await run_shielded(call)


async def run_shielded(function: Callable[[], Awaitable[Result]]) -> Result:
    """Await ``function()`` to its end; a cancellation of the caller is delivered only after that."""
    results: list[Result] = []
    errors: list[BaseException] = []

    async def child() -> None:
        with CancelScope(shield=True):
            try:
                results.append(await function())
            except Exception as error:
                errors.append(error)

    async with create_task_group() as group:
        group.start_soon(child)
    if errors:
        raise errors[0]
    return results[0]


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The error that a task group's failure began with: one of savestream's own before any other."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, SavestreamError)), leaves[0])


def forget_frames(error: BaseException) -> None:
    """Clear the locals of the frames that ``error`` and its causes came through: they would keep buffers alive."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        pending += [found.__cause__, found.__context__]
        if isinstance(found, BaseExceptionGroup):
            pending += found.exceptions


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """A task group whose first error comes as it is, not in an exception group, with its own cause."""
    try:
        async with create_task_group() as group:
            yield group
    except BaseExceptionGroup as error:
        cause = first_error(error)
        raise cause from cause.__cause__


class StoppingGroup:
    """Starts work that runs in threads, and tells all of it to stop as soon as one piece fails."""

    def __init__(self, group: TaskGroup, stop: threading.Event) -> None:
        self._group = group
        self._stop = stop

    def start_soon(self, function: Callable[[Unpack[Arguments]], Awaitable[object]], *arguments: *Arguments) -> None:
        """Run ``function(*arguments)`` in the group."""

        async def run() -> None:
            try:
                await function(*arguments)
            except BaseException:
                self._stop.set()
                raise

        self._group.start_soon(run)


@asynccontextmanager
async def stopping(stop: threading.Event) -> AsyncIterator[StoppingGroup]:
    """A group whose worker threads learn of an error of one of them, or of a cancellation, through ``stop``."""

    async def watch() -> None:
        try:
            await sleep_forever()
        finally:
            stop.set()

    async with task_group() as outer:
        outer.start_soon(watch)
        async with create_task_group() as group:
            yield StoppingGroup(group, stop)
        outer.cancel_scope.cancel()
