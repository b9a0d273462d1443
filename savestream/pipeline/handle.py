"""The handle of a save that goes on in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import traceback
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future

from savestream.errors import UsageError
from savestream.pipeline.engine import Operation, require_asyncio, wait_future, wait_out
from savestream.pipeline.save_request import CheckpointInfo, Progress
from savestream.pipeline.save_task import SaveTask

__all__ = ["SaveHandle"]

logger = logging.getLogger("savestream")


class _Inquiry:
    """Whether anybody has asked for a save's result."""

    def __init__(self) -> None:
        self.made = False


class SaveHandle:
    """A save in the background. Await it for the durable result; it re-raises the background error.

    It belongs to no loop and no thread: any asyncio loop may await it, any thread may ask it. Cancelling an await only
    ends the waiting; :meth:`cancel` ends the save. An error that nobody asks for is logged.
    """

    def __init__(self, task: SaveTask, operation: Operation[CheckpointInfo]) -> None:
        self._task = task
        self._operation = operation
        self._inquiry = _Inquiry()
        operation.future.add_done_callback(_log_if_dropped(weakref.ref(self), self._inquiry, task.place))

    def __repr__(self) -> str:
        state = "running" if not self.done() else "done"
        return f"<SaveHandle {self._task.place} {state}>"

    def __await__(self) -> Generator[object, None, CheckpointInfo]:
        return self._wait().__await__()

    async def _wait(self) -> CheckpointInfo:
        require_asyncio()
        self._inquiry.made = True
        return await wait_future(self._operation, cancel_on_cancel=False)

    async def staged(self) -> None:
        """Wait until the state may be mutated; re-raises the error of a save that failed before that."""
        require_asyncio()
        await asyncio.shield(asyncio.wrap_future(self._settled_by(self._task.staged)))

    def wait_staged(self, timeout: float | None = None) -> None:
        """Like :meth:`staged`, for code without a loop; blocks at most ``timeout`` seconds."""
        self._operation.check_blocking("await handle.staged()")
        self._settled_by(self._task.staged).result(timeout)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """The durable result, for code without a loop; blocks at most ``timeout`` seconds (then ``TimeoutError``)."""
        self._operation.check_blocking("await handle")
        self._inquiry.made = True
        return self._operation.future.result(timeout)

    def done(self) -> bool:
        """Whether the save has ended, with its clean-up: committed, failed or cancelled."""
        return self._operation.future.done()

    def exception(self) -> BaseException | None:
        """The error of a save that has ended, or None; ``CancelledError`` where it was cancelled.

        Of a save that still runs it is a :class:`UsageError`: await it, or ask ``done()`` first.
        """
        if not self.done():
            raise UsageError(f"{self._task.place}: the save has not ended yet; await it, or ask done() first")
        self._inquiry.made = True
        try:
            return self._operation.future.exception(0)
        except concurrent.futures.CancelledError as error:
            return error

    def cancel(self) -> None:
        """Ask the save to end; what it wrote is removed. Returns at once: await the handle to see the end.

        From the moment the commit has been sent it can no longer be cancelled, and the handle resolves normally.
        """
        self._inquiry.made = True
        self._operation.cancel()

    def progress(self) -> Progress:
        """Bytes staged, written and in total, at this moment."""
        return self._task.progress()

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call ``callback(handle)`` when the save has ended, on failure and cancellation too.

        It runs on savestream's engine thread (at once, on this one, if the save has ended already); its exceptions are
        logged.
        """

        def call(_: Future[CheckpointInfo]) -> None:
            try:
                callback(self)
            except BaseException:  # it must not end the engine, whatever it raises
                logger.exception("%s: a done callback failed", self._task.place)

        self._operation.future.add_done_callback(call)

    def _settled_by(self, milestone: Future[None]) -> Future[None]:
        """A future that follows ``milestone``, or the save's end if that comes first."""
        settled: Future[None] = Future()
        inquiry = self._inquiry  # not self: what waits for the end must not keep a dropped handle alive

        def from_milestone(_: Future[None]) -> None:
            if not settled.done():
                settled.set_result(None)

        def from_end(end: Future[CheckpointInfo]) -> None:
            if milestone.done() or settled.done():
                return
            inquiry.made = True
            if end.cancelled():
                settled.cancel()
            else:
                settled.set_exception(end.exception())

        milestone.add_done_callback(from_milestone)
        self._operation.future.add_done_callback(from_end)
        return settled

    async def _reach(self, milestone: Future[None]) -> None:
        """Wait for a milestone on behalf of the call that made this handle; a cancellation there ends the save."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._settled_by(milestone)))
        except asyncio.CancelledError:
            if not self.done():
                self.cancel()
                await wait_out(asyncio.wrap_future(self._operation.future))
            raise


def _log_if_dropped(
    handle: weakref.ref[SaveHandle], inquiry: _Inquiry, place: str
) -> Callable[[Future[CheckpointInfo]], None]:
    """An error that nobody will ask for must not vanish: log it when the handle is gone, or goes, unasked."""

    def report(future: Future[CheckpointInfo]) -> None:
        if future.cancelled() or future.exception() is None:
            return
        alive = handle()
        if alive is None:
            logger.error("%s: a background save failed and its handle was dropped", place, exc_info=future.exception())
        else:
            # Only text: the error's traceback leads to the caller's frames, and from there back to the handle.
            text = "".join(traceback.format_exception(future.exception()))
            weakref.finalize(alive, _report_unasked, inquiry, text, place)  # at the program's end at the latest

    return report


def _report_unasked(inquiry: _Inquiry, error: str, place: str) -> None:
    if not inquiry.made:
        logger.error("%s: a background save failed and nobody asked:\n%s", place, error)
