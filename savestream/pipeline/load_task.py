"""One load from root to result, as it runs on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from savestream.arrays import HostArray, dtype_from_name
from savestream.errors import LoadMismatchError
from savestream.events import LoadFinished, Observer, OperationFailed, Statistics, notify
from savestream.pipeline.arguments import exclusive, suggest_keys
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.commit import describe
from savestream.pipeline.open_checkpoint import OpenCheckpoint, following_overwrites, metadata_of
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_loader import PlanLoader
from savestream.pipeline.stage_clock import StageClock
from savestream.planners.base import LoadPlanner
from savestream.planners.default import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from savestream.planners.metadata import Metadata
from savestream.planners.paths import select_names
from savestream.planners.plan import LoadPlan
from savestream.storage_backends import Location
from savestream.threads import forget_frames, run_in_worker

__all__ = ["LoadRequest", "LoadTask"]


class LoadRequest(msgspec.Struct):
    """The caller's arguments."""

    location: Location
    target: Any
    keys: Sequence[str | tuple[object, ...]] | None
    strict: bool
    cast: bool
    options: LoadOptions
    framework: str
    planner: LoadPlanner | None
    observer: Observer | None


class LoadTask:
    """Runs one load."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._clock = StageClock(request.observer)
        self._names: list[str] = []

    async def run(self) -> object:
        """Load, or raise: mismatches and bad targets before anything of the target is touched."""
        request = self._request
        try:
            with exclusive(request.planner):
                try:
                    return await following_overwrites(request.location, self._run_once)
                finally:
                    if isinstance(request.planner, DefaultLoadPlanner):
                        request.planner.release_target()  # while it serves this load
        except LoadMismatchError as error:
            error.source = describe(request.location)
            error.hint = suggest_keys(error.missing, self._names)
            notify(request.observer, OperationFailed("load", error.source, repr(error)))
            forget_frames(error)
            raise
        except BaseException as error:
            notify(request.observer, OperationFailed("load", describe(request.location), repr(error)))
            forget_frames(error)
            raise
        finally:
            request.target = None  # an error's traceback that outlives the load keeps none of its memory

    async def _run_once(self, checkpoint: OpenCheckpoint) -> object:
        request = self._request
        with self._clock.measure("plan", 0, 0):
            metadata = await run_in_worker(metadata_of, checkpoint)
            self._names = list(metadata.state_dict_metadata)
            await checkpoint.fetch_parts(await run_in_worker(_needed_parts, checkpoint, metadata, request.keys))
            planner, plan = await run_in_worker(self._plan, metadata)
        loader = PlanLoader(checkpoint, planner, request.options, self._clock)
        await loader.read(plan)
        result = await run_in_worker(_finish, planner, request.target)
        statistics = Statistics(
            stages=self._clock.snapshot(),
            total_seconds=self._clock.elapsed_seconds,
            raw_bytes=loader.raw_bytes,
            stored_bytes=loader.stored_bytes,
        )
        notify(request.observer, LoadFinished(checkpoint.place, statistics))
        return result

    def _plan(self, metadata: Metadata) -> tuple[LoadPlanner, LoadPlan]:
        request = self._request
        planner = request.planner or self._default_planner()
        planner.set_up_planner({} if request.target is None else request.target, metadata, True)
        plan = planner.create_local_plan()
        return planner, planner.finish_plan(planner.create_global_plan([plan])[0])

    def _default_planner(self) -> LoadPlanner:
        request, options = self._request, self._request.options
        if request.target is None:
            return EmptyStateDictLoadPlanner(
                keys=request.keys,
                framework=request.framework,
                allocate=_allocate,
                allow_partial_load=not request.strict,
                types=options.types,
                allow_pickle=options.allow_pickle,
            )
        return DefaultLoadPlanner(
            allow_partial_load=not request.strict,
            cast=request.cast,
            allocate=_allocate,
            keys=request.keys,
            types=options.types,
            allow_pickle=options.allow_pickle,
        )


def _allocate(dtype: str, shape: tuple[int, ...]) -> HostArray:
    return allocate_array(dtype_from_name(dtype), shape)


def _needed_parts(
    checkpoint: OpenCheckpoint, metadata: Metadata, keys: Sequence[str | tuple[object, ...]] | None
) -> set[int]:
    names = checkpoint.root.plan.tensor_names
    if keys is not None:
        selected, _ = select_names(list(metadata.state_dict_metadata), keys)
        chosen = set(selected)
        names = [name for name in names if name in chosen]
    return checkpoint.parts_of(names)


def _finish(planner: LoadPlanner, target: object) -> object:
    return planner.finish_load() if isinstance(planner, DefaultLoadPlanner) else target
