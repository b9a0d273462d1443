"""Planners that users write: rename, cast and skip on save, and rename back on load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place, load_example, stored_bytes

import savestream
from savestream import DefaultSavePlanner, LoadMismatchError, PlanError, SaveOptions
from savestream.planners import SavePlan, WriteItem
from savestream.storage_backends import MemoryBackend

example = load_example("custom_planner")


def train_state() -> dict[str, Any]:
    w = np.random.default_rng(0).random((300, 40), dtype=np.float32)
    return {
        "model": {"w": w, "tied": w, "stack": [{"b": w[0]}, (w.T, 3)], "ids": np.arange(5), "name": "tiny"},
        "optimizer": {"m": w * 2, "groups": [{"lr": 0.1, "p": w}]},
        "step": 5,
    }


@pytest.mark.parametrize("mode", ["save", "eager", "lazy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_export_and_back(dtype: str, mode: str) -> None:
    state = train_state()
    half = getattr(ml_dtypes, dtype, dtype)
    backend = MemoryBackend()
    planner = example.HalfPrecisionPlanner(dtype)
    options = SaveOptions(compression="none")
    if mode == "save":
        info = await savestream.save(state, (backend, "c"), planner=planner, options=options)
    else:
        handle = await savestream.start_save(state, (backend, "c"), planner=planner, options=options, stage=mode)
        info = await handle
    model = state["model"]
    assert_same(state, train_state())
    expected = {
        "w": model["w"].astype(half),
        "tied": model["w"].astype(half),
        "stack": [{"b": model["w"][0].astype(half)}, (model["w"].T.astype(half), 3)],
        "ids": np.arange(5),
        "name": "tiny",
    }
    found = await savestream.load((backend, "c"))
    assert_same(ordered(found), ordered({"ema": expected}))
    assert info.statistics.raw_bytes == 2 * (2 * 12000 + 40) + 40
    assert await stored_bytes(backend) < 2 * info.statistics.raw_bytes

    target = {"w": np.zeros((300, 40), "f4"), "tied": np.zeros((300, 40), "f4"), "ids": np.zeros(5, int), "name": ""}
    target["stack"] = [{"b": np.zeros(40, "f4")}, (np.zeros((40, 300), "f4"), 0)]
    await savestream.load((backend, "c"), {"model": target}, planner=example.RenamingLoadPlanner(cast=True))
    assert_same(target["w"], model["w"].astype(half).astype("f4"))
    assert_same(target["stack"][1], (model["w"].T.astype(half).astype("f4"), 3))
    assert target["name"] == "tiny"


def ordered(state: Any) -> Any:
    """Renamed leaves stand in the order of the plan; compare without it, and sequences as dicts."""
    if isinstance(state, dict):
        return {str(key): ordered(state[key]) for key in sorted(state, key=str)}
    if isinstance(state, list | tuple):
        return {str(number): ordered(item) for number, item in enumerate(state)}
    return state


async def test_without_a_cast_the_rounded_weights_are_refused() -> None:
    place = fresh_place()
    w = np.ones((3, 4), np.float32)
    await savestream.save({"model": {"w": w}}, place, planner=example.HalfPrecisionPlanner())
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(place, {"model": {"w": w * 0}}, planner=example.RenamingLoadPlanner())
    assert len(caught.value.dtype_mismatches) == 1


class Skipping(DefaultSavePlanner):
    """Leaves out the names that ``skip`` tells."""

    def __init__(self, skip: Any) -> None:
        super().__init__()
        self.skip = skip

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return msgspec.structs.replace(plan, items=[item for item in plan.items if not self.skip(item.index.fqn)])


@pytest.mark.parametrize(
    ("start", "left"),
    [
        ("optimizer", lambda state: {"model": state["model"], "step": 5}),
        ("optimizer.groups", lambda s: {"model": s["model"], "optimizer": {"m": s["optimizer"]["m"]}, "step": 5}),
        ("model.stack", lambda s: {**s, "model": {k: v for k, v in s["model"].items() if k != "stack"}}),
        ("step", lambda state: {key: state[key] for key in ("model", "optimizer")}),
        ("", lambda state: {}),
    ],
)
async def test_skipped_names_go_with_the_containers_that_held_nothing_else(start: str, left: Any) -> None:
    state = {**train_state(), "empty": {}, "nothing": []} if start else train_state()
    expected = {**left(state), **{key: state[key] for key in ("empty", "nothing") if start}}
    place = fresh_place()
    await savestream.save(state, place, planner=Skipping(lambda name: name.startswith(start)))
    assert_same(await savestream.load(place), expected)


async def test_skipping_one_element_of_a_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"model\.stack\[0\]"):
        await savestream.save(train_state(), tmp_path / "c", planner=Skipping(lambda name: name == "model.stack[0].b"))
    assert list(tmp_path.iterdir()) == []


class Wrong(DefaultSavePlanner):
    """Resolves to something else than it planned."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.made if write_item.index.fqn == "bad" else super().resolve_data(write_item)


