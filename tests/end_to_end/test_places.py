"""Checkpoints do not depend on where they lie: relative, linked, moved, copied, read-only, oddly named."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, snapshot

import savestream
from savestream import CheckpointExistsError, CheckpointNotFoundError, PlanError
from savestream.storage_backends import FileBackend, MemoryBackend

STATE = {"w": np.arange(5000.0), "b": {"step": 3, "n": np.float32(0.5)}}


async def check(place: Any) -> None:
    """The checkpoint is there, whichever way one asks."""
    assert await savestream.exists(place)
    assert_same(await savestream.load(place), STATE)
    target = {"w": np.zeros(5000), "b": {"step": 0, "n": None}}
    assert_same(await savestream.load(place, target), STATE)
    assert (await savestream.read_manifest(place)).step == 8
    await savestream.verify(place)


async def save(place: Any, **options: Any) -> savestream.CheckpointInfo:
    return await savestream.save(STATE, place, step=8, **options)


async def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = await savestream.start_save(STATE, "runs/step-8", step=8)
    monkeypatch.chdir(tmp_path / "elsewhere")
    info = await handle
    await check(info.location)
    await check("../runs/step-8")
    await check(tmp_path / "runs" / "step-8")
    await check(Path("..") / "runs" / "." / "step-8")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(tmp_path / "runs" / "step-8")
    await check(".")


async def test_symlinked_destinations(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    await save(tmp_path / "link")
    await save(tmp_path / "absolute" / "inner")
    for place in ("link", "real", "absolute", "link/inner", "real/inner"):
        await check(tmp_path / place)
    assert [entry.name for entry in await savestream.list_checkpoints(tmp_path / "link")] == ["inner"]
    (tmp_path / "latest").symlink_to("real/inner")
    await check(tmp_path / "latest")


async def test_moved_and_copied_directories(tmp_path: Path) -> None:
    await save(tmp_path / "runs" / "a" / "step-8")
    shutil.move(tmp_path / "runs", tmp_path / "archive")
    await check(tmp_path / "archive" / "a" / "step-8")
    shutil.copytree(tmp_path / "archive" / "a" / "step-8", tmp_path / "copy")
    shutil.rmtree(tmp_path / "archive")
    await check(tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "other name")
    await check(tmp_path / "other name")
    for content in snapshot(tmp_path / "other name").values():
        assert content is None or str(tmp_path).encode() not in content


async def test_file_urls(tmp_path: Path) -> None:
    place = tmp_path / "with space ü %41 #1?"
    url = "file://" + urllib.parse.quote(str(place))
    info = await save(url)
    for found in (
        url,
        place,
        str(place),
        os.fsencode(place),
        info.location,
        "FILE://localhost" + url[len("file://") :],
    ):
        await check(found)
    (entry,) = await savestream.list_checkpoints(tmp_path)
    await check(entry.location)


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "été",
        "e\u0301te\u0301",
        "日本語",
        "🧠",
        "a%20b",
        "quote'\"",
        "semi;colon&",
        "-dash",
        "new\nline",
        "\udcff",
    ],
)
async def test_any_name(name: str, tmp_path: Path) -> None:
    info = await save(tmp_path / name / "step-000000000008")
    await check(tmp_path / name / "step-000000000008")
    await check(info.location)
    (entry,) = await savestream.list_checkpoints(tmp_path / name)
    assert entry.step == 8
    await check(entry.location)
    await savestream.delete(tmp_path / name / "step-000000000008")
    assert not await savestream.exists(tmp_path / name / "step-000000000008")


async def test_backends_with_a_path(tmp_path: Path) -> None:
    for backend in (MemoryBackend("mine"), FileBackend(str(tmp_path))):
        for path in ("", "a", "a/b/step-8"):
            await save((backend, path))
            await check((backend, path))
    await check(tmp_path / "a" / "b" / "step-8")
    with pytest.raises(PlanError):
        await save((FileBackend(str(tmp_path)), "../outside"))


async def test_memory_urls_name_one_store_per_name() -> None:
    info = await save("memory://test-places-one/a/b")
    await check("memory://test-places-one/a/b")
    await check(info.location)
    assert not await savestream.exists("memory://test-places-two/a/b")
    assert [entry.name for entry in await savestream.list_checkpoints("memory://test-places-one/a")] == ["b"]
    await savestream.delete("memory://test-places-one/a/b")
    with pytest.raises(CheckpointNotFoundError):
        await savestream.load("memory://test-places-one/a/b")


@pytest.mark.parametrize("place", ["", "s4://bucket/x", "file://host/x", "file:///a?b", ("x", "y"), 5, None, "a\0b"])
async def test_places_that_cannot_be_are_refused(place: Any) -> None:
    for call in (savestream.load, savestream.exists, savestream.delete, savestream.read_manifest):
        with pytest.raises(PlanError):
            await call(place)
    with pytest.raises(PlanError):
        await save(place)


async def test_loading_from_a_read_only_tree(tmp_path: Path) -> None:
    await save(tmp_path / "c")
    before = snapshot(tmp_path)
    entries = [tmp_path / "c", *(tmp_path / "c").rglob("*")]
    modes = {path: path.stat().st_mode for path in entries}
    for path in entries:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        await check(tmp_path / "c")
        assert [key async for key, _ in savestream.iter_arrays(tmp_path / "c")] == ["w"]
        assert await savestream.list_checkpoints(tmp_path) != []
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert snapshot(tmp_path) == before


async def test_a_second_save_is_refused_and_an_overwrite_replaces(tmp_path: Path) -> None:
    first = await save(tmp_path / "c")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        await savestream.save({"other": np.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        await savestream.start_save({"other": np.ones(2)}, tmp_path / "c")
    assert snapshot(tmp_path) == before
    second = await savestream.save({"other": np.ones(2)}, tmp_path / "c", overwrite=True)
    assert_same(await savestream.load(tmp_path / "c"), {"other": np.ones(2)})
    assert not (tmp_path / "c" / first.save_id).exists()
    assert (tmp_path / "c" / second.save_id).is_dir()


async def test_an_unfinished_save_is_called_incomplete(tmp_path: Path) -> None:
    info = await save(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="incomplete"):
        await savestream.load(tmp_path / "c")
    assert await savestream.list_checkpoints(tmp_path) == []
    await save(tmp_path / "c")
    await check(tmp_path / "c")
    assert (tmp_path / "c" / info.save_id).is_dir()


async def test_no_checkpoint_is_no_incomplete_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "absent", tmp_path / "empty", tmp_path / "absent" / "deeper"):
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint") as caught:
            await savestream.load(place)
        assert str(place) in str(caught.value)
        assert isinstance(caught.value, FileNotFoundError)
