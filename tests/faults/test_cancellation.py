"""Cancelling at every operation: the cancellation arrives when the work has ended, and nothing half-done is left."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fault_support import LARGE, assert_same, everything, make_state, new_backend, open_files, save_in_mode

import savestream
from savestream.errors import SaveTimeoutError
from savestream.storage_backends import Fault, FaultyBackend, Gate, TracingBackend

OLD, NEW, NEXT = make_state(1), make_state(2, LARGE), make_state(3)
OPTIONS = savestream.SaveOptions(memory_budget_bytes=4 << 20, threads=2, compression="none")
COMMITS = ("create", "replace")


class Scene:
    """A store with an older checkpoint; saves to ``new`` through a gate that stops one operation."""

    def __init__(self, kind, tmp_path, *, overwrite=False):
        self.plain = new_backend(kind, tmp_path)
        self.tracing = TracingBackend(self.plain)
        self.overwrite = overwrite

    async def prepare(self):
        await savestream.save(OLD, (self.plain, "old"))
        await self.reset()

    async def reset(self):
        if await savestream.exists((self.plain, "new")):
            await savestream.delete((self.plain, "new"))
        if self.overwrite:
            await savestream.save(OLD, (self.plain, "new"))
        self.before = await everything(self.plain)

    async def kinds(self, action):
        self.tracing.clear()
        await action(self.tracing)
        await self.reset()
        return [record.kind for record in self.tracing.records]

    def gated(self, nth, *, after=False):
        gate = Gate()
        stopped = []

        def hook(operation):
            stopped.append(operation)
            gate(operation)

        backend = FaultyBackend(self.tracing, [Fault(None, None, nth=nth, after=after, hook=hook)])
        return backend, gate, stopped

    async def check_ended(self, kind, *, again=True):
        """Nothing is still going on; nothing is visible, or, had the commit been sent, everything is."""
        done = len(self.tracing.records)
        committed = kind in COMMITS or (kind in ("list", "delete") and self.overwrite)
        if committed:
            assert_same(await savestream.load((self.plain, "new")), NEW)
        else:
            assert await everything(self.plain) == self.before
            assert await savestream.exists((self.plain, "new")) == self.overwrite
        if again:
            await savestream.save(NEXT, (self.plain, "new"), overwrite=True)
            assert_same(await savestream.load((self.plain, "new")), NEXT)
        assert len(self.tracing.records) == done, "something was written after the cancellation had been delivered"
        if again or committed:
            await self.reset()


async def told(scene):
    """Whatever has been said to savestream so far has arrived: this question came after it."""
    for _ in range(3):
        await asyncio.sleep(0)
    await savestream.exists((scene.plain, "old"))


async def cancelled(scene, task, gate, *, times=1):
    """Cancel a task that stands at the gate; it must not end before the gate is opened."""
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await told(scene)
    assert not task.done(), "the cancellation was delivered while an operation was still running"
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_cancelling_the_awaiting_task_at_every_operation(kind, overwrite, tmp_path):
    scene = Scene(kind, tmp_path, overwrite=overwrite)
    await scene.prepare()

    def run(backend):
        return savestream.save(NEW, (backend, "new"), options=OPTIONS, overwrite=overwrite)

    kinds = await scene.kinds(run)
    descriptors, threads = open_files(), threading.active_count()
    for nth in range(1, len(kinds) + 1):
        for after in (False, True):
            backend, gate, stopped = scene.gated(nth, after=after)
            task = asyncio.create_task(run(backend))
            await gate.reached()
            await cancelled(scene, task, gate, times=1 + nth % 2)
            await scene.check_ended(stopped[0].kind, again=not after)
    assert open_files() == descriptors
    assert threading.active_count() <= threads + 8
    assert_same(await savestream.load((scene.plain, "old")), OLD)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_cancelling_start_save_ends_the_save_and_cancelling_an_await_of_its_handle_does_not(kind, mode, tmp_path):
    scene = Scene(kind, tmp_path)
    await scene.prepare()
    kinds = await scene.kinds(lambda backend: save_in_mode(mode, NEW, (backend, "new"), options=OPTIONS))
    started_at = []
    for nth in range(1, len(kinds) + 1):
        backend, gate, stopped = scene.gated(nth)
        handles = []

        async def run(backend=backend, handles=handles):
            handles.append(await savestream.start_save(NEW, (backend, "new"), stage=mode, options=OPTIONS))
            await handles[0]

        task = asyncio.create_task(run())
        await gate.reached()
        await told(scene)
        started_at.append(bool(handles))
        if not handles:
            await cancelled(scene, task, gate)
            await scene.check_ended(stopped[0].kind)
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await handles[0]
        await scene.check_ended("create")
    assert started_at == sorted(started_at)
    assert set(started_at) == {False, True}


async def ended(handle):
    try:
        await handle
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
async def test_handle_cancel_at_every_operation(kind, mode, tmp_path):
    scene = Scene(kind, tmp_path)
    await scene.prepare()
    options = savestream.SaveOptions(compression="none")  # memory for all of it: eager staging ends before writing
    kinds = await scene.kinds(lambda backend: save_in_mode(mode, NEW, (backend, "new"), options=options))
    first = 1 + kinds.index("open_writer" if mode == "lazy" else "write")
    descriptors = open_files()
    for nth in range(first, len(kinds) + 1):
        backend, gate, stopped = scene.gated(nth)
        handle = await savestream.start_save(NEW, (backend, "new"), stage=mode, options=options)
        await gate.reached()
        seen = []
        handle.add_done_callback(seen.append)
        handle.cancel()
        handle.cancel()
        await told(scene)
        assert not handle.done()
        gate.open()
        if stopped[0].kind in COMMITS:
            assert (await handle).save_id
            assert handle.exception() is None
        else:
            with pytest.raises(asyncio.CancelledError):
                await handle
            assert isinstance(handle.exception(), BaseException)
        assert handle.done()
        assert seen == [handle]
        await scene.check_ended(stopped[0].kind)
    assert open_files() == descriptors


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("form", ["timeout", "wait_for", "TaskGroup"])
async def test_other_ways_to_be_cancelled(kind, form, tmp_path):
    scene = Scene(kind, tmp_path)
    await scene.prepare()
    for stop_at in ("open_writer", "write", "finish", "put", "create"):
        gate = Gate()
        backend = FaultyBackend(scene.tracing, [Fault(stop_at, None, hook=gate)])
        inner = asyncio.create_task(savestream.save(NEW, (backend, "new"), options=OPTIONS))
        await gate.reached()

        async def open_when_cancelled(inner=inner, gate=gate):
            while not inner.cancelling():
                await asyncio.sleep(0.001)
            await told(scene)
            gate.open()

        opener = asyncio.create_task(open_when_cancelled())
        if form == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await inner
        elif form == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(inner, 0.01)
        else:
            with pytest.raises(ExceptionGroup, match="unhandled"):
                await fail_beside(inner)
        assert inner.done()
        await opener
        await scene.check_ended(stop_at)


async def fail_beside(inner):
    async def wait():
        await inner

    async def fail():
        raise LookupError("a sibling failed")

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        group.create_task(fail())


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("mode", ["save", "lazy"])
async def test_a_save_that_is_too_slow_ends_with_a_timeout_of_its_own(kind, mode, tmp_path):
    scene = Scene(kind, tmp_path)
    await scene.prepare()
    kinds = await scene.kinds(lambda backend: save_in_mode(mode, NEW, (backend, "new"), options=OPTIONS))
    descriptors = open_files()
    limit = 0.05
    options = savestream.SaveOptions(memory_budget_bytes=4 << 20, compression="none", timeout_seconds=limit)
    for nth, stop_at in enumerate(kinds, start=1):
        started = time.monotonic()

        def outlast(operation, started=started):
            time.sleep(max(0.0, started + 1.2 * limit - time.monotonic()))

        backend = FaultyBackend(scene.tracing, [Fault(None, None, nth=nth, hook=outlast)])
        save = save_in_mode(mode, NEW, (backend, "new"), options=options)
        if stop_at in COMMITS and not await times_out(save):
            await scene.check_ended(stop_at)
            continue
        if stop_at not in COMMITS:
            with pytest.raises(SaveTimeoutError, match=f"timeout_seconds={limit}") as caught:
                await save
            assert isinstance(caught.value, TimeoutError)
        await scene.check_ended("nothing")
    assert open_files() == descriptors


async def times_out(save):
    """A commit that was sent in time is not given up; on a busy machine the time may be over before that."""
    try:
        await save
    except SaveTimeoutError:
        return True
    return False


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("with_target", [False, True], ids=["new", "target"])
async def test_cancelling_a_load_at_every_operation(kind, with_target, tmp_path):
    scene = Scene(kind, tmp_path)
    await scene.prepare()
    await savestream.save(NEW, (scene.plain, "new"), options=OPTIONS)
    target = make_state(5, LARGE) if with_target else None
    scene.tracing.clear()
    await savestream.load((scene.tracing, "new"), target)
    count = len(scene.tracing.records)
    descriptors, threads = open_files(), threading.active_count()
    for nth in range(1, count + 1):
        for after in (False, True):
            backend, gate, _ = scene.gated(nth, after=after)
            task = asyncio.create_task(savestream.load((backend, "new"), target))
            reached = asyncio.create_task(gate.reached())
            await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
            if task.done():  # the reads were grouped into fewer this time
                gate.open()
                reached.cancel()
                continue
            await reached
            await cancelled(scene, task, gate, times=1 + nth % 2)
            done = len(scene.tracing.records)
            content = None if target is None else target["model"]["weight"].tobytes()
            await savestream.load((scene.plain, "old"))
            assert len(scene.tracing.records) == done
            assert content is None or target["model"]["weight"].tobytes() == content, "written to after the cancel"
    assert open_files() == descriptors
    assert threading.active_count() <= threads + 8
    assert_same(await savestream.load((scene.plain, "new"), target), NEW)


async def test_cancelling_again_and_again_while_chunks_are_written(tmp_path):
    """Fifty extents of a slow store, cancelled after the first few, some, and most of them."""
    scene = Scene("memory", tmp_path)
    await scene.prepare()
    state = {f"layer{number}": make_state(number)["model"]["weight"] for number in range(50)}
    extents = 0
    options = savestream.SaveOptions(memory_budget_bytes=4 << 20, threads=3, compression="none")
    for after_bytes in (0, 1 << 20, 3 << 20):
        for _ in range(5):
            handle = await savestream.start_save(state, (scene.tracing, "new"), stage="lazy", options=options)
            while handle.progress().written_bytes < after_bytes and not handle.done():
                await asyncio.sleep(0)
            handle.cancel()
            await ended(handle)
            extents += scene.tracing.count("write")
            assert handle.progress().written_bytes <= handle.progress().total_bytes
            if handle.exception() is None:
                assert_same(await savestream.load((scene.plain, "new")), state)
                await scene.reset()
            else:
                assert await everything(scene.plain) == scene.before
    assert extents
