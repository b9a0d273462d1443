"""Every layout that an array leaf may have: how it is made of a base, and which elements it then has."""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from leaf_dtypes import FRAMEWORKS, LeafDtype, random_memory

__all__ = [
    "LAYOUTS",
    "BuiltLeaf",
    "Layout",
    "build",
    "change_signs",
    "host_array",
    "jax_array",
    "layouts_of",
    "torch_tensor",
]

Make = Callable[[Any], Any]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)  # of which torch says once in each process that it is experimental


def _any_dtype(dtype: LeafDtype) -> bool:
    del dtype
    return True


class Layout(NamedTuple):
    """How leaves are made of a contiguous base of ``shape``.

    Attributes
    ----------
    elements
        The elements that the leaf has, as a view of a numpy base.
    makes
        For each framework that has such a layout: the leaf, made of that framework's base. JAX's base is put on its
        device after that, and what "jax device" names is then done there.
    accepts
        Whether a dtype has it.
    negates
        Which part of a complex number (or the only one of a real number) has the other sign than in the base.
    """

    name: str
    shape: tuple[int, ...]
    elements: Make
    makes: Mapping[str, Make]
    accepts: Callable[[LeafDtype], bool] = _any_dtype
    negates: Literal["", "first", "last"] = ""


class BuiltLeaf(NamedTuple):
    """A leaf, its elements as a C-contiguous numpy array that shares nothing with it, and the memory behind it."""

    leaf: Any
    expected: np.ndarray
    memory: np.ndarray


def _itself(base: Any) -> Any:
    return base


def _is_continuous(dtype: LeafDtype) -> bool:
    return dtype.is_floating or dtype.is_complex


def _is_part(dtype: LeafDtype) -> bool:
    """Whether torch has complex numbers made of two of these."""
    return dtype.stored in ("float16", "float32", "float64")


def _is_no_key(dtype: LeafDtype) -> bool:
    return not dtype.stored.startswith("prng_key<")


def _has_bytes(dtype: LeafDtype) -> bool:
    return dtype.itemsize > 0


def _is_complex(dtype: LeafDtype) -> bool:
    return dtype.is_complex


def _same(make: Make, *frameworks: str) -> dict[str, Make]:
    return dict.fromkeys(frameworks or FRAMEWORKS, make)


def _as_memmap(base: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, base.dtype, "w+", shape=base.shape)
    _opaque(mapped)[...] = _opaque(base)
    return mapped


def _unaligned(base: np.ndarray) -> np.ndarray:
    memory = np.empty(base.nbytes + 1, np.uint8)
    memory[1:] = base.reshape(-1).view(np.uint8)
    return memory[1:].view(base.dtype).reshape(base.shape)


def _read_only(base: np.ndarray) -> np.ndarray:
    base = base.view()
    base.flags.writeable = False
    return base


def _numpy_owning(base: np.ndarray, order: Literal["C", "F"] = "C") -> np.ndarray:
    """An array that owns its memory, with all bytes of the base, padding too."""
    array = np.ndarray(base.shape, base.dtype, order=order)
    _opaque(array)[...] = _opaque(base)
    return array


def _torch_owning(base: Any) -> Any:
    """A tensor that owns its memory, made without arithmetic, which many dtypes lack."""
    tensor = torch.empty(base.shape, dtype=base.dtype)
    tensor.view(torch.uint8).copy_(base.view(torch.uint8))
    return tensor


def _in_inference(base: Any) -> Any:
    with torch.inference_mode():
        return _torch_owning(base)


def _parameter(base: Any) -> Any:
    return torch.nn.Parameter(base, requires_grad=base.dtype.is_floating_point or base.dtype.is_complex)


def _column_major(array: Any) -> Any:
    return jax.device_put(array, Format(DeviceLayout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0])))


def _over_numpy(array: Any) -> Any:
    """An array that may look at numpy's memory instead of having its own."""
    return jnp.asarray(np.asarray(array))


def _windows(base: np.ndarray) -> np.ndarray:
    """Made by hand, since numpy's own function knows too few dtypes."""
    step = base.dtype.itemsize
    return np.ndarray((8, 5), base.dtype, base.view(np.uint8).data if step else None, strides=(step, step))


