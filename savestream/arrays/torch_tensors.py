"""PyTorch's tensors as leaves. PyTorch is the caller's: this module never imports it.

Bytes are reached through ``detach()`` and a view as integers of the same size, so that bfloat16, fp8 and sub-byte types
need no numpy equivalent.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, HostArray, Shape, effective_strides
from savestream.arrays.dtypes import OPAQUE_DTYPES, dtype_from_name
from savestream.arrays.elements import copy_elements
from savestream.arrays.memory_views import view_of_memory
from savestream.arrays.sign_bits import SIGNED_DTYPES, flip_signs
from savestream.arrays.torch_devices import copy_range, join_on_device, wait_for_devices
from savestream.errors import PlanError, UnsafeObjectError

__all__ = ["TorchAdapter", "is_torch_type", "torch_adapter_for", "torch_refusal"]

_NATIVE = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# numpy has no such type of its own: torch shows them as these integers
_AS_INT32 = ("complex32",)
_AS_INT16 = ("bfloat16", "bits16")
_AS_UINT8 = (
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    *(name for name in OPAQUE_DTYPES if name != "bits16"),
)

# torch itself can neither copy nor join these, but it can view them as other types
_WITHOUT_COPY = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))

_META = "a meta tensor holds no data; materialise it (to_empty()) and initialise it before saving"


class _Element(msgspec.Struct, frozen=True):
    """One torch dtype: its stored name, the torch dtype under which numpy takes it, and numpy's dtype for it."""

    name: str
    shown_as: Any
    numpy: np.dtype[Any]


