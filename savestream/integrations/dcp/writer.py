"""The hooks that torch.distributed.checkpoint calls on a storage writer.

All hooks of one save run in one thread, whichever that is; what a save needs between them is kept by thread, so that
several background saves may share a writer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import msgspec

from savestream.errors import SaveTimeoutError, UsageError
from savestream.integrations.dcp import plan_cache
from savestream.integrations.dcp.attempts import Attempt
from savestream.integrations.dcp.composition import compose, correct_metadata
from savestream.integrations.dcp.destination import Destination
from savestream.integrations.dcp.frameworks import checkpoint_module, run_on_engine, torch_module
from savestream.integrations.dcp.items import RankItems
from savestream.integrations.dcp.joining import JoinsTorch
from savestream.integrations.dcp.nesting import DcpPath
from savestream.integrations.dcp.plan_checks import refuse_incomplete_plans, refuse_unsafe_planner_data
from savestream.integrations.dcp.results import RankPart, WrittenItem
from savestream.integrations.dcp.staging import stage_state
from savestream.integrations.dcp.tickets import SaveTicket, open_inbox
from savestream.pipeline.arguments import check_flag, check_kind
from savestream.pipeline.commit import describe
from savestream.pipeline.index_part import PartEntry
from savestream.pipeline.options import SaveOptions
from savestream.pipeline.rank_commit import examine_destination
from savestream.pipeline.rank_data import RankChunks, RankData
from savestream.pipeline.stage_clock import StageClock
from savestream.planners.metadata import Shape
from savestream.storage_backends import Location, Place

__all__ = ["StorageWriter"]


class StorageWriter(JoinsTorch):
    """Writes checkpoints for ``torch.distributed.checkpoint``.

    Parameters
    ----------
    destination
        The checkpoint's place: a path, a URL or ``(backend, path)``; or None, where torch's ``checkpoint_id=`` says it.
        With ``(backend, path)`` a ``checkpoint_id`` is a path in that backend.
    overwrite
        Replace a checkpoint that is there; as in torch's own writers that is the default. The old one stays loadable
        until the new one is durable, and where a save fails. With False the save fails before anything is staged.
    options
        Compression, memory, threads. ``timeout_seconds`` bounds the writing of one rank's data.

    Notes
    -----
    Nothing is visible before ``finish`` on the coordinator has found that every planned item was written exactly once.
    A failure on any rank reaches every rank through torch's own exchange, and nothing is published. What a failed save
    wrote is removed at the writer's next save, or when nothing refers to the writer any more; torch tells no storage
    writer that a save has failed on another rank.

    Tensors are stored as they are found, also where a cached plan describes an earlier state: the metadata that
    ``save`` returns then say what was stored. A writer can be pickled, as ``async_save`` with a process does, unless
    its place lies in this process's memory. ``use_collectives=False`` with several ranks is refused.
    """

    torch_class = "StorageWriter"

    def __init__(
        self, destination: Place | None = None, *, overwrite: bool = True, options: SaveOptions | None = None
    ) -> None:
        check_flag("overwrite", overwrite)
        check_kind("options", options, SaveOptions)
        self._destination = Destination(destination)
        self._overwrite = overwrite
        self._options = SaveOptions() if options is None else options
        self._attempts = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_attempts"}
        options = self._options
        if options.staging_pool is not None:  # a pool is this process's memory; its limit still holds
            limit = options.staging_limit_bytes
            state["_options"] = msgspec.structs.replace(options, staging_pool=None, memory_budget_bytes=limit)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _attempts=threading.local())

    # What torch's AsyncStager protocol asks for: async_save then copies the state with this.
    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        """A copy of the state, complete on return."""
        return stage_state(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""

    @property
    def checkpoint_id(self) -> str | None:
        """The place of the checkpoint."""
        return self._destination.text

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether savestream can save there."""
        return Destination.accepts(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, to another place if one is given."""
        if checkpoint_id is not None:
            self._destination.reset(checkpoint_id)

    def storage_meta(self) -> Any:
        """What planners learn: the place. The save's id is not known yet to all ranks."""
        return checkpoint_module("metadata").StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; the parameter called ``kwargs`` makes torch pass ``rank`` and ``use_collectives``."""
        del args
        previous = getattr(self._attempts, "current", None)
        if previous is not None:
            previous.give_up()
        rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            _refuse_many_ranks(rank)
        self._attempts.current = Attempt(
            self._destination.locate(), open_inbox(), is_coordinator=is_coordinator, rank=rank
        )

    @property
    def _attempt(self) -> Attempt:
        attempt: Attempt | None = getattr(self._attempts, "current", None)
        if attempt is None:
            raise UsageError("set_up_storage_writer has not been called in this thread; torch's save does that")
        return attempt

    def prepare_local_plan(self, plan: Any) -> Any:
        """Look at the destination, on the coordinator, before anything is written."""
        attempt = self._attempt
        attempt.sent_plan = plan
        if attempt.is_coordinator:
            attempt.standing = run_on_engine(
                lambda: examine_destination(attempt.location, overwrite=self._overwrite), "examining the destination"
            )
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """On the coordinator: send the save's id with the plans."""
        attempt = self._attempt
        attempt.world_size = len(plans)
        if all(getattr(plan, "usable", True) for plan in plans):
            attempt.owners = {
                (item.index.fqn, _offsets(item)): rank for rank, plan in enumerate(plans) for item in plan.items
            }
        refuse_incomplete_plans(plans)
        attempt.may_leave_data()  # of other ranks, whatever becomes of this one
        attempt.checks_keys = plan_cache.begin_check(plans)
        return [
            replace(plan, storage_data=SaveTicket(attempt.save_id, rank, len(plans), attempt.checks_keys))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's items; they are durable on return. An error is raised, not put in the future.

        A future of torch's that holds an exception is never freed once the exception has been raised, and neither are
        the frames that it came through, which hold the whole state. And waiting here, unlike in the future's ``wait``,
        can be interrupted.
        """
        future = torch_module().futures.Future()
        future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: Any, planner: Any) -> list[Any]:
        attempt = self._attempt
        save_id, rank = attempt.identify(plan)
        if attempt.is_coordinator:
            refuse_unsafe_planner_data(planner)
        left = plan_cache.keys_left_to_others(attempt.sent_plan, plan, planner, is_asked=attempt.checks_keys)
        attempt.sent_plan = None
        return plan_cache.RankResults(self._write_items(plan, planner, save_id, rank) if plan.items else [], left)

    def _write_items(self, plan: Any, planner: Any, save_id: str, rank: int) -> list[Any]:
        attempt = self._attempt
        items = RankItems(plan, planner)
        items.settle_devices()
        chunks = items.chunks()
        clock = StageClock()
        data = RankData(attempt.location, save_id, rank, self._options, clock, mode="stream", on_staged=lambda: None)
        entry = run_on_engine(lambda: self._write_rank(data, chunks, attempt.location), "writing a rank's data")
        part = RankPart(save_id, entry, _changed_paths(plan, planner))
        result = checkpoint_module("storage").WriteResult
        return [
            result(
                index=item.index,
                size_in_bytes=item.nbytes,
                storage_data=WrittenItem(
                    part, item.offsets, item.sizes, item.dtype, item.requires_grad, item.raw_offset
                ),
            )
            for item in items.described()
        ]

    async def _write_rank(self, data: RankData, chunks: RankChunks, location: Location) -> PartEntry:
        timeout = self._options.timeout_seconds
        with anyio.move_on_after(timeout):
            return await data.put_index(await data.write(chunks))
        raise SaveTimeoutError(
            f"{describe(location)}: writing took longer than timeout_seconds={timeout} and was abandoned; nothing "
            "became visible"
        )

    def finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
        """On the coordinator: check that everything was written exactly once, and publish the checkpoint."""
        attempt = self._attempt
        try:
            plan_cache.refuse_lost_keys(metadata, results, is_asked=attempt.checks_keys)
            composition = compose(
                metadata, results, attempt.owners, save_id=attempt.save_id, world_size=attempt.world_size
            )
        except BaseException:
            attempt.give_up()  # all ranks have written
            raise
        attempt.owners = {}
        attempt.commit(composition, overwrite=self._overwrite)
        meta = checkpoint_module("metadata").StorageMeta(checkpoint_id=self.checkpoint_id, save_id=attempt.save_id)
        correct_metadata(metadata, composition, meta)


def _offsets(item: Any) -> Shape | None:
    return None if item.tensor_data is None else tuple(item.tensor_data.chunk.offsets)


def _changed_paths(plan: Any, planner: Any) -> dict[str, DcpPath]:
    """Paths of the state's leaves that differ from those in the plan, which then is a cached one."""
    actual = getattr(planner, "mappings", None)
    planned = plan.planner_data
    if not getattr(planner, "_enable_plan_caching", False):
        return {}
    if actual is planned or not isinstance(actual, dict) or not isinstance(planned, dict):
        return {}
    return {name: path for name, path in actual.items() if planned.get(name) != path}


def _refuse_many_ranks(rank: int | None) -> None:
    distributed = torch_module().distributed
    if rank or (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        raise UsageError(
            "use_collectives=False with several ranks would make a checkpoint for each rank, none of which could be "
            "loaded as a whole; leave it at True, or pass no_dist=True on a rank that saves alone to a place of its own"
        )
