"""Leaves that are the same memory are stored once, and come back equal, or tied where the target ties them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place, stored_bytes

import savestream
from savestream import LoadMismatchError, SaveOptions, blocking
from savestream.storage_backends import MemoryBackend

RAW = SaveOptions(compression="none")


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((64, 8))


def tied_states() -> dict[str, tuple[Any, int]]:
    """States whose leaves share memory, and the bytes that have to be stored."""
    w, base = weights(), np.arange(4096.0)
    other_view = base.reshape(64, 64)
    return {
        "same object": ({"emb": w, "head": w}, w.nbytes),
        "deep": ({"model": {"emb": w, "layers": [{"w": w}, (w, None)]}, "ema": {"w": w}}, w.nbytes),
        "equal views": ({"a": base[:512], "b": base[:512], "c": base}, 512 * 8 + base.nbytes),
        "views of views": ({"a": base[100:][10:20], "b": base[110:120]}, 10 * 8),
        "transposed alike": ({"a": other_view.T, "b": other_view.T}, base.nbytes),
        "other layout": ({"a": other_view, "b": other_view.T}, 2 * base.nbytes),
        "other dtype": ({"a": base, "b": base.view(np.int64)}, 2 * base.nbytes),
        "other shape": ({"a": base, "b": other_view}, 2 * base.nbytes),
        "overlapping": ({"a": base[:100], "b": base[50:150]}, 200 * 8),
        "equal but apart": ({"a": w, "b": w.copy()}, 2 * w.nbytes),
        "empty": ({"a": base[:0], "b": base[:0], "c": base[5:5]}, 0),
        "0-d": ({"a": base[3, ...], "b": base[3, ...]}, 8),
    }


@pytest.mark.parametrize("name", tied_states())
async def test_shared_memory_is_stored_once_and_comes_back_equal(name: str) -> None:
    state, expected_bytes = tied_states()[name]
    backend = MemoryBackend()
    info = await savestream.save(state, (backend, "c"), options=RAW)
    assert info.statistics.raw_bytes == expected_bytes
    assert expected_bytes <= await stored_bytes(backend) <= expected_bytes + 8192
    found = await savestream.load((backend, "c"))
    assert_same(found, state)


async def test_loaded_leaves_are_separate_without_a_target() -> None:
    w = weights()
    place = fresh_place()
    await savestream.save({"emb": w, "head": w}, place)
    found = await savestream.load(place)
    found["emb"][...] = 0
    assert_same(found["head"], w)


@pytest.mark.parametrize("keys", [None, "head", "emb", ["emb", "head"]])
async def test_a_tied_target_is_tied_again(keys: Any) -> None:
    w = weights()
    place = fresh_place()
    await savestream.save({"emb": w, "head": w, "other": w + 1}, place)
    tied = np.zeros_like(w)
    target = {"emb": tied, "head": tied, "other": np.zeros_like(w)}
    assert await savestream.load(place, target, keys=keys) is target
    assert target["emb"] is target["head"] is tied
    assert_same(tied, w)
    assert_same(target["other"], w + 1 if keys is None else np.zeros_like(w))


async def test_an_untied_target_is_filled_from_a_tied_checkpoint() -> None:
    w = weights()
    place = fresh_place()
    await savestream.save({"emb": w, "head": w}, place)
    target = {"emb": np.zeros_like(w), "head": np.zeros_like(w)}
    await savestream.load(place, target)
    assert_same(target, {"emb": w, "head": w})


@pytest.mark.parametrize("same_values", [True, False])
@pytest.mark.parametrize("strict", [True, False])
async def test_a_tied_target_is_refused_where_the_checkpoint_is_not_tied(same_values: bool, strict: bool) -> None:
    w = weights()
    state = {"emb": w, "head": w.copy() if same_values else w + 1}
    place = fresh_place()
    await savestream.save(state, place)
    tied = np.full_like(w, 7)
    target = {"emb": tied, "head": tied}
    with pytest.raises(LoadMismatchError, match="emb and head") as caught:
        await savestream.load(place, target, strict=strict)
    assert len(caught.value.problems) == 1
    assert (tied == 7).all()
    await savestream.load(place, target, keys="head")
    assert_same(tied, state["head"])


async def test_an_alias_whose_first_name_was_skipped_still_loads() -> None:
    w = weights()
    place = fresh_place()
    await savestream.save({"a": {"w": w}, "b": {"w": w}, "c": [w]}, place)
    assert_same(await savestream.load(place, keys="b"), {"b": {"w": w}})
    assert_same(await savestream.load(place, keys=["c[0]"]), {"c": [w]})


def test_a_state_that_is_untied_between_saves_is_stored_apart() -> None:
    cache = savestream.PlanCache()
    w = weights()
    for number, head in enumerate((w, w.copy() * 2, w)):
        place = fresh_place(f"step-{number}")
        info = blocking.save({"emb": w, "head": head}, place, plan_cache=cache, options=RAW)
        assert info.statistics.raw_bytes == (2 if number == 1 else 1) * w.nbytes
        assert_same(blocking.load(place), {"emb": w, "head": head})


async def test_mutation_after_staging_does_not_reach_either_alias() -> None:
    w = weights()
    expected = w.copy()
    place = fresh_place()
    handle = await savestream.start_save({"emb": w, "head": w}, place)
    w[...] = -1
    await handle
    assert_same(await savestream.load(place), {"emb": expected, "head": expected})
