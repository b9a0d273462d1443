"""Training that stops and goes on: optimizers, schedulers and scalers continue exactly as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch_training_support import assert_same_state, copied, fresh_place, seeded

import savestream
from savestream import LoadMismatchError, blocking

Parameters = Iterator[nn.Parameter]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1, "name": "matrices"},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


class NestedMomentum(optim.Optimizer):
    """Orthogonalised momentum for matrices, plain momentum for vectors; its state nests."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = {"fast": torch.zeros_like(parameter), "slow": torch.zeros_like(parameter)}
                    state["history"], state["steps"], state["last"] = (torch.zeros(()), [0]), 0, None
                for buffer, beta in zip(state["momentum"].values(), group["betas"], strict=True):
                    buffer.lerp_(parameter.grad, 1 - beta)
                update = state["momentum"]["fast"] + state["momentum"]["slow"]
                state["history"][0].add_(update.norm())
                state["history"][1][0] += 1
                state["steps"] += 1
                if update.ndim == 2:
                    left, _, right = torch.linalg.svd(update, full_matrices=False)
                    update = left @ right
                parameter.sub_(update, alpha=group["lr"] / (1 + 0.01 * state["steps"]))


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw foreach": lambda model: optim.AdamW(model.parameters(), foreach=True),
    "adamw fused": lambda model: optim.AdamW(model.parameters(), fused=True),
    "adamw amsgrad": lambda model: optim.AdamW(model.parameters(), amsgrad=True, betas=(0.8, 0.9)),
    "adamw tensor rate": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "adamw groups": lambda model: optim.AdamW(two_groups(model)),
    "sgd momentum": lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda model: optim.Adagrad(model.parameters(), lr_decay=0.01),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), momentum=0.5, centered=True),
    "lbfgs": lambda model: optim.LBFGS(model.parameters(), max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
    "adafactor": lambda model: optim.Adafactor(model.parameters()),
    "muon": lambda model: optim.Muon([one for one in model.parameters() if one.ndim == 2]),
    "nested": lambda model: NestedMomentum(two_groups(model)),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: optim.Optimizer, first: int, last: int) -> None:
    """Steps ``first`` to ``last``; the data of a step depends on its number alone."""
    for step in range(first, last):
        value = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))

        def closure(value: torch.Tensor = value) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(value) - value[:, :2].sin()).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def started(name: str, seed: int, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    model = seeded(seed, network)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 0, steps)
    return model, optimizer


def both(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}


@pytest.mark.parametrize("resume", ["new", "in place", "into a tree"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str, resume: str) -> None:
    model, optimizer = started(name, 1, 4)
    place = fresh_place()
    blocking.save(both(model, optimizer), place)
    saved = copied(both(model, optimizer))

    other_model, other = started(name, 2, 0 if resume == "new" else 4)
    if resume == "new":
        loaded = blocking.load(place, framework="torch")
        assert_same_state(loaded["optimizer"], saved["optimizer"])
        other_model.load_state_dict(loaded["model"])
    elif resume == "in place":
        loaded = blocking.load(place, both(other_model, other))
    else:
        loaded = blocking.load(place, copied(both(other_model, other)))
        other_model.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    assert_same_state(both(other_model, other), saved)

    train(model, optimizer, 4, 8)
    train(other_model, other, 4, 8)
    assert_same_state(both(other_model, other), both(model, optimizer))


@pytest.mark.parametrize("name", ["adamw fused", "muon", "lbfgs"])
def test_state_of_the_optimizer_itself_is_filled(name: str) -> None:
    model, optimizer = started(name, 1, 4)
    place = fresh_place()
    blocking.save(optimizer.state_dict(), place)
    _, other = started(name, 2, 4)
    target = other.state_dict()
    held = [list(map(id, state.values())) for state in other.state.values()]
    assert blocking.load(place, target) is target
    tensors = [[key for key, value in state.items() if torch.is_tensor(value)] for state in other.state.values()]
    for identities, state, keys in zip(held, other.state.values(), tensors, strict=True):
        places = list(state)
        assert [identities[places.index(key)] for key in keys] == [id(state[key]) for key in keys]
    assert any(tensors)
    assert_same_state(target, optimizer.state_dict())
    assert all(type(key) is int for key in target["state"])
    assert model is not None


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
def test_compiled_steps_with_state_on_the_device() -> None:
    def started_compiled(seed: int) -> tuple[nn.Module, optim.Optimizer, Callable[[], None]]:
        model = seeded(seed, network)
        optimizer = optim.AdamW(model.parameters(), capturable=True, foreach=False)
        return model, optimizer, torch.compile(optimizer.step, backend="eager")

    def train_compiled(model: nn.Module, optimizer: optim.Optimizer, step: Callable[[], None], seed: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        step()

    first, second = started_compiled(1), started_compiled(2)
    train_compiled(*first, 0)
    place = fresh_place()
    blocking.save(both(*first[:2]), place)
    assert first[1].state_dict()["param_groups"][0]["capturable"] is True
    loaded = blocking.load(place, framework="torch")
    second[0].load_state_dict(loaded["model"])
    second[1].load_state_dict(loaded["optimizer"])
    train_compiled(*first, 1)
    train_compiled(*second, 1)
    assert_same_state(both(*second[:2]), both(*first[:2]))


def test_a_fresh_optimizer_is_no_target_for_a_used_one() -> None:
    _, optimizer = started("adamw groups", 1, 2)
    place = fresh_place()
    blocking.save(optimizer.state_dict(), place)
    _, fresh = started("adamw groups", 2, 0)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, fresh.state_dict())
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    assert len(caught.value.unexpected) == 3 * parameters
    assert not caught.value.missing
    assert not fresh.state


def test_another_number_of_parameters_is_refused() -> None:
    _, optimizer = started("sgd momentum", 1, 2)
    place = fresh_place()
    blocking.save(optimizer.state_dict(), place)
    larger = nn.Sequential(network(), nn.Linear(2, 2))
    other = optim.SGD(larger.parameters(), lr=0.05, momentum=0.9)
    larger(torch.randn(8, 5)).sum().backward()
    other.step()
    target = other.state_dict()
    before = copied(target)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, target)
    assert list(caught.value.missing) == [f"state[int:{number}].momentum_buffer" for number in (6, 7)]
    assert_same_state(target, before)


