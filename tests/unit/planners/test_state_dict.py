"""Flattening, the recorded tree, and trees fitted to plans."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from planner_support import same

from savestream.errors import PlanError, UnsafeObjectError
from savestream.planners import (
    Index,
    LeafNode,
    MappingNode,
    RecordedTuple,
    ShardedArray,
    flatten_state_dict,
    structure_for_items,
    unflatten_state_dict,
)
from savestream.planners.flattening import flatten
from savestream.planners.trees import leaf_names, merge_trees, prune_tree, tree_mappings
from savestream.planners.values import MAXIMUM_DEPTH

X = np.arange(3.0)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any = None


class Subclass(np.ndarray):
    pass


def names(state: Any) -> list[str]:
    return list(flatten_state_dict(state)[0])


def test_names_are_distinct_where_joined_keys_are_not() -> None:
    state = {"a/b": X, "a": {"b": X, "": X}, "a.b": X, "c\\d": X, "": X, "l": [X, (X,)], 1: X, "1": X}
    found, mappings = flatten_state_dict(state)
    assert len(found) == 10
    assert mappings["a.b"] == ("a", "b")
    assert mappings[r"a\.b"] == ("a.b",)
    assert mappings["l[1][0]"] == ("l", Index(1), Index(0))
    assert mappings["[int:1]"] == (1,)


def test_plain_subtrees_are_one_leaf() -> None:
    state = {"opt": {"lr": 0.1, "betas": (0.9, 0.99), "empty": {}}, "w": X, "none": None, "mixed": [1, X, []]}
    found, _ = flatten_state_dict(state)
    assert list(found) == ["opt", "w", "none", "mixed[0]", "mixed[1]", "mixed[2]"]
    assert found["opt"] is state["opt"]


def test_the_root_is_a_leaf_only_where_it_is_no_container() -> None:
    assert names({"a": {"b": 1}, "c": 2}) == ["a", "c"]
    assert names({}) == []
    assert names([1, {"a": 2}]) == ["[0]", "[1]"]
    assert flatten_state_dict(X) == ({"": X}, {"": ()})
    assert flatten_state_dict(3) == ({"": 3}, {"": ()})
    assert names({1, 2}) == [""]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"t": (X, None, {}, [], X), "nt": Pair(X, None), "dc": Record(X, [1])},
        collections.OrderedDict(z=X, a=X),
        collections.defaultdict(list, {"a": [X]}),
        collections.Counter({"a": 1, "b": X}),
        collections.deque([X, 1], 5),
        [X, [X, []], {}],
        (1, X),
        {0: {"m": X}, "0": {"m": X}, 1.5: X, None: X, (1, "a"): X, b"k": X},
        Pair({"x": X}, ()),
        X,
        {"s": {1, 2}, "f": frozenset("a"), "w": X},
    ],
    ids=lambda state: type(state).__name__,
)
def test_round_trip_through_the_tree(state: Any) -> None:
    flat = flatten(state)
    found, mappings = flatten_state_dict(state)
    assert mappings == tree_mappings(flat.tree())
    again = unflatten_state_dict(found, mappings, tree=flat.tree(), types=[Pair, Record])
    assert same(again, state)


def test_without_tree_paths_make_dicts_and_lists() -> None:
    state = {"a": {"b": [X, 1]}, 3: X}
    found, mappings = flatten_state_dict(state)
    again = unflatten_state_dict(found, mappings)
    assert list(again) == ["a", 3]
    assert again["a"]["b"][0] is X
    with pytest.raises(PlanError, match="no path"):
        unflatten_state_dict({"x": 1}, {})
    with pytest.raises(PlanError, match="list from 0"):
        unflatten_state_dict({"x": 1}, {"x": (Index(1),)})


def test_stand_ins_are_containers_too() -> None:
    tree = flatten({"p": Pair(X, 1)}).tree()
    stand_in = unflatten_state_dict({"p.a": X, "p.b": 1}, {}, tree=tree)["p"]
    assert isinstance(stand_in, RecordedTuple)
    assert flatten({"p": stand_in}).tree() == tree


@pytest.mark.parametrize("wrap", [lambda leaf: {"k": [leaf]}, lambda leaf: {"k": [leaf, X]}])
@pytest.mark.parametrize(
    "leaf",
    [object(), np.ma.array([1.0]), np.zeros(2).view(Subclass), collections.UserDict()],
    ids=lambda leaf: type(leaf).__name__,
)
def test_unsupported_leaves_are_refused_by_key(wrap: Any, leaf: Any) -> None:
    with pytest.raises(UnsafeObjectError, match=r"^k\[0\]: "):
        flatten(wrap(leaf))


def test_array_subclasses_are_refused_even_with_pickle() -> None:
    with pytest.raises(UnsafeObjectError, match=r"^k: numpy\.ma"):
        flatten({"k": np.ma.array([1.0])}, allow_pickle=True)
    assert flatten({"k": object()}, allow_pickle=True).names == ["k"]


def test_cycles_and_depth() -> None:
    cycle: dict[str, Any] = {"w": X}
    cycle["a"] = [cycle]
    with pytest.raises(PlanError, match=r"a\[0\]: builtins.dict contains itself"):
        flatten(cycle)
    shared = [X]
    assert flatten({"a": shared, "b": shared}).names == ["a[0]", "b[0]"]
    deep: Any = X
    for _ in range(MAXIMUM_DEPTH):
        deep = [deep]
    assert flatten(deep).tree() is not None
    with pytest.raises(PlanError, match="nested"):
        flatten([deep])


def test_a_state_that_changes_while_it_is_planned() -> None:
    state: dict[str, Any] = {"a": X, "b": X.copy()}
    flat = flatten(state)
    del state["b"]
    with pytest.raises(PlanError, match="changed while"):
        flat.tree()


def test_sharded_leaves() -> None:
    sharded = ShardedArray((4,), [((0,), np.zeros(2))])
    assert flatten({"w": sharded}).leaves == [sharded]


# --- trees ---


def tree_of(state: Any) -> Any:
    return flatten(state).tree()


def test_skipped_and_added_items() -> None:
    tree = tree_of({"a": {"x": X, "y": X}, "l": [X, X]})
    full = ["a.x", "a.y", "l[0]", "l[1]"]
    assert structure_for_items(tree, full) is tree
    skipped = structure_for_items(tree, ["a.y", "l[0]", "l[1]"])
    assert leaf_names(skipped) == ["a.y", "l[0]", "l[1]"]
    renamed = structure_for_items(tree, ["model.x", "a.y", "l[0]", "l[1]", "[int:3]"])
    assert tree_mappings(renamed)["model.x"] == ("model", "x")
    assert tree_mappings(renamed)["[int:3]"] == (3,)
    assert structure_for_items(None, ["a.b", "c"]) == MappingNode(
        "dict", ("a", "c"), (MappingNode("dict", ("b",), (LeafNode("a.b"),)), LeafNode("c"))
    )


@pytest.mark.parametrize("added", ["l[2]", "l.x", "a.x.z", "a", "", "[0]"])
def test_added_names_may_not_collide(added: str) -> None:
    tree = tree_of({"a": {"x": X, "y": X}, "l": [X, X]})
    with pytest.raises(PlanError, match="collides"):
        structure_for_items(tree, ["a.x", "a.y", "l[0]", "l[1]", added])


def test_skipping_an_element_of_a_sequence_is_refused() -> None:
    tree = tree_of({"a": X, "l": [X, X], "p": Pair(X, X)})
    with pytest.raises(PlanError, match=r"^l\[0\]: .*would shift"):
        structure_for_items(tree, ["a", "l[1]", "p.a", "p.b"])
    with pytest.raises(PlanError, match=r"^p\.b: "):
        structure_for_items(tree, ["a", "l[0]", "l[1]", "p.a"])


def test_selection_never_shifts_elements() -> None:
    tree = tree_of({"l": [X, X, X], "p": Pair(X, X), "o": X})
    pruned = prune_tree(tree, {"l[1]", "p.b"})
    mappings = tree_mappings(pruned)
    assert mappings == {"l[1]": ("l", 1), "p.b": ("p", "b")}
    assert prune_tree(tree, set()) == MappingNode("dict", (), ())


def test_trees_of_ranks_unite() -> None:
    first, second = tree_of({"a": {"x": X}, "l": [X]}), tree_of({"a": {"y": X}, "b": X, "l": [X]})
    merged = merge_trees([first, second])
    assert merged is not None
    assert leaf_names(merged) == ["a.x", "a.y", "l[0]", "b"]
    with pytest.raises(PlanError, match=r"^l: rank 1 holds a list of 2"):
        merge_trees([first, tree_of({"l": [X, X]})])
    with pytest.raises(PlanError, match=r"^a: rank 1 holds a leaf"):
        merge_trees([first, tree_of({"a": X})])
