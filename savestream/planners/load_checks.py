"""Checks of a load's targets against the checkpoint, before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import adapter_for, array_info, dtype_from_name
from savestream.errors import PlanError, SavestreamError
from savestream.planners.load_plans import same_storage
from savestream.planners.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Shape,
    TensorStorageMetadata,
)
from savestream.planners.sharding import shard_array, shard_chunks, shard_dtype
from savestream.planners.target_memory import TargetArray, examine_targets

__all__ = ["LoadRequest", "TargetChecker"]

_NUMERIC_KINDS = frozenset("biufc")


class LoadRequest(msgspec.Struct, frozen=True):
    """What the checks depend on."""

    metadata: Metadata
    cast: bool


class TargetChecker:
    """Compares array leaves of a target with the checkpoint's entries.

    Attributes
    ----------
    boxes
        The boxes to fill of each array leaf.
    shape_mismatches, dtype_mismatches, problems
        One line for each fault.
    repeated
        ``(name, offset)`` of boxes whose memory is filled through another leaf already.
    """

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._entries = request.metadata.state_dict_metadata
        self.boxes: dict[str, list[ChunkStorageMetadata]] = {}
        self.shape_mismatches: list[str] = []
        self.dtype_mismatches: list[str] = []
        self.problems: list[str] = []
        self.repeated: set[tuple[str, Shape | None]] = set()
        self._arrays: list[TargetArray] = []
        self._names: dict[np.dtype[Any], str] = {}
        self._whole: dict[Shape, list[ChunkStorageMetadata]] = {}

    def check(self, targets: Mapping[str, Any]) -> None:
        """Check all array leaves among the targets."""
        for name, leaf in targets.items():
            entry = self._entries[name]
            if not isinstance(entry, TensorStorageMetadata):
                continue
            try:
                self._check_leaf(name, leaf, entry)
            except SavestreamError as error:
                self.problems.append(str(error))
        self._check_memory()

    def _check_leaf(self, name: str, leaf: Any, entry: TensorStorageMetadata) -> None:
        if type(leaf) is np.ndarray:
            dtype = self._names.get(leaf.dtype)
            if dtype is None:
                dtype = self._names[leaf.dtype] = array_info(leaf, name).dtype
            self._compare(name, leaf.shape, dtype, entry)
            self.boxes[name] = self._whole_box(leaf.shape)
            self._note(TargetArray(name, (), leaf), leaf.flags.writeable)
        elif hasattr(leaf, "global_shape"):
            shape, self.boxes[name] = shard_chunks(leaf, name)
            self._compare(name, shape, shard_dtype(leaf, name), entry)
            for position, box in enumerate(self.boxes[name]):
                if 0 in box.sizes:
                    continue  # nothing to fill, and another box may start at the same place
                array = shard_array(leaf, MetadataIndex(name, box.offsets, position))
                self._note(TargetArray(name, box.offsets, array), _is_writable(array))
        else:
            info = array_info(leaf, name)
            self._compare(name, info.shape, info.dtype, entry)
            self.boxes[name] = self._whole_box(info.shape)
            self._note(TargetArray(name, (), leaf), _is_writable(leaf))

    def _whole_box(self, shape: Shape) -> list[ChunkStorageMetadata]:
        boxes = self._whole.get(shape)
        if boxes is None:
            boxes = self._whole[shape] = [ChunkStorageMetadata((0,) * len(shape), shape)]
        return boxes

    def _note(self, target: TargetArray, writable: bool) -> None:
        self._arrays.append(target)
        if not writable:
            self.problems.append(f"{target.name}: the target is read-only; load into a copy of it")

    def _compare(self, name: str, shape: Shape, dtype: str, entry: TensorStorageMetadata) -> None:
        if shape != entry.size:
            self.shape_mismatches.append(f"{name} (checkpoint {entry.size}, target {shape})")
        stored = entry.properties.dtype
        if dtype != stored and not (self._request.cast and _castable(stored, dtype)):
            self.dtype_mismatches.append(f"{name} (checkpoint {stored}, target {dtype})")

    def _check_memory(self) -> None:
        ties, problems = examine_targets(self._arrays)
        self.problems += [text for _, text in problems]
        for first, later in ties:
            one, other = self._arrays[first], self._arrays[later]
            alike = one.offsets == other.offsets and same_storage(
                one.name, other.name, self._entries, self._request.metadata.storage_data
            )
            if not alike and one.name != other.name:
                self.problems.append(
                    f"{one.name} and {other.name}: the targets are the same memory, but the checkpoint stores them "
                    "apart; untie them, or load only one of them with keys="
                )
            elif one.name == other.name:
                self.problems.append(f"{one.name}: two boxes of the target are the same memory")
            else:
                box = (0,) * len(one.array.shape) if not other.offsets else other.offsets
                self.repeated.add((other.name, box))


def _is_writable(array: Any) -> bool:
    adapter = adapter_for(type(array))
    if adapter is None:
        raise PlanError(f"{type(array).__qualname__} is no array that a load can fill")
    return adapter.is_writable(array)


def _castable(stored: str, wanted: str) -> bool:
    """Whether a conversion between two dtypes makes sense: numbers to numbers, never from complex to real."""
    source, target = dtype_from_name(stored), dtype_from_name(wanted)
    if source.newbyteorder("=") == target.newbyteorder("="):
        return True
    numeric = all(
        dtype.kind in _NUMERIC_KINDS or (dtype.kind == "V" and dtype.type is not np.void) for dtype in (source, target)
    )
    return numeric and not (source.kind == "c" and target.kind != "c")
