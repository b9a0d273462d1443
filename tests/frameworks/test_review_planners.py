"""Planners of users with tensors: what they give, what is kept of it, and what a failure leaves behind."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_training_support import fresh_place

from savestream import DefaultLoadPlanner, PlanError, ShardedArray, blocking

SOURCE = {"w": torch.arange(8.0), "z": torch.complex(torch.arange(4.0), torch.ones(4))}


def targets() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in SOURCE.items()}


@pytest.fixture
def place() -> Any:
    found = fresh_place()
    blocking.save(SOURCE, found)
    return found


class Giving(DefaultLoadPlanner):
    """Fills arrays of its own, by name."""

    def __init__(self, hook: str, own: dict[str, Any]) -> None:
        super().__init__()
        self.hook, self.own = hook, own
        self.committed: dict[str, Any] = {}

    def lookup_tensor(self, index: Any) -> Any:
        return self.own[index.fqn] if self.hook == "lookup_tensor" else super().lookup_tensor(index)

    def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
        found = super().transform_tensor(read_item, tensor)
        return self.own[read_item.dest_index.fqn] if self.hook == "transform_tensor" else found

    def resolve_tensor(self, read_item: Any) -> Any:
        found = super().resolve_tensor(read_item)
        return self.own[read_item.dest_index.fqn] if self.hook == "resolve_tensor" else found

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed[read_item.dest_index.fqn] = tensor


HOOKS = ("lookup_tensor", "transform_tensor", "resolve_tensor")


@pytest.mark.parametrize("hook", HOOKS)
def test_tensors_that_a_planner_gives_are_filled_noticed_and_given_back(place: Any, hook: str) -> None:
    own = {"w": torch.zeros(8, requires_grad=True), "z": torch.zeros(4, dtype=torch.complex64).conj()}
    planner = Giving(hook, own)
    blocking.load(place, targets(), planner=planner)
    for name, tensor in own.items():
        assert torch.equal(tensor, SOURCE[name]), name
        assert tensor._version == 1, name
        assert planner.committed[name] is tensor, name
    assert own["z"].is_conj()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda: torch.zeros(1).expand(8), "overlap"),
        (lambda: torch.zeros(8, dtype=torch.int16), "dtype int16"),
        (lambda: torch.zeros(2, 4), r"shape \(2, 4\)|cannot be had"),
        (lambda: torch.zeros(8, device="meta"), "no memory"),
        (lambda: torch.zeros(8).to_sparse(), "sparse|cannot be had"),
        (lambda: jnp.zeros(8), "no memory"),
    ],
    ids=["overlapping", "integers", "shape", "meta", "sparse", "jax"],
)
def test_arrays_that_cannot_take_a_box_are_refused_by_key(place: Any, hook: str, given: Any, problem: str) -> None:
    planner = Giving(hook, {"w": given(), "z": torch.zeros(4, dtype=torch.complex64)})
    with pytest.raises(PlanError, match=rf"^w: .*({problem})"):
        blocking.load(place, targets(), planner=planner)
    assert planner.own["z"]._version == 0
    assert not planner.own["z"].any()
    assert not planner.committed


def test_boxes_of_a_tensor_that_a_planner_looks_up() -> None:
    found = fresh_place()
    source = np.arange(12.0, dtype="f4").reshape(4, 3)
    blocking.save({"w": ShardedArray((4, 3), [((0, 0), source[:1]), ((1, 0), source[1:])])}, found)
    own = torch.zeros(3, 4).T
    blocking.load(found, {"w": np.zeros((4, 3), "f4")}, planner=Giving("lookup_tensor", {"w": own}))
    assert (own.numpy() == source).all()
    assert own._version > 0
