"""Plans of torch states are reused for true repeats only, and make no difference to what comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_training_support import Lifetimes, TiedModel, assert_same_state, fresh_place, seeded, tensors_of

from savestream import PlanCache, ShardedArray, blocking


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save(state: Any, cache: PlanCache | None) -> tuple[bool, Any]:
    """Whether the plan came from the cache, and the place."""
    place = fresh_place()
    return blocking.save(state, place, plan_cache=cache).statistics.plan_cached, place


def base() -> dict[str, Any]:
    return {"w": numbers(4, 6), "p": nn.Parameter(numbers(6)), "deep": {"v": [numbers(3), None]}, "n": 1}


def changed(**changes: Any) -> dict[str, Any]:
    return {**base(), **changes}


WEIGHT = numbers(4, 6)
VARIANTS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: changed(w=numbers(4, 6).bfloat16()),
    "dtype of equal size": lambda: changed(w=numbers(4, 6).view(torch.int32)),
    "another of equal size": lambda: changed(w=numbers(4, 6).half()),
    "shape": lambda: changed(w=numbers(6, 4)),
    "scalar": lambda: changed(w=numbers()),
    "empty": lambda: changed(w=torch.empty(0, 6)),
    "strides": lambda: changed(w=numbers(6, 4).t()),
    "offset strides": lambda: changed(w=numbers(4, 12)[:, ::2]),
    "tied": lambda: changed(w=WEIGHT, x=WEIGHT),
    "untied": lambda: changed(w=WEIGHT, x=WEIGHT.clone()),
    "numpy": lambda: changed(w=numbers(4, 6).numpy()),
    "complex": lambda: changed(w=torch.view_as_complex(numbers(4, 6, 2))),
    "conjugate": lambda: changed(w=torch.view_as_complex(numbers(4, 6, 2)).conj()),
    "value": lambda: changed(w=5.0),
    "sharded": lambda: changed(w=ShardedArray((4, 6), [((0, 0), numbers(1, 6)), ((1, 0), numbers(3, 6))])),
    "name": lambda: {("u" if key == "w" else key): value for key, value in base().items()},
    "order": lambda: dict(reversed(base().items())),
    "class of the leaf": lambda: changed(w=nn.Parameter(numbers(4, 6))),
    "requires grad": lambda: changed(p=nn.Parameter(numbers(6), requires_grad=False)),
}
# Nothing of it is stored, so whether these miss is of no consequence.
EITHER = {"class of the leaf", "requires grad"}


def plain(state: Any) -> Any:
    found = {
        key: torch.from_numpy(value) if type(value).__module__ == "numpy" else value for key, value in state.items()
    }
    if isinstance(state.get("w"), ShardedArray):
        found["w"] = torch.cat(state["w"].shards)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_only_true_repeats_hit_and_every_step_is_exact(name: str) -> None:
    cache, hits = PlanCache(), []
    for make in (base, base, VARIANTS[name], VARIANTS[name], base):
        state = make()
        hit, place = save(state, cache)
        hits.append(hit)
        assert_same_state(blocking.load(place, framework="torch"), plain(state))
    assert hits[:2] + hits[3:] == [False, True, True, True]
    assert hits[2] is False or name in EITHER


def test_a_model_in_training_hits_from_the_second_save_on() -> None:
    model = seeded(1, lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    cache, hits = PlanCache(), []
    for step in range(4):
        optimizer.zero_grad()
        model(numbers(6, 5, seed=step)).square().mean().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        hit, place = save(state, cache)
        hits.append(hit)
        assert_same_state(blocking.load(place, framework="torch"), state)
    assert hits == [False, True, True, True]


def test_tying_and_untying_a_model() -> None:
    model, cache, hits = TiedModel(1), PlanCache(), []
    for step in range(4):
        if step == 2:
            model.head.weight = nn.Parameter(numbers(11, 6, seed=5))
        hit, place = save(model.state_dict(), cache)
        hits.append(hit)
        other = TiedModel(3, tied=step < 2)
        blocking.load(place, other.state_dict())
        assert_same_state(other.state_dict(), model.state_dict())
    assert hits == [False, True, False, True]


def test_two_models_of_one_form_share_plans_and_no_data() -> None:
    cache, models = PlanCache(), [seeded(seed, lambda: nn.Linear(30, 40)) for seed in range(3)]
    hits, places = zip(*[save(model.state_dict(), cache) for model in models], strict=True)
    assert hits == (False, True, True)
    for model, place in zip(models, places, strict=True):
        assert_same_state(dict(blocking.load(place, framework="torch")), dict(model.state_dict()))


def test_a_cache_keeps_no_tensor() -> None:
    cache = PlanCache()
    state = base()
    lifetimes = Lifetimes(tensors_of(state))
    save(state, cache)
    save(state, cache)
    del state
    gc.collect()
    assert lifetimes.count_alive() == 0
    assert cache.statistics().entries == 1
