"""Which arrays are the same memory: found alike when a state is saved and when it is loaded into."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from savestream import SaveOptions, blocking
from savestream.planners import aliasing
from savestream.planners.aliasing import alias_partition
from savestream.planners.flattening import flatten

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
    address_of = aliasing._address

    def counted(array: np.ndarray) -> int:
        asked.append(array)
        return address_of(array)

    monkeypatch.setattr(aliasing, "_address", counted)
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
