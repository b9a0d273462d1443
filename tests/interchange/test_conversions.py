"""Conversions as such: compared with their source before anybody sees them, cancelled without a trace."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from dcp_builder import DcpBuilder, archive_of
from import_support import assert_equal, open_descriptors
from pickle_support import number, text
from safetensors_support import file_of, tensors, varied

import savestream
from savestream import LoadOptions, SaveOptions, ShardedArray, blocking
from savestream.errors import CorruptCheckpointError, SaveTimeoutError, StorageError
from savestream.interchange import comparison, functions
from savestream.interchange.conversion import Conversion
from savestream.interchange.foreign import ForeignState
from savestream.pipeline.engine import call
from savestream.storage_backends import (
    Fault,
    FaultyBackend,
    FileBackend,
    Gate,
    MemoryBackend,
    WrapperBackend,
    resolve_location,
)

LARGE = np.random.default_rng(1).standard_normal((1500, 1000))
STATE = {
    "large": LARGE,
    "transposed": LARGE[:300].T,
    "small": {str(number): np.full(7, number, np.int16) for number in range(500)},
    "halves": np.arange(9, dtype=ml_dtypes.bfloat16),
    "sharded": ShardedArray((4, 6), [((0, 0), LARGE[:4, :2].copy()), ((0, 2), LARGE[:4, 2:6].copy())]),
    "records": np.zeros(5, [("a", "i1"), ("b", "f8")]),
    "empty": np.empty((0, 3)),
    "scalar": np.array(3),
    "value": {"nan": float("nan"), "n": 10**40, "list": [1, (2, None)]},
    "bytes": bytes(range(256)) * 1000,
    "long": ["x" * 1000] * 1200,
}


def conversion(state, place, **options):
    """A conversion of a state that is at hand."""
    plain = {"overwrite": False, "verify": True, "observer": None, "options": SaveOptions(), **options}
    return Conversion(operation="test", read=lambda _: ForeignState(state), location=resolve_location(place), **plain)


async def convert(state, place, **options):
    return await call(conversion(state, place, **options).run, "test")


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_leaves_of_every_kind_are_compared(compression, tmp_path):
    options = SaveOptions(compression=compression, memory_budget_bytes=16 << 20)
    info = await convert(STATE, tmp_path / "out", options=options)
    assert info.statistics.stages["verify"].bytes == info.statistics.raw_bytes > LARGE.nbytes
    found = await savestream.load(tmp_path / "out")
    assert_equal(found, {**STATE, "sharded": LARGE[:4, :6]})


async def test_arrays_that_are_the_same_memory(tmp_path):
    await convert({"a": LARGE, "b": LARGE, "part": LARGE[:2], "again": [LARGE[:2]]}, tmp_path / "out")
    found = await savestream.load(tmp_path / "out")
    assert_equal(found, {"a": LARGE, "b": LARGE, "part": LARGE[:2], "again": [LARGE[:2]]})


def changed(key, value):
    """STATE with another leaf; keys may have several parts."""
    state = {**STATE, "small": dict(STATE["small"])}
    target = state
    *outer, last = key.split(".")
    for part in outer:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return state


def bump(array):
    other = array.copy()
    other.reshape(-1)[-1] += 1
    return other


SHARDS = STATE["sharded"].shards
CHANGES = {
    "large": bump(LARGE),
    "transposed": bump(STATE["transposed"]),
    "small.317": bump(STATE["small"]["317"]),
    "halves": bump(STATE["halves"]),
    "sharded": ShardedArray((4, 6), [((0, 0), SHARDS[0]), ((0, 2), bump(SHARDS[1]))]),
    "scalar": np.array(4),
    "value": {**STATE["value"], "n": 10**40 + 1},
    "bytes": STATE["bytes"][:-1] + b"x",
    "long": [*STATE["long"][:-1], 0],
    "small.11": None,
    "more": np.zeros(3),
    "empty": 3,
    "records": np.zeros(5, [("a", "i1"), ("b", "i8")]),
}


@pytest.mark.parametrize("key", CHANGES)
async def test_every_difference_is_found_and_named(key, tmp_path, monkeypatch):
    await savestream.save({"old": 1}, tmp_path / "out")
    original = comparison.flatten
    monkeypatch.setattr(comparison, "flatten", lambda _, **options: original(changed(key, CHANGES[key]), **options))
    with pytest.raises(CorruptCheckpointError, match=rf"[: ]{key}[ ;]"):
        await convert(STATE, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    assert await savestream.load(tmp_path / "out") == {"old": 1}, "what was there stays"
    assert len(list(tmp_path.glob("out/*"))) == 2, "one manifest and one directory"
    await convert(STATE, tmp_path / "out", overwrite=True)


async def test_one_of_two_that_were_the_same_memory_differs(tmp_path, monkeypatch):
    original = comparison.flatten
    state = {"a": LARGE, "b": bump(LARGE)}
    monkeypatch.setattr(comparison, "flatten", lambda _, **options: original(state, **options))
    with pytest.raises(CorruptCheckpointError, match=": b is not what"):
        await convert({"a": LARGE, "b": LARGE}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Flipping(WrapperBackend):
    """Flips one bit of what is written at an offset of a data object."""

    def __init__(self, inner, offset):
        super().__init__(inner)
        self._offset = offset

    async def open_writer(self, path):
        writer = await super().open_writer(path)
        original, offset = writer.write_blocking, self._offset

        def write(start, data):
            data = memoryview(bytearray(data))
            if start <= offset < start + len(data):
                data[offset - start] ^= 1
            original(start, data)

        writer.write_blocking = write
        return writer


@pytest.mark.parametrize("verify", [True, False])
async def test_what_storage_changed_is_noticed(verify, tmp_path):
    backend = Flipping(FileBackend(tmp_path / "store"), 5_000_000)
    if verify:
        with pytest.raises(CorruptCheckpointError, match=r"damaged.*'large'"):
            await convert(STATE, (backend, "out"), options=SaveOptions(compression="none"))
        assert not (tmp_path / "store").exists()
    else:
        await convert(STATE, (backend, "out"), options=SaveOptions(compression="none"), verify=False)
        with pytest.raises(CorruptCheckpointError):
            await savestream.verify((backend, "out"))


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
async def test_a_source_that_changes_meanwhile_is_noticed(kind, tmp_path):
    weights, other = np.arange(1000, dtype=np.float32), np.arange(500, dtype=np.float32)
    if kind == "dcp":
        builder = DcpBuilder()
        builder.tensor("other", other)
        builder.tensor("layer.w", weights, ("layer", "w"))
        source, function = builder.write(tmp_path / "source"), savestream.import_dcp
        data = source / "__0_0.distcp"
    else:
        source = data = tmp_path / "source"
        data.write_bytes(tensors({"other": other, "layer.w": weights}))
        function = savestream.import_safetensors
    content = data.read_bytes()

    def change(_):
        place = content.index(weights[500:510].tobytes())
        data.write_bytes(content[:place] + b"\1" + content[place + 1 :])

    backend = FaultyBackend(MemoryBackend("test"), [Fault("put", hook=change)])
    with pytest.raises(CorruptCheckpointError, match=r"layer\\*\.w is not what its source holds"):
        await function(source, (backend, "out"))
    assert await backend.list_objects("") == []
    data.write_bytes(content)
    backend = FaultyBackend(MemoryBackend("test"), [Fault("put", hook=change)])
    await function(source, (backend, "out"), verify=False)
    data.write_bytes(content[: content.index(weights.tobytes()) + 100])
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        await function(source, (MemoryBackend("test"), "out"))


@pytest.fixture
def source(tmp_path):
    builder = DcpBuilder()
    for key in ("a", "b"):
        builder.tensor(key, np.random.default_rng(2).standard_normal((1200, 1000)).astype(np.float32))
    builder.object("step", archive_of(number(3)))
    builder.object("note", archive_of(text("hello")))
    return builder.write(tmp_path / "source")


OPTIONS = SaveOptions(memory_budget_bytes=4 << 20, threads=2, compression="none")
OPERATIONS = ["head", "open_writer", "write", "finish", "put", "open_reader", "read_into", "create"]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_cancelled_at_any_operation(operation, source, tmp_path):
    gate = Gate()
    backend = FaultyBackend(FileBackend(tmp_path / "store"), [Fault(operation, hook=gate)])
    task = asyncio.create_task(savestream.import_dcp(source, (backend, "out"), options=OPTIONS))
    await gate.reached()
    task.cancel()
    gate.open()
    try:
        await task
    except asyncio.CancelledError:
        if operation == "create":  # the commit had been sent
            assert (await savestream.load((backend, "out")))["step"] == 3
        else:
            assert not (tmp_path / "store").exists()
    else:
        pytest.fail("the cancellation did not arrive")
    assert open_descriptors(tmp_path) == []


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_failing_at_any_operation(operation, source, tmp_path):
    error = StorageError(5, "failed as the test wants it")
    backend = FaultyBackend(FileBackend(tmp_path / "store"), [Fault(operation, error=error)])
    with pytest.raises(StorageError, match="as the test wants it"):
        await savestream.import_dcp(source, (backend, "out"), options=OPTIONS)
    assert not (tmp_path / "store").exists()
    assert open_descriptors(tmp_path) == []


async def test_cancelled_while_the_source_is_read(source, tmp_path, monkeypatch):
    reached, checked = threading.Event(), []
    original = functions.read_dcp

    def read(directory, files, on_unsupported):
        check = files.check_stop

        def check_stop():
            reached.set()
            assert files.stop.wait(30)
            checked.append(True)
            check()

        files.check_stop = check_stop
        return original(directory, files, on_unsupported)

    monkeypatch.setattr(functions, "read_dcp", read)
    task = asyncio.create_task(savestream.import_dcp(source, tmp_path / "out"))
    assert await asyncio.to_thread(reached.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(checked) == 1, "the reading ends at the first look"
    assert not (tmp_path / "out").exists()
    assert open_descriptors(tmp_path) == []


@pytest.mark.parametrize("where", ["reading", "saving"])
async def test_a_conversion_that_takes_too_long(where, source, tmp_path, monkeypatch):
    original = functions.read_dcp

    def read(directory, files, on_unsupported):
        if where == "reading":
            assert files.stop.wait(30)
        else:
            monkeypatch.setattr("savestream.interchange.conversion.perf_counter", lambda: 1e9)
        return original(directory, files, on_unsupported)

    monkeypatch.setattr(functions, "read_dcp", read)
    seconds = 0.01 if where == "reading" else 60
    with pytest.raises(SaveTimeoutError, match=f"looking at.*={seconds}" if where == "reading" else "the save took"):
        await savestream.import_dcp(source, tmp_path / "out", options=SaveOptions(timeout_seconds=seconds))
    assert not (tmp_path / "out").exists()
    assert open_descriptors(tmp_path) == []


async def test_an_observer_learns_of_failures(tmp_path):
    events = []
    with pytest.raises(FileNotFoundError):
        await savestream.import_dcp(tmp_path / "nothing", tmp_path / "out", observer=events.append)
    assert [(type(event).__name__, event.operation) for event in events] == [("OperationFailed", "import_dcp")]


MEASURED = """
import sys
from pathlib import Path
from savestream import SaveOptions, blocking

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024

