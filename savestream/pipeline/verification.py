"""Reads a whole checkpoint and checks every digest, without placing anything."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from savestream.arrays import dtype_from_name
from savestream.errors import CorruptCheckpointError
from savestream.events import Observer
from savestream.pipeline.open_checkpoint import OpenCheckpoint, open_checkpoint
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_loader import part_ranges
from savestream.pipeline.reader import Destination, FrameRange, read_ranges
from savestream.pipeline.stage_clock import StageClock
from savestream.storage_backends import Location
from savestream.threads import run_in_worker

__all__ = ["VerifyReport", "verify_checkpoint"]


class VerifyReport(msgspec.Struct, frozen=True):
    """What ``verify`` read and found in order."""

    location: str
    frames: int
    stored_bytes: int
    raw_bytes: int


async def verify_checkpoint(location: Location, options: LoadOptions, observer: Observer | None) -> VerifyReport:
    """Read everything and check every digest; one error lists all damage."""
    checkpoint = await open_checkpoint(location)
    clock = StageClock(observer)
    await checkpoint.fetch_parts(range(len(checkpoint.root.parts)))
    problems: list[str] = []
    ranges: list[FrameRange] = []
    targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]] = {}
    for number in checkpoint.parts:
        found, users, entries = await run_in_worker(_every_frame, checkpoint, number)
        targets[number] = (entries, users)
        ranges.extend(found)
    await read_ranges(
        checkpoint,
        targets,
        ranges,
        clock,
        threads=options.threads,
        verify=True,
        on_problem=lambda error: problems.append(str(error)),
    )
    if problems:
        more = f" (and {len(problems) - 1} more; see the error's problems)" if len(problems) > 1 else ""
        raise CorruptCheckpointError(problems[0] + more, problems)
    parts = checkpoint.parts.values()
    return VerifyReport(
        location=checkpoint.place,
        frames=sum(len(part.frames) for part in parts),
        stored_bytes=sum(int(part.frames.stored_length.sum()) for part in parts),
        raw_bytes=sum(entry.raw_bytes for entry in checkpoint.root.parts),
    )


def _every_frame(
    checkpoint: OpenCheckpoint, part: int
) -> tuple[list[FrameRange], dict[int, list[int]], list[Destination]]:
    """All frames of a part, with the chunks in them for the messages; nothing is placed."""
    entries: list[Destination] = []
    for name in checkpoint.root.plan.tensor_names:
        for number in checkpoint.chunk_numbers(name):
            chunk = checkpoint.chunk_location(name, checkpoint.chunk_offsets(number))
            if chunk.part == part:
                nothing = np.empty(0, dtype_from_name(chunk.dtype))
                zeros = (0,) * len(chunk.sizes)
                entries.append(Destination(name, nothing, chunk, nothing.dtype, zeros, chunk.sizes, True))
    ranges, users = part_ranges(checkpoint, part, entries)
    return ranges, users, entries
