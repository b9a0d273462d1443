"""Checkpoints as safetensors files: exact, aligned, named after their keys, whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from import_support import assert_equal, open_descriptors
from safetensors_support import header_of, read, varied

import savestream
from savestream import SaveOptions, ShardedArray, blocking
from savestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    PlanError,
    StorageError,
    UnsafeObjectError,
)
from savestream.interchange import safetensors_export
from savestream.interchange.export_files import ExportDirectory, ScratchFile

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "checkpoint"


def exported(state, place, dest, **options):
    blocking.save(state, place, overwrite=True)
    return blocking.export_safetensors(place, dest, **options)


def test_every_dtype_and_shape(place, tmp_path):
    (path,) = exported(varied(), place, tmp_path / "model.safetensors")
    assert path == tmp_path / "model.safetensors"
    found = read(path)
    assert_equal({name: found[name] for name in varied()}, varied())


def test_tensors_are_aligned_to_their_elements(place, tmp_path):
    (path,) = exported(varied(), place, tmp_path / "out.safetensors")
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert begin % 8 == 0
    end = 0
    entries = {name: entry for name, entry in header_of(path).items() if name != "__metadata__"}
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        assert start == end
        assert start % varied()[name].itemsize == 0
        end = stop
    assert begin + end == path.stat().st_size


def test_names_are_the_parts_of_keys(place, tmp_path):
    state = {"model": {"layers": [VALUES, VALUES + 1], "a.b": VALUES + 2, "[c]": VALUES + 3}, "o": {0: VALUES + 4}}
    (path,) = exported(state, place, tmp_path / "out")
    assert path == tmp_path / "out" / "model.safetensors"
    names = {"model.layers.0": 0, "model.layers.1": 1, "model.a.b": 2, "model.[c]": 3, "o.0": 4}
    assert_equal({name: read(path)[name] for name in names}, {name: VALUES + add for name, add in names.items()})


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": VALUES, "a": {"b": VALUES + 1}},
        {"a": {0: VALUES, "0": VALUES + 1}},
        {"a": [VALUES], "a.0": VALUES + 1},
    ],
)
def test_keys_of_one_name_are_refused(state, place, tmp_path):
    with pytest.raises(PlanError, match=r"would both be 'a\.[b0]'"):
        exported(state, place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", [VALUES, {None: VALUES}, {("a", 1): VALUES}, {"__metadata__": VALUES}, {1.5: VALUES}])
def test_keys_without_a_name_are_refused(state, place, tmp_path):
    with pytest.raises(PlanError, match="safetensors files"):
        exported(state, place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_has_no_place_in_the_format_is_refused_by_key(place, tmp_path):
    state = {
        "w": VALUES,
        "step": 3,
        "names": ["a"],
        "complex": np.zeros(2, np.complex128),
        "time": np.zeros(2, "M8[s]"),
        "record": np.zeros(2, [("a", "i4")]),
        "big": np.zeros(2, ">f4"),
        "int4": np.zeros(2, ml_dtypes.int4),
        "text": np.array(["a"]),
    }
    with pytest.raises(UnsafeObjectError) as caught:
        exported(state, place, tmp_path / "out")
    for key, reason in {"step": "no array", "names": "no array", "complex": "complex128", "big": ">f4"}.items():
        assert f"{key} ({'' if reason == 'no array' else 'dtype '}{reason})" in str(caught.value)
    assert "8 key(s)" in str(caught.value)
    assert not (tmp_path / "out").exists()
    (path,) = blocking.export_safetensors(place, tmp_path / "out", keys=["w"])
    assert_equal(read(path), {"w": VALUES})


def test_keys_choose(place, tmp_path):
    state = {"model": {"w": VALUES, "v": VALUES + 1}, "model2": VALUES, "step": 3}
    (path,) = exported(state, place, tmp_path / "out", keys="model")
    assert sorted(read(path)) == ["model.v", "model.w"]
    with pytest.raises(LoadMismatchError, match="nothing"):
        blocking.export_safetensors(place, tmp_path / "other", keys=["model", "nothing"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_large_sharded_and_tied_arrays(compression, place, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_export, "_BATCH_BYTES", 300_000)
    whole = np.random.default_rng(0).integers(0, 99, (700, 900)).astype(np.float32)
    boxes = [(0, 300, 0, 900), (300, 700, 0, 400), (300, 700, 400, 900)]
    shards = [((a, c), np.ascontiguousarray(whole[a:b, c:d])) for a, b, c, d in boxes]
    state = {
        "sharded": ShardedArray(whole.shape, shards),
        "whole": whole,
        "tied": whole,
        "transposed": whole.T,
        "cube": whole.reshape(70, 10, 30, 30),
        "many": {str(number): whole[number] for number in range(200)},
    }
    blocking.save(state, place, options=SaveOptions(compression=compression))
    (path,) = blocking.export_safetensors(place, tmp_path / "out")
    found = read(path)
    for name in ("sharded", "whole", "tied"):
        assert found[name].tobytes() == whole.tobytes()
    assert found["transposed"].tobytes() == whole.T.tobytes()
    assert found["cube"].tobytes() == whole.tobytes()
    assert all(found[f"many.{number}"].tobytes() == whole[number].tobytes() for number in range(200))


def test_memory_does_not_grow_with_the_checkpoint(place, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_export, "_BATCH_BYTES", 1 << 20)
    blocking.save({"w": np.ones((4000, 2500), np.float32), "v": np.ones((4000, 2500), np.float32)}, place)
    blocking.export_safetensors(place, tmp_path / "warm")
    tracemalloc.start()
    blocking.export_safetensors(place, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 << 20


def test_shards_and_their_index(place, tmp_path):
    state = {f"layer.{number}": np.full(100, number, np.int64) for number in range(7)}
    state["large"] = np.zeros(1000, np.int64)
    written = exported(state, place, tmp_path / "out", max_shard_bytes=2000)
    names = [path.name for path in written]
    assert names == [
        *(f"model-{number + 1:05d}-of-00005.safetensors" for number in range(5)),
        "model.safetensors.index.json",
    ]
    assert sorted(names) == sorted(os.listdir(tmp_path / "out"))
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == 1700 * 8
    assert set(index["weight_map"]) == set(state)
    found = {}
    for path in written[:-1]:
        held = read(path)
        assert sum(array.nbytes for array in held.values()) <= (8000 if "large" in held else 2000)
        assert all(index["weight_map"][name] == path.name for name in held)
        found |= held
    assert_equal({name: found[name] for name in state}, state)
    blocking.import_safetensors(tmp_path / "out", tmp_path / "again")
    assert_equal(blocking.load(tmp_path / "again"), state)


def test_metadata(place, tmp_path):
    def metadata_of(number):
        return header_of(tmp_path / f"{number}.safetensors").get("__metadata__")

    given = {"format": "pt", "\N{BRAIN}": "x"}
    blocking.save({"w": VALUES}, place, metadata=given)
    blocking.export_safetensors(place, tmp_path / "0.safetensors")
    blocking.export_safetensors(place, tmp_path / "1.safetensors", metadata={"other": "y"})
    blocking.save({"w": VALUES}, place, metadata={"epoch": 3}, overwrite=True)
    blocking.export_safetensors(place, tmp_path / "2.safetensors")
    assert [metadata_of(number) for number in range(3)] == [given, {"other": "y"}, None]
    for wrong in ({"a": 1}, {1: "a"}, [], "text"):
        with pytest.raises(PlanError, match="metadata"):
            blocking.export_safetensors(place, tmp_path / "3.safetensors", metadata=wrong)


def test_an_empty_checkpoint(place, tmp_path):
    (path,) = exported({}, place, tmp_path / "out")
    assert read(path) == {}
    blocking.import_safetensors(path, tmp_path / "again")
    assert blocking.load(tmp_path / "again") == {}


@pytest.mark.parametrize(
    "options",
    [{"max_shard_bytes": 0}, {"max_shard_bytes": 1.5}, {"max_shard_bytes": True}, {"overwrite": 1}, {"keys": 3}],
    ids=repr,
)
def test_wrong_arguments_are_refused_by_name(options, place, tmp_path):
    with pytest.raises(PlanError, match=next(iter(options))):
        exported({"w": VALUES}, place, tmp_path / "out", **options)


@pytest.mark.parametrize("dest", [3, "", "s3://bucket/x", b"x", ".safetensors"])
def test_places_that_are_not_local_are_refused(dest, place):
    with pytest.raises(PlanError, match="dest"):
        exported({"w": VALUES}, place, dest)


def test_what_is_not_there_cannot_be_exported(place, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        blocking.export_safetensors(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_are_there_are_left_alone(place, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    blocking.save({"w": VALUES, "v": VALUES}, place)
    for name in ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (out / name).write_bytes(b"mine")
        with pytest.raises(CheckpointExistsError, match=name):
            blocking.export_safetensors(place, out, max_shard_bytes=24)
        assert os.listdir(out) == [name]
        (out / name).unlink()
    (out / "other.safetensors").write_bytes(b"mine")
    blocking.export_safetensors(place, out)
    assert (out / "other.safetensors").read_bytes() == b"mine"


def test_a_file_that_appears_meanwhile_is_left_alone(place, tmp_path, monkeypatch):
    original = ExportDirectory.publish

    def publish(self, names, *, overwrite):
        (tmp_path / "out" / names[-1]).write_bytes(b"mine")
        original(self, names, overwrite=overwrite)

    monkeypatch.setattr(ExportDirectory, "publish", publish)
    blocking.save({"w": VALUES, "v": VALUES}, place)
    with pytest.raises(CheckpointExistsError, match="appeared meanwhile"):
        blocking.export_safetensors(place, tmp_path / "out", max_shard_bytes=24)
    assert os.listdir(tmp_path / "out") == ["model.safetensors.index.json"]
    assert (tmp_path / "out" / "model.safetensors.index.json").read_bytes() == b"mine"


def test_file_systems_without_links(place, tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "no links here", source, None, target)

    blocking.save({"w": VALUES}, place)
    monkeypatch.setattr(os, "link", link)
    (path,) = blocking.export_safetensors(place, tmp_path / "out")
    assert_equal(read(path), {"w": VALUES})
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


SIZES = {"single": 10**9, "two": 50, "three": 24}


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", SIZES)
def test_an_export_replaces_an_earlier_one(first, second, place, tmp_path):
    out = tmp_path / "out"
    old = {"a": VALUES, "b": VALUES, "c": VALUES}
    new = {name: values + 1 for name, values in old.items()}
    exported(old, place, out, max_shard_bytes=SIZES[first])
    (out / "model-00009-of-00009.safetensors").write_bytes(b"not named by the index")
    with pytest.raises(CheckpointExistsError):
        exported(new, place, out, max_shard_bytes=SIZES[second])
    written = exported(new, place, out, max_shard_bytes=SIZES[second], overwrite=True)
    assert sorted(os.listdir(out)) == sorted([*(path.name for path in written), "model-00009-of-00009.safetensors"])
    (out / "model-00009-of-00009.safetensors").unlink()
    blocking.import_safetensors(out, tmp_path / "again")
    found = blocking.load(tmp_path / "again")
    assert_equal({name: found[name] for name in new}, new)


def test_an_old_index_of_somebody_else_is_not_followed(place, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "precious").write_bytes(b"mine")
    (out / "notes").write_bytes(b"mine")
    index = {"weight_map": {"a": "../precious", "b": "notes", "c": 3}}
    for content in (json.dumps(index), "[]", "{"):
        (out / "model.safetensors.index.json").write_text(content)
        exported({"w": VALUES}, place, out, overwrite=True)
        assert sorted(os.listdir(out)) == ["model.safetensors", "notes"]
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_damage_ends_the_export_and_nothing_appears(place, tmp_path):
    blocking.save({"w": np.arange(100_000)}, place, options=SaveOptions(compression="none"))
    (data,) = place.glob("*/*.bin")
    content = bytearray(data.read_bytes())
    content[400_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="w"):
        blocking.export_safetensors(place, tmp_path / "deep" / "er" / "out")
    assert not (tmp_path / "deep").exists()
    assert open_descriptors(tmp_path) == []


@pytest.mark.parametrize("failing", ["write", "fsync", "link", "mkdir"])
def test_errors_of_writing_keep_their_number_and_leave_nothing(failing, place, tmp_path, monkeypatch):
    blocking.save({"w": VALUES, "v": VALUES}, place)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    name = {"write": "pwrite", "fsync": "fsync", "link": "link", "mkdir": "makedirs"}[failing]
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(StorageError, match="No space left") as caught:
        blocking.export_safetensors(place, tmp_path / "out", max_shard_bytes=24)
    monkeypatch.undo()
    assert caught.value.errno == 28
    assert not (tmp_path / "out").exists()
    assert open_descriptors(tmp_path) == []


async def test_a_cancelled_export_leaves_nothing(place, tmp_path, monkeypatch):
    await savestream.save({"w": np.ones(1_000_000), "v": VALUES}, place)
    reached, released = threading.Event(), threading.Event()
    original = ScratchFile.write

    def write(self, offset, data):
        original(self, offset, data)
        if offset:
            reached.set()
            assert released.wait(30)

    monkeypatch.setattr(ScratchFile, "write", write)
    task = asyncio.create_task(savestream.export_safetensors(place, tmp_path / "out"))
    assert await asyncio.to_thread(reached.wait, 30)
    task.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (tmp_path / "out").exists()
    assert open_descriptors(tmp_path) == []


async def test_from_any_place(tmp_path):
    await savestream.save({"w": VALUES}, "memory://export-test/checkpoint")
    (path,) = await savestream.export_safetensors("memory://export-test/checkpoint", tmp_path / "out")
    assert_equal(read(path), {"w": VALUES})
