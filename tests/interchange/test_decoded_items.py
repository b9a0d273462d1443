"""Compressed items: what comes out is exact and bounded, however the stream lies."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import zstandard

from savestream.arrays import host_view
from savestream.arrays.file_arrays import FileArray
from savestream.arrays.file_sources import FilePool
from savestream.errors import CorruptCheckpointError, UsageError
from savestream.interchange import decoded_items
from savestream.interchange.decoded_items import DecodedItem, DecodedPool

RANDOM = np.random.default_rng(3)
SMALL = RANDOM.integers(0, 9, 2000, np.uint8).tobytes()
LARGE = RANDOM.integers(0, 9, 3 << 20, np.uint8).tobytes()


def compressed(data: bytes) -> bytes:
    """As a stream whose frame does not say how long it is."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


class Scene:
    """Streams in one file, and a pool."""

    def __init__(self, path, streams, **pool_options):
        self.files = FilePool()
        self.pool = DecodedPool(**pool_options)
        path.write_bytes(b"before" + b"".join(streams))
        self.items = []
        offset = 6
        for stream in streams:
            item = DecodedItem(self.pool, self.files.file(str(path)), offset, len(stream), 4 << 20)
            self.items.append(item)
            offset += len(stream)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.close()
        self.files.close()


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_any_range_is_exact(data, tmp_path):
    with Scene(tmp_path / "file", [compressed(SMALL), compressed(data)]) as scene:
        item = scene.items[1]
        assert item.size_bytes() == len(data)
        for start, stop in [(0, len(data)), (len(data) // 3, len(data) // 2), (len(data), len(data))]:
            assert item.read(start, stop - start) == data[start:stop]
        found = FileArray(item, 0, "uint8", (len(data),))
        assert host_view(found).tobytes() == data


def test_reading_beyond_the_end_names_the_array(tmp_path):
    for data in (SMALL, LARGE):
        with Scene(tmp_path / "file", [compressed(data)]) as scene:
            array = FileArray(scene.items[0], 1, "uint8", (len(data),), name="layer")
            with pytest.raises(CorruptCheckpointError, match=r"decompressed from offset 6.*layer.*1 bytes are missing"):
                host_view(array)


def test_no_more_is_kept_than_allowed_and_all_of_it_goes(tmp_path, monkeypatch):
    opened = []
    original = decoded_items.tempfile.TemporaryFile

    def counted(*arguments, **options):
        opened.append(original(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(decoded_items.tempfile, "TemporaryFile", counted)
    contents = [bytes([number]) * size for number in range(5) for size in (2 << 20, 600_000)]
    with Scene(tmp_path / "file", list(map(compressed, contents)), files=2, memory_bytes=1 << 20) as scene:
        for _ in range(2):
            for item, content in zip(scene.items, contents, strict=True):
                assert item.read(0, len(content)) == content
                assert sum(not file.closed for file in opened) <= 2
                assert scene.pool._held.memory_bytes <= 1 << 20
    assert all(file.closed for file in opened)
    assert len(opened) == 10, "each large item was decompressed again when it was read again"


def test_several_threads_decompress_an_item_once(tmp_path, monkeypatch):
    runs = []
    original = decoded_items._decompress
    arrived = threading.Barrier(4)

    def counted(item):
        runs.append(item)
        return original(item)

    monkeypatch.setattr(decoded_items, "_decompress", counted)
    found = []
    with Scene(tmp_path / "file", [compressed(LARGE)]) as scene:

        def work():
            arrived.wait(30)
            found.append(scene.items[0].read(0, len(LARGE)) == LARGE)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found == [True] * 4
    assert len(runs) == 1


def bomb() -> bytes:
    """32 KB that would become a gibibyte."""
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    zeros = bytes(1 << 20)
    return b"".join([*(compressor.compress(zeros) for _ in range(1024)), compressor.flush()])


BAD = {
    "a bomb": (bomb(), "more than the"),
    "a bomb that states its size": (zstandard.ZstdCompressor().compress(bytes(64 << 20)), "more than the"),
    "no zstd": (b"not compressed at all", "damaged"),
}


@pytest.mark.parametrize("kind", BAD)
def test_streams_that_lie_are_refused(kind, tmp_path):
    data, message = BAD[kind]
    with Scene(tmp_path / "file", [data]) as scene:
        with pytest.raises(CorruptCheckpointError, match=message):
            scene.items[0].size_bytes()
        with pytest.raises(CorruptCheckpointError, match=message):
            scene.items[0].size_bytes()
        assert not scene.pool._entries


def test_a_window_that_needs_much_memory_is_refused(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=26)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(RANDOM.bytes(100_000)) + compressor.flush()
    with Scene(tmp_path / "file", [data]) as scene, pytest.raises(CorruptCheckpointError, match="damaged"):
        scene.items[0].size_bytes()


def test_a_cut_off_stream_gives_what_is_there_and_no_more(tmp_path):
    data = compressed(LARGE)
    with Scene(tmp_path / "file", [data[: len(data) // 2]]) as scene:
        assert scene.items[0].size_bytes() < len(LARGE)


def test_a_closed_pool_says_so(tmp_path):
    with Scene(tmp_path / "file", [compressed(SMALL)]) as scene:
        item = scene.items[0]
        item.size_bytes()
    with pytest.raises(UsageError, match="closed"):
        item.size_bytes()
    assert os.listdir(tmp_path) == ["file"]
