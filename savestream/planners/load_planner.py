"""The planners that loads use unless another is given."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.errors import CorruptCheckpointError, LoadMismatchError, PlanError
from savestream.planners.alignment import UNKNOWN, Alignment, align_state_dict, compare_value
from savestream.planners.base import LoadPlanner
from savestream.planners.load_checks import LoadRequest, TargetChecker
from savestream.planners.load_plans import box_of, create_default_global_load_plan, plan_reads
from savestream.planners.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    PlannerData,
    TensorStorageMetadata,
)
from savestream.planners.open_targets import Allocate, OpenShards, OpenTarget, allocate_plain, tell_changed
from savestream.planners.paths import Path, Selection, SelectionKey, path_to_fqn
from savestream.planners.plan import LoadPlan, ReadItem
from savestream.planners.rebuilding import Filled, merge_value, pick, rebuild_into, replace_at
from savestream.planners.scalars import OpenNumber, number_type
from savestream.planners.sharding import is_sharded, shard_array
from savestream.planners.structure import LeafNode, MappingNode, StateTree
from savestream.planners.trees import flat_keys, tree_from_names, tree_mappings
from savestream.planners.value_decoding import decode_value, decode_value_bytes, unpickle_object

__all__ = ["DefaultLoadPlanner", "create_default_local_load_plan"]


class DefaultLoadPlanner(LoadPlanner):
    """Fills a target state from a checkpoint.

    Parameters
    ----------
    flatten_state_dict
        Match leaves by their path. Otherwise the target is a dict whose str keys are the names as they stand.
    flatten_sharded_tensors
        Accepted for compatibility; sharded targets are filled shard by shard either way.
    allow_partial_load
        Leaves that only one side has are no error: what the checkpoint lacks keeps the target's value, what the target
        lacks is ignored. A different shape always is an error.
    cast
        Convert between numeric dtypes instead of refusing another one.
    keys
        Load only the leaves at or beneath these names (fqns, or tuples of raw parts); all else stays as it is.
    types
        Classes that may be rebuilt where the target gives none.
    allow_pickle
        Unpickle what was stored so; this executes code from the file.
    allocate
        Makes the array for a dtype name and a shape, where a target cannot be filled in its own memory.
    """

    makes_its_own_state = False  # whether it is set up with an empty state, which it fills with new arrays

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        cast: bool = False,
        keys: Iterable[SelectionKey] | None = None,
        types: Sequence[type] = (),
        allow_pickle: bool = False,
        allocate: Allocate = allocate_plain,
    ) -> None:
        del flatten_sharded_tensors
        self.flatten_state_dict = flatten_state_dict
        self.allow_partial_load = allow_partial_load
        self.cast = cast
        self.keys = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        self.types = tuple(types)
        self.allow_pickle = allow_pickle
        self.is_coordinator = False
        self.state_dict: dict[str, Any] = {}  # what is filled, by name, once the plan is made; the leaves at the end
        self.original_state_dict: Any = None
        self.metadata: Metadata | None = None
        self._tree: StateTree = MappingNode("dict", (), ())
        self._mappings: Mapping[str, Path] = {}
        self._values: Mapping[str, object] = {}
        self._loaded: dict[str, Any] = {}
        self._compared: set[str] = set()
        self._allocate = allocate
        self._open: dict[str, OpenTarget | OpenShards | OpenNumber] = {}
        self._in_place: dict[str, Any] = {}  # leaves of which state_dict has numpy views
        self._is_filling = False
        self._inside: dict[str, list[Path]] = {}  # value leaves of which only elements are selected

    # --- planning ---

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the target and the checkpoint's metadata."""
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.state_dict = {}
        self._loaded, self._inside, self._open, self._in_place = {}, {}, {}, {}
        self._compared = set()
        self._is_filling = False
        if metadata is None:
            return
        data = metadata.planner_data if isinstance(metadata.planner_data, PlannerData) else PlannerData()
        names = list(metadata.state_dict_metadata)
        if not self.flatten_state_dict:
            self._tree = MappingNode("dict", flat_keys(names, data.mappings), tuple(map(LeafNode, names)))
        else:
            self._tree = data.tree if data.tree is not None else tree_from_names(names)
        same = self.flatten_state_dict and data.tree is not None and data.mappings
        self._mappings = data.mappings if same else tree_mappings(self._tree)
        self._values = data.values
        if absent := [name for name in self._mappings if name not in metadata.state_dict_metadata]:
            raise CorruptCheckpointError(
                f"the recorded structure names {absent[0]}, which the checkpoint does not hold"
            )

    def create_local_plan(self) -> LoadPlan:
        """Match target and checkpoint, and plan the reads.

        Raises
        ------
        LoadMismatchError
            Everything that differs, and every target that cannot be filled; nothing has been touched.
        CorruptCheckpointError
            Stored chunks overlap or leave elements out.
        """
        metadata = self._metadata()
        selection = None if self.keys is None else Selection(self.keys)
        chosen = self._select(selection)
        alignment = self._align()
        targets = {name: leaf for name, leaf in alignment.targets.items() if chosen is None or name in chosen}
        checker = TargetChecker(LoadRequest(metadata, self.cast))
        checker.check(targets)
        self._raise_mismatch(alignment, selection, checker)
        self._open = checker.open_targets
        self._in_place = {name: targets[name] for name in checker.memories}
        opened = {name: target.open(self._allocate) for name, target in self._open.items()}
        self.state_dict = {**targets, **checker.memories, **opened}
        return LoadPlan(plan_reads(metadata, targets, checker.boxes, checker.repeated))

    def _select(self, selection: Selection | None) -> set[str] | None:
        """Names at or beneath the keys, and the values into which keys lead."""
        if selection is None:
            return None
        chosen = set()
        entries = self._metadata().state_dict_metadata
        for name, path in self._mappings.items():
            whole = selection.matches(path)
            if isinstance(entries[name], BytesStorageMetadata) and (inner := selection.inside(path)):
                existing = self._existing(name, path, inner, selection)
                if not whole:
                    self._inside[name] = existing
                chosen.add(name)
            elif whole:
                chosen.add(name)
        return chosen

    def _existing(self, name: str, path: Path, inner: list[Path], selection: Selection) -> list[Path]:
        """Those of the paths into a value that exist in it; all of them where it has not been read yet."""
        value = self._value_of(name)
        found = []
        for option in inner:
            try:
                if value is not UNKNOWN:
                    pick(value, option)
            except LookupError:
                continue
            found.append(option)
            selection.mark((*path, *option))
        return found

    def _align(self) -> Alignment:
        entries = self._metadata().state_dict_metadata
        return align_state_dict(
            self.original_state_dict,
            self._tree,
            is_value=lambda name: isinstance(entries[name], BytesStorageMetadata),
            value_of=self._compare_now,
            number_of=self._number_of,
        )

    def _number_of(self, name: str) -> type | None:
        entry = self._metadata().state_dict_metadata[name]
        return number_type(entry.properties.dtype, entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def _compare_now(self, name: str) -> Any:
        value = self._value_of(name)
        if value is not UNKNOWN:
            self._compared.add(name)
        return value

    def _value_of(self, name: str) -> Any:
        """A value that is known before anything is read."""
        entry = self._metadata().state_dict_metadata[name]
        if name not in self._values or not isinstance(entry, BytesStorageMetadata) or entry.encoding != "json":
            return UNKNOWN
        encoded = self._values[name]
        if isinstance(encoded, bytes | bytearray | memoryview | msgspec.Raw):
            return decode_value_bytes(bytes(encoded), types=self.types, allow_pickle=self.allow_pickle, key=name)
        return decode_value(encoded, types=self.types, allow_pickle=self.allow_pickle, key=name)

    def _raise_mismatch(self, found: Alignment, selection: Selection | None, checker: TargetChecker | None) -> None:
        def chosen(entries: Iterable[tuple[Path, str]]) -> list[str]:
            return list(dict.fromkeys(text for path, text in entries if selection is None or selection.matches(path)))

        strict = not self.allow_partial_load
        missing = chosen(found.missing) if strict else []
        unexpected = chosen(found.unexpected) if strict else []
        if selection is not None and strict:
            missing += [name for name in selection.unmatched() if name not in missing]
        problems = chosen(found.problems)
        shapes, dtypes = ([], []) if checker is None else (checker.shape_mismatches, checker.dtype_mismatches)
        problems += [] if checker is None else checker.problems
        if missing or unexpected or shapes or dtypes or problems:
            raise LoadMismatchError(
                missing=missing,
                unexpected=unexpected,
                shape_mismatches=shapes,
                dtype_mismatches=dtypes,
                problems=problems,
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it planned."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """The plan to execute."""
        return new_plan

    # --- data ---

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a value and keep it until :meth:`finish_load`.

        Raises
        ------
        CorruptCheckpointError
            The bytes are no encoded value.
        UnsafeObjectError
            The value is pickled, and the planner was not told ``allow_pickle=True``.
        """
        name = read_item.storage_index.fqn
        entry = self._metadata().state_dict_metadata.get(name)
        encoding = entry.encoding if isinstance(entry, BytesStorageMetadata) else "json"
        data = value.getvalue()
        if encoding in ("json", "stored-json"):
            decoded = decode_value_bytes(data, types=self.types, allow_pickle=self.allow_pickle, key=name)
        elif encoding == "pickle":
            decoded = unpickle_object(data, allow_pickle=self.allow_pickle, key=name)
        else:
            decoded = data
        self._loaded[read_item.dest_index.fqn] = decoded

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        """The target's array, or shard of one, that an index names.

        Arrays of other frameworks than numpy are named by what is filled in their place: a numpy view of their memory,
        or a buffer.
        """
        try:
            leaf = self.state_dict[index.fqn]
        except KeyError:
            raise PlanError(f"{index.fqn}: the plan names a leaf that the target does not have") from None
        if index.offset is not None and is_sharded(leaf):
            return shard_array(leaf, index)
        return leaf

    def transform_tensor(self, read_item: ReadItem, tensor: Any) -> Any:
        """What is filled instead of the target's box.

        A subclass may return another writable array of the box's shape, numpy's or another framework's. Without
        ``cast`` its dtype is the stored one.
        """
        del read_item
        return tensor

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """A writable view of exactly the box to fill: numpy's, unless a subclass looks up or returns another array."""
        return self.transform_tensor(read_item, box_of(self.lookup_tensor(read_item.dest_index), read_item))

    def resolve_tensors(self, read_items: Iterable[ReadItem]) -> list[Any]:
        """:meth:`resolve_tensor` of many items, quick where nothing is overridden and whole arrays are filled."""
        kind = type(self)
        names = ("resolve_tensor", "lookup_tensor", "transform_tensor")
        if any(getattr(kind, name) is not getattr(DefaultLoadPlanner, name) for name in names):
            return [self.resolve_tensor(item) for item in read_items]
        leaves = self.state_dict
        found = []
        for item in read_items:
            leaf = leaves.get(item.dest_index.fqn)
            whole = type(leaf) is np.ndarray and leaf.shape == item.lengths
            found.append(leaf if whole else self.resolve_tensor(item))
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Nothing is left to do for one box; whole leaves are completed by :meth:`finish_load`."""
        del read_item, tensor

    def check_values(self) -> None:
        """Compare the insides of values that were not known when the plan was made.

        Call it when all values have been loaded and before arrays are filled; :meth:`finish_load` calls it too.

        Raises
        ------
        LoadMismatchError
            Everything that differs inside plain values.
        """
        found = Alignment()
        for name, value in self._loaded.items():
            if name in self._compared or name in self._inside or name not in self.state_dict:
                continue
            self._compared.add(name)
            inner = compare_value(self.state_dict[name], value, self._mappings[name])
            for entries, more in (
                (found.missing, inner.missing),
                (found.unexpected, inner.unexpected),
                (found.problems, inner.problems),
            ):
                entries += more
        self._check_inside(found)
        self._raise_mismatch(found, None, None)

    def begin_filling(self) -> None:
        """Tell frameworks which arrays are filled in their own memory; once for each set-up.

        Call it before the first byte is placed, since a load that fails or is cancelled leaves changed arrays behind;
        :meth:`finish_load` calls it too.
        """
        if self._is_filling:
            return
        self._is_filling = True
        shards = [target for target in self._open.values() if isinstance(target, OpenShards)]
        tell_changed([*self._in_place.values(), *(array for target in shards for array in target.filled_in_place)])

    def _check_inside(self, found: Alignment) -> None:
        for name, inner in self._inside.items():
            for option in inner:
                path = (*self._mappings[name], *option)
                try:
                    saved, target = pick(self._loaded[name], option), pick(self.state_dict[name], option)
                except LookupError:
                    found.missing.append((path, path_to_fqn(path)))
                else:
                    found.problems += compare_value(target, saved, path).problems

    def finish_load(self) -> Any:
        """Put the loaded values into the target and return it; complete the arrays, whose content is read already.

        Raises
        ------
        LoadMismatchError
            As :meth:`check_values`; no value has been replaced.
        """
        self.check_values()
        leaves = {name: leaf for name, leaf in self.state_dict.items() if name not in self._loaded}
        self.begin_filling()
        leaves.update(self._in_place)
        leaves.update({name: target.close() for name, target in self._open.items()})
        filled: Filled = {}
        for name, value in self._loaded.items():
            target = self.state_dict[name]
            if name in self._inside:
                for option in self._inside[name]:
                    target = replace_at(target, option, pick(value, option))
                leaves[name] = target
            else:
                leaves[name] = merge_value(target, value, filled)
        self.state_dict = leaves  # views of memory that its owner may free stay nowhere
        self._loaded, self._open, self._in_place = {}, {}, {}
        return rebuild_into(self.original_state_dict, self._tree, leaves)

    def release_target(self) -> None:
        """Let go of the target and of all views of its memory; the planner can be set up again."""
        self.original_state_dict = None
        self.state_dict = {}
        self._loaded, self._inside, self._open, self._in_place = {}, {}, {}, {}

    def _metadata(self) -> Metadata:
        if self.metadata is None:
            raise PlanError(f"{type(self).__name__} needs the checkpoint's metadata; pass it to set_up_planner")
        return self.metadata


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """The plan that fills a flat target: a dict from name to array, sharded array or plain value."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict)
    planner.set_up_planner(state_dict, metadata)
    return planner.create_local_plan()
