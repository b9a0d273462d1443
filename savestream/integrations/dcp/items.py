"""A finished plan's items on one rank: what torch's planner resolves them to, and where they lie in the raw stream."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayInfo, array_refusal, dtype_from_name, framework_adapter
from savestream.errors import PlanError, UnsafeObjectError
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.plan_cache import CACHE_CURE, caches_plans
from savestream.pipeline.buffers import Bytes
from savestream.pipeline.compiled_plan import chunk_shape
from savestream.pipeline.layout import ChunkShape, plan_blocks, plan_layout
from savestream.pipeline.rank_data import RankChunks
from savestream.pipeline.sources import LiveSources, ResolvedSources

__all__ = ["RankItem", "RankItems"]

_BYTES = ArrayInfo("uint8", (), (), 1)


class RankItem(msgspec.Struct, frozen=True):
    """An item of the plan as it was found, not as the plan says: a cached plan may describe an earlier state.

    ``offsets`` is None where it holds bytes; ``raw_offset`` is its place in the rank's raw stream.
    """

    index: Any  # torch's MetadataIndex
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    dtype: str
    requires_grad: bool | None
    raw_offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * dtype_from_name(self.dtype).itemsize


class RankItems:
    """Resolves every item once to learn what it is, and lays out the stream.

    Where the planner hands out the state's own tensors they are kept until they are written, and items that are the
    same memory are stored once. What another planner makes of them is made again for that, since it may take memory.
    """

    def __init__(self, plan: Any, planner: Any) -> None:
        self._items: Sequence[Any] = plan.items
        self._planner = planner
        self._live = _hands_out_the_state(planner)
        self._types = checkpoint_module("planner").WriteItemType
        self._held: list[Any] = []  # by item: the tensor where live, bytes, or None
        self._infos: list[ArrayInfo] = []
        self._requires_grad: list[bool] = []
        self._adapter = framework_adapter("torch")
        for item in self._items:
            self._look_at(item)
        self._primary = self._aliases() if self._live else list(range(len(self._items)))
        self._chunks = [number for number, primary in enumerate(self._primary) if primary == number]
        self._layout = plan_layout([self._shape(number) for number in self._chunks])

    def _look_at(self, item: Any) -> None:
        made = self._planner.resolve_data(item)
        if item.type is self._types.BYTE_IO:
            self._held.append(_content(made, item.index.fqn))
            self._infos.append(_BYTES)
            self._requires_grad.append(False)
            return
        tensor = _plain_tensor(made, item, self._planner)
        info = self._adapter.info(tensor, item.index.fqn)
        self._infos.append(info)
        self._requires_grad.append(bool(made.requires_grad))
        self._held.append(tensor if self._live else None)

    def _aliases(self) -> list[int]:
        """For each item the first one that is the same memory, mostly itself."""
        first: dict[tuple[object, ...], int] = {}
        primary = []
        for number, (held, info) in enumerate(zip(self._held, self._infos, strict=True)):
            address = 0 if info is _BYTES else held.data_ptr()  # 0 where there is no element, too
            key = (address, held.device, info.dtype, info.shape, info.strides, info.variant) if address else ()
            primary.append(first.setdefault(key, number) if address else number)
        return primary

    def _shape(self, number: int) -> ChunkShape:
        if self._is_bytes(number):
            return ChunkShape(len(self._held[number]), 1, 1, 1)
        info = self._infos[number]
        return chunk_shape(info.shape, info.dtype)

    def _is_bytes(self, number: int) -> bool:
        return self._infos[number] is _BYTES

    def described(self) -> list[RankItem]:
        """What each item is and where it lies, in the plan's order."""
        offsets = dict(zip(self._chunks, self._layout.raw_offsets.tolist(), strict=True))
        return [self._describe(number, item, offsets[self._primary[number]]) for number, item in enumerate(self._items)]

    def _describe(self, number: int, item: Any, raw_offset: int) -> RankItem:
        if self._is_bytes(number):
            return RankItem(item.index, None, (len(self._held[number]),), "uint8", None, raw_offset)
        info = self._infos[number]
        whole = item.type is self._types.TENSOR
        return RankItem(
            index=item.index,
            offsets=tuple(item.tensor_data.chunk.offsets),
            sizes=info.shape,
            dtype=info.dtype,
            requires_grad=self._requires_grad[number]
            if whole and self._live
            else None,  # of a shard the plan knows better
            raw_offset=raw_offset,
        )

    def chunks(self) -> RankChunks:
        """What to write, without what is the same memory as something else."""
        blocks = functools.cache(lambda block_bytes: plan_blocks(self._layout, block_bytes))
        if self._live:
            sources = LiveSources([self._held[number] for number in self._chunks], self._dtype)
            return RankChunks(self._layout, blocks, lambda: sources, None)
        made = [self._shape(number).nbytes for number in self._chunks]
        return RankChunks(self._layout, blocks, lambda: ResolvedSources(self._resolve_again), made)

    def _dtype(self, chunk: int) -> np.dtype[Any]:
        return dtype_from_name(self._infos[self._chunks[chunk]].dtype)

    def _resolve_again(self, chunk: int) -> Any:
        number = self._chunks[chunk]
        if self._is_bytes(number):
            return self._held[number]
        item, expected = self._items[number], self._infos[number]
        tensor = _plain_tensor(self._planner.resolve_data(item), item, self._planner)
        found = self._adapter.info(tensor, item.index.fqn)
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            raise PlanError(
                f"{item.index.fqn}: the planner resolved it to {expected.dtype} of shape {expected.shape} first and to "
                f"{found.dtype} of shape {found.shape} later; resolve_data must give the same each time"
            )
        return self._adapter.host_view(tensor)

    def settle_devices(self) -> None:
        """Wait for what this thread has queued on devices: the tensors are read by other threads."""
        torch = torch_module()
        for device in {tensor.device for tensor in self._held if isinstance(tensor, torch.Tensor)}:
            stream = getattr(getattr(torch, device.type, None), "current_stream", None)
            if device.type not in ("cpu", "meta") and stream is not None:
                stream(device).synchronize()


