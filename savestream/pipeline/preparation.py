"""Plans a save, or finds that nothing changed since a cached plan, and captures what the state holds besides arrays."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import xxhash

from savestream.arrays import HostArray, adapter_for, dtype_from_name
from savestream.errors import PlanError
from savestream.pipeline.compiled_plan import CompiledPlan, compile_plan
from savestream.pipeline.coordination import Coordinator
from savestream.pipeline.save_request import SaveRequest
from savestream.pipeline.sources import ChunkSources, LiveSources, ResolvedSources
from savestream.planners.base import SavePlanner
from savestream.planners.default import DefaultSavePlanner
from savestream.planners.metadata import StorageMeta
from savestream.planners.plan import SavePlan, WriteItem
from savestream.planners.values import encode_value

__all__ = ["Prepared", "no_sources", "prepare"]

_LAYOUT_VERSION = b"layout-1"


class Prepared(msgspec.Struct):
    """A planned save: what runs, and the state's data that goes with it."""

    planner: SavePlanner
    compiled: CompiledPlan
    sources: Callable[[], ChunkSources]
    creates: bool
    user: object
    metrics: dict[str, object] | None
    values: list[object]
    fingerprint: bytes | None
    from_cache: bool

    def release(self) -> None:
        """Let go of the state's arrays: everything is staged."""
        self.sources().release()
        self.sources = no_sources
        if isinstance(self.planner, DefaultSavePlanner):
            self.planner.release_state()


def prepare(request: SaveRequest, meta: StorageMeta) -> Prepared:
    """Plan a save. Runs in a worker thread.

    Raises
    ------
    PlanError, UnsafeObjectError
        The state, the metadata or the metrics cannot be saved.
    """
    user = encode_value(request.metadata, "metadata")
    metrics = None
    if request.metrics is not None:
        metrics = {name: encode_value(value, f"metrics.{name}") for name, value in request.metrics.items()}
    planner = request.planner or DefaultSavePlanner(allow_pickle=request.options.allow_pickle)
    planner.set_up_planner(request.state, meta, True)
    if isinstance(planner, DefaultSavePlanner):
        planner.capture_values()
    cache = request.plan_cache
    fingerprint = _fingerprint(planner, request.coordinator) if cache is not None else None
    cached = cache.get(fingerprint) if cache is not None and fingerprint is not None else None
    compiled = cached if isinstance(cached, CompiledPlan) else _plan(planner)
    creates = not (isinstance(planner, DefaultSavePlanner) and planner.resolves_live_leaves)
    return Prepared(
        planner=planner,
        compiled=compiled,
        sources=_make_sources(planner, compiled, creates),
        creates=creates,
        user=user,
        metrics=metrics,
        values=[_value(planner, item) for item in compiled.value_items],
        fingerprint=fingerprint,
        from_cache=cached is not None,
    )


def _fingerprint(planner: SavePlanner, coordinator: Coordinator) -> bytes | None:
    own = planner.plan_fingerprint()
    if own is None:
        return None
    ranks = f"{coordinator.rank}/{coordinator.world_size}".encode()
    return xxhash.xxh3_128(b"\0".join([own, ranks, _LAYOUT_VERSION])).digest()


def _plan(planner: SavePlanner) -> CompiledPlan:
    local = _checked_plan(planner, planner.create_local_plan(), "create_local_plan")
    plans, metadata = planner.create_global_plan([local])
    return compile_plan(_checked_plan(planner, planner.finish_plan(plans[0]), "finish_plan"), metadata)


def _checked_plan(planner: SavePlanner, plan: object, method: str) -> SavePlan:
    if not isinstance(plan, SavePlan):
        raise PlanError(f"{type(planner).__qualname__}.{method} returned {plan!r}, not a SavePlan")
    return plan


def _value(planner: SavePlanner, item: WriteItem) -> object:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise PlanError(f"{item.index.fqn}: the planner resolved a value to {type(data).__qualname__}, not io.BytesIO")
    return msgspec.Raw(data.getvalue())


def _make_sources(planner: SavePlanner, compiled: CompiledPlan, creates: bool) -> Callable[[], ChunkSources]:
    if creates:
        return lambda: ResolvedSources(lambda chunk: _resolve(planner, compiled.chunk_items[chunk]))
    assert isinstance(planner, DefaultSavePlanner)  # noqa: S101 - the only planner that resolves live leaves
    live = planner.resolve_items(compiled.chunk_items[: compiled.opaque_from])
    opaque = [_resolve(planner, item) for item in compiled.chunk_items[compiled.opaque_from :]]
    items = compiled.chunk_items
    sources = LiveSources(
        [*live, *opaque],
        lambda chunk: _dtype_of(items[chunk]),
        lambda chunk: items[chunk].index.fqn,
        items[: compiled.opaque_from],
    )
    return lambda: sources


def _dtype_of(item: WriteItem) -> np.dtype[Any]:
    return dtype_from_name(item.tensor_data.properties.dtype if item.tensor_data is not None else "uint8")


def _resolve(planner: SavePlanner, item: WriteItem) -> HostArray:
    """What a planner makes of an item, checked against what the plan says of it."""
    made = planner.resolve_data(item)
    key = item.index.fqn
    if item.tensor_data is None:
        if not isinstance(made, io.BytesIO):
            raise PlanError(f"{key}: the planner resolved bytes to {type(made).__qualname__}, not io.BytesIO")
        data = np.frombuffer(made.getbuffer(), np.uint8)
        if data.nbytes != item.chunk_nbytes:
            raise PlanError(f"{key}: the planner planned {item.chunk_nbytes} bytes and resolved {data.nbytes}")
        return data
    array = _elements(made, key)
    dtype, sizes = dtype_from_name(item.tensor_data.properties.dtype), item.tensor_data.chunk.sizes
    if array.dtype != dtype or array.shape != sizes:
        raise PlanError(
            f"{key}: the planner planned {dtype} of shape {sizes} and resolved {array.dtype} of shape {array.shape}; "
            "change the item's tensor_data together with resolve_data"
        )
    return array


def _elements(made: Any, key: str) -> HostArray:
    """The elements of what a planner made, or an error by name where it has none that could be stored."""
    adapter = adapter_for(type(made))
    if adapter is None:
        raise PlanError(f"{key}: the planner resolved an array to {type(made).__qualname__}")
    adapter.info(made, key)
    try:
        return adapter.host_view(made)
    except PlanError as error:
        raise PlanError(f"{key}: {error}") from error


def no_sources() -> ChunkSources:
    """For a save whose blocks are all filled: it must not reach for the state any more."""
    return ChunkSources()
