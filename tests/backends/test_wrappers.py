"""Wrappers that fail, wait, slow down and record, around async and blocking backends."""

from __future__ import annotations

import errno
import os
import time

import anyio
import anyio.to_thread
import pytest
from conformance import PAGE, aligned, pattern, refused, write_object
from file_support import open_descriptors

from savestream.errors import PlanError, StorageError
from savestream.storage_backends import (
    Capabilities,
    Fault,
    FaultyBackend,
    FileBackend,
    Gate,
    LatencyBackend,
    MemoryBackend,
    ThrottledBackend,
    TracingBackend,
    WrapperBackend,
)

KINDS = {
    "open_writer": lambda backend: backend.open_writer("new"),
    "open_reader": lambda backend: backend.open_reader("old"),
    "get": lambda backend: backend.get("old", maximum_bytes=100),
    "put": lambda backend: backend.put("new", b"new"),
    "create": lambda backend: backend.create("new", b"new", scratch="s"),
    "replace": lambda backend: backend.replace("new", b"new", scratch="s", expected_etag=None),
    "head": lambda backend: backend.head("old"),
    "list": lambda backend: backend.list_objects(""),
    "delete": lambda backend: backend.delete(["old"]),
}


@pytest.fixture(params=["memory", "file"])
async def inner(request, tmp_path):
    backend = MemoryBackend() if request.param == "memory" else FileBackend(tmp_path / "root")
    await backend.put("old", b"old content")
    return backend


def test_a_wrapper_shows_its_inner_backend():
    inner = MemoryBackend("name", capabilities=Capabilities(read_gap_bytes=3))
    assert WrapperBackend(inner).url == "memory://name"
    assert WrapperBackend(inner).capabilities == inner.capabilities


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [False, True])
async def test_each_kind_fails_before_or_after_its_effect(inner, kind, after):
    backend = FaultyBackend(inner, [Fault(kind, errno.ENOSPC, after=after)])
    before = open_descriptors() if os.path.isdir("/proc/self/fd") else None
    with refused(errno.ENOSPC, match=f"{kind} .*injected"):
        await KINDS[kind](backend)
    if before is not None:
        assert open_descriptors() == before
    happened = {"put", "create", "replace"} if after else set()
    assert (await inner.head("new") is not None) == (kind in happened)
    assert (await inner.head("old") is None) == (kind == "delete" and after)
    opened = await KINDS[kind](backend)  # the fault is used up
    if kind == "open_writer":
        await opened.abort()
    if kind == "open_reader":
        await opened.close()


@pytest.mark.parametrize("blocking", [False, True])
async def test_faults_of_extents_and_ranges(tmp_path, blocking):
    write = Fault("write", errno.EIO, nth=2)
    read = Fault("read_into", lambda operation: StorageError(None, f"lost {operation.offset}"), nth=2, times=2)
    backend = FaultyBackend(FileBackend(tmp_path / "root"), [write, read])
    data = pattern(2 * PAGE)

    async def attempt(function, blocking_function, offset, view):
        if blocking:
            await anyio.to_thread.run_sync(blocking_function, offset, view)
        else:
            await function(offset, view)

    async with await backend.open_writer("a") as writer:
        await attempt(writer.write, writer.write_blocking, 0, aligned(data[:PAGE]))
        with refused(errno.EIO, match=f"offset {PAGE}"):
            await attempt(writer.write, writer.write_blocking, PAGE, aligned(data[PAGE:]))
        await attempt(writer.write, writer.write_blocking, PAGE, aligned(data[PAGE:]))
        await writer.finish(len(data))
    buffer = aligned(bytes(PAGE))
    async with await backend.open_reader("a") as reader:
        for expected in (None, "lost 4096", "lost 4096", None):
            if expected is None:
                await attempt(reader.read_into, reader.read_into_blocking, PAGE, buffer)
                assert bytes(buffer) == data[PAGE:]
            else:
                with pytest.raises(StorageError, match=expected):
                    await attempt(reader.read_into, reader.read_into_blocking, PAGE, buffer)
    assert (write.hits, read.hits) == (1, 2)


async def test_finish_may_fail_and_the_object_is_then_aborted(inner):
    backend = FaultyBackend(inner, [Fault("finish", errno.EIO)])
    async with await backend.open_writer("new") as writer:
        with refused(errno.EIO):
            await writer.finish(0)
    assert await inner.head("new") is None


