"""The memory backend: the conformance tests, and what it holds multipart writers to."""

from __future__ import annotations

import errno

import anyio
import pytest
from conformance import BackendConformance, aligned, pattern, refused

from savestream.storage_backends import (
    Capabilities,
    FaultyBackend,
    LatencyBackend,
    MemoryBackend,
    ThrottledBackend,
    TracingBackend,
    WrapperBackend,
)


def innermost(backend):
    while isinstance(backend, WrapperBackend):
        backend = backend.inner
    return backend


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def backend(self):
        return MemoryBackend("test", capabilities=Capabilities(extent_alignment_bytes=512))

    def raw_get(self, backend, path):
        stored = innermost(backend)._objects.get(path)
        return None if stored is None else stored.data

    def raw_set(self, backend, path, data):
        inner = innermost(backend)
        with inner._lock:
            inner._store(path, data)


class TestWrapperAroundMemory(TestMemoryBackend):
    @pytest.fixture(params=["faulty", "throttled", "stacked"])
    def backend(self, request):
        inner = MemoryBackend("test", capabilities=Capabilities(extent_alignment_bytes=512))
        wrap = {
            "faulty": FaultyBackend,
            "throttled": lambda inner: ThrottledBackend(inner, 1e12),
            "stacked": lambda inner: TracingBackend(LatencyBackend(WrapperBackend(inner), lambda operation: 0.0)),
        }
        return wrap[request.param](inner)


MULTIPART = Capabilities(minimum_extent_bytes=1000, contiguous_extents=True, maximum_object_bytes=5000)


async def test_an_object_appears_only_when_it_is_finished():
    backend = MemoryBackend()
    async with await backend.open_writer("a") as writer:
        await writer.write(0, aligned(b"data"))
        assert await backend.head("a") is None
        assert await backend.list_objects("") == []
        await writer.finish(4)
        assert await backend.get("a", maximum_bytes=4) == b"data"


@pytest.mark.parametrize(
    ("extents", "size", "message"),
    [
        ([(0, 1000), (2000, 1000)], 3000, "1000 to 2000 were never written"),
        ([(1000, 1000)], 2000, "0 to 1000 were never written"),
        ([(0, 999), (999, 1)], 1000, "999 bytes, fewer than 1000"),
        ([(0, 1000)], 999, "end at 1000, not at 999"),
        ([(0, 1000)], 1001, "end at 1000, not at 1001"),
        ([], 1, "end at 0, not at 1"),
    ],
)
async def test_what_a_multipart_upload_would_refuse_is_refused(extents, size, message):
    backend = MemoryBackend(capabilities=MULTIPART)
    async with await backend.open_writer("a") as writer:
        for offset, length in extents:
            await writer.write(offset, aligned(bytes(length)))
        with refused(errno.EINVAL, match=message):
            await writer.finish(size)
    assert await backend.list_objects("") == []


async def test_what_a_multipart_upload_would_take_is_taken():
    backend = MemoryBackend(capabilities=MULTIPART)
    data = pattern(3007)
    async with await backend.open_writer("a") as writer:
        for offset, end in ((2500, 3007), (0, 1000), (1000, 2500)):
            await writer.write(offset, memoryview(data)[offset:end])
        await writer.finish(len(data))
    assert await backend.get("a", maximum_bytes=5000) == data


async def test_objects_beyond_the_maximum_are_refused():
    backend = MemoryBackend(capabilities=MULTIPART)
    async with await backend.open_writer("a") as writer:
        with refused(errno.EFBIG, match="5001 bytes exceed the 5000"):
            await writer.write(4000, aligned(bytes(1001)))
    for operation in (
        backend.put("a", bytes(5001)),
        backend.create("a", bytes(5001), scratch="s"),
        backend.replace("a", bytes(5001), scratch="s", expected_etag=None),
    ):
        with refused(errno.EFBIG):
            await operation


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (5, 10), (9, 1), (0, 20), (10, 11), (15, 1)])
async def test_overlapping_extents_are_refused(offset, length):
    async with await MemoryBackend().open_writer("a") as writer:
        await writer.write(20, aligned(bytes(10)))
        await writer.write(0, aligned(bytes(10)))
        await writer.write(10, aligned(b""))
        overlapping = offset < 10 or offset + length > 20
        if not overlapping:
            await writer.write(offset, aligned(bytes(length)))
            return
        with refused(errno.EINVAL, match="overlap"):
            await writer.write(offset, aligned(bytes(length)))


async def test_a_cancelled_operation_has_not_happened():
    backend = MemoryBackend()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await backend.put("a", b"x")
    assert scope.cancelled_caught
    assert await backend.head("a") is None


def test_it_never_offers_blocking_calls():
    stated = Capabilities(blocking_io=True, conditional_create=False, read_gap_bytes=7)
    capabilities = MemoryBackend(capabilities=stated).capabilities
    assert not capabilities.blocking_io
    assert capabilities.conditional_create
    assert capabilities.read_gap_bytes == 7
