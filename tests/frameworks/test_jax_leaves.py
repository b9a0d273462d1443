"""JAX's arrays as leaves: what is saved, what is refused, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax_support import (
    KEY_IMPLEMENTATIONS,
    X32_DTYPES,
    assert_same_leaf,
    bits,
    elements,
    key_array,
    mesh,
    placed,
    run_python,
    sharding,
)

import savestream
import savestream.blocking
from savestream import LoadMismatchError, UnsafeObjectError
from savestream.arrays import ArrayInfo, adapter_for, array_info, framework_adapter, host_view

SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2, 3, 4))
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")


def adapter() -> Any:
    return framework_adapter("jax")


# --- every dtype ---


async def test_every_dtype_comes_back_as_numpy_as_jax_and_in_a_target(tmp_path: Path) -> None:
    host = {f"{name} {shape}": elements(name, shape) for name in X32_DTYPES for shape in SHAPES}
    state = {name: placed(array) for name, array in host.items()}
    await savestream.save(state, tmp_path / "c")
    as_numpy = await savestream.load(tmp_path / "c")
    as_jax = await savestream.load(tmp_path / "c", framework="jax")
    target = {name: placed(np.zeros_like(array)) for name, array in host.items()}
    described = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in state.items()}
    in_target = await savestream.load(tmp_path / "c", target)
    in_description = await savestream.load(tmp_path / "c", described)
    for name, array in host.items():
        assert type(as_numpy[name]) is np.ndarray
        assert bits(as_numpy[name]) == bits(array)
        for found in (as_jax, in_target, in_description):
            assert_same_leaf(found[name], state[name])


@pytest.mark.parametrize("implementation", KEY_IMPLEMENTATIONS)
async def test_typed_random_keys(implementation: str, tmp_path: Path) -> None:
    state = {str(shape): key_array(implementation, shape) for shape in ((), (0,), (3,), (2, 2))}
    await savestream.save(state, tmp_path / "c")
    as_numpy = await savestream.load(tmp_path / "c")
    as_jax = await savestream.load(tmp_path / "c", framework="jax")
    target = {name: key_array(implementation, keys.shape, seed=9) for name, keys in state.items()}
    in_target = await savestream.load(tmp_path / "c", target)
    described = {name: jax.ShapeDtypeStruct(keys.shape, keys.dtype) for name, keys in state.items()}
    in_description = await savestream.load(tmp_path / "c", described)
    for name, keys in state.items():
        assert as_numpy[name].dtype.names == ("key_data",)
        assert np.array_equal(as_numpy[name]["key_data"], jax.random.key_data(keys))
        for found in (as_jax, in_target, in_description):
            assert_same_leaf(found[name], keys)
    drawn = [jax.random.uniform(found["()"]) for found in (state, as_jax, in_target)]
    assert len({float(number) for number in drawn}) == 1


async def test_raw_random_keys_are_plain_arrays(tmp_path: Path) -> None:
    raw = jax.random.PRNGKey(7)
    await savestream.save({"raw": raw}, tmp_path / "c")
    assert_same_leaf((await savestream.load(tmp_path / "c", {"raw": raw * 0}))["raw"], raw)
    with pytest.raises(LoadMismatchError, match=r"raw \(checkpoint uint32, target prng_key<threefry2x32>\)"):
        await savestream.load(tmp_path / "c", {"raw": jax.random.key(7)}, cast=True)


async def test_keys_of_another_implementation_are_no_target(tmp_path: Path) -> None:
    await savestream.save({"key": jax.random.key(0, impl="rbg")}, tmp_path / "c")
    for cast in (False, True):
        with pytest.raises(LoadMismatchError, match=r"key \(checkpoint prng_key<rbg>, target prng_key<unsafe_rbg>\)"):
            await savestream.load(tmp_path / "c", {"key": jax.random.key(0, impl="unsafe_rbg")}, cast=cast)


async def test_keys_of_an_unknown_implementation_are_refused(tmp_path: Path) -> None:
    from jax.extend.random import define_prng_impl, threefry_prng_impl

    own = define_prng_impl(
        key_shape=(2,),
        seed=threefry_prng_impl.seed,
        split=threefry_prng_impl.split,
        random_bits=threefry_prng_impl.random_bits,
        fold_in=threefry_prng_impl.fold_in,
        name="own",
        tag="own",
    )
    with pytest.raises(UnsafeObjectError, match=r"a\.key: random keys of the implementation key<own>.*key_data"):
        await savestream.save({"a": {"key": jax.random.key(0, impl=own)}}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_names_shapes_and_views_of_the_adapter() -> None:
    array = jnp.arange(6.0).reshape(2, 3)
    assert array_info(array, "w") == ArrayInfo("float32", (2, 3), (12, 4), 4)
    assert np.array_equal(host_view(array), np.arange(6.0).reshape(2, 3))
    assert array_info(jax.random.key(0), "k") == ArrayInfo("prng_key<threefry2x32>", (), (), 8)
    assert adapter_for(type(array)) is adapter_for(jax.ShapeDtypeStruct) is adapter()


def test_a_layout_of_the_callers_own_choice() -> None:
    from jax.experimental.layout import Format, Layout

    host = elements("float32", (3, 5))
    array = jax.device_put(host, Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])))
    target = np.empty(7, np.float32)
    adapter().copy_elements(array, 4, 11, target)
    assert bits(target) == bits(host.reshape(-1)[4:11])
    assert adapter().join([array]).tobytes() == host.tobytes()


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn", "float32", "bool"])
def test_any_range_of_elements_can_be_copied(dtype: str) -> None:
    host = elements(dtype, (4, 6))
    array = placed(host)
    for start in range(0, 24, 5):
        for stop in (start, start + 1, 24):
            target = np.zeros(stop - start, host.dtype)
            adapter().copy_elements(array, start, stop, target)
            assert bits(target) == bits(host.reshape(-1)[start:stop])


# --- refusals ---


def delete(array: jax.Array) -> jax.Array:
    array.delete()
    return array


def donate(array: jax.Array) -> jax.Array:
    jax.jit(lambda value: value + 1, donate_argnums=0)(array)
    return array


@pytest.mark.parametrize("end", [delete, donate])
@pytest.mark.parametrize("place", [None, "blocks", "replicated"])
async def test_deleted_and_donated_arrays_are_refused_by_name(end: Any, place: str | None, tmp_path: Path) -> None:
    gone = end(jax.device_put(jnp.ones((8, 8)) * 2, None if place is None else sharding(place)))
    assert gone.is_deleted()
    with pytest.raises(UnsafeObjectError, match=r"layers\[1\]\.w: the array was deleted, as donating"):
        await savestream.save({"layers": [jnp.ones(2), {"w": gone}]}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


async def test_deleted_keys_are_refused_by_name(tmp_path: Path) -> None:
    key = jax.random.split(jax.random.key(0))
    key.delete()
    with pytest.raises(UnsafeObjectError, match="key: the array was deleted"):
        await savestream.save({"key": key}, tmp_path / "c")


def test_tracers_are_refused_by_name(tmp_path: Path) -> None:
    def step(weights: jax.Array) -> jax.Array:
        savestream.blocking.save({"model": {"w": weights}}, tmp_path / "c")
        return weights

    for transform in (jax.jit(step), jax.vmap(step), jax.grad(lambda w: step(w).sum())):
        with pytest.raises(UnsafeObjectError, match=r"model\.w: .*inside jit"):
            transform(jnp.ones(3))
    assert not list(tmp_path.iterdir())


async def test_descriptions_and_references_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsafeObjectError, match=r"w: a jax\.ShapeDtypeStruct only describes an array"):
        await savestream.save({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, tmp_path / "c")
    with pytest.raises(UnsafeObjectError, match=r"w: .*a mutable reference cannot be stored"):
        await savestream.save({"w": jax.new_ref(jnp.ones(2))}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


# --- what comes back ---


def weakly_typed() -> dict[str, jax.Array]:
    number = jnp.asarray(1.0)
    subnormal = np.array([0x00000001, 0x80000000, 0x7FA00001, 0xFFC12345], np.uint32).view(np.float32)
    return {
        "float": jnp.asarray(0.1),
        "int": jnp.asarray(-(2**31)),
        "complex": jnp.asarray(1 - 2j),
        "odd bits": jnp.broadcast_to(number, (4,)).at[...].set(jax.device_put(subnormal)),
        "sharded": jax.device_put(jnp.broadcast_to(number, (8, 8)).at[2].set(5.0), sharding("blocks")),
        "elsewhere": jax.device_put(jnp.asarray(3), jax.devices()[2]),
        "empty": jnp.broadcast_to(number, (0, 2)),
    }


async def test_a_weakly_typed_target_stays_weakly_typed(tmp_path: Path) -> None:
    state = weakly_typed()
    assert all(array.weak_type for array in state.values())
    await savestream.save(state, tmp_path / "c")
    target = {name: array * 0 for name, array in state.items()}
    assert all(array.weak_type for array in target.values())
    for name, found in (await savestream.load(tmp_path / "c", target)).items():
        assert_same_leaf(found, state[name])
    as_jax = await savestream.load(tmp_path / "c", framework="jax")
    assert not any(array.weak_type for array in as_jax.values())


async def test_a_weakly_typed_description_gives_a_weakly_typed_array(tmp_path: Path) -> None:
    state = weakly_typed()
    await savestream.save(state, tmp_path / "c")
    described = jax.eval_shape(lambda tree: tree, {name: state[name] for name in ("float", "int", "complex")})
    assert all(description.weak_type for description in described.values())
    for name, found in (await savestream.load(tmp_path / "c", described, strict=False)).items():
        assert_same_leaf(found, state[name])


async def test_a_strongly_typed_target_of_a_weakly_typed_array_stays_strong(tmp_path: Path) -> None:
    await savestream.save({"x": jnp.asarray(1.5)}, tmp_path / "c")
    found = await savestream.load(tmp_path / "c", {"x": jnp.zeros((), jnp.float32)})
    assert_same_leaf(found["x"], jnp.asarray(np.float32(1.5)))


async def test_the_target_decides_where_an_array_lies(tmp_path: Path) -> None:
    devices = jax.devices()
    with jax.default_device(devices[5]):
        uncommitted = jnp.ones(3)
    target = {"a": jnp.ones(3), "b": uncommitted, "c": jax.device_put(jnp.ones(3), devices[2])}
    assert [array.committed for array in target.values()] == [False, False, True]
    host = elements("float32", (3,))
    await savestream.save(dict.fromkeys("abc", host), tmp_path / "c")
    found = await savestream.load(tmp_path / "c", target)
    for name, array in found.items():
        assert (array.sharding, array.committed) == (target[name].sharding, target[name].committed)
        assert bits(array) == bits(host)
    assert float((found["a"] + jax.device_put(found["a"], devices[7])).sum()) == float(2 * found["a"].sum())


async def test_a_deleted_target_says_what_to_make_anew(tmp_path: Path) -> None:
    host = elements("float32", (8, 8))
    await savestream.save({"w": host}, tmp_path / "c")
    for place in (None, sharding("blocks")):
        target = jax.device_put(jnp.ones((8, 8)), place)
        kept = target.sharding, target.committed
        target.delete()
        found = await savestream.load(tmp_path / "c", {"w": target})
        assert (found["w"].sharding, found["w"].committed) == kept
        assert bits(found["w"]) == bits(host)


async def test_numpy_and_jax_fill_each_others_targets(tmp_path: Path) -> None:
    host = {name: elements(name, (4, 2)) for name in X32_DTYPES}
    await savestream.save({name: placed(array) for name, array in host.items()}, tmp_path / "j")
    await savestream.save(host, tmp_path / "n")
    into_numpy = {name: np.zeros_like(array) for name, array in host.items()}
    own = dict(into_numpy)
    found = await savestream.load(tmp_path / "j", into_numpy)
    assert all(found[name] is own[name] for name in host)
    into_jax = await savestream.load(
        tmp_path / "n", {name: placed(np.zeros_like(array)) for name, array in host.items()}
    )
    for name, array in host.items():
        assert bits(found[name]) == bits(into_jax[name]) == bits(array)


# --- 64 bits ---


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
async def test_no_bit_of_a_wide_dtype_is_lost(dtype: str, tmp_path: Path) -> None:
    assert not jax.config.jax_enable_x64
    host = elements(dtype, (8, 3))
    state = {"whole": placed(host), "sharded": placed(host, sharding("rows")), "scalar": placed(host[0, 0])}
    assert all(array.dtype == dtype for array in state.values())
    await savestream.save(state, tmp_path / "c")
    places = {name: array.sharding if array.committed else None for name, array in state.items()}
    target = {name: placed(np.zeros(array.shape, dtype), places[name]) for name, array in state.items()}
    in_target = await savestream.load(tmp_path / "c", target)
    described = {name: jax.ShapeDtypeStruct(array.shape, dtype, sharding=places[name]) for name, array in state.items()}
    in_description = await savestream.load(tmp_path / "c", described)
    for name, array in state.items():
        assert_same_leaf(in_target[name], array)
        assert_same_leaf(in_description[name], array)
    without_target = await savestream.load(tmp_path / "c", framework="jax")
    for name, array in without_target.items():
        assert type(array) is np.ndarray  # JAX would cut it down to 32 bits
        assert bits(array) == bits(state[name])


async def test_wide_dtypes_become_jax_arrays_where_jax_holds_them(tmp_path: Path) -> None:
    host = {dtype: elements(dtype, (3,)) for dtype in WIDE_DTYPES}
    await savestream.save(host, tmp_path / "c")
    jax.config.update("jax_enable_x64", True)
    try:
        found = await savestream.load(tmp_path / "c", framework="jax")
    finally:
        jax.config.update("jax_enable_x64", False)
    for dtype, array in host.items():
        assert isinstance(found[dtype], jax.Array)
        assert bits(found[dtype]) == bits(array)


async def test_a_weakly_typed_target_of_64_bits(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state, target = {"x": jnp.asarray(2**40 + 1)}, {"x": jnp.asarray(0)}
    assert (target["x"].weak_type, target["x"].dtype) == (True, np.int64)
    await savestream.save(state, tmp_path / "c")
    assert_same_leaf((await savestream.load(tmp_path / "c", target))["x"], state["x"])


async def test_what_jax_has_no_arrays_of_stays_numpys(tmp_path: Path) -> None:
    host = {
        "date": np.array(["2024-01-01", "NaT"], "M8[D]"),
        "text": np.array(["a", "bc"]),
        "other byte order": np.arange(3, dtype=">f4"),
        "record": np.zeros(2, [("a", "i4"), ("b", "f8")]),
        "one bit": np.array([0, 1], ml_dtypes.uint1),
        "long": np.arange(3, dtype=np.longdouble),
        "small": np.arange(3, dtype=np.int16),
    }
    await savestream.save(host, tmp_path / "c")
    found = await savestream.load(tmp_path / "c", framework="jax")
    assert [name for name, array in found.items() if isinstance(array, jax.Array)] == ["small"]
    assert all(np.array_equal(found[name], array, equal_nan=name == "date") for name, array in host.items())


# --- strictness ---


async def test_dtypes_are_converted_only_on_request(tmp_path: Path) -> None:
    host = np.array([0.0, -0.0, 1.5, 3e38, np.inf], np.float32)
    await savestream.save({"w": jnp.asarray(host), "n": jnp.asarray([16777217])}, tmp_path / "c")
    target = {"w": jnp.zeros(5, jnp.bfloat16), "n": jnp.zeros(1, jnp.float32)}
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(tmp_path / "c", target)
    assert sorted(caught.value.dtype_mismatches) == [
        "n (checkpoint int32, target float32)",
        "w (checkpoint float32, target bfloat16)",
    ]
    found = await savestream.load(tmp_path / "c", target, cast=True)
    assert bits(found["w"]) == bits(host.astype(ml_dtypes.bfloat16))
    assert bits(found["n"]) == bits(np.array([16777216], np.float32))


async def test_shapes_and_missing_layers_are_listed(tmp_path: Path) -> None:
    layers = [{"w": jnp.full((2, 2), float(number))} for number in range(3)]
    await savestream.save({"layers": layers}, tmp_path / "c")
    target = {"layers": [{"w": jnp.zeros((2, 2))}, {"w": jnp.zeros((2, 3))}, {}, {"w": jnp.zeros((2, 2))}]}
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(tmp_path / "c", target)
    assert list(caught.value.missing) == ["layers[3].w"]
    assert list(caught.value.unexpected) == ["layers[2].w"]
    assert list(caught.value.shape_mismatches) == ["layers[1].w (checkpoint (2, 2), target (2, 3))"]


async def test_a_description_without_devices_is_no_target(tmp_path: Path) -> None:
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    await savestream.save({"w": np.zeros((8, 2), np.float32)}, tmp_path / "c")
    place = NamedSharding(AbstractMesh((4,), ("a",)), PartitionSpec("a"))
    with pytest.raises(LoadMismatchError, match="w: its sharding cannot be used here"):
        await savestream.load(tmp_path / "c", {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=place)})


async def test_a_sharding_that_does_not_divide_the_shape_is_no_target(tmp_path: Path) -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    await savestream.save({"w": np.zeros((9, 2), np.float32)}, tmp_path / "c")
    place = NamedSharding(mesh(4, 2), PartitionSpec("a"))
    with pytest.raises(LoadMismatchError, match="w: its sharding cannot be used here"):
        await savestream.load(tmp_path / "c", {"w": jax.ShapeDtypeStruct((9, 2), jnp.float32, sharding=place)})


async def test_only_selected_leaves_are_replaced(tmp_path: Path) -> None:
    state = {"params": {"w": jnp.ones(3), "b": jnp.ones(2)}, "params2": {"w": jnp.ones(1)}}
    await savestream.save(state, tmp_path / "c")
    target = jax.tree.map(jnp.zeros_like, state)
    kept = target["params2"]["w"]
    found = await savestream.load(tmp_path / "c", target, keys=["params"])
    assert found["params2"]["w"] is kept
    assert_same_leaf(found["params"]["w"], state["params"]["w"])


# --- ties ---


async def test_one_array_under_two_names_is_stored_once(tmp_path: Path) -> None:
    array = placed(elements("float32", (1000,)))
    same_buffer = jax.device_put(array, array.sharding)
    equal = array + 0
    state = {"a": array, "b": array, "c": array.addressable_data(0), "d": same_buffer, "e": equal}
    info = await savestream.save(state, tmp_path / "c", options=savestream.SaveOptions(compression="none"))
    assert array.unsafe_buffer_pointer() == same_buffer.unsafe_buffer_pointer() != equal.unsafe_buffer_pointer()
    assert info.statistics.raw_bytes == 2 * 4000
    found = await savestream.load(tmp_path / "c")
    assert all(bits(found[name]) == bits(leaf) for name, leaf in state.items())


async def test_keys_under_two_names_are_stored_once(tmp_path: Path) -> None:
    keys = key_array("rbg", (50,))
    info = await savestream.save({"a": keys, "b": keys}, tmp_path / "c")
    assert info.statistics.raw_bytes == 50 * 16


def test_empty_arrays_and_unknown_addresses_tie_nothing() -> None:
    sharded = jax.device_put(jnp.ones((8, 8)), sharding("blocks"))
    described = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    gone = delete(jnp.ones(3) + 1)
    assert adapter().addresses([sharded, described, gone]) == [0, 0, 0]
    replicated = jax.device_put(jnp.ones(8), sharding("replicated"))
    assert adapter().addresses([replicated]) == [replicated.addressable_data(0).unsafe_buffer_pointer()]


# --- guards of JAX's own ---


async def test_guards_against_transfers_and_nans_do_not_concern_checkpoints(tmp_path: Path) -> None:
    state = {"packed": placed(elements("int4", (64,))), "nan": jnp.asarray(float("nan")), **weakly_typed()}
    target = {name: jnp.zeros_like(array) if array.dtype == jnp.int4 else array for name, array in state.items()}
    jax.config.update("jax_transfer_guard", "disallow")
    jax.config.update("jax_debug_nans", True)
    try:
        await savestream.save(state, tmp_path / "c")
        found = await savestream.load(tmp_path / "c", target)
        as_jax = await savestream.load(tmp_path / "c", framework="jax")
    finally:
        jax.config.update("jax_debug_nans", False)
        jax.config.update("jax_transfer_guard", "allow")
    for name, array in state.items():
        assert_same_leaf(found[name], array)
        assert bits(as_jax[name]) == bits(array)


async def test_the_framework_has_to_be_imported_by_the_caller(tmp_path: Path) -> None:
    await savestream.save({"w": jnp.ones(2)}, tmp_path / "c")
    code = """
        import asyncio, sys
        import savestream
        try:
            asyncio.run(savestream.load(sys.argv[1], framework="jax"))
        except savestream.PlanError as error:
            print(error)
        assert "jax" not in sys.modules
    """
    assert "import jax first" in run_python(code, str(tmp_path / "c"))
