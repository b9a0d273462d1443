"""Loading into a target and without one; everything that differs is listed before anything is touched."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
from planner_support import Stored, load, read, same, save

from savestream.errors import CorruptCheckpointError, LoadMismatchError, PlanError
from savestream.planners import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    EmptyStateDictLoadPlanner,
    Metadata,
    PlannerData,
    RecordedDataclass,
    RecordedTuple,
    ShardedArray,
    TensorProperties,
    TensorStorageMetadata,
    create_default_local_load_plan,
)


class Pair(NamedTuple):
    a: Any
    b: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass
class Thawed:
    a: Any
    b: Any


def arange(*shape: int) -> Any:
    return np.arange(float(np.prod(shape))).reshape(shape)


def with_values(stored: Stored) -> Stored:
    """The way the pipeline shows inline values before anything is read."""
    data = stored.metadata.planner_data
    assert isinstance(data, PlannerData)
    values = {index.fqn: chunk for index, chunk in stored.chunks.items() if isinstance(chunk, bytes)}
    data = msgspec.structs.replace(data, values=values)
    return Stored(msgspec.structs.replace(stored.metadata, planner_data=data), stored.chunks, stored.plans)


def mismatch(stored: Stored, target: Any, **options: Any) -> LoadMismatchError:
    """The error of planning a load, which must leave the target as it is."""
    before = repr(target)
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(target, with_values(stored).metadata)
    with pytest.raises(LoadMismatchError) as caught:
        planner.create_local_plan()
    assert repr(target) == before
    return caught.value


STATE = {
    "layers": [{"w": arange(2, 3), "b": arange(3)}, {"w": arange(3, 1), "b": arange(1)}],
    "opt": Pair(arange(2), {"lr": 0.1, "betas": (0.9, 0.99)}),
    "step": 7,
    0: arange(1),
}


def blank(state: Any) -> Any:
    """The same structure with zeros in all arrays and other plain values."""
    if isinstance(state, np.ndarray):
        return np.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, Pair):
        return Pair(*map(blank, state))
    if isinstance(state, list | tuple):
        return type(state)(map(blank, state))
    return type(state)(0)


def test_a_target_is_filled_in_place() -> None:
    target = blank(STATE)
    array, layers, opt = target["layers"][0]["w"], target["layers"], target["opt"][1]
    result = load(save(STATE), target)
    assert result is target
    assert same(result, STATE)
    assert result["layers"] is layers
    assert result["layers"][0]["w"] is array
    assert result["opt"][1] is opt


def test_without_a_target() -> None:
    assert same(load(save(STATE), types=[Pair]), STATE)
    plain = load(save(STATE))["opt"]
    assert isinstance(plain, RecordedTuple)
    assert plain.b == {"lr": 0.1, "betas": (0.9, 0.99)}
    filled: dict[str, Any] = {}
    assert read(EmptyStateDictLoadPlanner(types=[Pair]), filled, save(STATE)) is filled
    assert same(filled, STATE)


def test_roots_of_every_kind() -> None:
    for state in (arange(3), 5, [arange(1), 2], (1, arange(2)), {}, [], {"a": 1}, Pair(arange(1), 2)):
        assert same(load(save(state), types=[Pair]), state)
        assert same(load(save(state), blank(state)), state)


def test_immutable_containers_are_made_anew_by_the_targets_classes() -> None:
    state = {"f": Frozen(arange(2), 1), "t": Thawed(arange(2), 2), "p": (Pair(arange(1), 3), [4])}
    target = {"f": Frozen(np.zeros(2), 0), "t": Thawed(np.zeros(2), 0), "p": (Pair(np.zeros(1), 0), [0])}
    frozen, thawed, pair = target["f"], target["t"], target["p"]
    result = load(save(state), target)
    assert same(result, state)
    assert result["t"] is thawed
    assert result["f"] is not frozen
    assert frozen.b == 0
    assert result["p"][1] is pair[1]
    record = load(save(state))["f"]
    assert isinstance(record, RecordedDataclass)
    assert record["b"] == 1


def test_the_targets_containers_win() -> None:
    state = {"d": {"a": arange(1), "b": 1}, "l": [arange(1), 2]}
    target = {"d": collections.OrderedDict(b=0, a=np.zeros(1)), "l": collections.deque([np.zeros(1), 0], 2)}
    result = load(save(state), target)
    assert next(iter(result["d"].items())) == ("b", 1)
    assert type(result["l"]) is collections.deque
    assert result["l"][1] == 2
    found = mismatch(save(state), {"d": [np.zeros(1), 0], "l": {"0": 1}})
    assert len(found.problems) == 2
    assert "d: the checkpoint has a dict, the target a list" in found.problems[0]


def test_everything_is_listed_at_once() -> None:
    stored = save(
        {"a": arange(2), "b": arange(3), "c": arange(4), "gone": {"x": arange(1)}, "cfg": {"lr": 1, "old": 2}}
    )
    target = {
        "a": np.zeros(3),
        "b": np.zeros(3, np.float32),
        "c": {"not": "an array"},
        "new": {"y": np.zeros(1), "n": 1},
        "cfg": {"lr": 0, "fresh": {"z": 1}},
    }
    found = mismatch(stored, target)
    assert set(found.missing) == {"new.y", "new.n", "cfg.fresh"}
    assert set(found.unexpected) == {"gone.x", "cfg.old"}
    assert found.shape_mismatches == ("a (checkpoint (2,), target (3,))",)
    assert found.dtype_mismatches == ("b (checkpoint float64, target float32)",)
    assert found.problems == ("c: the checkpoint has an array, the target a dict",)
    partial = mismatch(stored, target, allow_partial_load=True, cast=True)
    assert (partial.missing, partial.unexpected, partial.dtype_mismatches) == ((), (), ())
    assert partial.shape_mismatches


def test_partial_loads_keep_and_ignore() -> None:
    stored = save({"a": arange(2), "x": arange(1), "cfg": {"lr": 1, "old": 2}, "l": [arange(1), 5, 6]})
    target = {"a": np.zeros(2), "y": np.full(1, 8.0), "cfg": {"lr": 0, "new": 3}, "l": [np.ones(1), 0]}
    result = load(stored, target, allow_partial_load=True)
    expected = {"a": arange(2), "y": np.full(1, 8.0), "cfg": {"lr": 1, "new": 3}, "l": [arange(1), 5]}
    assert same(result, expected)


def test_more_and_fewer_layers() -> None:
    stored = save({"layers": [arange(1) for _ in range(4)]})
    assert mismatch(stored, {"layers": [np.zeros(1)] * 0 + [np.zeros(1) for _ in range(6)]}).missing == (
        "layers[4]",
        "layers[5]",
    )
    assert mismatch(stored, {"layers": [np.zeros(1) for _ in range(3)]}).unexpected == ("layers[3]",)
    assert mismatch(stored, {"layers": []}).unexpected == tuple(f"layers[{n}]" for n in range(4))


def test_arrays_never_stand_for_values() -> None:
    stored = save({"a": arange(1), "v": 3, "e": {}})
    found = mismatch(stored, {"a": 3, "v": np.zeros(1), "e": {"x": np.zeros(2)}})
    assert found.problems == (
        "a: the checkpoint has an array, the target a plain value (builtins.int)",
        "v: the checkpoint has a plain value, the target an array",
    )
    assert found.missing == ("e.x",)


def test_values_that_are_not_inline_are_compared_before_they_are_placed() -> None:
    stored = save({"cfg": {"lr": 1, "old": 3}, "n": [1, 2]})
    target = {"cfg": {"lr": 0, "new": 5}, "n": [0]}
    with pytest.raises(LoadMismatchError) as caught:
        load(stored, target)
    assert caught.value.missing == ("cfg.new",)
    assert caught.value.unexpected == ("cfg.old",)
    assert target == {"cfg": {"lr": 0, "new": 5}, "n": [0]}


def test_a_none_in_the_target_expects_nothing() -> None:
    assert load(save({"rng": (1, [2]), "best": None}), {"rng": None, "best": None}) == {"rng": (1, [2]), "best": None}


def test_keys_of_different_types_are_different() -> None:
    stored = save({1: arange(1), "a": {1: 5}})
    found = mismatch(stored, {True: np.zeros(1), "a": {1.0: 5}})
    assert set(found.missing) == {"[bool:true]", "a[float:1.0]"}
    assert set(found.unexpected) == {"[int:1]", "a[int:1]"}


def test_enums_come_back_as_the_targets() -> None:
    stored = save({"c": Colour.BLUE, "d": {Colour.RED: arange(1)}})
    target = {"c": Colour.RED, "d": {Colour.RED: np.ones(1)}}
    assert same(load(stored, target), {"c": Colour.BLUE, "d": {Colour.RED: arange(1)}})


def test_casting() -> None:
    state = {"w": np.array([16777217], np.int32)}
    assert mismatch(save(state), {"w": np.zeros(1, np.float32)}).dtype_mismatches
    target = load(save(state), {"w": np.zeros(1)}, cast=True)
    assert target["w"].tolist() == [16777217.0]
    assert mismatch(save({"w": np.zeros(1, complex)}), {"w": np.zeros(1)}, cast=True).dtype_mismatches
    assert mismatch(save({"w": np.zeros(1, "<M8[s]")}), {"w": np.zeros(1)}, cast=True).dtype_mismatches
    for name in ("complex32", "bcomplex32"):  # numpy gives them a kind of their own
        dtype = np.dtype(getattr(ml_dtypes, name))
        stored = save({"w": np.array([1 + 2j], dtype)})
        assert load(stored, {"w": np.zeros(1, "c8")}, cast=True)["w"].tolist() == [1 + 2j]
        assert mismatch(stored, {"w": np.zeros(1, "f4")}, cast=True).dtype_mismatches
    swapped = load(save({"w": arange(3)}), {"w": np.zeros(3, ">f8")}, cast=True)
    assert swapped["w"].tolist() == [0, 1, 2]


# --- targets that cannot be filled ---


def test_read_only_and_overlapping_targets_are_refused() -> None:
    stored = save({"a": arange(3), "b": arange(3), "c": arange(3)})
    locked = np.zeros(3)
    locked.flags.writeable = False
    base = np.zeros(4)
    found = mismatch(stored, {"a": locked, "b": base[:3], "c": base[1:]})
    assert found.problems == (
        "a: the target is read-only; load into a copy of it",
        "b and c: the targets share a part of their memory",
    )
    strided = np.lib.stride_tricks.as_strided(np.zeros(2), (3,), (0,))
    found = mismatch(stored, {"a": np.zeros(3), "b": strided, "c": np.zeros(3)})
    assert found.problems == ("b: the target's elements overlap each other; load into a copy of it",)
    broadcast = mismatch(stored, {"a": np.zeros(3), "b": np.broadcast_to(np.zeros(1), (3,)), "c": np.zeros(3)})
    assert len(broadcast.problems) == 2


def test_interleaved_views_are_fine() -> None:
    base = np.zeros((3, 4))
    target = {"a": base[:, ::2], "b": base[:, 1::2], "t": np.zeros((2, 3)).T, "r": np.zeros(3)[::-1]}
    state = {"a": arange(3, 2), "b": -arange(3, 2), "t": arange(3, 2), "r": arange(3)}
    load(save(state), target)
    assert np.array_equal(base[:, ::2], arange(3, 2))
    assert np.array_equal(base[:, 1::2], -arange(3, 2))
    assert np.array_equal(target["t"], state["t"])
    assert np.array_equal(target["r"], state["r"])


def test_tied_targets_need_tied_sources() -> None:
    tied, shared = arange(3), np.zeros(3)
    result = load(save({"a": tied, "b": tied}), {"a": shared, "b": shared[:]})
    assert result["b"].base is result["a"]
    assert result["a"].tolist() == [0, 1, 2]
    assert same(load(save({"a": tied, "b": tied})), {"a": tied, "b": tied})
    found = mismatch(save({"a": tied, "b": tied.copy()}), {"a": shared, "b": shared})
    assert "a and b: the targets are the same memory, but the checkpoint stores them apart" in found.problems[0]
    loaded = load(save({"a": tied, "b": tied.copy()}), {"a": shared, "b": shared}, keys=["a"])
    assert loaded["b"].tolist() == [0, 1, 2]


def test_tied_sources_load_into_separate_targets() -> None:
    tied = arange(3)
    result = load(save({"a": tied, "b": tied}), {"a": np.zeros(3), "b": np.zeros(3)})
    assert result["a"].tolist() == result["b"].tolist() == [0, 1, 2]


# --- selection ---


def test_selected_keys_with_a_target() -> None:
    stored = save({"params": {"w": arange(2)}, "params2": arange(1), "opt": {"lr": 1, "n": 2}, "l": [arange(1), 3]})
    target = {"params": {"w": np.zeros(2), "own": np.ones(1)}, "opt": {"lr": 0, "n": 0}, "other": 1}
    result = load(stored, target, keys=["params.w", "opt.lr"])
    assert result["params"]["w"].tolist() == [0, 1]
    assert result["opt"] == {"lr": 1, "n": 0}
    found = mismatch(stored, target, keys=["params", "nothing", "opt.none", ("l", 0)])
    assert set(found.missing) == {"params.own", "nothing", "opt.none"}
    assert found.unexpected == ("l[0]",)


def test_selected_keys_without_a_target() -> None:
    state = {
        "params": {"w": arange(2)},
        "params2": arange(1),
        "opt": {"lr": 1, "n": [5, 6]},
        "l": [arange(1), arange(2)],
    }
    stored = save(state)
    assert same(load(stored, keys=["params"]), {"params": {"w": arange(2)}})
    assert same(load(stored, keys=["l[1]"]), {"l": {1: arange(2)}})
    assert same(load(stored, keys=["opt.n[1]", ("opt", "lr")]), {"opt": {"n": {1: 6}, "lr": 1}})
    with pytest.raises(LoadMismatchError, match="nothing") as caught:
        load(stored, keys=["params", "nothing"])
    assert caught.value.missing == ("nothing",)
    with pytest.raises(LoadMismatchError, match=r"opt\.x"):
        load(stored, keys=["opt.x"])
    assert load(stored, keys=["nothing"], allow_partial_load=True) == {}


# --- shards ---


def split(array: Any, parts: int, rank: int, axis: int = 0) -> ShardedArray:
    size = -(-array.shape[axis] // parts)
    start, stop = min(rank * size, array.shape[axis]), min((rank + 1) * size, array.shape[axis])
    box = [slice(None)] * array.ndim
    box[axis] = slice(start, stop)
    offsets = [0] * array.ndim
    offsets[axis] = start
    return ShardedArray(array.shape, [(offsets, array[tuple(box)])])


@pytest.mark.parametrize("writers", range(1, 5))
@pytest.mark.parametrize("readers", range(1, 5))
@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_resharding(writers: int, readers: int, length: int) -> None:
    whole = arange(length, 2)
    stored = save(*({"w": split(whole, writers, rank)} for rank in range(writers)))
    assert same(load(stored)["w"], whole)
    filled = np.zeros((length, 2))
    for rank in range(readers):
        load(stored, {"w": split(filled, readers, rank)})
    assert same(filled, whole)
    across = np.zeros((length, 2))
    for rank in range(readers):
        load(stored, {"w": split(across, readers, rank, axis=1)})
    assert same(across, whole)


class Protocol(np.ndarray):
    """A local array that holds boxes of a global one."""

    global_shape: Any
    global_offsets: Any
    local_offsets: Any
    local_sizes: Any


def test_leaves_that_follow_the_protocol() -> None:
    local = arange(2, 4).view(Protocol)
    local.global_shape, local.local_sizes = (4, 2), ((2, 2), (2, 2))
    local.global_offsets, local.local_offsets = ((0, 0), (2, 0)), ((0, 0), (0, 2))
    stored = save({"w": local})
    assert load(stored)["w"].tolist() == [[0, 1], [4, 5], [2, 3], [6, 7]]
    target = np.zeros((2, 4)).view(Protocol)
    target.__dict__.update(local.__dict__)
    load(stored, {"w": target})
    assert target.tolist() == local.tolist()
    local.local_offsets = ((0, 0), (0, 3))
    with pytest.raises(PlanError, match=r"w: shard 1 at \(0, 3\).*outside the local shape"):
        save({"w": local})


def test_shards_are_checked_when_made() -> None:
    with pytest.raises(PlanError, match="outside global_shape"):
        ShardedArray((4,), [((3,), np.zeros(2))])
    with pytest.raises(PlanError, match="offsets"):
        ShardedArray((4,), [((0, 0), np.zeros(2))])
    with pytest.raises(PlanError, match="dtypes"):
        ShardedArray((4,), [((0,), np.zeros(2)), ((2,), np.zeros(2, int))])
    with pytest.raises(PlanError, match="dtype="):
        ShardedArray((4,), [])


# --- hostile or foreign metadata ---


def metadata(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Metadata:
    entry = TensorStorageMetadata(
        TensorProperties("float64"), size, tuple(ChunkStorageMetadata(*chunk) for chunk in chunks)
    )
    return Metadata({"w": entry})


@pytest.mark.parametrize(
    "wrong",
    [
        metadata((4,), ((0,), (3,))),
        metadata((4,), ((0,), (3,)), ((2,), (2,))),
        metadata((4,), ((0,), (5,))),
        metadata((4,), ((-1,), (5,))),
        metadata((4,), ((0, 0), (4, 1))),
        metadata((4,)),
        metadata((), ((), ()), ((), ())),
        metadata((2**70,), ((0,), (2**70 - 1,))),
        metadata((-1,), ((0,), (-1,))),
    ],
)
def test_chunks_that_do_not_cover_are_corrupt(wrong: Metadata) -> None:
    planner = EmptyStateDictLoadPlanner(allocate=lambda dtype, shape: pytest.fail("allocated"))
    planner.set_up_planner({}, wrong)
    with pytest.raises(CorruptCheckpointError, match="does not hold all of w"):
        planner.create_local_plan()


def test_foreign_metadata_without_a_tree() -> None:
    plan = create_default_local_load_plan({"w": np.zeros(4)}, metadata((4,), ((0,), (2,)), ((2,), (2,))))
    assert [(item.storage_index.offset, item.dest_offsets, item.lengths) for item in plan.items] == [
        ((0,), (0,), (2,)),
        ((2,), (2,), (2,)),
    ]
    assert create_default_local_load_plan({}, metadata((4,), ((0,), (4,))), strict=False).items == []
    with pytest.raises(LoadMismatchError):
        create_default_local_load_plan({}, metadata((4,), ((0,), (4,))))


def test_zero_length_boxes_are_narrowed_to_nothing() -> None:
    state = {"z": np.zeros((0, 3)), "y": np.zeros((2, 0), np.int8), "s": np.array(7.0)}
    assert same(load(save(state)), state)
    assert same(load(save(state), blank(state)), state)


def test_planners_without_what_they_need() -> None:
    with pytest.raises(PlanError, match="empty state dict"):
        EmptyStateDictLoadPlanner().set_up_planner({"a": 1}, metadata((1,), ((0,), (1,))))
    with pytest.raises(PlanError, match="metadata"):
        EmptyStateDictLoadPlanner().set_up_planner({}, None)
    with pytest.raises(PlanError, match="metadata"):
        DefaultLoadPlanner().create_local_plan()
    (item,) = create_default_local_load_plan({"w": np.zeros(4)}, metadata((4,), ((0,), (4,)))).items
    with pytest.raises(NotImplementedError, match="load_bytes"):
        DefaultLoadPlanner().resolve_bytes(item)


def test_damaged_values_name_their_key() -> None:
    stored = save({"cfg": {"a": 1}})
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"cfg": {"a": 0}}, stored.metadata)
    (item,) = planner.create_local_plan().items
    with pytest.raises(CorruptCheckpointError, match="cfg"):
        planner.load_bytes(item, io.BytesIO(b'{"$what":1}'))
