"""The tensors that a load fills: straight in their own memory where they have it in the stored form, else by a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from savestream.arrays import HostArray, adapter_for, dtype_from_name, framework_adapter
from savestream.errors import LoadMismatchError, PlanError, SavestreamError
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.reading import ReadableCheckpoint
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.open_checkpoint import ChunkLocation
from savestream.pipeline.rank_reads import BoxRead

__all__ = ["Target", "batches", "check_dtypes", "rounds"]

_BATCH_BYTES = 256 * 1024 * 1024


class Target(msgspec.Struct):
    """One item to read: the planner's tensor without its history, and the array that takes the stored elements.

    ``array`` is the tensor's own memory, unless ``copies``.
    """

    item: Any
    tensor: Any
    chunk: ChunkLocation
    array: HostArray
    copies: bool

    def read(self) -> BoxRead:
        """What is to be read for it."""
        item = self.item
        return BoxRead(item.dest_index.fqn, self.chunk, tuple(item.storage_offsets), tuple(item.lengths), self.array)

    def complete(self) -> None:
        """Bring what was read into the tensor, and tell autograd that it changed."""
        torch = torch_module()
        if not self.copies:
            if not self.tensor.is_inference():
                torch.autograd.graph.increment_version(self.tensor)
            return
        try:
            self.tensor.copy_(framework_adapter("torch").from_host(self.array, self.chunk.dtype))
        except (RuntimeError, NotImplementedError) as error:
            raise PlanError(
                f"{self.item.dest_index.fqn}: torch cannot copy {self.chunk.dtype} into a {self.tensor.dtype} "
                f"{type(self.tensor).__qualname__}: {error}"
            ) from error


def batches(items: Sequence[Any], planner: Any, readable: ReadableCheckpoint) -> Iterator[list[Target]]:
    """Targets for the items, in order, as many at once as 256 MiB of memory allow that did not exist before."""
    gives_own = _gives_the_state(planner)
    batch: list[Target] = []
    made_bytes = 0
    for item in items:
        target = _target(item, planner, readable)
        nbytes = (target.array.nbytes if target.copies else 0) + (0 if gives_own else target.tensor.nbytes)
        if batch and made_bytes + nbytes > _BATCH_BYTES:
            yield batch
            batch, made_bytes = [], 0
        batch.append(target)
        made_bytes += nbytes
    if batch:
        yield batch


def _gives_the_state(planner: Any) -> bool:
    """Whether a planner resolves items to the target's own tensors."""
    default = checkpoint_module().DefaultLoadPlanner
    names = ("resolve_tensor", "lookup_tensor", "transform_tensor")
    return isinstance(planner, default) and all(
        getattr(type(planner), name) is getattr(default, name) for name in names
    )


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
    if own is not None:
        return Target(item, tensor, chunk, own, False)
    return Target(item, tensor, chunk, allocate_array(dtype_from_name(chunk.dtype), tuple(item.lengths)), True)


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


def check_dtypes(targets: Sequence[Target]) -> None:
    """Refuse, all at once, targets of another dtype than the stored one."""
    wrong = []
    for target in targets:
        wanted = str(target.tensor.dtype).removeprefix("torch.")
        if wanted != target.chunk.dtype:
            wrong.append(f"{target.item.dest_index.fqn} (checkpoint {target.chunk.dtype}, target {wanted})")
    if wrong:
        raise LoadMismatchError(dtype_mismatches=wrong)


def rounds(targets: Sequence[Target]) -> list[list[Target]]:
    """Targets in groups to be read one after the other: where names share memory the last one counts, as in torch.

    Targets of one name never overlap; those of different names do where tensors are tied or views of each other.
    """
    spans = [_span(target) for target in targets]
    clashes = _clashes(targets, spans)
    if not clashes:
        return [list(targets)]
    number_of: list[int] = []
    for position in range(len(targets)):
        number_of.append(1 + max((number_of[other] for other in clashes.get(position, ())), default=-1))
    grouped: list[list[Target]] = [[] for _ in range(max(number_of) + 1)]
    for target, number in zip(targets, number_of, strict=True):
        grouped[number].append(target)
    return grouped


_Span = tuple[str, int, int]  # device, first and last address


def _span(target: Target) -> _Span | None:
    tensor = target.tensor
    if type(tensor) is not torch_module().Tensor or not tensor.numel():
        return None
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    reach = sum(step * (size - 1) for step, size in steps) * tensor.element_size()
    low = tensor.data_ptr()
    return str(tensor.device), low, low + reach + tensor.element_size()


def _clashes(targets: Sequence[Target], spans: Sequence[_Span | None]) -> dict[int, list[int]]:
    """For each target the earlier ones of other names whose addresses meet its own."""
    known = sorted([(*span, position) for position, span in enumerate(spans) if span is not None])
    clashes: dict[int, list[int]] = {}
    active: list[tuple[str, int, int]] = []  # device, end, position
    for device, low, high, position in known:
        active = [entry for entry in active if entry[0] == device and entry[1] > low]
        name = targets[position].item.dest_index.fqn
        for _, _, other in active:
            if targets[other].item.dest_index.fqn != name:
                clashes.setdefault(max(position, other), []).append(min(position, other))
        active.append((device, high, position))
    return clashes
