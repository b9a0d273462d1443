"""Scenarios of what a failed save leaves behind, in torch's caches and in storage; see :mod:`dcp_ranks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_rank_support import Ranks, failure_of
from dcp_support import assert_same_state, files_beneath
from torch.distributed.checkpoint import default_planner

from savestream.errors import CoordinationError, PlanError

__all__ = ["AFTER_FAILURE_SCENARIOS"]

AFTER_FAILURE_SCENARIOS: dict[str, Callable[[Ranks], None]] = {}


def scenario(play: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    AFTER_FAILURE_SCENARIOS[play.__name__.replace("_", " ")] = play
    return play


def _forget_cached_plans() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.SavePlanner, f"_cached_{name}").clear()


class Caching(dcp.DefaultSavePlanner):
    """Of a class of its own, which torch's caches are kept by."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def _fail_to_validate(ranks: Ranks, state: dict[str, Any]) -> None:
    with mock.patch.object(default_planner, "_validate_global_plan", return_value=["chunks overlap"]):
        error = failure_of(lambda: ranks.save(state, planner=Caching()))
    assert "Failed to validate global plan: chunks overlap" in str(error)


@scenario
def a_key_that_the_plan_cache_has_lost_is_missed(ranks: Ranks) -> None:
    """The coordinator remembers a plan of a save that failed; the rank goes on from the one before."""
    whole = {name: torch.full((3,), float(ranks.rank)) for name in (f"a{ranks.rank}", f"b{ranks.rank}")}
    smaller = {f"a{ranks.rank}": whole[f"a{ranks.rank}"]}
    for _ in range(3):
        ranks.save(whole, planner=Caching())
    _fail_to_validate(ranks, smaller if ranks.rank == 2 else whole)
    larger = whole if ranks.rank == 2 else {**whole, f"c{ranks.rank}": torch.ones(1)}
    for _ in range(3):  # in the later ones all ranks report that nothing has changed
        error = failure_of(lambda: ranks.save(larger, planner=Caching()))
        assert list(error.failures) == [0]
        assert isinstance(error.failures[0][0], CoordinationError)
        assert "b2: in the state of rank 2, but in no plan" in str(error)
        assert "Save with enable_plan_caching=False, or clear SavePlanner._cached_save_plan" in str(error)
    ranks.save(larger, "uncached")
    dist.barrier()
    _forget_cached_plans()
    ranks.save(larger, planner=Caching())
    for name in ("uncached", "checkpoint"):
        assert_same_state(ranks.load({key: torch.zeros_like(value) for key, value in larger.items()}, name), larger)
    _forget_cached_plans()


@scenario
def a_shape_that_the_plan_cache_has_not_seen_is_refused_with_its_cure(ranks: Ranks) -> None:
    states = [{f"x{ranks.rank}": torch.ones(length if ranks.rank == 2 else 3)} for length in (3, 4)]
    ranks.save(states[0], planner=Caching())
    _fail_to_validate(ranks, states[1])
    changed = {**states[0], **({"more": torch.ones(1)} if ranks.rank == 1 else {})}
    error = failure_of(lambda: ranks.save(changed, planner=Caching()))
    assert list(error.failures) == [2]
    assert isinstance(error.failures[2][0], PlanError)
    assert "x2: the planner planned a chunk of shape (4,) and resolved a tensor of shape (3,)" in str(error)
    assert "Save with enable_plan_caching=False" in str(error)
    _forget_cached_plans()


@scenario
def keys_that_other_ranks_write_are_not_missed(ranks: Ranks) -> None:
    """Replicated tensors, of which each rank leaves most to the others, while one rank's plan changes."""
    for number in range(4):
        replicated = {f"w{key}": torch.full((5,), float(number)) for key in range(6)}
        own = {f"of {ranks.rank}": torch.ones(number if ranks.rank == 1 else 2)}
        ranks.save({**replicated, **own}, f"c{number}", planner=Caching())
        target = {key: torch.zeros_like(value) for key, value in {**replicated, **own}.items()}
        assert_same_state(ranks.load(target, f"c{number}"), {**replicated, **own})
    _forget_cached_plans()


class Dropping(Caching):
    """Leaves out some of the state deliberately."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dcp.SavePlan(
            [item for item in plan.items if not item.index.fqn.startswith("dropped")],
            planner_data=plan.planner_data,
            usable=plan.usable,
        )


@scenario
def keys_that_a_planner_leaves_out_are_not_missed(ranks: Ranks) -> None:
    for number in range(3):
        state = {f"x{ranks.rank}": torch.ones(3), "dropped": torch.ones(2)}
        changing = {"more": torch.ones(number)} if ranks.rank == 1 else {}
        metadata = ranks.save({**state, **changing}, f"c{number}", planner=Dropping())
        assert "dropped" not in metadata.state_dict_metadata
    _forget_cached_plans()


@scenario
def what_other_ranks_wrote_goes_where_the_coordinator_wrote_nothing(ranks: Ranks) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if ranks.rank == 0:
                raise RuntimeError("before its data")
            return super().finish_plan(new_plan)

    writer = ranks.writer()
    state = {f"of {ranks.rank}": torch.ones(1000)}
    for _ in range(2):
        error = failure_of(lambda: ranks.save_with(writer, state, planner=Failing()))
        assert list(error.failures) == [0]
        del error
        dist.barrier()
    assert {name.partition("/")[2][:6] for name in files_beneath(ranks.place / "checkpoint")} == {
        "r00001",
        "r00002",
        "r00003",
    }
    dist.barrier()
    ranks.save_with(writer, state)
    dist.barrier()
    names = {name.partition("/")[0] for name in files_beneath(ranks.place / "checkpoint")}
    assert len(names) == 2  # manifest.json and one save
    assert_same_state(ranks.load({name: torch.zeros(1000) for name in state}), state)
