"""Save plans: items, global plan, deduplication, caching, data."""

from __future__ import annotations

import io
import pickle
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from planner_support import load, same, save

from savestream.errors import PlanError, UnsafeObjectError
from savestream.planners import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    ShardedArray,
    TensorProperties,
    TensorStorageMetadata,
    WriteItem,
    WriteItemType,
    create_default_global_save_plan,
    create_default_local_save_plan,
)


def shard(rows: range, total: int = 4, value: float = 0.0, **options: Any) -> ShardedArray:
    return ShardedArray((total, 2), [((rows.start, 0), np.full((len(rows), 2), value))], **options)


def test_items_and_metadata() -> None:
    state = {
        "w": np.zeros((2, 3), np.float32),
        "s": np.array(7.0),
        "z": np.zeros((0, 4)),
        "step": 3,
        "cfg": {"lr": 0.1},
    }
    stored = save(state)
    by_name = {item.index.fqn: item for item in stored.plans[0].items}
    assert by_name["w"].index == MetadataIndex("w", (0, 0))
    assert by_name["w"].type is WriteItemType.TENSOR
    assert by_name["w"].tensor_storage_size() == by_name["w"].chunk_nbytes == 24
    assert by_name["s"].index == MetadataIndex("s", ())
    assert by_name["z"].chunk_nbytes == 0
    assert by_name["cfg"].bytes_io_data is not None
    assert by_name["cfg"].bytes_io_data.encoding == "json"
    entries = stored.metadata.state_dict_metadata
    assert entries["w"] == TensorStorageMetadata(
        TensorProperties("float32"), (2, 3), (ChunkStorageMetadata((0, 0), (2, 3)),)
    )
    assert entries["step"] == BytesStorageMetadata("json")
    assert stored.chunks[MetadataIndex("step")] == b"3"


@pytest.mark.parametrize("dtype", ["float32", ">u4", "bfloat16", "int4", "complex64", "bool", "<M8[ns]", "<U3", "S2"])
def test_dtypes_round_trip(dtype: str) -> None:
    array = np.zeros((2, 2), getattr(ml_dtypes, dtype, None) or dtype)
    assert same(load(save({"a": array}))["a"], array)


def test_object_arrays_are_refused_by_key() -> None:
    for allow_pickle in (False, True):
        planner = DefaultSavePlanner(allow_pickle=allow_pickle)
        planner.set_up_planner({"a": [np.array([None])]})
        with pytest.raises(UnsafeObjectError, match=r"^a\[0\]: "):
            planner.create_local_plan()


