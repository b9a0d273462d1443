"""The caller's event loop is never blocked: not by planning, staging, writing or reading, nor by waiting for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from blockbuster import BlockBuster, BlockingError
from roundtrip_support import assert_same

import savestream
from savestream.storage_backends import Fault, FaultyBackend, FileBackend, MemoryBackend

PATIENCE_SECONDS = 30.0


@pytest.fixture
def blocking_calls_fail():
    """Any blocking call on a thread that runs a loop, the caller's or the engine's, raises BlockingError."""
    detector = BlockBuster()
    detector.activate()
    yield
    detector.deactivate()


def state(number=1, rows=3000):
    return {
        "w": np.full((rows, 300), number, np.float32),
        "small": {f"leaf{index}": np.arange(index % 7) for index in range(300)},
        "step": number,
    }


class Ticker:
    """Beats on the caller's loop; remembers its longest pause."""

    def __init__(self, every_seconds=0.005):
        self.every_seconds = every_seconds
        self.beats = 0
        self.longest_seconds = 0.0

    async def _run(self):
        last = time.perf_counter()
        while True:
            await asyncio.sleep(self.every_seconds)
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - last)
            last = now
            self.beats += 1

    async def __aenter__(self):
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error):
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_the_detector_detects(blocking_calls_fail):
    with pytest.raises(BlockingError):
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_nothing_blocks_the_callers_loop_or_the_engines(kind, blocking_calls_fail, tmp_path, record_property):
    backend = FileBackend(tmp_path / "store") if kind == "file" else MemoryBackend()
    async with Ticker() as ticker:
        await savestream.save(state(), (backend, "a"))
        for compression in ("none", "zstd", "auto"):
            options = savestream.SaveOptions(compression=compression, memory_budget_bytes=4 << 20)
            await savestream.save(state(), (backend, "a"), options=options, overwrite=True)
        handle = await savestream.start_save(state(2), (backend, "b"))
        assert handle.progress().total_bytes
        await handle.staged()
        await handle
        handle = await savestream.start_save(state(3), (backend, "c"), stage="lazy")
        await handle.staged()
        await handle
        assert_same(await savestream.load((backend, "b")), state(2))
        target = state(0)
        await savestream.load((backend, "c"), target)
        assert_same(target, state(3))
        assert [entry.name for entry in await savestream.list_checkpoints((backend, ""))] == ["a", "b", "c"]
        async for key, array in savestream.iter_arrays((backend, "a")):
            assert key
            assert array.dtype
        await savestream.verify((backend, "a"))
        await savestream.read_manifest((backend, "a"))
        assert await savestream.exists((backend, "a"))
        await savestream.delete((backend, "a"))
        with pytest.raises(savestream.CheckpointNotFoundError):
            await savestream.load((backend, "a"))
        cancelled = asyncio.create_task(savestream.save(state(), (backend, "d")))
        await asyncio.sleep(0.002)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert ticker.beats
    record_property("longest_pause_seconds", ticker.longest_seconds)


class Meeting:
    """Work on savestream's side that goes on only when the caller's loop has answered."""

    def __init__(self):
        self.asked = threading.Event()
        self.answered = threading.Event()
        self.meetings = 0

    def wait(self, *_):
        self.asked.set()
        assert self.answered.wait(PATIENCE_SECONDS), "the caller's loop was blocked meanwhile"
        self.meetings += 1

    async def answer(self):
        """Runs on the caller's loop."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.asked.is_set():
            assert time.monotonic() < deadline, "nobody came"
            await asyncio.sleep(0.001)
        self.answered.set()


class SlowSavePlanner(savestream.DefaultSavePlanner):
    """Its hooks need the caller's loop to run."""

    def __init__(self, hook, meeting):
        super().__init__()
        self.hook, self.meeting = hook, meeting

    def create_local_plan(self):
        if self.hook == "create_local_plan":
            self.meeting.wait()
        return super().create_local_plan()

    def resolve_data(self, write_item):
        if self.hook == "resolve_data":
            self.meeting.wait()
        return super().resolve_data(write_item)

    def finish_plan(self, new_plan):
        if self.hook == "finish_plan":
            self.meeting.wait()
        return super().finish_plan(new_plan)


