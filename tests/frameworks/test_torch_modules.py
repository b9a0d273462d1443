"""States of real modules: what they hold comes back bit for bit, in place where there is a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch_training_support import (
    TiedModel,
    assert_same_state,
    bits,
    copied,
    fresh_place,
    scrambled,
    seeded,
    stored_names,
    tensors_of,
)

import savestream
from savestream import LoadMismatchError, UnsafeObjectError, blocking


class Recurrent(nn.Module):
    """An LSTM whose weights are views into one buffer, as cuDNN wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        flat = torch.cat([weight.detach().reshape(-1) for weight in self.lstm.parameters()])
        position = 0
        for weight in self.lstm.parameters():
            weight.data = flat[position : position + weight.numel()].view_as(weight)
            position += weight.numel()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.lstm(value)[0]


class Buffers(nn.Module):
    """Every sort of buffer, a scalar, something empty and a dtype without autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.declared = nn.Buffer(torch.randn(3))
        self.passing = nn.Buffer(torch.randn(2), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("absent", None)
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(2, 2).bfloat16(), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale + self.declared.sum() + self.count + self.frozen.float().sum()


def convolution() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    return body.to(memory_format=torch.channels_last)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), backend="eager")


def lazy() -> nn.Module:
    body = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU())
    body(torch.ones(3, 5))
    return body


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "channels last": (convolution, (2, 3, 6, 6)),
    "transformer": (transformer, (2, 5, 8)),
    "flat lstm": (Recurrent, (2, 3, 4)),
    "buffers": (Buffers, (3,)),
    "compiled": (compiled, (2, 4)),
    "lazy after a pass": (lazy, (3, 5)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), (2, 4)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (2, 4)),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A module that has trained a little, another of other content, and an input."""
    make, shape = MODULES[name]
    first, second = seeded(1, make), seeded(2, make)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for module, passes in ((first, 3), (second, 1)):
        for _ in range(passes):  # buffers change too
            module(value).square().sum().backward()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.01)
        module.zero_grad()
        module.eval()
    assert [bits(one) for one in tensors_of(first.state_dict())] != [
        bits(one) for one in tensors_of(second.state_dict())
    ]
    return first, second, value


@pytest.mark.parametrize("name", MODULES)
def test_a_module_comes_back_without_a_target(name: str) -> None:
    first, second, value = pair(name)
    place = fresh_place()
    blocking.save(first.state_dict(), place)
    loaded = blocking.load(place, framework="torch")
    assert_same_state(dict(loaded), dict(first.state_dict()))
    second.load_state_dict(loaded, strict=True)
    assert bits(second(value)) == bits(first(value))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_filled_in_place(name: str) -> None:
    first, second, value = pair(name)
    place = fresh_place()
    blocking.save(first.state_dict(), place)
    target = second.state_dict()
    before = {key: (tensor, tensor.data_ptr(), tensor.stride()) for key, tensor in target.items()}
    result = blocking.load(place, target)
    assert result is target
    assert {key: (tensor, tensor.data_ptr(), tensor.stride()) for key, tensor in result.items()} == before
    assert_same_state(second.state_dict(), first.state_dict())
    assert bits(second(value)) == bits(first(value))


@pytest.mark.parametrize("name", MODULES)
def test_parameters_themselves_are_targets(name: str) -> None:
    first, second, _ = pair(name)
    place = fresh_place()
    blocking.save(dict(first.named_parameters()), place)
    target = dict(second.named_parameters())
    trained = [parameter for parameter in target.values() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 0.5)
    before = {key: (value, value.requires_grad, value.grad, value.stride()) for key, value in target.items()}
    blocking.load(place, target)
    assert {key: (value, value.requires_grad, value.grad, value.stride()) for key, value in target.items()} == before
    assert all(dict(second.named_parameters())[key] is value for key, value in target.items())
    assert all(bool((parameter.grad == 0.5).all()) for parameter in trained)
    assert_same_state(target, dict(first.named_parameters()))


def test_buffers_that_are_not_persistent_stay_out() -> None:
    place = fresh_place()
    first, second, _ = pair("buffers")
    own = second.get_buffer("passing").clone()
    blocking.save(first.state_dict(), place)
    blocking.load(place, second.state_dict())
    assert bits(second.get_buffer("passing")) == bits(own)
    assert "passing" not in stored_names(place)


