"""Sharded arrays of JAX's: what each process writes, and loads onto other meshes and into other frameworks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_support import (
    KEY_IMPLEMENTATIONS,
    SHARDING_NAMES,
    assert_same_leaf,
    bits,
    elements,
    key_array,
    placed,
    sharding,
)

import savestream
from savestream import LoadMismatchError, SaveOptions
from savestream.arrays import framework_adapter

RAW = SaveOptions(compression="none")
DTYPES = ("float32", "bfloat16", "int4", "bool", "complex64", "float8_e4m3fn", "float64")
SHAPES = ((8, 8), (16, 24, 3), (8, 0), (0, 8), (8, 8, 0))


def adapter() -> Any:
    return framework_adapter("jax")


class BytesRead:
    """Observer that adds up what a load reads."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, event: object) -> None:
        if isinstance(event, savestream.events.RangeRead):
            self.total += event.bytes


# --- the boxes ---


@pytest.mark.parametrize("name", SHARDING_NAMES)
def test_the_boxes_of_an_array_cover_it_once(name: str) -> None:
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(host, sharding(name))
    boxes = adapter().split(array, "w")
    if sharding(name).is_fully_replicated:
        assert boxes is None
        assert adapter().target_boxes(array, "w") is None
        return
    rebuilt = np.full((8, 8), np.nan, np.float32)
    covered = np.zeros((8, 8), int)
    for offsets, part in boxes:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
        rebuilt[where] = part
        covered[where] += 1
    assert (covered == 1).all()
    assert np.array_equal(rebuilt, host)
    assert [offsets for offsets, _ in boxes] == sorted(offsets for offsets, _ in boxes)
    targets = adapter().target_boxes(array, "w")
    assert sorted(targets) == [(offsets, part.shape) for offsets, part in boxes]
    assert adapter().target_boxes(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding(name)), "w") == targets


def test_an_empty_array_has_one_empty_box() -> None:
    array = jax.device_put(jnp.zeros((0, 8)), sharding("rows"))
    assert [(offsets, part.shape) for offsets, part in adapter().split(array, "w")] == [((0, 0), (0, 8))]


# --- every sharding, dtype and shape ---


def sharded_state() -> dict[str, jax.Array]:
    state: dict[str, jax.Array] = {}
    for number, (name, dtype) in enumerate(itertools.product(SHARDING_NAMES, DTYPES)):
        shape = SHAPES[number % len(SHAPES)]
        state[f"{name}, {dtype}, {shape}"] = placed(elements(dtype, shape, number), sharding(name))
    for name, implementation in itertools.product(SHARDING_NAMES, KEY_IMPLEMENTATIONS):
        state[f"{name}, {implementation} keys"] = key_array(implementation, (8, 8), sharding(name))
    return state


async def test_every_sharding_and_dtype_comes_back(tmp_path: Path) -> None:
    state = sharded_state()
    await savestream.save(state, tmp_path / "c")
    as_numpy = await savestream.load(tmp_path / "c")
    for name, array in state.items():
        found = as_numpy[name]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            assert np.array_equal(found["key_data"], jax.random.key_data(array))
        else:
            assert bits(found) == bits(array)
    target = {name: zeros_like(array) for name, array in state.items()}
    for name, found in (await savestream.load(tmp_path / "c", target)).items():
        assert_same_leaf(found, state[name])


