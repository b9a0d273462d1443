"""Roots: round trips, the seal, versions, and what the writer refuses."""

from __future__ import annotations

import json
import pickle
import threading

import msgspec
import numpy as np
import pytest
from manifest_samples import (
    ID,
    compact,
    edited_root,
    encoded,
    flat_tree,
    leaf,
    resealed,
    sealed,
    section_of,
    small_root,
    small_section,
)

from savestream.errors import CorruptCheckpointError, PlanError, UnsupportedFormatError
from savestream.pipeline import manifest
from savestream.pipeline.manifest import (
    MAXIMUM_DEPTH,
    PartEntry,
    decode_root,
    encode_plan_section,
    encode_root,
    root_header,
)
from savestream.pipeline.tree_codec import decode_tree, encode_tree
from savestream.planners.paths import Index, path_to_fqn
from savestream.planners.structure import LeafNode, MappingNode, RecordNode, SequenceNode, StateTree


def test_a_root_comes_back_whole() -> None:
    root = small_root()
    back = decode_root(encoded(root))
    for name in root.__struct_fields__:
        if name != "plan":
            expected = getattr(root, name)
            found = getattr(back, name)
            assert (tuple(found) if isinstance(expected, tuple) else found) == expected, name
    assert back.plan.tree == root.plan.tree
    assert back.plan.dtypes == ["float32", "int64", "uint8"]
    assert back.plan.tensor_names == root.plan.tensor_names
    assert back.plan.value_names == root.plan.value_names
    for table in ("tensors", "chunks"):
        for name, column in vars(getattr(root.plan, table)).items():
            if isinstance(column, np.ndarray) and not name.endswith(("starts", "owners")):
                found = getattr(getattr(back.plan, table), name)
                assert found.dtype == column.dtype
                np.testing.assert_array_equal(found, column)


def test_encoding_what_was_decoded_gives_the_same_bytes() -> None:
    data = encoded(small_root())
    assert encoded(decode_root(data)) == data


def test_the_plan_section_stands_in_the_root_verbatim() -> None:
    root = small_root()
    section = encode_plan_section(root.plan)
    assert section in encode_root(root, section)
    # A plan cache holds only the encoded section.
    without_plan = small_root(plan=manifest.NO_PLAN)
    assert encode_root(without_plan, section) == encode_root(root, section)


def test_values_that_are_encoded_already() -> None:
    values = [{"ü": [1e-7, 1 << 60]}, 3]
    raw = [msgspec.Raw(msgspec.json.encode(values[0])), 3]
    assert encoded(small_root(values=raw)) == encoded(small_root(values=values))
    for broken in (b"1,2", b"", b"[", b'{"a":1,"a":2}', b"NaN", b"\xff"):
        with pytest.raises(PlanError, match="values"):
            encoded(small_root(values=[msgspec.Raw(broken), 3]))


def test_derived_columns() -> None:
    plan = small_section()
    assert plan.tensors.shape_starts.tolist() == [0, 2, 2, 2, 3]
    assert plan.tensors.chunk_starts.tolist() == [0, 2, 3, 4, 5]
    assert plan.tensors.chunk_owners.tolist() == [0, 0, 1, 2, 3]
    assert plan.tensors.box_starts.tolist() == [0, 2, 4, 4, 4, 5]
    assert plan.chunk_bytes.tolist() == [32, 64, 8, 8, 7]
    assert plan.itemsizes.tolist() == [4, 8, 8, 1]


def test_an_empty_state() -> None:
    root = small_root(plan=section_of([]), values=[], parts=[])
    back = decode_root(encoded(root))
    assert back.plan.tree == MappingNode("dict", (), ())
    assert len(back.plan.tensors) == len(back.plan.chunks) == 0


def test_the_members_stand_in_the_documented_order() -> None:
    names = list(json.loads(encoded(small_root())))
    head = ["format", "version", "requires", "checkpoint_id", "created", "writer", "step", "metrics", "user"]
    middle = ["world_size", "fingerprint", "digest", "codecs", "depends_on"]
    assert names == [*head, *middle, "dtypes", "tree", "tensors", "chunks", "values", "parts", "sha256"]


