"""What every backend must do, whatever keeps its bytes. Subclasses give ``backend`` and raw access beside it."""

from __future__ import annotations

import asyncio
import errno
import mmap
import random
import threading
import uuid

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savestream.errors import StorageError
from savestream.storage_backends import StorageBackend

LIMIT = 1 << 20
PAGE = 4096
BAD_PATHS = ["", "/a", "../a", "a/../b", "a/..", ".", "./a", "a/./b", "a//b", "a/", "a\0b", "//"]


def aligned(data: bytes) -> memoryview:
    """A page-aligned copy."""
    if not data:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def unaligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data) + 3)
    memory[3:] = data
    return memoryview(memory)[3:]


def pattern(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def extents_of(data: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """Cut ``data`` into extents of whole pages, cycling through ``sizes`` (in pages)."""
    cut, offset, turn = [], 0, 0
    while offset < len(data):
        length = sizes[turn % len(sizes)] * PAGE
        cut.append((offset, data[offset : offset + length]))
        offset, turn = offset + length, turn + 1
    return cut


async def write_object(
    backend: StorageBackend, path: str, data: bytes, sizes: tuple[int, ...] = (1,), seed: int = 0, memory=aligned
) -> None:
    """Write an object by extents, concurrently and out of order, half of them through the blocking calls."""
    extents = extents_of(data, list(sizes))
    random.Random(seed).shuffle(extents)
    async with await backend.open_writer(path) as writer:
        async with anyio.create_task_group() as group:
            for number, (offset, extent) in enumerate(extents):
                if backend.capabilities.blocking_io and number % 2:
                    group.start_soon(anyio.to_thread.run_sync, writer.write_blocking, offset, memory(extent))
                else:
                    group.start_soon(writer.write, offset, memory(extent))
        await writer.finish(len(data))


async def read_ranges(backend: StorageBackend, path: str, ranges: list[tuple[int, int]], memory=aligned) -> list[bytes]:
    """Read ranges concurrently, half of them through the blocking calls."""
    buffers = [memory(b"\xee" * length) for _, length in ranges]
    async with await backend.open_reader(path) as reader, anyio.create_task_group() as group:
        for number, ((offset, _), buffer) in enumerate(zip(ranges, buffers, strict=True)):
            if backend.capabilities.blocking_io and number % 2:
                group.start_soon(anyio.to_thread.run_sync, reader.read_into_blocking, offset, buffer)
            else:
                group.start_soon(reader.read_into, offset, buffer)
    return [bytes(buffer) for buffer in buffers]


def refused(number: int, *, match: str | None = None):
    """Expect a StorageError with that errno."""
    return pytest.raises(StorageError, match=match, check=lambda error: error.errno == number)


class BackendConformance:
    """Inherit, and give the fixture ``backend`` and the methods ``raw_get`` and ``raw_set``."""

    @pytest.fixture
    def backend(self) -> StorageBackend:
        raise NotImplementedError

    def raw_get(self, backend: StorageBackend, path: str) -> bytes | None:
        """Content without the code under test, None where there is nothing."""
        raise NotImplementedError

    def raw_set(self, backend: StorageBackend, path: str, data: bytes) -> None:
        raise NotImplementedError

    # Data objects

    @pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 11 * PAGE + 17])
    @pytest.mark.parametrize("memory", [aligned, unaligned])
    async def test_extents_in_any_order_make_the_object(self, backend, size, memory):
        data = pattern(size)
        await write_object(backend, "step/a.bin", data, (1, 3, 2), seed=size, memory=memory)
        assert self.raw_get(backend, "step/a.bin") == data
        info = await backend.head("step/a.bin")
        assert info is not None
        assert (info.path, info.size_bytes) == ("step/a.bin", size)

    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        size=st.integers(0, 9 * PAGE),
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
        seed=st.integers(0, 1 << 16),
        memory=st.sampled_from([aligned, unaligned]),
        cuts=st.lists(st.tuples(st.integers(0, 9 * PAGE), st.integers(0, 3 * PAGE)), max_size=6),
    )
    async def test_any_extents_and_any_ranges(self, backend, size, sizes, seed, memory, cuts):
        path, data = f"any/{uuid.uuid4().hex}.bin", pattern(size, seed)
        await write_object(backend, path, data, tuple(sizes), seed, memory)
        assert self.raw_get(backend, path) == data
        ranges = [(min(start, size), min(length, size - min(start, size))) for start, length in cuts]
        ranges += [(start - start % PAGE, size - (start - start % PAGE)) for start, _ in ranges]
        assert await read_ranges(backend, path, ranges, memory) == [data[at : at + length] for at, length in ranges]

    async def test_ranges_of_a_foreign_object(self, backend):
        data = pattern(3 * PAGE + 5)
        self.raw_set(backend, "x/y/z.bin", data)
        ranges = [(0, len(data)), (0, 0), (len(data), 0), (PAGE, PAGE), (1, 1), (2 * PAGE, PAGE + 5), (7, PAGE)]
        for memory in (aligned, unaligned):
            found = await read_ranges(backend, "x/y/z.bin", ranges, memory)
            assert found == [data[at : at + length] for at, length in ranges]
        async with await backend.open_reader("x/y/z.bin") as reader:
            assert (reader.path, reader.size_bytes) == ("x/y/z.bin", len(data))

    @pytest.mark.parametrize(("offset", "length"), [(0, PAGE + 1), (PAGE, 1), (10 * PAGE, PAGE), (PAGE - 1, 2)])
    async def test_a_range_beyond_the_end_is_an_error_not_short_data(self, backend, offset, length):
        self.raw_set(backend, "short.bin", pattern(PAGE))
        async with await backend.open_reader("short.bin") as reader:
            with refused(errno.EIO, match=r"offset \d+ of .*short\.bin.*truncated"):
                await reader.read_into(offset, aligned(bytes(length)))

    async def test_a_negative_offset_is_refused(self, backend):
        self.raw_set(backend, "a.bin", pattern(PAGE))
        async with await backend.open_reader("a.bin") as reader:
            with refused(errno.EINVAL):
                await reader.read_into(-1, aligned(bytes(1)))
        async with await backend.open_writer("b.bin") as writer:
            with refused(errno.EINVAL):
                await writer.write(-PAGE, aligned(bytes(1)))

    async def test_read_only_memory_is_written_and_never_kept(self, backend):
        source = bytearray(pattern(2 * PAGE))
        expected = bytes(source)
        async with await backend.open_writer("a.bin") as writer:
            await writer.write(0, memoryview(source).toreadonly())
            source[:] = bytes(len(source))
            await writer.finish(len(source))
        assert self.raw_get(backend, "a.bin") == expected

    async def test_finish_cuts_and_fills_to_its_size(self, backend):
        for path, size in (("cut.bin", 100), ("filled.bin", 3 * PAGE)):
            async with await backend.open_writer(path) as writer:
                await writer.write(0, aligned(b"\x01" * PAGE))
                await writer.finish(size)
            assert self.raw_get(backend, path) == (b"\x01" * PAGE).ljust(3 * PAGE, b"\0")[:size]

    async def test_a_second_writer_of_a_path_is_refused(self, backend):
        async with await backend.open_writer("a/b.bin") as writer:
            with refused(errno.EEXIST, match=r"a/b\.bin"):
                await backend.open_writer("a/b.bin")
            await writer.finish(0)
        with refused(errno.EEXIST, match=r"a/b\.bin"):
            await backend.open_writer("a/b.bin")
        assert self.raw_get(backend, "a/b.bin") == b""

    async def test_an_abandoned_object_leaves_nothing(self, backend):
        async def abandon() -> None:
            async with await backend.open_writer("a/b/c.bin") as writer:
                await writer.write(0, aligned(pattern(PAGE)))
                raise RuntimeError("the encoder failed")

        with pytest.raises(RuntimeError, match="the encoder failed"):
            await abandon()
        assert self.raw_get(backend, "a/b/c.bin") is None
        assert await backend.list_objects("") == []
        assert await backend.list_directories("") == []
        await write_object(backend, "a/b/c.bin", b"again")
        assert self.raw_get(backend, "a/b/c.bin") == b"again"

    async def test_abort_is_harmless_twice_and_after_finish(self, backend):
        writer = await backend.open_writer("a.bin")
        await writer.write(0, aligned(b"kept"))
        await writer.finish(4)
        await writer.abort()
        await writer.abort()
        assert self.raw_get(backend, "a.bin") == b"kept"
        writer = await backend.open_writer("b.bin")
        await writer.abort()
        await writer.abort()
        assert self.raw_get(backend, "b.bin") is None

    async def test_a_closed_object_refuses_everything(self, backend):
        self.raw_set(backend, "r.bin", b"data")
        writer = await backend.open_writer("a.bin")
        await writer.finish(0)
        with refused(errno.EBADF, match=r"a\.bin"):
            await writer.write(0, aligned(b"late"))
        with refused(errno.EBADF, match=r"a\.bin"):
            await writer.finish(0)
        reader = await backend.open_reader("r.bin")
        await reader.close()
        await reader.close()
        with refused(errno.EBADF, match=r"r\.bin"):
            await reader.read_into(0, aligned(bytes(4)))

    async def test_extents_start_where_the_capabilities_say(self, backend):
        alignment = backend.capabilities.extent_alignment_bytes
        assert alignment > 1
        async with await backend.open_writer("a.bin") as writer:
            with refused(errno.EINVAL, match=f"multiples of {alignment}"):
                await writer.write(alignment // 2, aligned(b"x"))
            await writer.write(alignment, aligned(b"x"))

    # Small objects

    @pytest.mark.parametrize("size", [0, 1, 70_000])
    async def test_put_and_get(self, backend, size):
        data = pattern(size)
        await backend.put("deep/er/part.json", data)
        assert self.raw_get(backend, "deep/er/part.json") == data
        assert await backend.get("deep/er/part.json", maximum_bytes=size) == data
        assert [info.path for info in await backend.list_objects("")] == ["deep/er/part.json"]

    async def test_put_replaces_and_changes_the_etag(self, backend):
        etags = set()
        for content in (b"one", b"two", b"one", b"longer than before", b""):
            await backend.put("a", content)
            assert self.raw_get(backend, "a") == content
            info = await backend.head("a")
            assert info is not None
            assert info.etag is not None
            assert info.size_bytes == len(content)
            assert info.modified_seconds is not None
            etags.add(info.etag)
        assert len(etags) == 5

    async def test_get_refuses_what_is_larger_than_allowed(self, backend):
        self.raw_set(backend, "a", bytes(1001))
        with refused(errno.EFBIG, match="1001 bytes"):
            await backend.get("a", maximum_bytes=1000)
        assert len(await backend.get("a", maximum_bytes=1001)) == 1001

    @pytest.mark.parametrize("path", ["none", "no/such", "there/below/it"])
    async def test_absent_objects(self, backend, path):
        self.raw_set(backend, "there", b"an object, no directory")
        assert await backend.head(path) is None
        for operation in (backend.open_reader(path), backend.get(path, maximum_bytes=LIMIT)):
            with refused(errno.ENOENT, match=path):
                await operation
        await backend.delete([path])
        assert self.raw_get(backend, "there") == b"an object, no directory"

    # The commit

    async def test_create_has_one_winner_for_ever(self, backend):
        await backend.create("c/manifest.json", b"first", scratch="c/one/manifest.tmp")
        with refused(errno.EEXIST, match=r"c/manifest\.json"):
            await backend.create("c/manifest.json", b"second", scratch="c/two/manifest.tmp")
        assert self.raw_get(backend, "c/manifest.json") == b"first"
        assert [info.path for info in await backend.list_objects("")] == ["c/manifest.json"]

    async def test_create_again_with_the_same_content_is_success(self, backend):
        for _ in range(2):
            await backend.create("manifest.json", b"mine", scratch="id/manifest.tmp")
        assert self.raw_get(backend, "manifest.json") == b"mine"
        for other in (b"min", b"mine!", b""):
            with refused(errno.EEXIST):
                await backend.create("manifest.json", other, scratch="id/manifest.tmp")

    async def test_racing_tasks_create_one(self, backend):
        for round_ in range(3):
            path = f"round-{round_}/manifest.json"
            outcomes = await asyncio.gather(*(self._try_create(backend, path, number) for number in range(12)))
            winners = [content for content in outcomes if content is not None]
            assert len(winners) == 1
            assert self.raw_get(backend, path) == winners[0]

    async def test_racing_threads_create_one(self, backend):
        barrier = threading.Barrier(4)

        def racer(number: int) -> list[bytes | None]:
            found = []
            for round_ in range(4):
                barrier.wait(30)
                found.append(anyio.run(self._try_create, backend, f"round-{round_}/manifest.json", number))
            return found

        outcomes = await asyncio.gather(*(asyncio.to_thread(racer, number) for number in range(4)))
        for round_, rivals in enumerate(zip(*outcomes, strict=True)):
            winners = [content for content in rivals if content is not None]
            assert len(winners) == 1
            assert self.raw_get(backend, f"round-{round_}/manifest.json") == winners[0]

    async def _try_create(self, backend, path: str, number: int) -> bytes | None:
        content = f"writer {number}".encode()
        try:
            await backend.create(path, content, scratch=f"{path.split('/')[0]}/{number}/manifest.tmp")
        except StorageError as error:
            if (error.errno, error.outcome) != (errno.EEXIST, "failed"):
                raise
            return None
        return content

    async def test_replace(self, backend):
        await backend.replace("m", b"one", scratch="s/m.tmp", expected_etag=None)
        assert self.raw_get(backend, "m") == b"one"
        before = await backend.head("m")
        await backend.replace("m", b"two", scratch="s/m.tmp", expected_etag=before.etag)
        assert self.raw_get(backend, "m") == b"two"
        with refused(errno.EEXIST, match="changed"):
            await backend.replace("m", b"three", scratch="s/m.tmp", expected_etag=before.etag)
        with refused(errno.EEXIST, match="absent"):
            await backend.replace("n", b"three", scratch="s/m.tmp", expected_etag=before.etag)
        await backend.replace("m", b"four", scratch="s/m.tmp", expected_etag=None)
        assert self.raw_get(backend, "m") == b"four"
        assert [info.path for info in await backend.list_objects("")] == ["m"]

    async def test_racing_replacements_of_one_etag_have_one_winner(self, backend):
        for _ in range(3):
            await backend.put("m", b"old")
            etag = (await backend.head("m")).etag

            async def attempt(number: int, etag: str) -> bytes | None:
                content = f"new {number}".encode()
                try:
                    await backend.replace("m", content, scratch=f"s{number}/m.tmp", expected_etag=etag)
                except StorageError as error:
                    if (error.errno, error.outcome) != (errno.EEXIST, "failed"):
                        raise
                    return None
                return content

            outcomes = await asyncio.gather(*(attempt(number, etag) for number in range(8)))
            winners = [content for content in outcomes if content is not None]
            assert len(winners) == 1
            assert self.raw_get(backend, "m") == winners[0]

    # Listings and deletion

    async def test_listings(self, backend):
        sizes = {"a/x": 1, "a/b/y": 2, "a/b/c/z": 3, "ab/w": 4, "top": 5, "a-c/v": 6}
        for path, size in sizes.items():
            self.raw_set(backend, path, bytes(size))
        everything = await backend.list_objects("")
        assert [(info.path, info.size_bytes) for info in everything] == sorted(sizes.items())
        assert [info.path for info in await backend.list_objects("a")] == ["a/b/c/z", "a/b/y", "a/x"]
        assert [info.path for info in await backend.list_objects("a/b/c")] == ["a/b/c/z"]
        assert await backend.list_objects("a/x") == await backend.list_objects("nothing/there") == []
        assert await backend.list_directories("") == ["a", "a-c", "ab"]
        assert await backend.list_directories("a") == ["b"]
        assert await backend.list_directories("a/x") == await backend.list_directories("nothing") == []
        for info in everything:
            assert await backend.head(info.path) == info
        assert await backend.head("a/b") is None

    async def test_delete(self, backend):
        for path in ("a/b/1", "a/b/2", "a/c/3", "d/4", "5"):
            self.raw_set(backend, path, b"x")
        await backend.delete(["a/b/1", "a/b/2", "never", "d/4", "d/none"])
        assert [info.path for info in await backend.list_objects("")] == ["5", "a/c/3"]
        assert await backend.list_directories("") == ["a"]
        assert await backend.list_directories("a") == ["c"]
        await backend.delete([])
        await backend.delete(["a/c/3", "5"])
        assert await backend.list_objects("") == []
        assert await backend.list_directories("") == []
        await backend.put("a/c/3", b"again")
        assert self.raw_get(backend, "a/c/3") == b"again"

    async def test_writers_beside_deletions_of_their_directory(self, backend):
        async def come_and_go(number: int) -> None:
            for turn in range(6):
                path = f"shared/deep/{number}-{turn}"
                await backend.put(path, path.encode())
                assert await backend.get(path, maximum_bytes=100) == path.encode()
                await backend.delete([path])

        await asyncio.gather(*(come_and_go(number) for number in range(4)))
        assert await backend.list_objects("") == []
        assert await backend.list_directories("") == []

    # Paths

    @pytest.mark.parametrize("path", BAD_PATHS)
    async def test_no_path_leaves_the_root(self, backend, path):
        operations = [
            lambda: backend.open_writer(path),
            lambda: backend.open_reader(path),
            lambda: backend.get(path, maximum_bytes=LIMIT),
            lambda: backend.put(path, b"x"),
            lambda: backend.create(path, b"x", scratch="s"),
            lambda: backend.create("c", b"x", scratch=path),
            lambda: backend.replace(path, b"x", scratch="s", expected_etag=None),
            lambda: backend.replace("c", b"x", scratch=path, expected_etag=None),
            lambda: backend.head(path),
            lambda: backend.delete(["ok", path]),
        ]
        if path:
            operations += [lambda: backend.list_objects(path), lambda: backend.list_directories(path)]
        self.raw_set(backend, "ok", b"untouched")
        for operation in operations:
            with refused(errno.EINVAL, match="refused"):
                await operation()
        assert [info.path for info in await backend.list_objects("")] == ["ok"]
