"""Turns a load plan into ranged reads, and gives the planner what arrived."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import numpy as np

from savestream.arrays import HostArray
from savestream.events import LoadStarted, notify
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.reader import (
    Destination,
    FrameRange,
    destination,
    plan_ranges,
    preferred_range_bytes,
    read_ranges,
)
from savestream.pipeline.resolved_boxes import ResolvedBoxes
from savestream.pipeline.stage_clock import StageClock
from savestream.planners.base import LoadPlanner
from savestream.planners.default import DefaultLoadPlanner
from savestream.planners.plan import LoadItemType, LoadPlan, ReadItem
from savestream.threads import run_in_worker

__all__ = ["PlanLoader", "part_ranges"]


class _Reads(msgspec.Struct):
    """Ranges to read, and for each part whom its frames feed."""

    targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]]
    ranges: list[FrameRange]

    @property
    def stored_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.ranges)


class PlanLoader:
    """Reads what a load plan asks for into what its planner resolves."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        planner: LoadPlanner,
        options: LoadOptions,
        clock: StageClock,
    ) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._options = options
        self._clock = clock
        self.raw_bytes = 0
        self.stored_bytes = 0

    async def read(self, plan: LoadPlan) -> None:
        """Read values first, since they may still show a mismatch; then fill every array."""
        tensors, opaque, inline = await run_in_worker(self._sort, plan)
        boxes = await run_in_worker(self._resolve, tensors)
        data = [allocate_array(np.dtype(np.uint8), self._chunk(item).sizes) for item in opaque]
        values_read = await run_in_worker(self._plan_reads, opaque, data)
        tensors_read = await run_in_worker(self._plan_reads, tensors, boxes.memories)
        self.stored_bytes = values_read.stored_bytes + tensors_read.stored_bytes
        self.raw_bytes = sum(array.nbytes for array in [*boxes.memories, *data])
        notify(self._clock.observer, LoadStarted(self._checkpoint.place, len(plan.items), self.raw_bytes))
        await self._read(values_read)
        await run_in_worker(self._load_values, inline, list(zip(opaque, data, strict=True)))
        await run_in_worker(self._begin_filling, boxes)
        await self._read(tensors_read)
        await run_in_worker(boxes.commit)

    def _begin_filling(self, boxes: ResolvedBoxes) -> None:
        """A failed or cancelled load leaves arrays changed, so everyone is told before the first byte is placed."""
        if isinstance(self._planner, DefaultLoadPlanner):
            self._planner.begin_filling()
        boxes.begin()

    def _resolve(self, items: Sequence[ReadItem]) -> ResolvedBoxes:
        return ResolvedBoxes(self._planner, items, lambda item: self._chunk(item).dtype)

    def _sort(self, plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem], list[ReadItem]]:
        inline_names = set(self._checkpoint.root.plan.value_names)
        tensors: list[ReadItem] = []
        opaque: list[ReadItem] = []
        inline: list[ReadItem] = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                tensors.append(item)
            elif item.storage_index.fqn in inline_names:
                inline.append(item)
            else:
                opaque.append(item)
        return tensors, opaque, inline

    def _chunk(self, item: ReadItem) -> ChunkLocation:
        return self._checkpoint.chunk_location(item.storage_index.fqn, item.storage_index.offset)

    def _plan_reads(self, items: Sequence[ReadItem], arrays: Sequence[HostArray]) -> _Reads:
        by_part: dict[int, list[Destination]] = {}
        for item, array in zip(items, arrays, strict=True):
            chunk = self._chunk(item)
            whole = item.type is LoadItemType.BYTE_IO
            offsets, lengths = ((0,), chunk.sizes) if whole else (item.storage_offsets, item.lengths)
            entry = destination(item.dest_index.fqn, array, chunk, offsets, lengths)
            by_part.setdefault(chunk.part, []).append(entry)
        reads = _Reads({}, [])
        for part, entries in sorted(by_part.items()):
            found, users = part_ranges(self._checkpoint, part, entries)
            reads.targets[part] = (entries, users)
            reads.ranges.extend(found)
        return reads

    async def _read(self, reads: _Reads) -> None:
        await read_ranges(
            self._checkpoint,
            reads.targets,
            reads.ranges,
            self._clock,
            threads=self._options.threads,
            verify=self._options.verify_digests,
        )

    def _load_values(self, inline: Sequence[ReadItem], opaque: Sequence[tuple[ReadItem, HostArray]]) -> None:
        planner, root = self._planner, self._checkpoint.root
        numbers = {name: number for number, name in enumerate(root.plan.value_names)}
        for item in inline:
            encoded = msgspec.json.encode(root.values[numbers[item.storage_index.fqn]])
            planner.load_bytes(item, io.BytesIO(encoded))
        for item, data in opaque:
            planner.load_bytes(item, io.BytesIO(data.tobytes()))
        if isinstance(planner, DefaultLoadPlanner):
            planner.check_values()


def part_ranges(
    checkpoint: OpenCheckpoint, part: int, entries: Sequence[Destination]
) -> tuple[list[FrameRange], dict[int, list[int]]]:
    capabilities = checkpoint.location.backend.capabilities
    direct = any(entry.direct is not None for entry in entries)
    return plan_ranges(
        checkpoint.parts[part].frames,
        part,
        entries,
        range_bytes=preferred_range_bytes(capabilities.blocking_io, capabilities.read_range_bytes, direct),
        gap_bytes=capabilities.read_gap_bytes,
    )
