"""Reads boxes of stored arrays into memory that the caller gives; only the frames that hold them are read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from savestream.arrays import HostArray
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_loader import part_ranges
from savestream.pipeline.reader import Destination, FrameRange, destination, read_ranges
from savestream.pipeline.stage_clock import StageClock
from savestream.threads import run_in_worker

__all__ = ["BoxRead", "read_boxes"]


class BoxRead(msgspec.Struct, gc=False):
    """``lengths`` elements from ``offsets`` of a stored chunk, and the array of that shape that takes them.

    ``key`` names it in errors. An array of another dtype than the stored one makes the elements be cast.
    """

    key: str
    chunk: ChunkLocation
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    array: HostArray


async def read_boxes(checkpoint: OpenCheckpoint, reads: Sequence[BoxRead], options: LoadOptions) -> None:
    """Fill every array. Arrays must not share memory, since they are filled concurrently.

    Raises
    ------
    CorruptCheckpointError
        Something is damaged; the arrays have undefined content.
    """
    await checkpoint.fetch_parts({read.chunk.part for read in reads})
    targets, ranges = await run_in_worker(_plan, checkpoint, reads)
    await read_ranges(checkpoint, targets, ranges, StageClock(), threads=options.threads, verify=options.verify_digests)


_Targets = dict[int, tuple[Sequence[Destination], dict[int, list[int]]]]


def _plan(checkpoint: OpenCheckpoint, reads: Sequence[BoxRead]) -> tuple[_Targets, list[FrameRange]]:
    by_part: dict[int, list[Destination]] = {}
    for read in reads:
        entry = destination(read.key, read.array, read.chunk, read.offsets, read.lengths)
        by_part.setdefault(read.chunk.part, []).append(entry)
    targets: _Targets = {}
    ranges: list[FrameRange] = []
    for part, entries in sorted(by_part.items()):
        found, users = part_ranges(checkpoint, part, entries)
        targets[part] = (entries, users)
        ranges.extend(found)
    return targets, ranges
