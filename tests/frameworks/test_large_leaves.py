"""Leaves of several frames and blocks, in layouts that are read row by row; views of a large base."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from leaf_dtypes import LeafDtype, element_bits
from leaf_targets import host_elements

import savestream
from savestream import SaveOptions, blocking
from savestream.storage_backends import MemoryBackend


def random_bytes(count: int) -> np.ndarray:
    """Bytes of which every other one is zero, so that some of them compress."""
    memory = np.frombuffer(bytearray(np.random.default_rng(count).bytes(count)), np.uint8)
    memory[1::2] = 0
    return memory


def large_leaves() -> dict[str, tuple[Any, np.ndarray]]:
    """Leaves of several frames and blocks, and their elements."""
    floats = random_bytes(4 * 2900 * 3100).view(np.float32).reshape(2900, 3100)  # more than 32 MiB
    halves = random_bytes(6 << 20).view(ml_dtypes.bfloat16).reshape(-1, 1024)
    complexes = random_bytes(5 << 20).view(np.complex64).reshape(-1, 64)
    pixels = random_bytes(5 << 20).reshape(4, 64, 64, -1).view(np.int16)
    codes = random_bytes(9 << 20)
    half_tensor = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)
    return {
        "numpy, transposed": (floats.T, floats.T),
        "numpy, reversed and of the other byte order": (floats.view(">f4")[:700, ::-2], floats.view(">f4")[:700, ::-2]),
        "torch, transposed": (torch.from_numpy(floats).T, floats.T),
        "torch, contiguous": (half_tensor, halves),
        "torch, conjugated": (torch.from_numpy(complexes).conj().T, np.conj(complexes).T),
        "torch, channels last": (torch.from_numpy(pixels).permute(0, 3, 1, 2), pixels.transpose(0, 3, 1, 2)),
        "torch, less than a byte": (torch.from_numpy(codes).view(torch.uint3)[::2], codes[::2]),
        "torch, Parameter": (torch.nn.Parameter(half_tensor[:, 1::2]), halves[:, 1::2]),
        "jax": (jax.device_put(floats), floats),
        "jax, packed": (jax.device_put((codes & 7).view(ml_dtypes.int4)), (codes & 7).view(ml_dtypes.int4)),
    }


@pytest.mark.parametrize(("compression", "eagerly"), [("none", False), ("zstd", True)])
def test_large_leaves(compression: Any, eagerly: bool) -> None:
    leaves = large_leaves()
    place = (MemoryBackend("test"), "checkpoint")
    state = {name: leaf for name, (leaf, _) in leaves.items()}
    options = SaveOptions(compression=compression)
    if eagerly:
        blocking.start_save(state, place, options=options).result()
    else:
        blocking.save(state, place, options=options)
    found = blocking.load(place)
    for name, (_, expected) in leaves.items():
        assert found[name].dtype == expected.dtype, name
        assert element_bits(found.pop(name)) == element_bits(expected), name
    target = {name: empty_like(leaf) for name, (leaf, _) in leaves.items()}
    loaded = blocking.load(place, dict(target))
    for name, (leaf, expected) in leaves.items():
        assert (loaded[name] is target[name]) == (not isinstance(leaf, jax.Array)), name
        assert element_bits(elements_of(loaded[name], expected)) == element_bits(expected), name


def empty_like(leaf: Any) -> Any:
    """A target of another layout: the rows of the leaf are its columns."""
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape[::-1], leaf.dtype).T
    if isinstance(leaf, torch.Tensor):
        order = tuple(reversed(range(leaf.ndim)))
        return torch.empty(leaf.shape[::-1], dtype=leaf.dtype).permute(order)
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype))


def elements_of(leaf: Any, expected: np.ndarray) -> np.ndarray:
    framework = "torch" if isinstance(leaf, torch.Tensor) else "numpy" if isinstance(leaf, np.ndarray) else "jax"
    return host_elements(leaf, LeafDtype(framework, "", "", expected.dtype))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
async def test_a_view_stores_only_its_own_elements(framework: str) -> None:
    base: Any = np.random.default_rng(0).integers(0, 256, (1000, 1000), np.uint8).view(np.int32)
    if framework == "torch":
        base = torch.from_numpy(base)
    state = {"middle": base[500, 17:90], "column": base[:, 3], "corner": base[-2:, -2:], "all of one": base[7]}
    backend = MemoryBackend("test")
    info = await savestream.save(state, (backend, "c"), options=SaveOptions(compression="none"))
    assert info.statistics.raw_bytes == 4 * sum(math.prod(leaf.shape) for leaf in state.values())
    objects = await backend.list_objects("")
    assert sum(found.size_bytes for found in objects if found.path.endswith(".bin")) < 16_384
