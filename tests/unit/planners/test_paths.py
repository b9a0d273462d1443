"""Names are injective texts of typed paths."""

from __future__ import annotations

import pytest

from savestream.errors import PlanError
from savestream.planners.paths import Index, parse_fqn, path_to_fqn, select_names


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("",), "[str:]"),
        (("a", ""), "a[str:]"),
        (("a", "b"), "a.b"),
        (("a.b",), r"a\.b"),
        (("a\\", "b"), r"a\\.b"),
        (("a[0]",), r"a\[0]"),
        (("layers", Index(3), "w"), "layers[3].w"),
        ((Index(0), "w"), "[0].w"),
        (("state", 0), "state[int:0]"),
        ((True,), "[bool:true]"),
        ((None,), "[none]"),
        ((0.5,), "[float:0.5]"),
        ((float("-inf"),), "[float:-inf]"),
        ((b"a]",), "[bytes:615d]"),
        (((1, "a"),), r'[value:{"$tuple":[1,"a"\]}]'),
        (("\ud800",), r"\ud800"),
        (("é",), "é"),
    ],
)
def test_texts(path: tuple[object, ...], text: str) -> None:
    assert path_to_fqn(path) == text
    assert parse_fqn(text) == path


@pytest.mark.parametrize(
    "text",
    [".a", "a.", "a..b", "a[", "[x]", "[int:03]", "[03]", "a[3]b", "\\", "\\x", "[3].[4]", "[str:a]", "[value:1]"],
)
def test_texts_of_no_path_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not the name of a leaf"):
        parse_fqn(text)


def test_positions_are_no_int_keys() -> None:
    assert Index(3) != 3
    assert len({(Index(1),), (1,)}) == 2


def test_selection_compares_whole_parts() -> None:
    names = ["params.w", "params2.w", "params", "opt.params", r"params\.w", "l[0].w", "l[10]", "l[int:0]"]
    assert select_names(names, ["params"]) == (["params.w", "params"], [])
    assert select_names(names, ["l[0]"]) == (["l[0].w"], [])
    assert select_names(names, [("l", 0)]) == (["l[0].w", "l[int:0]"], [])
    assert select_names(names, [("params.w",), "nothing", "opt"]) == (["opt.params", r"params\.w"], ["nothing"])
    assert select_names(names, [""]) == (names, [])
    assert select_names({"x": ("a[b",)}, ["a[b"]) == (["x"], [])
