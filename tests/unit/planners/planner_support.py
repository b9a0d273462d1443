"""Helpers: run planners the way the pipeline does, with memory for storage."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from savestream.planners import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    LoadItemType,
    Metadata,
    MetadataIndex,
    SavePlan,
)
from savestream.planners.geometry import narrow


class Stored:
    """What a save wrote."""

    def __init__(self, metadata: Metadata, chunks: dict[MetadataIndex, Any], plans: list[SavePlan]) -> None:
        self.metadata = metadata
        self.chunks = chunks
        self.plans = plans


def save(*states: Any, planners: list[DefaultSavePlanner] | None = None, **options: Any) -> Stored:
    """Plan and "write" the states of as many ranks."""
    planners = planners or [DefaultSavePlanner(**options) for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        planner.capture_values()
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    chunks: dict[MetadataIndex, Any] = {}
    places: dict[MetadataIndex, object] = {}
    finished = []
    for planner, plan in zip(planners, plans, strict=True):
        finished.append(planner.finish_plan(plan))
        for item in finished[-1].items:
            assert item.index not in chunks
            data = planner.resolve_data(item)
            chunks[item.index] = data.getvalue() if isinstance(data, io.BytesIO) else np.array(data)
            places[item.index] = item.alias_of or item.index
        planner.commit_plan()
    metadata = Metadata(metadata.state_dict_metadata, metadata.planner_data, places)
    return Stored(metadata, chunks, finished)


def read(planner: DefaultLoadPlanner, target: Any, stored: Stored) -> Any:
    """Run a load planner over what was stored."""
    planner.set_up_planner(target, stored.metadata, True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    for item in plan.items:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(stored.chunks[item.storage_index]))
    planner.check_values()
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            view = planner.resolve_tensor(item)
            view[...] = narrow(stored.chunks[item.storage_index], item.storage_offsets, item.lengths)
            planner.commit_tensor(item, view)
    return planner.finish_load()


def load(stored: Stored, target: Any = None, **options: Any) -> Any:
    """Load into a target, or without one."""
    if target is None:
        return read(EmptyStateDictLoadPlanner(**options), {}, stored)
    return read(DefaultLoadPlanner(**options), target, stored)


def same(first: Any, second: Any) -> bool:
    """Equal in class, structure, order, dtype and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        keys = [(type(a), type(b), a, b) for a, b in zip(first, second, strict=False)]
        return len(first) == len(second) and all(
            kind is other and repr(a) == repr(b) and same(first[a], second[b]) for kind, other, a, b in keys
        )
    if isinstance(first, list | tuple) or type(first).__name__ == "deque":
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, set | frozenset):
        return sorted(map(repr, first)) == sorted(map(repr, second))
    if hasattr(first, "__dataclass_fields__"):
        return all(same(getattr(first, name), getattr(second, name)) for name in first.__dataclass_fields__)
    return repr(first) == repr(second)
