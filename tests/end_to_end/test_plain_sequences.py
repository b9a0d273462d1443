"""Histories grow: a sequence of plain values is replaced whole, whatever lengths target and checkpoint have."""

from collections import deque

import numpy as np
import pytest

import savestream
from savestream import LoadMismatchError, blocking


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", [list, tuple, deque])
@pytest.mark.parametrize(("saved", "present"), [([1, 2, 3], []), ([1.5], [7, 8, 9]), ([], [1]), ([[1], [2, 3]], [[9]])])
def test_sequences_take_the_saved_length(tmp_path, kind, saved, present, strict):
    weights = np.arange(3.0)
    blocking.save({"w": weights, "history": kind(saved)}, tmp_path / "c")
    target = {"w": np.zeros(3), "history": kind(present)}
    held = target["history"]
    result = blocking.load(tmp_path / "c", target, strict=strict)
    assert result is target
    assert type(result["history"]) is kind
    assert list(result["history"]) == saved
    assert kind is tuple or result["history"] is held
    assert (result["w"] == weights).all()


def test_an_array_beyond_the_saved_length_is_still_missing(tmp_path):
    blocking.save({"w": np.ones(2), "history": [1]}, tmp_path / "c")
    target = {"w": np.zeros(2), "history": [1, np.zeros(2)]}
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(tmp_path / "c", target)
    assert caught.value.missing == ("history[1]",)
    assert not target["w"].any()


async def test_the_async_form_agrees(tmp_path):
    await savestream.save({"history": [1, 2, 3]}, tmp_path / "c")
    assert await savestream.load(tmp_path / "c", {"history": [4]}) == {"history": [1, 2, 3]}
