"""What torch's plan cache may have lost: keys of a rank's state that the plan for all ranks no longer has.

A rank whose plan is that of its last save sends none, and the coordinator takes the one that it remembers. torch puts
the plans of a save there before it has checked them, but lets the ranks remember theirs only afterwards: when a save
fails in between, the coordinator goes on with a plan that the rank has never saved. The rank then writes that plan, and
the metadata are made of it, so that neither shows what is missing from both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from savestream.errors import CoordinationError
from savestream.integrations.dcp.frameworks import checkpoint_module

__all__ = ["CACHE_CURE", "RankResults", "begin_check", "caches_plans", "keys_left_to_others", "refuse_lost_keys"]

CACHE_CURE = (
    "torch's plan cache holds the plan of another state, as it does after a save that failed. Save with "
    "enable_plan_caching=False, or clear SavePlanner._cached_save_plan, _cached_final_save_plan, _cached_all_plans, "
    "_cached_global_plan and _cached_metadata on all ranks"
)


class RankResults(list[Any]):
    """A rank's results, and the keys of its state that it left to other ranks, where that has to be checked."""

    def __init__(self, results: Sequence[Any] = (), left_to_others: frozenset[str] = frozenset()) -> None:
        super().__init__(results)
        self.left_to_others = left_to_others


# By the planner's name for its cached plans: torch's cached plan of this rank, and the keys of the plan that was sent.
_sent: dict[str, tuple[weakref.ref[Any], frozenset[str]]] = {}


class _Checks:
    """The coordinator's checks: how many were asked for and have not been passed, and whether any has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.has_passed = False


_checks = _Checks()


def begin_check(plans: Sequence[Any]) -> bool:
    """On the coordinator: whether the ranks have to say what they leave to others.

    They need not where all keep their last plans, and every check has been passed: caching is there to send little.
    """
    with _checks.lock:
        is_asked = any(_is_usable(plan) for plan in plans) or _checks.open > 0 or not _checks.has_passed
        _checks.open += is_asked
        return is_asked


def _is_usable(plan: Any) -> bool:
    return bool(getattr(plan, "usable", True))


def caches_plans(planner: Any) -> bool:
    """Whether a planner takes part in torch's plan cache."""
    return bool(getattr(planner, "_enable_plan_caching", False)) and hasattr(planner, "_cached_plans_key")


def keys_left_to_others(sent: Any, written: Any, planner: Any, *, is_asked: bool) -> frozenset[str]:
    """The keys of this rank's state that are not in the plan that it writes.

    Parameters
    ----------
    sent
        The plan that this rank sent to the coordinator.
    written
        The finished plan.
    is_asked
        What :func:`begin_check` said on the coordinator.
    """
    if not caches_plans(planner) or sent is None:
        return frozenset()
    name = planner._cached_plans_key
    cached = checkpoint_module("planner").SavePlanner._cached_save_plan.get(name)
    if _is_usable(sent):
        if cached is not None:
            _sent[name] = (weakref.ref(cached), _keys(sent))
        return frozenset()
    if not is_asked or cached is None:
        return frozenset()
    remembered = _sent.get(name)
    if remembered is not None and remembered[0]() is cached:
        return remembered[1] - _keys(written)
    return _keys(cached) - _keys(written)  # another storage's writer saved last


def _keys(plan: Any) -> frozenset[str]:
    return frozenset([item.index.fqn for item in plan.items])


def refuse_lost_keys(metadata: Any, results: Sequence[Sequence[Any]], *, is_asked: bool) -> None:
    """On the coordinator: every key that a rank left to others must be in the checkpoint.

    Raises
    ------
    CoordinationError
        One is not; names it and the rank.
    """
    for rank, found in enumerate(results):
        lost = sorted(getattr(found, "left_to_others", frozenset()) - metadata.state_dict_metadata.keys())
        if lost:
            more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise CoordinationError(
                f"{lost[0]}{more}: in the state of rank {rank}, but in no plan; nothing was published. {CACHE_CURE}"
            )
    if is_asked:
        with _checks.lock:
            _checks.open -= 1
            _checks.has_passed = True