# --- damage -----------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed() -> None:
    data = encoded(small_root())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                decode_root(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    data = encoded(small_root())
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_root(data[:length])
    with pytest.raises(CorruptCheckpointError):
        decode_root(data + b"\n")


def test_a_pickle_is_refused_and_not_loaded() -> None:
    fired = []

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (fired.append, (1,))

    with pytest.raises(CorruptCheckpointError, match="not a savestream file"):
        decode_root(pickle.dumps(Bomb()))
    assert not fired


def test_a_part_is_no_root() -> None:
    with pytest.raises(CorruptCheckpointError, match="not a savestream file"):
        decode_root(edited_root(lambda members: members.update(format="savestream-index")))


# --- versions ---------------------------------------------------------------------------------------------


def test_a_newer_major_version_is_refused_by_name_whatever_else_it_holds() -> None:
    body = b'{"format":"savestream","version":[2,3],"requires":[],"everything":"else"'
    short = b'{"format":"savestream","version":[2,3],"requires":[]}'
    for data in (sealed(body), body + b',"signed":"differently"}', short):
        with pytest.raises(UnsupportedFormatError, match=r"2\.3"):
            decode_root(data)
        assert root_header(data).version == (2, 3)


def test_damage_to_the_version_is_damage() -> None:
    data = encoded(small_root()).replace(b'"version":[1,0]', b'"version":[3,0]')
    with pytest.raises(CorruptCheckpointError, match="SHA-256"):
        decode_root(data)


def test_an_unknown_required_feature_is_refused_by_name() -> None:
    def require(members: dict[str, object]) -> None:
        members["requires"] = ["sparse-chunks", "Codec 3"]
        del members["tensors"]

    with pytest.raises(UnsupportedFormatError, match="sparse-chunks, Codec 3"):
        decode_root(edited_root(require))


def test_a_newer_minor_version_and_unknown_members_are_read() -> None:
    def extend(members: dict[str, object]) -> None:
        members["version"] = [1, 9]
        members["hints"] = {"anything": [1, 2, 3]}
        members["codecs"] = ["raw", "zstd", "planes-zstd", "lz77"]

    back = decode_root(edited_root(extend))
    assert back.version == (1, 9)
    assert back.plan.tensor_names == ["t0", "t1", "t2", "t3"]


def test_the_header_can_be_read_from_the_first_bytes() -> None:
    assert root_header(encoded(small_root())[:200]).version == (1, 0)
    with pytest.raises(CorruptCheckpointError):
        root_header(b'{"format":"savestream","version":[1,')


def test_unknown_digests_are_unsupported() -> None:
    with pytest.raises(UnsupportedFormatError, match="blake9"):
        decode_root(edited_root(lambda members: members.update(digest="blake9")))


# --- trees ------------------------------------------------------------------------------------------------


def record(path: tuple[object, ...], kind: str) -> RecordNode:
    return RecordNode(kind, "pkg.mod:Outer.Point", ("x", "y"), (leaf(*path, "x"), leaf(*path, "y")))


def all_kinds() -> StateTree:
    keys = ("plain", "a.b", "a\\b[0]", "", "ü\u2028", "\ud800", 3, True, None, 0.5, (1, "x"), b"\x00]")
    odd = MappingNode("dict", keys, tuple(leaf("odd", key) for key in keys))
    factory = MappingNode("defaultdict", ("k",), (leaf("default", "k"),), "list")
    deque = SequenceNode("deque", (leaf("deque", Index(0)), leaf("deque", Index(1))), 5)
    children = {
        "odd": odd,
        "ordered": MappingNode("OrderedDict", ("k",), (leaf("ordered", "k"),)),
        "default": factory,
        "factoryless": MappingNode("defaultdict", (), ()),
        "counter": MappingNode("Counter", ("k",), (leaf("counter", "k"),)),
        "list": SequenceNode("list", (leaf("list", Index(0)), SequenceNode("tuple", ()))),
        "tuple": SequenceNode("tuple", (leaf("tuple", Index(0)),)),
        "deque": deque,
        "endless": SequenceNode("deque", ()),
        "point": record(("point",), "namedtuple"),
        "data": record(("data",), "dataclass"),
    }
    return MappingNode("dict", tuple(children), tuple(children.values()))


def leaf_names(node: StateTree) -> list[str]:
    return [node.fqn] if isinstance(node, LeafNode) else [name for child in node.children for name in leaf_names(child)]


def test_every_kind_of_node_and_key_comes_back() -> None:
    tree = all_kinds()
    names = leaf_names(tree)
    tensors, values = names[::2], names[1::2][::-1]
    text = encode_tree(tree, tensors, values)
    assert text.isascii()
    assert decode_tree(json.loads(text)) == (tree, tensors, values)


def test_a_state_that_is_one_leaf() -> None:
    assert encode_tree(LeafNode(""), [""], []) == '{"t":0}'
    assert decode_tree({"t": 0}) == (LeafNode(""), [""], [])


@pytest.mark.parametrize(
    ("tree", "tensors", "message"),
    [
        (flat_tree(["a"]), ["b"], "neither"),
        (flat_tree(["a"]), ["a", "b"], "'b' is no leaf"),
        (flat_tree(["a"]), ["a", "a"], "same name"),
        (MappingNode("dict", ("a",), (LeafNode("b"),)), ["b"], "its path is 'a'"),
        (MappingNode("dict", ("a", "a"), (leaf("a"), leaf("a"))), ["a"], "same key twice"),
        (MappingNode("dict", ("a", "b"), (leaf("a"),)), ["a"], "2 keys for 1"),
        (MappingNode("set", ("a",), (leaf("a"),)), ["a"], "unknown kind 'set'"),
        (MappingNode("dict", ([],), (leaf("a"),)), ["a"], "no mapping can hold"),
    ],
)
def test_the_writer_refuses_trees_that_do_not_tell_the_names(tree: StateTree, tensors: list[str], message: str) -> None:
    section = section_of([(0, "int8", (), [(0, (), ())])] * len(tensors), tree=tree)
    section = manifest.PlanSection(section.dtypes, tree, section.tensors, section.chunks, tensors, [])
    with pytest.raises(PlanError, match=message):
        encode_plan_section(section)


def nested(depth: int) -> tuple[StateTree, str]:
    name = path_to_fqn(("k",) * depth)
    node: StateTree = LeafNode(name)
    for _ in range(depth):
        node = MappingNode("dict", ("k",), (node,))
    return node, name


def test_the_deepest_tree_and_one_deeper() -> None:
    tree, name = nested(MAXIMUM_DEPTH)
    plan = manifest.PlanSection(["int8"], tree, *tables_of_one(), [name], [])
    root = small_root(plan=plan, values=[])
    assert decode_root(encoded(root)).plan.tensor_names == [name]
    deeper, name = nested(MAXIMUM_DEPTH + 1)
    with pytest.raises(PlanError, match="128 deep"):
        encode_plan_section(manifest.PlanSection(["int8"], deeper, *tables_of_one(), [name], []))


def tables_of_one() -> tuple[manifest.TensorTable, manifest.ChunkTable]:
    section = section_of([(0, "int8", (), [(0, (), ())])])
    return section.tensors, section.chunks


# --- what the writer refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_id": "x"}, "checkpoint_id"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2025-01-31T12:00:00+02:00"}, "created"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"metrics": [1]}, "metrics"),
        ({"metrics": {"loss": float("nan")}}, "metrics"),
        ({"metrics": {1: 2}}, "metrics.*strings as keys"),
        ({"user": (1, 2)}, "user"),
        ({"user": object()}, "user"),
        ({"values": [1]}, "1 values where the tree has 2"),
        ({"values": [1, {1: 2, "1": 3}]}, "values"),
        ({"world_size": 0}, "world_size"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"version": (1, 1)}, "version"),
        ({"requires": ("x",)}, "feature"),
        ({"codecs": ("zstd", "raw")}, "codecs"),
        ({"depends_on": ("x",)}, "depends_on"),
        ({"parts": []}, "'t0': a chunk lies outside"),
        ({"parts": [PartEntry(0, f"{ID}/r00000.index.json", 500, 110, "0" * 64)]}, "'t3': a chunk lies outside"),
        ({"parts": [PartEntry(0, "../r00000.index.json", 500, 111, "0" * 64)]}, "path"),
        ({"parts": [PartEntry(0, f"{ID}/r00000.index.json", 500, 111, "0")]}, "sha256"),
        ({"parts": [PartEntry(0, f"{ID}/r00000.index.json", 1 << 31, 111, "0" * 64)]}, "too large"),
    ],
)
def test_the_writer_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        encoded(small_root(**changes))