def _hands_out_the_state(planner: Any) -> bool:
    """Whether a planner resolves tensors to the state's own, which costs nothing and may be kept."""
    default = checkpoint_module().DefaultSavePlanner
    names = ("resolve_data", "lookup_object", "transform_object")
    return isinstance(planner, default) and all(
        getattr(type(planner), name) is getattr(default, name) for name in names
    )


def _content(made: Any, key: str) -> Bytes:
    if not isinstance(made, io.BytesIO):
        raise PlanError(f"{key}: the planner resolved bytes to {type(made).__qualname__}, not io.BytesIO")
    return np.frombuffer(made.getbuffer(), np.uint8)


def _plain_tensor(made: Any, item: Any, planner: Any) -> Any:
    """The tensor without its history, checked against the box that the plan says."""
    torch, key = torch_module(), item.index.fqn
    if not isinstance(made, torch.Tensor):
        raise PlanError(f"{key}: the planner resolved a tensor to {type(made).__qualname__}")
    tensor = made.detach()
    if type(tensor) is not torch.Tensor:
        cure = array_refusal(tensor) or "resolve it to its local shard, or to a plain tensor"
        raise UnsafeObjectError(f"{key}: {type(made).__qualname__} cannot be stored; {cure}")
    if tuple(tensor.shape) != tuple(item.tensor_data.chunk.sizes):
        cure = CACHE_CURE if caches_plans(planner) else "change the item's tensor_data together with resolve_data"
        raise PlanError(
            f"{key}: the planner planned a chunk of shape {tuple(item.tensor_data.chunk.sizes)} and resolved a tensor "
            f"of shape {tuple(tensor.shape)}; {cure}"
        )
    return tensor
