"""What does not match is refused in one error that lists everything, before anything of the target is touched."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place

import savestream
from savestream import LoadMismatchError, ShardedArray


class Pair(NamedTuple):
    a: Any
    b: Any


def layers(count: int, *, value: float = 0, width: int = 4) -> dict[str, Any]:
    stack = [
        {"w": np.full((width, width), value + n, np.float32), "b": np.full(width, value - n)} for n in range(count)
    ]
    return {"layers": stack, "named": {f"layer{n}": np.full(3, value + n) for n in range(count)}}


async def refused(place: Any, target: Any, **options: Any) -> LoadMismatchError:
    """The error of a load that has to leave its target alone."""
    before = copy.deepcopy(target)
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(place, target, **options)
    assert_same(target, before)
    return caught.value


async def test_twelve_layers_do_not_load_into_sixteen() -> None:
    place = fresh_place()
    await savestream.save(layers(12, value=5), place)
    error = await refused(place, layers(16))
    wanted = {f"layers[{n}].{leaf}" for n in range(12, 16) for leaf in "wb"} | {
        f"named.layer{n}" for n in range(12, 16)
    }
    assert set(error.missing) == wanted
    assert error.unexpected == ()
    assert all(name in str(error) for name in wanted)


async def test_twelve_layers_do_not_load_into_eight() -> None:
    place = fresh_place()
    await savestream.save(layers(12, value=5), place)
    error = await refused(place, layers(8))
    wanted = {f"layers[{n}].{leaf}" for n in range(8, 12) for leaf in "wb"} | {f"named.layer{n}" for n in range(8, 12)}
    assert set(error.unexpected) == wanted
    assert error.missing == ()
    assert all(name in str(error) for name in wanted)


@pytest.mark.parametrize("count", [8, 16])
async def test_without_strictness_what_both_have_is_loaded(count: int) -> None:
    place = fresh_place()
    saved = layers(12, value=5)
    await savestream.save(saved, place)
    target = layers(count)
    own = layers(count)
    assert await savestream.load(place, target, strict=False) is target
    for n in range(count):
        assert_same(target["layers"][n], (saved if n < 12 else own)["layers"][n])
        assert_same(target["named"][f"layer{n}"], (saved if n < 12 else own)["named"][f"layer{n}"])


SAVED = {
    "same": np.arange(4.0),
    "shape": np.zeros((2, 3)),
    "dtype": np.zeros(3, np.float32),
    "gone": {"a": np.ones(2), "b": 5, "c": [np.ones(1), np.ones(2)]},
    "array": np.ones(2),
    "value": 3,
    "config": {"lr": 0.1, "old": 1, "list": [1, 2]},
    "box": np.zeros((4, 4), np.int32),
}


def wrong_target() -> dict[str, Any]:
    locked = np.zeros(4)
    return {
        "same": locked,
        "shape": np.full((3, 2), 9.0),
        "dtype": np.full(3, 9.0, np.float64),
        "new": {"x": np.full(2, 9.0), "y": 4},
        "array": "a value",
        "value": np.full(2, 9.0),
        "config": {"lr": 9.0, "fresh": 9, "list": [9, 9, 9]},
        "box": ShardedArray((4, 5), [((0, 0), np.full((4, 5), 9, np.int64))]),
    }


async def test_one_error_lists_everything() -> None:
    place = fresh_place()
    await savestream.save(SAVED, place)
    error = await refused(place, wrong_target())
    assert set(error.missing) == {"new.x", "new.y", "config.fresh"}
    assert set(error.unexpected) == {"gone.a", "gone.b", "gone.c[0]", "gone.c[1]", "config.old"}
    assert [line.split(" ")[0] for line in error.shape_mismatches] == ["shape", "box"]
    assert [line.split(" ")[0] for line in error.dtype_mismatches] == ["dtype", "box"]
    assert {line.split(":")[0] for line in error.problems} == {"array", "value"}
    for name in ("new.x", "gone.c[1]", "shape", "dtype", "array", "(2, 3)", "(3, 2)", "float32", "float64"):
        assert name in str(error)


async def test_lenience_allows_missing_and_unexpected_only() -> None:
    place = fresh_place()
    await savestream.save(SAVED, place)
    error = await refused(place, wrong_target(), strict=False)
    assert error.missing == error.unexpected == ()
    assert len(error.shape_mismatches) == 2
    assert len(error.dtype_mismatches) == 2
    assert len(error.problems) == 2
    error = await refused(place, wrong_target(), strict=False, cast=True)
    assert error.dtype_mismatches == ()
    assert len(error.shape_mismatches) == 2


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (np.zeros(4), np.zeros((4, 1))),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(()), np.zeros(1)),
        (np.zeros(1), np.zeros(())),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.zeros(0), np.zeros(1)),
        (np.zeros(4), ShardedArray((5,), [((0,), np.zeros(4))])),
    ],
)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"cast": True}])
async def test_another_shape_is_never_loaded(saved: Any, target: Any, options: Any) -> None:
    place = fresh_place()
    await savestream.save({"ok": np.ones(3), "w": saved}, place)
    error = await refused(place, {"ok": np.zeros(3), "w": target}, **options)
    assert len(error.shape_mismatches) == 1
    assert error.shape_mismatches[0].startswith("w ")


CASTS = [
    (np.array([16777217], np.int32), np.float32),
    (np.array([1.1, np.nan, -0.0, 1e30], np.float32), ml_dtypes.bfloat16),
    (np.array([1.1, 2], ml_dtypes.bfloat16), np.float32),
    (np.array([1.1, 2], np.float64), np.float16),
    (np.array([1, 2], ">u4"), "<u4"),
    (np.array([1, 0, 3], np.int64), bool),
    (np.array([True, False]), np.int8),
    (np.array([1.5, 2]), np.complex64),
    (np.array([1, 7], ml_dtypes.int4), np.int32),
    (np.array([300, -1], np.int32), np.uint8),
    (np.arange(5_000_000, dtype=np.int32)[::2], np.float32),
]


@pytest.mark.parametrize("number", range(len(CASTS)))
async def test_another_dtype_is_refused_unless_a_cast_is_asked_for(number: int) -> None:
    saved, wanted = CASTS[number]
    place = fresh_place()
    await savestream.save({"w": saved, "n": 1}, place)
    target = {"w": np.zeros(saved.shape, wanted), "n": 0}
    error = await refused(place, target)
    assert len(error.dtype_mismatches) == 1
    await refused(place, target, strict=False)
    array = target["w"]
    await savestream.load(place, target, cast=True)
    assert target["w"] is array
    assert_same(target, {"w": saved.astype(wanted), "n": 1})
    boxes = {"w": ShardedArray(saved.shape, [((saved.size - 1,), np.zeros(1, wanted))]), "n": 0}
    await savestream.load(place, boxes, cast=True)
    assert_same(boxes["w"].shards[0], saved[-1:].astype(wanted))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (np.array([1 + 2j]), np.float64),
        (np.array(["1"]), np.float64),
        (np.array([1.0]), "S4"),
        (np.array(["2024-01-01"], "M8[D]"), np.int64),
        (np.array(["2024-01-01"], "M8[D]"), "M8[s]"),
        (np.zeros(1, [("a", "i4")]), [("a", "i8")]),
        (np.array(["ab"]), "U3"),
        (np.zeros(1, "V4"), np.int32),
    ],
)
async def test_a_cast_that_makes_no_sense_is_refused(saved: Any, wanted: Any) -> None:
    place = fresh_place()
    await savestream.save({"w": saved}, place)
    error = await refused(place, {"w": np.zeros(1, wanted)}, cast=True)
    assert len(error.dtype_mismatches) == 1


async def test_read_only_and_self_overlapping_targets_are_refused() -> None:
    place = fresh_place()
    await savestream.save({"a": np.ones((3, 4)), "b": np.ones((3, 4)), "c": np.ones((3, 4)), "d": np.ones(3)}, place)
    locked = np.zeros((3, 4))
    locked.flags.writeable = False
    windows = np.lib.stride_tricks.as_strided(np.zeros(10), (3, 4), (8, 8))
    target = {"a": locked, "b": np.zeros((3, 4)), "c": windows, "d": np.broadcast_to(np.zeros(1), 3)}
    before = {key: np.array(value) for key, value in target.items()}
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(place, target)
    assert_same({key: np.array(value) for key, value in target.items()}, before)
    assert sorted({line.split(":")[0] for line in caught.value.problems}) == ["a", "c", "d"]
    await savestream.load(place, target, keys="b")
    assert (target["b"] == 1).all()


async def test_targets_that_share_a_part_of_their_memory_are_refused() -> None:
    place = fresh_place()
    await savestream.save({"a": np.ones(6), "b": np.ones(6), "c": np.ones((2, 3))}, place)
    base = np.zeros(12)
    for target in (
        {"a": base[:6], "b": base[5:11], "c": np.zeros((2, 3))},
        {"a": base[::2], "b": base[1::2], "c": base[3:9].reshape(2, 3)},
        {"a": base[:6], "b": base[6:], "c": base[:6].reshape(2, 3)},
        {"a": base[:6], "b": base[5::-1], "c": np.zeros((2, 3))},
    ):
        with pytest.raises(LoadMismatchError, match=r"share|same memory") as caught:
            await savestream.load(place, target)
        assert caught.value.problems
        assert (base == 0).all()
    apart = {"a": base[::2], "b": base[1::2], "c": np.zeros((2, 3))}
    await savestream.load(place, apart)
    assert (base == 1).all()


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ({"a": [np.ones(1), 1]}, {"a": {"x": np.ones(1)}}),
        ({"a": {"x": np.ones(1)}}, {"a": [np.ones(1)]}),
        ({"a": Pair(np.ones(1), 1)}, {"a": [np.ones(1), 1]}),
        ({"a": (np.ones(1), np.ones(1))}, {"a": (np.ones(1),)}),
        ({"a": (np.ones(1),)}, {"a": (np.ones(1), np.ones(1))}),
        ({"a": np.ones(1)}, {"a": {}}),
        ({"a": np.ones(1)}, {"a": None}),
        ({"a": {}}, {"a": np.ones(1)}),
        ({"a": {1: np.ones(1)}}, {"a": {"1": np.ones(1)}}),
        ({"a": {True: np.ones(1)}}, {"a": {1: np.ones(1)}}),
        (np.ones(1), {"a": np.ones(1)}),
        ({"a": {"x": 1}}, {"a": {"y": 1}}),
        ({"a": {"x": 1}}, {"a": 1}),
        ({"a": np.ones(1)}, {}),
        ({}, {"a": np.ones(1)}),
    ],
    ids=str,
)
async def test_another_structure_is_refused(saved: Any, target: Any) -> None:
    place = fresh_place()
    await savestream.save(saved, place)
    await refused(place, target)


@pytest.mark.parametrize("own", [[], [0], [0, 0, 0, 0]])
async def test_a_sequence_of_plain_values_takes_the_saved_length(own: list[int]) -> None:
    place = fresh_place()
    await savestream.save({"w": np.ones(1), "log": {"losses": [0.5, 0.25], "seen": (1, 2)}}, place)
    found = await savestream.load(place, {"w": np.zeros(1), "log": {"losses": own, "seen": tuple(own)}})
    assert_same(found, {"w": np.ones(1), "log": {"losses": [0.5, 0.25], "seen": (1, 2)}})


async def test_a_tuple_in_place_of_a_list_and_the_target_s_own_classes_win() -> None:
    place = fresh_place()
    await savestream.save({"a": [np.ones(1), 2], "b": {"x": np.ones(2), "y": 1}, "c": (1, [2])}, place)
    target = {"a": (np.zeros(1), 0), "b": OrderedDict(y=0, x=np.zeros(2)), "c": [0, (0,)]}
    found = await savestream.load(place, target)
    assert_same(found, {"a": (np.ones(1), 2), "b": OrderedDict(y=1, x=np.ones(2)), "c": [1, (2,)]})


async def test_errors_after_the_checks_still_leave_plain_values_alone() -> None:
    place = fresh_place()
    await savestream.save({"w": np.arange(10.0), "n": {"step": 5}}, place)
    backend, name = place
    (data,) = [found.path for found in await backend.list_objects(name) if found.path.endswith(".bin")]
    content = bytearray(await backend.get(data, maximum_bytes=1 << 20))
    content[3] ^= 255
    await backend.put(data, bytes(content))
    target = {"w": np.zeros(10), "n": {"step": 0}}
    with pytest.raises(savestream.CorruptCheckpointError, match="w"):
        await savestream.load(place, target)
    assert target["n"] == {"step": 0}
