"""Saves and loads side by side: shared pools, threads that are held for long, a lane that fails, memory that is let go.

The order of events is made by gates; nothing here waits for time to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import weakref

import msgspec
import numpy as np
import pytest
from fault_support import SmallObjects, assert_same, save_in_mode

import savestream
from savestream import SaveOptions, StagingPool, StorageError
from savestream.events import SaveStaged
from savestream.pipeline import reader, writer
from savestream.storage_backends import Fault, FaultyBackend, FileBackend, Gate, MemoryBackend, TracingBackend
from savestream.storage_backends.base import Capabilities
from savestream.threads import stopping

MEBIBYTE = 2**20
PATIENCE_SECONDS = 20.0


def wait(event, what):
    assert event.wait(PATIENCE_SECONDS), what


# --- pools ------------------------------------------------------------------------------------------------


class WatchedPool(StagingPool):
    """Says when a save begins to wait for memory."""

    def __init__(self, limit_bytes):
        super().__init__(limit_bytes)
        self.queued = threading.Event()

    async def _admit(self, nbytes):
        if not self._fits(nbytes):
            self.queued.set()
        await super()._admit(nbytes)


@pytest.mark.parametrize("stage", ["eager", "lazy"])
@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_two_saves_share_a_pool_that_holds_one_state(kind, stage, tmp_path):
    """The first save is staged, and about to write, when the second one already waits for its memory."""
    backend = FileBackend(tmp_path) if kind == "file" else MemoryBackend()
    with WatchedPool(6 * MEBIBYTE) as pool:
        options = SaveOptions(staging_pool=pool, compression="none")

        def hold(event):
            if isinstance(event, SaveStaged):
                wait(pool.queued, "the other save never waited for memory")

        async def save(number):
            state = {"w": np.full(MEBIBYTE, number, np.float32)}
            handle = await savestream.start_save(
                state, (backend, str(number)), options=options, observer=hold, stage=stage
            )
            await handle

        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(save(1), save(2))
        assert pool.used_bytes == 0
    for number in (1, 2):
        assert_same(await savestream.load((backend, str(number))), {"w": np.full(MEBIBYTE, number, np.float32)})


@pytest.mark.parametrize("stage", ["save", "eager"])
async def test_a_budget_below_the_limit_of_the_pool_is_kept(stage):
    budget = 8 * MEBIBYTE
    held = []
    with StagingPool(256 * MEBIBYTE) as pool:
        fault = Fault("write", times=None, hook=lambda _: held.append(pool.used_bytes))
        place = (FaultyBackend(MemoryBackend(), [fault]), "c")
        options = SaveOptions(staging_pool=pool, memory_budget_bytes=budget, compression="none", threads=4)
        state = {"w": np.arange(8 * MEBIBYTE, dtype=np.float32)}
        await save_in_mode(stage, state, place, options=options)
    assert len(held) >= 4
    assert 0 < max(held) <= budget


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("used", [False, True], ids=["prefaulted", "used by a save"])
def test_a_forked_child_is_told_that_it_has_no_pool(used):
    script = f"""
import os, sys, warnings
import numpy as np
from savestream import SaveOptions, StagingPool, UsageError, blocking
pool = StagingPool(32 << 20)
pool.prefault(16 << 20, 4 << 20)
state = {{"w": np.ones(3 << 20, np.float32)}}
options = SaveOptions(staging_pool=pool, compression="none")
if {used}:
    blocking.save(state, "memory://m/parent", options=options)
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    refused = 0
    for action in (lambda: blocking.save(state, "memory://m/child", options=options), lambda: pool.take(4 << 20)):
        try:
            action()
        except UsageError as error:
            refused += "fork" in str(error)
    os._exit(0 if refused == 2 else 3)
_, status = os.waitpid(child, 0)
blocking.save(state, "memory://m/again", options=options)
os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- threads ----------------------------------------------------------------------------------------------


async def test_fifty_saves_that_hold_their_threads_starve_nobody(tmp_path):
    """More saves than the default limiter has threads stand in a write; small calls go on, and so do the saves.

    Each save still has to open a second object, which needs a thread as well.
    """
    count = 50
    arrived, opened = threading.Semaphore(0), threading.Event()

    def hold(_operation):
        if not opened.is_set():
            arrived.release()
            wait(opened, "the writes were never let through")

    def all_arrived():
        return all(arrived.acquire(timeout=PATIENCE_SECONDS) for _ in range(count))

    plain = SmallObjects(FileBackend(tmp_path))
    tracing = TracingBackend(FaultyBackend(plain, [Fault("write", times=None, hook=hold)]))
    assert plain.capabilities.blocking_io
    state = {"a": np.arange(20_000, dtype=np.float32), "b": np.arange(9_000, dtype=np.float64)}
    options = SaveOptions(threads=1, compression="none")
    saves = [
        asyncio.create_task(savestream.save(state, (tracing, f"s{number}"), options=options)) for number in range(count)
    ]
    try:
        assert await asyncio.to_thread(all_arrived), "not every save got a thread to write in"
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert not await savestream.exists((plain, "s0"))
    finally:
        opened.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*saves)
    assert tracing.count("open_writer") == 2 * count
    assert_same(await savestream.load((plain, "s49")), state)