def rates(epoch: int) -> float:
    return 0.9**epoch


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, rates),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1, 3), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, cooldown=1),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
}


def advance(scheduler: Any, optimizer: optim.Optimizer, steps: int) -> list[Any]:
    seen = []
    for step in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0 if step % 3 else 0.5)
        else:
            scheduler.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str, with_target: bool) -> None:
    def make() -> tuple[Any, optim.Optimizer]:
        optimizer = optim.SGD(two_groups(seeded(1, network)), lr=0.05, momentum=0.9)
        return SCHEDULERS[name](optimizer), optimizer

    scheduler, optimizer = make()
    advance(scheduler, optimizer, 5)
    place = fresh_place()
    state = {"scheduler": scheduler.state_dict(), "optimizer": optimizer.state_dict()}
    blocking.save(state, place)
    other, other_optimizer = make()
    if with_target:
        advance(other, other_optimizer, 2)
        target = {"scheduler": other.state_dict(), "optimizer": other_optimizer.state_dict()}
        loaded = blocking.load(place, target)
        assert loaded is target
    else:
        loaded = blocking.load(place)
    assert_same_state(loaded, state)
    other_optimizer.load_state_dict(loaded["optimizer"])
    other.load_state_dict(loaded["scheduler"])
    assert advance(other, other_optimizer, 9) == advance(scheduler, optimizer, 9)
    assert_same_state(other.state_dict(), scheduler.state_dict())


def test_a_gradient_scaler_goes_on() -> None:
    def run(scaler: Any, steps: int) -> list[float]:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = optim.SGD([parameter], lr=0.1)
        scales = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = parameter.sum() * (float("inf") if step % 4 == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    run(scaler, 6)
    place = fresh_place()
    blocking.save({"scaler": scaler.state_dict()}, place)
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(blocking.load(place)["scaler"])
    assert fresh.state_dict() == scaler.state_dict()
    assert run(fresh, 7) == run(scaler, 7)
    target = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    assert blocking.load(place, target)["scaler"]["scale"] == target["scaler"]["scale"] != 65536.0


def test_generators_go_on() -> None:
    generator, order = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    torch.rand(3, generator=generator)
    place = fresh_place()
    blocking.save({"draw": generator, "order": {"generator": order}, "w": torch.ones(2)}, place)
    expected = [torch.rand(4, generator=generator), torch.randperm(9, generator=order)]
    loaded = blocking.load(place, framework="torch")
    own = {"draw": torch.Generator(), "order": {"generator": torch.Generator()}, "w": torch.zeros(2)}
    held = own["draw"]
    blocking.load(place, own)
    assert own["draw"] is held
    for state in (loaded, own):
        found = [torch.rand(4, generator=state["draw"]), torch.randperm(9, generator=state["order"]["generator"])]
        assert_same_state(found, expected)


async def test_random_states_as_tensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = {"global": torch.get_rng_state(), "own": generator.get_state()}
    await savestream.save(state, tmp_path / "checkpoint")
    expected = torch.rand(4, generator=generator)
    loaded = await savestream.load(tmp_path / "checkpoint", framework="torch")
    other = torch.Generator()
    other.set_state(loaded["own"])
    assert torch.equal(torch.rand(4, generator=other), expected)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state["global"])
        drawn = torch.rand(4)
        torch.set_rng_state(loaded["global"])
        assert torch.equal(torch.rand(4), drawn)
