"""The planner that saves use unless another is given."""

from __future__ import annotations

import collections
import io
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayAdapter, adapter_for, array_info, dtype_from_name, is_array, plain_array_types
from savestream.errors import PlanError
from savestream.planners.base import SavePlanner
from savestream.planners.cache import fingerprint
from savestream.planners.dedup import dedup_save_plans
from savestream.planners.delta import DeltaPlans
from savestream.planners.flattening import ARRAY, SHARDED, VALUE, FlatState, flatten, flatten_top_level
from savestream.planners.metadata import Metadata, MetadataIndex, PlannerData, StorageMeta
from savestream.planners.plan import SavePlan, WriteItem, WriteItemType
from savestream.planners.recorded import class_name
from savestream.planners.save_plans import (
    CapturedValue,
    capture_value,
    create_default_global_save_plan,
    create_write_items,
    merge_planner_data,
    shardless_names,
)
from savestream.planners.sharding import ShardedArray, flatten_shards, is_sharded, shard_array
from savestream.planners.trees import tree_mappings
from savestream.planners.validation import check_global_plan

__all__ = ["DefaultSavePlanner"]

_PLANNING_METHODS = (
    "set_up_planner",
    "capture_values",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "lookup_object",
    "transform_object",
    "resolve_data",
)
_RESOLVING_METHODS = ("lookup_object", "transform_object", "resolve_data")


