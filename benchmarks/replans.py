"""How long it takes to find out that a state has not changed since the last save."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import Machine
from benchmarks.states import Tree
from savestream import DefaultSavePlanner, PlanCache

__all__ = ["dcp_replan_turn", "replan_label", "replan_turn"]


def replan_label(name: str) -> str:
    return f"{name}: replan of an unchanged state"


def replan_turn(machine: Machine, state: Tree, name: str) -> Callable[[], dict[str, float]]:
    """What a save of an unchanged state does before it stages: leaves, values, fingerprint, look-up."""
    cache = PlanCache()

    def replan() -> bool:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, True)
        planner.capture_values()
        fingerprint = planner.plan_fingerprint()
        assert fingerprint is not None
        hit = cache.get(fingerprint) is not None
        if not hit:
            cache.put(fingerprint, planner.create_local_plan())
        return hit

    def run() -> dict[str, float]:
        seconds, hit = machine.timed(replan)
        assert hit, "an unchanged state missed the plan cache"
        return {replan_label(name): seconds}

    replan()
    return run


def dcp_replan_turn(machine: Machine, state: Tree) -> Callable[[], dict[str, float]]:
    """The same of DCP: its planner's whole round of calls, from the third time on, with its plans cached."""
    from torch.distributed import checkpoint as dcp

    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    primed = False

    def replan() -> None:
        planner.set_up_planner(state, is_coordinator=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        planner.finish_plan(plans[0])

    def run() -> dict[str, float]:
        nonlocal primed
        if not primed:  # not earlier: its cache belongs to the planner's class, so another planner would displace it
            replan()
            replan()
            primed = True
        seconds, _ = machine.timed(replan)
        return {replan_label("DCP"): seconds}

    return run
