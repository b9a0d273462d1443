"""The hooks that torch.distributed.checkpoint calls on a storage reader."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from savestream.errors import CoordinationError
from savestream.integrations.dcp.destination import Destination
from savestream.integrations.dcp.frameworks import checkpoint_module, run_on_engine, torch_module
from savestream.integrations.dcp.joining import JoinsTorch
from savestream.integrations.dcp.reading import ReadableCheckpoint, StoredValue, open_readable, read_opened
from savestream.integrations.dcp.targets import (
    Target,
    batches,
    check_dtypes,
    examined_targets,
    gives_the_state,
    rounds,
)
from savestream.pipeline.arguments import check_flag, check_kind
from savestream.pipeline.commit import new_save_id
from savestream.pipeline.open_checkpoint import following_overwrites
from savestream.pipeline.options import LoadOptions
from savestream.storage_backends import Place

__all__ = ["StorageReader"]

_VALUE_BYTES = 64 * 1024 * 1024


class StorageReader(JoinsTorch):
    """Reads checkpoints for ``torch.distributed.checkpoint``, whether torch or savestream saved them.

    Parameters
    ----------
    source
        The checkpoint's place: a path, a URL or ``(backend, path)``; or None, where torch's ``checkpoint_id=`` says it.
    cast
        Convert to the target's dtype, as torch does silently. With False another dtype is refused before tensors of it
        are touched.
    options
        Threads, digests, and the classes that values may be rebuilt from.

    Notes
    -----
    Only the frames that hold a wanted part of a tensor are read, straight into the target where that has its own memory
    in the stored form. A target whose elements overlap each other is refused. Nothing is unpickled here; torch's own
    planner unpickles values (``torch.load(weights_only=False)``), as it does with its own checkpoints.
    """

    torch_class = "StorageReader"

    def __init__(self, source: Place | None = None, *, cast: bool = True, options: LoadOptions | None = None) -> None:
        check_flag("cast", cast)
        check_kind("options", options, LoadOptions)
        self._source = Destination(source)
        self._cast = cast
        self._options = LoadOptions() if options is None else options
        self._own = threading.local()  # each thread's load is of the checkpoint that it opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _own=threading.local())

    @property
    def checkpoint_id(self) -> str | None:
        """The place of the checkpoint."""
        return self._source.text

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether savestream can load from there."""
        return Destination.accepts(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, from another place if one is given."""
        self._own.readable = None
        if checkpoint_id is not None:
            self._source.reset(checkpoint_id)

    # Not called kwargs: torch would take that as a promise of one metadata file for each rank.
    def read_metadata(self, *args: Any, **options: Any) -> Any:
        """Read the manifest. Nothing of it is unpickled."""
        del args, options
        location = self._source.locate()
        self._own.readable = readable = run_on_engine(
            lambda: following_overwrites(location, lambda found: open_readable(found, self._options)),
            "reading the metadata",
        )
        metadata = readable.torch_metadata()
        metadata.storage_meta.load_id = new_save_id()
        return metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing is left to do: the metadata are those that this reader read."""
        del metadata, is_coordinator, args, options

    @property
    def _opened(self) -> ReadableCheckpoint:
        if getattr(self._own, "readable", None) is None:
            self.read_metadata()
        readable: ReadableCheckpoint = self._own.readable
        return readable

    def prepare_local_plan(self, plan: Any) -> Any:
        """Tell the coordinator which save this rank reads."""
        return replace(plan, storage_data=self._opened.save_id)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """On the coordinator: all ranks must have read the same save, which an overwrite between them would spoil."""
        seen = {plan.storage_data: rank for rank, plan in enumerate(plans) if plan.storage_data is not None}
        if len(seen) > 1:
            listed = ", ".join(f"{save_id} on rank {rank}" for save_id, rank in seen.items())
            raise CoordinationError(
                f"{self._opened.checkpoint.place}: ranks see different saves there ({listed}); it was overwritten "
                "while they began to load, or they look at different places. Load again"
            )
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read everything that the plan asks for; the planner is called in this thread only.

        An error is raised, not put in the future: a future of torch's that holds one is never freed.
        """
        self._read(plan, planner)
        future = torch_module().futures.Future()
        future.set_result(None)
        return future

    def _read(self, plan: Any, planner: Any) -> None:
        readable = self._opened
        if plan.storage_data not in (None, readable.save_id):
            raise CoordinationError(
                f"{readable.checkpoint.place}: the plan was made for save {plan.storage_data}, and this thread has "
                f"opened save {readable.save_id}; nothing was read. Call the reader's hooks in the thread that loads"
            )
        tensor_type = checkpoint_module("planner").LoadItemType.TENSOR
        values = [item for item in plan.items if item.type is not tensor_type]
        tensors = [item for item in plan.items if item.type is tensor_type]
        # Whatever can be refused is refused before the state changes.
        for item in values:
            readable.check_value(item.storage_index.fqn)
        targets: Iterable[Target] = examined_targets(tensors, planner, readable)
        own_state = gives_the_state(planner)
        if own_state:  # else a target may take memory, and is made when it is filled
            targets = list(targets)
            if not self._cast:
                check_dtypes(targets)
            self._load_values(values, planner, readable)
        for batch in batches(targets, own_state=own_state):
            if not self._cast:
                check_dtypes(batch)
            for group in rounds(batch):
                self._fill(group, planner, readable)
        if not own_state:
            self._load_values(values, planner, readable)

    def _load_values(self, items: Sequence[Any], planner: Any, readable: ReadableCheckpoint) -> None:
        for batch in _value_batches(items, readable):
            reads = [read for _, value in batch for read in value.reads]
            if reads:
                run_on_engine(
                    functools.partial(read_opened, readable.checkpoint, reads, self._options), "reading values"
                )
            for item, value in batch:
                planner.load_bytes(item, readable.stream(value))

    def _fill(self, targets: Sequence[Target], planner: Any, readable: ReadableCheckpoint) -> None:
        reads = [target.read() for target in targets]
        run_on_engine(lambda: read_opened(readable.checkpoint, reads, self._options), "reading tensors")
        for target in targets:
            target.complete()
            planner.commit_tensor(target.item, target.tensor)


def _value_batches(items: Sequence[Any], readable: ReadableCheckpoint) -> Iterator[list[tuple[Any, StoredValue]]]:
    """Items with their values, as many at once as hold some 64 MiB: many small ones lie in one frame."""
    batch: list[tuple[Any, StoredValue]] = []
    held_bytes = 0
    for item in items:
        value = readable.stored_value(item.storage_index.fqn)
        batch.append((item, value))
        held_bytes += value.nbytes
        if held_bytes > _VALUE_BYTES:
            yield batch
            batch, held_bytes = [], 0
    if batch:
        yield batch
