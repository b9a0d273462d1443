"""Leaves that no checkpoint can hold: how each comes about, and what is said of it."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["REFUSED", "RefusedLeaf"]

Use = Callable[[Any], None]


class RefusedLeaf(NamedTuple):
    """A leaf by name.

    Attributes
    ----------
    framework
        Whose leaf it is; ``python`` for what is no array.
    give
        Makes the leaf and calls a function with it, from within whatever makes it what it is.
    reason
        Words that the error must say.
    picklable
        Whether pickle stores it, for those who opt into that.
    """

    framework: str
    name: str
    give: Callable[[Use], object]
    reason: str
    picklable: bool = False


def _made(make: Callable[[], Any]) -> Callable[[Use], object]:
    def give(use: Use) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of these experimental, or old
            leaf = make()
        use(leaf)

    return give


class Labelled(torch.Tensor):
    """A subclass that follows its own rules."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """A subclass that has no elements of its own, but another tensor."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _per_channel() -> Any:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int64)
    return torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)


def _freed() -> Any:
    tensor = torch.ones(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


def _shrunk() -> Any:
    tensor = torch.ones(4, 6)[1:, 1:]
    tensor.untyped_storage().resize_(95)
    return tensor


def _fake() -> Any:
    with FakeTensorMode():
        return torch.ones(3)


def _optimizer() -> Any:
    return torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1)


def _inside(transform: Callable[..., Any], *shape: int) -> Callable[[Use], object]:
    """Within a function that torch transforms."""

    def give(use: Use) -> None:
        def used(value: Any) -> Any:
            use(value)
            return value.sum()

        transform(used)(torch.ones(shape))

    return give


def _traced(transform: Callable[..., Any], *shape: int) -> Callable[[Use], object]:
    """Within a function that JAX transforms."""

    def give(use: Use) -> None:
        def used(value: Any) -> Any:
            use(value)
            return value.sum()

        transform(used)(jnp.ones(shape))

    return give


def _deleted() -> Any:
    array = jnp.ones(3)
    array.delete()
    return array


def _donated() -> Any:
    array = jnp.ones(3)
    jax.jit(lambda value: value + 1, donate_argnums=0)(array)
    return array


def _titled() -> Any:
    return np.zeros(3, [(("the title", "name"), "i4")])


class LabelledArray(np.ndarray):
    """A subclass whose extra content would be lost."""


class Settings(dict):
    """A subclass of dict."""


REFUSED: tuple[RefusedLeaf, ...] = (
    RefusedLeaf("numpy", "array of objects", _made(lambda: np.array([None, "x"], object)), "convert"),
    RefusedLeaf("numpy", "record with objects", _made(lambda: np.zeros(2, [("n", "i4"), ("o", object)])), "convert"),
    RefusedLeaf("numpy", "StringDType", _made(lambda: np.array(["a", "bcd"], np.dtypes.StringDType())), "convert"),
    RefusedLeaf("numpy", "record with field titles", _made(_titled), "make a dtype without titles"),
    RefusedLeaf(
        "numpy", "masked array", _made(lambda: np.ma.masked_array([1, 2], [0, 1])), "data and mask as two arrays"
    ),
    RefusedLeaf("numpy", "matrix", _made(lambda: np.arange(4).reshape(2, 2).view(np.matrix)), r"numpy\.asarray"),
    RefusedLeaf(
        "numpy", "other subclass of ndarray", _made(lambda: np.zeros(3).view(LabelledArray)), r"numpy\.asarray"
    ),
    RefusedLeaf("torch", "sparse COO", _made(lambda: torch.eye(3).to_sparse()), r"to_dense\(\)"),
    RefusedLeaf("torch", "sparse CSR", _made(lambda: torch.eye(3).to_sparse_csr()), r"to_dense\(\)"),
    RefusedLeaf("torch", "sparse CSC", _made(lambda: torch.eye(3).to_sparse_csc()), r"to_dense\(\)"),
    RefusedLeaf("torch", "sparse BSR", _made(lambda: torch.eye(4).to_sparse_bsr((2, 2))), r"to_dense\(\)"),
    RefusedLeaf("torch", "mkldnn", _made(lambda: torch.ones(3, 3).to_mkldnn()), r"to_dense\(\)"),
    RefusedLeaf(
        "torch",
        "quantised per tensor",
        _made(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        r"int_repr\(\)",
    ),
    RefusedLeaf("torch", "quantised per channel", _made(_per_channel), r"int_repr\(\)"),
    RefusedLeaf(
        "torch",
        "nested, strided",
        _made(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        r"unbind\(\)",
    ),
    RefusedLeaf(
        "torch",
        "nested, jagged",
        _made(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        r"unbind\(\)",
    ),
    RefusedLeaf("torch", "fake", _made(_fake), "no data"),
    RefusedLeaf("torch", "inside torch.func.functionalize", _inside(torch.func.functionalize, 3), "torch.func"),
    RefusedLeaf("torch", "inside torch.func.vmap", _inside(torch.func.vmap, 3, 2), "torch.func"),
    RefusedLeaf("torch", "inside torch.func.grad", _inside(torch.func.grad, 3), "torch.func"),
    RefusedLeaf(
        "torch", "subclass with __torch_function__", _made(lambda: torch.ones(3).as_subclass(Labelled)), "plain tensors"
    ),
    RefusedLeaf("torch", "wrapper subclass", _made(lambda: Wrapped(torch.ones(3))), "plain tensors"),
    RefusedLeaf("torch", "meta", _made(lambda: torch.ones(3, device="meta")), r"to_empty\(\)"),
    RefusedLeaf("torch", "freed storage", _made(_freed), "storage was freed"),
    RefusedLeaf("torch", "shrunk storage", _made(_shrunk), "storage was freed"),
    RefusedLeaf("torch", "lazy Parameter", _made(torch.nn.UninitializedParameter), "first forward pass"),
    RefusedLeaf("torch", "lazy buffer", _made(torch.nn.UninitializedBuffer), "first forward pass"),
    RefusedLeaf("torch", "Module", _made(lambda: torch.nn.Linear(2, 3)), r"state_dict\(\)", picklable=True),
    RefusedLeaf("torch", "Optimizer", _made(_optimizer), r"state_dict\(\)", picklable=True),
    RefusedLeaf("jax", "tracer inside jax.jit", _traced(jax.jit, 3), "tracing"),
    RefusedLeaf("jax", "tracer inside jax.grad", _traced(jax.grad, 3), "tracing"),
    RefusedLeaf("jax", "tracer inside jax.vmap", _traced(jax.vmap, 3, 2), "tracing"),
    RefusedLeaf("jax", "deleted array", _made(_deleted), "deleted"),
    RefusedLeaf("jax", "donated array", _made(_donated), "donating"),
    RefusedLeaf("jax", "ShapeDtypeStruct", _made(lambda: jax.ShapeDtypeStruct((3,), jnp.float32)), "target of a load"),
    RefusedLeaf("jax", "mutable reference", _made(lambda: jax.new_ref(jnp.ones(3))), r"reference\[\.\.\.\]"),
    RefusedLeaf("python", "function", _made(lambda: len), "name and the arguments", picklable=True),
    RefusedLeaf("python", "class", _made(lambda: Labelled), "store its name", picklable=True),
    RefusedLeaf("python", "subclass of dict", _made(Settings), "convert it to dict", picklable=True),
    RefusedLeaf("python", "partial", _made(lambda: functools.partial(int, base=2)), "arguments", picklable=True),
    RefusedLeaf("python", "lock", _made(threading.Lock), "plain values"),
)
