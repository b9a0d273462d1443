"""Turns a load plan into ranged reads, and gives the planner what arrived."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import numpy as np

from savestream.arrays import HostArray, host_view
from savestream.events import LoadStarted, notify
from savestream.pipeline.open_checkpoint import OpenCheckpoint
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.reader import (
    Destination,
    FrameRange,
    destination,
    plan_ranges,
    preferred_range_bytes,
    read_ranges,
)
from savestream.pipeline.stage_clock import StageClock
from savestream.planners.base import LoadPlanner
from savestream.planners.default import DefaultLoadPlanner
from savestream.planners.metadata import Metadata
from savestream.planners.plan import LoadItemType, LoadPlan, ReadItem
from savestream.threads import run_in_worker

__all__ = ["PlanLoader", "part_ranges"]


class PlanLoader:
    """Reads what a load plan asks for into what its planner resolves."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        planner: LoadPlanner,
        metadata: Metadata,
        options: LoadOptions,
        clock: StageClock,
    ) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._metadata = metadata
        self._options = options
        self._clock = clock
        self.raw_bytes = 0
        self.stored_bytes = 0

    async def read(self, plan: LoadPlan) -> None:
        """Fill every array, then hand the planner its values."""
        tensors, opaque, inline = self._sort(plan)
        targets, ranges, opaque_data = await run_in_worker(self._plan_reads, tensors, opaque)
        self.stored_bytes = sum(piece.nbytes for piece in ranges)
        self.raw_bytes = sum(entry.array.nbytes for entries, _ in targets.values() for entry in entries)
        notify(self._clock.observer, LoadStarted(self._checkpoint.place, len(plan.items), self.raw_bytes))
        await read_ranges(
            self._checkpoint,
            targets,
            ranges,
            self._clock,
            threads=self._options.threads,
            verify=self._options.verify_digests,
        )
        await run_in_worker(self._commit, tensors, inline, list(zip(opaque, opaque_data, strict=True)))

    def _sort(self, plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem], list[ReadItem]]:
        stored = set(self._checkpoint.root.plan.tensor_names)
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        opaque = [item for item in values if item.storage_index.fqn in stored]
        inline = [item for item in values if item.storage_index.fqn not in stored]
        return tensors, opaque, inline

    def _plan_reads(
        self, tensors: Sequence[ReadItem], opaque: Sequence[ReadItem]
    ) -> tuple[dict[int, tuple[Sequence[Destination], dict[int, list[int]]]], list[FrameRange], list[HostArray]]:
        opaque_data: list[HostArray] = []
        by_part: dict[int, list[Destination]] = {}
        for item, array in zip(tensors, _resolve_all(self._planner, tensors), strict=True):
            chunk = self._checkpoint.chunk_location(item.storage_index.fqn, item.storage_index.offset)
            entry = destination(item.dest_index.fqn, array, chunk, item.storage_offsets, item.lengths)
            by_part.setdefault(chunk.part, []).append(entry)
        for item in opaque:
            chunk = self._checkpoint.chunk_location(item.storage_index.fqn, None)
            opaque_data.append(np.empty(chunk.sizes, np.uint8))
            entry = destination(item.dest_index.fqn, opaque_data[-1], chunk, (0,), chunk.sizes)
            by_part.setdefault(chunk.part, []).append(entry)
        targets: dict[int, tuple[Sequence[Destination], dict[int, list[int]]]] = {}
        ranges: list[FrameRange] = []
        for part, entries in sorted(by_part.items()):
            found, users = part_ranges(self._checkpoint, part, entries)
            targets[part] = (entries, users)
            ranges.extend(found)
        return targets, ranges, opaque_data

    def _commit(
        self,
        tensors: Sequence[ReadItem],
        inline: Sequence[ReadItem],
        opaque: Sequence[tuple[ReadItem, HostArray]],
    ) -> None:
        planner, root = self._planner, self._checkpoint.root
        if type(planner).commit_tensor is not DefaultLoadPlanner.commit_tensor:
            for item in tensors:
                planner.commit_tensor(item, planner.resolve_tensor(item))
        numbers = {name: number for number, name in enumerate(root.plan.value_names)}
        for item in inline:
            encoded = msgspec.json.encode(root.values[numbers[item.storage_index.fqn]])
            planner.load_bytes(item, io.BytesIO(encoded))
        for item, data in opaque:
            planner.load_bytes(item, io.BytesIO(data.tobytes()))


def _resolve_all(planner: LoadPlanner, items: Sequence[ReadItem]) -> list[HostArray]:
    if isinstance(planner, DefaultLoadPlanner):
        return planner.resolve_tensors(items)
    return [host_view(planner.resolve_tensor(item)) for item in items]


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
