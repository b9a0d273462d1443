"""A save leaves nothing behind in the caller's arrays of JAX's: once staged, they can be donated and deleted."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax_support import bits, elements, key_array, placed, run_python, sharding

import savestream
from savestream import DefaultSavePlanner, SaveOptions
from savestream.arrays import framework_adapter
from savestream.planners import MetadataIndex

KINDS = ("small", "large", "packed", "bfloat16", "sharded", "replicated", "elsewhere", "keys")


def leaf(kind: str, seed: int) -> jax.Array:
    """An array whose buffer XLA has made, so that it can be donated in place."""
    if kind == "keys":
        return key_array("threefry2x32", (64,), seed=seed)
    dtype = {"packed": "int4", "bfloat16": "bfloat16"}.get(kind, "int32")
    shape = (8, 8) if kind == "small" else (512, 512)
    places = {"sharded": "blocks", "replicated": "replicated", "elsewhere": "one device"}
    place = sharding(places[kind]) if kind in places else None
    return _computed(placed(elements(dtype, shape, seed), place))


@jax.jit
def _computed(array: jax.Array) -> jax.Array:
    return array * 1


@functools.partial(jax.jit, donate_argnums=0)
def donated(array: jax.Array) -> jax.Array:
    """What a donating function makes of an array, in the same memory."""
    return array + 1


def addresses(array: jax.Array) -> list[int]:
    pieces = [array.addressable_data(number) for number in range(len(array.sharding.addressable_devices))]
    return [piece.unsafe_buffer_pointer() for piece in pieces]


def make_state(seed: int) -> dict[str, jax.Array]:
    state = {kind: leaf(kind, seed) for kind in KINDS}
    return jax.block_until_ready(state)


@pytest.mark.parametrize("stage", ["eager", "lazy"])
async def test_staged_arrays_can_be_donated_in_place(stage: Any, tmp_path: Path) -> None:
    for round_number in range(4):
        state = make_state(round_number)
        expected = {name: bits(array) for name, array in state.items() if name != "keys"}
        handle = await savestream.start_save(state, tmp_path / f"{round_number}", stage=stage)
        await handle.staged()
        for name, array in state.items():
            if name == "keys":
                continue
            places = addresses(array)
            following = donated(array).block_until_ready()
            assert array.is_deleted(), name
            assert addresses(following) == places, f"{name}: copied instead of donated"
            donated(donated(following)).block_until_ready()
        await handle
        found = await savestream.load(tmp_path / f"{round_number}")
        assert {name: bits(found[name]) for name in expected} == expected


@pytest.mark.parametrize("stage", ["eager", "lazy"])
async def test_staged_arrays_can_be_deleted(stage: Any, tmp_path: Path) -> None:
    for round_number in range(4):
        state = make_state(round_number)
        expected = {name: bits(array) for name, array in state.items()}
        handle = await savestream.start_save(state, tmp_path / f"{round_number}", stage=stage)
        await handle.staged()
        for array in state.values():
            array.delete()
        filler = [leaf("large", 100 + number) for number in range(4)]  # takes the freed memory
        await handle
        found = await savestream.load(tmp_path / f"{round_number}", framework="jax")
        assert {name: bits(array) for name, array in found.items()} == expected
        del filler


async def test_arrays_can_be_donated_in_place_after_a_failed_save(tmp_path: Path) -> None:
    state = make_state(0)
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(savestream.StorageError):
        await savestream.save(state, tmp_path / "file" / "c")
    array = state["large"]
    places = addresses(array)
    assert addresses(donated(array)) == places


class ScalingPlanner(DefaultSavePlanner):
    """Resolves leaves by itself, to the arrays that they are."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index)


async def test_a_planner_of_ones_own_holds_no_array_either(tmp_path: Path) -> None:
    state = {name: leaf(name, 0) for name in ("small", "large", "bfloat16", "sharded")}
    expected = {name: bits(array) for name, array in state.items()}
    handle = await savestream.start_save(state, tmp_path / "c", planner=ScalingPlanner())
    await handle.staged()
    for name, array in state.items():
        places = addresses(array)
        assert addresses(donated(array)) == places, name
    await handle
    found = await savestream.load(tmp_path / "c")
    assert {name: bits(array) for name, array in found.items()} == expected


async def test_a_save_keeps_no_array_alive(tmp_path: Path) -> None:
    cache = savestream.PlanCache()
    state = make_state(0)
    handle = await savestream.start_save(state, tmp_path / "c", plan_cache=cache)
    await handle.staged()
    references = [weakref.ref(array) for array in state.values()]
    del state
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    await handle


