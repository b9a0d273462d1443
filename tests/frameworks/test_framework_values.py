"""Plain objects of PyTorch and JAX in states: dtypes, devices, generators, and what state_dict() returns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch_training_support import assert_same_state, bits, fresh_place

from savestream import (
    CorruptCheckpointError,
    LoadMismatchError,
    PlanCache,
    RecordedObject,
    UnsafeObjectError,
    blocking,
)
from savestream.planners.values import decode_value, encode_value, encode_value_bytes

CONSTANTS = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int4, torch.bool, torch.quint8, torch.complex32),
    *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.channels_last, torch.contiguous_format),
    *(
        torch.preserve_format,
        torch.per_tensor_affine,
        torch.device("cpu"),
        torch.device("cuda"),
        torch.device("cuda:7"),
    ),
    *(torch.device("meta"), torch.device("mps", 0), torch.Size([]), torch.Size([2, 0, 3])),
    *(jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.bool_, jax.numpy.int4, jax.numpy.complex64, jax.dtypes.bfloat16),
    *(np.float32, np.dtype("float32"), jax.numpy.dtype("bfloat16")),
]


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants(value: Any) -> None:
    place = fresh_place()
    state = {"config": {"value": value, "list": [value]}, value: torch.ones(2), "w": torch.zeros(1)}
    blocking.save(state, place)
    for target in (None, {"config": {"value": None, "list": [None]}, value: torch.zeros(2), "w": torch.ones(1)}):
        found = blocking.load(place, target, framework="torch" if target is None else "numpy")
        assert list(map(repr, found)) == list(map(repr, state))
        for again in (found["config"]["value"], found["config"]["list"][0], list(found)[1]):
            assert type(again) is type(value)
            assert again == value
        assert bits(found[value]) == bits(torch.ones(2))


def test_every_constant_of_torch() -> None:
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    constants = {id(value): value for value in vars(torch).values() if type(value) in kinds}
    assert len(constants) > 40
    for value in constants.values():
        assert decode_value(encode_value(value, "key"), key="key") is value


# --- generators ---


def used_generator(seed: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.randn(7, generator=generator)
    torch.rand(3, generator=generator)
    return generator


def draw(generator: torch.Generator) -> list[Any]:
    return [torch.randn(33, generator=generator).tolist(), torch.randperm(9, generator=generator).tolist()]


@pytest.mark.parametrize("count", [0, 1, 2, 623, 624, 625, 1300])
def test_a_generator_goes_on_where_it_stood(count: int) -> None:
    generator, place = used_generator(3), fresh_place()
    torch.randint(0, 2**31, (count,), generator=generator)
    blocking.save({"rng": generator, "w": torch.zeros(1)}, place)
    found = blocking.load(place)["rng"]
    assert type(found) is torch.Generator
    assert found.initial_seed() == 3
    target = {"rng": torch.Generator(), "w": torch.zeros(1)}
    held = target["rng"]
    assert blocking.load(place, target)["rng"] is held
    assert draw(held) == draw(found) == draw(generator)


def test_a_cached_plan_stores_the_new_state() -> None:
    cache, generator = PlanCache(), used_generator(3)
    blocking.save({"rng": generator, "w": torch.zeros(1)}, fresh_place(), plan_cache=cache)
    draw(generator)
    place = fresh_place("again")
    blocking.save({"rng": generator, "w": torch.zeros(1)}, place, plan_cache=cache)
    assert cache.statistics().hits == 1
    assert draw(blocking.load(place)["rng"]) == draw(generator)


def test_a_generator_of_a_device_that_is_not_here() -> None:
    state = RecordedObject("torch.Generator", {"device": "xpu:3", "state": bytes(16)})
    place = fresh_place()
    blocking.save({"rng": state, "w": torch.zeros(1)}, place)
    assert blocking.load(place)["rng"] == state
    target = {"rng": used_generator(1), "w": torch.ones(1)}
    with pytest.raises(LoadMismatchError, match=r"rng: the checkpoint has a torch\.Generator"):
        blocking.load(place, target)
    assert target["w"].item() == 1
    assert draw(target["rng"]) == draw(used_generator(1))


def with_state(change: Callable[[np.ndarray], None]) -> dict[str, Any]:
    content = used_generator(1).get_state().numpy().copy()
    change(content)
    state = {"device": "cpu", "state": content.tobytes()}
    return {"$object": ["torch.Generator", encode_value(state, "key")]}


def position(left: int, following: int) -> Callable[[np.ndarray], None]:
    def change(content: np.ndarray) -> None:
        content[8:12].view(np.int32)[0] = left
        content[16:24].view(np.uint64)[0] = following

    return change


def test_pytorch_itself_takes_a_position_beyond_the_end() -> None:
    state = torch.Generator().get_state()
    position(624, 624)(state.numpy())
    torch.Generator().set_state(state)  # hence the checks below are ours


DAMAGED = {
    "beyond": with_state(position(624, 624)),
    "just beyond": with_state(position(624, 2)),
    "far beyond": with_state(position(1, 2**63)),
    "none left": with_state(position(0, 0)),
    "negative": with_state(position(-5, 0)),
    "unseeded": with_state(lambda content: content.__setitem__(slice(12, 16), 0)),
    "short": {"$object": ["torch.Generator", {"device": "cpu", "state": {"$bytes": "AAAA"}}]},
    "text": {"$object": ["torch.Generator", {"device": "cpu", "state": "AAAA"}]},
    "no device": {"$object": ["torch.Generator", {"state": {"$bytes": "AAAA"}}]},
    "device of another type": {"$object": ["torch.Generator", {"device": 3, "state": {"$bytes": "AAAA"}}]},
    "dtype": {"$object": ["torch.dtype", 3]},
    "dtype with a dot": {"$object": ["torch.dtype", "nn.Module"]},
    "device": {"$object": ["torch.device", "cpu:0; import os"]},
    "size": {"$object": ["torch.Size", {"$tuple": [1, 2.5]}]},
    "large size": {"$object": ["torch.Size", {"$tuple": [{"$int": hex(2**70)}]}]},
    "scalar type": {"$object": ["jax.numpy.scalar_type", ["float32"]]},
}


@pytest.mark.parametrize("node", DAMAGED.values(), ids=DAMAGED)
def test_hostile_states_are_refused_by_key(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the_key"):
        decode_value({"a": node}, key="the_key")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("torch.dtype", "nn"),
        ("torch.dtype", "strided"),
        ("torch.layout", "float32"),
        ("torch.dtype", "float7_of_the_future"),
        ("torch.device", "npu:3"),
        ("torch.memory_format", "save"),
        ("jax.numpy.scalar_type", "linalg"),
        ("torch.nn.Module", None),
    ],
)
def test_names_lead_to_nothing_but_constants(name: str, state: Any) -> None:
    found = decode_value({"$object": [name, state]}, key="key")
    assert found == RecordedObject(name, state)
    assert encode_value(found, "key") == {"$object": [name, state]}


# --- where nobody has imported the frameworks ---

WITHOUT_FRAMEWORKS = """
import sys
import savestream
from savestream import RecordedObject, blocking

