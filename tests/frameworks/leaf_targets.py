"""Every way to load an array leaf: what it is loaded into, and what must come of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import torch
from leaf_dtypes import BY_STORED, NARROWER, ONLY_WITH_X64, WIDER, LeafDtype, element_bits, packed_mask
from leaf_layouts import change_signs, host_array, jax_array, torch_tensor

__all__ = [
    "MODES",
    "STYLES",
    "Mode",
    "assert_filled",
    "assert_free",
    "assert_untouched",
    "assert_values",
    "has_target",
    "host_elements",
    "make_target",
    "target_dtype",
    "version_of",
]

Shape = tuple[int, ...]


class Mode(NamedTuple):
    """A way to load: without a target, into one of the same dtype, with a conversion, or into one that must be refused.

    Attributes
    ----------
    style
        Which sort of target, of those in ``STYLES``.
    cast
        Whether conversion is asked for.
    types
        Whether the classes of records are given.
    """

    name: str
    kind: Literal["free", "fill", "wider", "narrower", "refuse"]
    framework: str
    style: str = ""
    cast: bool = False
    types: bool = False
    x64: bool = False


# --- targets ---------------------------------------------------------------------------------------------


def _memory(shape: Shape, dtype: LeafDtype) -> np.ndarray:
    """Bytes for a target, none of them zero."""
    return np.full(math.prod(shape) * dtype.itemsize, 1 if dtype.host.kind == "b" else 0xA5, np.uint8)


def _numpy(shape: Shape, dtype: LeafDtype) -> np.ndarray:
    return host_array(_memory(shape, dtype), dtype, shape)


def _torch(shape: Shape, dtype: LeafDtype) -> Any:
    memory = _memory(shape, dtype)
    if not memory.size:
        return torch.empty(shape, dtype=getattr(torch, dtype.name))
    return torch_tensor(memory, dtype, shape)


def _jax(shape: Shape, dtype: LeafDtype) -> Any:
    memory = _memory(shape, dtype)
    memory &= np.uint8(packed_mask(dtype.stored))
    return jax_array(host_array(memory, dtype, shape), dtype)


def _spread(shape: Shape) -> tuple[Shape, tuple[Any, ...]]:
    """A larger shape, and the index of every other element of it, with some before and behind."""
    return tuple(2 * size + 3 for size in shape), (*(slice(1, 2 * size + 1, 2) for size in shape), ...)


def _strided(make: Callable[[Shape, LeafDtype], Any]) -> Callable[[Shape, LeafDtype], Any]:
    def made(shape: Shape, dtype: LeafDtype) -> Any:
        larger, index = _spread(shape)
        return make(larger, dtype)[index]

    return made


def _transposed(make: Callable[[Shape, LeafDtype], Any]) -> Callable[[Shape, LeafDtype], Any]:
    def made(shape: Shape, dtype: LeafDtype) -> Any:
        return make(shape[::-1], dtype).transpose(*reversed(range(len(shape))))

    return made


def _torch_transposed(shape: Shape, dtype: LeafDtype) -> Any:
    return _torch(shape[::-1], dtype).permute(tuple(reversed(range(len(shape)))))


def _reversed(shape: Shape, dtype: LeafDtype) -> np.ndarray:
    return _numpy(shape, dtype)[(*(slice(None, None, -1) for _ in shape), ...)]


def _parameter(shape: Shape, dtype: LeafDtype) -> Any:
    return torch.nn.Parameter(_torch(shape, dtype), requires_grad=dtype.is_floating or dtype.is_complex)


def _needs_grad(shape: Shape, dtype: LeafDtype) -> Any:
    return _torch(shape, dtype).requires_grad_()


def _inference(shape: Shape, dtype: LeafDtype) -> Any:
    with torch.inference_mode():
        return torch.empty(shape, dtype=getattr(torch, dtype.name))


def _meta(shape: Shape, dtype: LeafDtype) -> Any:
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")


def _meta_parameter(shape: Shape, dtype: LeafDtype) -> Any:
    return torch.nn.Parameter(_meta(shape, dtype), requires_grad=dtype.is_floating or dtype.is_complex)


def _conjugated(shape: Shape, dtype: LeafDtype) -> Any:
    return _torch_transposed(shape, dtype).conj()


def _negated(shape: Shape, dtype: LeafDtype) -> Any:
    return torch.view_as_complex(_torch((*shape, 2), dtype)).conj().imag


def _shape_only(shape: Shape, dtype: LeafDtype) -> Any:
    return jax.ShapeDtypeStruct(shape, _jax((), dtype).dtype)


STYLES: Mapping[str, Mapping[str, Callable[[Shape, LeafDtype], Any]]] = {
    "numpy": {
        "contiguous": _numpy,
        "transposed": _transposed(_numpy),
        "strided": _strided(_numpy),
        "reversed": _reversed,
    },
    "torch": {
        "contiguous": _torch,
        "transposed": _torch_transposed,
        "strided": _strided(_torch),
        "Parameter": _parameter,
        "leaf that requires grad": _needs_grad,
        "inference tensor": _inference,
        "meta tensor": _meta,
        "meta Parameter": _meta_parameter,
        "conjugated": _conjugated,
        "negated": _negated,
    },
    "jax": {"array": _jax, "ShapeDtypeStruct": _shape_only},
}
_ACCEPTS: Mapping[str, Callable[[LeafDtype], bool]] = {
    "leaf that requires grad": lambda dtype: dtype.is_floating or dtype.is_complex,
    "conjugated": lambda dtype: dtype.is_complex,
    "negated": lambda dtype: dtype.stored in ("float16", "float32", "float64"),
}
_MADE_ANEW = {"meta tensor", "meta Parameter", "array", "ShapeDtypeStruct"}
_USUAL = {"numpy": "contiguous", "torch": "contiguous", "jax": "array"}

MODES: tuple[Mode, ...] = (
    Mode("no target, numpy", "free", "numpy"),
    Mode("no target, numpy, with types", "free", "numpy", types=True),
    Mode("no target, torch", "free", "torch", types=True),
    Mode("no target, jax", "free", "jax"),
    Mode("no target, jax with 64 bits", "free", "jax", types=True, x64=True),
    *(
        Mode(f"into {framework}, {style}", "fill", framework, style)
        for framework, styles in STYLES.items()
        for style in styles
    ),
    *(
        Mode(f"{kind} {framework}", kind, framework, style, cast=True)
        for framework, style in {"numpy": "strided", "torch": "transposed", "jax": "array"}.items()
        for kind in ("wider", "narrower")
    ),
    *(Mode(f"refused {framework}", "refuse", framework, style) for framework, style in _USUAL.items()),
    *(Mode(f"refused {framework}, cast", "refuse", framework, style, cast=True) for framework, style in _USUAL.items()),
)


def target_dtype(stored: LeafDtype, mode: Mode) -> LeafDtype | None:
    """The dtype of the target of a leaf, or None where the mode does not concern such leaves."""
    known = BY_STORED[mode.framework]
    if mode.kind == "free":
        return stored
    if mode.kind == "fill":
        return known.get(stored.stored)
    if mode.kind != "refuse":
        return known.get((WIDER if mode.kind == "wider" else NARROWER).get(stored.stored, ""))
    if not mode.cast:
        return known["int16" if stored.stored != "int16" else "float16"]
    return None if stored.is_number and not stored.is_complex else known["float32"]


def has_target(stored: LeafDtype, mode: Mode) -> bool:
    """Whether leaves of a dtype are loaded in this mode."""
    dtype = target_dtype(stored, mode)
    return dtype is not None and _ACCEPTS.get(mode.style, lambda dtype: True)(dtype)


def make_target(shape: Shape, dtype: LeafDtype, mode: Mode) -> Any:
    """A target whose every element is to be overwritten."""
    return STYLES[mode.framework][mode.style](shape, dtype)


# --- what must come of it ----------------------------------------------------------------------------------


def host_elements(leaf: Any, dtype: LeafDtype) -> np.ndarray:
    """A leaf's elements, read without savestream."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, torch.Tensor):
        return _tensor_elements(leaf.detach(), dtype)
    if dtype.host.names is None:
        return np.asarray(leaf)
    words = np.asarray(jax.random.key_data(leaf))
    return np.ascontiguousarray(words).view(dtype.host).reshape(leaf.shape)


