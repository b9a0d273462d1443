"""Comparison of torch states bit by bit, and the models that the tests of training states share."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from savestream import blocking
from savestream.storage_backends import MemoryBackend


def fresh_place(name: str = "checkpoint") -> tuple[MemoryBackend, str]:
    """A place in memory that nobody else uses."""
    return MemoryBackend("test"), name


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor as they are, in C order."""
    with torch.no_grad():
        plain = (
            tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
        )
        return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same_tensor(found: Any, expected: torch.Tensor, path: str = "tensor") -> None:
    """Fail unless both have the same dtype, shape and bits."""
    assert isinstance(found, torch.Tensor), f"{path}: {type(found)}"
    assert found.dtype == expected.dtype, f"{path}: {found.dtype} instead of {expected.dtype}"
    assert found.shape == expected.shape, f"{path}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert bits(found) == bits(expected), f"{path}: other bits"


def assert_same_state(found: Any, expected: Any, path: str = "state") -> None:
    """Fail unless both are the same: bits of tensors, classes and key types of containers, plain values."""
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(found, expected, path)
        return
    assert type(found) is type(expected), f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, dict):
        keys = [(type(key), key) for key in expected]
        assert [(type(key), key) for key in found] == keys, f"{path}: other keys"
        for key, value in expected.items():
            assert_same_state(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected), path
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_state(one, other, f"{path}[{position}]")
    else:
        assert repr(found) == repr(expected), f"{path}: {found!r} instead of {expected!r}"


def stored_names(place: Any) -> list[str]:
    """Keys of all leaves of a checkpoint, sorted."""
    return sorted(blocking.read_manifest(place).contents.state_dict_metadata)


def copied(state: Any) -> Any:
    """The same containers with copies of the tensors, for later comparison."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, copied(value)) for key, value in state.items())
    if isinstance(state, list | tuple):
        return type(state)(map(copied, state))
    return state


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a state, in order."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def scrambled(state: Any) -> Any:
    """A state of the same form whose tensors hold something else everywhere."""
    result = copied(state)
    for tensor in tensors_of(result):
        if tensor.numel():
            other = tensor.contiguous().reshape(-1).view(torch.uint8) ^ 0x01
            tensor.copy_(other.view(tensor.dtype).reshape(tensor.shape))
    return result


class TiedModel(nn.Module):
    """An embedding whose weight is the output head's too."""

    def __init__(self, seed: int = 0, *, tied: bool = True) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A module initialised from a seed, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


torch.set_num_threads(1)  # on a busy machine they wait for each other longer than they compute


class Lifetimes:
    """Tells whether tensors, and the memory behind them, are still held by anybody."""

    def __init__(self, tensors: Iterator[torch.Tensor]) -> None:
        self._references = []
        for tensor in tensors:
            self._references += [weakref.ref(tensor), weakref.ref(tensor.untyped_storage())]

    def count_alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self._references)
