"""What staging and filling torch tensors costs: few calls for many, one copy of a large one, short system calls."""

from __future__ import annotations

import collections
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_training_support import assert_same_state, assert_same_tensor, bits, fresh_place, scrambled, tensors_of

from savestream import SaveOptions, StagingPool, blocking
from savestream.arrays import adapter_for
from savestream.arrays.torch_tensors import TorchAdapter
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend

MEBIBYTE = 1 << 20
PLAIN = SaveOptions(compression="none")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """How often each method of the adapter that touches elements is called."""
    counts: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(TorchAdapter, name)

        def call(*arguments: Any) -> Any:
            with lock:
                counts[name] += 1
            return original(*arguments)

        return call

    for name in ("info", "infos", "describe", "addresses", "host_view", "copy_elements", "join", "own_memory"):
        monkeypatch.setattr(TorchAdapter, name, counted(name))
    return counts


def small(count: int) -> dict[str, torch.Tensor]:
    values = torch.arange(20.0 * count).reshape(count, 20)
    return {f"layers.{number}.bias": values[number].clone() for number in range(count)}


def test_many_small_tensors_are_joined_in_batches(calls: collections.Counter[str]) -> None:
    count, place = 50_000, fresh_place()
    state = small(count)
    blocking.save(state, place, options=PLAIN)
    assert sum(calls.values()) <= count // 1000, calls
    assert calls["join"] > 0
    calls.clear()

    target = {key: torch.zeros(20) for key in state}
    blocking.load(place, target)
    assert sum(calls.values()) <= count // 1000, calls
    found, expected = torch.stack(list(target.values())), torch.stack(list(state.values()))
    assert_same_tensor(found, expected)
    assert {tensor._version for tensor in target.values()} == {1}
    loaded = blocking.load(place, framework="torch")
    assert list(loaded) == list(state)
    assert_same_tensor(torch.stack(list(loaded.values())), expected)


