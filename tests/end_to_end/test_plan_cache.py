"""A cached plan is used for true repeats only, and makes no difference to what is stored."""

from __future__ import annotations

import asyncio
import errno
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place

import savestream
from savestream import (
    DefaultSavePlanner,
    PlanCache,
    SaveOptions,
    ShardedArray,
    StorageError,
    blocking,
)
from savestream.planners import SavePlan, WriteItem
from savestream.storage_backends import Fault, FaultyBackend, MemoryBackend


def values(shape: Any, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def fixed(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint without what differs between any two saves."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            for pattern in (rb'"created":"[^"]*"', rb'"fingerprint":"[^"]*"', rb'"sha256":"[^"]*"'):
                content = re.sub(pattern, b"", content)
            found[path.name] = content.replace(_save_id(directory).encode(), b"ID")
    return found


def _save_id(directory: Path) -> str:
    return blocking.read_manifest(directory).save_id


class Doubling(DefaultSavePlanner):
    """Changes the data without saying so in its fingerprint, hence is never cached."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        found = super().transform_object(write_item, object)
        return found * 2 if isinstance(found, np.ndarray) else found


class Renaming(DefaultSavePlanner):
    """Renames, and says so in its fingerprint."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def plan_fingerprint(self) -> bytes | None:
        own = super().plan_fingerprint()
        return None if own is None else own + self.prefix.encode()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return msgspec.structs.replace(plan, items=[self.renamed(item, self.prefix) for item in plan.items])

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(self.renamed(write_item, ""))

    def renamed(self, item: WriteItem, prefix: str) -> WriteItem:
        fqn = prefix + item.index.fqn.removeprefix(self.prefix)
        return msgspec.structs.replace(item, index=msgspec.structs.replace(item.index, fqn=fqn))


def base() -> dict[str, Any]:
    return {"w": values(8), "deep": {"v": values((2, 3)), "lr": 0.1}, "list": [values(4), None], "n": 5}


def changed(**changes: Any) -> dict[str, Any]:
    return {**base(), **changes}


TIED = values(8)
VARIANTS: dict[str, Any] = {
    "dtype": lambda: changed(w=values(8, ml_dtypes.bfloat16)),
    "dtype of equal size": lambda: changed(w=values(8, np.int32)),
    "byte order": lambda: changed(w=values(8, ">f4")),
    "unit": lambda: changed(w=values(8, "M8[s]")),
    "shape": lambda: changed(w=values((4, 2))),
    "0-d": lambda: changed(w=values(())),
    "empty": lambda: changed(w=values((0, 3))),
    "rename": lambda: {("u" if key == "w" else key): value for key, value in base().items()},
    "order": lambda: dict(reversed(base().items())),
    "key type": lambda: {**base(), 5: values(3)},
    "key type of equal text": lambda: {**base(), "5": values(3)},
    "extra": lambda: changed(extra=values(1)),
    "value for an array": lambda: changed(w=5.0),
    "array for a value": lambda: changed(n=values(1)),
    "longer list": lambda: changed(list=[values(4), None, None]),
    "tuple": lambda: changed(list=(values(4), None)),
    "nesting": lambda: changed(deep={"v": {"v": values((2, 3))}, "lr": 0.1}),
    "tied": lambda: changed(w=TIED, x=TIED),
    "untied": lambda: changed(w=TIED, x=TIED.copy()),
    "layout": lambda: changed(w=values((8, 2))[:, 0]),
    "sharded": lambda: changed(w=ShardedArray((8,), [((0,), values(3)), ((3,), values(5))])),
    "other shards": lambda: changed(w=ShardedArray((8,), [((0,), values(4)), ((4,), values(4))])),
}


def plain(state: Any) -> Any:
    """The state as a load without a target gives it."""
    w = state.get("w")
    return {**state, "w": np.concatenate(w.shards)} if isinstance(w, ShardedArray) else state


@pytest.mark.parametrize("name", VARIANTS)
def test_only_true_repeats_hit_and_every_step_is_exact(name: str, tmp_path: Path) -> None:
    cache = PlanCache()
    hits = []
    for step, make in enumerate([base, base, VARIANTS[name], VARIANTS[name], base]):
        state = make()
        info = blocking.save(state, tmp_path / f"cached-{step}", plan_cache=cache)
        hits.append(info.statistics.plan_cached)
        assert_same(blocking.load(tmp_path / f"cached-{step}"), plain(state))
        blocking.save(state, tmp_path / f"plain-{step}")
        assert fixed(tmp_path / f"cached-{step}") == fixed(tmp_path / f"plain-{step}")
    assert hits == [False, True, False, True, True]


def test_the_dtype_sequence_of_a_training_run(tmp_path: Path) -> None:
    cache = PlanCache()
    states = [
        {"w": values(8)},
        {"w": values(8, ml_dtypes.bfloat16)},
        {"w": values((4, 2))},
        {"u": values((4, 2))},
        {"w": values(8)},
    ]
    hits = []
    for step, state in enumerate(states):
        info = blocking.save(state, tmp_path / str(step), plan_cache=cache, step=step)
        hits.append(info.statistics.plan_cached)
        assert_same(blocking.load(tmp_path / str(step)), state)
    assert hits == [False, False, False, False, True]


def test_values_are_new_on_every_hit() -> None:
    cache = PlanCache()
    for step in range(4):
        state = {"w": values(5, seed=step), "step": step, "log": {"text": "x" * step, "sub": [step] * 3}, "none": None}
        place = fresh_place()
        info = blocking.save(state, place, plan_cache=cache)
        assert info.statistics.plan_cached == (step > 0)
        assert_same(blocking.load(place), state)
    assert (cache.statistics().hits, cache.statistics().entries) == (3, 1)


def test_pickled_bytes_of_another_length_are_planned_anew() -> None:
    cache = PlanCache()
    options = SaveOptions(allow_pickle=True)
    hits = []
    for kind in (dict, set, dict, frozenset, frozenset):
        place = fresh_place()
        hits.append(
            blocking.save(
                {"w": values(5), "kind": kind}, place, plan_cache=cache, options=options
            ).statistics.plan_cached
        )
        found = blocking.load(place, options=savestream.LoadOptions(allow_pickle=True))
        assert_same(found, {"w": values(5), "kind": kind})
    assert hits[1] == (len("dict") == len("set"))
    assert hits[4]


@pytest.mark.parametrize(
    "options",
    [{"compression": "none"}, {"compression": "zstd"}, {"threads": 1}, {"memory_budget_bytes": 4 << 20}],
    ids=str,
)
def test_options_of_the_save_may_change_between_hits(options: Any, tmp_path: Path) -> None:
    cache = PlanCache()
    state = {"w": values((1000, 1000)), "v": values(10)}
    blocking.save(state, tmp_path / "a", plan_cache=cache, options=SaveOptions(compression="zstd"))
    blocking.save(state, tmp_path / "b", plan_cache=cache, options=SaveOptions(**options))
    handle = blocking.start_save(state, tmp_path / "c", plan_cache=cache, options=SaveOptions(**options))
    handle.result(60)
    for name in "abc":
        assert_same(blocking.load(tmp_path / name), state)


def test_planners_and_their_options_do_not_share_plans(tmp_path: Path) -> None:
    cache = PlanCache()
    planners: list[tuple[Any, Any]] = [
        (lambda: None, lambda state: state),
        (DefaultSavePlanner, lambda state: state),
        (lambda: DefaultSavePlanner(flatten_state_dict=False), lambda state: state),
        (Doubling, lambda state: {key: value * 2 for key, value in state.items()}),
        (lambda: Renaming("p"), lambda state: {f"p{key}": value for key, value in state.items()}),
        (lambda: Renaming("q"), lambda state: {f"q{key}": value for key, value in state.items()}),
    ]
    state = {"w": values(8), "v": values(3)}
    hits = []
    for turn in range(3):
        for number, (make, expected) in enumerate(planners):
            place = tmp_path / f"{turn}-{number}"
            info = blocking.save(state, place, planner=make(), plan_cache=cache)
            hits.append(info.statistics.plan_cached)
            assert_same(blocking.load(place), expected(state))
    assert hits[:6] == [False, True, False, False, False, False]
    assert hits[6:12] == hits[12:]
    assert hits[9] is False
    assert hits[10] is hits[11] is True


async def test_a_failed_save_caches_nothing() -> None:
    cache = PlanCache()
    memory = MemoryBackend()
    state = base()
    for kind in ("open_writer", "write", "finish", "put", "create"):
        backend = FaultyBackend(memory, [Fault(kind, errno.EIO)])
        with pytest.raises(StorageError):
            await savestream.save(state, (backend, "c"), plan_cache=cache)
        assert cache.statistics().entries == 0
    info = await savestream.save(state, (memory, "c"), plan_cache=cache)
    assert not info.statistics.plan_cached
    assert cache.statistics().entries == 1
    assert_same(await savestream.load((memory, "c")), state)


async def test_a_cache_holds_plans_of_several_states_up_to_its_bound() -> None:
    cache = PlanCache(max_entries=2)
    states = [{"a": values(n + 1)} for n in range(3)]
    hits = []
    for number in (0, 1, 0, 1, 2, 1, 0):
        place = fresh_place()
        hits.append((await savestream.save(states[number], place, plan_cache=cache)).statistics.plan_cached)
        assert_same(await savestream.load(place), states[number])
    assert hits == [False, False, True, True, False, True, False]


def model(step: int) -> Any:
    return {"layers": [values(16, seed=step), values(16, seed=step + 1)], "step": step}


def optimizer(step: int) -> Any:
    return {"state": {0: values(16, np.float64, seed=step), 1: values(16, seed=step)}, "step": step}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
async def test_two_trees_interleaved(shared: bool, concurrent: bool) -> None:
    first = PlanCache()
    second = first if shared else PlanCache()
    memory = MemoryBackend()
    for step in range(6):
        saves = [
            savestream.save(model(step), (memory, f"a{step}"), plan_cache=first),
            savestream.save(optimizer(step), (memory, f"b{step}"), plan_cache=second),
        ]
        infos = await asyncio.gather(*saves) if concurrent else [await saves[0], await saves[1]]
        assert [info.statistics.plan_cached for info in infos] == [step > 0] * 2
        assert_same(await savestream.load((memory, f"a{step}")), model(step))
        assert_same(await savestream.load((memory, f"b{step}")), optimizer(step))


async def test_many_saves_at_once_with_one_cache() -> None:
    cache = PlanCache()
    memory = MemoryBackend()

    async def run(number: int) -> None:
        for step in range(5):
            state = (model if (number + step) % 2 else optimizer)(10 * number + step)
            handle = await savestream.start_save(state, (memory, f"{number}-{step}"), plan_cache=cache)
            await handle
            assert_same(await savestream.load((memory, f"{number}-{step}")), state)

    await asyncio.gather(*map(run, range(6)))
    assert cache.statistics().entries == 2


def test_dropping_a_cache_frees_its_plans_and_no_cache_keeps_a_leaf() -> None:
    cache: PlanCache | None = PlanCache()
    state = {"w": values(1000), "n": {"v": values(10)}}
    leaf = weakref.ref(state["w"])
    for _ in range(2):
        blocking.save(state, fresh_place(), plan_cache=cache)
    (plan,) = cache._entries.values()  # type: ignore[union-attr]
    kept = [weakref.ref(cache), weakref.ref(plan.layout.raw_offsets)]
    del state, plan
    gc.collect()
    assert leaf() is None
    assert all(one() is not None for one in kept)
    cache = None
    gc.collect()
    assert all(one() is None for one in kept)