def test_values_that_nest_too_deeply() -> None:
    value: object = 1
    for _ in range(600):
        value = [value]
    with pytest.raises(PlanError, match="deep"):
        encoded(small_root(values=[1, value]))
    for _ in range(100_000):
        value = [value]
    with pytest.raises(PlanError):
        encoded(small_root(user=value))
    while isinstance(value, list):  # freed level by level
        value = value.pop()


def test_a_root_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(small_root())
    monkeypatch.setattr(manifest, "MAXIMUM_ROOT_BYTES", len(data) - 1)
    with pytest.raises(PlanError, match="more than"):
        encoded(small_root())
    with pytest.raises(CorruptCheckpointError, match="more than"):
        decode_root(data)
    monkeypatch.setattr(manifest, "MAXIMUM_ROOT_BYTES", len(data))
    assert encoded(decode_root(data)) == data


def test_the_deepest_value_is_read_in_a_worker_thread() -> None:
    value: object = {"k": 1}
    for _ in range(MAXIMUM_DEPTH - 1):
        value = {"$defaultdict": [None, [["k", value]]]}
    data = encoded(small_root(values=[1, value]))
    found: list[object] = []
    worker = threading.Thread(target=lambda: found.append(decode_root(data).values[1]))
    worker.start()
    worker.join()
    assert found == [value]


def test_whitespace_and_order_are_free_after_the_head() -> None:
    members = json.loads(encoded(small_root()))
    head = [members.pop(name) for name in ("format", "version", "requires")]
    del members["sha256"]
    rest = json.dumps(dict(reversed(members.items())), indent=1)[1:-1]
    body = compact({"format": head[0], "version": head[1], "requires": head[2]})[:-1] + b"," + rest.encode()
    assert encoded(decode_root(sealed(body))) == encoded(small_root())
    assert decode_root(resealed(json.loads(encoded(small_root())))).step == 7
