"""Targets that do not fit: everything that differs is named, and nothing is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_training_support import assert_same_state, assert_same_tensor, bits, copied, fresh_place, seeded

from savestream import LoadMismatchError, blocking


def layers(count: int, width: int = 8, seed: int = 0) -> nn.Module:
    return seeded(seed, lambda: nn.ModuleList([nn.Linear(width, width) for _ in range(count)]))


def names(first: int, last: int) -> list[str]:
    return [f"{number}\\.{kind}" for number in range(first, last) for kind in ("weight", "bias")]


@pytest.fixture
def place() -> Any:
    found = fresh_place()
    blocking.save(layers(12, seed=1).state_dict(), found)
    return found


def untouched(model: nn.Module) -> list[Any]:
    return [(tensor.data_ptr(), tensor._version, bits(tensor)) for tensor in model.state_dict().values()]


@pytest.mark.parametrize(("count", "missing", "unexpected"), [(16, (12, 16), (0, 0)), (8, (0, 0), (8, 12))])
def test_another_number_of_layers(place: Any, count: int, missing: Any, unexpected: Any) -> None:
    model = layers(count)
    before = untouched(model)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, model.state_dict())
    assert list(caught.value.missing) == names(*missing)
    assert list(caught.value.unexpected) == names(*unexpected)
    assert not caught.value.shape_mismatches
    assert untouched(model) == before

    kept = copied(model.state_dict())
    blocking.load(place, model.state_dict(), strict=False)
    source = blocking.load(place, framework="torch")
    for key, tensor in model.state_dict().items():
        assert_same_tensor(tensor, source.get(key, kept[key]), key)


def test_layers_of_another_width_are_listed_all(place: Any) -> None:
    model = layers(12, width=9)
    before = untouched(model)
    for strict in (True, False):
        with pytest.raises(LoadMismatchError) as caught:
            blocking.load(place, model.state_dict(), strict=strict)
        assert len(caught.value.shape_mismatches) == 24
        assert "0\\.weight (checkpoint (8, 8), target (9, 9))" in caught.value.shape_mismatches
        assert untouched(model) == before


def test_everything_wrong_at_once(place: Any) -> None:
    model = layers(11)
    state = dict(model.state_dict())
    state["0.weight"] = state["0.weight"].double()
    state["1.weight"] = torch.zeros(8, 7)
    state["2.bias"] = state["3.bias"]
    state["4.bias"] = 5
    state["5.bias"] = torch.zeros(8).to_sparse()
    state["6.bias"] = torch.zeros(1).expand(8)
    state["extra"] = torch.zeros(1)
    before = untouched(model)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, state)
    error = caught.value
    assert list(error.missing) == ["extra"]
    assert list(error.unexpected) == names(11, 12)
    assert list(error.shape_mismatches) == ["1\\.weight (checkpoint (8, 8), target (8, 7))"]
    assert list(error.dtype_mismatches) == ["0\\.weight (checkpoint float32, target float64)"]
    text = "\n".join(error.problems)
    for expected in (
        "2\\.bias and 3\\.bias",
        "4\\.bias",
        "5\\.bias: a tensor of layout",
        "6\\.bias: the target's elements",
    ):
        assert expected in text
    assert untouched(model) == before


def test_a_counter_does_not_pass_through_floats() -> None:
    place = fresh_place()
    counter = torch.tensor([16_777_217, -16_777_217], dtype=torch.int32)
    blocking.save({"step": counter}, place)
    target = torch.tensor([0.5, 0.5])
    for strict in (True, False):
        with pytest.raises(LoadMismatchError, match=r"step \(checkpoint int32, target float32\)"):
            blocking.load(place, {"step": target}, strict=strict)
    assert target.tolist() == [0.5, 0.5]
    assert target._version == 0
    blocking.load(place, {"step": target}, cast=True)
    assert_same_tensor(target, counter.float())
    exact = torch.zeros(2, dtype=torch.float64)
    blocking.load(place, {"step": exact}, cast=True)
    assert exact.tolist() == [16_777_217.0, -16_777_217.0]


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.int64, torch.int32),
    (torch.bool, torch.float32),
    (torch.float32, torch.complex64),
    (torch.float8_e5m2, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_casts_are_torchs_own(stored: torch.dtype, wanted: torch.dtype, special: bool) -> None:
    place = fresh_place()
    values = torch.linspace(-3, 3, 1001).reshape(7, 143)
    if special and stored.is_floating_point:
        values[0, :3] = torch.tensor([-0.0, 1e-30, 2.0**-20])
        if wanted is not torch.float8_e4m3fn:  # it has no infinity: numpy says nan then, torch the largest number
            values[0, 3:5] = torch.tensor([float("inf"), float("-inf")])
    source = values.to(stored)
    blocking.save({"w": source, "t": source.t()}, place)
    target = {"w": torch.zeros(7, 143, dtype=wanted), "t": torch.zeros(7, 143, dtype=wanted).t()}
    before = copied(target)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, target)
    assert len(caught.value.dtype_mismatches) == 2
    assert_same_state(target, before)
    blocking.load(place, target, cast=True)
    assert_same_state(target, {"w": source.to(wanted), "t": source.t().to(wanted)})


def test_what_no_number_is_is_not_cast() -> None:
    place = fresh_place()
    blocking.save(
        {"z": torch.ones(3, dtype=torch.complex64), "packed": torch.zeros(3, dtype=torch.uint8).view(torch.bits8)},
        place,
    )
    for target in ({"z": torch.zeros(3)}, {"packed": torch.zeros(3)}):
        with pytest.raises(LoadMismatchError, match=r"checkpoint (complex64|bits8)"):
            blocking.load(place, target, strict=False, cast=True)


def test_mixed_precision_both_ways() -> None:
    """Masters in single precision load into a half model, and the other way round."""
    full, half = layers(3, seed=1), layers(3).bfloat16()
    place, other = fresh_place(), fresh_place()
    blocking.save(full.state_dict(), place)
    expected = {key: tensor.bfloat16() for key, tensor in full.state_dict().items()}
    blocking.load(place, half.state_dict(), cast=True)
    assert_same_state(dict(half.state_dict()), expected)
    blocking.save(half.state_dict(), other)
    blocking.load(other, full.state_dict(), cast=True)
    assert_same_state(dict(full.state_dict()), {key: tensor.float() for key, tensor in expected.items()})
