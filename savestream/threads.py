"""The one way to run blocking work: in a worker thread that is never abandoned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread

__all__ = ["run_in_worker", "run_shielded"]

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


async def run_in_worker(
    function: Callable[[Unpack[Arguments]], Result],
    *arguments: *Arguments,
    limiter: CapacityLimiter | None = None,
) -> Result:
    """Run ``function(*arguments)`` in a worker thread and wait for it, whatever happens to the caller.

    A plain asyncio cancel abandons ``to_thread.run_sync`` even inside a shielded scope: the thread goes on and
    may write from a buffer that has been reused. As a child of a task group the thread is always waited for;
    the cancellation is delivered afterwards.
    """

    async def call() -> Result:
        return await to_thread.run_sync(function, *arguments, limiter=limiter)

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