def zeros_like(array: jax.Array) -> jax.Array:
    """Other content in the same place."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        implementation = jax.random.key_impl(array)
        return key_array(str(implementation), array.shape, array.sharding, seed=99)
    return placed(np.zeros(array.shape, array.dtype), array.sharding)


async def test_every_sharding_loads_into_every_other(tmp_path: Path) -> None:
    host = elements("float32", (16, 8))
    state = {name: placed(host, sharding(name)) for name in SHARDING_NAMES}
    state["nowhere in particular"] = placed(host)
    await savestream.save(state, tmp_path / "c")
    for place in SHARDING_NAMES:
        described = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(place))
            for name, array in state.items()
        }
        expected = placed(host, sharding(place))
        for found in (await savestream.load(tmp_path / "c", described)).values():
            assert_same_leaf(found, expected)


async def test_from_numpy_to_a_mesh_and_back(tmp_path: Path) -> None:
    host = {dtype: elements(dtype, (8, 16)) for dtype in DTYPES}
    await savestream.save(host, tmp_path / "numpy")
    target = {dtype: placed(np.zeros_like(array), sharding("blocks")) for dtype, array in host.items()}
    found = await savestream.load(tmp_path / "numpy", target)
    await savestream.save(found, tmp_path / "jax")
    back = await savestream.load(tmp_path / "jax", {dtype: np.zeros_like(array) for dtype, array in host.items()})
    for dtype, array in host.items():
        assert_same_leaf(found[dtype], placed(array, sharding("blocks")))
        assert bits(back[dtype]) == bits(array)


async def test_boxes_of_numpys_as_target(tmp_path: Path) -> None:
    host = elements("float32", (8, 8))
    await savestream.save({"w": placed(host, sharding("blocks"))}, tmp_path / "c")
    halves = [np.zeros((3, 8), np.float32), np.zeros((5, 8), np.float32)]
    target = {"w": savestream.ShardedArray((8, 8), [((0, 0), halves[0]), ((3, 0), halves[1])])}
    await savestream.load(tmp_path / "c", target)
    assert bits(np.concatenate(halves)) == bits(host)


async def test_shards_that_are_arrays_of_jaxs(tmp_path: Path) -> None:
    host = elements("bfloat16", (6, 4))
    shards = [((0, 0), jnp.asarray(host[:2])), ((2, 0), jnp.asarray(host[2:]))]
    await savestream.save({"w": savestream.ShardedArray((6, 4), shards)}, tmp_path / "c")
    assert bits((await savestream.load(tmp_path / "c"))["w"]) == bits(host)
    target = savestream.ShardedArray((6, 4), [((0, 0), jnp.zeros((6, 4), jnp.bfloat16))])
    found = (await savestream.load(tmp_path / "c", {"w": target}))["w"]
    assert bits(found.shards[0]) == bits(host)


async def test_conversion_into_a_sharded_target(tmp_path: Path) -> None:
    host = elements("int32", (8, 8))
    await savestream.save({"w": placed(host, sharding("rows"))}, tmp_path / "c")
    target = {"w": placed(np.zeros((8, 8), np.float32), sharding("columns"))}
    with pytest.raises(LoadMismatchError, match=r"w \(checkpoint int32, target float32\)"):
        await savestream.load(tmp_path / "c", target)
    found = await savestream.load(tmp_path / "c", target, cast=True)
    assert_same_leaf(found["w"], placed(host.astype(np.float32), sharding("columns")))


async def test_a_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    await savestream.save({"w": placed(elements("int32", (8, 8)), sharding("rows"))}, tmp_path / "c")
    target = {"w": placed(np.zeros((16, 8), np.int32), sharding("rows"))}
    with pytest.raises(LoadMismatchError, match=r"w \(checkpoint \(8, 8\), target \(16, 8\)\)"):
        await savestream.load(tmp_path / "c", target)


# --- bytes ---


async def test_replicas_are_written_once(tmp_path: Path) -> None:
    host = elements("float32", (64, 64))
    for name in SHARDING_NAMES:
        info = await savestream.save({"w": placed(host, sharding(name))}, tmp_path / name, options=RAW)
        assert info.statistics.raw_bytes == host.nbytes


async def test_one_sharded_array_under_several_names_is_stored_once(tmp_path: Path) -> None:
    array = placed(elements("float32", (64, 64)), sharding("blocks"))
    other = placed(elements("float32", (64, 64), 1), sharding("blocks"))
    state = {"model": array, "ema": array, "other": other, "again": {"other": other}}
    info = await savestream.save(state, tmp_path / "c", options=RAW)
    assert info.statistics.raw_bytes == 2 * 64 * 64 * 4
    found = await savestream.load(tmp_path / "c")
    assert bits(found["model"]) == bits(found["ema"]) == bits(array)
    assert bits(found["other"]) == bits(found["again"]["other"]) == bits(other)


async def test_only_selected_sharded_leaves_are_read(tmp_path: Path) -> None:
    params = {"w": placed(elements("float32", (1024, 256)), sharding("blocks"))}
    moments = {"m": placed(elements("float32", (4096, 2048)), sharding("rows"))}
    await savestream.save({"params": params, "moments": moments}, tmp_path / "c", options=RAW)
    read = BytesRead()
    target = jax.tree.map(zeros_like, {"params": params, "moments": moments})
    kept = target["moments"]["m"]
    found = await savestream.load(tmp_path / "c", target, keys=["params"], observer=read)
    assert_same_leaf(found["params"]["w"], params["w"])
    assert found["moments"]["m"] is kept
    assert params["w"].nbytes <= read.total < 2 * params["w"].nbytes


async def test_each_box_of_a_target_is_read_once(tmp_path: Path) -> None:
    host = elements("float32", (1024, 1024))
    await savestream.save({"w": host}, tmp_path / "c", options=RAW)
    for name in ("rows, replicated over columns", "replicated", "two of the devices"):
        read = BytesRead()
        target = {"w": jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding(name))}
        found = await savestream.load(tmp_path / "c", target, observer=read)
        assert_same_leaf(found["w"], placed(host, sharding(name)))
        assert read.total < 1.5 * host.nbytes


# --- plans ---


async def test_a_plan_is_reused_as_long_as_the_sharding_is(tmp_path: Path) -> None:
    cache = savestream.PlanCache()
    cached = []
    places = ("blocks", "blocks", "blocks, axes exchanged", "backwards", "rows", "replicated", "one device")
    for number, name in enumerate(places):
        host = elements("float32", (8, 8), number)
        info = await savestream.save({"w": placed(host, sharding(name))}, tmp_path / f"{number}", plan_cache=cache)
        cached.append(info.statistics.plan_cached)
        assert bits((await savestream.load(tmp_path / f"{number}"))["w"]) == bits(host)
    # The boxes of a mesh backwards are those of the mesh, one device holds an array as the replicas do.
    assert cached == [False, True, False, True, False, False, True]


async def test_a_plan_of_tied_arrays_is_not_that_of_untied_ones(tmp_path: Path) -> None:
    cache = savestream.PlanCache()
    one, other = (placed(elements("float32", (8, 8), seed), sharding("blocks")) for seed in (0, 1))
    sizes = []
    for number, state in enumerate(({"a": one, "b": one}, {"a": one, "b": other}, {"a": other, "b": other})):
        info = await savestream.save(state, tmp_path / f"{number}", plan_cache=cache, options=RAW)
        sizes.append((info.statistics.plan_cached, info.statistics.raw_bytes))
        found = await savestream.load(tmp_path / f"{number}")
        assert {name: bits(array) for name, array in found.items()} == {n: bits(a) for n, a in state.items()}
    assert sizes == [(False, 256), (False, 512), (True, 256)]
