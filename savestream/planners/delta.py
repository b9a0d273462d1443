"""Plans that say "as last time": the exchange between ranks and coordinator when plan caching is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from savestream.errors import PlanError
from savestream.planners.cache import PlanCache
from savestream.planners.metadata import Metadata, PlannerData
from savestream.planners.plan import SavePlan

__all__ = ["DeltaPlans"]

GlobalPlan = tuple[list[SavePlan], Metadata]


class _RankPlans(msgspec.Struct, frozen=True):
    local: SavePlan
    final: SavePlan


class DeltaPlans:
    """What one planner remembers of committed saves.

    A rank whose local plan is that of a committed save sends an unusable plan that carries only the fingerprint; the
    coordinator answers with one where the final plan is unchanged too. Everything learnt during a save is kept aside
    until :meth:`commit`, so a failed validation or save changes nothing.
    """

    def __init__(self, max_entries: int = 4) -> None:
        self._max_entries = max_entries
        self._own = PlanCache(max_entries)
        self._ranks: list[PlanCache] = []
        self._pending_local: SavePlan | None = None
        self._pending_own: tuple[bytes, _RankPlans] | None = None
        self._pending_ranks: list[tuple[bytes, _RankPlans] | None] = []

    def local(self, fingerprint: bytes, create: Callable[[], SavePlan]) -> SavePlan:
        """This rank's plan, or the reference to the committed one with the same fingerprint."""
        known = self._own.get(fingerprint)
        if known is not None:
            self._pending_local = known.local
            return _reference(fingerprint)
        self._pending_local = create()
        return self._pending_local

    def merge(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """On the coordinator: the full local plans of all ranks."""
        while len(self._ranks) < len(plans):
            self._ranks.append(PlanCache(self._max_entries))
        return [plan if plan.usable else self._known(rank, plan).local for rank, plan in enumerate(plans)]

    def answer(
        self, plans: Sequence[SavePlan], merged: Sequence[SavePlan], final: Sequence[SavePlan]
    ) -> list[SavePlan]:
        """On the coordinator: the final plans, or references where a rank has the very same one from before."""
        answers: list[SavePlan] = []
        self._pending_ranks = []
        for rank, (sent, local, new) in enumerate(zip(plans, merged, final, strict=True)):
            fingerprint = _fingerprint(sent)
            if fingerprint is None:
                self._pending_ranks.append(None)
                answers.append(new)
                continue
            known = None if sent.usable else self._known(rank, sent)
            same = known is not None and known.final.items == new.items
            self._pending_ranks.append((fingerprint, _RankPlans(local, new)))
            answers.append(_reference(fingerprint) if same else new)
        return answers

    def finish(self, fingerprint: bytes, answer: SavePlan) -> SavePlan:
        """This rank's final plan."""
        if answer.usable:
            final = answer
        else:
            known = self._own.get(_fingerprint(answer) or b"")
            if known is None:
                raise PlanError("the coordinator answered with a plan that this rank has not committed; plan afresh")
            final = known.final
        if self._pending_local is not None:
            self._pending_own = (fingerprint, _RankPlans(self._pending_local, final))
        return final

    def commit(self) -> None:
        """Keep what was planned since the last commit: the save is committed."""
        if self._pending_own is not None:
            self._own.put(*self._pending_own)
        for cache, pending in zip(self._ranks, self._pending_ranks, strict=False):
            if pending is not None:
                cache.put(*pending)
        self.discard()

    def discard(self) -> None:
        """Forget what was planned since the last commit."""
        self._pending_local = self._pending_own = None
        self._pending_ranks = []

    def _known(self, rank: int, plan: SavePlan) -> _RankPlans:
        known = self._ranks[rank].get(_fingerprint(plan) or b"")
        if not isinstance(known, _RankPlans):
            raise PlanError(
                f"rank {rank} refers to a plan of an earlier save that the coordinator does not know; give every rank "
                "a new planner, or keep all ranks' planners for the same saves"
            )
        return known


def _reference(fingerprint: bytes) -> SavePlan:
    return SavePlan([], planner_data=PlannerData(fingerprint=fingerprint), usable=False)


def _fingerprint(plan: SavePlan) -> bytes | None:
    return plan.planner_data.fingerprint if isinstance(plan.planner_data, PlannerData) else None
