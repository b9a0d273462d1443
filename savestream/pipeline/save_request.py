"""What goes into a save, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from savestream.events import Observer, Statistics
from savestream.pipeline.coordination import Coordinator
from savestream.pipeline.options import SaveOptions
from savestream.planners.base import SavePlanner
from savestream.planners.cache import PlanCache
from savestream.storage_backends import Location

__all__ = ["CheckpointInfo", "Progress", "SaveRequest"]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A committed save.

    Attributes
    ----------
    location
        Path or URL that ``load`` takes.
    save_id
        The 128-bit id of this save, in hex.
    step
        The step it was saved under, if any.
    statistics
        What the save did and what limited it.
    """

    location: str
    save_id: str
    step: int | None
    statistics: Statistics


class Progress(msgspec.Struct, frozen=True):
    """How far a save is; bytes of array data before the codec. ``total_bytes`` is 0 until the plan is final."""

    staged_bytes: int
    written_bytes: int
    total_bytes: int


class SaveRequest(msgspec.Struct):
    """The caller's arguments. ``state`` is dropped as soon as it is staged."""

    state: Any
    location: Location
    options: SaveOptions
    planner: SavePlanner | None
    plan_cache: PlanCache | None
    coordinator: Coordinator
    metadata: object
    metrics: Mapping[str, float] | None
    step: int | None
    overwrite: bool
    observer: Observer | None