def _tensor_elements(tensor: Any, dtype: LeafDtype) -> np.ndarray:
    """A tensor's elements; marks are followed by flipping signs, since torch's arithmetic changes some NaNs."""
    part = "last" if tensor.is_conj() or tensor.is_neg() else ""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if dtype.itemsize <= 8:
        tensor = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    elements = np.array(tensor.numpy().view(f"V{dtype.itemsize}"), order="C")
    change_signs(elements, part)
    return elements.view(dtype.host)


def assert_free(found: Any, expected: np.ndarray, dtype: LeafDtype, mode: Mode) -> None:
    """Check what came back without a target."""
    known = BY_STORED[mode.framework].get(dtype.stored)
    if known is None or (mode.framework == "jax" and not mode.x64 and dtype.stored in ONLY_WITH_X64):
        known = None
    _assert_class(found, "numpy" if known is None else mode.framework, dtype if known is None else known)
    if mode.framework == "torch" and known is not None:
        assert not found.requires_grad
        assert found.is_contiguous()
    _assert_bits(found, expected, dtype, mode)


def assert_filled(
    found: Any, target: Any, version: int | None, expected: np.ndarray, dtype: LeafDtype, mode: Mode
) -> None:
    """Check what became of a target of ``dtype`` that was to hold ``expected``."""
    if mode.style in _MADE_ANEW:
        assert found is not target
        if mode.framework == "torch":
            assert found.requires_grad == target.requires_grad
            assert not found.is_meta
    else:
        assert found is target
        if version is not None:
            assert target._version > version, "autograd was not told"
    _assert_class(found, mode.framework, dtype)
    if mode.style.endswith("Parameter"):
        assert type(found) is torch.nn.Parameter
    if mode.kind == "fill":
        _assert_bits(found, expected, dtype, mode)
    else:
        assert_values(found, expected, dtype)


