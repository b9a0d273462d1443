"""The file backend: the conformance tests, modes, links, direct I/O and its fallbacks, real limits of the system."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import subprocess
import sys
import textwrap

import blockbuster
import pytest
from conformance import LIMIT, PAGE, BackendConformance, aligned, pattern, read_ranges, refused, unaligned, write_object
from file_support import Failing, RawFiles, open_descriptors

from savestream.storage_backends import (
    FaultyBackend,
    FileBackend,
    LatencyBackend,
    ThrottledBackend,
    TracingBackend,
    WrapperBackend,
    direct_io,
    directories,
    file_objects,
)
from savestream.storage_backends.file_tree import FileTree

DIRECT = getattr(os, "O_DIRECT", 0)


class TestFileBackend(RawFiles, BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path):
        return FileBackend(tmp_path / "runs" / "root")


class TestWithoutDirectoryDescriptors(RawFiles, BackendConformance):
    """The way of systems without ``dir_fd``."""

    @pytest.fixture
    def backend(self, tmp_path, monkeypatch):
        monkeypatch.setattr(directories, "USE_DESCRIPTORS", False)
        return FileBackend(tmp_path / "root")


class TestWithoutDirectAndPositionalCalls(RawFiles, BackendConformance):
    """The way of Windows: no ``O_DIRECT``, no ``pwrite``, no ``preadv``."""

    @pytest.fixture
    def backend(self, tmp_path, monkeypatch):
        monkeypatch.setattr(file_objects, "DIRECT", 0)
        monkeypatch.delattr(os, "pwrite")
        monkeypatch.delattr(os, "preadv")
        return FileBackend(tmp_path / "root")


class TestLinksRefused(RawFiles, BackendConformance):
    """File systems without hard links; between processes and threads of one machine the promise holds all the same."""

    @pytest.fixture
    def backend(self, tmp_path, monkeypatch):
        Failing(monkeypatch, "link", errno.EPERM)
        return FileBackend(tmp_path / "root")


class TestWrapperAroundFiles(RawFiles, BackendConformance):
    @pytest.fixture(params=["faulty", "throttled", "stacked"])
    def backend(self, request, tmp_path):
        wrap = {
            "faulty": FaultyBackend,
            "throttled": lambda inner: ThrottledBackend(inner, 1e12),
            "stacked": lambda inner: TracingBackend(LatencyBackend(WrapperBackend(inner), 0.0)),
        }
        return wrap[request.param](FileBackend(tmp_path / "root"))


@pytest.fixture
def backend(tmp_path):
    return FileBackend(tmp_path / "root")


# The root


async def test_a_relative_root_is_fixed_at_construction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = FileBackend("run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    await backend.put("a", b"x")
    assert (tmp_path / "run" / "a").read_bytes() == b"x"
    assert list(elsewhere.iterdir()) == []


async def test_the_root_may_be_a_link_and_is_not_removed_then(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to("disk", target_is_directory=True)
    backend = FileBackend(tmp_path / "root")
    await write_object(backend, "a/b.bin", b"data")
    assert (tmp_path / "disk" / "a" / "b.bin").read_bytes() == b"data"
    assert await backend.get("a/b.bin", maximum_bytes=4) == b"data"
    await backend.delete(["a/b.bin"])
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "root").is_symlink()


async def test_an_empty_root_goes_and_its_parents_stay(tmp_path):
    backend = FileBackend(tmp_path / "parent" / "root")
    await backend.put("a/b", b"x")
    await backend.delete(["a/b"])
    assert (tmp_path / "parent").is_dir()
    assert not (tmp_path / "parent" / "root").exists()


async def test_an_abort_leaves_directories_that_others_made(tmp_path):
    (tmp_path / "root" / "theirs").mkdir(parents=True)
    backend = FileBackend(tmp_path / "root")
    writer = await backend.open_writer("theirs/ours/a.bin")
    assert (tmp_path / "root" / "theirs" / "ours").is_dir()
    await writer.abort()
    assert list((tmp_path / "root" / "theirs").iterdir()) == []


async def test_an_abort_leaves_a_file_that_took_its_place(backend):
    writer = await backend.open_writer("a.bin")
    await backend.put("a.bin", b"theirs")
    await writer.abort()
    assert await backend.get("a.bin", maximum_bytes=10) == b"theirs"


async def test_a_file_in_the_roots_place(tmp_path):
    (tmp_path / "root").write_bytes(b"a file")
    backend = FileBackend(tmp_path / "root")
    assert await backend.head("a") is None
    with refused(errno.ENOENT, match="not a directory"):
        await backend.get("a", maximum_bytes=1)
    with refused(errno.ENOTDIR):
        await backend.open_writer("a")


# Modes and permissions


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
async def test_modes_follow_the_umask(backend):
    before = os.umask(0o027)
    try:
        await write_object(backend, "c/id/a.bin", b"data")
        await backend.put("c/id/part.json", b"{}")
        await backend.create("c/manifest.json", b"{}", scratch="c/id/manifest.tmp")
        await backend.replace("c/other.json", b"{}", scratch="c/id/manifest.tmp", expected_etag=None)
    finally:
        os.umask(before)
    found = {
        str(path.relative_to(backend.root)): stat.S_IMODE(path.stat().st_mode)
        for path in pathlib.Path(backend.root).rglob("*")
    }
    directories_, files = (
        {"c": 0o750, "c/id": 0o750},
        ["c/id/a.bin", "c/id/part.json", "c/manifest.json", "c/other.json"],
    )
    assert found == directories_ | dict.fromkeys(files, 0o640)
    assert stat.S_IMODE(os.stat(backend.root).st_mode) == 0o750


def run_python(code: str, *arguments: str, **keywords) -> str:
    """Run a program of its own; its limits and its user are its own too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **keywords,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