def test_names_of_a_compiled_module_stand_as_they_are() -> None:
    first, second, value = pair("compiled")
    place = fresh_place()
    blocking.save(first.state_dict(), place)
    loaded = blocking.load(place, framework="torch")
    assert set(loaded) == {f"_orig_mod.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")}
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, plain.state_dict())
    assert sorted(caught.value.unexpected) == stored_names(place)
    assert len(caught.value.missing) == 4
    blocking.load(place, {f"_orig_mod.{key}": tensor for key, tensor in plain.state_dict().items()})
    assert bits(plain(value)) == bits(first(value))
    assert second is not plain


def test_a_parametrised_weight_is_its_originals() -> None:
    first, _, _ = pair("weight norm")
    place = fresh_place()
    blocking.save(first.state_dict(), place)
    assert stored_names(place) == [
        "bias",
        "parametrizations\\.weight\\.original0",
        "parametrizations\\.weight\\.original1",
    ]
    parametrize.remove_parametrizations(first, "weight")
    with pytest.raises(LoadMismatchError, match="original0"):
        blocking.load(place, first.state_dict())


def test_a_lazy_module_has_to_run_first() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4))
    place = fresh_place()
    with pytest.raises(UnsafeObjectError, match=r"1\\\.weight: .*run one first"):
        blocking.save(module.state_dict(), place)
    assert not blocking.exists(place)
    twin = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 4))
    blocking.save(twin.state_dict(), place)
    before = copied({"w": module[0].weight, "b": module[0].bias})
    with pytest.raises(LoadMismatchError, match=r"1\\\.weight: .*lazy"):
        blocking.load(place, module.state_dict())
    assert_same_state({"w": module[0].weight, "b": module[0].bias}, before)
    module.load_state_dict(blocking.load(place, framework="torch"))
    assert_same_state(module.state_dict(), twin.state_dict())


@pytest.mark.parametrize("view", ["parameters", "state_dict", "data"])
def test_a_graph_from_before_the_load_is_refused_by_backward(view: str) -> None:
    place = fresh_place()
    module, other = seeded(1, lambda: nn.Linear(3, 3)), seeded(2, lambda: nn.Linear(3, 3))
    blocking.save(dict(other.named_parameters()), place)
    if view == "data":  # torch gives such a tensor a counter of its own: it was asked not to be told
        target = {key: value.data for key, value in module.named_parameters()}
    else:
        target = module.state_dict() if view == "state_dict" else dict(module.named_parameters())
    before = [value._version for value in target.values()]
    own = [value._version for value in module.parameters()]
    loss = (module.weight @ module.weight).sum()
    blocking.load(place, target)
    assert [value._version for value in target.values()] == [version + 1 for version in before]
    changed = 0 if view == "data" else 1
    assert [value._version for value in module.parameters()] == [version + changed for version in own]
    if changed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
    module(torch.ones(3)).sum().backward()  # a new graph is fine


def test_what_a_load_does_not_fill_is_not_counted_as_changed() -> None:
    place = fresh_place()
    module = nn.Linear(3, 3)
    blocking.save(module.state_dict(), place)
    loss = (module.weight @ module.weight).sum()
    before = (module.weight._version, module.bias._version)
    with pytest.raises(LoadMismatchError):
        blocking.load(place, {**dict(module.named_parameters()), "more": torch.zeros(2)})
    assert (module.weight._version, module.bias._version) == before
    blocking.load(place, dict(module.named_parameters()), keys="bias")
    assert (module.weight._version, module.bias._version) == (before[0], before[1] + 1)
    loss.backward()


def test_a_result_of_operations_may_be_a_target_too() -> None:
    place = fresh_place()
    leaf = torch.ones(3, requires_grad=True)
    hidden = (leaf * 2).exp()
    blocking.save({"hidden": torch.tensor([1.0, 2.0, 3.0])}, place)
    blocking.load(place, {"hidden": hidden})
    assert hidden.tolist() == [1.0, 2.0, 3.0]
    assert hidden.grad_fn is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_an_embedding_tied_with_its_head() -> None:
    first, second = TiedModel(1), TiedModel(2)
    tokens = torch.tensor([[1, 2, 3]])
    place = fresh_place()
    blocking.save(first.state_dict(), place)
    blocking.load(place, second.state_dict())
    assert second.head.weight is second.embedding.weight
    assert bits(second(tokens)) == bits(first(tokens))


async def test_nested_states_of_several_modules(tmp_path: Any) -> None:
    modules = {name: pair(name)[0] for name in MODULES}
    state = {"models": [module.state_dict() for module in modules.values()], "names": list(modules), "step": 3}
    await savestream.save(state, tmp_path / "checkpoint")
    target = scrambled(state)
    target["names"], target["step"] = [], 0
    assert await savestream.load(tmp_path / "checkpoint", target) is target
    assert_same_state(target, state)