class SlowLoadPlanner(savestream.DefaultLoadPlanner):
    """The same for loads."""

    def __init__(self, hook, meeting):
        super().__init__()
        self.hook, self.meeting = hook, meeting

    def create_local_plan(self):
        if self.hook == "create_local_plan":
            self.meeting.wait()
        return super().create_local_plan()

    def resolve_tensor(self, read_item):
        if self.hook == "resolve_tensor":
            self.meeting.wait()
        return super().resolve_tensor(read_item)

    def load_bytes(self, read_item, value):
        if self.hook == "load_bytes":
            self.meeting.wait()
        return super().load_bytes(read_item, value)


@pytest.mark.parametrize("form", ["save", "eager", "lazy"])
@pytest.mark.parametrize("hook", ["create_local_plan", "resolve_data", "finish_plan"])
async def test_a_planner_that_waits_for_the_callers_loop_gets_on_with_a_save(hook, form):
    backend, meeting = MemoryBackend(), Meeting()
    planner = SlowSavePlanner(hook, meeting)
    answering = asyncio.create_task(meeting.answer())
    if form == "save":
        await savestream.save(state(), (backend, "a"), planner=planner)
    else:
        await (await savestream.start_save(state(), (backend, "a"), planner=planner, stage=form))
    await answering
    assert meeting.meetings
    assert_same(await savestream.load((backend, "a")), state())


@pytest.mark.parametrize("hook", ["create_local_plan", "load_bytes"])
async def test_a_planner_that_waits_for_the_callers_loop_gets_on_with_a_load(hook):
    backend, meeting = MemoryBackend(), Meeting()
    await savestream.save(state(), (backend, "a"))
    answering = asyncio.create_task(meeting.answer())
    target = state(0)
    found = await savestream.load((backend, "a"), target, planner=SlowLoadPlanner(hook, meeting))
    await answering
    assert meeting.meetings
    assert_same(found, state())


@pytest.mark.parametrize("kind", ["head", "open_writer", "write", "finish", "put", "create"])
async def test_storage_that_waits_for_the_callers_loop_gets_on(kind, tmp_path):
    meeting = Meeting()
    backend = FaultyBackend(FileBackend(tmp_path / "store"), [Fault(kind, None, hook=meeting.wait)])
    answering = asyncio.create_task(meeting.answer())
    await savestream.save(state(), (backend, "a"))
    await answering
    assert meeting.meetings == 1


async def test_observers_never_run_on_the_callers_loop():
    threads = set()
    backend = MemoryBackend()
    await savestream.save(state(), (backend, "a"), observer=lambda event: threads.add(threading.get_ident()))
    await savestream.load((backend, "a"), observer=lambda event: threads.add(threading.get_ident()))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_busy_caller_does_not_hold_up_a_save_in_the_background():
    """The caller computes on its loop's thread without ever giving it back; the save ends all the same."""
    backend, ended = MemoryBackend(), threading.Event()
    handle = await savestream.start_save(state(), (backend, "a"))
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(PATIENCE_SECONDS)
    assert handle.done()
    assert_same(await savestream.load((backend, "a")), state())


FIRST_USE = """
import asyncio, sys
import numpy as np
from blockbuster import blockbuster_ctx
import savestream
async def main():
    with blockbuster_ctx():
        await savestream.save({"w": np.ones(5)}, sys.argv[1])
        print((await savestream.load(sys.argv[1]))["w"].sum())
asyncio.run(main())
"""


def test_the_first_use_in_a_process_does_not_block_either(tmp_path):
    command = [sys.executable, "-c", FIRST_USE, str(tmp_path / "step")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "5.0\n"