async def test_a_read_only_tree_is_readable_and_refuses_early(tmp_path):
    root = tmp_path / "root"
    backend = FileBackend(root)
    data = pattern(3 * PAGE + 1)
    await write_object(backend, "c/a.bin", data)
    await backend.put("c/part.json", b"{}")
    for path in (*root.rglob("*"), root):
        path.chmod(0o444 if path.is_file() else 0o555)
    code = """
        import asyncio, ctypes, os, sys
        from savestream.errors import StorageError
        from savestream.storage_backends import FileBackend

        if os.getuid() == 0:  # root may write anywhere until it drops its capabilities
            class Header(ctypes.Structure):
                _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
            sets = (ctypes.c_uint32 * 6)()
            assert ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(Header(0x20080522, 0)), sets) == 0

        async def main():
            backend = FileBackend(sys.argv[1])
            async with await backend.open_reader("c/a.bin") as reader:
                data = bytearray(reader.size_bytes)
                await reader.read_into(0, memoryview(data))
            assert await backend.get("c/part.json", maximum_bytes=10) == b"{}"
            assert [info.path for info in await backend.list_objects("")] == ["c/a.bin", "c/part.json"]
            for attempt in (
                lambda: backend.open_writer("c/b.bin"),
                lambda: backend.open_writer("d/b.bin"),
                lambda: backend.put("c/part.json", b"x"),
                lambda: backend.create("c/m", b"x", scratch="c/m.tmp"),
                lambda: backend.delete(["c/a.bin"]),
            ):
                try:
                    await attempt()
                except StorageError as error:
                    print(error.errno, error)
                else:
                    raise AssertionError("written into a read-only tree")
            sys.stdout.flush()
            sys.stdout.buffer.write(data)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), str(root)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr.decode()
    *lines, rest = done.stdout.split(b"\n", 5)
    assert rest == data
    for line in lines:
        assert line.startswith(f"{errno.EACCES} ".encode())
        assert str(root).encode() in line
        assert b"permissions" in line


# Links


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.skipif(os.name != "posix", reason="links need a privilege elsewhere")
async def test_nothing_is_reached_through_links(tmp_path, backend, monkeypatch, descriptors):
    monkeypatch.setattr(directories, "USE_DESCRIPTORS", descriptors)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    await backend.put("real/a", b"a")
    root = pathlib.Path(backend.root)
    (root / "door").symlink_to(outside)
    (root / "real" / "window").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "nothing")
    for path in ("door/secret", "real/window"):
        for operation in (backend.open_reader(path), backend.get(path, maximum_bytes=LIMIT)):
            with refused(errno.ELOOP, match="symbolic link"):
                await operation
    for operation in (
        backend.open_writer("door/new"),
        backend.put("door/new", b"x"),
        backend.create("door/new", b"x", scratch="s"),
        backend.create("new", b"x", scratch="door/s"),
        backend.replace("door/new", b"x", scratch="s", expected_etag=None),
        backend.head("door/secret"),
        backend.list_objects("door"),
        backend.list_directories("door"),
        backend.delete(["door/secret"]),
    ):
        with refused(errno.ELOOP, match="symbolic link"):
            await operation
    for path in ("real/window", "dangling"):
        with refused(errno.EEXIST):
            await backend.open_writer(path)
        with refused(errno.EEXIST):
            await backend.create(path, b"x", scratch="s")
        assert await backend.head(path) is None
    assert [info.path for info in await backend.list_objects("")] == ["real/a"]
    assert await backend.list_directories("") == ["real"]
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    await backend.put("real/window", b"mine")  # replaces the link itself
    await backend.delete(["dangling"])
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (root / "real" / "window").is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
async def test_what_is_no_file_is_refused_without_waiting(backend):
    await backend.put("d/a", b"x")
    os.mkfifo(os.path.join(backend.root, "pipe"))
    for path, number in (("pipe", errno.EINVAL), ("d", errno.EISDIR)):
        for operation in (backend.open_reader(path), backend.get(path, maximum_bytes=LIMIT)):
            with refused(number, match=path):
                await operation
        assert await backend.head(path) is None
        with refused(errno.EEXIST):
            await backend.create(path, b"x", scratch="s")
    assert [info.path for info in await backend.list_objects("")] == ["d/a"]


# Direct I/O


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
async def test_aligned_extents_go_out_and_come_in_directly(backend, monkeypatch):
    flags = {"pwrite": [], "preadv": []}
    import fcntl

    for name in flags:
        original = getattr(os, name)

        def noting(descriptor, *arguments, original=original, name=name):
            flags[name].append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT))
            return original(descriptor, *arguments)

        monkeypatch.setattr(os, name, noting)
    await write_object(backend, "a", pattern(3 * PAGE + 1), (2,))
    assert flags["pwrite"] == [True] * 3
    assert await read_ranges(backend, "a", [(0, 3 * PAGE + 1)]) == [pattern(3 * PAGE + 1)]
    assert flags["preadv"] == [True] * 2
    flags["pwrite"].clear()
    await write_object(backend, "b", pattern(3 * PAGE + 1), (2,), memory=unaligned)
    assert flags["pwrite"] == [False] * 2


@pytest.mark.parametrize("limit", [1000, PAGE, PAGE + 1000])
@pytest.mark.parametrize("memory", [aligned, unaligned])
async def test_short_writes_and_reads_are_continued(backend, monkeypatch, limit, memory):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, memoryview(data)[:limit], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [memoryview(views[0])[:limit]], offset))
    data = pattern(7 * PAGE + 11)
    await write_object(backend, "a", data, (3,), memory=memory)
    assert pathlib.Path(backend.root, "a").read_bytes() == data
    assert await read_ranges(backend, "a", [(0, len(data)), (PAGE, 5000)], memory) == [data, data[PAGE : PAGE + 5000]]


async def test_one_call_moves_no_more_than_the_limit(backend, monkeypatch):
    monkeypatch.setattr(direct_io, "MAXIMUM_CALL_BYTES", 2 * PAGE)
    data = pattern(7 * PAGE + 11)
    for memory in (aligned, unaligned):
        await write_object(backend, memory.__name__, data, (4,), memory=memory)
        assert await read_ranges(backend, memory.__name__, [(0, len(data))], memory) == [data]


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
@pytest.mark.parametrize("call", ["open", "pwrite", "preadv"])
async def test_what_direct_io_refuses_goes_buffered(backend, monkeypatch, call):
    import fcntl

    def is_direct(first, second=0, *rest, **keywords):
        return bool((second if call == "open" else fcntl.fcntl(first, fcntl.F_GETFL)) & DIRECT)

    failing = Failing(monkeypatch, call, errno.EINVAL, when=is_direct)
    data = pattern(5 * PAGE + 11)
    await write_object(backend, "a", data, (2,))
    assert pathlib.Path(backend.root, "a").read_bytes() == data
    assert await read_ranges(backend, "a", [(0, len(data)), (PAGE, PAGE)]) == [data, data[PAGE : 2 * PAGE]]
    assert failing.failures > 0


@pytest.mark.skipif(not DIRECT, reason="no O_DIRECT here")
async def test_einval_in_mid_extent_continues_where_it_stopped(backend, monkeypatch):
    monkeypatch.setattr(direct_io, "MAXIMUM_CALL_BYTES", PAGE)
    Failing(monkeypatch, "pwrite", errno.EINVAL, nth=3, times=1)
    data = pattern(5 * PAGE + 11)
    await write_object(backend, "a", data, (8,))
    assert pathlib.Path(backend.root, "a").read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_failed_write_is_reported_with_place_and_cure(backend, monkeypatch, number, nth):
    failing = Failing(monkeypatch, "pwrite", number, nth=nth)
    with refused(number, match=r"writing \d+ bytes at offset \d+ of .*c/a\.bin") as caught:
        await write_object_in_order(backend, "c/a.bin", pattern(3 * PAGE))
    if number != errno.EIO:
        assert "free space" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert failing.failures == 1
    assert not os.path.exists(backend.root)


async def write_object_in_order(backend, path, data):
    async with await backend.open_writer(path) as writer:
        for offset in range(0, len(data), PAGE):
            await writer.write(offset, aligned(data[offset : offset + PAGE]))
        await writer.finish(len(data))


async def test_a_write_of_nothing_is_an_error_not_a_loop(backend, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 0)
    with refused(errno.EIO, match="nothing was written"):
        await write_object_in_order(backend, "a", pattern(PAGE))


async def test_a_file_that_shrinks_under_its_reader(backend):
    await write_object(backend, "a.bin", pattern(4 * PAGE))
    for memory in (aligned, unaligned):
        async with await backend.open_reader("a.bin") as reader:
            os.truncate(os.path.join(backend.root, "a.bin"), 2 * PAGE + 100)
            with refused(errno.EIO, match=rf"a\.bin failed: it is truncated: it ends at byte {2 * PAGE + 100}"):
                await reader.read_into(0, memory(bytes(4 * PAGE)))
        os.truncate(os.path.join(backend.root, "a.bin"), 4 * PAGE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="resource limits are POSIX")
@pytest.mark.parametrize("where", ["aligned", "unaligned"])
def test_a_real_size_limit(tmp_path, where):
    code = """
        import asyncio, mmap, resource, sys
        from savestream.errors import StorageError
        from savestream.storage_backends import FileBackend

        async def main():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_001, 100_001))
            backend = FileBackend(sys.argv[1])
            skip = 0 if sys.argv[2] == "aligned" else 1
            data = memoryview(mmap.mmap(-1, 1 << 20))[skip:]
            try:
                async with await backend.open_writer("c/a.bin") as writer:
                    await writer.write(0, data[:65536])
                    await writer.write(65536, data[65536:])
            except StorageError as error:
                print(error.errno, error)
            async with await backend.open_writer("c/a.bin") as writer:
                await writer.write(0, data[:90112])
                await writer.finish(90112)

        asyncio.run(main())
    """
    output = run_python(code, str(tmp_path / "root"), where)
    assert output.startswith(f"{errno.EFBIG} writing")
    assert "c/a.bin" in output
    assert "ulimit -f" in output
    assert (tmp_path / "root" / "c" / "a.bin").stat().st_size == 90112


@pytest.mark.skipif(not hasattr(os, "fork"), reason="resource limits are POSIX")
def test_few_descriptors_are_enough_and_too_few_are_named(tmp_path):
    code = """
        import asyncio, resource, sys
        from savestream.errors import StorageError
        from savestream.storage_backends import FileBackend

        async def main():
            backend = FileBackend(sys.argv[1])
            await backend.put("warm", b"up")
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            for number in range(200):
                await backend.put(f"d{number % 7}/{number}", b"x")
            assert len(await backend.list_objects("")) == 201
            writers = []
            try:
                for number in range(64):
                    writers.append(await backend.open_writer(f"w/{number}"))
            except StorageError as error:
                print(error.errno, len(writers), error)
            for writer in writers:
                await writer.abort()
            assert len(await backend.list_objects("")) == 201

        asyncio.run(main())
    """
    output = run_python(code, str(tmp_path / "root"))
    number, count, message = output.split(" ", 2)
    assert int(number) == errno.EMFILE
    assert int(count) >= 20
    assert "ulimit -n" in message


@pytest.mark.slow
async def test_an_object_beyond_two_gibibytes(backend):
    boundary = 1 << 31
    data = pattern(4 * PAGE + 5)
    async with await backend.open_writer("a") as writer:
        await writer.write(boundary - 2 * PAGE, aligned(data))
        await writer.write((1 << 32) + PAGE, aligned(data))
        await writer.finish((1 << 32) + PAGE + len(data))
    ranges = [(boundary - 2 * PAGE, len(data)), ((1 << 32) + PAGE, len(data)), (boundary + 7, 9)]
    assert await read_ranges(backend, "a", ranges) == [data, data, data[2 * PAGE + 7 :][:9]]
    info = await backend.head("a")
    assert info is not None
    assert info.size_bytes == (1 << 32) + PAGE + len(data)


@pytest.mark.slow
async def test_one_extent_beyond_two_gibibytes(backend):
    size = (1 << 31) + PAGE + 5
    buffer = aligned(bytes(1)).obj  # the type of the memory, then enough of it
    memory = memoryview(type(buffer)(-1, size))
    memory[-5:] = b"tail!"
    async with await backend.open_writer("a") as writer:
        await writer.write(0, memory)
        await writer.finish(size)
    memory[-5:] = bytes(5)
    memory[:3] = b"xyz"
    async with await backend.open_reader("a") as reader:
        await reader.read_into(0, memory)
    assert bytes(memory[-5:]) == b"tail!"
    assert bytes(memory[:3]) == bytes(3)


# The event loop


async def test_no_operation_blocks_the_event_loop(backend):
    await backend.put("warm", b"the threads and modules")
    before = open_descriptors()
    with blockbuster.blockbuster_ctx():
        await write_object(backend, "c/id/a.bin", pattern(3 * PAGE))
        await read_ranges(backend, "c/id/a.bin", [(0, 100), (0, PAGE)])
        await backend.put("c/id/part", b"x")
        await backend.get("c/id/part", maximum_bytes=10)
        await backend.create("c/manifest", b"x", scratch="c/id/tmp")
        await backend.replace("c/manifest", b"y", scratch="c/id/tmp", expected_etag=None)
        await backend.head("c/manifest")
        await backend.list_objects("")
        await backend.list_directories("c")
        await backend.delete(["c/manifest", "c/id/part", "c/id/a.bin"])
    assert open_descriptors() == before


def test_an_object_that_is_dropped_unclosed_is_reported(tmp_path):
    writer = file_objects.FileWriter.open(FileTree(str(tmp_path)), ("a",))
    with pytest.warns(ResourceWarning, match="never closed"):
        del writer
