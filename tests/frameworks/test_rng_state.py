"""PyTorch's and JAX's generators go on after a save and a load, with and without a target."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch_training_support import fresh_place

from savestream import LoadOptions, PlanError, RecordedTuple, UsageError, blocking, capture_rng_state, restore_rng_state


@pytest.fixture(autouse=True)
def _leave_generators_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[Any]:
    numbers = [torch.rand(3), torch.randn(3), torch.randint(0, 99, (3,)), torch.nn.Dropout()(torch.ones(9))]
    return [random.random(), np.random.rand(2).tolist(), *(tensor.tolist() for tensor in numbers)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_sequences_go_on_after_a_load_without_a_target(framework: Any) -> None:
    draw()
    place = fresh_place()
    blocking.save({"w": torch.ones(3), "generators": capture_rng_state()}, place)
    expected = draw()
    restore_rng_state(blocking.load(place, framework=framework)["generators"])
    assert draw() == expected


def test_the_sequences_go_on_after_a_load_into_a_target() -> None:
    draw()
    place = fresh_place()
    blocking.save({"w": torch.ones(3), "generators": capture_rng_state()}, place)
    expected = draw()
    target = {"w": torch.zeros(3), "generators": capture_rng_state()}
    restore_rng_state(blocking.load(place, target)["generators"])
    assert draw() == expected


@pytest.mark.parametrize("as_array", [lambda tensor: tensor, lambda tensor: tensor.numpy(), jax.numpy.asarray])
def test_a_state_that_is_an_array_is_taken_too(as_array: Any) -> None:
    state = torch.get_rng_state()
    expected = torch.rand(3).tolist()
    restore_rng_state({"torch": {"cpu": as_array(state), "cuda": []}})
    assert torch.rand(3).tolist() == expected


@pytest.mark.parametrize(
    "cpu",
    [b"", bytes(5056), torch.zeros(5056), torch.get_rng_state()[:-1], "x"],
    ids=["empty", "zeros", "floats", "short", "text"],
)
def test_what_is_no_state_sets_nothing(cpu: Any) -> None:
    state = {**capture_rng_state(), "torch": {"cpu": cpu, "cuda": []}}
    draw()
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(PlanError):
        restore_rng_state(state)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("state", [None, {}, {"cpu": b""}, {"cpu": b"", "cuda": 3}])
def test_other_members(state: Any) -> None:
    with pytest.raises(PlanError, match="torch"):
        restore_rng_state({"torch": state})


# --- CUDA, whose functions are replaced where there is no device ---


class Devices:
    """CUDA as far as random states go."""

    def __init__(self, count: int) -> None:
        self.states = [torch.arange(16, dtype=torch.uint8) + 16 * number for number in range(count)]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_initialized", lambda: bool(self.states))
        patch.setattr(torch.cuda, "is_available", lambda: bool(self.states))
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in self.states])
        patch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int) -> None:
        assert state.dtype == torch.uint8
        self.states[device] = state.clone()


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(3)
    devices.install(monkeypatch)
    state, place = capture_rng_state(), fresh_place()
    blocking.save(state, place)
    expected = [device.clone() for device in devices.states]
    for device in devices.states:
        device.zero_()
    restore_rng_state(blocking.load(place))
    assert all(map(torch.equal, devices.states, expected))


@pytest.mark.parametrize("present", [0, 1, 3])
def test_another_number_of_cuda_devices(monkeypatch: pytest.MonkeyPatch, present: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Devices(2).install(patch)
        state = capture_rng_state()
    draw()
    before = torch.get_rng_state()
    devices = Devices(present)
    for device in devices.states:
        device.zero_()
    devices.install(monkeypatch)
    with pytest.raises(UsageError, match=f"2 CUDA devices, this process has {present}"):
        restore_rng_state(state)
    assert torch.equal(torch.get_rng_state(), before)
    restore_rng_state(state, ignore_missing=True)
    assert [bool(device.any()) for device in devices.states] == [True, True, False][:present]


def test_a_damaged_state_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(1).install(monkeypatch)
    state = capture_rng_state()
    for content in (bytes(15), bytes(8) + b"\x01" + bytes(7)):
        state["torch"]["cuda"] = [content]
        with pytest.raises(PlanError, match="CUDA"):
            restore_rng_state(state)


def test_cuda_that_nobody_uses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("would initialise CUDA"))
    assert capture_rng_state()["torch"]["cuda"] == []


# --- JAX ---


class Keys(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Held:
    key: Any
    other: Any


TYPES = [Keys, Held]


def keys() -> dict[str, Any]:
    """Keys of every sort, in containers of every sort."""
    typed = jax.random.key(3)
    return {
        "typed": typed,
        "many": jax.random.split(typed, (2, 3)),
        "raw": jax.random.PRNGKey(4),
        "rbg": jax.random.key(5, impl="rbg"),
        "unsafe": [jax.random.key(6, impl="unsafe_rbg"), None, ()],
        "numpy": np.asarray(jax.random.PRNGKey(7)),
        "named": Keys(jax.random.key(8), {1: jax.random.key(9)}),
        "held": Held(jax.random.key(10), collections.OrderedDict(z=jax.random.key(11), a=jax.random.key(12))),
    }


def assert_same_keys(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found, is_leaf=_is_held) == jax.tree.structure(expected, is_leaf=_is_held)
    for one, other in zip(
        jax.tree.leaves(found, is_leaf=_is_held), jax.tree.leaves(expected, is_leaf=_is_held), strict=True
    ):
        if isinstance(other, Held):
            assert type(one) is Held
            assert_same_keys([one.key, one.other], [other.key, other.other])
            continue
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        if not isinstance(other, np.ndarray) and jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(one) == jax.random.key_impl(other)
            assert jax.random.uniform(one.reshape(-1)[0]) == jax.random.uniform(other.reshape(-1)[0])
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _is_held(value: Any) -> bool:
    return isinstance(value, Held)


def test_keys_are_handed_back() -> None:
    given = keys()
    assert_same_keys(restore_rng_state(capture_rng_state(jax=given)), given)
    single = jax.random.key(1)
    assert_same_keys(restore_rng_state(capture_rng_state(jax=single)), single)
    assert "jax" not in capture_rng_state()


def test_keys_pass_through_a_checkpoint() -> None:
    given, place = keys(), fresh_place()
    blocking.save({"w": np.ones(2), "generators": capture_rng_state(jax=given)}, place)
    loaded = blocking.load(place, options=LoadOptions(types=TYPES))["generators"]
    assert_same_keys(restore_rng_state(loaded), given)
    other = jax.tree.map(lambda key: key, given)
    other["typed"] = jax.random.key(99)
    target = {"w": np.zeros(2), "generators": capture_rng_state(jax=other)}
    assert_same_keys(restore_rng_state(blocking.load(place, target)["generators"]), given)
    without = restore_rng_state(blocking.load(place)["generators"])
    assert type(without["named"]) is RecordedTuple
    assert_same_keys(without["named"].a, given["named"].a)


def test_a_sequence_of_keys_goes_on() -> None:
    key, place = jax.random.key(3), fresh_place()
    key, _ = jax.random.split(key)
    blocking.save(capture_rng_state(jax={"train": key}), place)
    expected = jax.random.normal(jax.random.split(key)[1], (3,)).tolist()
    again = restore_rng_state(blocking.load(place))["train"]
    assert jax.random.normal(jax.random.split(again)[1], (3,)).tolist() == expected


def deleted() -> Any:
    key = jax.random.PRNGKey(1)
    key.delete()
    return key


@pytest.mark.parametrize(
    "make",
    [lambda: 3, lambda: "x", lambda: torch.zeros(2), lambda: np.zeros(2), lambda: jax.numpy.zeros(2), deleted],
)
def test_what_is_no_key_is_refused(make: Any) -> None:
    with pytest.raises(PlanError, match="jax"):
        capture_rng_state(jax={"key": [make()]})


def test_keys_under_tracing_are_refused() -> None:
    with pytest.raises(PlanError, match="jax: a key cannot be read"):
        jax.jit(lambda key: capture_rng_state(jax=key) and key)(jax.random.key(1))


@pytest.mark.parametrize(
    "change",
    [
        {"jax_key": "mine"},
        {"shape": (3,)},
        {"shape": (1, 2, 2)},
        {"shape": [2]},
        {"shape": (-1, -2)},
        {"words": b"x"},
        {"words": "x"},
        {"jax_key": "rbg"},
        {"jax_key": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_damaged_keys_set_nothing(change: dict[str, Any]) -> None:
    state = capture_rng_state(jax=jax.random.key(1))
    state["jax"].update(change)
    draw()
    before = torch.get_rng_state()
    with pytest.raises(PlanError, match="jax"):
        restore_rng_state(state)
    assert torch.equal(torch.get_rng_state(), before)
