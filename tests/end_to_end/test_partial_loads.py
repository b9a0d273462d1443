"""Loads of parts, of boxes and one by one read about what they need; inspection reads no data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place, snapshot

import savestream
from savestream import (
    CheckpointEntry,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    PlanError,
    SaveOptions,
    ShardedArray,
)
from savestream.planners import BytesStorageMetadata, TensorStorageMetadata
from savestream.storage_backends import FileBackend, MemoryBackend, TracingBackend

RAW = SaveOptions(compression="none")
MEBIBYTE = 1 << 20


def floats(megabytes: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(int(megabytes * MEBIBYTE) // 8)


def train_state() -> dict[str, Any]:
    return {
        "params": {"w": floats(0.5, 1), "layers": [floats(0.25, 2), (floats(0.25, 3), 3)], "step": 7},
        "params2": {"w": floats(1, 4)},
        "opt": {"m": {"w": floats(12, 5)}, "v": floats(12, 6), "lr": 0.1},
    }


SELECTIONS: list[tuple[Any, Any]] = [
    ("params", lambda state: {"params": state["params"]}),
    (["params"], lambda state: {"params": state["params"]}),
    ([("params",)], lambda state: {"params": state["params"]}),
    ("params.w", lambda state: {"params": {"w": state["params"]["w"]}}),
    ("params.step", lambda state: {"params": {"step": 7}}),
    (["params.w", "opt.lr"], lambda state: {"params": {"w": state["params"]["w"]}, "opt": {"lr": 0.1}}),
    ("params.layers", lambda state: {"params": {"layers": state["params"]["layers"]}}),
    ("params.layers[0]", lambda state: {"params": {"layers": {0: state["params"]["layers"][0]}}}),
    ([("params", "layers", 1)], lambda state: {"params": {"layers": {1: state["params"]["layers"][1]}}}),
    ([("params", "layers", 1, 1)], lambda state: {"params": {"layers": {1: {1: 3}}}}),
    (["params", "params2"], lambda state: {"params": state["params"], "params2": state["params2"]}),
    (["params", "params"], lambda state: {"params": state["params"]}),
    (["params.w", ("params", "w"), "params.w"], lambda state: {"params": {"w": state["params"]["w"]}}),
    (["params.step", ("params", "step")], lambda state: {"params": {"step": 7}}),
    (["params.layers[0]", ("params", "layers", 0)], lambda s: {"params": {"layers": {0: s["params"]["layers"][0]}}}),
    ([], lambda state: {}),
]


@pytest.mark.parametrize(("keys", "expected"), SELECTIONS, ids=[repr(keys) for keys, _ in SELECTIONS])
async def test_keys_select_themselves_and_all_beneath(keys: Any, expected: Any) -> None:
    state = train_state()
    backend = TracingBackend(MemoryBackend())
    await savestream.save(state, (backend, "c"), options=RAW)
    backend.clear()
    assert_same(await savestream.load((backend, "c"), keys=keys), expected(state))
    wanted = sum(array.nbytes for array in arrays_of(expected(state)))
    assert wanted <= backend.bytes_moved("read_into") <= wanted + 2 * MEBIBYTE
    assert backend.count("open_reader") == backend.count("close")


def arrays_of(state: Any) -> list[np.ndarray]:
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [array for item in state for array in arrays_of(item)]
    return [state] if isinstance(state, np.ndarray) else []


@pytest.mark.parametrize("keys", ["params", "params.w", [("params", "layers", 0)]])
async def test_keys_into_a_target_leave_the_rest_alone(keys: Any) -> None:
    state = train_state()
    place = fresh_place()
    await savestream.save(state, place)
    zeros = {
        "params": {"w": np.zeros(65536), "layers": [np.zeros(32768), (np.zeros(32768), 0)], "step": 0},
        "params2": {"w": np.full(131072, 5.0)},
        "opt": None,
        "own": object(),
    }
    found = await savestream.load(place, zeros, keys=keys)
    assert found is zeros
    assert (found["params2"]["w"] == 5).all()
    chosen = state["params"]
    whole = keys == "params"
    assert_same(found["params"]["w"], chosen["w"] if keys != [("params", "layers", 0)] else np.zeros(65536))
    assert_same(found["params"]["layers"][0], chosen["layers"][0] if keys != "params.w" else np.zeros(32768))
    assert_same(found["params"]["layers"][1], chosen["layers"][1] if whole else (np.zeros(32768), 0))
    assert found["params"]["step"] == (7 if whole else 0)


@pytest.mark.parametrize(
    "keys", ["param", "params.", "params.x", ["params", "absent"], "params.layers[2]", [("opt", 0)]]
)
async def test_keys_that_match_nothing_are_an_error(keys: Any) -> None:
    place = fresh_place()
    await savestream.save({"params": {"w": np.ones(2), "layers": [np.ones(1)]}, "opt": {"m": np.ones(2)}}, place)
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(place, keys=keys)
    assert len(caught.value.missing) == 1
    with pytest.raises(LoadMismatchError):
        await anext(savestream.iter_arrays(place, keys=keys))


async def test_keys_lead_into_plain_values() -> None:
    state = {"a": {"z": 1, "y": {"q": 2, "r": (3, 4)}}, "w": np.ones(2)}
    place = fresh_place()
    await savestream.save(state, place)
    for keys, expected in (
        (["a.z"], {"a": {"z": 1}}),
        (["a.z", "a.y.q", "a.z"], {"a": {"z": 1, "y": {"q": 2}}}),
        ([("a", "y", "r", 1)], {"a": {"y": {"r": {1: 4}}}}),
        (["a", "a.z"], {"a": state["a"]}),
        (["a.y.q", "a.y"], {"a": {"y": state["a"]["y"]}}),
    ):
        assert_same(await savestream.load(place, keys=keys), expected)
    target = {"a": {"z": 0, "y": {"q": 0, "r": (0, 0)}}, "w": None}
    assert_same(
        await savestream.load(place, target, keys=["a.y.r[1]"]), {"a": {"z": 0, "y": {"q": 0, "r": (0, 4)}}, "w": None}
    )
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(place, keys=["a", "a.x"])
    assert caught.value.missing == ("a.x",)


@pytest.mark.parametrize("keys", [[3], [None], [b"x"]])
async def test_keys_of_a_wrong_type_are_refused(keys: Any) -> None:
    with pytest.raises(PlanError, match="keys holds"):
        await savestream.load(fresh_place(), keys=keys)


# --- boxes ------------------------------------------------------------------------------------------------


def sharded(array: np.ndarray, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> ShardedArray:
    """A ShardedArray that holds boxes (offsets, sizes) of an array."""
    return ShardedArray(
        array.shape,
        [(low, np.array(array[tuple(slice(a, a + b) for a, b in zip(low, size, strict=True))])) for low, size in boxes],
        dtype=array.dtype.name,
    )


def zeroed(leaf: ShardedArray) -> ShardedArray:
    shards = [(low, np.zeros_like(part)) for low, part in zip(leaf.global_offsets, leaf.shards, strict=True)]
    return ShardedArray(leaf.global_shape, shards, dtype=leaf.dtype)


async def test_a_box_reads_only_the_frames_that_it_needs() -> None:
    array = np.random.default_rng(0).random((4096, 1024))  # 32 MiB in frames of 4 MiB, 512 rows each
    backend = TracingBackend(MemoryBackend())
    await savestream.save({"w": array}, (backend, "c"), options=RAW)
    for rows in ((0, 512), (600, 10), (500, 600), (4095, 1)):
        backend.clear()
        target = {"w": sharded(array * 0, [((rows[0], 5), (rows[1], 100))])}
        await savestream.load((backend, "c"), target)
        assert_same(target["w"], sharded(array, [((rows[0], 5), (rows[1], 100))]))
        frames = (rows[0] + rows[1] - 1) // 512 - rows[0] // 512 + 1
        assert backend.bytes_moved("read_into") == frames * 4 * MEBIBYTE


BOXES = {
    "rows": [((0, 0), (3, 7)), ((3, 0), (3, 7)), ((6, 0), (2, 7))],
    "columns": [((0, 0), (8, 1)), ((0, 1), (8, 6))],
    "grid": [((0, 0), (5, 3)), ((0, 3), (5, 4)), ((5, 0), (3, 3)), ((5, 3), (3, 4))],
    "any order": [((5, 0), (3, 7)), ((0, 0), (5, 7))],
    "empty shards": [((0, 0), (0, 7)), ((0, 0), (8, 7)), ((8, 0), (0, 7)), ((3, 2), (2, 0))],
    "whole": [((0, 0), (8, 7))],
}


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("saved", BOXES)
async def test_sharded_arrays_load_whole_and_in_other_boxes(saved: str, compression: Any) -> None:
    array = np.arange(56, dtype=np.int32).reshape(8, 7)
    place = fresh_place()
    await savestream.save(
        {"w": sharded(array, BOXES[saved]), "other": array + 1}, place, options=SaveOptions(compression=compression)
    )
    assert_same(await savestream.load(place), {"w": array, "other": array + 1})
    for wanted in BOXES:
        target = {"w": zeroed(sharded(array, BOXES[wanted])), "other": zeroed(sharded(array, BOXES[wanted]))}
        await savestream.load(place, target)
        assert_same(target["w"], sharded(array, BOXES[wanted]))
        assert_same(target["other"], sharded(array + 1, BOXES[wanted]))
    plain = {"w": np.zeros((8, 7), np.int32, order="F"), "other": np.zeros((8, 7), np.int32)}
    await savestream.load(place, plain)
    assert_same(plain, {"w": array, "other": array + 1})


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0), ()])
async def test_sharded_arrays_without_or_with_one_element(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 7.5, np.float32)
    place = fresh_place()
    await savestream.save({"w": sharded(array, [((0,) * len(shape), shape)])}, place)
    assert_same(await savestream.load(place), {"w": array})
    none = {"w": ShardedArray(shape, [], dtype="float32")}
    await savestream.load(place, none)


async def test_a_rank_that_wants_no_box_reads_nothing() -> None:
    backend = TracingBackend(MemoryBackend())
    await savestream.save({"w": np.ones((100, 100))}, (backend, "c"))
    backend.clear()
    await savestream.load((backend, "c"), {"w": ShardedArray((100, 100), [], dtype="float64")})
    assert backend.bytes_moved("read_into") == 0


async def test_holes_and_overlaps_are_refused_at_the_save(tmp_path: Path) -> None:
    array = np.arange(56).reshape(8, 7)
    for boxes in ([((0, 0), (3, 7)), ((4, 0), (4, 7))], [((0, 0), (5, 7)), ((4, 0), (4, 7))], [((0, 0), (8, 6))]):
        with pytest.raises(PlanError, match="w"):
            await savestream.save({"w": sharded(array, boxes)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# --- one by one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, "params", ["opt.v", "params.w"]])
async def test_iter_arrays_yields_every_array_once(keys: Any) -> None:
    state = {**train_state(), "sharded": sharded(np.arange(20.0).reshape(4, 5), [((0, 0), (2, 5)), ((2, 0), (2, 5))])}
    place = fresh_place()
    await savestream.save(state, place)
    found = [pair async for pair in savestream.iter_arrays(place, keys=keys)]
    expected = {
        "params.w": state["params"]["w"],
        "params.layers[0]": state["params"]["layers"][0],
        "params.layers[1][0]": state["params"]["layers"][1][0],
        "params2.w": state["params2"]["w"],
        "opt.m.w": state["opt"]["m"]["w"],
        "opt.v": state["opt"]["v"],
        "sharded": np.arange(20.0).reshape(4, 5),
    }
    if keys is not None:
        names = ["params.w", "opt.v"] if isinstance(keys, list) else [name for name in expected if "params." in name]
        expected = {name: expected[name] for name in names}
    assert len(found) == len(expected)
    assert_same(dict(found), expected)


async def test_iter_arrays_reads_no_further_than_its_bound_and_an_early_break_leaves_nothing(tmp_path: Path) -> None:
    state = {f"a{number}": np.full(16 * MEBIBYTE, number, np.uint8) for number in range(6)}
    backend = TracingBackend(FileBackend(str(tmp_path)))
    await savestream.save(state, (backend, "c"), options=RAW)
    backend.clear()
    tasks = asyncio.all_tasks()
    arrays = savestream.iter_arrays((backend, "c"))
    async for key, array in arrays:
        assert key == "a0"
        assert_same(array, state["a0"])
        break
    await arrays.aclose()  # type: ignore[attr-defined]
    assert backend.bytes_moved("read_into") <= 64 * MEBIBYTE
    assert backend.count("open_reader") == backend.count("close") > 0
    assert asyncio.all_tasks() == tasks


# --- what is there ----------------------------------------------------------------------------------------


async def test_the_manifest_is_read_without_data() -> None:
    backend = TracingBackend(MemoryBackend())
    state = {"w": np.zeros((3, 4), ">f4"), "s": np.array(1.0), "cfg": {"lr": 0.5, "names": ("a",)}, "n": None}
    info = await savestream.save(
        state, (backend, "c"), step=12, metadata={"note": ("x", 1)}, metrics={"loss": 0.5, "acc": float("nan")}
    )
    backend.clear()
    manifest = await savestream.read_manifest((backend, "c"))
    assert [record.kind for record in backend.records] == ["get"]
    assert (manifest.save_id, manifest.step, manifest.world_size) == (info.save_id, 12, 1)
    assert manifest.metadata == {"note": ("x", 1)}
    assert manifest.metrics is not None
    assert manifest.metrics["loss"] == 0.5
    assert np.isnan(manifest.metrics["acc"])
    assert manifest.raw_bytes == 3 * 4 * 4 + 8
    entries = manifest.contents.state_dict_metadata
    assert list(entries) == ["w", "s", "cfg", "n"]
    w, cfg = entries["w"], entries["cfg"]
    assert isinstance(w, TensorStorageMetadata)
    assert (w.size, w.properties.dtype) == ((3, 4), ">f4")
    assert isinstance(cfg, BytesStorageMetadata)


async def test_exists_and_list_in_the_order_of_steps(tmp_path: Path) -> None:
    names = ["step-000000000900", "step-000000001000", "step-000000000008", "best", "step-1000000000000"]
    for name in names:
        await savestream.save({"w": np.ones(2)}, tmp_path / name)
    (tmp_path / "step-000000000950").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    found = await savestream.list_checkpoints(tmp_path)
    assert [(entry.name, entry.step) for entry in found] == [
        ("best", None),
        ("step-000000000008", 8),
        ("step-000000000900", 900),
        ("step-000000001000", 1000),
        ("step-1000000000000", 1_000_000_000_000),
    ]
    assert all(isinstance(entry, CheckpointEntry) for entry in found)
    for entry in found:
        assert_same(await savestream.load(entry.location), {"w": np.ones(2)})
    assert await savestream.exists(tmp_path / "best")
    assert not await savestream.exists(tmp_path / "step-000000000950")
    assert not await savestream.exists(tmp_path)
    assert await savestream.list_checkpoints(tmp_path / "absent") == []
    assert await savestream.list_checkpoints(tmp_path / "best") == []


async def test_delete_removes_its_own_files_only(tmp_path: Path) -> None:
    info = await savestream.save({"w": np.ones(2)}, tmp_path / "c")
    await savestream.save({"w": np.ones(3)}, tmp_path / "other")
    foreign = [tmp_path / "c" / "notes.txt", tmp_path / "c" / info.save_id / "mine.bin", tmp_path / "c" / "x" / "r.bin"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    await savestream.delete(tmp_path / "c")
    assert {path for path in (tmp_path / "c").rglob("*") if path.is_file()} == set(foreign)
    assert all(path.read_text() == "mine" for path in foreign)
    assert not await savestream.exists(tmp_path / "c")
    assert_same(await savestream.load(tmp_path / "other"), {"w": np.ones(3)})
    with pytest.raises(CheckpointNotFoundError):
        await savestream.delete(tmp_path / "c")
    await savestream.save({"w": np.ones(4)}, tmp_path / "c")
    assert_same(await savestream.load(tmp_path / "c"), {"w": np.ones(4)})


async def test_delete_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    await savestream.save({"w": np.ones(2)}, tmp_path / "c")
    await savestream.delete(tmp_path / "c")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_verify_counts_what_it_checked_and_names_what_is_damaged(compression: Any, tmp_path: Path) -> None:
    state = {"a": np.arange(100_000), "tied": None, "b": {"c": np.arange(50.0)}}
    state["tied"] = state["a"]
    info = await savestream.save(state, tmp_path / "c", options=SaveOptions(compression=compression))
    before = snapshot(tmp_path)
    report = await savestream.verify(tmp_path / "c")
    assert report.raw_bytes == 800_000 + 400
    assert report.stored_bytes == info.statistics.stored_bytes
    assert report.frames >= 2
    assert snapshot(tmp_path) == before

    data = tmp_path / "c" / info.save_id / "r00000-0000.bin"
    content = bytearray(data.read_bytes())
    part = json.loads((tmp_path / "c" / info.save_id / "r00000.index.json").read_bytes())
    for offset in part["frames"]["offset"]:
        content[offset + 3] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        await savestream.verify(tmp_path / "c")
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == report.frames
    assert all(name in text for name in ("a", "tied", "b.c", "r00000-0000.bin"))
