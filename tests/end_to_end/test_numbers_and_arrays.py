"""A Python number takes the place of a saved array of no dimension where no bit is lost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import savestream
from savestream import LoadMismatchError

EXACT: list[tuple[Any, Any]] = [
    (True, np.array(True)),
    (False, np.array(False)),
    *[(7, np.array(7, dtype)) for dtype in ("i1", "u1", "i4", "u8", ">i2", "i8", ml_dtypes.int4, ml_dtypes.uint4)],
    (-(2**63), np.array(-(2**63))),
    (2**64 - 1, np.array(2**64 - 1, "u8")),
    *[(-1.5, np.array(-1.5, dtype)) for dtype in ("f2", "f4", "f8", ">f4", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)],
    (0.1, np.array(0.1)),
    (-0.0, np.array(-0.0, "f4")),
    (math.inf, np.array(math.inf, "f2")),
    (math.nan, np.array(math.nan, "f4")),
    (1 - 2j, np.array(1 - 2j, "c8")),
    (0.1j, np.array(0.1j)),
]
NEVER: list[tuple[Any, Any]] = [
    (1, np.array(1.0)),
    (1.0, np.array(1)),
    (True, np.array(1)),
    (1, np.array(True)),
    (1.0, np.array(1 + 0j)),
    (1, np.array([1])),
    (1, np.array([], "i4")),
    (1.0, np.array(1, "M8[s]")),
    (1.0, np.array(1.0, np.longdouble)),
]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and found.shape == () and found.tobytes() == expected.tobytes()
    return type(found) is type(expected) and repr(found) == repr(expected)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("number", "array"), EXACT)
async def test_a_number_takes_a_saved_array(number: Any, array: np.ndarray, inside: bool, tmp_path: Path) -> None:
    other: dict[str, Any] = {"x": 0} if inside else {}
    await savestream.save({"n": array, "w": np.ones(2), **other}, tmp_path / "c")
    target = {"n": type(number)(0), "w": np.zeros(2), **other}
    assert same((await savestream.load(tmp_path / "c", target))["n"], number)
    assert same(target["n"], number)


@pytest.mark.parametrize(("number", "array"), EXACT)
async def test_an_array_that_can_be_changed_takes_no_number(number: Any, array: np.ndarray, tmp_path: Path) -> None:
    """It may be a part of another target, or stand in several places that take different numbers."""
    state = {"n": number, "inside": {"m": [number, "text"]}, "w": np.ones(2)}
    await savestream.save(state, tmp_path / "c")
    own = [np.zeros_like(array), np.zeros_like(array)]
    target = {"n": own[0], "inside": {"m": [own[1], ""]}, "w": np.zeros(2)}
    with pytest.raises(LoadMismatchError) as error:
        await savestream.load(tmp_path / "c", target)
    assert [line.split(":")[0] for line in error.value.problems] == ["n", "inside.m[0]"]
    assert not target["w"].any()
    assert all(filled.tobytes() == np.zeros_like(array).tobytes() for filled in own)


@pytest.mark.parametrize(("number", "array"), NEVER)
async def test_another_kind_never_takes_its_place(number: Any, array: np.ndarray, tmp_path: Path) -> None:
    await savestream.save({"a": {"n": array}}, tmp_path / "array")
    await savestream.save({"a": {"n": number}}, tmp_path / "number")
    for cast in (False, True):
        with pytest.raises(LoadMismatchError, match=r"a\.n: the checkpoint has an array, the target a plain value"):
            await savestream.load(tmp_path / "array", {"a": {"n": number}}, cast=cast)
        with pytest.raises(LoadMismatchError, match=r"a\.n: the checkpoint has a plain value, the target an array"):
            await savestream.load(tmp_path / "number", {"a": {"n": array}}, cast=cast)


async def test_only_what_was_asked_for_is_replaced(tmp_path: Path) -> None:
    await savestream.save({"a": np.array(1), "b": np.array(2), "w": np.ones(3)}, tmp_path / "c")
    target = {"a": 0, "b": 0}
    assert await savestream.load(tmp_path / "c", target, keys=["b"], strict=False) == {"a": 0, "b": 2}
    assert await savestream.load(tmp_path / "c", target, strict=False) == {"a": 1, "b": 2}


async def test_sequences_of_numbers_and_arrays(tmp_path: Path) -> None:
    await savestream.save({"t": (np.array(1), 2, np.array(0.5, "f4"))}, tmp_path / "c")
    assert await savestream.load(tmp_path / "c", {"t": (0, 0, 0.0)}) == {"t": (1, 2, 0.5)}
