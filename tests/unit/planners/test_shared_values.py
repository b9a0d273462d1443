"""Targets that hold one container at several places."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from planner_support import load, save


def containers() -> list[tuple[Any, Any, Any]]:
    """A container, and two saved values for it."""
    return [
        ([0.0], [1.0], [2.0]),
        ([0.0, 5], [1.0], [2.0, 3, 4]),
        ({"a": [0], "b": 0}, {"a": [1], "b": 1}, {"a": [2], "b": 2}),
        (collections.deque([0], 3), collections.deque([1], 3), collections.deque([2], 3)),
        ([-0.0], [0.0], [-0.0]),
    ]


@pytest.mark.parametrize("number", range(len(containers())))
def test_a_shared_container_takes_different_values(number: int) -> None:
    shared, first, second = containers()[number]
    saved = {"w": np.ones(1), "x": {"log": first, "w": np.ones(2)}, "y": [second, np.ones(3)]}
    target = {"w": np.zeros(1), "x": {"log": shared, "w": np.zeros(2)}, "y": [shared, np.zeros(3)]}
    load(save(saved), target)
    assert target["x"]["log"] is shared
    assert repr(target["x"]["log"]) == repr(first)
    assert repr(target["y"][0]) == repr(second)
    assert type(target["y"][0]) is type(shared)


def test_a_shared_container_inside_one_value() -> None:
    shared = [0]
    target = {"plain": {"x": shared, "y": {"z": shared}}, "w": np.zeros(1)}
    load(save({"plain": {"x": [1], "y": {"z": [2]}}, "w": np.ones(1)}), target)
    assert target["plain"] == {"x": [1], "y": {"z": [2]}}
    assert target["plain"]["x"] is shared


def test_a_shared_container_stays_shared_where_the_values_agree() -> None:
    shared = {"a": [0, 0]}
    target = {"x": [shared, np.zeros(1)], "y": [shared, np.zeros(1)]}
    load(save({"x": [{"a": [1]}, np.ones(1)], "y": [{"a": [1]}, np.ones(1)]}), target)
    assert target["x"][0] is target["y"][0] is shared
    assert shared == {"a": [1]}
