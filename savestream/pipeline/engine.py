"""The engine: one thread with one asyncio loop on which every save and load runs.

A trainer that computes on its own loop does not stall the save, a closed loop of the caller's drops nothing, and the
blocking form needs no second implementation. The thread starts with the first operation. When the main thread ends, the
engine lets running operations finish within a deadline, then cancels them, and says so.

The loop is fed by ``call_soon_threadsafe``, not through anyio's BlockingPortal: its ``start_task_soon`` waits for the
portal's loop, which would block the caller's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from savestream.errors import UsageError
from savestream.threads import WorkerExecutor

__all__ = [
    "EXIT_DEADLINE_SECONDS",
    "Engine",
    "Operation",
    "call",
    "current_engine",
    "require_asyncio",
    "submit",
    "wait_future",
    "wait_out",
]

logger = logging.getLogger("savestream")

Result = TypeVar("Result")

EXIT_DEADLINE_SECONDS = 300.0
_CANCEL_DEADLINE_SECONDS = 30.0
_EXIT_THREAD = "savestream-exit"


class Operation(Generic[Result]):
    """Work on the engine. ``future`` resolves only when the work, with its clean-up, has ended."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self.future: Future[Result] = Future()
        self._engine = engine
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self.is_begun = False  # set by the engine's loop

    def cancel(self) -> None:
        """Ask the work to end; returns at once. Harmless when it has ended."""
        self._engine.check_process()
        self._cancelled = True
        self._engine.post(self._cancel_scope)

    def check_blocking(self, instead: str) -> None:
        """Refuse to block where the work can never end, or where blocking would freeze a running loop."""
        self._engine.check_process()
        if self.future.done():
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise UsageError(f"this would block the running event loop; use '{instead}' there")

    def wait_until_ended(self) -> None:
        """Block until the work, with its clean-up, has ended, however."""
        wait_for_futures([self.future])

    def abandon(self) -> None:
        """Cancel the work and block until it has ended, however far handing it to the engine had got."""
        self.cancel()
        self._engine.post(self._end_unbegun)  # comes after the work's beginning, if that was handed over
        if self._engine.is_alive:
            self.wait_until_ended()

    def _end_unbegun(self) -> None:
        if not self.is_begun and self.future.cancel():
            self.future.set_running_or_notify_cancel()

    def _cancel_scope(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, function: Callable[[], Awaitable[Result]]) -> None:
        """Body of the work's task on the engine: settles ``future`` whatever happens."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self.future.set_result(await function())
        except Exception as error:
            self.future.set_exception(error)
        finally:
            if not self.future.done():
                self.future.cancel()
                self.future.set_running_or_notify_cancel()


class Engine:
    """The loop thread of one process."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        # Made here, so that work can be handed over at once: waiting for the thread would block the caller's loop.
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._group: TaskGroup | None = None
        self._early: list[Callable[[TaskGroup], object]] = []
        self._operations: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="savestream-engine", daemon=True)
        self._thread.start()
        # Not a daemon: it wakes when the main thread ends, before the interpreter waits for worker threads.
        threading.Thread(target=self._close_after_main_thread, name=_EXIT_THREAD).start()

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend="asyncio", backend_options={"loop_factory": lambda: self._loop})
        finally:
            for future in list(self._operations):  # nobody may wait for an engine that has ended
                future.cancel()

    async def _serve(self) -> None:
        async with anyio.create_task_group() as group:
            self._loop.set_default_executor(WorkerExecutor())
            self._group = group
            for begin in self._early:
                begin(group)
            await self._stop.wait()
            group.cancel_scope.cancel()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def check_process(self) -> None:
        """Refuse after a fork: this engine's thread does not exist in the child."""
        if self.process_id != os.getpid():
            raise UsageError(
                "this process was forked after savestream had been used; its threads do not exist here. Start worker "
                "processes with multiprocessing.get_context('spawn') or 'forkserver', or fork before the first save "
                "or load"
            )

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller already runs on the engine."""
        return threading.current_thread() is self._thread

    def submit(self, function: Callable[[], Awaitable[Result]], name: str) -> Operation[Result]:
        """Start ``function`` on the engine from any thread."""
        operation: Operation[Result] = Operation(self, name)
        self.start(operation, function)
        return operation

    def start(self, operation: Operation[Result], function: Callable[[], Awaitable[Result]]) -> None:
        """Start ``function`` as an operation that the caller has made, so that it can abandon it at any point."""
        with self._lock:
            if self._closing:
                raise UsageError("the interpreter is shutting down; savestream starts nothing new")
            self._operations.add(operation.future)
        operation.future.add_done_callback(self._operations.discard)
        self.post(functools.partial(self._begin, operation, lambda group: group.start_soon(operation.run, function)))

    def _begin(self, operation: Operation[Any], begin: Callable[[TaskGroup], object]) -> None:
        """On the loop: start work now, or as soon as there is a task group."""
        operation.is_begun = True
        if self._group is None:
            self._early.append(begin)
        else:
            begin(self._group)

    def post(self, function: Callable[[], object]) -> None:
        """Run a quick function on the engine's loop, without waiting."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(function)

    def _close_after_main_thread(self) -> None:
        _wait_for_program()
        with self._lock:
            self._closing = True
            running = set(self._operations)
        if running:
            logger.warning(
                "interpreter exit: waiting up to %.0f s for %d operation(s)", EXIT_DEADLINE_SECONDS, len(running)
            )
            _, late = wait_for_futures(running, EXIT_DEADLINE_SECONDS)
            if late:
                logger.error("interpreter exit: %d operation(s) did not finish in time and are cancelled", len(late))
        self.post(self._stop.set)
        self._thread.join(_CANCEL_DEADLINE_SECONDS)


