"""What the fault tests share: small states, comparison bit by bit, and a view of what lies in storage."""

from __future__ import annotations

import gc
import os
import pathlib

import msgspec
import numpy as np

import savestream
from savestream.storage_backends import FileBackend, MemoryBackend, WrapperBackend

LARGE = 1_300_000  # floats; with the smallest memory budget they make two extents


def make_state(seed: int, floats: int = 20_000) -> dict[str, object]:
    """Arrays of several sizes and dtypes, plain values, an empty array; every seed differs everywhere."""
    random = np.random.default_rng(seed)
    return {
        "model": {
            "weight": random.standard_normal(floats, np.float32),
            "bias": random.standard_normal((7, 5)),
            "mask": random.integers(0, 2, 33).astype(bool),
        },
        "optimizer": {0: random.integers(-9, 9, (50, 11), np.int64), 1: np.asfortranarray(random.random((30, 40)))},
        "empty": np.zeros((0, 3), np.float16),
        "step": seed,
        "names": ("a", None, seed / 3),
    }


def assert_same(found: object, expected: object, place: str = "state") -> None:
    """Same containers, keys, dtypes, shapes and bits."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), place
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.tobytes() == expected.tobytes(), f"{place} has other bits"
        return
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{place}[{number}]")
    else:
        assert found == expected, place


class SmallObjects(WrapperBackend):
    """Holds little in one object, so that a small save has several."""

    @property
    def capabilities(self):
        return msgspec.structs.replace(self.inner.capabilities, maximum_object_bytes=64 * 1024)


def new_backend(kind: str, tmp_path: pathlib.Path) -> WrapperBackend:
    """A fresh, empty store."""
    inner = FileBackend(tmp_path / "store") if kind == "file" else MemoryBackend("store")
    return SmallObjects(inner)


async def everything(backend) -> dict[str, bytes]:
    """All objects of a store with their content, past any wrapper."""
    while isinstance(backend, WrapperBackend):
        backend = backend.inner
    infos = await backend.list_objects("")
    return {info.path: await backend.get(info.path, maximum_bytes=1 << 30) for info in infos}


def open_files() -> list[str]:
    """The files of a store that this process holds open."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "store" in target:
            found.append(target)
    return sorted(found)


async def save_in_mode(mode: str, state, dest, **options):
    """One save in any of the three forms; errors come out the same way."""
    if mode == "save":
        return await savestream.save(state, dest, **options)
    handle = await savestream.start_save(state, dest, stage=mode, **options)
    return await handle