def _weak(array: Any) -> Any:
    """An array whose dtype gives way to others in arithmetic; the default dtypes only can have that."""
    with jax.enable_x64(False):
        number = jnp.asarray({"i": 0, "f": 0.0, "c": 0j}[array.dtype.kind])
        made = jnp.broadcast_to(number, array.shape).at[...].set(array)
    assert made.weak_type
    assert made.dtype == array.dtype
    return made


LAYOUTS: tuple[Layout, ...] = (
    Layout("contiguous", (4, 6), _itself, _same(_itself)),
    Layout("transposed", (4, 6), lambda a: a.T, _same(lambda a: a.T)),
    Layout(
        "permuted",
        (2, 3, 4),
        lambda a: a.transpose(1, 2, 0),
        {"numpy": lambda a: a.transpose(1, 2, 0), "torch": lambda t: t.permute(1, 2, 0)},
    ),
    Layout("every other row, every third column", (6, 8), lambda a: a[1::2, ::3], _same(lambda a: a[1::2, ::3])),
    Layout("one column", (4, 6), lambda a: a[:, 1], _same(lambda a: a[:, 1], "numpy", "torch")),
    Layout("0-d", (4, 6), lambda a: a[1, 2, ...], _same(lambda a: a[1, 2, ...])),
    Layout("one element", (4, 6), lambda a: a[2:3, 4:5], _same(lambda a: a[2:3, 4:5], "numpy", "torch")),
    Layout("no rows", (4, 6), lambda a: a[:0], _same(lambda a: a[:0])),
    Layout("no columns", (4, 6), lambda a: a[:, 3:3], _same(lambda a: a[:, 3:3], "numpy", "torch")),
    Layout("middle of a base", (400,), lambda a: a[190:201], _same(lambda a: a[190:201], "numpy", "torch")),
    Layout("inner box of a base", (9, 8), lambda a: a[3:5, 2:7], _same(lambda a: a[3:5, 2:7], "numpy", "torch")),
    Layout("new axes", (4, 6), lambda a: a[:, None, :, None], _same(lambda a: a[:, None, :, None], "numpy", "torch")),
    Layout(
        "broadcast",
        (4, 6),
        lambda a: np.broadcast_to(a[2], (3, 6)),
        {
            "numpy": lambda a: np.broadcast_to(a[2], (3, 6)),
            "torch": lambda t: t[2].expand(3, 6),
            "jax": lambda a: np.broadcast_to(a[2], (3, 6)),
        },
    ),
    Layout("sliding windows", (12,), _windows, {"numpy": _windows, "torch": lambda t: t.unfold(0, 5, 1)}),
    Layout("Fortran order", (4, 6), _itself, {"numpy": functools.partial(_numpy_owning, order="F")}),
    Layout("transposed by JAX", (4, 6), lambda a: a.T, {"jax": _itself, "jax device": lambda a: a.T}),
    Layout("column-major on its device", (4, 6), _itself, {"jax": _itself, "jax device": _column_major}, _is_no_key),
    Layout("over numpy's memory", (4, 6), _itself, {"jax": _itself, "jax device": _over_numpy}, _is_no_key),
    Layout("reversed", (4, 6), lambda a: a[::-1, ::-1], {"numpy": lambda a: a[::-1, ::-1]}),
    Layout("reversed rows", (4, 6), lambda a: a[::-1], {"numpy": lambda a: a[::-1]}),
    Layout("owning its memory", (5, 4), _itself, {"numpy": _numpy_owning, "torch": _torch_owning}),
    Layout("read-only", (4, 6), _itself, {"numpy": _read_only}),
    Layout("unaligned", (4, 6), _itself, {"numpy": _unaligned}, _has_bytes),
    Layout("mapped file", (4, 6), _itself, {"numpy": _as_memmap}, _has_bytes),
    Layout("recarray", (4, 6), _itself, {"numpy": lambda a: a.view(np.recarray)}, lambda dtype: bool(dtype.host.names)),
    Layout(
        "channels last, 4-D",
        (2, 3, 2, 4),
        lambda a: a.transpose(0, 3, 1, 2),
        {"torch": lambda t: t.permute(0, 3, 1, 2)},
    ),
    Layout(
        "channels last, 5-D",
        (2, 1, 2, 3, 4),
        lambda a: a.transpose(0, 4, 1, 2, 3),
        {"torch": lambda t: t.permute(0, 4, 1, 2, 3)},
    ),
    Layout("odd strides", (24,), lambda a: a[3:19:3][None], {"torch": lambda t: t.as_strided((1, 6), (1000, 3), 3)}),
    Layout("conjugated", (4, 6), _itself, {"torch": lambda t: t.conj()}, _is_complex, "last"),
    Layout(
        "conjugated slice of a transpose",
        (6, 4),
        lambda a: a.T[::2, 1:],
        {"torch": lambda t: t.T.conj()[::2, 1:]},
        _is_complex,
        "last",
    ),
    Layout(
        "negated",
        (4, 3, 2),
        lambda a: a[..., 1],
        {"torch": lambda t: torch.view_as_complex(t).conj().imag},
        _is_part,
        "last",
    ),
    Layout(
        "negated and conjugated",
        (4, 6),
        _itself,
        {"torch": lambda t: torch._neg_view(t.conj())},
        _is_complex,
        "first",
    ),
    Layout("real parts", (4, 3, 2), lambda a: a[..., 0], {"torch": lambda t: torch.view_as_complex(t).real}, _is_part),
    Layout("requires grad", (4, 6), _itself, {"torch": lambda t: t.requires_grad_()}, _is_continuous),
    Layout(
        "view that requires grad",
        (4, 6),
        lambda a: a[1:, ::2],
        {"torch": lambda t: t.requires_grad_()[1:, ::2]},
        _is_continuous,
    ),
    Layout("Parameter", (4, 6), _itself, {"torch": _parameter}),
    Layout("transposed Parameter", (4, 6), lambda a: a.T, {"torch": lambda t: _parameter(t.T)}),
    Layout("Buffer", (4, 6), _itself, {"torch": lambda t: torch.nn.Buffer(t)}),
    Layout("inference tensor", (4, 6), _itself, {"torch": _in_inference}),
    Layout(
        "weak type",
        (4, 6),
        _itself,
        {"jax": _itself, "jax device": _weak},
        lambda dtype: dtype.stored in ("int32", "float32", "complex64"),
    ),
)