async def test_faults_for_ever_of_any_kind_by_path_and_by_exception(inner):
    error = RuntimeError("broken")
    backend = FaultyBackend(inner, [Fault(None, error, times=None, path_contains="bad")])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            await backend.put("a/bad/b", b"")
        with pytest.raises(RuntimeError, match="broken"):
            await backend.head("bad")
        await backend.put("good", b"")
    backend.faults.clear()
    await backend.put("a/bad/b", b"")


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_gate_stops_an_operation_until_it_is_opened(tmp_path, blocking):
    gate = Gate()
    backend = FaultyBackend(FileBackend(tmp_path / "root"), [Fault("write", hook=gate)])
    written = anyio.Event()
    async with await backend.open_writer("a") as writer, anyio.create_task_group() as group:

        async def write() -> None:
            if blocking:
                await anyio.to_thread.run_sync(writer.write_blocking, 0, aligned(b"x"))
            else:
                await writer.write(0, aligned(b"x"))
            written.set()

        assert not gate.was_reached
        group.start_soon(write)
        await gate.reached()
        assert gate.was_reached
        assert not written.is_set()
        gate.open()
        await written.wait()


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_coroutine_hook_runs_on_the_event_loop(tmp_path, blocking):
    seen = []

    async def hook(operation):
        await anyio.sleep(0)
        seen.append((operation.kind, operation.path, operation.offset, operation.bytes))

    backend = FaultyBackend(FileBackend(tmp_path / "root"), [Fault("write", hook=hook)])
    async with await backend.open_writer("a") as writer:
        if blocking:
            await anyio.to_thread.run_sync(writer.write_blocking, PAGE, aligned(b"xy"))
        else:
            await writer.write(PAGE, aligned(b"xy"))
    assert seen == [("write", "a", PAGE, 2)]


async def test_a_gate_that_nobody_opens_or_reaches_gives_up():
    gate = Gate(patience_seconds=0.01)
    with pytest.raises(TimeoutError, match="no operation came"):
        await gate.reached()
    backend = FaultyBackend(MemoryBackend(), [Fault("put", hook=gate)])
    with pytest.raises(TimeoutError, match="put a was never let through"):
        await backend.put("a", b"")


async def test_latency_is_added_to_every_operation(inner):
    delays = []
    backend = LatencyBackend(inner, lambda operation: delays.append(operation.kind) or 0.02)
    started = time.perf_counter()
    await write_object(backend, "new", pattern(10))
    await backend.get("old", maximum_bytes=100)
    elapsed = time.perf_counter() - started
    assert delays == ["open_writer", "write", "finish", "abort", "get"]
    assert elapsed >= 5 * 0.02


async def test_latencies_of_concurrent_operations_overlap():
    backend = LatencyBackend(MemoryBackend(), 0.1)
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(backend.put, str(number), b"")
    assert 0.1 <= time.perf_counter() - started < 1.0


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_throttle_bounds_the_rate_of_all_together(tmp_path, blocking):
    backend = ThrottledBackend(FileBackend(tmp_path / "root"), 1e6)
    started = time.perf_counter()
    async with await backend.open_writer("a") as writer:
        async with anyio.create_task_group() as group:
            for number in range(5):
                view = aligned(bytes(5 * PAGE))
                if blocking:
                    group.start_soon(anyio.to_thread.run_sync, writer.write_blocking, number * 5 * PAGE, view)
                else:
                    group.start_soon(writer.write, number * 5 * PAGE, view)
        await writer.finish(25 * PAGE)
    await backend.get("a", maximum_bytes=1 << 20)
    assert time.perf_counter() - started >= 50 * PAGE / 1e6


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_throttle_needs_a_rate(rate):
    with pytest.raises(PlanError, match="bytes_per_second"):
        ThrottledBackend(MemoryBackend(), rate)


async def test_a_trace_tells_what_was_done(inner):
    backend = TracingBackend(inner)
    data = pattern(2 * PAGE + 5)
    async with await backend.open_writer("new") as writer:
        await writer.write(PAGE, aligned(data[PAGE:]))
        await writer.write(0, aligned(data[:PAGE]))
        await writer.finish(len(data))
    async with await backend.open_reader("new") as reader:
        await reader.read_into(3, aligned(bytes(7)))
        if backend.capabilities.blocking_io:
            await anyio.to_thread.run_sync(reader.read_into_blocking, 11, aligned(bytes(2)))
            with refused(errno.EIO):
                await anyio.to_thread.run_sync(reader.read_into_blocking, 0, aligned(bytes(3 * PAGE)))
        else:
            await reader.read_into(11, aligned(bytes(2)))
            with refused(errno.EIO):
                await reader.read_into(0, aligned(bytes(3 * PAGE)))
    await backend.get("old", maximum_bytes=100)
    await backend.delete(["old", "new"])
    assert [(record.kind, record.path, record.offset, record.bytes) for record in backend.records] == [
        ("open_writer", "new", 0, 0),
        ("write", "new", PAGE, PAGE + 5),
        ("write", "new", 0, PAGE),
        ("finish", "new", 0, len(data)),
        ("abort", "new", 0, 0),
        ("open_reader", "new", 0, 0),
        ("read_into", "new", 3, 7),
        ("read_into", "new", 11, 2),
        ("read_into", "new", 0, 3 * PAGE),
        ("close", "new", 0, 0),
        ("get", "old", 0, 11),
        ("delete", "old\nnew", 0, 0),
    ]
    assert [record.kind for record in backend.records if record.error is not None] == ["read_into"]
    assert "truncated" in backend.records[8].error
    assert all(record.started_seconds <= record.ended_seconds for record in backend.records)
    assert (backend.count(), backend.count("write"), backend.count("read_into")) == (12, 2, 3)
    assert (backend.bytes_moved("write"), backend.bytes_moved("read_into")) == (len(data), 9)
    backend.clear()
    assert backend.count() == 0
