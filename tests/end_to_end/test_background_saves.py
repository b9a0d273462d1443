"""Saves in the background: what may be mutated when, the handle, events, statistics, budgets, memory."""

import asyncio
import ctypes
import gc
import logging
import sys
import threading
import weakref

import numpy as np
import psutil
import pytest

import savestream
from savestream import (
    BlockProcessed,
    LoadFinished,
    LoadStarted,
    OperationFailed,
    PlanError,
    RangeRead,
    SaveCommitted,
    SaveOptions,
    SavePlanned,
    SaveStaged,
    StagingPool,
    StorageError,
)
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend

MEBIBYTE = 2**20


def state_of(value, size=MEBIBYTE):
    return {"w": np.full(size, value, np.float32), "small": [np.full(3, value), value], "step": value}


def assert_all(state, value):
    assert (state["w"] == value).all()
    assert (state["small"][0] == value).all()
    assert state["small"][1] == value == state["step"]


@pytest.mark.parametrize("budget", [None, 8 * MEBIBYTE], ids=["budget holds the state", "budget is smaller"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_nothing_of_the_state_is_read_after_start_save_returns(compression, budget):
    backend = MemoryBackend()
    gate = Gate()
    faulty = FaultyBackend(backend, [Fault("finish", hook=gate)])
    state = state_of(1, 8 * MEBIBYTE)
    options = SaveOptions(compression=compression, memory_budget_bytes=budget)
    handle = await savestream.start_save(state, (faulty, "c"), options=options)
    state["w"][:] = 2
    state["small"][0][:] = 2
    state["small"][1] = 2
    state["step"] = 2
    await gate.reached()
    assert not handle.done()
    gate.open()
    await handle
    assert_all(await savestream.load((backend, "c")), 1)


async def test_lazy_staging_captures_values_at_once_and_arrays_until_staged():
    backend = MemoryBackend()
    state = state_of(1)
    handle = await savestream.start_save(state, (backend, "c"), stage="lazy", metadata={"note": 1})
    state["step"] = 2
    state["small"][1] = 2
    await handle.staged()
    state["w"][:] = 2
    await handle
    assert_all(await savestream.load((backend, "c")), 1)


async def test_twenty_saves_in_flight_keep_their_own_values():
    backend = MemoryBackend()
    state = state_of(0, 1000)
    handles = []
    with StagingPool(4 * MEBIBYTE) as pool:
        for step in range(20):
            state["w"][:] = step
            state["small"][0][:] = step
            state["small"][1] = state["step"] = step
            options = SaveOptions(staging_pool=pool)
            handles.append(await savestream.start_save(state, (backend, f"s{step}"), options=options))
        await asyncio.gather(*handles)
    for step in range(20):
        assert_all(await savestream.load((backend, f"s{step}")), step)


async def test_a_background_error_reaches_whoever_awaits_and_every_callback():
    faulty = FaultyBackend(MemoryBackend(), [Fault("create", 28)])
    called = threading.Event()
    seen = []

    def callback(handle):
        seen.append(handle.exception())
        called.set()

    handle = await savestream.start_save(state_of(1), (faulty, "c"))
    handle.add_done_callback(callback)
    with pytest.raises(StorageError) as first:
        await handle
    with pytest.raises(StorageError) as second:
        await handle
    assert first.value is second.value
    assert first.value.errno == 28
    await asyncio.to_thread(called.wait, 30)
    assert seen == [first.value]
    assert isinstance(handle.exception(), StorageError)


async def test_an_error_before_staging_is_raised_by_start_save():
    with pytest.raises(savestream.UnsafeObjectError, match="bad"):
        await savestream.start_save({"bad": object()}, (MemoryBackend(), "c"))


async def test_an_error_that_nobody_asks_for_is_logged(caplog):
    gate = Gate()
    faulty = FaultyBackend(MemoryBackend(), [Fault("create", 5, hook=gate)])
    ended = threading.Event()
    handle = await savestream.start_save(state_of(1), (faulty, "c"), observer=lambda event: _end(event, ended))
    reference = weakref.ref(handle)
    await gate.reached()
    with caplog.at_level(logging.ERROR, "savestream"):
        del handle
        gc.collect()
        assert reference() is None
        gate.open()
        await asyncio.to_thread(ended.wait, 30)
        await savestream.exists((MemoryBackend(), "other"))  # the engine has gone on since
    assert "handle was dropped" in caplog.text


def _end(event, ended):
    if isinstance(event, OperationFailed):
        ended.set()


async def test_cancelling_an_await_only_ends_the_waiting():
    gate = Gate()
    backend = MemoryBackend()
    handle = await savestream.start_save(state_of(1), (FaultyBackend(backend, [Fault("create", hook=gate)]), "c"))
    waiting = asyncio.ensure_future(handle)
    await gate.reached()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    await handle
    assert await savestream.exists((backend, "c"))


async def test_a_handle_belongs_to_no_loop():
    handle = await savestream.start_save(state_of(1), (MemoryBackend(), "c"))

    def elsewhere():
        async def main():
            return await handle

        return asyncio.run(main())

    assert (await asyncio.to_thread(elsewhere)).save_id == (await handle).save_id
    assert handle.result(1).save_id == (await handle).save_id


async def test_progress_reaches_its_total():
    handle = await savestream.start_save(state_of(1), (MemoryBackend(), "c"))
    staged = handle.progress()
    assert staged.staged_bytes == staged.total_bytes > 4 * MEBIBYTE
    await handle
    done = handle.progress()
    assert done.written_bytes == done.total_bytes == staged.total_bytes


async def test_events_tell_the_whole_story(tmp_path):
    events = []
    state = state_of(1, 8 * MEBIBYTE)
    info = await savestream.save(state, tmp_path / "c", observer=events.append, options=SaveOptions(compression="none"))
    kinds = [type(event) for event in events]
    assert [event.stage for event in events[: kinds.index(SavePlanned)]] == ["plan"]
    assert kinds[-1] is SaveCommitted
    assert kinds.count(SaveStaged) == 1
    stages = {event.stage for event in events if isinstance(event, BlockProcessed)}
    assert {"plan", "stage", "digest", "write", "commit"} <= stages
    written = sum(event.bytes for event in events if isinstance(event, BlockProcessed) and event.stage == "write")
    assert written == info.statistics.raw_bytes == info.statistics.stages["write"].bytes
    assert info.statistics.stored_bytes == info.statistics.raw_bytes
    assert info.statistics.total_seconds >= info.statistics.staged_seconds > 0
    events.clear()
    await savestream.load(tmp_path / "c", observer=events.append)
    kinds = [type(event) for event in events]
    assert LoadStarted in kinds
    assert kinds[-1] is LoadFinished
    assert sum(event.bytes for event in events if isinstance(event, RangeRead)) >= info.statistics.raw_bytes


async def test_a_failing_observer_is_logged_once_and_harms_nothing(caplog):
    def observer(event):
        raise RuntimeError("observer")

    backend = MemoryBackend()
    await savestream.save(state_of(1), (backend, "c"), observer=observer)
    assert_all(await savestream.load((backend, "c"), observer=observer), 1)
    assert caplog.text.count("an observer failed") == 1


async def test_waits_show_what_limits_a_save(tmp_path):
    options = SaveOptions(compression="none", write_bytes_per_second=400 * MEBIBYTE)
    info = await savestream.save(state_of(1, 8 * MEBIBYTE), tmp_path / "c", options=options)
    assert info.statistics.stages["write"].wait_seconds > 0
    assert info.statistics.total_seconds >= 32 / 400


@pytest.mark.parametrize("budget_mebibytes", [4, 5, 40, 1000])
@pytest.mark.parametrize("compression", ["none", "auto", "zstd"])
async def test_any_budget_saves_any_state(tmp_path, budget_mebibytes, compression):
    state = state_of(1, 5 * MEBIBYTE) | {"many": [np.full(5, i) for i in range(3000)]}
    options = SaveOptions(compression=compression, memory_budget_bytes=budget_mebibytes * MEBIBYTE, threads=2)
    async with asyncio.timeout(60):
        await savestream.save(state, tmp_path / "a", options=options)
        await (await savestream.start_save(state, tmp_path / "b", options=options))
    for name in "ab":
        loaded = await savestream.load(tmp_path / name)
        assert_all(loaded, 1)
        assert all((array == i).all() for i, array in enumerate(loaded["many"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compression", "gzip"),
        ("threads", 0),
        ("threads", True),
        ("memory_budget_bytes", 1),
        ("write_bytes_per_second", 0),
        ("timeout_seconds", -1),
        ("switch_interval_seconds", "fast"),
    ],
)
def test_options_are_checked_when_they_are_made(name, value):
    with pytest.raises(PlanError, match=name):
        SaveOptions(**{name: value})


async def test_the_switch_interval_is_restored():
    before = sys.getswitchinterval()
    options = SaveOptions(switch_interval_seconds=0.0005)
    await (await savestream.start_save(state_of(1), (MemoryBackend(), "c"), options=options))
    assert sys.getswitchinterval() == before


async def test_multipart_like_storage_gets_extents_it_can_take():
    capabilities = savestream.storage_backends.Capabilities(
        minimum_extent_bytes=5 * MEBIBYTE, contiguous_extents=True, maximum_object_bytes=24 * MEBIBYTE
    )
    state = {"a": np.random.default_rng(0).standard_normal(12 * MEBIBYTE).astype(np.float32), "b": np.zeros(7)}
    for compression in ("none", "zstd"):
        backend = MemoryBackend(capabilities=capabilities)
        await savestream.save(state, (backend, "c"), options=SaveOptions(compression=compression))
        loaded = await savestream.load((backend, "c"))
        assert (loaded["a"] == state["a"]).all()
        assert len([found for found in await backend.list_objects("") if found.path.endswith(".bin")]) > 1


def return_free_memory():
    """Give the allocator's free chunks back, which the resident size would otherwise count at random."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform != "win32" else None
    if trim is not None:
        trim(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same shapes", "changing shapes", "every third fails"])
def test_memory_stays_flat_over_many_saves(tmp_path, kind):
    process = psutil.Process()
    pool = StagingPool(128 * MEBIBYTE)
    faulty = FaultyBackend(savestream.storage_backends.FileBackend(tmp_path))
    measured = []

    async def one(step):
        size = 4 * MEBIBYTE + (step % 7) * 1000 * (kind == "changing shapes")
        state = {"w": np.full(size, step, np.float32)}
        if kind == "every third fails" and step % 3 == 0:
            faulty.faults = [Fault("create", 28)]
        try:
            handle = await savestream.start_save(state, (faulty, f"s{step}"), options=SaveOptions(staging_pool=pool))
            await handle
            await savestream.delete((faulty, f"s{step}"))
        except StorageError:
            assert kind == "every third fails"
        faulty.faults = []

    for step in range(70):
        asyncio.run(one(step))
        if step in range(20, 30) or step in range(60, 70):
            gc.collect()
            return_free_memory()
            measured.append((process.memory_info().rss, process.num_fds(), threading.active_count()))
    # A leak lifts every sample; the last state of a round may still be alive in one of them.
    first, descriptors, threads = (min(column) for column in zip(*measured[:10], strict=True))
    last, last_descriptors, last_threads = (min(column) for column in zip(*measured[10:], strict=True))
    assert last - first < 8 * MEBIBYTE
    assert last_descriptors <= descriptors
    assert last_threads <= threads
    pool.close()
