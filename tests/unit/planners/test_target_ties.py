"""Which arrays are the same memory: found alike when a state is saved and when it is loaded into."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from savestream import LoadMismatchError, SaveOptions, blocking
from savestream.planners import aliasing, target_memory
from savestream.planners.aliasing import alias_partition
from savestream.planners.cache import fingerprint
from savestream.planners.flattening import flatten
from savestream.planners.sharding import ShardedArray
from savestream.planners.target_memory import TargetArray, examine_targets

PLAIN = SaveOptions(compression="none")


def partition(state: Any) -> dict[int, int]:
    return alias_partition(flatten(state))


def stored_bytes(state: Any, place: Path) -> int:
    return blocking.save(state, place, options=PLAIN).statistics.raw_bytes


# --- numpy's arrays ---


def seen_twice(memory: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(memory, "f4"), np.frombuffer(memory, "f4")


def frombuffer() -> tuple[np.ndarray, np.ndarray]:
    return seen_twice(bytearray(range(240)))


def over_memoryviews() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    return np.asarray(memoryview(whole)), np.asarray(memoryview(whole))


def over_dlpack() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    return np.from_dlpack(whole), np.from_dlpack(whole)


def owner_and_view() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    return whole, whole[:]


def owner_and_memoryview() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    return whole, np.asarray(memoryview(whole))


def axes_of_one_element() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    first, second = whole.reshape(1, 60), whole[None]
    assert first.strides != second.strides
    return first, second


def one_element() -> tuple[np.ndarray, np.ndarray]:
    whole = np.arange(60, dtype="f4")
    return whole[3:4], whole[3::-5][:1]


PAIRS: list[Callable[[], tuple[np.ndarray, np.ndarray]]] = [
    frombuffer,
    over_memoryviews,
    over_dlpack,
    owner_and_view,
    owner_and_memoryview,
    axes_of_one_element,
    one_element,
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("among", [[], [np.zeros(60, "f4")], [np.zeros((60, 2), "f4")[:, 0]]])
def test_the_same_memory_is_stored_once_and_loads_into_itself(
    pair: Callable[[], tuple[np.ndarray, np.ndarray]], among: list[np.ndarray], tmp_path: Path
) -> None:
    first, second = pair()
    before = first.copy()
    state = {**{f"before {number}": array for number, array in enumerate(among)}, "a": first}
    state |= {"deep": [{"b": second}], "c": first}
    assert partition(state) == {len(among) + 1: len(among), len(among) + 2: len(among)}
    assert stored_bytes(state, tmp_path / "c") == first.nbytes + sum(array.nbytes for array in among)
    first[...] = 0
    blocking.load(tmp_path / "c", state)
    assert first.tobytes() == second.tobytes() == before.tobytes()


def test_arrays_that_differ_in_anything_are_no_aliases() -> None:
    memory = bytearray(range(240))
    whole = np.frombuffer(memory, "f4").reshape(10, 6)
    other = np.frombuffer(memory, "f4").reshape(10, 6)
    different = [
        whole,
        other[:, :5],
        other[:5],
        other[1:6],
        other.view("i4"),
        other.view("<u4"),
        other[::-1],
        other.reshape(6, 10),
        other.reshape(10, 6, 1),
        other[:, :1],
        other[:1],
        np.frombuffer(bytearray(memory), "f4").reshape(10, 6),
        whole.copy(),
    ]
    assert partition(different) == {}
    assert partition([*different, whole[:]]) == {len(different): 0}


def test_empty_arrays_are_aliases_only_where_they_are_one_object() -> None:
    memory = bytearray(8)
    one, other = np.frombuffer(memory, "f4")[:0], np.frombuffer(memory, "f4")[:0]
    assert partition([one, other, one]) == {2: 0}


def test_addresses_are_read_only_of_what_may_be_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[np.ndarray] = []
    address_of = aliasing.numpy_address

    def counted(array: np.ndarray) -> int:
        asked.append(array)
        return address_of(array)

    monkeypatch.setattr(aliasing, "numpy_address", counted)
    owners = [np.zeros(3) for _ in range(20)]
    views = [np.zeros(6)[:3] for _ in range(20)]
    assert partition([owners, views, owners[0], np.zeros((2, 2)), np.zeros((2, 2))[:]]) == {40: 0}
    assert asked == []
    assert partition([*views, views[4][:]]) == {20: 4}
    assert len(asked) == 2


def test_the_first_place_is_found_in_any_order(tmp_path: Path) -> None:
    whole = np.arange(4.0)
    kinds = [whole, whole[:], np.asarray(memoryview(whole)), np.frombuffer(whole.data, "f8")]
    for number, order in enumerate(itertools.permutations(kinds)):
        assert partition(list(order)) == {1: 0, 2: 0, 3: 0}
        if number % 6 == 0:
            assert stored_bytes(list(order), tmp_path / str(number)) == whole.nbytes
            blocking.load(tmp_path / str(number), list(order))


# --- boxes of sharded arrays ---


def rows(*pairs: tuple[int, np.ndarray], of: int = 6) -> ShardedArray:
    return ShardedArray((of, 3), [((start, 0), array) for start, array in pairs])


def matrix(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + 3 * count, dtype="f4").reshape(count, 3)


def two_over_the_same_arrays() -> dict[str, Any]:
    top, rest = matrix(2), matrix(4, 6)
    return {"a": rows((0, top), (2, rest)), "b": rows((0, top[:]), (2, rest)), "c": rows((0, rest), (4, top))}


def box_and_plain() -> dict[str, Any]:
    top, rest = matrix(2), matrix(4, 6)
    return {
        "first": top,
        "a": rows((0, top), (2, rest)),
        "last": [rest[:], 1, np.frombuffer(top.data, "f4").reshape(2, 3)],
    }


def box_before_plain() -> dict[str, Any]:
    whole = matrix(6)
    return {"a": rows((0, whole)), "b": whole[:], "c": whole}


def one_object_twice() -> dict[str, Any]:
    whole = matrix(6)
    leaf = rows((0, whole[:2]), (2, whole[2:]))
    return {"a": leaf, "b": leaf, "c": whole[:2], "d": rows((0, whole[2:]), (4, whole[:2]))}


def the_same_box_twice() -> dict[str, Any]:
    top = matrix(3)
    return {"a": rows((0, top), (3, top))}


SHARDED_STATES = {
    two_over_the_same_arrays: 72,
    box_and_plain: 72,
    box_before_plain: 72,
    one_object_twice: 72,
    the_same_box_twice: 36,
}


def arrays_in(state: Any) -> list[np.ndarray]:
    flat = flatten(state)
    return [array for leaf in flat.leaves for array in getattr(leaf, "shards", [leaf]) if isinstance(array, np.ndarray)]


def apart(leaf: Any) -> Any:
    if isinstance(leaf, ShardedArray):
        return ShardedArray((6, 3), list(zip(leaf.global_offsets, map(np.zeros_like, leaf.shards), strict=True)))
    if isinstance(leaf, list):
        return [apart(inner) for inner in leaf]
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf


@pytest.mark.parametrize("make", SHARDED_STATES)
def test_boxes_of_one_memory_are_stored_once_and_load_into_themselves(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    state = make()
    before = [array.tobytes() for array in arrays_in(state)]
    assert stored_bytes(state, tmp_path / "c") == SHARDED_STATES[make]
    for array in arrays_in(state):
        array[...] = -1
    blocking.load(tmp_path / "c", state)
    assert [array.tobytes() for array in arrays_in(state)] == before


@pytest.mark.parametrize("make", SHARDED_STATES)
def test_boxes_of_one_memory_load_into_memory_of_their_own(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    state = make()
    before = [array.tobytes() for array in arrays_in(state)]
    blocking.save(state, tmp_path / "c")
    loaded = blocking.load(tmp_path / "c", {name: apart(leaf) for name, leaf in state.items()})
    assert [array.tobytes() for array in arrays_in(loaded)] == before


def test_boxes_of_one_memory_are_refused_where_the_checkpoint_has_them_apart(tmp_path: Path) -> None:
    top, rest = matrix(2), matrix(4)
    blocking.save({"a": rows((0, top.copy()), (2, rest)), "b": matrix(2, 50)}, tmp_path / "c")
    for target in (
        {"a": rows((0, top), (2, rest)), "b": top},
        {"b": top, "a": rows((0, top), (2, rest))},
        {"a": rows((0, matrix(2)), (2, rest[:2]), (4, rest[2:])), "b": rest[:2]},
    ):
        with pytest.raises(LoadMismatchError, match="are the same memory, but the checkpoint stores them apart"):
            blocking.load(tmp_path / "c", target)
    with pytest.raises(LoadMismatchError, match="a: two boxes of the target are the same memory"):
        blocking.load(tmp_path / "c", {"a": rows((0, top), (2, top), (4, rest[:2])), "b": matrix(2)})
    assert top.tobytes() == matrix(2).tobytes()


def test_boxes_of_one_memory_count_for_the_plan_that_is_kept() -> None:
    top, rest = matrix(2), matrix(4)
    tied = {"a": rows((0, top), (2, rest)), "b": top}
    apart = {"a": rows((0, top), (2, rest)), "b": top.copy()}
    again = {"a": rows((0, top.copy()), (2, rest)), "b": top}
    tokens = [fingerprint(flatten(state), {}) for state in (tied, apart, again, {**tied, "b": top[:]})]
    assert tokens[0] != tokens[1] == tokens[2]
    assert tokens[0] == tokens[3]


# --- targets that reach over each other ---


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The pairs of targets whose elements are compared exactly."""
    pairs: list[tuple[Any, Any]] = []
    share = target_memory._share_memory

    def counted(first: Any, second: Any) -> bool:
        pairs.append((first, second))
        return share(first, second)

    monkeypatch.setattr(target_memory, "_share_memory", counted)
    return pairs


