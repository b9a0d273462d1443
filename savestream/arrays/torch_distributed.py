"""PyTorch's DTensors as leaves: each process has the boxes of the whole that its placements say.

PyTorch is the caller's: this module never imports it.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import msgspec

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, Box, HostArray, Shape
from savestream.arrays.torch_tensors import TorchAdapter, torch_adapter_for
from savestream.errors import PlanError, UnsafeObjectError

__all__ = ["DTensorAdapter", "LocalBox", "dtensor_adapter_for", "is_dtensor_type", "local_boxes"]

Run: TypeAlias = tuple[int, int]  # start and stop, along one axis


class LocalBox(msgspec.Struct, frozen=True):
    """A box of the whole, and where it lies in the local tensor."""

    offsets: Shape
    sizes: Shape
    local_offsets: Shape

    @property
    def local(self) -> tuple[slice, ...]:
        pairs = zip(self.local_offsets, self.sizes, strict=True)
        return tuple([slice(offset, offset + size) for offset, size in pairs])


def is_dtensor_type(kind: type) -> bool:
    """Whether ``kind`` is exactly torch's class of distributed tensors."""
    return kind is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def dtensor_adapter_for(kind: type) -> DTensorAdapter | None:
    """The adapter for distributed tensors."""
    return _adapter() if is_dtensor_type(kind) else None


@functools.cache
def _adapter() -> DTensorAdapter:
    torch = sys.modules["torch"]
    inner = torch_adapter_for(torch.Tensor)
    assert inner is not None  # noqa: S101 - for the type checker
    return DTensorAdapter(torch, inner)


def local_boxes(shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: Sequence[Any]) -> list[LocalBox]:
    """The boxes of a distributed tensor that the process at ``coordinate`` of the mesh holds.

    Mesh dimensions shard one after the other, each what those before it left, in pieces as ``torch.chunk`` makes them.
    A strided shard takes its piece of each of ``split_factor`` parts, which is how FSDP and tensor parallelism meet in
    one axis; then a process can hold several boxes.
    """
    axes: list[list[Run]] = [[(0, size)] for size in shape]
    for count, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            factor = getattr(placement, "split_factor", 1)
            axes[placement.dim] = _shard(axes[placement.dim], count, position, factor)
    boxes = []
    for runs in itertools.product(*map(_with_local_starts, axes)):
        sizes = tuple([stop - start for (start, stop), _ in runs])
        if 0 not in sizes:
            offsets, local = tuple([start for (start, _), _ in runs]), tuple([start for _, start in runs])
            boxes.append(LocalBox(offsets, sizes, local))
    return boxes


def _shard(runs: Sequence[Run], count: int, position: int, factor: int) -> list[Run]:
    """What is left to one of ``count`` processes of the elements in ``runs``."""
    total = sum([stop - start for start, stop in runs])
    chosen: list[Run] = []
    for start, stop in _chunks(total, factor):
        first, last = _chunks(stop - start, count)[position]
        chosen += _cut(runs, start + first, start + last)
    return _joined(chosen)


