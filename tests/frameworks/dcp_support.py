"""States, comparisons and pairs of storage classes for tests of torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.pipeline.engine import current_engine

__all__ = [
    "DTYPES",
    "KINDS",
    "assert_same_state",
    "files_beneath",
    "load",
    "quiet",
    "save",
    "settle",
    "varied_state",
    "with_bits",
    "zeroed",
]

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "torch": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "savestream": (StorageWriter, StorageReader),
}


def quiet() -> None:
    """Ignore what torch says of a single process and of overwriting; it is meant so here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint", category=UserWarning)


def save(state: dict[str, Any], writer: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        quiet()
        return dcp.save(state, storage_writer=writer, **options)


def load(state: dict[str, Any], reader: Any, **options: Any) -> dict[str, Any]:
    """Load into ``state`` and return it."""
    with warnings.catch_warnings():
        quiet()
        dcp.load(state, storage_reader=reader, **options)
    return state


def with_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype with bits that differ from element to element."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support")
        size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    raw = (torch.arange(count, dtype=torch.int64) * 37 + 11) % 251
    if dtype is torch.bool:
        return (raw % 2).to(torch.bool).reshape(shape)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def varied_state() -> dict[str, Any]:
    """Dtypes, shapes, layouts, keys and values of every kind that DCP stores."""
    base = torch.arange(1000, dtype=torch.float32)
    return {
        "dtypes": {str(dtype): with_bits(dtype, 5, 3) for dtype in DTYPES},
        "shapes": {"zero dimensions": torch.tensor(3.5), "empty": torch.zeros(0, 3), "empty too": torch.zeros(4, 0)},
        "layouts": {
            "transposed": with_bits(torch.float32, 6, 4).t(),
            "channels last": with_bits(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
            "strided": with_bits(torch.int64, 10, 10)[::3, 1::2],
            "view": base[10:20],
            "large": with_bits(torch.float32, 700, 999),
            "parameter": torch.nn.Parameter(with_bits(torch.float32, 3)),
            "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        },
        "tied": [base, base],
        "values": {"step": 7, "name": "run", "none": None, "tuple": (1, (2, 3)), "list": [1, [2, 3]], "empty list": []},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}],
        "": torch.ones(1),
        "/a/../b": torch.full((2,), 2.0),
        "line\nbreak": torch.full((3,), 3.0),
        "dots.in.key": torch.full((4,), 4.0),
        "\N{BRAIN}": torch.full((5,), 5.0),
        "back\\slash [0]": torch.full((6,), 6.0),
    }


def zeroed(state: Any) -> Any:
    """A copy with zeros in every tensor, layouts kept, and other values replaced."""
    duplicate = copy.deepcopy(state)
    _zero(duplicate)
    return duplicate


def _zero(state: Any) -> None:
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.zero_()
        elif isinstance(value, dict) or (isinstance(value, list) and value):
            _zero(value)
        else:
            state[key] = "replaced"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.dtype is not torch.bool else plain


def assert_same_state(found: Any, expected: Any, path: str = "state") -> None:
    """Equal to the last bit, with equal dtypes, shapes, containers and keys."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert torch.equal(_bits(found), _bits(expected)), path
    elif isinstance(expected, dict):
        assert isinstance(found, dict), path
        assert list(found) == list(expected) or set(found) == set(expected), path
        for key, value in expected.items():
            assert_same_state(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), path
        assert len(found) == len(expected), path
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_state(one, other, f"{path}[{position}]")
    else:
        assert found == expected, path


def files_beneath(place: str | Path) -> set[str]:
    """Every file, relative to the place."""
    return {str(path.relative_to(place)) for path in Path(place).rglob("*") if path.is_file()}


def settle() -> None:
    """Let the garbage collector give up failed saves, and wait until the engine has removed what they left."""

    async def nothing() -> None:
        return

    engine = current_engine()
    for _ in range(3):  # the engine's thread lets go of an ended operation some turns after it has told its result
        engine.submit(nothing, "settling").future.result(timeout=30)
    gc.collect()
    engine.submit(nothing, "settling").future.result(timeout=30)
    for future in list(engine._operations):
        future.exception(timeout=30)