def overlaps(arrays: list[np.ndarray]) -> set[tuple[int, int]]:
    """Positions of the arrays of which :func:`examine_targets` says that they share a part of their memory."""
    names = {f"<{position}>": position for position in range(len(arrays))}
    targets = [TargetArray(name, (), array) for name, array in zip(names, arrays, strict=True)]
    ties, problems = examine_targets(targets)
    assert ties == []
    assert all("share a part of their memory" in text for _, text in problems)
    found = [[position for name, position in names.items() if name in text] for _, text in problems]
    return {(first, second) for first, second in found}


def grid(count: int) -> np.ndarray:
    return np.zeros((3, count, 2, 5, count), "f4")


MATRIX = np.zeros((9, 400))
INTERLEAVED = {
    "columns": lambda: list(np.zeros((16, 600), "f4").T),
    "columns backwards": lambda: list(np.zeros((16, 600), "f4")[::-1].T),
    "in the middle": lambda: list(np.zeros((4, 300, 5, 6), "i2").swapaxes(0, 1)),
    "in the middle, transposed": lambda: list(np.zeros((4, 300, 5, 6), "i2").transpose(1, 3, 0, 2)),
    "fields": lambda: [records[name] for records in [np.zeros(9, "i4," * 299 + "i4")] for name in records.dtype.names],
    "at two axes": lambda: [whole[:, i, :, :, j] for whole in [grid(20)] for i in range(20) for j in range(20)],
    "of two sorts": lambda: [*MATRIX.T[:200], *MATRIX.reshape(9, 200, 2)[:, 100:].transpose(1, 2, 0)],
    "around the end": lambda: list(np.zeros(6 * 600 + 7, "u1")[7:].reshape(6, 600).T.reshape(300, 2, 6)),
    "blocks": lambda: [
        whole[i : i + 10, j : j + 10]
        for whole in [np.zeros((200, 200), "f4")]
        for i in range(0, 200, 10)
        for j in range(0, 200, 10)
    ],
    "after others": lambda: [np.zeros(5), *np.zeros((4, 300)).T, *np.zeros((4, 300)).T],
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_targets_are_told_apart_without_comparing_them(name: str, compared: list[tuple[Any, Any]]) -> None:
    arrays = INTERLEAVED[name]()
    assert len(arrays) >= 300
    assert overlaps(arrays) == set()
    assert len(compared) <= len(arrays)


def test_what_overlaps_interleaved_targets_is_found_without_comparing_all(compared: list[tuple[Any, Any]]) -> None:
    whole = np.zeros((16, 600), "f4")
    arrays = [*whole.T, whole[3], whole[4:6, 7:9], whole.reshape(-1)[5::1200]]
    expected = {(column, 600) for column in range(600)} | {(7, 601), (8, 601), (5, 602)}
    assert overlaps(arrays) == expected
    assert len(compared) <= 5 * len(arrays)


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_those_that_numpy_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = np.zeros(random.choice([60, 720]), random.choice(["u1", "i4", "c16"]))
    shapes = [
        shape for shape in itertools.product((1, 2, 3, 4, 5, 6, 10), repeat=3) if whole.size % np.prod(shape) == 0
    ]
    arrays: list[np.ndarray] = []
    for _ in range(random.integers(2, 40)):
        view = whole.reshape(*shapes[random.integers(len(shapes))], -1)
        view = view.transpose(random.permutation(view.ndim))
        for axis in range(view.ndim):
            start, step = random.integers(view.shape[axis]), random.choice([1, 1, 2, -1, -2])
            view = view[(slice(None),) * axis + (slice(start, None, step),)]
        if not any(np.shares_memory(view, other) and same_elements(view, other) for other in arrays):
            arrays.append(view)
    pairs = itertools.combinations(range(len(arrays)), 2)
    assert overlaps(arrays) == {(i, j) for i, j in pairs if np.shares_memory(arrays[i], arrays[j])}


def same_elements(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and partition([one, other]) == {1: 0}
