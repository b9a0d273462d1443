"""Parts of the storage for torch.distributed.checkpoint by themselves: trees from paths, targets, places, results."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from savestream.errors import CorruptCheckpointError, PlanError, UnsafeObjectError, UnsupportedFormatError
from savestream.integrations.dcp.destination import Destination
from savestream.integrations.dcp.extras import MEMBER, Extras, decode_extras, encode_extras
from savestream.integrations.dcp.nesting import flat_tree, nested_tree, tree_paths
from savestream.integrations.dcp.targets import Target, rounds
from savestream.pipeline.limits import MAXIMUM_DEPTH
from savestream.planners.trees import tree_mappings
from savestream.storage_backends.memory import MemoryBackend

# --- trees ------------------------------------------------------------------------------------------------

PARTS = st.one_of(st.text(max_size=4), st.integers(0, 3))
PATHS = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(tuple), max_size=12)


def _is_tree(paths: list[tuple[Any, ...]]) -> bool:
    """Whether no path leads to or into another, and each container has keys of one kind."""
    kinds: dict[tuple[Any, ...], set[type]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            kinds.setdefault(path[:depth], set()).add(type(part))
    leaves = set(paths)
    clash = any(path[:depth] in leaves for path in paths for depth in range(1, len(path)))
    return len(leaves) == len(paths) and not clash and all(len(found) == 1 for found in kinds.values())


@given(PATHS)
def test_paths_come_back_from_the_tree_that_they_make(paths: list[tuple[Any, ...]]) -> None:
    made = nested_tree(paths)
    assert (made is not None) == _is_tree(paths)
    if made is not None:
        tree, names = made
        found = tree_paths(tree_mappings(tree))
        assert [found[name] for name in names] == paths
        assert len(found) == len(paths)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), None],
        [("a",), ()],
        [("a", 1.5)],
        [("a", True)],
        [["a"]],
        [tuple("x" * (MAXIMUM_DEPTH + 1))],
    ],
)
def test_what_is_no_path_makes_no_tree(paths: list[Any]) -> None:
    assert nested_tree(paths) is None


def test_names_alone_make_a_flat_tree() -> None:
    tree, names = flat_tree(["a.b", "", "[0]"])
    assert list(tree_mappings(tree).values()) == [("a.b",), ("",), ("[0]",)]
    assert list(tree_mappings(tree)) == names


# --- what is kept for torch -------------------------------------------------------------------------------

EXTRAS = Extras("1.0.0", True, False, {"a.b": ("a", 0, "b"), "n": [1, None, 2.5, b"x", {3: True}]}, [0, 2])


def test_extras_come_back() -> None:
    found = decode_extras(encode_extras(EXTRAS), "here")
    assert found == EXTRAS
    assert type(found.planner_data["a.b"]) is tuple
    assert decode_extras(None, "here") is None
    assert decode_extras({"mine": 1}, "here") is None


@pytest.mark.parametrize("data", [object(), {1: [torch.float32]}, [torch.ones(1)], {("x", torch.Size([1])): 1}, {2, 3}])
def test_planner_data_that_would_need_code_are_refused(data: Any) -> None:
    with pytest.raises(UnsafeObjectError, match="planner_data"):
        encode_extras(Extras(None, True, False, data, []))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"nested": "yes"},
        {"paths_from_tree": None},
        {"requires_grad": ["x"]},
        {"requires_grad": 5},
        {"format": "1"},
    ],
)
def test_extras_that_lie_are_refused(change: dict[str, Any]) -> None:
    encoded: Any = encode_extras(EXTRAS)
    encoded[MEMBER].update(change)
    with pytest.raises(CorruptCheckpointError, match="not as savestream writes it"):
        decode_extras(encoded, "here")
    del encoded[MEMBER]["nested"]
    with pytest.raises(CorruptCheckpointError, match="not as savestream writes it"):
        decode_extras(encoded, "here")


def test_extras_of_a_newer_savestream_are_refused() -> None:
    encoded: Any = encode_extras(EXTRAS)
    encoded[MEMBER]["format"] = 2
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        decode_extras(encoded, "here")
    with pytest.raises(CorruptCheckpointError, match="not as savestream writes it"):
        decode_extras({MEMBER: [1]}, "here")


# --- targets ----------------------------------------------------------------------------------------------


def _target(name: str, tensor: torch.Tensor) -> Target:
    item = SimpleNamespace(dest_index=SimpleNamespace(fqn=name))
    return Target(item, tensor, None, None, False)  # type: ignore[arg-type]  # neither is looked at


def test_targets_that_share_memory_are_filled_one_after_the_other() -> None:
    memory, apart, empty = torch.zeros(10), torch.zeros(10), torch.zeros(0)
    targets = [
        _target("a", memory),
        _target("apart", apart),
        _target("b", memory[2:4]),
        _target("c", memory),
        _target("d", memory[6:]),
        _target("empty", empty),
    ]
    found = [[target.item.dest_index.fqn for target in group] for group in rounds(targets)]
    assert found == [["a", "apart", "empty"], ["b"], ["c"], ["d"]]


def test_parts_of_one_tensor_are_filled_together() -> None:
    whole, other = torch.zeros(4, 6), torch.zeros(4, 6)
    targets = [_target("a", whole[:, :3]), _target("a", whole[:, 3:]), _target("b", other), _target("c", other.t())]
    found = [[target.item.dest_index.fqn for target in group] for group in rounds(targets)]
    assert found == [["a", "a", "b"], ["c"]]


# --- places -----------------------------------------------------------------------------------------------


def test_each_thread_has_the_place_that_it_set(tmp_path: Path) -> None:
    destination = Destination(tmp_path / "first")
    found: dict[str, str | None] = {}
    both_set = threading.Barrier(2, timeout=30)

    def work(name: str) -> None:
        destination.reset(tmp_path / name)
        both_set.wait()
        found[name] = destination.text

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    destination.reset(tmp_path / "c")
    late: list[str | None] = []
    other = threading.Thread(target=lambda: late.append(destination.text))
    other.start()
    other.join()
    assert late == [str(tmp_path / "c")]  # a thread that set none takes what was set last


def test_places_that_are_none_are_refused(tmp_path: Path) -> None:
    for place in ("", "nowhere://x", 5):
        with pytest.raises(PlanError):
            Destination(place)  # type: ignore[arg-type]
    destination = Destination((MemoryBackend("m"), "a/b"))
    with pytest.raises(PlanError):
        destination.reset("nowhere://x")
    with pytest.raises(PlanError):
        destination.reset("../x")
    assert destination.text == "memory://m/a/b"
    destination.reset("c")
    assert destination.text == "memory://m/c"
    destination.reset(f"file://{tmp_path}")
    assert destination.text == f"file://{tmp_path}"
