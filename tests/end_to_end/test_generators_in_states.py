"""Random generators inside states: beside arrays, with and without a target, and through a cached plan."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
from roundtrip_support import fresh_place

from savestream import LoadMismatchError, PlanCache, PlanError, RecordedObject, blocking


def numpy_generators(seed: int) -> dict[str, Any]:
    return {
        "default": np.random.default_rng(seed),
        "mersenne": np.random.Generator(np.random.MT19937(seed)),
        "bits": np.random.SFC64(seed),
        "legacy": np.random.RandomState(seed),
    }


def state_of(seed: int) -> dict[str, Any]:
    return {
        "w": np.arange(6, dtype=np.float32) + seed,
        "rng": numpy_generators(seed),
        "python": (random.Random(seed), [random.Random(seed + 1)]),
        "dtype": np.float16,
        "step": seed,
    }


def draw(state: Any) -> list[Any]:
    """The next numbers of all generators of a state."""
    rng, (first, (second,)) = state["rng"], state["python"]
    drawn: list[Any] = [rng["default"].normal(size=3).tolist(), rng["mersenne"].integers(0, 99, 3).tolist()]
    drawn += [rng["bits"].random_raw(3).tolist(), rng["legacy"].normal(size=3).tolist()]
    return [*drawn, first.random(), second.gauss(0, 1)]


def test_without_a_target() -> None:
    state, place = state_of(3), fresh_place()
    draw(state)
    blocking.save(state, place)
    found = blocking.load(place)
    assert found["dtype"] is np.float16
    assert type(found["rng"]["bits"]) is np.random.SFC64
    assert draw(found) == draw(state)
    assert found["w"].tobytes() == state["w"].tobytes()


def test_a_target_keeps_its_generators() -> None:
    state, place, target = state_of(3), fresh_place(), state_of(4)
    blocking.save(state, place)
    held = [*target["rng"].values(), target["python"][0], target["python"][1][0], target["w"]]
    found = blocking.load(place, target)
    again = [*found["rng"].values(), found["python"][0], found["python"][1][0], found["w"]]
    assert all(one is other for one, other in zip(held, again, strict=True))
    assert draw(target) == draw(state_of(3))


def test_keys_reach_a_generator_inside_a_value() -> None:
    place, target = fresh_place(), state_of(4)
    blocking.save(state_of(3), place)
    rng = target["rng"]["default"]
    blocking.load(place, target, keys="rng.default")
    assert target["rng"]["default"] is rng
    assert rng.integers(2**60) == np.random.default_rng(3).integers(2**60)
    assert target["rng"]["legacy"].randint(2**30) == np.random.RandomState(4).randint(2**30)


@pytest.mark.parametrize("keys", [None, "rng.default"])
def test_another_bit_generator_is_refused_before_anything_is_touched(keys: str | None) -> None:
    place, target = fresh_place(), state_of(4)
    blocking.save(state_of(3), place)
    target["rng"]["default"] = np.random.Generator(np.random.Philox(4))
    with pytest.raises(LoadMismatchError, match=r"rng\.default: the checkpoint has a PCG64, the target a Philox"):
        blocking.load(place, target, keys=keys, strict=False)
    untouched = state_of(4)
    untouched["rng"]["default"] = np.random.Generator(np.random.Philox(4))
    assert draw(target) == draw(untouched)
    assert target["w"].tobytes() == untouched["w"].tobytes()


def test_no_generator_where_the_target_has_one() -> None:
    place = fresh_place()
    blocking.save({"rng": 3, "w": np.zeros(2)}, place)
    with pytest.raises(LoadMismatchError, match="rng: the checkpoint has a int"):
        blocking.load(place, {"rng": random.Random(1), "w": np.zeros(2)})
    assert isinstance(blocking.load(place, {"rng": None, "w": np.zeros(2)})["rng"], int)


def test_a_mismatch_elsewhere_leaves_generators_alone() -> None:
    place, target = fresh_place(), state_of(4)
    blocking.save(state_of(3), place)
    target["w"] = np.zeros(7, np.float32)
    with pytest.raises(LoadMismatchError):
        blocking.load(place, target)
    assert draw(target) == draw(state_of(4))


def test_a_cached_plan_stores_the_new_states() -> None:
    cache, state = PlanCache(), state_of(3)
    blocking.save(state, fresh_place("first"), plan_cache=cache)
    draw(state)
    place = fresh_place("second")
    blocking.save(state, place, plan_cache=cache)
    assert cache.statistics().hits == 1
    assert draw(blocking.load(place)) == draw(state)


def test_a_generator_that_the_target_holds_twice() -> None:
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    place, shared = fresh_place(), np.random.default_rng(9)
    blocking.save({"a": first, "b": {"c": second}, "d": first, "w": np.zeros(1)}, place)
    found = blocking.load(place, {"a": shared, "b": {"c": shared}, "d": shared, "w": np.zeros(1)})
    assert found["a"] is found["d"] is shared
    assert found["b"]["c"] is not shared
    assert shared.integers(2**60) == first.integers(2**60)
    assert found["b"]["c"].integers(2**60) == second.integers(2**60)


def test_stand_ins_are_saved_as_what_they_stand_for() -> None:
    place, state = fresh_place(), {"w": np.ones(2), "dtype": RecordedObject("torch.dtype", "of_the_future")}
    state[RecordedObject("torch.device", "nowhere:3")] = np.zeros(1)  # type: ignore[index]
    blocking.save(state, place)
    again = fresh_place("again")
    blocking.save(blocking.load(place), again)
    found = blocking.load(again)
    assert list(found) == list(state)
    assert found["dtype"] == state["dtype"]


def ordered(metadata: Any, *, arrays: bool) -> collections.OrderedDict[str, Any]:
    """What a module's state_dict() returns."""
    found: Any = collections.OrderedDict(w=np.ones(2) if arrays else 1)
    found._metadata = metadata
    return found