class DefaultSavePlanner(SavePlanner):
    """Plans every leaf of a state; each replicated one is written by one rank.

    Parameters
    ----------
    flatten_state_dict
        Name leaves by their path. Otherwise the state is a dict whose str keys are the names as they stand.
    flatten_sharded_tensors
        Accept a ShardedArray whose shards are ShardedArrays, as one level of boxes.
    dedup_replicated_tensors
        Accepted for compatibility; replicated leaves are always written once.
    dedup_save_to_lowest_rank
        The lowest rank writes what several hold, instead of balancing bytes.
    enable_plan_caching
        Keep the plans of committed saves in this planner and exchange references to them. (The pipeline's own
        ``plan_cache`` goes further: there an unchanged state builds no item at all.)
    allow_pickle
        Pickle objects that have no safe encoding. Loading them needs the same opt-in.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        allow_pickle: bool = False,
    ) -> None:
        del dedup_replicated_tensors
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.allow_pickle = allow_pickle
        self.is_coordinator = False
        self._delta = DeltaPlans() if enable_plan_caching else None
        self._flat: FlatState | None = None
        self._values: dict[str, CapturedValue] | None = None
        self._leaves: dict[str, Any] | None = None
        self._fingerprint: bytes | None = None

    def release_state(self) -> None:
        """Let go of the state that was planned; the planner can be set up again, and plans that it cached stay."""
        self._flat = self._values = self._leaves = None

    # --- planning ---

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state; leaves that cannot be stored are refused here, by key."""
        del storage_meta
        self._values = self._leaves = self._fingerprint = None
        if self._delta is not None:
            self._delta.discard()
        flat = (flatten if self.flatten_state_dict else flatten_top_level)(state_dict, allow_pickle=self.allow_pickle)
        self._split_arrays(flat)
        if SHARDED in flat.kinds:
            self._flatten_shards(flat)
        self._flat = flat
        self.is_coordinator = is_coordinator

    def _split_arrays(self, flat: FlatState) -> None:
        """Plan arrays that a framework holds in several places as the boxes that they consist of."""
        if flat.types <= plain_array_types():
            return
        known: dict[Any, tuple[Any, ShardedArray]] = {}  # one array under several names stays one
        for position in list(flat.positions(ARRAY)):
            leaf, name = flat.leaves[position], flat.names[position]
            adapter = adapter_for(type(leaf))
            boxes = _split(adapter, leaf, name, known) if adapter is not None else None
            if boxes is not None:
                flat.split_leaf(position, boxes)

    def _flatten_shards(self, flat: FlatState) -> None:
        for position in list(flat.positions(SHARDED)):
            leaf, name = flat.leaves[position], flat.names[position]
            if type(leaf) is not ShardedArray:
                continue
            if (flattened := flatten_shards(leaf)) is not leaf:
                if not self.flatten_sharded_tensors:
                    raise PlanError(f"{name}: a ShardedArray of ShardedArrays; pass flatten_sharded_tensors=True")
                flat.split_leaf(position, flattened)
            for array in flattened.shards:
                array_info(array, name)  # refuses one without data

    def capture_values(self) -> None:
        """Encode all plain values as they are now, so that later changes do not reach the checkpoint.

        Raises
        ------
        UnsafeObjectError, PlanError
            A value cannot be stored; the message names its key.
        """
        flat = self._state()
        self._values = {
            flat.names[position]: capture_value(flat.leaves[position], flat.names[position], self.allow_pickle)
            for position in flat.positions(VALUE)
        }

    def plan_fingerprint(self) -> bytes | None:
        """16 bytes that change whenever the plan would; None for a subclass that changes planning.

        A subclass that overrides a planning or transform method is cached only if it overrides this too; it then
        extends what this returns by whatever its own methods depend on.
        """
        covered = _definer(type(self), "plan_fingerprint")
        if any(_definer(type(self), name) < covered for name in _PLANNING_METHODS):
            return None
        if self._fingerprint is None:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> bytes:
        options = (
            class_name(type(self)),
            self.flatten_state_dict,
            self.flatten_sharded_tensors,
            self.dedup_save_to_lowest_rank,
            self.allow_pickle,
        )
        opaque = {
            name: (value.encoding, len(value.data))
            for name, value in self._captured().items()
            if value.encoding != "json"
        }
        return fingerprint(self._state(), opaque, repr(options).encode())

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank holds; with plan caching an unusable plan may say "as last time"."""
        token = self.plan_fingerprint() if self._delta is not None else None
        if self._delta is None or token is None:
            return self._local_plan(None)
        return self._delta.local(token, lambda: self._local_plan(token))

    def _local_plan(self, token: bytes | None) -> SavePlan:
        flat = self._state()
        if len(set(flat.names)) < len(flat.names):
            twice = next(name for name, count in collections.Counter(flat.names).items() if count > 1)
            raise PlanError(f"{twice}: two leaves have this name, as two nan keys of a dict would; rename one")
        items = create_write_items(flat, self._captured())
        tree = flat.tree()
        data = PlannerData(tree, tree_mappings(tree), shardless=shardless_names(flat, items), fingerprint=token)
        return SavePlan(items, planner_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deduplicate, describe and validate; a plan that fails leaves nothing behind.

        Raises
        ------
        PlanError
            The plans do not store every element exactly once; the message names keys, boxes and ranks.
        """
        if self._delta is None:
            return self._global_plan(all_plans)
        merged = self._delta.merge(all_plans)
        plans, metadata = self._global_plan(merged)
        return self._delta.answer(all_plans, merged, plans), metadata

    def _global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kept = dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank)
        plans, metadata = create_default_global_save_plan(kept)
        check_global_plan(plans, metadata)
        data = merge_planner_data(all_plans, metadata)
        return plans, msgspec.structs.replace(metadata, planner_data=data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan to write: ``new_plan``, or the committed one that it refers to."""
        token = self.plan_fingerprint() if self._delta is not None else None
        if self._delta is None or token is None:
            return new_plan
        return self._delta.finish(token, new_plan)

    def commit_plan(self) -> None:
        """The save was committed: only now are its plans kept for reuse."""
        if self._delta is not None:
            self._delta.commit()

    # --- data ---

    @property
    def resolves_live_leaves(self) -> bool:
        """Whether items resolve to the state's own memory, so that nothing is created on the way."""
        return all(getattr(type(self), name) is getattr(DefaultSavePlanner, name) for name in _RESOLVING_METHODS)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The leaf, or the shard of a leaf, that an index names."""
        if self._leaves is None:
            flat = self._state()
            self._leaves = dict(zip(flat.names, flat.leaves, strict=True))
        try:
            leaf = self._leaves[index.fqn]
        except KeyError:
            raise PlanError(f"{index.fqn}: the plan names a leaf that the state does not have") from None
        return shard_array(leaf, index) if index.offset is not None and is_sharded(leaf) else leaf

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - a public parameter name
        """What is written for an object: captured bytes for a value, the local array for an array.

        A subclass may return another array (of the planned dtype and shape) or another stream.
        """
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._value_bytes(write_item, object))
        if not is_array(object) and callable(getattr(object, "to_local", None)):
            return object.to_local()
        return object

    def _value_bytes(self, item: WriteItem, value: Any) -> bytes:
        captured = self._captured().get(item.index.fqn)
        flat_value = self._leaves.get(item.index.fqn) if self._leaves is not None else value
        if captured is not None and flat_value is value:
            return captured.data
        return capture_value(value, item.index.fqn, self.allow_pickle).data  # a subclass looked up another object

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The item's data: an array of exactly its box, or ``io.BytesIO``."""
        data = write_item.tensor_data
        if data is not None and write_item.type is WriteItemType.SHARD and 0 in data.size:
            return np.empty(data.chunk.sizes, dtype_from_name(data.properties.dtype))
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def resolve_items(self, items: Iterable[WriteItem]) -> list[Any]:
        """Arrays of many array items, in order; quick where nothing is overridden."""
        if not self.resolves_live_leaves:
            return [self.resolve_data(item) for item in items]
        plain = plain_array_types()
        flat = self._state()
        found = []
        position, names, leaves = 0, flat.names, flat.leaves
        for item in items:  # mostly in the order of the leaves, each of which is looked at once
            name = item.index.fqn
            while position < len(names) and names[position] != name:
                position += 1
            leaf = leaves[position] if position < len(names) else None
            found.append(leaf if type(leaf) in plain else self.resolve_data(item))
        return found

    # --- state ---

    def _state(self) -> FlatState:
        if self._flat is None:
            raise PlanError(f"{type(self).__name__} has no state yet; call set_up_planner first")
        return self._flat

    def _captured(self) -> dict[str, CapturedValue]:
        if self._values is None:
            self.capture_values()
        assert self._values is not None  # noqa: S101 - for the type checker
        return self._values


def _split(
    adapter: ArrayAdapter, leaf: Any, name: str, known: dict[Any, tuple[Any, ShardedArray]]
) -> ShardedArray | None:
    """The boxes of an array, or None where it is whole; one object for all arrays that are the same memory."""
    if id(leaf) in known:
        return known[id(leaf)][1]
    parts = adapter.split(leaf, name)
    if parts is None:
        return None
    dtype, address = adapter.info(leaf, name).dtype, adapter.addresses([leaf])[0]
    memory = (address, dtype, tuple(leaf.shape), tuple([offsets for offsets, _ in parts])) if address else id(leaf)
    entry = known.setdefault(memory, (leaf, ShardedArray(leaf.shape, parts, dtype=dtype)))
    known[id(leaf)] = (leaf, entry[1])
    return entry[1]


def _definer(kind: type, name: str) -> int:
    """How far up the classes of ``kind`` a method is defined."""
    return next(distance for distance, base in enumerate(kind.__mro__) if name in vars(base))
