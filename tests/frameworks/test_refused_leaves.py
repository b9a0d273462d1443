"""What cannot be stored is refused by key, before anything is written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refused_leaves import REFUSED, RefusedLeaf

from savestream import LoadMismatchError, LoadOptions, SaveOptions, UnsafeObjectError, blocking
from savestream.storage_backends import MemoryBackend

WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dict": (lambda leaf: {"good": np.ones(1000), "bad.key": leaf}, r"layers.bad\.key: "),
    "list": (lambda leaf: [np.ones(1000), 3, {"w": [leaf]}], "layers[2].w[0]: "),
    "tuple of values": (lambda leaf: (1, leaf, "x"), "layers[1]: "),
}


def contents(backend: MemoryBackend) -> dict[str, int]:
    return {found.path: found.size_bytes for found in asyncio.run(backend.list_objects(""))}


def named(case: RefusedLeaf) -> str:
    return f"{case.framework}, {case.name}"


@pytest.mark.parametrize("inside", WRAPPED)
@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_refused_by_key_before_anything_is_written(case: RefusedLeaf, inside: str) -> None:
    backend = MemoryBackend("test")
    blocking.save({"earlier": np.arange(3)}, (backend, "step-1"))
    before = contents(backend)
    wrap, key = WRAPPED[inside]
    errors: list[str] = []

    def use(leaf: Any) -> None:
        state = {"first": np.zeros(5), "layers": wrap(leaf)}
        for allow_pickle in (False,) if case.picklable else (False, True):
            for function in (blocking.save, blocking.start_save):
                with pytest.raises(UnsafeObjectError) as caught:
                    function(state, (backend, "step-2"), options=SaveOptions(allow_pickle=allow_pickle))
                errors.append(str(caught.value))

    case.give(use)
    assert errors[0].startswith(key)
    assert len(errors) == (2 if case.picklable else 4)
    tried_by_pickle = case.framework == "python"  # which sees a subtree of plain values as one leaf
    for error in errors[1:]:
        assert error.startswith("layers" if tried_by_pickle else key)
    assert re.search(case.reason, errors[0])
    assert contents(backend) == before
    assert not blocking.exists((backend, "step-2"))
    assert blocking.load((backend, "step-1"))["earlier"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_refused_as_the_whole_state(case: RefusedLeaf) -> None:
    backend = MemoryBackend("test")

    def use(leaf: Any) -> None:
        with pytest.raises(UnsafeObjectError, match=case.reason):
            blocking.save(leaf, (backend, "c"))

    case.give(use)
    assert contents(backend) == {}


@pytest.mark.parametrize("case", [case for case in REFUSED if case.picklable], ids=named)
def test_pickle_needs_consent_on_both_sides(case: RefusedLeaf) -> None:
    place = (MemoryBackend("test"), "c")
    kinds: list[type] = []

    def use(leaf: Any) -> None:
        blocking.save({"w": leaf, "x": np.ones(2)}, place, options=SaveOptions(allow_pickle=True))
        kinds.append(type(leaf))

    case.give(use)
    with pytest.raises(UnsafeObjectError, match=r"^w: "):
        blocking.load(place)
    found = blocking.load(place, options=LoadOptions(allow_pickle=True))
    assert [type(found["w"])] == kinds
    assert found["x"].tolist() == [1, 1]


UNFIT_TARGETS = [case for case in REFUSED if case.framework == "torch" and case.name != "meta" and not case.picklable]


@pytest.mark.parametrize("case", UNFIT_TARGETS, ids=named)
def test_no_target_either(case: RefusedLeaf) -> None:
    place = (MemoryBackend("test"), "c")
    bystander = np.zeros(2)
    problems: list[str] = []

    def use(leaf: Any) -> None:
        shape = tuple(getattr(leaf, "shape", ())) if "nested" not in case.name and "lazy" not in case.name else (3,)
        blocking.save({"w": np.ones(shape, np.float32), "x": np.ones(2)}, place)
        with pytest.raises(LoadMismatchError) as caught:
            blocking.load(place, {"w": leaf, "x": bystander})
        problems.extend(caught.value.problems)

    case.give(use)
    assert [problem for problem in problems if re.match(f"w: .*{case.reason}", problem)]
    assert bystander.tolist() == [0, 0]
