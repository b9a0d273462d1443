"""The default planners and the functions that make their plans."""

from __future__ import annotations

from savestream.planners.empty_planner import EmptyStateDictLoadPlanner
from savestream.planners.load_planner import DefaultLoadPlanner, create_default_local_load_plan
from savestream.planners.load_plans import create_default_global_load_plan
from savestream.planners.save_planner import DefaultSavePlanner
from savestream.planners.save_plans import create_default_global_save_plan, create_default_local_save_plan

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner
