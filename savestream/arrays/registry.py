"""Which adapter serves which class of leaves. A framework is looked for only where the caller has imported it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo
from savestream.arrays.elements import HostArray
from savestream.arrays.file_arrays import FileArray, FileArrayAdapter
from savestream.arrays.foreign_arrays import foreign_adapter_for
from savestream.arrays.jax_arrays import is_jax_type, jax_adapter_for, jax_refusal
from savestream.arrays.numpy_arrays import NUMPY_TYPES, NumpyAdapter
from savestream.arrays.torch_distributed import dtensor_adapter_for, is_dtensor_type
from savestream.arrays.torch_tensors import is_torch_type, torch_adapter_for, torch_refusal
from savestream.errors import PlanError, UnsafeObjectError

__all__ = [
    "adapter_for",
    "adapter_of",
    "array_info",
    "array_refusal",
    "as_plain_array",
    "framework_adapter",
    "host_view",
    "is_array",
    "plain_array_types",
]

_NUMPY = NumpyAdapter()
# Classes of frameworks live as long as the process; any other class may go, and must not be kept by being known here.
_supported: dict[type, ArrayAdapter] = {FileArray: FileArrayAdapter(), **dict.fromkeys(NUMPY_TYPES, _NUMPY)}
_found: weakref.WeakKeyDictionary[type, ArrayAdapter | None] = weakref.WeakKeyDictionary()


_FRAMEWORKS: tuple[tuple[Callable[[type], bool], Callable[[type], ArrayAdapter | None]], ...] = (
    (is_dtensor_type, dtensor_adapter_for),
    (is_torch_type, torch_adapter_for),
    (is_jax_type, jax_adapter_for),
)


def adapter_for(kind: type) -> ArrayAdapter | None:
    """The adapter for leaves of exactly this class, or None where it is no supported array."""
    adapter = _supported.get(kind)
    if adapter is None:
        if kind not in _found:
            _found[kind] = _find(kind)
        adapter = _found[kind]
    return adapter


def _find(kind: type) -> ArrayAdapter | None:
    for is_own, find in _FRAMEWORKS:
        if is_own(kind):
            adapter = find(kind)
            if adapter is not None:
                _supported[kind] = adapter
            return adapter
    return foreign_adapter_for(kind)


def adapter_of(array: object, key: str | None = None) -> ArrayAdapter:
    """The adapter for a leaf that must be an array; ``key`` names it in the error."""
    adapter = adapter_for(type(array))
    if adapter is None:
        named = "" if key is None else f"{key}: "
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        raise UnsafeObjectError(f"{named}{kind} is not a supported array")
    return adapter


def as_plain_array(array: Any) -> Any:
    """A view, of a supported class, of a subclass's own elements. Only for one that says itself what it holds."""
    kind = type(array)
    if isinstance(array, np.ndarray):
        return array if kind is np.ndarray else array.view(np.ndarray)
    if is_torch_type(kind) and adapter_for(kind) is None:
        return array.as_subclass(sys.modules["torch"].Tensor)
    return array


def plain_array_types() -> frozenset[type]:
    """Classes whose instances are whole arrays without any further look at them: the usual leaves."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not hasattr(torch.nn, "Parameter"):
        return _NUMPY_ONLY
    return frozenset((np.ndarray, torch.Tensor, torch.nn.Parameter))


_NUMPY_ONLY: frozenset[type] = frozenset({np.ndarray})


def framework_adapter(framework: str) -> ArrayAdapter:
    """The adapter that makes arrays of a framework by name, which the caller must have imported."""
    if framework == "numpy":
        return _NUMPY
    if framework not in ("torch", "jax"):
        raise PlanError(f"framework={framework!r}: use 'numpy', 'torch' or 'jax'")
    module = sys.modules.get(framework)
    if module is None:
        raise PlanError(f"framework={framework!r}: import {framework} first; savestream does not import it by itself")
    kind = getattr(module, "Tensor" if framework == "torch" else "ShapeDtypeStruct", None)
    adapter = adapter_for(kind) if kind is not None else None
    if adapter is None:
        raise PlanError(f"framework={framework!r}: {framework} is not the package of that name, or is being imported")
    return adapter


def array_refusal(value: Any) -> str | None:
    """What to do about a value that is an array of a class that is not supported; None where it is no such array."""
    kind = type(value)
    if isinstance(value, np.ndarray) and kind not in NUMPY_TYPES:
        return "store a masked array's data and mask as two arrays, another subclass of ndarray as numpy.asarray of it"
    if is_torch_type(kind) and adapter_for(kind) is None:
        return torch_refusal(value)
    if is_jax_type(kind) and adapter_for(kind) is None:
        return jax_refusal(value)
    return None


def is_array(value: object) -> bool:
    """Whether ``value`` is an array leaf that savestream stores as bytes."""
    return adapter_for(type(value)) is not None


def array_info(array: object, key: str) -> ArrayInfo:
    """Describe a leaf; ``key`` names it in errors."""
    return adapter_of(array, key).info(array, key)


def host_view(array: object) -> HostArray:
    """The leaf's elements as a numpy array; a view where they lie in host memory as they are."""
    return adapter_of(array).host_view(array)
