"""Arrays in files: any range of any layout is read exactly, with few descriptors and little memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import savestream
from savestream import ShardedArray, blocking
from savestream.arrays import adapter_of, array_info, file_sources, host_view
from savestream.arrays.file_arrays import FileArray
from savestream.arrays.file_sources import ByteSource, FilePool
from savestream.arrays.strided_reads import covered_bytes, element_boxes, read_strided
from savestream.errors import CorruptCheckpointError, LoadMismatchError, PlanError, StorageError, UsageError


class CountingSource(ByteSource):
    """Bytes in memory; counts reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[int] = []

    def describe(self) -> str:
        return "memory"

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append(len(buffer))
        buffer[:] = self.data[offset : offset + len(buffer)]


def in_memory(array: np.ndarray, view: np.ndarray, **options: bool) -> FileArray:
    """``view``, which lies within ``array``, as an array in a source that holds the bytes of ``array``."""
    start = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    return FileArray(CountingSource(array.tobytes()), start, view.dtype.name, view.shape, view.strides, **options)


def elements(array: FileArray, start: int, stop: int) -> np.ndarray:
    target = np.empty(stop - start, host_view(array).dtype)
    adapter_of(array).copy_elements(array, start, stop, target)
    return target


@st.composite
def layouts(draw):
    """An array, and a view of it with any order of axes and steps."""
    shape = draw(hnp.array_shapes(max_dims=4, max_side=7))
    array = np.arange(np.prod(shape), dtype=draw(st.sampled_from(["u1", "<u2", "<f4", "<c16"]))).reshape(shape)
    view = array.transpose(draw(st.permutations(range(len(shape)))))
    slices = tuple(slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 3))) for size in view.shape)
    view = view[slices]
    if draw(st.booleans()):
        view = np.broadcast_to(view[..., None], (*view.shape, draw(st.integers(1, 3))))
    return array, view


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_any_range_of_any_layout(layout, data):
    array, view = layout
    found = in_memory(array, view)
    np.testing.assert_array_equal(host_view(found), view)
    start = data.draw(st.integers(0, view.size))
    stop = data.draw(st.integers(start, view.size))
    np.testing.assert_array_equal(elements(found, start, stop), view.reshape(-1)[start:stop])
    assert array_info(found, "x").strides == view.strides


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 40), st.integers(0, 40))
def test_any_layout_in_pieces_of_any_size(layout, piece_bytes, gap_bytes):
    array, view = layout
    data = array.tobytes()
    start = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
    target = np.empty(view.size, np.dtype((np.void, view.itemsize)))

    def read(offset: int, buffer: memoryview) -> None:
        assert len(buffer) <= max(piece_bytes, gap_bytes, view.itemsize)
        buffer[:] = data[offset : offset + len(buffer)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("savestream.arrays.strided_reads._PIECE_BYTES", max(piece_bytes, view.itemsize))
        patch.setattr("savestream.arrays.strided_reads._GAP_BYTES", gap_bytes)
        read_strided(read, start, view.shape, view.strides, 0, view.size, target)
    assert target.tobytes() == np.ascontiguousarray(view).tobytes()


@given(hnp.array_shapes(max_dims=4, max_side=5), st.data())
def test_boxes_cover_a_range_in_order(shape, data):
    numbers = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    stop = data.draw(st.integers(start, numbers.size))
    found = []
    for offsets, sizes, position in element_boxes(shape, start, stop):
        assert position == len(found)
        box = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == list(range(start, stop))


def test_a_transposed_array_is_read_with_bounded_memory_and_amplification():
    array = np.arange(3000 * 2000, dtype=np.float32).reshape(3000, 2000)
    found = in_memory(array, array.T)
    tracemalloc.start()
    part = elements(found, 0, 500 * 3000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(part, array.T.reshape(-1)[: 500 * 3000])
    # host_view, in elements(), made the whole array once to learn its dtype
    assert peak < array.nbytes + part.nbytes + (8 << 20)


def test_elements_that_lie_far_apart_are_not_read_through_everything_between():
    array = np.zeros((40, 1 << 20), np.uint8)
    array[:, 5] = np.arange(40)
    source = CountingSource(array.tobytes())
    column = FileArray(source, 5, "uint8", (40,), (1 << 20,))
    np.testing.assert_array_equal(host_view(column), np.arange(40))
    assert sum(source.reads) <= 40 * 64 * 1024
    assert source.reads == [1] * 40


def test_contiguous_elements_are_read_at_once_into_the_target():
    source = CountingSource(bytes(range(200)))
    found = FileArray(source, 8, "int16", (8, 4))
    np.testing.assert_array_equal(elements(found, 5, 9), np.frombuffer(source.data, "<i2", 4, 8 + 10))
    assert source.reads[-1] == 8
    single = FileArray(source, 0, "uint8", (5, 1, 2), (2, 77, 1))  # the stride of a dimension of 1 means nothing
    assert single.contiguous


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "complex128", "int8", "complex32"])
def test_elements_are_conjugated_negated_and_swapped(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = (np.arange(1, 7) * (1 - 2j if dtype.kind == "c" or name == "complex32" else 1)).astype(dtype)
    data = values.tobytes()
    assert host_view(FileArray(CountingSource(data), 0, name, (6,), negated=True)).tobytes() == (-values).tobytes()
    if "complex" in name:
        found = host_view(FileArray(CountingSource(data), 0, name, (6,), conjugated=True))
        assert found.tobytes() == np.conjugate(values).tobytes()
    width = dtype.itemsize // (2 if "complex" in name else 1)
    swapped = values.view(f"u{width}").byteswap().tobytes()
    assert host_view(FileArray(CountingSource(swapped), 0, name, (6,), swapped=True)).tobytes() == data


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_empty_arrays_and_scalars(shape, tmp_path):
    (tmp_path / "file").write_bytes(np.float32(2.5).tobytes())
    found = FileArray(tmp_path / "file", 0, "float32", shape)
    assert host_view(found).shape == shape
    assert host_view(found).tobytes() == np.full(shape, 2.5, np.float32).tobytes()
    assert found.covered_bytes == found.info.nbytes


def test_what_describes_no_array_is_refused(tmp_path):
    for arguments in [(-1, "float32", (2,)), (0, "float32", (-2,)), (0, "float32", (2,), (-4,)), (0, "int8", (2,), ())]:
        with pytest.raises(PlanError, match="layer: "):
            FileArray(tmp_path / "file", *arguments, name="layer: ")
    with pytest.raises(CorruptCheckpointError, match="dtype"):
        FileArray(tmp_path / "file", 0, "float33", (2,))
    assert covered_bytes((3, 2), (100, 1), 1) == 202


def test_saved_and_loaded(tmp_path):
    values = np.random.default_rng(0).standard_normal((600, 700))
    (tmp_path / "file").write_bytes(b"12345" + values.tobytes())
    with FilePool() as pool:
        source = pool.file(str(tmp_path / "file"))
        state = {
            "whole": FileArray(source, 5, "float64", values.shape),
            "transposed": FileArray(source, 5, "float64", (700, 600), values.T.strides),
            "column": FileArray(source, 5 + 8 * 3, "float64", (600,), (5600,)),
            "small": [FileArray(source, 5 + 8 * number, "float64", (3,)) for number in range(500)],
            "unpooled": FileArray(tmp_path / "file", 5, "float64", (2, 2)),
            "parts": ShardedArray(
                (600, 700),
                [
                    ((0, 0), FileArray(source, 5, "float64", (600, 300), (5600, 8))),
                    ((0, 300), FileArray(source, 5 + 8 * 300, "float64", (600, 400), (5600, 8))),
                ],
            ),
            "beside": np.arange(5),
        }
        blocking.save(state, tmp_path / "checkpoint", options=savestream.SaveOptions(memory_budget_bytes=4 << 20))
    loaded = blocking.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(loaded["whole"], values)
    np.testing.assert_array_equal(loaded["transposed"], values.T)
    np.testing.assert_array_equal(loaded["column"], values[:, 3])
    for number, part in enumerate(loaded["small"]):
        np.testing.assert_array_equal(part, values.reshape(-1)[number : number + 3])
    np.testing.assert_array_equal(loaded["unpooled"], values.reshape(-1)[:4].reshape(2, 2))
    np.testing.assert_array_equal(loaded["parts"], values)


def test_it_is_no_target(tmp_path):
    (tmp_path / "file").write_bytes(bytes(12))
    blocking.save({"w": np.zeros(3, np.float32)}, tmp_path / "checkpoint")
    with pytest.raises(LoadMismatchError, match=r"w.*file cannot be filled"):
        blocking.load(tmp_path / "checkpoint", {"w": FileArray(tmp_path / "file", 0, "float32", (3,))})


@pytest.mark.parametrize("present", [0, 1, 4, 39, 41, 79])
def test_a_truncated_file_is_named_with_key_and_what_is_missing(present, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(present))
    array = FileArray(path, 40, "float32", (10,), name="layer.0.weight")
    missing = min(80 - present, 40)
    expected = rf"{path}: truncated; layer\.0\.weight needs its bytes 40-80, .* so {missing} bytes are missing"
    with pytest.raises(CorruptCheckpointError, match=expected):
        host_view(array)
    with pytest.raises(CorruptCheckpointError, match=r"layer\.0\.weight"):
        blocking.save({"w": array}, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_short_reads_go_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    whole = os.preadv
    counts = []

    def short(descriptor, buffers, offset):
        counts.append(len(buffers[0]))
        return whole(descriptor, [buffers[0][:100]], offset)

    monkeypatch.setattr(os, "preadv", short)
    found = host_view(FileArray(tmp_path / "file", 0, "uint8", (256,)))
    assert found.tobytes() == bytes(range(256))
    assert counts == [256, 156, 56]


class Calls:
    """Counts reads by descriptor kind, and lets direct ones fail."""

    def __init__(self, monkeypatch, error=None, limit=1 << 30):
        self.direct, self.buffered = 0, 0
        original = os.preadv

        def preadv(descriptor, buffers, offset):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                self.direct += 1
                if error is not None:
                    raise error
                return original(descriptor, [buffers[0][:limit]], offset)
            self.buffered += 1
            return original(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)


def has_direct_io(path):
    """Whether the file system of a file has direct I/O; those in memory have none."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        return True
    return False


needs_direct = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="there is no direct I/O here")
LARGE = np.random.default_rng(4).integers(0, 256, (9 << 20) + 1234, np.uint8)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "file"
    path.write_bytes(LARGE.tobytes())
    return path


@needs_direct
@pytest.mark.parametrize("limit", [1 << 30, 3 << 20, 4096 * 100])
def test_large_ranges_go_past_the_page_cache(limit, large_file, monkeypatch):
    calls = Calls(monkeypatch, limit=limit)
    ranges = [(0, len(LARGE)), (1, len(LARGE) - 1), (4096, 1 << 20), (5000, 5 << 20), (len(LARGE) - (2 << 20), 2 << 20)]
    with FilePool() as pool:
        source = pool.file(str(large_file))
        for start, count in ranges:
            found = host_view(FileArray(source, start, "uint8", (count,)))
            assert found.tobytes() == LARGE[start : start + count].tobytes()
        assert len(pool._bounces) == 1
        small = host_view(FileArray(source, 77, "uint8", (1000,)))
        assert small.tobytes() == LARGE[77:1077].tobytes()
        with pytest.raises(CorruptCheckpointError, match="so 5 bytes are missing"):
            host_view(FileArray(source, 10, "uint8", (len(LARGE) - 5,)))
        assert open_descriptors(large_file.parent) <= 2
    assert calls.buffered >= 1
    assert calls.direct >= len(ranges) if has_direct_io(large_file) else calls.direct == 0


@needs_direct
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_direct_reading_that_fails(number, large_file, monkeypatch):
    calls = Calls(monkeypatch, OSError(number, "as the test wants it"))
    with FilePool() as pool:
        array = FileArray(pool.file(str(large_file)), 3, "uint8", (len(LARGE) - 3,))
        if number == errno.EINVAL or not has_direct_io(large_file):
            for _ in range(2):
                assert host_view(array).tobytes() == LARGE[3:].tobytes()
        else:
            with pytest.raises(StorageError, match="as the test wants it"):
                host_view(array)
    assert calls.direct <= 1


def test_where_there_is_no_direct_io(large_file, monkeypatch):
    monkeypatch.setattr(file_sources, "DIRECT", 0)
    with FilePool() as pool:
        assert (
            host_view(FileArray(pool.file(str(large_file)), 5, "uint8", (9 << 20,))).tobytes()
            == LARGE[5:][: 9 << 20].tobytes()
        )
        assert not pool._bounces


def test_errors_of_reading_keep_their_number(tmp_path):
    with pytest.raises(StorageError, match=r"file for the key") as caught:
        host_view(FileArray(tmp_path / "file", 0, "uint8", (1,), name="the key"))
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match="no regular file") as caught:
        host_view(FileArray(tmp_path / "directory", 0, "uint8", (1,)))
    assert caught.value.errno == errno.EINVAL


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in the file system")
def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no regular file"):
        host_view(FileArray(tmp_path / "pipe", 0, "uint8", (1,)))


def open_descriptors(directory: os.PathLike[str]) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(directory))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
@pytest.mark.parametrize(("files", "arrays"), [(3, 10_000), (3000, 3000)])
def test_descriptors_are_bounded(files, arrays, tmp_path):
    for number in range(files):
        (tmp_path / str(number)).write_bytes(number.to_bytes(4, "little") * 4)
    most = 0
    with FilePool(limit=8) as pool:
        sources = [pool.file(str(tmp_path / str(number))) for number in range(files)]
        state = [FileArray(sources[number % files], 4, "int32", (2,)) for number in range(arrays)]
        for start in range(0, arrays, 1000):
            joined = adapter_of(state[0]).join(state[start : start + 1000]).view(np.int32)
            numbers = np.arange(start, start + len(joined) // 2) % files
            np.testing.assert_array_equal(joined, np.repeat(numbers, 2))
            most = max(most, open_descriptors(tmp_path))
    assert 0 < most <= 8
    assert open_descriptors(tmp_path) == 0


def test_more_threads_than_descriptors(tmp_path):
    contents = [np.full(5000, number, np.int64) for number in range(20)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content.tobytes())
    failures = []
    start = threading.Barrier(8)
    with FilePool(limit=2) as pool:
        arrays = [FileArray(pool.file(str(tmp_path / str(number))), 0, "int64", (5000,)) for number in range(20)]

        def work(seed: int) -> None:
            try:
                start.wait(30)
                for number in np.random.default_rng(seed).integers(0, 20, 60):
                    np.testing.assert_array_equal(host_view(arrays[number]), contents[number])
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


def test_a_file_that_is_replaced_while_it_is_closed_is_noticed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(4))
    with FilePool(limit=1) as pool:
        first, second = (FileArray(pool.file(str(tmp_path / name)), 0, "uint8", (4,)) for name in ("a", "b"))
        host_view(first)
        (tmp_path / "other").write_bytes(b"abcd")
        os.replace(tmp_path / "other", tmp_path / "a")
        assert host_view(first).tobytes() == bytes(4), "it is still open"
        host_view(second)
        with pytest.raises(CorruptCheckpointError, match="replaced"):
            host_view(first)


def test_a_closed_pool_says_so(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4))
    pool = FilePool()
    array = FileArray(pool.file(str(tmp_path / "file")), 0, "uint8", (4,))
    pool.close()
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        host_view(array)
