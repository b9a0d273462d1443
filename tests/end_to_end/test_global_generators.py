"""The process's own generators, captured, stored and set again, where no framework is imported."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place

from savestream import PlanError, blocking, capture_rng_state, restore_rng_state


@pytest.fixture(autouse=True)
def _leave_generators_alone() -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)


def draw() -> list[Any]:
    """The next numbers of the global generators."""
    return [random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.standard_normal(1).tolist()]


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("python", "numpy")}  # another test may have imported a framework


def test_the_sequences_go_on() -> None:
    draw()  # leaves half of a pair behind in both
    state = plain(capture_rng_state())
    expected = draw()
    assert draw() != expected
    assert restore_rng_state(state) is None
    assert draw() == expected


def test_it_comes_back_exactly() -> None:
    draw()
    state, place = plain(capture_rng_state()), fresh_place()
    expected = draw()
    blocking.save({"w": np.ones(3), "generators": state}, place)
    assert_same(blocking.load(place)["generators"], state)
    target = {"w": np.zeros(3), "generators": plain(capture_rng_state())}
    loaded = blocking.load(place, target)["generators"]
    assert_same(loaded, state)
    restore_rng_state(loaded)
    assert draw() == expected


def test_members_may_be_left_out() -> None:
    state = plain(capture_rng_state())
    expected = np.random.rand(2).tolist()
    before = random.getstate()
    restore_rng_state({"numpy": state["numpy"]})
    assert random.getstate() == before
    assert np.random.rand(2).tolist() == expected


def test_numpys_own_form_is_taken_too() -> None:
    state = np.random.get_state(legacy=False)
    expected = np.random.rand(2).tolist()
    restore_rng_state({"numpy": state})
    assert np.random.rand(2).tolist() == expected


def with_change(path: list[Any], value: Any) -> Any:
    state = plain(capture_rng_state())
    inner = state
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return state


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: [1],
        lambda: with_change(["more"], 1),
        lambda: with_change(["python"], (3, (1, 2), None)),
        lambda: with_change(["python"], list(random.getstate())),
        lambda: with_change(["python"], (3, (*random.getstate()[1][:-1], 900), None)),
        lambda: with_change(["numpy", "state", "pos"], 700),
        lambda: with_change(["numpy", "state", "key"], [0] * 3),
        lambda: with_change(["numpy", "gauss"], None),
        lambda: with_change(["numpy"], np.random.get_state()),
    ],
)
def test_what_is_no_state_sets_nothing(make: Any) -> None:
    state = make()
    before = copy.deepcopy((random.getstate(), np.random.get_state(legacy=False)))
    with pytest.raises(PlanError):
        restore_rng_state(state)
    assert_same((random.getstate(), np.random.get_state(legacy=False)), before)


def test_another_bit_generator_behind_numpys_functions() -> None:
    state = plain(capture_rng_state())
    mersenne = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.Philox(3))
    try:
        with pytest.raises(PlanError, match=r"MT19937.*Philox.*set_bit_generator"):
            restore_rng_state(state)
        own = plain(capture_rng_state())
        expected = draw()
        restore_rng_state(own)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(mersenne)


# Runs in a fresh interpreter, where nobody has imported a framework.
WITHOUT_FRAMEWORKS = """
import json, sys
import savestream
from savestream import blocking

state = savestream.capture_rng_state()
assert sorted(state) == ["numpy", "python"]
whole = {**state, "torch": {"cpu": b"", "cuda": []}, "jax": {"jax_key": "raw", "shape": (2,), "words": bytes(8)}}
refused = []
for name in ("torch", "jax"):
    try:
        savestream.restore_rng_state({**state, name: whole[name]})
    except savestream.UsageError as error:
        refused.append(str(error))
assert savestream.restore_rng_state(whole, ignore_missing=True) is None
print(json.dumps({"refused": refused, "imported": sorted({"torch", "jax"} & set(sys.modules))}))
"""


def test_states_of_frameworks_that_are_not_imported() -> None:
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_FRAMEWORKS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["imported"] == []
    assert ["import torch first" in report["refused"][0], "import jax first" in report["refused"][1]] == [True, True]