@pytest.mark.parametrize(
    "made", [np.zeros(3, np.float32), np.zeros(4), np.zeros((1, 3)), [1.0, 2.0, 3.0], None], ids=repr
)
async def test_a_planner_that_resolves_something_else_is_told(made: Any, tmp_path: Path) -> None:
    for mode in ("save", "eager", "lazy"):
        with pytest.raises(PlanError, match="bad"):
            await _save(mode, {"good": np.ones(5000), "bad": np.ones(3)}, tmp_path / "c", Wrong(made))
        assert not any(path.is_file() for path in tmp_path.rglob("*"))


async def _save(mode: str, state: Any, place: Any, planner: DefaultSavePlanner) -> None:
    if mode == "save":
        await savestream.save(state, place, planner=planner)
    else:
        handle = await savestream.start_save(state, place, planner=planner, stage=mode)  # type: ignore[arg-type]
        await handle


class Swapping(DefaultSavePlanner):
    """Gives two leaves each other's names."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return msgspec.structs.replace(plan, items=[self.renamed(item) for item in plan.items])

    def renamed(self, item: WriteItem) -> WriteItem:
        name = {"a": "b", "b": "a"}.get(item.index.fqn, item.index.fqn)
        return msgspec.structs.replace(item, index=msgspec.structs.replace(item.index, fqn=name))

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(self.renamed(write_item))


async def test_names_can_be_swapped() -> None:
    place = fresh_place()
    await savestream.save({"a": np.zeros(2), "b": np.ones(3)}, place, planner=Swapping())
    assert_same(await savestream.load(place), {"a": np.ones(3), "b": np.zeros(2)})


class Adding(DefaultSavePlanner):
    """Renames the leaf ``x`` of a state to each of some names in turn."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        (item,) = [item for item in plan.items if item.index.fqn == "x"]
        index = item.index
        added = [
            msgspec.structs.replace(item, index=msgspec.structs.replace(index, fqn=name), alias_of=None)
            for name in self.names
        ]
        return msgspec.structs.replace(plan, items=[*(one for one in plan.items if one is not item), *added])

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn not in self.names:
            return super().resolve_data(write_item)
        return super().resolve_data(
            msgspec.structs.replace(write_item, index=msgspec.structs.replace(write_item.index, fqn="x"))
        )


X = np.arange(3.0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["y"], {"y": X}),
        (["a.b.c", "a.d"], {"a": {"b": {"c": X}, "d": X}}),
        (["l[0]", "l[1].z", "l[2][0]"], {"l": [X, {"z": X}, [X]]}),
        (["l[1]", "l[0]"], {"l": [X, X]}),
        (["[int:3]", r"a\.b", "k.new"], {3: X, "a.b": X}),
    ],
)
async def test_new_names_make_dicts_and_lists(names: list[str], expected: Any) -> None:
    place = fresh_place()
    await savestream.save({"x": X, "k": {"old": X + 1}}, place, planner=Adding(names))
    inner = {"old": X + 1, "new": X} if "k.new" in names else {"old": X + 1}
    assert_same(await savestream.load(place), {"k": inner, **expected})
    for name in names:
        found = dict([pair async for pair in savestream.iter_arrays(place, keys=name)])
        assert_same(found, {name: X})


@pytest.mark.parametrize(
    "names", [["l[1]"], ["l[0]", "l[2]"], ["l[0]", "l.a"], ["y", "y"], ["s[1]"], ["s"], ["k"], ["k.old.z"], ["", "y"]]
)
async def test_new_names_that_collide_or_leave_gaps_are_refused(names: list[str], tmp_path: Path) -> None:
    state = {"x": X, "k": {"old": X}, "s": [X]}
    with pytest.raises(PlanError):
        await savestream.save(state, tmp_path / "c", planner=Adding(names))
    assert list(tmp_path.iterdir()) == []
