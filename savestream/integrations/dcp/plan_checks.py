"""What is wrong with a planner's plans and data, found before anything is written.

``finish`` would refuse it too, from the metadata, but only when all ranks have written all of their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savestream.errors import PlanError
from savestream.integrations.dcp.extras import refuse_unsafe
from savestream.integrations.dcp.frameworks import checkpoint_module
from savestream.planners.metadata import ChunkStorageMetadata
from savestream.planners.validation import check_chunks

__all__ = ["refuse_incomplete_plans", "refuse_unsafe_planner_data"]


def refuse_incomplete_plans(plans: Sequence[Any]) -> None:
    """On the coordinator: each tensor's items must cover it, and not overlap.

    Plans that torch has put in its cache are left to ``finish``: a refusal here would leave the ranks without the plans
    that the coordinator remembers for them. One rank's repeated items are left to it as well.

    Raises
    ------
    PlanError
        Names the tensors and their boxes.
    """
    if not all(getattr(plan, "usable", True) for plan in plans) or _are_cached(plans):
        return
    chunks: dict[str, dict[ChunkStorageMetadata, None]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for item in (item for plan in plans for item in plan.items if item.tensor_data is not None):
        box = item.tensor_data.chunk
        found = chunks.setdefault(item.index.fqn, {})
        sizes[item.index.fqn] = tuple(item.tensor_data.size)
        if 0 not in box.sizes:
            found[ChunkStorageMetadata(tuple(box.offsets), tuple(box.sizes))] = None
    errors = [error for name, boxes in chunks.items() for error in check_chunks(name, sizes[name], list(boxes))]
    if errors:
        more = f"\nand {len(errors) - 8} more" if len(errors) > 8 else ""
        raise PlanError("the planner's plans do not fit together; nothing was written\n" + "\n".join(errors[:8]) + more)


def _are_cached(plans: Sequence[Any]) -> bool:
    cached = checkpoint_module("planner").SavePlanner._cached_global_plan
    known = {id(plan) for remembered in cached.values() for plan in remembered}
    return any(id(plan) in known for plan in plans)


def refuse_unsafe_planner_data(planner: Any) -> None:
    """On the coordinator: the planner's data for the metadata must have a safe encoding, where they are known by now.

    Raises
    ------
    UnsafeObjectError
        Names what has none.
    """
    refuse_unsafe(getattr(getattr(planner, "metadata", None), "planner_data", None))
