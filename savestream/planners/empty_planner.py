"""The planner of a load that has no target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from savestream.arrays import framework_adapter
from savestream.errors import PlanError
from savestream.planners.alignment import Alignment
from savestream.planners.load_planner import DefaultLoadPlanner
from savestream.planners.load_plans import create_read_items, value_read_item
from savestream.planners.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from savestream.planners.paths import Selection, SelectionKey, path_to_fqn
from savestream.planners.plan import LoadPlan, ReadItem
from savestream.planners.rebuilding import nest_picked, pick, rebuild_from_tree
from savestream.planners.trees import prune_tree

__all__ = ["EmptyStateDictLoadPlanner"]


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Builds the state from the checkpoint alone.

    Parameters
    ----------
    keys
        Load only the leaves at or beneath these names. A sequence or record of which only some elements are selected
        becomes a dict from position or field name to element.
    framework
        What arrays become: ``"numpy"``, ``"torch"`` or ``"jax"``. The caller must have imported it.
    **options
        Those of :class:`DefaultLoadPlanner`.
    """

    makes_its_own_state = True

    def __init__(
        self,
        keys: Iterable[SelectionKey] | None = None,
        *args: Any,
        framework: str = "numpy",
        **options: Any,
    ) -> None:
        super().__init__(*args, keys=keys, **options)
        self._framework = framework_adapter(framework)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the metadata; ``state_dict`` must be empty, and is filled where the state is a dict."""
        if state_dict:
            raise PlanError(f"{type(self).__name__} needs an empty state dict; use DefaultLoadPlanner to fill a target")
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._metadata()

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of all selected leaves into new arrays.

        Raises
        ------
        LoadMismatchError
            A key matches nothing.
        CorruptCheckpointError
            Stored chunks overlap or leave elements out.
        """
        selection = None if self.keys is None else Selection(self.keys)
        chosen = self._select(selection)
        self._raise_mismatch(Alignment(), selection, None)
        if chosen is not None:
            self._tree = prune_tree(self._tree, chosen)
        items: list[ReadItem] = []
        boxes: dict[int, list[ChunkStorageMetadata]] = {}  # arrays of equal description share their entry
        for name, entry in self._metadata().state_dict_metadata.items():
            if chosen is not None and name not in chosen:
                continue
            if isinstance(entry, TensorStorageMetadata):
                whole = boxes.get(id(entry))
                if whole is None:
                    whole = boxes[id(entry)] = [ChunkStorageMetadata((0,) * len(entry.size), entry.size)]
                items += create_read_items(name, entry, whole)
                self.state_dict[name] = self._allocate(entry.properties.dtype, entry.size)
            else:
                items.append(value_read_item(name))
        return LoadPlan(items)

    def check_values(self) -> None:
        """Check that selected elements of values exist."""
        found = Alignment()
        for name, inner in self._inside.items():
            for option in inner:
                try:
                    pick(self._loaded[name], option)
                except LookupError:
                    path = (*self._mappings[name], *option)
                    found.missing.append((path, path_to_fqn(path)))
        self._raise_mismatch(found, None, None)

    def finish_load(self) -> Any:
        """The state, with the recorded containers."""
        self.check_values()
        leaves = {**self._converted(), **self._loaded}
        for name, inner in self._inside.items():
            leaves[name] = nest_picked(self._loaded[name], inner)
        self.state_dict, self._loaded = leaves, {}
        built = rebuild_from_tree(self._tree, leaves, types=self.types)
        if type(built) is dict and type(self.original_state_dict) is dict:
            self.original_state_dict.update(built)
            return self.original_state_dict
        return built

    def _converted(self) -> dict[str, Any]:
        """The arrays, as those of the framework that was asked for."""
        if self._framework.framework == "numpy":
            return self.state_dict
        entries = self._metadata().state_dict_metadata
        return {
            name: self._framework.from_host(array, entry.properties.dtype)
            for name, array in self.state_dict.items()
            if isinstance(entry := entries[name], TensorStorageMetadata)
        }
