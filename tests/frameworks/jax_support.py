"""Arrays of JAX for tests: meshes, shardings, random elements, and comparison bit by bit."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

__all__ = [
    "DEVICES",
    "KEY_IMPLEMENTATIONS",
    "SHARDING_NAMES",
    "X32_DTYPES",
    "assert_same_leaf",
    "assert_same_tree",
    "bits",
    "elements",
    "key_array",
    "mesh",
    "placed",
    "run_python",
    "sharding",
]

DEVICES = 8
KEY_IMPLEMENTATIONS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}
# What JAX holds without jax_enable_x64.
X32_DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64", "bfloat16"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"),
)
_MASKS = {"int2": 3, "uint2": 3, "int4": 15, "uint4": 15, "float4_e2m1fn": 15}  # bits of an element's byte that count

SHARDING_NAMES = (
    *("one device", "replicated", "rows", "columns", "rows, replicated over columns"),
    *("columns, replicated over rows", "blocks", "blocks, axes exchanged", "rows over both axes"),
    *("blocks over three axes", "backwards", "two of the devices", "last axis of a cube"),
)


def mesh(*shape: int, reverse: bool = False) -> Mesh:
    """The first devices in a grid with axes a, b, c."""
    devices = jax.devices()
    assert len(devices) == DEVICES, "JAX was used before tests/frameworks/conftest.py could ask for eight devices"
    chosen = devices[: math.prod(shape)]
    return Mesh(np.array(chosen[::-1] if reverse else chosen).reshape(shape), ("a", "b", "c")[: len(shape)])


def _named(grid: Mesh, *spec: Any) -> Sharding:
    return NamedSharding(grid, PartitionSpec(*spec))


@functools.cache
def _shardings() -> Mapping[str, Sharding]:
    grid, line, cube = mesh(4, 2), mesh(8), mesh(2, 2, 2)
    return {
        "one device": SingleDeviceSharding(jax.devices()[3]),
        "replicated": _named(grid),
        "rows": _named(line, "a"),
        "columns": _named(line, None, "a"),
        "rows, replicated over columns": _named(grid, "a"),
        "columns, replicated over rows": _named(grid, None, "b"),
        "blocks": _named(grid, "a", "b"),
        "blocks, axes exchanged": _named(grid, "b", "a"),
        "rows over both axes": _named(grid, ("b", "a")),
        "blocks over three axes": _named(cube, ("c", "a"), "b"),
        "backwards": _named(mesh(4, 2, reverse=True), "a", "b"),
        "two of the devices": _named(mesh(2), None, "a"),
        "last axis of a cube": _named(cube, None, ("a", "b", "c")),
    }


def sharding(name: str) -> Sharding:
    """One of the shardings by its name; made late, since that starts JAX."""
    return _shardings()[name]


def elements(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits, NaN payloads and -0.0 among them, as far as JAX keeps them."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    generator = np.random.default_rng([seed, len(dtype), *dtype.encode(), *shape])
    count = math.prod(shape)
    if kind.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    memory = np.frombuffer(bytearray(generator.bytes(count * kind.itemsize)), np.uint8)
    memory &= _MASKS.get(dtype, 255)
    return memory.view(kind).reshape(shape)


def placed(array: np.ndarray, place: Any = None) -> jax.Array:
    """A JAX array of exactly these elements, 64-bit dtypes included."""
    with jax.enable_x64(True):
        return jax.device_put(array, place)


def key_array(implementation: str, shape: tuple[int, ...], place: Any = None, seed: int = 0) -> jax.Array:
    """Typed random keys."""
    words = elements("uint32", (*shape, KEY_IMPLEMENTATIONS[implementation]), seed)
    return jax.device_put(jax.random.wrap_key_data(words, impl=implementation), place)


def bits(array: Any) -> bytes:
    """Shape, dtype and every bit of an array of numpy's or JAX's, as text and bytes that compare."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype).encode() + bits(jax.random.key_data(array))
    host = np.array(array)
    memory = np.ascontiguousarray(host).reshape(-1).view(np.uint8) & np.uint8(_MASKS.get(host.dtype.name, 255))
    return f"{host.dtype} {host.shape} ".encode() + memory.tobytes()


def assert_same_leaf(found: Any, expected: Any) -> None:
    """Fail unless both are the same in class and bits; arrays of JAX's also in place and weak type."""
    assert type(found) is type(expected), f"{type(found)} instead of {type(expected)}"
    if isinstance(expected, jax.Array):
        assert found.sharding == expected.sharding
        assert found.committed == expected.committed
        assert getattr(found, "weak_type", None) == getattr(expected, "weak_type", None)
    if isinstance(expected, jax.Array | np.ndarray):
        assert bits(found) == bits(expected)
    else:
        assert repr(found) == repr(expected)


def assert_same_tree(found: Any, expected: Any) -> None:
    """Fail unless two pytrees have the same structure, static data included, and the same leaves."""
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    pairs = zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True)
    for one, other in pairs:
        assert_same_leaf(one, other)


def run_python(code: str, *arguments: str) -> str:
    """Run a program in a process of its own; what it prints, without its last newline."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")