def test_values_are_captured_once() -> None:
    state = {"cfg": {"lr": 0.1}, "w": np.zeros(2)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    planner.capture_values()
    (item,) = (item for item in planner.create_local_plan().items if item.type is WriteItemType.BYTE_IO)
    state["cfg"]["lr"] = 9.0  # type: ignore[index]
    assert planner.resolve_data(item).getvalue() == b'{"lr":0.1}'
    assert planner.resolve_data(item).getvalue() == b'{"lr":0.1}'


class Opaque:
    def __init__(self, number: int) -> None:
        self.number = number


def test_pickle_needs_an_opt_in() -> None:
    with pytest.raises(UnsafeObjectError, match=r"^o: .*allow_pickle=True"):
        DefaultSavePlanner().set_up_planner({"o": Opaque(1)})
    stored = save({"o": Opaque(5), "n": {"deep": [Opaque(6)]}}, allow_pickle=True)
    assert stored.metadata.state_dict_metadata["o"] == BytesStorageMetadata("pickle")
    assert pickle.loads(stored.chunks[MetadataIndex("o")]).number == 5
    with pytest.raises(UnsafeObjectError, match=r"^o: "):
        load(stored)
    again = load(stored, allow_pickle=True)
    assert (again["o"].number, again["n"]["deep"][0].number) == (5, 6)


def test_tied_leaves_are_planned_as_aliases() -> None:
    base = np.arange(6.0)
    state = {
        "a": base,
        "b": base,
        "view": base[:],
        "reshaped": base.reshape(2, 3),
        "part": base[:3],
        "part2": base[:3],
        "copy": base.copy(),
        "bits": base.view(np.int64),
        "empty": base[:0],
        "empty2": base[:0],
    }
    items = {item.index.fqn: item for item in save(state).plans[0].items}
    aliases = {name: item.alias_of.fqn for name, item in items.items() if item.alias_of is not None}
    assert aliases == {"b": "a", "view": "a", "part2": "part"}


def test_shards_of_one_array_over_ranks() -> None:
    stored = save({"w": shard(range(2), value=1)}, {"w": shard(range(2, 4), value=2)})
    entry = stored.metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == (4, 2)
    assert [chunk.offsets for chunk in entry.chunks] == [(0, 0), (2, 0)]
    assert [item.index.index for plan in stored.plans for item in plan.items] == [0, 1]
    assert np.array_equal(load(stored)["w"], [[1, 1], [1, 1], [2, 2], [2, 2]])


def test_hints_follow_the_sorted_chunks() -> None:
    stored = save({"w": shard(range(2, 4))}, {"w": shard(range(2))})
    assert [plan.items[0].index.index for plan in stored.plans] == [1, 0]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (shard(range(4), value=1), shard(range(4), value=2), r"w: overlapping boxes.*rank 0, 1.*replicated=True"),
        (shard(range(4)), shard(range(2, 4)), r"w: overlapping boxes.*rank 0 and .*rank 1"),
        (shard(range(3)), shard(range(4, 4)), "w: 2 of 8 elements .* hole"),
        (
            shard(range(4)),
            shard(range(5, 8), total=8),
            r"w: planned as float64\[8, 2\] by rank 1 and as .*\[4, 2\] elsewhere",
        ),
        (np.zeros(3), np.zeros(3, np.float32), r"w: planned as float32\[3\] by rank 1 and as float64\[3\] elsewhere"),
        (np.zeros(3), 5, "w: planned as an array and as a value"),
    ],
)
def test_contradictory_ranks_are_refused(first: Any, second: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        save({"w": first, "x": np.zeros(1)}, {"w": second, "x": np.zeros(1)})


def test_declared_replicas_are_written_once() -> None:
    stored = save(*({"w": shard(range(4), value=3, replicated=True)} for _ in range(3)))
    assert sorted(len(plan.items) for plan in stored.plans) == [0, 0, 1]


def test_a_rank_may_hold_nothing() -> None:
    none = ShardedArray((4, 2), [], dtype="float64")
    empty = shard(range(4, 4))
    assert np.array_equal(load(save({"w": shard(range(4), value=1)}, {"w": none}, {"w": empty}))["w"], np.ones((4, 2)))
    with pytest.raises(PlanError, match="w: no rank holds any part"):
        save({"w": none}, {"w": none})


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_sharded_arrays(shape: tuple[int, ...]) -> None:
    half = tuple(size // 2 for size in shape)
    first = ShardedArray(shape, [((0,) * len(shape), np.zeros(half, np.int8))])
    second = ShardedArray(shape, [(half, np.zeros(tuple(a - b for a, b in zip(shape, half, strict=True)), np.int8))])
    assert same(load(save({"w": first}, {"w": second}))["w"], np.zeros(shape, np.int8))


def test_nested_shards() -> None:
    inner = ShardedArray((2, 2), [((0, 0), np.ones((1, 2))), ((1, 0), np.full((1, 2), 2.0))])
    outer = ShardedArray((4, 2), [((0, 0), np.zeros((2, 2))), ((2, 0), inner)])
    assert np.array_equal(load(save({"w": outer}))["w"], [[0, 0], [0, 0], [1, 1], [2, 2]])
    with pytest.raises(PlanError, match=r"w: .*flatten_sharded_tensors=True"):
        DefaultSavePlanner(flatten_sharded_tensors=False).set_up_planner({"w": outer})


def test_unflattened_states_use_their_keys_as_names() -> None:
    state = {"a.b": np.zeros(2), "a[": 3}
    stored = save(state, flatten_state_dict=False)
    assert list(stored.metadata.state_dict_metadata) == ["a.b", "a["]
    assert same(load(stored), state)
    for wrong in ([np.zeros(1)], {1: np.zeros(1)}):
        with pytest.raises(PlanError, match="flatten"):
            DefaultSavePlanner(flatten_state_dict=False).set_up_planner(wrong)
    with pytest.raises(UnsafeObjectError, match="a"):
        save({"a": {"b": np.zeros(1)}}, flatten_state_dict=False)


class Renaming(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [self._rename(item) for item in plan.items if item.index.fqn != "skip"]
        return msgspec.structs.replace(plan, items=items)

    def _rename(self, item: WriteItem) -> WriteItem:
        index = msgspec.structs.replace(item.index, fqn="model." + item.index.fqn)
        return msgspec.structs.replace(item, index=index)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(msgspec.structs.replace(index, fqn=index.fqn.removeprefix("model.")))


def test_a_planner_may_rename_and_skip() -> None:
    stored = save({"a": np.ones(2), "n": 5, "skip": np.ones(1)}, planners=[Renaming()])
    assert same(load(stored), {"model": {"a": np.ones(2), "n": 5}})


class Casting(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        return super().transform_object(write_item, object)


class Fingerprinted(Casting):
    def plan_fingerprint(self) -> bytes | None:
        own = super().plan_fingerprint()
        return None if own is None else own + b"casting"


class FurtherCasting(Fingerprinted):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        return super().transform_object(write_item, object)


class Harmless(DefaultSavePlanner):
    pass


def print_of(planner: DefaultSavePlanner, state: Any) -> bytes | None:
    planner.set_up_planner(state)
    planner.capture_values()
    return planner.plan_fingerprint()


def test_overriding_planners_are_cached_only_by_their_own_fingerprint() -> None:
    state = {"w": np.zeros(2)}
    assert print_of(Casting(), state) is None
    assert print_of(FurtherCasting(), state) is None
    assert not Casting().resolves_live_leaves
    assert print_of(Harmless(), state) not in (None, print_of(DefaultSavePlanner(), state))
    assert Harmless().resolves_live_leaves
    fingerprinted = print_of(Fingerprinted(), state)
    assert fingerprinted is not None
    assert fingerprinted.endswith(b"casting")
    assert fingerprinted != print_of(Fingerprinted(), {"w": np.zeros(3)})


def test_resolving_many_items() -> None:
    base = np.arange(4.0)
    state = {"a": base, "b": base[::-1], "w": ShardedArray((4,), [((0,), base[:2]), ((2,), base[2:])])}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    items = planner.create_local_plan().items
    found = planner.resolve_items(items)
    assert found[0] is base
    assert [array.tolist() for array in found] == [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1], [2, 3]]
    planner.set_up_planner({"a": base + 1, "b": base, "w": state["w"]})  # a cached plan meets the next step's leaves
    assert planner.resolve_items(items)[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(PlanError, match=r"gone: .*does not have"):
        planner.resolve_data(WriteItem(MetadataIndex("gone"), WriteItemType.BYTE_IO))


# --- plan caching between ranks ---


def cached(count: int = 1) -> list[DefaultSavePlanner]:
    return [DefaultSavePlanner(enable_plan_caching=True) for _ in range(count)]


def usable(planners: list[DefaultSavePlanner], *states: Any) -> list[bool]:
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state)
    return [planner.create_local_plan().usable for planner in planners]


def test_only_committed_plans_are_reused() -> None:
    planners = cached()
    state = {"w": np.zeros(3), "n": 9}
    first = save(state, planners=planners)
    assert usable(planners, {"w": np.ones(3), "n": 10}) == [False]
    again = save({"w": np.ones(3), "n": 10}, planners=planners)
    assert again.plans[0].items == first.plans[0].items
    assert same(load(again), {"w": np.ones(3), "n": 10})
    assert usable(planners, {"w": np.zeros(4), "n": 9}) == [True]
    assert usable(planners, {"w": np.zeros(4), "n": 9}) == [True]  # planned before, never committed
    assert usable(cached(), state) == [True]  # another planner shares nothing


@pytest.mark.parametrize(
    "changed",
    [
        {"w": np.zeros(8, np.float32)},
        {"w": np.zeros(8, ">f8")},
        {"w": np.zeros((2, 4))},
        {"v": np.zeros(8)},
        {"w": [np.zeros(8)]},
        {"w": np.zeros(8), "x": 1},
        {"w": 5},
        {"w": np.zeros(16)[::2]},
        {"w": ShardedArray((8,), [((0,), np.zeros(8))])},
    ],
)
def test_any_change_of_the_plan_is_noticed(changed: Any) -> None:
    planners = cached()
    state = {"w": np.zeros(8)}
    save(state, planners=planners)
    cached_metadata = save(changed, planners=planners).metadata
    assert cached_metadata == save(changed).metadata
    assert same(load(save(state, planners=planners)), state)


def test_delta_plans_between_ranks() -> None:
    planners = cached(2)
    first = [{"w": shard(range(2)), "r": np.ones(3)}, {"w": shard(range(2, 4)), "r": np.ones(3)}]
    save(*first, planners=planners)
    save(*first, planners=planners)
    assert usable(planners, *first) == [False, False]
    changed = [{"w": shard(range(3)), "r": np.ones(3)}, {"w": shard(range(3, 4)), "r": np.ones(3)}]
    assert usable(planners, changed[0], first[1]) == [True, False]
    with pytest.raises(PlanError, match="overlapping"):  # one rank changed, the other did not: nothing is kept
        save(changed[0], first[1], planners=planners)
    stored = save(*changed, planners=planners)
    assert stored.metadata == save(*changed).metadata
    assert np.array_equal(load(stored)["w"], np.zeros((4, 2)))
    assert usable(planners, *first) == [False, False]


def test_a_coordinator_that_forgot_says_so() -> None:
    planners = cached(2)
    states = [{"r": np.ones(3)}, {"r": np.ones(3)}]
    save(*states, planners=planners)
    planners[0] = cached()[0]
    with pytest.raises(PlanError, match="rank 1 refers to a plan"):
        save(*states, planners=planners)


# --- the seeds' functions ---


def test_default_functions() -> None:
    plan = create_default_local_save_plan({"w": np.zeros(2), "v": [1]}, is_coordinator=False)
    assert [item.index.fqn for item in plan.items] == ["w", "v"]
    plans, metadata = create_default_global_save_plan([plan])
    assert plans == [plan]
    assert isinstance(metadata, Metadata)
    assert list(metadata.state_dict_metadata) == ["w", "v"]


def test_byte_items_resolve_to_streams() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"v": [1]})
    (item,) = planner.create_local_plan().items
    assert isinstance(planner.resolve_data(item), io.BytesIO)


def test_a_planner_without_a_state() -> None:
    with pytest.raises(PlanError, match="set_up_planner"):
        DefaultSavePlanner().create_local_plan()
