"""Parts of torch states: selected keys, boxes on another number of holders, one array after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_training_support import assert_same_state, assert_same_tensor, bits, copied, fresh_place, seeded

import savestream
from savestream import LoadMismatchError, PlanCache, SaveOptions, ShardedArray, UnsafeObjectError, blocking
from savestream.storage_backends import FileBackend, TracingBackend


def training_state() -> dict[str, Any]:
    """Parameters, and a hundred times as much beside them."""
    model = seeded(1, lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)))
    generator = torch.Generator().manual_seed(2)
    large = {number: torch.randn(100_000, generator=generator) for number in range(4)}
    return {"params": model.state_dict(), "params2": {"w": torch.ones(3)}, "opt": {"state": large, "step": 7}}


def test_only_the_parameters_are_read(tmp_path: Path) -> None:
    state = training_state()
    blocking.save(state, tmp_path / "c", options=SaveOptions(compression="none"))
    size = sum(tensor.numel() * tensor.element_size() for tensor in state["params"].values())
    backend = TracingBackend(FileBackend(str(tmp_path)))
    loaded = blocking.load((backend, "c"), keys="params", framework="torch")
    assert list(loaded) == ["params"]
    assert_same_state(dict(loaded["params"]), dict(state["params"]))
    assert backend.bytes_moved("read_into") < size + 64 * 1024
    backend.clear()
    target = copied(state)
    target["params"]["0.weight"].zero_()
    target["params2"]["w"].zero_()
    blocking.load((backend, "c"), target, keys="params")
    assert_same_state(target["params"], state["params"])
    assert target["params2"]["w"].tolist() == [0, 0, 0]
    assert backend.bytes_moved("read_into") < size + 64 * 1024


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("opt.state[int:2]", {"opt": {"state": {2: None}}}),
        (("opt", "state", 3), {"opt": {"state": {3: None}}}),
        (r"params.0\.weight", {"params": {"0.weight": None}}),
        (("params", "1.bias"), {"params": {"1.bias": None}}),
        ("opt.step", {"opt": {"step": None}}),
    ],
)
def test_a_key_means_one_leaf(keys: Any, expected: Any) -> None:
    state = training_state()
    place = fresh_place()
    blocking.save(state, place)

    def same_form(found: Any, form: Any, source: Any) -> None:
        if form is None:
            assert_same_state(found, source)
            return
        assert [(type(key), key) for key in found] == [(type(key), key) for key in form]
        for key, inner in form.items():
            same_form(found[key], inner, source[key])

    same_form(blocking.load(place, keys=[keys], framework="torch"), expected, state)


def test_a_key_that_matches_nothing_touches_nothing() -> None:
    place, target = fresh_place(), training_state()
    blocking.save(training_state(), place)
    target["params"]["0.weight"].zero_()
    before = copied(target)
    for keys in ("param", "params.0", "opt.state[int:9]", "opt.state[2]"):
        with pytest.raises(LoadMismatchError):
            blocking.load(place, target, keys=["params", keys])
    assert_same_state(target, before)


def cut(whole: torch.Tensor, count: int) -> ShardedArray:
    """The chunks of ``count`` holders, empty ones included."""
    size = -(-len(whole) // count)
    starts = [min(number * size, len(whole)) for number in range(count)]
    stops = [min(start + size, len(whole)) for start in starts]
    rest = (0,) * (whole.ndim - 1)
    shards = [((start, *rest), whole[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    return ShardedArray(whole.shape, shards)


@pytest.mark.parametrize("writers", range(1, 6))
async def test_lengths_that_do_not_divide(writers: int) -> None:
    wholes = {
        f"n{length}": torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in range(1, 10)
    }
    wholes["row"] = torch.randn(1, 5).bfloat16()
    place = fresh_place()
    await savestream.save({name: cut(whole, writers) for name, whole in wholes.items()}, place)
    assert_same_state(await savestream.load(place, framework="torch"), wholes)
    for readers in range(1, 6):
        memory = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        target = {name: cut(whole, readers) for name, whole in memory.items()}
        held = dict(target)
        await savestream.load(place, target)
        assert all(target[name] is leaf for name, leaf in held.items())
        assert_same_state(memory, wholes)
        anew = {name: cut(whole.to("meta"), readers) for name, whole in wholes.items()}
        await savestream.load(place, anew)
        for name, whole in wholes.items():
            assert_same_tensor(torch.cat(anew[name].shards), whole)


def test_shards_without_data_are_refused_when_they_are_saved() -> None:
    cache = PlanCache()
    good = {"w": cut(torch.randn(4), 2)}
    for _ in range(2):
        blocking.save(good, fresh_place(), plan_cache=cache)
    freed = cut(torch.randn(4), 2)
    freed.shards[1].untyped_storage().resize_(0)
    for bad, why in (
        (cut(torch.empty(4, device="meta"), 2), "a meta tensor"),
        (freed, "the tensor's storage was freed"),
    ):
        for plans in (None, cache):
            with pytest.raises(UnsafeObjectError, match=f"^w: {why}"):
                blocking.save({"w": bad}, fresh_place(), plan_cache=plans)


async def test_arrays_one_after_the_other() -> None:
    state = training_state()
    place = fresh_place()
    await savestream.save(state, place)
    found = {key: array async for key, array in savestream.iter_arrays(place)}
    assert all(isinstance(array, np.ndarray) for array in found.values())
    expected = {f"params.{key.replace('.', chr(92) + '.')}": tensor for key, tensor in state["params"].items()}
    expected |= {"params2.w": state["params2"]["w"]}
    expected |= {f"opt.state[int:{number}]": tensor for number, tensor in state["opt"]["state"].items()}
    assert {key: array.tobytes() for key, array in found.items()} == {key: bits(t) for key, t in expected.items()}
