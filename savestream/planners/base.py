"""What a planner is."""

from __future__ import annotations

import abc
import io
from typing import Any

from savestream.planners.metadata import Metadata, StorageMeta
from savestream.planners.plan import LoadPlan, ReadItem, SavePlan, WriteItem

__all__ = ["LoadPlanner", "SavePlanner"]


class SavePlanner(abc.ABC):
    """Decides what a save writes. One planner serves one save at a time.

    The pipeline calls, on each rank: :meth:`set_up_planner`, :meth:`create_local_plan`; on the coordinator
    :meth:`create_global_plan` with all local plans; on each rank :meth:`finish_plan`; then :meth:`resolve_data` for
    every item of the finished plan; and :meth:`commit_plan` once the save is committed.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state to save."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Plan what this rank holds."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Turn the ranks' local plans (in the order of ranks) into final ones, and describe the checkpoint."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's final plan and return the one to write."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item: an array with exactly the item's box, or ``io.BytesIO``."""

    def plan_fingerprint(self) -> bytes | None:
        """Bytes that are equal for two states exactly when their plans are; None where plans must not be reused."""
        return None

    def commit_plan(self) -> None:  # noqa: B027 - most planners keep nothing
        """Called after the save was committed: only now may a plan be kept for reuse."""


class LoadPlanner(abc.ABC):
    """Decides what a load reads and where it goes. One planner serves one load.

    The pipeline calls, on each rank: :meth:`set_up_planner`, :meth:`create_local_plan`; on the coordinator
    :meth:`create_global_plan`; on each rank :meth:`finish_plan`; then :meth:`load_bytes` for values, and
    :meth:`resolve_tensor` and :meth:`commit_tensor` for boxes of arrays.
    """

    @abc.abstractmethod
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the target and what the checkpoint holds."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads; raises LoadMismatchError, listing every difference, before anything is touched."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Adjust the ranks' plans (in the order of ranks)."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take this rank's plan back and return the one to execute."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the bytes of a value."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A stream to read a value's bytes into; planners that want to provide one override this."""
        raise NotImplementedError(f"{type(self).__name__} takes bytes through load_bytes ({read_item.dest_index.fqn})")

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> Any:
        """A writable array view with exactly the item's box of the target."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Called when the array of :meth:`resolve_tensor` has been filled."""