def is_torch_type(kind: type) -> bool:
    """Whether ``kind`` is a class of tensors, of torch's own or derived from it."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(kind, tensor)


def torch_adapter_for(kind: type) -> TorchAdapter | None:
    """The adapter for tensors of exactly this class; None for subclasses, which may hold anything."""
    torch = sys.modules["torch"]
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind is getattr(torch.nn, "Buffer", None):
        return _adapter()
    return None


def torch_refusal(value: Any) -> str:
    """What to do about a tensor of a class that is not supported."""
    name = type(value).__name__
    if "Fake" in name or "Functional" in name:
        return "it holds no data, as tensors under tracing do; save the real tensors, outside of the tracing"
    if "Nested" in name:
        return "store its components (unbind())"
    if "Uninitialized" in name:
        return "a lazy module's parameter has no data before the first forward pass; run one first"
    return (
        "a subclass of torch.Tensor may hold more than its elements; store the plain tensors that it is made of, or "
        "give it global_shape, global_offsets, local_offsets and local_sizes (CheckpointableTensor)"
    )


@functools.cache
def _adapter() -> TorchAdapter:
    return TorchAdapter(sys.modules["torch"])


def _extent(shape: Shape, strides: Shape, itemsize: int) -> int:
    """Bytes from the first element to the end of the last."""
    return itemsize + sum([(size - 1) * step for size, step in zip(shape, strides, strict=True)])


def _freed() -> PlanError:
    """Memory that was freed after the planning would be read past its end, and nothing would notice."""
    return PlanError(
        "a tensor's storage was freed between planning and staging, as FSDP does between steps; leave the state as it "
        "is until the save is staged"
    )


class TorchAdapter(ArrayAdapter):
    """torch.Tensor and torch.nn.Parameter, on any device; strided, with data."""

    framework = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensor = torch.Tensor
        self._elements: dict[Any, _Element] = {}
        self._dtypes: dict[str, Any] = {}
        shown = [(name, None) for name in _NATIVE]
        shown += [(name, torch.int32) for name in _AS_INT32] + [(name, torch.int16) for name in _AS_INT16]
        shown += [(name, torch.uint8) for name in _AS_UINT8]
        for name, shown_as in shown:
            dtype = getattr(torch, name, None)  # older releases lack some
            if dtype is not None:
                self._elements[dtype] = _Element(name, shown_as, dtype_from_name(name))
                self._dtypes[name] = dtype

    # --- saving ---

    def info(self, array: Any, key: str) -> ArrayInfo:
        info, extent = self._inspect(array, key)
        if info.nbytes and array.device.type != "meta" and not self._holds(array, extent):
            raise UnsafeObjectError(
                f"{key}: the tensor's storage was freed (it has {array.untyped_storage().nbytes()} bytes, the tensor "
                f"needs {array.storage_offset() * info.itemsize + extent}), as FSDP does between steps; save the "
                "sharded parameters, or gather them first"
            )
        return info

    def describe(self, arrays: Sequence[Any], keys: Sequence[str]) -> tuple[list[int], dict[int, ArrayInfo]]:
        try:
            firsts = self._firsts(arrays)
            described = {first: self._inspect(arrays[first], keys[first]) for first in sorted(set(firsts))}
            if self._hold(arrays, firsts, described):
                return firsts, {position: info for position, (info, _) in described.items()}
        except RuntimeError:  # a tensor without strides or storage
            pass
        return super().describe(arrays, keys)  # finds by name what is wrong

    def _firsts(self, arrays: Sequence[Any]) -> list[int]:
        """The first tensor like each, found column by column: a call for each tensor would cost several times more."""
        tensor, read = self._tensor, operator.attrgetter
        dtypes = list(map(read("dtype"), arrays))
        columns: list[Iterable[Any]] = [dtypes, map(type, arrays), map(tensor.is_neg, arrays)]
        if not all(map(read("is_cpu"), arrays)):
            columns.append(array.device.type for array in arrays)
            wait_for_devices(self._torch, {array.device for array in arrays if not (array.is_cpu or array.is_meta)})
        if any(dtype.is_complex for dtype in set(dtypes)):
            columns.append(map(tensor.is_conj, arrays))
        varying = [column for column in map(list, columns) if len(set(column)) > 1]
        varying.append(list(map(read("shape"), arrays)))
        if not all(map(tensor.is_contiguous, arrays)):
            varying.append(list(map(tensor.stride, arrays)))
        known: dict[Any, int] = {}
        keys: Iterable[Any] = zip(*varying, strict=True) if len(varying) > 1 else varying[0]
        return list(map(known.setdefault, keys, range(len(arrays))))

    def _hold(
        self, arrays: Sequence[Any], firsts: Sequence[int], described: Mapping[int, tuple[ArrayInfo, int]]
    ) -> bool:
        """Whether every tensor has memory, which reaches to its last element."""
        addresses = self.addresses(arrays)
        if 0 in addresses and any(
            not address and described[first][1] for address, first in zip(addresses, firsts, strict=True)
        ):
            return False
        sizes = map(self._torch.UntypedStorage.nbytes, map(self._tensor.untyped_storage, arrays))
        offsets = list(map(self._tensor.storage_offset, arrays))
        extents = {position: extent for position, (_, extent) in described.items()}
        needed: Iterable[int] = map(extents.__getitem__, firsts)
        if any(offsets):
            itemsizes = {position: info.itemsize for position, (info, _) in described.items()}
            starts = map(operator.mul, offsets, map(itemsizes.__getitem__, firsts))
            needed = map(operator.add, needed, starts)
        return all(map(operator.le, needed, sizes))

    def _inspect(self, array: Any, key: str) -> tuple[ArrayInfo, int]:
        self._refuse_without_data(array, key)
        return self._describe(array, key)

    def _describe(self, array: Any, key: str) -> tuple[ArrayInfo, int]:
        """The tensor's description, and the bytes from its first element to the end of its last."""
        element = self._elements.get(array.dtype)
        if element is None:
            raise UnsafeObjectError(f"{key}: dtype {array.dtype} cannot be stored; convert the tensor to another one")
        shape, stride, itemsize = tuple(array.shape), array.stride(), array.element_size()
        strides = tuple([step * itemsize for step in stride])
        extent = _extent(shape, strides, itemsize)
        marks = [array.device.type] if not array.is_cpu else []
        marks += ["conj"] if array.is_conj() else []
        marks += ["neg"] if array.is_neg() else []
        info = ArrayInfo(element.name, shape, strides, itemsize, " ".join(marks))
        return info, extent if math.prod(shape) else 0

    def _refuse_without_data(self, array: Any, key: str, *, meta: bool = False) -> None:
        problem = self._problem(array, meta)
        if problem:
            raise UnsafeObjectError(f"{key}: {problem}")

    def _problem(self, array: Any, meta: bool) -> str | None:
        if array.is_nested:
            return "nested tensors cannot be stored; store their components (unbind())"
        if array.layout is not self._torch.strided:
            return f"a tensor of layout {array.layout} cannot be stored; store its indices and values, or to_dense()"
        if array.is_quantized:
            return "quantised tensors cannot be stored; store int_repr(), scale and zero point"
        if array.device.type == "meta":
            return None if meta else _META
        try:
            if array.data_ptr() or not array.untyped_storage().nbytes() or not array.numel():
                return None
            reason = "its address is 0"  # so it is inside functionalize, where reading would give anything
        except RuntimeError as error:  # or what derives from it
            reason = str(error)
        return f"the tensor gives no access to its data, as inside torch.func or under tracing ({reason})"

    def _holds(self, array: Any, extent: int) -> bool:
        end = array.storage_offset() * array.element_size() + extent
        return bool(array.untyped_storage().nbytes() >= end)

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return list(map(self._tensor.data_ptr, arrays))

    def host_view(self, array: Any) -> HostArray:
        tensor = array.detach()
        if self._has_flipped_signs(tensor):
            elements = np.array(self._shown(tensor), order="C")
            self._flip_signs(tensor, elements)
            return elements
        tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        return self._shown(tensor)

    def _has_flipped_signs(self, tensor: Any) -> bool:
        """Whether a tensor in host memory is marked as conjugated or negated, and is so by flipping sign bits.

        torch's own arithmetic changes the bits of some NaNs, and would do it with the whole tensor for each part of it.
        """
        return self._is_lazy(tensor) and tensor.is_cpu and self._elements[tensor.dtype].name in SIGNED_DTYPES

    def _flip_signs(self, tensor: Any, elements: HostArray) -> None:
        """Lead from what lies in a marked tensor's memory to its elements, or back."""
        name = self._elements[tensor.dtype].name
        flip_signs(elements, name, conjugate=tensor.is_conj(), negate=tensor.is_neg())

    def _shown(self, tensor: Any) -> HostArray:
        """A numpy view of a tensor in host memory.

        ``Tensor.numpy()`` would forbid for good that the storage is resized, as FSDP does between steps.
        """
        dtype, shape = self._elements[tensor.dtype].numpy, tuple(tensor.shape)
        if 0 in shape:
            return np.empty(shape, dtype)
        strides, extent = None, tensor.numel() * dtype.itemsize
        if not tensor.is_contiguous():
            strides = tuple([step * dtype.itemsize for step in tensor.stride()])
            extent = _extent(shape, strides, dtype.itemsize)
        storage = tensor.untyped_storage()
        if storage.nbytes() < tensor.storage_offset() * dtype.itemsize + extent:
            raise _freed()
        return view_of_memory(tensor.data_ptr(), storage, shape, dtype, strides)

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        if self._has_flipped_signs(array):
            copy_elements(self._shown(array), start, stop, target)
            self._flip_signs(array, target)
            return
        if array.is_cpu:
            super().copy_elements(array, start, stop, target)
            return
        copy_range(self._torch, array, start, stop, target)

    def join(self, arrays: Sequence[Any]) -> HostArray:
        parts = []
        for _, run in itertools.groupby(arrays, operator.attrgetter("dtype", "device")):
            parts.append(self._join_alike(list(run)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _join_alike(self, tensors: list[Any]) -> HostArray:
        """Flatten and join in one call, which gives up the GIL; a call for each tensor would cost ten times more."""
        torch = self._torch
        if len(tensors) == 1 or any(map(self._is_lazy, tensors)):  # torch would not copy a single one
            return super().join(tensors)
        sizes = map(torch.UntypedStorage.nbytes, map(self._tensor.untyped_storage, tensors))
        if 0 in sizes and any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
            raise _freed()
        element = self._elements[tensors[0].dtype]
        with torch.no_grad():
            if element.name in _WITHOUT_COPY:
                tensors = [tensor.view(element.shown_as) for tensor in tensors]
            return join_on_device(torch, tensors)

    def _is_lazy(self, tensor: Any) -> bool:
        return bool(tensor.is_conj() or tensor.is_neg())

    # --- loading ---

    def target_info(self, array: Any, key: str) -> ArrayInfo:
        self._refuse_without_data(array, key, meta=True)
        return self._describe(array, key)[0] if array.device.type == "meta" else self.info(array, key)

    def target_infos(self, arrays: Sequence[Any], keys: Sequence[str]) -> list[ArrayInfo]:
        if any(map(operator.attrgetter("is_meta"), arrays)):
            return super().target_infos(arrays, keys)
        firsts, infos = self.describe(arrays, keys)
        return [infos[first] for first in firsts]

    def own_memory(self, array: Any) -> HostArray | None:
        if not array.is_cpu or self._is_lazy(array):
            return None
        return self._shown(array)

    def own_memories(self, arrays: Sequence[Any]) -> list[HostArray | None]:
        tensor = self._tensor
        usual = all(map(operator.attrgetter("is_cpu"), arrays)) and not any(map(tensor.is_neg, arrays))
        if usual and not any(map(tensor.is_conj, arrays)):
            return list(map(self._shown, arrays))
        return super().own_memories(arrays)

    def is_filled_in_place(self, array: Any) -> bool:
        return bool(array.device.type != "meta")

    def identity(self, array: Any) -> Hashable | None:
        if array.device.type != "meta" or not array.numel():
            return None
        storage = array.untyped_storage()._cdata
        shape = tuple(array.shape)
        return storage, array.storage_offset(), shape, effective_strides(shape, array.stride()), array.dtype

    def changed(self, arrays: Sequence[Any]) -> None:
        tracked = [array for array in arrays if not array.is_inference()]  # inference tensors have no version
        if tracked:
            self._torch.autograd.graph.increment_version(tracked)

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        if array.device.type == "meta":
            return self._materialised(array, parts[0][1])
        content = parts[0][1]
        if self._has_flipped_signs(array):
            self._flip_signs(array, content)
            np.copyto(self._shown(array), content)
        else:
            with self._torch.no_grad():
                array.detach().copy_(self.from_host(content, self._elements[array.dtype].name))
        self.changed([array])
        return array

    def _materialised(self, array: Any, content: HostArray) -> Any:
        return self._like(array, self.from_host(content, self._elements[array.dtype].name))

    def tied(self, array: Any, made: Any) -> Any:
        return self._like(array, made.detach())  # one storage, one count of changes

    def _like(self, array: Any, tensor: Any) -> Any:
        if type(array) is self._torch.nn.Parameter:
            return self._torch.nn.Parameter(tensor, requires_grad=array.requires_grad)
        return tensor.requires_grad_(array.requires_grad)

    def from_host(self, array: HostArray, dtype: str) -> Any:
        wanted = self._dtypes.get(dtype)
        if wanted is None:
            return array
        element = self._elements[wanted]
        if element.shown_as is None:
            return self._torch.from_numpy(array)
        shown = {1: np.uint8, 2: np.int16, 4: np.int32}[array.dtype.itemsize]
        return self._torch.from_numpy(array.view(shown)).view(wanted)