async def test_rate_limited_saves_starve_nobody_and_end_at_once_when_cancelled(tmp_path, monkeypatch):
    """At one byte a second no save would ever end."""
    count = 50
    waiting = threading.Semaphore(0)
    delay = writer.RateLimit.delay

    def counted(self, nbytes):
        seconds = delay(self, nbytes)
        waiting.release()
        return seconds

    monkeypatch.setattr(writer.RateLimit, "delay", counted)
    options = SaveOptions(threads=1, compression="none", write_bytes_per_second=1.0)
    state = {"a": np.arange(20_000, dtype=np.float32)}
    handles = [
        await savestream.start_save(state, tmp_path / str(number), options=options, stage="lazy")
        for number in range(count)
    ]
    for _ in range(count):
        assert await asyncio.to_thread(waiting.acquire, timeout=PATIENCE_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert not await savestream.exists(tmp_path / "0")
        for handle in handles:
            handle.cancel()
        results = await asyncio.gather(*handles, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


# --- a lane that fails ------------------------------------------------------------------------------------


@pytest.fixture
def stops(monkeypatch):
    """The events that tell the threads of a save or load to stop, in the order of their making."""
    found = []

    def spy(stop):
        found.append(stop)
        return stopping(stop)

    monkeypatch.setattr(writer, "stopping", spy)
    monkeypatch.setattr(reader, "stopping", spy)
    return found


class FailingOnce:
    """A hook: the second operation fails; what comes later waits until the others have been told to stop."""

    def __init__(self, stops):
        self.stops = stops
        self.failed = threading.Event()
        self.all_told = True
        self.later = 0
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, operation=None):
        with self._lock:
            self._count += 1
            number = self._count
        if number == 2:
            self.failed.set()
            raise StorageError(errno.ENOSPC, "the disk is full")
        wait(self.failed, "no second operation came")
        if number > 2:
            self.later += 1
        if self.all_told:  # or the test would wait for each of them
            self.all_told = self.stops[-1].wait(PATIENCE_SECONDS)


LANES = 4


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("form", ["save", "eager"])
async def test_a_lane_that_fails_stops_the_others_before_their_next_write(form, compression, stops, tmp_path):
    hook = FailingOnce(stops)
    backend = Concurrent(FaultyBackend(FileBackend(tmp_path), [Fault("write", times=None, hook=hook)]))
    random = np.random.default_rng(0)
    state = {f"w{number}": random.integers(0, 255, 5 * MEBIBYTE, np.uint8) for number in range(12)}
    options = SaveOptions(threads=LANES, compression=compression, memory_budget_bytes=128 * MEBIBYTE)
    with pytest.raises(StorageError) as caught:
        await save_in_mode(form, state, (backend, "c"), options=options)
    assert caught.value.errno == errno.ENOSPC
    assert hook.all_told
    assert hook.later <= LANES - 1
    assert not await savestream.exists((backend, "c"))


class Concurrent(SmallObjects):
    """Wants many extents in flight, and short ones."""

    @property
    def capabilities(self):
        return msgspec.structs.replace(self.inner.capabilities, write_concurrency=8, maximum_object_bytes=4 * MEBIBYTE)


async def test_a_thread_that_fails_to_stage_stops_the_others(stops):
    hook = FailingOnce(stops)

    class Planner(savestream.DefaultSavePlanner):
        def transform_object(self, write_item, object):  # noqa: A002 - the name in the interface
            hook()
            return super().transform_object(write_item, object)

    state = {f"w{number}": np.full(2 * MEBIBYTE, number, np.float32) for number in range(12)}
    backend = Concurrent(MemoryBackend())
    with pytest.raises(StorageError, match="the disk is full"):
        await savestream.start_save(state, (backend, "c"), planner=Planner(), options=SaveOptions(compression="none"))
    assert hook.all_told
    assert hook.later <= 1


async def test_a_read_that_fails_stops_the_others_before_their_next_one(stops, tmp_path):
    state = {f"w{number}": np.full(MEBIBYTE + number, number, np.float32) for number in range(16)}
    await savestream.save(state, tmp_path, options=SaveOptions(compression="none"))
    stops.clear()
    hook = FailingOnce(stops)
    backend = FaultyBackend(FileBackend(tmp_path), [Fault("read_into", times=None, hook=hook, path_contains=".bin")])
    with pytest.raises(StorageError, match="the disk is full"):
        await savestream.load((backend, ""), options=savestream.LoadOptions(threads=LANES))
    assert hook.all_told
    assert hook.later <= LANES - 1


# --- what a save keeps alive ------------------------------------------------------------------------------


class Passing(savestream.DefaultSavePlanner):
    """Overrides a method, so its items are made one by one; what it makes are the leaves themselves."""

    def transform_object(self, write_item, object):  # noqa: A002 - the name in the interface
        return super().transform_object(write_item, object)


PLANNERS = {"own": lambda: None, "default": savestream.DefaultSavePlanner, "custom": Passing}
BUDGETS = {"budget holds all": None, "smaller budget": 4 * MEBIBYTE}


def new_state():
    state = {"w": np.arange(1_500_000, dtype=np.float32), "deep": [{"b": np.arange(9.0)}], "raw": bytes(100_000)}
    return state, [weakref.ref(state["w"]), weakref.ref(state["deep"][0]["b"])]


def alive(refs):
    gc.collect()
    return [ref() is not None for ref in refs]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("stage", ["eager", "lazy"])
async def test_a_staged_save_keeps_nothing_of_the_state(stage, budget, planner):
    gate = Gate()
    backend = FaultyBackend(MemoryBackend(), [Fault("create", hook=gate)])
    state, refs = new_state()
    chosen = PLANNERS[planner]()
    options = SaveOptions(memory_budget_bytes=BUDGETS[budget], compression="none")
    handle = await savestream.start_save(state, (backend, "c"), stage=stage, options=options, planner=chosen)
    await handle.staged()
    await gate.reached()
    try:
        del state
        assert alive(refs) == [False, False]
        assert not handle.done()
    finally:
        gate.open()
    await handle
    expected, _ = new_state()
    assert_same(await savestream.load((backend, "c")), expected)


FAILURES = {
    "write": [Fault("write", errno.ENOSPC)],
    "commit": [Fault("create", errno.ENOSPC)],
    "backend's own error": [Fault("put", RuntimeError("lost"))],
}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failed_save_that_is_kept_keeps_nothing_of_the_state(failure, budget, planner):
    faults = [Fault(fault.kind, fault.error) for fault in FAILURES[failure]]
    state, refs = new_state()
    chosen = PLANNERS[planner]()
    options = SaveOptions(memory_budget_bytes=BUDGETS[budget], compression="none")
    place = (FaultyBackend(MemoryBackend(), faults), "c")
    handle = await savestream.start_save(state, place, stage="lazy", options=options, planner=chosen)
    del state
    with contextlib.suppress(StorageError, RuntimeError):
        await handle
    assert handle.exception() is not None
    await savestream.exists((MemoryBackend(), "c"))  # the engine has gone on: its frames hold no error any more
    assert alive(refs) == [False, False]


async def test_a_planner_whose_planning_failed_keeps_nothing_of_the_state():
    class Failing(savestream.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            raise ValueError("no plan today")

    state, refs = new_state()
    planner = Failing()
    with pytest.raises(ValueError, match="no plan today"):
        await savestream.save(state, (MemoryBackend(), "c"), planner=planner)
    await savestream.exists((MemoryBackend(), "c"))  # the engine has gone on: its frames hold no error any more
    del state
    assert alive(refs) == [False, False]
    assert isinstance(planner, Failing)


# --- storage that wants large extents in small objects ----------------------------------------------------


@pytest.mark.parametrize(
    ("form", "compression", "object_bytes"),
    [
        ("save", "none", 16 * MEBIBYTE),
        ("save", "none", 20 * MEBIBYTE),
        ("save", "zstd", 20 * MEBIBYTE + 17),
        ("eager", "zstd", 33 * MEBIBYTE),
    ],
)
async def test_large_extents_in_small_objects(form, compression, object_bytes):
    stated = Capabilities(
        minimum_extent_bytes=16 * MEBIBYTE, maximum_object_bytes=object_bytes, contiguous_extents=True
    )
    backend = MemoryBackend(capabilities=stated)
    random = np.random.default_rng(3)
    state = {
        "noise": random.integers(0, 255, 33 * MEBIBYTE, np.uint8),
        "zeros": np.zeros(5 * MEBIBYTE, np.float32),
        "small": [random.random(1000) for _ in range(20)],
    }
    options = SaveOptions(compression=compression)
    await save_in_mode(form, state, (backend, "c"), options=options)
    assert_same(await savestream.load((backend, "c")), state)
    await savestream.verify((backend, "c"))


async def test_an_extent_that_had_to_stay_short_is_the_last_of_its_object():
    """Three frames that do not shrink leave no room for the fourth, until it shrinks."""
    limit = 15 * MEBIBYTE
    stated = Capabilities(minimum_extent_bytes=limit, maximum_object_bytes=limit, contiguous_extents=True)
    backend = MemoryBackend(capabilities=stated)
    data = np.zeros(16 * MEBIBYTE, np.uint8)
    data[: 12 * MEBIBYTE] = np.random.default_rng(4).integers(0, 255, 12 * MEBIBYTE, np.uint8)
    await savestream.save({"w": data}, (backend, "c"), options=SaveOptions(compression="zstd", threads=1))
    assert_same(await savestream.load((backend, "c")), {"w": data})
