"""Buffers, and arrays of libraries that savestream does not know, as leaves of a state."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import gc
import mmap
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place

from savestream import (
    LoadMismatchError,
    PlanCache,
    PlanError,
    RecordedDataclass,
    SaveOptions,
    UnsafeObjectError,
    blocking,
)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """A leaked export would only be noticed where no collection comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Plain:
    """An array of a library that speaks DLPack."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, *, max_version: Any = None, stream: Any = None) -> Any:
        return self.values.__dlpack__(max_version=max_version)


def matrix() -> Any:
    return (ctypes.c_float * 3 * 2)((1, 2, 3), (4, 5, 6))


STRIDED = np.arange(12, dtype=">i2").reshape(3, 4)[:, ::-2]
RECORDS = np.array([(1, 2.5), (3, 4.5)], np.dtype([("a", "i1"), ("b", "f8")], align=True))
LEAVES: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
    "array": (lambda: array.array("d", [1, 2, 3]), np.array([1.0, 2, 3])),
    "array of bytes": (lambda: array.array("B", b"abc"), np.frombuffer(b"abc", np.uint8)),
    "array of longs": (lambda: array.array("q", [-1, 2**60]), np.array([-1, 2**60])),
    "no elements": (lambda: array.array("f"), np.zeros(0, np.float32)),
    "ctypes": (matrix, np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
    "ctypes big-endian": (lambda: (ctypes.c_int32.__ctype_be__ * 2)(1, 2), np.array([1, 2], ">i4")),
    "ctypes bool": (lambda: (ctypes.c_bool * 2)(True, False), np.array([True, False])),
    "ctypes char": (lambda: (ctypes.c_char * 2)(b"a", b"b"), np.array([b"a", b"b"], "S1")),
    "memoryview": (lambda: memoryview(bytearray(b"xyz")), np.frombuffer(b"xyz", np.uint8)),
    "strided": (lambda: memoryview(STRIDED), np.ascontiguousarray(STRIDED)),
    "records": (lambda: memoryview(RECORDS.copy()), RECORDS),
    "dlpack": (lambda: Plain([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]])),
    "dlpack scalar": (lambda: Plain(2.5), np.array(2.5)),
    "dlpack empty": (lambda: Plain(np.zeros((0, 3), np.float16)), np.zeros((0, 3), np.float16)),
}


def as_numpy(leaf: Any) -> np.ndarray:
    return np.array(leaf.values if isinstance(leaf, Plain) else memoryview(leaf))


def zeroed(leaf: Any) -> Any:
    """A target like a leaf, of the same class, whose elements are all zero."""
    if isinstance(leaf, array.array):
        return array.array(leaf.typecode, bytes(leaf.itemsize * len(leaf)))
    if isinstance(leaf, memoryview):
        return memoryview(np.zeros_like(np.asarray(leaf)))
    return Plain(np.zeros_like(leaf.values)) if isinstance(leaf, Plain) else type(leaf)()


@pytest.mark.parametrize(("make", "expected"), LEAVES.values(), ids=LEAVES)
def test_alone(make: Callable[[], Any], expected: np.ndarray) -> None:
    place, leaf = fresh_place(), make()
    blocking.save({"x": leaf}, place)
    assert_same(blocking.load(place), {"x": expected})
    target = zeroed(leaf)
    found = blocking.load(place, {"x": target})
    assert found["x"] is target
    assert_same(as_numpy(target), expected)


def test_all_together_beside_other_leaves() -> None:
    place = fresh_place()
    state = {name: make() for name, (make, _) in LEAVES.items()}
    state |= {"w": np.arange(5.0), "step": 3, "large": array.array("i", range(300_000))}
    blocking.save(state, place, options=SaveOptions(compression="zstd"))
    expected = {name: value for name, (_, value) in LEAVES.items()}
    expected |= {"w": np.arange(5.0), "step": 3, "large": np.arange(300_000, dtype=np.int32)}
    assert_same(blocking.load(place), expected)
    target = {name: zeroed(leaf) for name, leaf in state.items() if name not in ("w", "step")}
    target |= {"w": np.zeros(5), "step": 0}
    blocking.load(place, target)
    for name in LEAVES:
        assert_same(as_numpy(target[name]), expected[name], name)
    assert target["large"] == state["large"]


def test_a_buffer_may_grow_again_after_everything() -> None:
    place, buffer = fresh_place(), array.array("d", range(1000))
    saving = blocking.start_save({"x": buffer, "view": memoryview(bytes(10))}, place)
    buffer.append(1.0)  # staged: nothing refers to its memory any more
    saving.result()
    assert blocking.load(place)["x"].tolist() == list(range(1000))
    target = array.array("d", bytes(8000))
    blocking.load(place, {"x": target, "view": memoryview(bytearray(10))})
    target.append(2.0)
    assert target[:1000].tolist() == list(range(1000))
    with pytest.raises(LoadMismatchError) as held:
        blocking.load(place, {"x": target, "view": memoryview(bytearray(10))})
    target.append(3.0)
    with pytest.raises(UnsafeObjectError) as refused:
        blocking.save({"x": target, "y": object()}, fresh_place("other"))
    target.append(4.0)
    assert held.value.shape_mismatches
    assert "y" in str(refused.value)


def test_a_cached_plan_reads_the_new_elements() -> None:
    cache, buffer, plain = PlanCache(), array.array("i", [1, 2]), Plain([1.0, 2.0])
    blocking.save({"x": buffer, "y": plain}, fresh_place(), plan_cache=cache)
    buffer[0], plain.values[1] = 7, 8.0
    place = fresh_place("again")
    blocking.save({"x": buffer, "y": plain}, place, plan_cache=cache)
    assert cache.statistics().hits == 1
    assert [value.tolist() for value in blocking.load(place).values()] == [[7, 2], [1.0, 8.0]]
    buffer.append(3)
    blocking.save({"x": buffer, "y": plain}, fresh_place("longer"), plan_cache=cache)
    assert cache.statistics().hits == 1


def test_the_same_memory_is_stored_once_and_filled_once() -> None:
    buffer, plain = array.array("d", range(1000)), Plain(np.arange(500.0))
    state = {"a": buffer, "b": buffer, "c": memoryview(buffer), "d": plain, "e": plain, "f": plain.values}
    place = fresh_place()
    stored = blocking.save(state, place, options=SaveOptions(compression="none")).statistics.raw_bytes
    assert stored == 8 * 1000 + 8 * 500
    found = blocking.load(place)
    assert all(found[name].tolist() == list(range(1000)) for name in "abc")
    target, other = array.array("d", bytes(8000)), Plain(np.zeros(500))
    tied = {"a": target, "b": target, "c": memoryview(target), "d": other, "e": other, "f": other.values}
    blocking.load(place, tied)
    assert target == buffer
    assert other.values.tolist() == plain.values.tolist()


def test_targets_that_are_the_same_memory_but_were_not() -> None:
    place, target = fresh_place(), array.array("d", [0, 0])
    blocking.save({"a": array.array("d", [1, 2]), "b": array.array("d", [1, 2])}, place)
    with pytest.raises(LoadMismatchError, match="same memory"):
        blocking.load(place, {"a": target, "b": target})
    assert target.tolist() == [0, 0]


def test_read_only_targets_are_refused_before_anything_is_touched() -> None:
    place, other = fresh_place(), array.array("d", [0, 0])
    frozen = Plain([1.0, 2.0])
    frozen.values.flags.writeable = False
    blocking.save({"a": array.array("d", [1, 2]), "b": memoryview(b"xy"), "c": frozen}, place)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, {"a": other, "b": memoryview(bytes(2)), "c": frozen})
    assert [text.split(":")[0] for text in caught.value.problems] == ["b", "c"]
    assert all("read-only" in text for text in caught.value.problems)
    assert other.tolist() == [0, 0]


def test_conversion_into_a_buffer() -> None:
    place, target = fresh_place(), array.array("f", [0, 0])
    blocking.save({"a": np.array([1.5, 2.5])}, place)
    with pytest.raises(LoadMismatchError):
        blocking.load(place, {"a": target})
    blocking.load(place, {"a": target}, cast=True)
    assert target.tolist() == [1.5, 2.5]


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


def released() -> memoryview:
    view = memoryview(bytearray(3))
    view.release()
    return view


class Raising:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("a tensor that requires grad")


class Failing(Plain):
    """Answers a few times, and then never again."""

    def __init__(self, values: Any, answers: int) -> None:
        super().__init__(values)
        self.answers = answers

    def __dlpack__(self, *, max_version: Any = None, stream: Any = None) -> Any:
        self.answers -= 1
        if self.answers < 0:
            raise RuntimeError("the memory is gone")
        return super().__dlpack__(max_version=max_version)

    def __setitem__(self, index: Any, value: Any) -> None: ...


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_export_that_fails_later_is_an_error_that_names_the_key(size: int) -> None:
    outcomes = []
    for answers in range(8):
        place = fresh_place(str(answers))
        leaf = Failing(np.arange(size), answers)
        try:
            blocking.save({"model": {"x": leaf, "y": Failing(np.zeros(3), 99)}}, place)
        except (PlanError, UnsafeObjectError) as error:
            assert re.search(r"model\.x: .*Failing .*the memory is gone", str(error)), error  # noqa: PT017
            assert not blocking.exists(place)
            outcomes.append(False)
        else:
            assert blocking.load(place)["model"]["x"].tolist() == list(range(size))
            outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_target_that_fails_later_is_filled_or_named() -> None:
    place = fresh_place()
    blocking.save({"x": np.arange(5), "y": np.arange(3)}, place)
    outcomes = []
    for answers in range(8):
        target = {"x": Failing(np.zeros(5, np.int64), answers), "y": np.zeros(3, np.int64)}
        try:
            blocking.load(place, target)
        except LoadMismatchError as error:
            assert "x: " in error.problems[0]  # noqa: PT017
            assert not target["y"].any()
            outcomes.append(False)
        else:
            assert target["x"].values.tolist() == list(range(5))
            outcomes.append(True)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


class Bytes(bytes):
    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: array.array("u", "ab"),
        lambda: (Point * 2)(),
        lambda: (ctypes.c_void_p * 2)(),
        lambda: (ctypes.py_object * 2)(1, 2),
        lambda: (ctypes.c_wchar * 2)("a", "b"),
        lambda: ctypes.c_int(3),
        lambda: memoryview(np.array([object()])),
        lambda: mmap.mmap(-1, 10),
        released,
        Raising,
        lambda: Bytes(b"x"),
    ],
)
def test_what_has_no_elements_to_store_is_refused_by_key(make: Callable[[], Any]) -> None:
    place = fresh_place()
    with pytest.raises(UnsafeObjectError, match=r"model\.x: "):
        blocking.save({"model": {"x": make(), "w": np.zeros(3)}}, place)
    assert not blocking.exists(place)


@dataclasses.dataclass
class Record:
    """A container that happens to offer DLPack, and stays one."""

    values: Any

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> None: ...


def test_what_was_a_plain_value_stays_one() -> None:
    state = {
        "values": [b"x", bytearray(b"y"), np.float32(1), "z", np.str_("a")],
        "record": Record({"w": np.ones(2)}),
        "w": np.zeros(1),
    }
    place = fresh_place()
    blocking.save(state, place)
    found = blocking.load(place)
    assert_same(found["values"], state["values"])
    assert type(found["record"]) is RecordedDataclass
    assert found["record"]["values"]["w"].tolist() == [1, 1]