def assert_untouched(target: Any, before: Any, version: int | None, dtype: LeafDtype) -> None:
    """Check that a refused load left a target alone."""
    assert element_bits(host_elements(target, dtype)) == before
    assert version is None or target._version == version


def version_of(target: Any) -> int | None:
    """The counter by which autograd notices changes."""
    return target._version if isinstance(target, torch.Tensor) and not target.is_inference() else None


def _assert_class(found: Any, framework: str, dtype: LeafDtype) -> None:
    if framework == "numpy":
        assert type(found) is np.ndarray
        assert (found.dtype, found.dtype.fields, found.dtype.itemsize) == (
            dtype.host,
            dtype.host.fields,
            dtype.itemsize,
        )
        assert found.dtype.byteorder == dtype.host.byteorder
    elif framework == "torch":
        assert isinstance(found, torch.Tensor)
        assert found.dtype is getattr(torch, dtype.name)
    else:
        assert isinstance(found, jax.Array)
        assert str(found.dtype) == (dtype.name if dtype.host.names is None else str(_jax((), dtype).dtype))


def _assert_bits(found: Any, expected: np.ndarray, dtype: LeafDtype, mode: Mode) -> None:
    assert tuple(found.shape) == expected.shape
    bits, wanted = element_bits(host_elements(found, dtype)), element_bits(expected)
    mask = packed_mask(dtype.stored)
    if isinstance(found, jax.Array) and mask != 0xFF:
        wanted = bytes(byte & mask for byte in wanted)
    assert bits == wanted


def assert_values(found: Any, expected: np.ndarray, dtype: LeafDtype) -> None:
    """Equal numbers of equal signs; one nan is as good as another."""
    assert tuple(found.shape) == expected.shape
    elements = host_elements(found, dtype)
    assert elements.dtype == expected.dtype
    wide = np.clongdouble if dtype.is_complex else np.longdouble
    with np.errstate(all="ignore"):
        one, other = elements.astype(wide), expected.astype(wide)
    assert np.array_equal(one, other, equal_nan=True)
    assert np.array_equal(np.signbit(one.real) | np.isnan(one.real), np.signbit(other.real) | np.isnan(other.real))
