"""The tensors that a load fills: straight in their own memory where they have it in the stored form, else by a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from savestream.arrays import ArrayInfo, HostArray, adapter_for, dtype_from_name, framework_adapter
from savestream.errors import LoadMismatchError, PlanError, SavestreamError
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.reading import ReadableCheckpoint
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.open_checkpoint import ChunkLocation
from savestream.pipeline.rank_reads import BoxRead
from savestream.planners.interleaving import Placed
from savestream.planners.target_memory import overlapping

__all__ = ["Target", "batches", "check_dtypes", "examined_targets", "gives_the_state", "rounds"]

_BATCH_BYTES = 256 * 1024 * 1024


class Target(msgspec.Struct):
    """One item to read: the planner's tensor without its history, and the array that takes the stored elements.

    ``array`` is the tensor's own memory, unless ``copies``; then it is None until :meth:`allocate`.
    """

    item: Any
    tensor: Any
    chunk: ChunkLocation
    array: HostArray | None
    copies: bool

    @property
    def name(self) -> str:
        return str(self.item.dest_index.fqn)

    def allocate(self) -> None:
        """Take memory for the stored elements where they cannot go straight into the tensor."""
        if self.array is None:
            self.array = allocate_array(dtype_from_name(self.chunk.dtype), tuple(self.item.lengths))

    def read(self) -> BoxRead:
        """What is to be read for it."""
        item = self.item
        return BoxRead(self.name, self.chunk, tuple(item.storage_offsets), tuple(item.lengths), self._memory())

    def _memory(self) -> HostArray:
        assert self.array is not None  # noqa: S101 - allocated with its batch
        return self.array

    def complete(self) -> None:
        """Bring what was read into the tensor, and tell autograd that it changed."""
        torch = torch_module()
        if not self.copies:
            if not self.tensor.is_inference():
                torch.autograd.graph.increment_version(self.tensor)
            return
        try:
            self.tensor.copy_(framework_adapter("torch").from_host(self._memory(), self.chunk.dtype))
        except (RuntimeError, NotImplementedError) as error:
            raise _cannot_copy(self, error) from error
        self.array = None


def gives_the_state(planner: Any) -> bool:
    """Whether a planner resolves items to the target's own tensors, which costs nothing."""
    default = checkpoint_module().DefaultLoadPlanner
    names = ("resolve_tensor", "lookup_tensor", "transform_tensor")
    return isinstance(planner, default) and all(
        getattr(type(planner), name) is getattr(default, name) for name in names
    )


def examined_targets(items: Iterable[Any], planner: Any, readable: ReadableCheckpoint) -> Iterator[Target]:
    """Targets for the items, in order; each has been found fit to be filled.

    Raises
    ------
    LoadMismatchError, PlanError
        One is not: it overlaps itself, has another shape, or a layout or dtype that cannot be filled; names it.
    """
    copyable: set[tuple[Any, ...]] = set()
    for item in items:
        target = _target(item, planner, readable)
        if target.copies:
            _check_copy(target, copyable)
        yield target


def batches(targets: Iterable[Target], *, own_state: bool) -> Iterator[list[Target]]:
    """As many at once as 256 MiB of memory allow that did not exist before."""
    batch: list[Target] = []
    made_bytes = 0
    for target in targets:
        nbytes = (_stored_bytes(target) if target.copies else 0) + (0 if own_state else target.tensor.nbytes)
        if batch and made_bytes + nbytes > _BATCH_BYTES:
            yield batch
            batch, made_bytes = [], 0
        target.allocate()
        batch.append(target)
        made_bytes += nbytes
    if batch:
        yield batch


def _stored_bytes(target: Target) -> int:
    return int(target.tensor.numel()) * dtype_from_name(target.chunk.dtype).itemsize


def _target(item: Any, planner: Any, readable: ReadableCheckpoint) -> Target:
    key = item.dest_index.fqn
    chunk = readable.chunk(item.storage_index)
    tensor = planner.resolve_tensor(item).detach()
    if tuple(tensor.shape) != tuple(item.lengths):
        raise PlanError(
            f"{key}: the plan reads a box of shape {tuple(item.lengths)} into a tensor of shape {tuple(tensor.shape)}"
        )
    if _overlaps_itself(tensor):
        raise LoadMismatchError(problems=[f"{key}: the target's elements overlap each other; load into a copy of it"])
    own = _own_memory(tensor, key, chunk.dtype)
    return Target(item, tensor, chunk, own, own is None)