def _wait_for_program() -> None:
    """Wait for the main thread, then for every other thread that keeps the program alive: those may still save."""
    waiting: list[threading.Thread] = [threading.main_thread()]
    while waiting:
        waiting[0].join()
        waiting = [
            thread
            for thread in threading.enumerate()
            if not thread.daemon
            and thread.name != _EXIT_THREAD
            and thread.is_alive()
            and thread is not threading.main_thread()
        ]


class _Holder:
    """The process's engine, made on first use."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.lock = threading.Lock()


_holder = _Holder()


def current_engine() -> Engine:
    """The engine of this process, started if need be; refuses after a fork, where its thread does not exist."""
    engine = _holder.engine
    if engine is None or not (engine.is_alive or engine.process_id != os.getpid()):
        with _holder.lock:
            engine = _holder.engine
            if engine is None or not (engine.is_alive or engine.process_id != os.getpid()):
                engine = _holder.engine = Engine()
    engine.check_process()
    return engine


def require_asyncio() -> asyncio.AbstractEventLoop:
    """The caller's running loop; refuses trio by name."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise UsageError(
            "savestream's async API needs a running asyncio loop. Under trio, call savestream.blocking through "
            "trio.to_thread.run_sync; outside any loop, use savestream.blocking or asyncio.run"
        ) from error


def submit(function: Callable[[], Awaitable[Result]], name: str) -> Operation[Result]:
    """Start ``function`` on the engine of this process, from a thread without a loop."""
    return current_engine().submit(function, name)


async def call(function: Callable[[], Awaitable[Result]], name: str) -> Result:
    """Run ``function`` on the engine and await it from the caller's loop.

    Cancelling the caller cancels the work; the cancellation is delivered when the work has ended and cleaned up.
    """
    require_asyncio()
    engine = current_engine()
    if engine.is_current_thread:
        return await function()
    return await wait_future(engine.submit(function, name), cancel_on_cancel=True)


async def wait_future(operation: Operation[Result], *, cancel_on_cancel: bool) -> Result:
    """Await an operation's result from the caller's loop."""
    waiter = asyncio.wrap_future(operation.future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if cancel_on_cancel and not waiter.done():
            operation.cancel()
            await wait_out(waiter)
        raise


async def wait_out(waiter: asyncio.Future[Result]) -> None:
    """Wait for the end of work that is being cancelled, whatever it is and however often the caller is cancelled."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue  # already being cancelled: the first cancellation is raised when the work has ended
    if not waiter.cancelled():
        waiter.exception()  # retrieved: the caller gets its cancellation