def layouts_of(dtype: LeafDtype) -> list[Layout]:
    """The layouts that leaves of a dtype may have."""
    return [layout for layout in LAYOUTS if dtype.framework in layout.makes and layout.accepts(dtype)]


def build(dtype: LeafDtype, layout: Layout, generator: np.random.Generator) -> BuiltLeaf:
    """A leaf of a dtype in a layout, with random elements."""
    memory = random_memory(dtype, generator, math.prod(layout.shape))
    base = host_array(memory, dtype, layout.shape)
    expected = layout.elements(_opaque(base)).copy()
    change_signs(expected, layout.negates)
    expected = expected.view(dtype.host) if dtype.itemsize else layout.elements(base)
    make = layout.makes[dtype.framework]
    if dtype.framework == "jax":
        with jax.enable_x64(True):
            on_device = jax_array(make(base.copy()), dtype)
            return BuiltLeaf(layout.makes.get("jax device", _itself)(on_device), expected, memory)
    leaf = make(base if dtype.framework == "numpy" else torch_tensor(memory, dtype, layout.shape))
    return BuiltLeaf(leaf, expected, memory)


def host_array(memory: np.ndarray, dtype: LeafDtype, shape: tuple[int, ...]) -> np.ndarray:
    """numpy's array over some bytes."""
    return memory.view(dtype.host).reshape(shape) if dtype.itemsize else np.ndarray(shape, dtype.host)


def torch_tensor(memory: np.ndarray, dtype: LeafDtype, shape: tuple[int, ...]) -> Any:
    """torch's tensor over some bytes."""
    return torch.from_numpy(memory).view(getattr(torch, dtype.name)).reshape(shape)


def jax_array(elements: np.ndarray, dtype: LeafDtype) -> Any:
    """JAX's array of some elements, which may use their memory."""
    with jax.enable_x64(True):
        if dtype.host.names is None:
            return jax.device_put(elements)
        implementation = dtype.stored.removeprefix("prng_key<").removesuffix(">")
        return jax.random.wrap_key_data(jax.device_put(elements["key_data"]), impl=implementation)


def _opaque(array: np.ndarray) -> np.ndarray:
    return array.view(f"V{array.dtype.itemsize}") if array.dtype.itemsize else array


def change_signs(elements: np.ndarray, part: str) -> None:
    """Flip the sign of the first or the last of the numbers that make up each element."""
    if part:
        size = elements.dtype.itemsize
        elements.reshape(-1).view(np.uint8)[(size if part == "last" else size // 2) - 1 :: size] ^= 0x80
