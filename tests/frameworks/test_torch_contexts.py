"""Saving and loading beneath torch's modes, in threads, in event loops: the caller's modes change nothing, and stay."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_training_support import assert_same_state, bits, copied, fresh_place, scrambled, seeded, tensors_of

import savestream
from savestream import UsageError, blocking


def state() -> dict[str, Any]:
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(4)
        values = torch.randn(6, 5, generator=generator, dtype=torch.float32)
        return {
            "model": {"w": nn.Parameter(values), "half": values.bfloat16(), "t": values.t(), "n": torch.tensor(3)},
            "complex": torch.view_as_complex(values[:, :2].contiguous()).conj(),
            "small": [torch.full((2,), float(number), dtype=torch.float32) for number in range(5)],
            "mask": values > 0,
            "rate": 0.1,
        }


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


class Refusing(TorchDispatchMode):
    """Fails at every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran beneath the caller's mode")


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": Refusing,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")  # torch says how slow it is
@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_the_caller_changes_nothing(name: str) -> None:
    place, expected, target = fresh_place(), state(), scrambled(state())
    with MODES[name]():
        blocking.save(expected, place)
        loaded = blocking.load(place, framework="torch")
        filled = blocking.load(place, target)
        info = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
        blocking.verify(place)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()) == info
    assert_same_state(loaded, expected)
    assert_same_state(filled, expected)
    assert not any(tensor.is_inference() for tensor in (*loaded["small"], loaded["model"]["w"]))
    assert loaded["model"]["w"].device.type == "cpu"
    (loaded["model"]["w"].requires_grad_() * 2).sum().backward()  # usable in training afterwards


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_a_background_save(name: str) -> None:
    place, values = fresh_place(), state()
    expected = copied(values)
    with MODES[name]():
        handle = blocking.start_save(values, place)
        handle.wait_staged(60)
    for tensor in (values["model"]["w"].data, values["mask"], *values["small"]):
        tensor.zero_()
    handle.result(60)
    assert_same_state(blocking.load(place, framework="torch"), expected)


def inference_state() -> dict[str, Any]:
    with torch.inference_mode():
        values = {"w": torch.ones(4, 3), "lazy": torch.ones(3, dtype=torch.complex64).conj(), "e": torch.ones(0)}
        values["view"] = values["w"].t()[1]
    return values


def test_inference_tensors_are_saved_and_filled() -> None:
    place = fresh_place()
    values = {
        "w": torch.randn(4, 3),
        "lazy": torch.randn(3, dtype=torch.complex64),
        "e": torch.ones(0),
    }
    blocking.save(values, place)
    target = {key: tensor for key, tensor in inference_state().items() if key != "view"}
    assert all(tensor.is_inference() for tensor in target.values())
    held = dict(target)
    for _ in range(2):
        blocking.load(place, target)
        assert all(target[key] is tensor and tensor.is_inference() for key, tensor in held.items())
        assert_same_state(target, values)
        with torch.inference_mode():
            for tensor in target.values():
                tensor.zero_()
    blocking.load(place, target)
    blocking.save(target, fresh_place("again"))
    other = fresh_place()
    blocking.save(inference_state(), other)
    assert_same_state(blocking.load(other, framework="torch"), inference_state())


def test_inference_and_ordinary_tensors_in_one_target() -> None:
    place = fresh_place()
    blocking.save({"a": torch.randn(3), "b": torch.randn(3)}, place)
    with torch.inference_mode():
        first = torch.zeros(3)
    second = nn.Parameter(torch.zeros(3))
    loss = (second * second).sum()
    blocking.load(place, {"a": first, "b": second})
    assert_same_state({"a": first, "b": second}, blocking.load(place, framework="torch"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


async def test_inside_a_running_loop(tmp_path: Path) -> None:
    values, target = state(), scrambled(state())
    await savestream.save(values, tmp_path / "a")
    with pytest.raises(UsageError, match="await savestream"):
        blocking.load(tmp_path / "a", target)
    await savestream.load(tmp_path / "a", target)
    assert_same_state(target, values)
    in_thread = scrambled(state())
    await asyncio.to_thread(blocking.load, tmp_path / "a", in_thread)
    assert_same_state(in_thread, values)


def test_two_loops_in_a_row(tmp_path: Path) -> None:
    values, target = state(), scrambled(state())
    asyncio.run(savestream.save(values, tmp_path / "a"))
    asyncio.run(savestream.load(tmp_path / "a", target))
    assert_same_state(target, values)


def test_threads_save_and_load_models_of_their_own(tmp_path: Path) -> None:
    models = [seeded(number, lambda: nn.Linear(30, 20)) for number in range(4)]
    targets = [seeded(9, lambda: nn.Linear(30, 20)) for _ in models]
    failures: list[BaseException] = []
    together = threading.Barrier(len(models))

    def run(number: int) -> None:
        try:
            with torch.inference_mode(number % 2 == 0), torch.device("meta" if number > 1 else "cpu"):
                together.wait(30)
                blocking.save(models[number].state_dict(), tmp_path / str(number))
                blocking.load(tmp_path / str(number), dict(targets[number].named_parameters()))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for model, target in zip(models, targets, strict=True):
        assert_same_state(target.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_compiled_model_computes_with_what_was_loaded() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    first, second = seeded(1, build), seeded(2, build)
    compiled_first = torch.compile(first, backend="eager", fullgraph=True)
    compiled_second = torch.compile(second, backend="eager", fullgraph=True)
    value = torch.randn(3, 4)
    assert bits(compiled_first(value)) != bits(compiled_second(value))  # both are compiled by now
    place = fresh_place()
    blocking.save(compiled_first.state_dict(), place)
    blocking.load(place, compiled_second.state_dict())
    assert bits(compiled_second(value)) == bits(compiled_first(value)) == bits(second(value))
    compiled_second(value).sum().backward()
    assert second[0].weight.grad is not None


def test_inside_torch_func_is_refused_by_name() -> None:
    place = fresh_place()

    def save_inside(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(savestream.UnsafeObjectError, match=r"^w: "):
            blocking.save({"w": value}, place)
        return value.sum()

    torch.func.grad(save_inside)(torch.ones(3))
    torch.func.vmap(save_inside)(torch.ones(3, 2))
    assert not blocking.exists(place)


def test_memory_can_still_be_resized_afterwards() -> None:
    """What numpy has seen of a tensor, torch never resizes again; FSDP frees and grows memory all the time."""
    place, values, target = fresh_place(), state(), scrambled(state())
    values["large"], target["large"] = torch.randn(2**18), torch.zeros(2**18)
    values["alone"], target["alone"] = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    blocking.save(values, place)
    blocking.load(place, target)
    assert_same_state(target, values)
    for tensor in (*tensors_of(values), *tensors_of(target)):
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(2 * size)