def _chunks(total: int, count: int) -> list[Run]:
    size = -(-total // count)
    return [(min(size * number, total), min(size * (number + 1), total)) for number in range(count)]


def _cut(runs: Sequence[Run], first: int, last: int) -> list[Run]:
    """Elements ``first:last``, counted through all runs."""
    found, passed = [], 0
    for start, stop in runs:
        low, high = max(first - passed, 0), min(last - passed, stop - start)
        if low < high:
            found.append((start + low, start + high))
        passed += stop - start
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The same elements in as few runs as possible."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _with_local_starts(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    starts = itertools.accumulate([stop - start for start, stop in runs], initial=0)
    return list(zip(runs, starts, strict=False))


class DTensorAdapter(ArrayAdapter):
    """torch.distributed.tensor.DTensor: what this process holds of it, on any device.

    Where that is all of it, the leaf is treated as an ordinary tensor. Replicas are written once, by the process at
    position 0 of the mesh dimensions that replicate.
    """

    framework = "torch"

    def __init__(self, torch: Any, inner: TorchAdapter) -> None:
        self._torch = torch
        self._inner = inner

    def _local(self, array: Any) -> Any:
        with self._torch.no_grad():
            return array.to_local()

    def local_array(self, array: Any) -> Any:
        return self._local(array)

    def _boxes(self, array: Any, key: str) -> list[LocalBox] | None:
        """The boxes in this process; None where every process of the mesh holds all."""
        for placement in array.placements:
            if placement.is_partial():
                raise UnsafeObjectError(
                    f"{key}: a DTensor with a pending reduction ({placement}) has no elements yet; redistribute it to "
                    "Shard or Replicate placements first"
                )
            if not placement.is_replicate() and not isinstance(getattr(placement, "dim", None), int):
                raise UnsafeObjectError(
                    f"{key}: a DTensor with placement {placement} cannot be stored; redistribute it"
                )
        shape, mesh, coordinate = tuple(array.shape), array.device_mesh, array.device_mesh.get_coordinate()
        if 0 in shape:
            return None
        if coordinate is None:  # a process outside of the mesh
            return []
        boxes = local_boxes(shape, tuple(mesh.shape), tuple(coordinate), array.placements)
        held = self._local(array)
        if sum([math.prod(box.sizes) for box in boxes]) != held.numel():
            raise UnsafeObjectError(
                f"{key}: the DTensor's local tensor has shape {tuple(held.shape)}, which is not what placements "
                f"{tuple(array.placements)} leave to this process; make it with distribute_tensor, or redistribute it"
            )
        pairs = zip(mesh.shape, array.placements, strict=True)
        return None if all(count == 1 or placement.is_replicate() for count, placement in pairs) else boxes

    # --- saving ---

    def info(self, array: Any, key: str) -> ArrayInfo:
        return self._described(array, self._inner.info(self._usual_local(array, key), key))

    def _usual_local(self, array: Any, key: str) -> Any:
        local = self._local(array)
        if torch_adapter_for(type(local)) is None:
            name = f"{type(local).__module__}.{type(local).__qualname__}"
            raise UnsafeObjectError(f"{key}: a DTensor whose local tensor is a {name} cannot be stored")
        return local

    def _described(self, array: Any, local: ArrayInfo) -> ArrayInfo:
        return msgspec.structs.replace(local, shape=tuple(array.shape))

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return self._inner.addresses(list(map(self._local, arrays)))

    def split(self, array: Any, key: str) -> Sequence[tuple[Shape, Any]] | None:
        boxes = self._boxes(array, key)
        if boxes is None:
            return None
        coordinate = array.device_mesh.get_coordinate() or ()
        pairs = zip(coordinate, array.placements, strict=False)
        if any(position and placement.is_replicate() for position, placement in pairs):
            return []  # the same boxes are written by another process
        local = self._usual_local(array, key)
        return [(box.offsets, local[box.local]) for box in boxes]

    def host_view(self, array: Any) -> HostArray:
        return self._inner.host_view(self._local(array))

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        self._inner.copy_elements(self._local(array), start, stop, target)

    def join(self, arrays: Sequence[Any]) -> HostArray:
        return self._inner.join(list(map(self._local, arrays)))

    # --- loading ---

    def target_info(self, array: Any, key: str) -> ArrayInfo:
        return self._described(array, self._inner.target_info(self._usual_local(array, key), key))

    def own_memory(self, array: Any) -> HostArray | None:
        return self._inner.own_memory(self._local(array)) if self._boxes(array, "the target") is None else None

    def changed(self, arrays: Sequence[Any]) -> None:
        self._inner.changed([*arrays, *map(self._local, arrays)])  # autograd may have noted either

    def fill_problem(self, array: Any) -> str | None:
        kind = array.device_mesh.device_type
        if array.is_meta and kind != "cpu":
            return f"a DTensor without memory is not given any on {kind} by a load; materialise it first (to_empty())"
        return None

    def is_filled_in_place(self, array: Any) -> bool:
        return self._inner.is_filled_in_place(self._local(array))

    def identity(self, array: Any) -> Hashable | None:
        local = self._inner.identity(self._local(array))
        return None if local is None else (local, array.device_mesh, tuple(array.placements))

    def target_boxes(self, array: Any, key: str) -> Sequence[Box] | None:
        boxes = self._boxes(array, key)
        return None if boxes is None else [(box.offsets, box.sizes) for box in boxes]

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        local = self._local(array)
        if not self.is_filled_in_place(array):
            return self._materialised(array, parts)
        self._fill(array, local, parts)
        self.changed([array])
        return array

    def _fill(self, array: Any, local: Any, parts: Sequence[tuple[Shape, HostArray]]) -> None:
        boxes = self._boxes(array, "the target")
        with self._torch.no_grad():
            if boxes is None:
                local.copy_(self._tensor(parts[0][1], local))
                return
            for box, (_, content) in zip(boxes, parts, strict=True):
                local[box.local].copy_(self._tensor(content, local))

    def _tensor(self, content: HostArray, local: Any) -> Any:
        return self._inner.from_host(content, self._inner.target_info(local, "the target").dtype)

    def _materialised(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        """A DTensor with memory in the place of one on the meta device."""
        torch, local = self._torch, self._local(array)
        if len(parts) == 1:  # the box is all of the local tensor
            local = self._tensor(parts[0][1], local)
        else:
            local = torch.empty(local.shape, dtype=array.dtype, device="cpu")
            self._fill(array, local, parts)
        made = type(array).from_local(
            local, array.device_mesh, array.placements, run_check=False, shape=array.shape, stride=array.stride()
        )
        return self._like(array, made)

    def tied(self, array: Any, made: Any) -> Any:
        return self._like(array, made.detach())

    def _like(self, array: Any, made: Any) -> Any:
        if isinstance(array, self._torch.nn.Parameter):
            return self._torch.nn.Parameter(made, requires_grad=array.requires_grad)
        return made.requires_grad_(array.requires_grad)

    def from_host(self, array: HostArray, dtype: str) -> Any:
        del array
        raise PlanError(f"a DTensor cannot be made of an array of dtype {dtype} alone; give a DTensor as target")
