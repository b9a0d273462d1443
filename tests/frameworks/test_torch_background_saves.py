"""Background saves beside a training loop: the checkpoint holds what was staged, and nothing of the state is kept."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch_training_support import Lifetimes, assert_same_state, copied, fresh_place, scrambled, seeded, tensors_of

import savestream
from savestream import PlanCache, PlanError, SaveOptions, StagingPool, StorageError, blocking
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend


class Trainer:
    """A model whose every tensor changes with every step, on a thread of its own if wanted."""

    def __init__(self, seed: int = 0, width: int = 300) -> None:
        self.model = seeded(seed, lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.input = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
        self._stop = threading.Event()
        self._advanced = threading.Condition()
        self.steps = 0
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.input).square().mean().backward()
        self.optimizer.step()
        with self._advanced:
            self.steps += 1
            self._advanced.notify_all()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def wait_for(self, steps: int) -> None:
        with self._advanced:
            assert self._advanced.wait_for(lambda: self.steps >= steps, 60)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.is_set():
            self.step()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        self._stop.clear()


@pytest.mark.parametrize("kind", ["write", "finish", "put", "create"])
@pytest.mark.parametrize("stage", ["eager", "lazy"])
async def test_steps_after_staging_do_not_reach_the_checkpoint(stage: Any, kind: Any) -> None:
    trainer, rng = Trainer(), random.Random(f"{stage} {kind}")
    for attempt in range(5):
        gate, memory = Gate(), MemoryBackend()
        backend = FaultyBackend(memory, [Fault(kind, hook=gate)])
        expected = copied(trainer.state())
        options = SaveOptions(compression="none" if attempt % 2 else "zstd")
        handle = await savestream.start_save(trainer.state(), (backend, "c"), stage=stage, options=options)
        if stage == "lazy":
            await handle.staged()
        start = trainer.steps
        with trainer:
            await gate.reached()
            await asyncio.to_thread(trainer.wait_for, start + rng.randrange(1, 4))
            gate.open()
            await handle
        assert trainer.steps > start
        assert_same_state(await savestream.load((memory, "c"), framework="torch"), expected)


async def test_saves_one_after_the_other_while_training_goes_on() -> None:
    trainer, memory, cache = Trainer(), MemoryBackend(), PlanCache()
    expected, handles = [], []
    with StagingPool(64 * 2**20) as pool:
        for number in range(6):
            expected.append(copied(trainer.state()))
            options = SaveOptions(staging_pool=pool)
            place = (memory, f"c{number}")
            handles.append(await savestream.start_save(trainer.state(), place, options=options, plan_cache=cache))
            trainer.step()
        infos = await asyncio.gather(*handles)
    assert infos[0].statistics.plan_cached is False
    for number, state in enumerate(expected):
        assert_same_state(await savestream.load((memory, f"c{number}"), framework="torch"), state)


async def test_memory_may_be_freed_after_staging() -> None:
    memory, gate = MemoryBackend(), Gate()
    state = {
        "large": torch.randn(2**20),
        "small": [torch.randn(5) for _ in range(100)],
        "view": torch.randn(900, 90).t(),
        "half": torch.randn(9).bfloat16(),
        "alone": torch.randn(3, dtype=torch.float64),
    }
    expected = copied(state)
    handle = await savestream.start_save(state, (FaultyBackend(memory, [Fault("write", hook=gate)]), "c"))
    for tensor in tensors_of(state):
        tensor.untyped_storage().resize_(0)
    await gate.reached()
    gate.open()
    await handle
    assert_same_state(await savestream.load((memory, "c"), framework="torch"), expected)


@pytest.mark.parametrize("which", ["large", "small"])
async def test_memory_freed_too_early_is_an_error_and_no_crash(which: str) -> None:
    """Between planning and staging, which only a lazily staged save lets the caller reach."""
    memory = MemoryBackend()
    entered, go_on = threading.Event(), threading.Event()

    def hold(event: Any) -> None:
        if isinstance(event, savestream.SavePlanned):
            entered.set()
            assert go_on.wait(60)

    state = {"large": torch.randn(2**20), "small": torch.randn(5), "other": torch.randn(7)}
    handle = await savestream.start_save(state, (memory, "c"), stage="lazy", observer=hold)
    await asyncio.to_thread(entered.wait, 60)
    state[which].untyped_storage().resize_(0)
    go_on.set()
    with pytest.raises(PlanError, match="freed between planning and staging"):
        await handle
    assert not await savestream.exists((memory, "c"))


@pytest.mark.parametrize("kind", ["open_writer", "write", "finish", "put", "create"])
async def test_a_save_that_fails_beside_training(kind: Any) -> None:
    trainer, memory = Trainer(), MemoryBackend()
    gate = Gate()
    backend = FaultyBackend(memory, [Fault(kind, errno.ENOSPC, hook=gate)])
    with trainer:
        # Whether the failure comes before or after staging, training goes on meanwhile.
        pending = asyncio.ensure_future(savestream.start_save(trainer.state(), (backend, "c")))
        await gate.reached()
        await asyncio.to_thread(trainer.wait_for, trainer.steps + 2)
        gate.open()
        with pytest.raises(StorageError) as caught:
            await (await pending)
    assert caught.value.errno == errno.ENOSPC
    assert not await savestream.exists((memory, "c"))
    expected = copied(trainer.state())
    await (await savestream.start_save(trainer.state(), (memory, "c")))
    assert_same_state(await savestream.load((memory, "c"), framework="torch"), expected)


def many(count: int = 30) -> dict[str, Any]:
    base = torch.randn(300, 300)
    return {
        "large": torch.randn(2**18),
        "view": base[3:70].t(),
        "half": nn.Parameter(torch.randn(2**17).bfloat16()),
        "conjugate": torch.randn(400, 400, dtype=torch.complex64).conj(),
        "small": {number: torch.randn(number) for number in range(count)},
        "kept": [torch.randn(()), 5],
    }


async def test_after_staging_no_tensor_is_held() -> None:
    gate, memory, cache = Gate(), MemoryBackend(), PlanCache()
    backend = FaultyBackend(memory, [Fault("create", hook=gate)])
    for number in range(2):  # the second time from the cache
        state = many()
        lifetimes, expected = Lifetimes(tensors_of(state)), copied(state)
        handle = await savestream.start_save(state, (backend, f"c{number}"), plan_cache=cache)
        await gate.reached()
        assert lifetimes.count_alive() > 60
        del state
        assert lifetimes.count_alive() == 0
        gate.open()
        await handle
        assert_same_state(await savestream.load((memory, f"c{number}"), framework="torch"), expected)


def leave_a_result(place: Any) -> tuple[Lifetimes, Any]:
    state = many()
    return Lifetimes(tensors_of(state)), blocking.save(state, place)


def leave_a_failure(place: Any) -> tuple[Lifetimes, Any]:
    state = many()
    backend = FaultyBackend(place[0], [Fault("write", errno.EIO)])
    handle = blocking.start_save(state, (backend, place[1]))
    lifetimes = Lifetimes(tensors_of(state))
    del state
    with pytest.raises(StorageError):
        handle.result(60)
    return lifetimes, handle


def leave_a_refusal(place: Any) -> tuple[Lifetimes, Any]:
    state = many()
    lifetimes = Lifetimes(tensors_of(state))
    state["bad"] = object()
    try:
        blocking.save(state, place)
    except savestream.UnsafeObjectError as error:
        return lifetimes, error.with_traceback(None)
    raise AssertionError("saved an object")


def leave_a_load(place: Any) -> tuple[Lifetimes, Any]:
    blocking.save(many(), place)
    target, loaded = scrambled(many()), blocking.load(place, framework="torch")
    blocking.load(place, target)
    return Lifetimes(tensors_of([target, loaded])), None


def leave_a_mismatch(place: Any) -> tuple[Lifetimes, Any]:
    blocking.save(many(), place)
    target = scrambled(many(31))
    try:
        blocking.load(place, target)
    except savestream.LoadMismatchError as error:
        return Lifetimes(tensors_of(target)), error.with_traceback(None)
    raise AssertionError("loaded into another state")


@pytest.mark.parametrize("leave", [leave_a_result, leave_a_failure, leave_a_refusal, leave_a_load, leave_a_mismatch])
def test_nothing_that_a_call_leaves_holds_a_tensor(leave: Callable[[Any], tuple[Lifetimes, Any]]) -> None:
    lifetimes, left = leave(fresh_place())
    assert lifetimes.count_alive() == 0
    del left


def test_memory_of_loaded_tensors_is_freed_with_them() -> None:
    place = fresh_place()
    blocking.save({"a": torch.randn(2**18), "b": torch.randn(3)}, place)
    loaded = blocking.load(place, framework="torch")
    lifetimes = Lifetimes(tensors_of(loaded))
    view = loaded["a"].detach()[5:10]
    held = view.clone()
    del loaded
    assert lifetimes.count_alive() == 1  # the storage behind the view
    assert torch.equal(view, held)
    del view
    assert lifetimes.count_alive() == 0