def test_small_tensors_of_every_sort_between_each_other(calls: collections.Counter[str]) -> None:
    base = torch.randn(30, 30)
    kinds: list[Callable[[int], Any]] = [
        lambda n: torch.randn(n % 7),
        lambda n: nn.Parameter(torch.randn(3, n % 5)),
        lambda n: base[n % 20 :, : n % 9].t(),
        lambda n: torch.randn(4).bfloat16(),
        lambda n: torch.tensor(n % 2 == 0),
        lambda n: torch.randn(n % 3, dtype=torch.complex64).conj(),
        lambda n: torch.full((2,), n).numpy(),
        lambda n: base[n % 30, 0].expand(3),
        lambda n: torch.arange(n % 11).to(torch.float8_e5m2),
        lambda n: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
        lambda n: torch.empty(0),
    ]
    state = [kinds[(7 * n + n // 100) % len(kinds)](n) for n in range(3000)]
    place = fresh_place()
    blocking.save(state, place)
    assert calls["join"] > 0
    expected = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in state]
    assert_same_state(blocking.load(place, framework="torch"), expected)
    target = [
        value.copy()
        if isinstance(value, np.ndarray)
        else torch.empty_strided(value.shape, _dense(value), dtype=value.dtype)
        for value in state
    ]
    blocking.load(place, target)
    assert_same_state([torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in target], expected)


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in reversed order, without overlap."""
    return tuple(reversed(torch.empty(tuple(reversed(tensor.shape))).stride()))


LARGE: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(16 * MEBIBYTE),
    "half": lambda: torch.randn(32 * MEBIBYTE, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(4096, 4096).t(),
    "channels last": lambda: torch.randn(64, 64, 64, 64).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(32 * MEBIBYTE)[::2],
    "parameter": lambda: nn.Parameter(torch.randn(4096, 4096)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_tensor_is_copied_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = LARGE[name]()
    assert tensor.numel() * tensor.element_size() == 64 * MEBIBYTE
    addresses, copied = set(), []
    host_view, copy_elements = TorchAdapter.host_view, TorchAdapter.copy_elements

    def viewed(self: Any, array: Any) -> Any:
        view = host_view(self, array)
        addresses.add(view.__array_interface__["data"][0])
        return view

    def copying(self: Any, array: Any, start: int, stop: int, target: Any) -> None:
        copied.append((start, stop))
        copy_elements(self, array, start, stop, target)

    monkeypatch.setattr(TorchAdapter, "host_view", viewed)
    monkeypatch.setattr(TorchAdapter, "copy_elements", copying)
    gate = Gate()  # what is written is copied by the memory backend
    backend = FaultyBackend(MemoryBackend(), [Fault("write", times=None, hook=gate)])
    with StagingPool(80 * MEBIBYTE) as pool:
        options = SaveOptions(compression="none", staging_pool=pool)
        tracemalloc.start()
        handle = blocking.start_save({"w": tensor}, (backend, "c"), options=options)
        staged_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gate.open()
        handle.result(60)
    copied.sort()
    assert copied[0][0] == 0
    assert [stop for _, stop in copied] == [start for start, _ in copied[1:]] + [tensor.numel()]
    assert addresses == {tensor.data_ptr()}
    assert staged_peak < 8 * MEBIBYTE


@pytest.mark.parametrize("name", ["contiguous", "half", "parameter"])
def test_a_large_target_is_filled_where_it_is(name: str, tmp_path: Path) -> None:
    tensor = LARGE[name]()
    blocking.save({"w": tensor}, tmp_path / "c", options=PLAIN)
    with torch.no_grad():
        target = torch.zeros_like(tensor)
    tracemalloc.start()
    blocking.load(tmp_path / "c", {"w": target})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * MEBIBYTE
    assert bits(target) == bits(tensor)


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = collections.Counter()
    pwrite, preadv = os.pwrite, os.preadv

    def short_pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls["writes"] += 1
        return pwrite(descriptor, memoryview(data).cast("B")[:1000], offset)

    def short_preadv(descriptor: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        calls["reads"] += 1
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:700]], offset, *flags)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    monkeypatch.setattr(os, "preadv", short_preadv)
    state = {"w": torch.randn(500, 301), "t": torch.randn(99, 101).bfloat16().t(), "s": [torch.randn(5)] * 3}
    blocking.save(state, tmp_path / "c", options=PLAIN)
    target = scrambled(state)
    assert_same_state(blocking.load(tmp_path / "c", target), state)
    assert_same_state(blocking.load(tmp_path / "c", framework="torch"), state)
    assert calls["writes"] > 600
    assert calls["reads"] > 1000


@pytest.mark.slow
def test_a_tensor_beyond_two_gibibytes(tmp_path: Path) -> None:
    size = 2**31 + 4097
    tensor = torch.ones(size, dtype=torch.uint8)
    marks = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, size - 1, 4 * MEBIBYTE - 1, 2**30])
    tensor[marks] = torch.arange(10, 10 + len(marks), dtype=torch.uint8)
    options = SaveOptions(compression="none", memory_budget_bytes=64 * MEBIBYTE)
    blocking.save({"w": tensor, "view": tensor[2**31 - 5 :]}, tmp_path / "c", options=options)
    tensor.zero_()
    blocking.load(tmp_path / "c", {"w": tensor}, strict=False)
    check_marks(tensor, marks)
    del tensor
    loaded = blocking.load(tmp_path / "c", framework="torch")
    assert loaded["view"].sum().item() == loaded["w"][2**31 - 5 :].sum().item()
    check_marks(loaded["w"], marks)


def check_marks(tensor: torch.Tensor, marks: torch.Tensor) -> None:
    """Ones, but for the marks."""
    assert tensor[marks].tolist() == list(range(10, 10 + len(marks)))
    tensor[marks] = 1
    assert all(bool((part == 1).all()) for part in tensor.split(256 * MEBIBYTE))


def test_the_adapter_is_the_one_that_was_counted() -> None:
    assert type(adapter_for(torch.Tensor)) is type(adapter_for(nn.Parameter)) is TorchAdapter
    assert len(list(tensors_of(small(3)))) == 3
