"""The states that are saved, and what the benchmarks do with such trees: copy, poison, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Tree",
    "as_tensor",
    "flat_items",
    "gpt2_layers_for",
    "gpt2_train_state",
    "leaves",
    "many_arrays",
    "map_leaves",
    "poison",
    "require_equal",
    "total_bytes",
]

Tree: TypeAlias = dict[str, Any]
Array: TypeAlias = npt.NDArray[Any]

WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024  # GPT-2 small
_BASE_VALUES = 1 << 22


def _gpt2_shapes(layers: int, width: int, vocabulary: int, positions: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (vocabulary, width)
    yield "wpe.weight", (positions, width)
    for layer in range(layers):
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            yield f"h.{layer}.{name}.weight", (rows, columns)
            yield f"h.{layer}.{name}.bias", (rows,)
        for name in ("ln_1", "ln_2"):
            yield f"h.{layer}.{name}.weight", (width,)
            yield f"h.{layer}.{name}.bias", (width,)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def gpt2_layers_for(nbytes: float) -> int:
    """How many layers bring parameters and two moments nearest to ``nbytes``; at least one."""
    fixed, two = (
        12 * sum(int(np.prod(shape)) for _, shape in _gpt2_shapes(layers, WIDTH, VOCABULARY, POSITIONS))
        for layers in (0, 1)
    )
    return max(1, round((nbytes - fixed) / (two - fixed)))


def gpt2_train_state(layers: int, *, width: int = WIDTH, vocabulary: int = VOCABULARY) -> Tree:
    """fp32 parameters of a GPT-2 and two Adam moments of each: ``{"model": {...}, "exp_avg": {...}, ...}``.

    Values are normally distributed and differ from array to array, so that no two are stored as one.
    """
    random = np.random.default_rng(0)
    base = random.standard_normal(_BASE_VALUES, dtype=np.float32)
    scales = {"model": 0.02, "exp_avg": 1e-3, "exp_avg_sq": 1e-6}

    def values(shape: tuple[int, ...], scale: float) -> Array:
        array = np.empty(shape, np.float32)
        flat = array.reshape(-1)
        factor = np.float32(scale * (0.5 + random.random()))
        for start in range(0, flat.size, base.size):
            part = flat[start : start + base.size]
            np.multiply(base[: part.size], factor, out=part)
        return np.square(array, out=array) if scale < 1e-5 else array

    shapes = list(_gpt2_shapes(layers, width, vocabulary, POSITIONS))
    return {group: {name: values(shape, scale) for name, shape in shapes} for group, scale in scales.items()}


def many_arrays(count: int, elements: int = 64) -> Tree:
    """``count`` small fp32 arrays under the dotted names of a torch state dict."""
    values = np.random.default_rng(0).standard_normal((count, elements), dtype=np.float32)
    return {f"layer.{index // 10}.p{index % 10}": values[index].copy() for index in range(count)}


def leaves(tree: Tree) -> Iterator[Any]:
    """The leaves in order."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from leaves(dict(value))
        else:
            yield value


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with other leaves."""
    return {
        key: map_leaves(function, value) if isinstance(value, dict) else function(value) for key, value in tree.items()
    }


def as_tensor(array: Any) -> Any:
    """A torch tensor over the same memory."""
    import torch

    return torch.from_numpy(array)


def flat_items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and leaves."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def total_bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in leaves(tree))


def poison(tree: Tree) -> None:
    """Overwrite every array, so that a load that fills nothing is found out."""
    for array in leaves(tree):
        array.fill(np.nan)


def require_equal(found: Tree, expected: Tree, what: str) -> None:
    """Compare bit by bit; the leaves of ``found`` may be numpy or torch."""
    names = [name for name, _ in flat_items(expected)]
    if [name for name, _ in flat_items(found)] != names:
        raise AssertionError(f"{what}: other names came back than were saved")
    for name, got, wanted in zip(names, leaves(found), leaves(expected), strict=True):
        array = np.asarray(got)
        same_kind = array.shape == wanted.shape and array.dtype == wanted.dtype
        if not same_kind or not np.array_equal(array.view(np.uint32), wanted.view(np.uint32)):
            raise AssertionError(f"{what}: {name} came back with other content than was saved")