found = blocking.load(sys.argv[1])
assert found["dtype"] == RecordedObject("torch.dtype", "bfloat16"), found
assert found["size"] == RecordedObject("torch.Size", (2, 3)), found
assert found["rng"].type_name == "torch.Generator" and found["rng"].state["device"] == "cpu", found
assert found["scalar"] == RecordedObject("jax.numpy.scalar_type", "bfloat16"), found
assert found["model"]._metadata[""] == {"version": 1}, found
blocking.save(found, sys.argv[2])
assert not {"torch", "jax"} & set(sys.modules)
"""


def test_stand_ins_where_no_framework_is_imported(tmp_path: Path) -> None:
    generator = used_generator(4)
    state = {
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda:1"),
        "rng": generator,
        "scalar": jax.numpy.bfloat16,
        "model": nn.Linear(2, 2).state_dict(),
    }
    blocking.save(state, tmp_path / "first")
    command = [sys.executable, "-W", "error", "-c", WITHOUT_FRAMEWORKS, tmp_path / "first", tmp_path / "second"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stderr
    found = blocking.load(tmp_path / "second", framework="torch")
    assert draw(found.pop("rng")) == draw(state.pop("rng"))
    assert_same_state(found, state)


# --- what state_dict() returns ---


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(8.0).reshape(2, 4)).square().sum()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [3]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=4),
}


def make_training(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, SCHEDULERS[name](optimizer)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        losses += [loss.item(), optimizer.param_groups[0]["lr"]]
    return losses


# SequentialLR calls its schedulers with an argument that PyTorch itself has deprecated.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_training_goes_on(name: str, target: bool) -> None:
    model, optimizer, scheduler = make_training(name)
    train(model, optimizer, scheduler, 4)
    place = fresh_place()
    state = {"m": model.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}
    blocking.save(state, place)
    other = make_training(name)
    into = None
    if target:
        train(*other, 1)  # an optimizer has no state before its first step
        into = {"m": other[0].state_dict(), "o": other[1].state_dict(), "s": other[2].state_dict()}
    found = blocking.load(place, into, framework="torch" if into is None else "numpy")
    if into is None:
        assert_same_state(found, state)
        assert found["m"]._metadata == state["m"]._metadata
    for part, key in zip(other, "mos", strict=True):
        part.load_state_dict(found[key])
    assert train(*other, 6) == train(model, optimizer, scheduler, 6)


def test_metadata_decides_how_a_module_reads_its_entries() -> None:
    """An entry that an older version lacks is missing in a newer one: the version is known only from the metadata."""
    place = fresh_place()
    state = nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    blocking.save({"with": state, "without": dict(state)}, place)
    found = blocking.load(place, framework="torch")
    nn.BatchNorm1d(3).load_state_dict(found["without"])  # taken for one of the first version
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(3).load_state_dict(found["with"])


def test_a_gradient_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    place = fresh_place()
    blocking.save(scaler.state_dict(), place)
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(blocking.load(place))
    assert again.state_dict() == scaler.state_dict()
    assert again.get_scale() == 16.0


def test_a_sampler_goes_on() -> None:
    generator = torch.Generator().manual_seed(7)
    sampler = torch.utils.data.RandomSampler(range(20), generator=generator)
    list(sampler)
    place = fresh_place()
    blocking.save({"sampler": generator, "as a tensor": generator.get_state()}, place)
    expected = list(sampler)
    found = blocking.load(place, framework="torch")
    assert list(torch.utils.data.RandomSampler(range(20), generator=found["sampler"])) == expected
    generator.set_state(found["as a tensor"])
    assert list(sampler) == expected


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "module": (lambda: nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear .*state_dict\(\)"),
    "optimizer": (lambda: torch.optim.SGD([torch.zeros(1)], lr=0.1), r"state_dict\(\)"),
    "scheduler": (lambda: make_training("lambda")[2], r"state_dict\(\)"),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), r"state_dict\(\)"),
    "lambda": (lambda: lambda step: step, "code is no state"),
    "method": (lambda: nn.Linear(2, 2).forward, "code is no state"),
    "jitted": (lambda: jax.jit(lambda x: x), "convert it to plain values"),
    "class": (lambda: nn.Linear, "a class is code"),
    "module of Python": (lambda: torch, "code is no state"),
    "sampler": (lambda: torch.utils.data.RandomSampler(range(3)), "convert it"),
    "device": (lambda: jax.devices()[0], "convert it"),
    "scalar type": (lambda: np.floating, "a class is code"),
}


@pytest.mark.parametrize(("make", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_holds_state_but_is_none_is_refused_by_key(make: Callable[[], Any], cure: str) -> None:
    for state in ({"held": make(), "w": torch.zeros(1)}, {"held": [3, {"x": make()}]}):
        with pytest.raises(UnsafeObjectError, match=rf"held.*{cure}"):
            blocking.save(state, fresh_place())


def test_encoding_is_stable() -> None:
    assert encode_value_bytes([torch.float32, torch.Size([1]), torch.device("cuda", 1)], "key") == (
        b'[{"$object":["torch.dtype","float32"]},{"$object":["torch.Size",{"$tuple":[1]}]},'
        b'{"$object":["torch.device","cuda:1"]}]'
    )
