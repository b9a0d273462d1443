"""Tensors that share memory: stored once where they are the same, apart where not, tied where the target is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_training_support import TiedModel, assert_same_state, assert_same_tensor, bits, copied, fresh_place

from savestream import LoadMismatchError, SaveOptions, blocking

PLAIN = SaveOptions(compression="none")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.bin"))


def saved_bytes(state: Any, directory: Path) -> int:
    blocking.save(state, directory, options=PLAIN)
    return stored_bytes(directory)


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    weight = numbers(64, 33)
    tied = saved_bytes({"embedding": weight, "head": weight}, tmp_path / "tied")
    alone = saved_bytes({"embedding": weight}, tmp_path / "alone")
    apart = saved_bytes({"embedding": weight, "head": weight.clone()}, tmp_path / "apart")
    assert tied == alone < apart


TIES = {
    "object": lambda w: w,
    "view": lambda w: w[:],
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "parameter": lambda w: nn.Parameter(w, requires_grad=True),
    "reshaped and back": lambda w: w.reshape(-1).view(w.shape),
}


@pytest.mark.parametrize("name", TIES)
def test_each_sort_of_tie_is_seen(name: str, tmp_path: Path) -> None:
    weight = numbers(64, 33)
    state = {"a": weight, "deep": [None, {"b": TIES[name](weight)}], "c": weight}
    assert saved_bytes(state, tmp_path / "tied") == saved_bytes({"a": weight}, tmp_path / "alone")

    loaded = blocking.load(tmp_path / "tied", framework="torch")
    found = [loaded["a"], loaded["deep"][1]["b"], loaded["c"]]
    assert len({tensor.data_ptr() for tensor in found}) == 3
    for tensor in found:
        assert_same_tensor(tensor, weight)

    own = numbers(64, 33, seed=1)
    target = {"a": own, "deep": [None, {"b": TIES[name](own)}], "c": own}
    tied = target["deep"][1]["b"]
    blocking.load(tmp_path / "tied", target)
    assert target["a"] is target["c"] is own
    assert target["deep"][1]["b"] is tied
    assert tied.data_ptr() == own.data_ptr()
    assert_same_tensor(own, weight)

    apart = copied(state)
    for tensor in (apart["a"], apart["deep"][1]["b"], apart["c"]):
        tensor.zero_()
    blocking.load(tmp_path / "tied", apart)
    assert_same_state(apart, state)


def test_a_tied_model_trains_on(tmp_path: Path) -> None:
    first, second, apart = TiedModel(1), TiedModel(2), TiedModel(3, tied=False)
    blocking.save(first.state_dict(), tmp_path / "checkpoint", options=PLAIN)
    untied = saved_bytes(TiedModel(1, tied=False).state_dict(), tmp_path / "untied")
    assert stored_bytes(tmp_path / "checkpoint") < untied
    for model in (second, apart):
        blocking.load(tmp_path / "checkpoint", model.state_dict())
        assert_same_state(model.state_dict(), first.state_dict())
    assert second.head.weight is second.embedding.weight
    assert apart.head.weight.data_ptr() != apart.embedding.weight.data_ptr()


def test_a_tied_target_of_what_is_stored_apart_is_refused() -> None:
    place = fresh_place()
    blocking.save({"x": numbers(3), "embedding": numbers(4, seed=1), "head": numbers(4, seed=2)}, place)
    own = numbers(4, seed=3)
    target = {"x": torch.zeros(3), "embedding": own, "head": own.detach()}
    before, versions = copied(target), [tensor._version for tensor in target.values()]
    with pytest.raises(LoadMismatchError, match="embedding and head: the targets are the same memory"):
        blocking.load(place, target)
    assert_same_state(target, before)
    assert [tensor._version for tensor in target.values()] == versions
    blocking.load(place, target, keys=["x", "head"])
    assert_same_tensor(own, numbers(4, seed=2))


def test_equal_values_that_are_stored_apart_stay_refused() -> None:
    place = fresh_place()
    blocking.save({"a": torch.zeros(4), "b": torch.zeros(4)}, place)
    own = numbers(4)
    with pytest.raises(LoadMismatchError, match="the same memory"):
        blocking.load(place, {"a": own, "b": own})


def test_of_three_targets_two_tied() -> None:
    place = fresh_place()
    weight = numbers(5)
    blocking.save({"a": weight, "b": weight, "c": weight}, place)
    own, other = torch.zeros(5), torch.zeros(5)
    blocking.load(place, {"a": own, "b": other, "c": own})
    for tensor in (own, other):
        assert_same_tensor(tensor, weight)


def overlapping() -> dict[str, torch.Tensor]:
    base = numbers(40)
    square = base[:36].view(6, 6)
    return {
        "start": base[:10],
        "middle": base[5:15],
        "shorter": base[:9],
        "square": square,
        "transposed": square.t(),
        "column": square[:, 2],
        "reversed": square.flip(0),
        "as integers": base[:10].view(torch.int32),
        "as a matrix": base[:10].view(2, 5),
        "repeated": base[3].expand(4),
        "whole": base,
    }


def test_views_that_differ_are_stored_apart_and_right(tmp_path: Path) -> None:
    state = overlapping()
    sizes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert saved_bytes(state, tmp_path / "checkpoint") >= sizes
    assert_same_state(blocking.load(tmp_path / "checkpoint", framework="torch"), state)
    target = {key: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for key, tensor in state.items()}
    assert_same_state(blocking.load(tmp_path / "checkpoint", target), state)


def test_targets_that_overlap_in_part_are_refused() -> None:
    place = fresh_place()
    state = overlapping()
    blocking.save(state, place)
    base = numbers(40, seed=1)
    for first, second in ((base[:10], base[5:15]), (base[:9], base[8:18])):
        target = {"start": first, "middle": second} if len(first) == 10 else {"shorter": first, "middle": second}
        before = bits(base)
        with pytest.raises(LoadMismatchError, match="share a part of their memory"):
            blocking.load(place, target, strict=False)
        assert bits(base) == before
    square = base[:36].view(6, 6)
    with pytest.raises(LoadMismatchError, match="share a part of their memory"):
        blocking.load(place, {"square": square, "transposed": square.t()}, strict=False)
    with pytest.raises(LoadMismatchError, match="overlap each other"):
        blocking.load(place, {"repeated": base[3].expand(4)}, strict=False)
    blocking.load(place, {"start": base[:10], "middle": base[20:30]}, strict=False)
    assert_same_tensor(base[20:30], state["middle"])


def test_interleaved_targets_share_no_element() -> None:
    place = fresh_place()
    blocking.save({"even": numbers(5), "odd": numbers(5, seed=1)}, place)
    base = torch.zeros(10)
    blocking.load(place, {"even": base[::2], "odd": base[1::2]})
    assert_same_tensor(base[::2], numbers(5))
    assert_same_tensor(base[1::2], numbers(5, seed=1))


def test_a_view_stores_its_own_elements_only(tmp_path: Path) -> None:
    base = torch.randn(1_000_000)
    assert saved_bytes({"a": base[:10], "b": base[999_000:].view(10, 100)[:, 3]}, tmp_path / "checkpoint") < 10_000
    loaded = blocking.load(tmp_path / "checkpoint", framework="torch")
    assert_same_state(loaded, {"a": base[:10], "b": base[999_000:].view(10, 100)[:, 3]})
    assert loaded["a"].untyped_storage().nbytes() < 10_000


def test_conjugates_and_negatives_are_no_ties() -> None:
    value = torch.randn(4, dtype=torch.complex64)
    state = {"z": value, "conjugate": value.conj(), "real": value.real, "imaginary": value.conj().imag}
    assert state["conjugate"].data_ptr() == value.data_ptr()
    assert state["imaginary"].is_neg()
    place = fresh_place()
    blocking.save(state, place)
    assert_same_state(blocking.load(place, framework="torch"), state)
    target = {key: torch.zeros(4, dtype=tensor.dtype) for key, tensor in state.items()}
    assert_same_state(blocking.load(place, target), state)
    lazy = torch.zeros(4, dtype=torch.complex64).conj()
    blocking.load(place, {"conjugate": lazy}, strict=False)
    assert lazy.is_conj()
    assert_same_tensor(lazy, state["conjugate"])


def test_a_tensor_and_its_array_are_one(tmp_path: Path) -> None:
    tensor = numbers(64, 33)
    state = {"tensor": tensor, "array": tensor.numpy(), "from numpy": torch.from_numpy(tensor.numpy())}
    assert saved_bytes(state, tmp_path / "checkpoint") == saved_bytes({"tensor": tensor}, tmp_path / "alone")
    own = torch.zeros(64, 33)
    blocking.load(tmp_path / "checkpoint", {"tensor": own, "array": own.numpy(), "from numpy": own[:]})
    assert_same_tensor(own, tensor)
    array = np.zeros((64, 33), np.float32)
    apart = {"tensor": torch.zeros(64, 33), "array": array, "from numpy": torch.from_numpy(array)}
    blocking.load(tmp_path / "checkpoint", apart)
    assert_same_tensor(apart["tensor"], tensor)
    assert array.tobytes() == bits(tensor)


def test_empty_tensors_at_one_address_are_no_ties() -> None:
    base = numbers(4)
    state = {"a": base[:0], "b": base[:0], "c": base.new_empty(0, 3), "d": base}
    place = fresh_place()
    blocking.save(state, place)
    assert_same_state(blocking.load(place, framework="torch"), state)
    target = {"a": base[:0], "b": base[:0], "c": torch.empty(0, 3), "d": torch.zeros(4)}
    assert_same_state(blocking.load(place, target), state)
