"""The metadata of modules' state dicts: merged from ranks, checked when it is read."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from planner_support import load, save

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.pipeline.limits import FormatViolation
from savestream.pipeline.tree_codec import decode_tree, encode_tree
from savestream.planners.rebuilding import rebuild_from_tree
from savestream.planners.state_metadata import merge_metadata, metadata_text
from savestream.planners.structure import LeafNode, MappingNode
from savestream.planners.trees import merge_trees


def module_state(metadata: Any, **entries: Any) -> collections.OrderedDict[str, Any]:
    found: Any = collections.OrderedDict(entries)
    if metadata is not None:
        found._metadata = metadata
    return found


def test_ranks_with_different_modules_are_merged() -> None:
    first = module_state(collections.OrderedDict({"": {"version": 1}, "a": {"version": 2}}), a=np.ones(2))
    second = module_state(collections.OrderedDict({"": {"version": 9}, "b": {"version": 3}}), b=np.zeros(1))
    found = load(save({"model": first}, {"model": second}))["model"]
    assert list(found) == ["a", "b"]
    assert found._metadata == {"": {"version": 1}, "a": {"version": 2}, "b": {"version": 3}}


def test_one_rank_without() -> None:
    text = metadata_text(module_state({"": 1}), "k")
    assert text is not None
    assert merge_metadata(None, text) == merge_metadata(text, None) == merge_metadata(text, text) == text
    assert merge_metadata(None, None) is None
    assert merge_metadata("[1]", text) == "[1]"


def test_other_extras_still_have_to_agree() -> None:
    nodes = [MappingNode("defaultdict", ("a",), (LeafNode("a"),), factory) for factory in ("list", "int")]
    with pytest.raises(PlanError):
        merge_trees(nodes)


def test_it_passes_through_the_tree_codec() -> None:
    import json

    node = MappingNode("OrderedDict", ("w",), (LeafNode("w"),), metadata_text(module_state({"é": 1.0, 3: (1,)}), "k"))
    text = encode_tree(node, ["w"], [])
    assert text.isascii()
    tree = decode_tree(json.loads(text))[0]
    found = rebuild_from_tree(tree, {"w": 1})
    assert found._metadata == {"é": 1.0, 3: (1,)}
    assert encode_tree(tree, ["w"], []) == text


@pytest.mark.parametrize("metadata", [{"$tuple": 3}, {"$eval": "1"}, [{"$object": ["random.Random", 1]}]])
def test_damaged_metadata_is_refused(metadata: Any) -> None:
    with pytest.raises((CorruptCheckpointError, FormatViolation), match="metadata of 'model'"):
        decode_tree({"dict": [["model", {"OrderedDict": [["w", {"t": 0}]], "metadata": metadata}]]})
