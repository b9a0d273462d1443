"""Many small arrays, very large ones, and storage that moves little at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
from roundtrip_support import assert_same

import savestream
from savestream import LoadOptions, SaveOptions, blocking
from savestream.storage_backends import FileBackend, TracingBackend

MEBIBYTE = 1 << 20


def many(count: int) -> dict[str, Any]:
    """Leaves of shape (2,) whose names have about 60 characters."""
    data = np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)
    names = [f"transformer.layers.{n // 100:05d}/attention.projection.weight.{n % 100:05d}" for n in range(count)]
    return {name: data[n].copy() for n, name in enumerate(names)}


async def save_and_load_many(count: int, directory: Path) -> None:
    state = many(count)
    names = list(state)
    await savestream.save(state, directory / "c")
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) == 3

    found = await savestream.load(directory / "c")
    assert list(found) == names
    assert all(found[name].dtype == np.float32 for name in names[::97])
    assert np.concatenate(list(found.values())).tobytes() == np.concatenate(list(state.values())).tobytes()

    target = {name: np.zeros(2, np.float32) for name in names}
    await savestream.load(directory / "c", target)
    assert np.concatenate(list(target.values())).tobytes() == np.concatenate(list(state.values())).tobytes()

    backend = TracingBackend(FileBackend(str(directory)))
    for name in (names[0], names[count // 2], names[-1]):
        backend.clear()
        assert_same(await savestream.load((backend, "c"), keys=[(name,)]), {name: state[name]})
        assert backend.count("open_reader") == 1
        assert backend.bytes_moved("read_into") <= 2 * MEBIBYTE


async def test_twenty_thousand_leaves(tmp_path: Path) -> None:
    await save_and_load_many(20_000, tmp_path)


@pytest.mark.slow
async def test_two_hundred_thousand_leaves(tmp_path: Path) -> None:
    await save_and_load_many(200_000, tmp_path)


class PeakMemory:
    """The most resident memory while the body runs, beyond what was resident before."""

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.extra_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stopped.wait(0.01):
            self.extra_bytes = max(self.extra_bytes, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_array_beyond_two_gibibytes(compression: Any, tmp_path: Path) -> None:
    size = 2**31 + 4097
    array = np.zeros(size, np.uint8)
    array[:] = 1  # resident before the memory is measured
    marks = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, size - 4095, size - 1, 4 * MEBIBYTE - 1, 2**30, 2**30 + 7]
    array[marks] = np.arange(10, 10 + len(marks))
    options = SaveOptions(compression=compression, memory_budget_bytes=64 * MEBIBYTE)
    with PeakMemory() as saving:
        info = blocking.save({"big": array, "small": np.arange(5)}, tmp_path / "c", options=options)
    assert saving.extra_bytes < 160 * MEBIBYTE
    assert info.statistics.raw_bytes == size + 40

    array[:] = 0
    with PeakMemory() as loading:
        found = blocking.load(tmp_path / "c", {"big": array, "small": np.zeros(5, np.int64)})
    assert loading.extra_bytes < 160 * MEBIBYTE
    assert found["big"] is array
    check_big(array, marks)
    assert_same(found["small"], np.arange(5))
    del found, array
    check_big(blocking.load(tmp_path / "c", keys="big")["big"], marks)


def check_big(array: np.ndarray, marks: list[int]) -> None:
    """Ones, but for the marks."""
    assert array[marks].tolist() == list(range(10, 10 + len(marks)))
    array[marks] = 1
    step = 256 * MEBIBYTE
    assert all((array[start : start + step] == 1).all() for start in range(0, len(array), step))


class LittleAtATime:
    """``os.pwrite`` and ``os.preadv`` that move at most some bytes, as the kernel may on any call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, write_bytes: int, read_bytes: int) -> None:
        self.writes = self.reads = 0
        pwrite, preadv = os.pwrite, os.preadv

        def short_pwrite(descriptor: int, data: Any, offset: int) -> int:
            self.writes += 1
            return pwrite(descriptor, memoryview(data).cast("B")[:write_bytes], offset)

        def short_preadv(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
            self.reads += 1
            return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:read_bytes]], offset, *flags)

        monkeypatch.setattr(os, "pwrite", short_pwrite)
        monkeypatch.setattr(os, "preadv", short_preadv)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
@pytest.mark.parametrize("sizes", [(1000, 700), (4096, 4096), (5000, 8192), (1, 1)])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_short_writes_and_reads_are_continued(
    compression: Any, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 500 if sizes == (1, 1) else 150_000
    generator = np.random.default_rng(0)
    numbers = np.arange(count // 3, dtype=">f4")
    state = {"a": generator.integers(0, 1 << 40, count), "b": {"c": numbers}, "d": np.ones(3, "i1")}
    little = LittleAtATime(monkeypatch, *sizes)
    blocking.save(state, tmp_path / "c", options=SaveOptions(compression=compression))
    assert little.writes > count // sizes[0]
    for threads in (1, 4):
        assert_same(blocking.load(tmp_path / "c", options=LoadOptions(threads=threads)), state)
        target = {"a": np.zeros(count, int)[::-1], "b": {"c": np.zeros(count // 3, ">f4")}, "d": np.zeros(3, "i1")}
        assert_same(blocking.load(tmp_path / "c", target, options=LoadOptions(threads=threads)), state)
    assert little.reads > 2 * count // sizes[1]
    blocking.verify(tmp_path / "c")
