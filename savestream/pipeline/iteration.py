"""Arrays one after the other, for work on checkpoints that do not fit into memory."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from savestream.arrays import HostArray, dtype_from_name
from savestream.errors import CheckpointNotFoundError, LoadMismatchError
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.open_checkpoint import OpenCheckpoint, VanishedDataError, metadata_of, open_checkpoint
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_loader import part_ranges
from savestream.pipeline.reader import Destination, destination, read_ranges
from savestream.pipeline.stage_clock import StageClock
from savestream.planners.geometry import narrow
from savestream.planners.metadata import Metadata, TensorStorageMetadata
from savestream.planners.paths import select_names
from savestream.storage_backends import Location
from savestream.threads import run_in_worker

__all__ = ["Runner", "iterate_arrays"]

_ITERATION_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")


class Runner:
    """Runs one step of the iteration; the session runs it on the engine."""

    async def __call__(self, step: Callable[[], Awaitable[Result]]) -> Result:
        return await step()


async def iterate_arrays(
    location: Location, keys: Sequence[str | tuple[object, ...]] | None, options: LoadOptions, run: Runner
) -> AsyncIterator[tuple[str, HostArray]]:
    """Yield arrays one by one, reading at most 64 MiB of small ones (or one large one) ahead.

    No task is alive while the consumer holds an array, so leaving the iteration early leaves nothing behind.
    """
    checkpoint, metadata = await run(lambda: _open(location))
    tensors = {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    if keys is not None:
        selected, unmatched = select_names(list(metadata.state_dict_metadata), keys)
        if unmatched:
            raise LoadMismatchError(missing=[str(key) for key in unmatched], source=checkpoint.place)
        tensors = {name: tensors[name] for name in selected if name in tensors}
    for batch in _batches(tensors):
        try:
            arrays = await run(functools.partial(_read_batch, checkpoint, tensors, batch, options))
        except VanishedDataError as error:
            await run(functools.partial(_explain_change, checkpoint, error))
            raise
        for name in batch:
            yield name, arrays.pop(name)


async def _explain_change(checkpoint: OpenCheckpoint, error: VanishedDataError) -> None:
    """Raise what says why data vanished, if the checkpoint is not the same any more."""
    try:
        now = (await open_checkpoint(checkpoint.location)).root.checkpoint_id
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"{checkpoint.place}: it was deleted while it was iterated over; what came so far is sound"
        ) from error
    if now != checkpoint.root.checkpoint_id:
        raise VanishedDataError(
            f"{checkpoint.place}: it was overwritten while it was iterated over; what came so far belongs to the "
            "replaced checkpoint, so start the iteration again"
        ) from error


async def _open(location: Location) -> tuple[OpenCheckpoint, Metadata]:
    checkpoint = await open_checkpoint(location)
    return checkpoint, await run_in_worker(metadata_of, checkpoint)


def _batches(tensors: Mapping[str, TensorStorageMetadata]) -> list[list[str]]:
    batches: list[list[str]] = []
    room = 0
    for name, entry in tensors.items():
        nbytes = math.prod(entry.size) * dtype_from_name(entry.properties.dtype).itemsize
        if not batches or nbytes > room:
            batches.append([])
            room = _ITERATION_BYTES
        batches[-1].append(name)
        room -= nbytes
    return batches


async def _read_batch(
    checkpoint: OpenCheckpoint,
    tensors: Mapping[str, TensorStorageMetadata],
    names: Sequence[str],
    options: LoadOptions,
) -> dict[str, HostArray]:
    await checkpoint.fetch_parts(checkpoint.parts_of(names))
    arrays = {
        name: allocate_array(dtype_from_name(tensors[name].properties.dtype), tensors[name].size) for name in names
    }
    targets: dict[int, list[Destination]] = {}
    for name in names:
        for box in tensors[name].chunks:
            chunk = checkpoint.chunk_location(name, box.offsets)
            view = narrow(arrays[name], box.offsets, box.sizes)
            entry = destination(name, view, chunk, (0,) * len(box.sizes), box.sizes)
            targets.setdefault(chunk.part, []).append(entry)
    planned = {part: (entries, *part_ranges(checkpoint, part, entries)) for part, entries in targets.items()}
    await read_ranges(
        checkpoint,
        {part: (entries, users) for part, (entries, _, users) in planned.items()},
        [piece for _, ranges, _ in planned.values() for piece in ranges],
        StageClock(),
        threads=options.threads,
        verify=options.verify_digests,
    )
    return arrays