METADATA = collections.OrderedDict([("", {"version": 1}), ("layer\ud800é", {"version": 2, "names": ("a", None)})])


@pytest.mark.parametrize("arrays", [True, False])
def test_the_metadata_of_a_state_dict_comes_back(arrays: bool) -> None:
    place, state = fresh_place(), {"model": ordered(METADATA, arrays=arrays), "x": np.zeros(1)}
    blocking.save(state, place)
    found = blocking.load(place)["model"]
    assert type(found) is collections.OrderedDict
    assert found._metadata == METADATA
    assert type(found._metadata) is collections.OrderedDict
    target = {"model": ordered("own", arrays=arrays), "x": np.zeros(1)}
    assert blocking.load(place, target)["model"]._metadata == "own"  # containers stay the target's


@pytest.mark.parametrize("arrays", [True, False])
def test_metadata_without_a_safe_encoding_is_left_out(arrays: bool) -> None:
    place = fresh_place()
    blocking.save({"model": ordered({"": object()}, arrays=arrays), "x": np.zeros(1)}, place)
    found = blocking.load(place)["model"]
    assert list(found) == ["w"]
    assert not hasattr(found, "_metadata")


def test_a_cached_plan_knows_the_metadata() -> None:
    cache, places = PlanCache(), [fresh_place(str(number)) for number in range(3)]
    for place, version in zip(places, (1, 2, 1), strict=True):
        blocking.save({"model": ordered({"": {"version": version}}, arrays=True)}, place, plan_cache=cache)
    assert cache.statistics().hits == 1
    assert [blocking.load(place)["model"]._metadata for place in places] == [
        {"": {"version": version}} for version in (1, 2, 1)
    ]


def nested(depth: int, innermost: Any, make: Any) -> Any:
    for _ in range(depth):
        innermost = make(innermost)
    return innermost


@pytest.mark.parametrize("kind", ["key", "metadata"])
def test_what_the_reader_would_find_too_deep_is_refused(kind: str) -> None:
    deep = nested(126, 1, lambda inner: (inner,))
    leaf = {deep: np.ones(1)} if kind == "key" else ordered(nested(120, 1, lambda inner: {1: inner}), arrays=True)
    shallow, place = nested(20, leaf, lambda inner: {"k": inner}), fresh_place()
    if kind == "key":
        blocking.save(shallow, place)
        blocking.load(place)
    with pytest.raises(PlanError, match="nest"):
        blocking.save(nested(120, leaf, lambda inner: {"k": inner}), fresh_place("deep"))