def _own_memory(tensor: Any, key: str, stored: str) -> HostArray | None:
    torch = torch_module()
    adapter = adapter_for(torch.Tensor) if type(tensor) is torch.Tensor else None
    if adapter is None:
        return None
    try:
        info = adapter.info(tensor, key)
    except SavestreamError as error:
        raise LoadMismatchError(problems=[str(error)]) from error
    return adapter.own_memory(tensor) if info.dtype == stored else None


def _overlaps_itself(tensor: Any) -> bool:
    """Whether two elements may be the same memory, as in an expanded tensor."""
    if type(tensor) is not torch_module().Tensor or tensor.layout is not torch_module().strided:
        return False  # a subclass knows what it does with what is copied into it
    extent = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < extent:
                return bool(tensor.numel())
            extent += step * (size - 1)
    return False


def check_dtypes(targets: Iterable[Target]) -> None:
    """Refuse, all at once, targets of another dtype than the stored one."""
    wrong = []
    for target in targets:
        wanted = str(target.tensor.dtype).removeprefix("torch.")
        if wanted != target.chunk.dtype:
            wrong.append(f"{target.name} (checkpoint {target.chunk.dtype}, target {wanted})")
    if wrong:
        raise LoadMismatchError(dtype_mismatches=wrong)


def _check_copy(target: Target, known: set[tuple[Any, ...]]) -> None:
    """Copy no element into a tensor of the same kind, which shows whether torch has such a copy."""
    tensor = target.tensor
    kind = (type(tensor), tensor.dtype, tensor.device, target.chunk.dtype)
    if type(tensor) is not torch_module().Tensor or kind in known:
        return
    empty = allocate_array(dtype_from_name(target.chunk.dtype), (0,))
    try:
        tensor.new_empty((0,)).copy_(framework_adapter("torch").from_host(empty, target.chunk.dtype))
    except (RuntimeError, NotImplementedError) as error:
        raise _cannot_copy(target, error) from error
    known.add(kind)


def _cannot_copy(target: Target, error: Exception) -> PlanError:
    return PlanError(
        f"{target.name}: torch cannot copy {target.chunk.dtype} into a {target.tensor.dtype} "
        f"{type(target.tensor).__qualname__}: {error}"
    )


def rounds(targets: Sequence[Target]) -> list[list[Target]]:
    """Targets in groups to be read one after the other: where names share memory the last one counts, as in torch.

    Targets of one name never overlap; those of different names do where tensors are tied or views of each other.
    """
    clashes = _clashes(targets)
    if not clashes:
        return [list(targets)]
    number_of: list[int] = []
    for position in range(len(targets)):
        number_of.append(1 + max((number_of[other] for other in clashes.get(position, ())), default=-1))
    grouped: list[list[Target]] = [[] for _ in range(max(number_of) + 1)]
    for target, number in zip(targets, number_of, strict=True):
        grouped[number].append(target)
    return grouped


def _clashes(targets: Sequence[Target]) -> dict[int, list[int]]:
    """For each target the earlier ones of other names that share memory with it."""
    torch = torch_module()
    by_device: dict[Any, list[int]] = {}
    for position, target in enumerate(targets):
        if type(target.tensor) is torch.Tensor and target.tensor.numel():
            by_device.setdefault(target.tensor.device, []).append(position)
    clashes: dict[int, list[int]] = {}
    for positions in by_device.values():
        placed = [_placed(targets[position].tensor) for position in positions]
        for pair in overlapping(placed, range(len(placed))):
            first, second = positions[pair[0]], positions[pair[1]]
            if targets[first].name != targets[second].name:
                clashes.setdefault(second, []).append(first)
    return clashes


def _placed(tensor: Any) -> Placed:
    size = tensor.element_size()
    strides = tuple([step * size for step in tensor.stride()])
    return Placed(ArrayInfo(str(tensor.dtype), tuple(tensor.shape), strides, size), tensor.data_ptr())