@pytest.mark.parametrize("release_keeps_views", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_an_array_leaves_no_copy_in_it(
    kind: str, release_keeps_views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, array = framework_adapter("jax"), leaf(kind, 0)
    assert not adapter._keeps_views  # of the releases that the tests run with
    monkeypatch.setattr(adapter, "_keeps_views", release_keeps_views)
    parts = [part for _, part in adapter.split(array, "w") or [((0, 0), array)]]
    for part in parts:
        adapter.host_view(part)
        adapter.join([part])
        if kind != "keys":
            adapter.copy_elements(part, 3, 9, np.empty(6, np.dtype(part.dtype)))
    arrays = [array, *parts, *(part.addressable_data(0) for part in parts)]
    # JAX's own cache, where a copy stays as long as the array lives; keys have none.
    assert [owner.shape for owner in arrays if getattr(owner, "_npy_value", None) is not None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_callers_own_array_is_never_shown_to_numpy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX ends the process when an array is deleted in one thread while numpy looks at the same array in another.
    adapter, array = framework_adapter("jax"), leaf(kind, 0)
    parts = [part for _, part in adapter.split(array, "w") or [((0, 0), array)]]
    own = [array, *parts, *(shard.data for shard in array.addressable_shards)]
    own += [jax.random.key_data(key) for key in own] if kind == "keys" else []
    shown: list[Any] = []
    show = np.asarray

    def spy(value: Any, **options: Any) -> np.ndarray:
        shown.append(value)
        return show(value, **options)

    monkeypatch.setattr(np, "asarray", spy)
    for part in parts:
        adapter.host_view(part)
        adapter.join([part])
        adapter.copy_elements(part, 0, part.size, np.empty(part.size, adapter.host_view(part).dtype))
    assert len(shown) >= 3
    assert not {id(value) for value in shown} & {id(value) for value in own}


async def test_results_that_are_still_being_computed(tmp_path: Path) -> None:
    work = jax.jit(lambda array: jax.lax.fori_loop(0, 30, lambda _, value: value @ value * 1e-2, array))
    start = placed(np.full((300, 300), 0.1, np.float32))
    result = work(start)
    await savestream.save({"result": result, "address": result.addressable_data(0)}, tmp_path / "c")
    assert bits((await savestream.load(tmp_path / "c"))["result"]) == bits(work(start))


async def test_a_lazily_staged_array_that_goes_too_early_is_named(tmp_path: Path) -> None:
    state = {"layers": [{"w": leaf("large", number)} for number in range(3)]}
    options = SaveOptions(compression="none")

    class Waiting(DefaultSavePlanner):
        """Lets the caller go on before anything is staged."""

        def create_global_plan(self, all_plans: Any) -> Any:
            state["layers"][1]["w"].delete()
            return super().create_global_plan(all_plans)

    with pytest.raises(savestream.PlanError, match=r"layers\[1\]\.w: an array of shape \(512, 512\).*deleted or don"):
        await savestream.save(state, tmp_path / "c", planner=Waiting(), options=options)
    assert not await savestream.exists(tmp_path / "c")


RACE = """
    import asyncio, random, sys, threading
    import jax, numpy as np
    import savestream

    step = jax.jit(lambda array: array + 1, donate_argnums=0)
    source = np.arange(1 << 20, dtype=np.int32)

    def end(arrays, how):
        for array in arrays:
            if how == "delete":
                array.delete()
            else:
                step(array).block_until_ready()

    async def main(place, rounds):
        outcomes = {"saved": 0, "refused": 0}
        for number in range(rounds):
            how = ("delete", "donate")[number % 2]
            arrays = [step(jax.device_put(source + (number + leaf))) for leaf in range(6)]
            small = [step(jax.device_put(source[:50] + leaf)) for leaf in range(50)]
            jax.block_until_ready([arrays, small])
            handle = await savestream.start_save({"a": arrays, "s": small}, f"{place}/{number}", stage="lazy")
            ending = threading.Thread(target=end, args=(arrays[::-1] + small, how))
            if number % 4 < 2:
                await asyncio.sleep(random.random() * 0.01)
            ending.start()
            try:
                await handle
            except (savestream.PlanError, savestream.UnsafeObjectError) as error:
                assert "deleted or donated" in str(error), error
                outcomes["refused"] += 1
            else:
                found = await savestream.load(f"{place}/{number}")
                for leaf in range(6):
                    assert np.array_equal(found["a"][leaf], source + (number + leaf + 1))
                for leaf in range(50):
                    assert np.array_equal(found["s"][leaf], source[:50] + leaf + 1)
                await savestream.delete(f"{place}/{number}")
                outcomes["saved"] += 1
            ending.join()
        print(outcomes["saved"] + outcomes["refused"])

    asyncio.run(main(sys.argv[1], 24))
"""


def test_arrays_that_go_too_early_never_crash_the_process(tmp_path: Path) -> None:
    assert run_python(RACE, str(tmp_path)) == "24"
