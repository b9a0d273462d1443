"""Cancelling an operation while it is in a system call: it waits, leaves no descriptor, and writes nothing later."""

from __future__ import annotations

import asyncio
import os
import pathlib

import anyio
import pytest
from conformance import PAGE, aligned, pattern
from file_support import Stopper, open_descriptors

from savestream.storage_backends import FileBackend

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")

TURNS = 50  # of the event loop: a cancellation that does not wait shows within a few


async def open_writer(backend):
    await backend.open_writer("d/new.bin")


async def open_reader(backend):
    await backend.open_reader("d/old.bin")


async def write(backend):
    async with await backend.open_writer("d/new.bin") as writer:
        await writer.write(0, aligned(pattern(PAGE + 7)))


async def finish(backend):
    async with await backend.open_writer("d/new.bin") as writer:
        await writer.write(0, aligned(pattern(PAGE + 7)))
        await writer.finish(PAGE + 7)


async def abort(backend):
    writer = await backend.open_writer("d/new.bin")
    await writer.abort()


async def read(backend):
    async with await backend.open_reader("d/old.bin") as reader:
        await reader.read_into(0, aligned(bytes(PAGE + 7)))


async def get(backend):
    await backend.get("d/old.bin", maximum_bytes=1 << 20)


async def put(backend):
    await backend.put("d/put", b"put")


async def create(backend):
    await backend.create("d/created", b"created", scratch="d/id/tmp")


async def replace(backend):
    await backend.replace("d/replaced", b"replaced", scratch="d/id/tmp", expected_etag=None)


async def delete(backend):
    await backend.delete(["d/old.bin"])


async def list_objects(backend):
    await backend.list_objects("")


async def head(backend):
    await backend.head("d/old.bin")


CASES = [
    *((open_writer, "open", nth) for nth in (1, 2, 3, 4)),
    *((open_reader, "open", nth) for nth in (1, 2, 3, 4)),
    *((write, "pwrite", nth) for nth in (1, 2)),
    (write, "unlink", 1),
    *((finish, "fsync", nth) for nth in (1, 2)),
    (finish, "ftruncate", 1),
    (abort, "unlink", 1),
    *((read, "preadv", nth) for nth in (1, 2)),
    (get, "open", 3),
    (get, "fstat", 1),
    *((put, name, 1) for name in ("open", "fsync", "replace")),
    *((create, "fsync", nth) for nth in (1, 2, 3, 4)),
    *((create, name, 1) for name in ("mkdir", "link", "unlink")),
    *((replace, name, 1) for name in ("fsync", "replace")),
    *((delete, name, 1) for name in ("unlink", "fsync")),
    (list_objects, "scandir", 1),
    (head, "stat", 1),
]


async def cancel_natively(backend, operation, stopper) -> None:
    task = asyncio.ensure_future(operation(backend))
    await asyncio.to_thread(stopper.reached.wait, 30)
    task.cancel()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not task.done(), "it must wait for its thread"
    task.cancel()  # impatience changes nothing
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert not task.done(), "it must wait for its thread"
    stopper.released.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_scope(backend, operation, stopper) -> None:
    ended = anyio.Event()

    async def work(scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await operation(backend)
        finally:
            ended.set()

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(work, scope)
        await asyncio.to_thread(stopper.reached.wait, 30)
        scope.cancel()
        for _ in range(TURNS):
            await anyio.sleep(0)
        assert not ended.is_set(), "it must wait for its thread"
        stopper.released.set()
        await ended.wait()
    assert scope.cancelled_caught


@pytest.mark.parametrize("cancel", [cancel_natively, cancel_scope])
@pytest.mark.parametrize(("operation", "call", "nth"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
async def test_a_cancelled_operation_waits_and_leaves_nothing_open(tmp_path, monkeypatch, cancel, operation, call, nth):
    backend = FileBackend(tmp_path / "root")
    old = pattern(PAGE + 7)
    await backend.put("d/old.bin", old)
    before = open_descriptors()
    with monkeypatch.context() as patch:
        stopper = Stopper(patch, call, nth)
        await cancel(backend, operation, stopper)
        assert stopper.finished.is_set()
        assert open_descriptors() == before
    after = {path: path.read_bytes() for path in pathlib.Path(backend.root).rglob("*") if path.is_file()}
    whole = {"old.bin": old, "new.bin": old, "put": b"put", "created": b"created", "replaced": b"replaced"}
    assert all(whole[path.name] == content for path, content in after.items()), "nothing partial, no scratch file"
    if operation is open_writer:
        assert [path.name for path in after] == ["old.bin"]
    await asyncio.sleep(0)
    assert after == {path: path.read_bytes() for path in pathlib.Path(backend.root).rglob("*") if path.is_file()}


async def test_closing_waits_for_the_threads_that_use_the_descriptors(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path / "root")
    writer = await backend.open_writer("a.bin")
    with monkeypatch.context() as patch:
        stopper = Stopper(patch, "pwrite")
        async with anyio.create_task_group() as group:
            group.start_soon(asyncio.to_thread, writer.write_blocking, 0, aligned(pattern(PAGE)))
            await asyncio.to_thread(stopper.reached.wait, 30)
            aborting = asyncio.ensure_future(writer.abort())
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not aborting.done()
            stopper.released.set()
        await aborting
    assert await backend.list_objects("") == []
