"""Reads a whole checkpoint and checks every digest, without placing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from savestream.arrays import dtype_from_name
from savestream.errors import CorruptCheckpointError
from savestream.events import Observer
from savestream.pipeline.open_checkpoint import OpenCheckpoint, VanishedDataError, following_overwrites
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_loader import part_ranges
from savestream.pipeline.reader import Destination, FrameRange, affected_keys, read_ranges
from savestream.pipeline.stage_clock import StageClock
from savestream.storage_backends import Location
from savestream.threads import run_in_worker

__all__ = ["VerifyReport", "verify_checkpoint", "verify_opened"]


class VerifyReport(msgspec.Struct, frozen=True):
    """What ``verify`` read and found in order."""

    location: str
    frames: int
    stored_bytes: int
    raw_bytes: int


async def verify_checkpoint(location: Location, options: LoadOptions, observer: Observer | None) -> VerifyReport:
    """Read everything and check every digest; one error lists all damage."""
    return await following_overwrites(location, lambda checkpoint: verify_opened(checkpoint, options, observer))


async def verify_opened(checkpoint: OpenCheckpoint, options: LoadOptions, observer: Observer | None) -> VerifyReport:
    """:func:`verify_checkpoint` for one whose root is at hand, committed or not."""
    problems: list[CorruptCheckpointError] = []
    for number in range(len(checkpoint.root.parts)):
        try:
            await checkpoint.fetch_parts([number])
        except CorruptCheckpointError as error:
            problems.append(error)
    ranges: list[FrameRange] = []
    targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]] = {}
    for number in checkpoint.parts:
        found, users, entries = await run_in_worker(_every_frame, checkpoint, number)
        targets[number] = (entries, users)
        sizes = await _check_objects(checkpoint, number, entries, users, problems)
        ranges += await run_in_worker(_within, checkpoint, found, sizes)
    await read_ranges(
        checkpoint,
        targets,
        ranges,
        StageClock(observer),
        threads=options.threads,
        verify=True,
        on_problem=problems.append,
    )
    if problems:
        raise _summary(problems)
    parts = checkpoint.parts.values()
    return VerifyReport(
        location=checkpoint.place,
        frames=sum(len(part.frames) for part in parts),
        stored_bytes=sum(int(part.frames.stored_length.sum()) for part in parts),
        raw_bytes=sum(entry.raw_bytes for entry in checkpoint.root.parts),
    )


def _summary(problems: Sequence[CorruptCheckpointError]) -> CorruptCheckpointError:
    """One error for all; it tells of vanished objects by its type, since they may have been replaced."""
    lines = [str(problem) for problem in problems]
    more = f" (and {len(lines) - 1} more; see the error's problems)" if len(lines) > 1 else ""
    vanished = any(isinstance(problem, VanishedDataError) for problem in problems)
    return (VanishedDataError if vanished else CorruptCheckpointError)(lines[0] + more, lines)


async def _check_objects(
    checkpoint: OpenCheckpoint,
    part: int,
    entries: Sequence[Destination],
    users: Mapping[int, Sequence[int]],
    problems: list[CorruptCheckpointError],
) -> list[int]:
    """The actual size of each data object of a part; one that is absent counts as empty."""
    frames = checkpoint.parts[part].frames
    sizes: list[int] = []
    for index, entry in enumerate(checkpoint.parts[part].objects):
        found = await checkpoint.location.backend.head(checkpoint.object_path(part, index))
        sizes.append(0 if found is None else found.size_bytes)
        place, affected = f"{checkpoint.place}/{entry.path}", affected_keys(frames, index, sizes[-1], entries, users)
        if found is None:
            problems.append(VanishedDataError(f"{place}: missing, although the manifest names it; {affected}"))
        elif sizes[-1] < entry.bytes:
            counts = f"{sizes[-1]} of {entry.bytes} bytes are there"
            problems.append(CorruptCheckpointError(f"{place}: truncated, {counts}; {affected}"))
        elif sizes[-1] > entry.bytes:
            counts = f"{sizes[-1]} bytes are there, {entry.bytes} were written"
            problems.append(CorruptCheckpointError(f"{place}: extended, {counts}; {affected}"))
    return sizes


def _within(checkpoint: OpenCheckpoint, ranges: Sequence[FrameRange], sizes: Sequence[int]) -> list[FrameRange]:
    """The ranges without the frames that reach beyond the end of their object."""
    kept = []
    for piece in ranges:
        frames = checkpoint.parts[piece.part].frames
        ends = {frame: int(frames.offset[frame] + frames.stored_length[frame]) for frame in piece.frames}
        there = [frame for frame in piece.frames if ends[frame] <= sizes[piece.object_index]]
        if there:
            nbytes = max(ends[frame] for frame in there) - piece.offset
            kept.append(FrameRange(piece.part, piece.object_index, piece.offset, nbytes, there))
    return kept


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