options = SaveOptions(compression="zstd", memory_budget_bytes=16 << 20)
blocking.import_safetensors(sys.argv[1] + "/small", sys.argv[1] + "/warm", options=options)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
blocking.import_safetensors(sys.argv[1] + "/large", sys.argv[1] + "/out", options=options)
blocking.export_safetensors(sys.argv[1] + "/out", sys.argv[1] + "/exported", max_shard_bytes=100 << 20)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of memory is read in /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    for name, megabytes in (("small", 1), ("large", 384)):
        half = megabytes << 19
        entries = {
            key: {"dtype": "U8", "shape": [half], "data_offsets": [at, at + half]}
            for key, at in (("a", 0), ("b", half))
        }
        with open(tmp_path / name, "wb") as file:
            file.write(file_of(entries))
            file.truncate(file.tell() + 2 * half)  # zeros that take no room
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert int(outcome.stdout) < 192, "half of the source"


def test_the_blocking_facade(source, tmp_path):
    assert blocking.import_dcp(source, tmp_path / "out").skipped == ()
    (tmp_path / "model.safetensors").write_bytes(tensors(varied()))
    blocking.import_safetensors(tmp_path / "model.safetensors", tmp_path / "second")
    (path,) = blocking.export_safetensors(tmp_path / "out", tmp_path / "exported", keys=["a", "b"])
    blocking.import_safetensors(path, tmp_path / "third")
    found = blocking.load(tmp_path / "out", options=LoadOptions())
    assert_equal(blocking.load(tmp_path / "third"), {key: found[key] for key in ("a", "b")})
