"""Manifests of any shape come back whole and byte-stable; random bytes and random edits never get past the checks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savestream.arrays import dtype_itemsize
from savestream.errors import CorruptCheckpointError, SavestreamError
from savestream.pipeline.columns import decode_column, encode_column
from savestream.pipeline.coverage import Boxes, check_bounds, check_cover
from savestream.pipeline.limits import FormatViolation
from savestream.pipeline.manifest import (
    ChunkTable,
    Frames,
    IndexPart,
    ObjectEntry,
    PartEntry,
    PlanSection,
    Root,
    TensorTable,
    decode_part,
    decode_root,
    encode_part,
    encode_plan_section,
    encode_root,
)
from savestream.pipeline.strict_json import checked_json, nesting_depth, parse_json
from savestream.pipeline.tree_codec import decode_tree, encode_tree
from savestream.planners.paths import Index, path_to_fqn
from savestream.planners.structure import LeafNode, MappingNode, RecordNode, SequenceNode, StateTree

ID = "0123456789abcdef" * 2
EXAMPLE = Path(__file__).parents[2] / "examples" / "read_without_savestream.py"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    """The example that reads checkpoints without savestream."""
    spec = importlib.util.spec_from_file_location("read_without_savestream", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- strategies -------------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=6)  # lone surrogates included
plain_keys = st.one_of(
    texts,
    st.sampled_from(["a.b", "layers.0.weight", "a\\", "[0]", "$int", "]"]),
    st.integers(-(1 << 70), 1 << 70),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
)
keys = st.one_of(plain_keys, st.tuples(plain_keys, plain_keys))


def shapes_of_trees() -> st.SearchStrategy[Any]:
    """Trees without names: None for a leaf, else (kind, keys or None, children, extra)."""

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        items = st.lists(children, max_size=4)
        pairs = st.lists(st.tuples(keys, children), max_size=4, unique_by=lambda pair: pair[0])
        fields = st.lists(st.tuples(texts, children), max_size=4, unique_by=lambda pair: pair[0])
        extra = st.one_of(st.none(), st.sampled_from(["list", "int"]))
        return st.one_of(
            st.tuples(st.sampled_from(["dict", "OrderedDict", "Counter"]), pairs, st.none()),
            st.tuples(st.just("defaultdict"), pairs, extra),
            st.tuples(st.sampled_from(["list", "tuple"]), items, st.none()),
            st.tuples(st.just("deque"), items, st.one_of(st.none(), st.integers(4, 10))),
            st.tuples(st.sampled_from(["namedtuple", "dataclass"]), fields, texts),
        )

    return st.recursive(st.none(), containers, max_leaves=12)


def named(shape: Any, path: tuple[object, ...], names: list[str]) -> StateTree:
    if shape is None:
        names.append(path_to_fqn(path))
        return LeafNode(names[-1])
    kind, content, extra = shape
    if kind in ("list", "tuple", "deque"):
        items = tuple(named(child, (*path, Index(at)), names) for at, child in enumerate(content))
        return SequenceNode(kind, items, extra)
    parts = tuple(key for key, _ in content)
    children = tuple(named(child, (*path, key), names) for key, child in content)
    if kind in ("namedtuple", "dataclass"):
        return RecordNode(kind, extra, parts, children)
    return MappingNode(kind, parts, children, extra)


@st.composite
def trees(draw: st.DrawFn) -> tuple[StateTree, list[str], list[str]]:
    names: list[str] = []
    tree = named(draw(shapes_of_trees()), (), names)
    shuffled = draw(st.permutations(names))
    cut = draw(st.integers(0, len(names)))
    return tree, shuffled[:cut], shuffled[cut:]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Boxes that cover ``shape`` exactly once, by repeated cuts; in any order."""
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dimension]))
        low, high = list(sizes), list(sizes)
        low[dimension], high[dimension] = at, sizes[dimension] - at
        moved = list(offsets)
        moved[dimension] += at
        boxes += [(offsets, low), (moved, high)]
    return draw(st.permutations(boxes))


dtypes = st.sampled_from(["float32", "int8", "bfloat16", ">u4", "<M8[ns]", "<U3", "bool", "complex128"])
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def sections(draw: st.DrawFn) -> tuple[PlanSection, int]:
    """A section and the length of its raw stream."""
    tree, tensor_names, value_names = draw(trees())
    rows = []
    for _ in tensor_names:
        if draw(st.integers(0, 4)) == 0:
            size = draw(st.integers(0, 50))
            rows.append((draw(st.integers(1, 2)), "uint8", (size,), [([0], [size])]))
        else:
            shape = draw(shapes)
            rows.append((0, draw(dtypes), shape, draw(partitions(shape))))
    names = list(dict.fromkeys(row[1] for row in rows))
    boxes = [(dtype_itemsize(row[1]), box) for row in rows for box in row[3]]
    nbytes = np.array([math.prod(sizes) * itemsize for itemsize, (_, sizes) in boxes], np.int64)
    section = PlanSection(
        dtypes=names,
        tree=tree,
        tensors=TensorTable(
            kind=np.array([row[0] for row in rows], np.uint8),
            dtype=np.array([names.index(row[1]) for row in rows], np.uint32),
            ndim=np.array([len(row[2]) for row in rows], np.uint8),
            shape=np.array([size for row in rows for size in row[2]], np.int64),
            n_chunks=np.array([len(row[3]) for row in rows], np.uint32),
        ),
        chunks=ChunkTable(
            part=np.zeros(len(boxes), np.uint32),
            raw_offset=np.cumsum(nbytes) - nbytes,
            offsets=np.array([number for _, (offsets, _) in boxes for number in offsets], np.int64),
            sizes=np.array([number for _, (_, sizes) in boxes for number in sizes], np.int64),
        ),
        tensor_names=tensor_names,
        value_names=value_names,
    )
    return section, int(nbytes.sum())


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda children: st.one_of(st.lists(children, max_size=3), st.dictionaries(texts, children, max_size=3)),
    max_leaves=8,
)


@st.composite
def roots(draw: st.DrawFn) -> Root:
    section, raw_bytes = draw(sections())
    return Root(
        checkpoint_id=ID,
        created="2025-01-31T12:00:00Z",
        writer=draw(texts),
        plan=section,
        values=[draw(json_values) for _ in section.value_names],
        parts=[PartEntry(2, f"{ID}/r00002.index.json", draw(st.integers(0, 1000)), raw_bytes, "a" * 64)],
        step=draw(st.one_of(st.none(), st.integers(0, 1 << 40))),
        metrics=draw(st.one_of(st.none(), st.dictionaries(texts, json_values, max_size=2))),
        user=draw(json_values),
        world_size=3,
    )


@st.composite
def parts(draw: st.DrawFn) -> IndexPart:
    count = draw(st.one_of(st.integers(0, 5), st.integers(250, 300)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    raw = random.integers(0, 1 << 22, count)
    stored = random.integers(0, raw + 1)
    codec = random.integers(0, 2, count).astype(np.uint8)
    stored[codec == 0] = raw[codec == 0]
    frames = Frames(
        raw_length=raw,
        object=random.integers(0, 2, count).astype(np.uint32),
        offset=random.integers(0, 1 << 20, count),
        stored_length=stored,
        codec=codec,
        itemsize=random.integers(1, 1 << 32, count).astype(np.uint32),
        stored_digest=random.integers(0, 256, (count, 16), np.uint8),
        raw_digest=random.integers(0, 256, (count, 16), np.uint8),
    )
    objects = [ObjectEntry(f"{ID}/r00000-000{number}.bin", 1 << 23) for number in range(2)]
    return IndexPart(ID, draw(st.integers(0, 100)), draw(st.lists(json_values, max_size=3)), objects, frames)


def encoded(root: Root) -> bytes:
    return encode_root(root, encode_plan_section(root.plan))


def columns_of(table: object, kind: type) -> dict[str, np.ndarray]:
    return {name: getattr(table, name) for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


# --- round trips ------------------------------------------------------------------------------------------


@given(trees())
def test_trees_come_back(content: tuple[StateTree, list[str], list[str]]) -> None:
    tree, tensors, values = content
    text = encode_tree(tree, tensors, values)
    found, tensor_names, value_names = decode_tree(parse_json(text.encode("ascii")))
    assert (tensor_names, value_names) == (tensors, values)
    assert repr(found) == repr(tree)  # tells 1, 1.0 and True apart, and -0.0 from 0.0


@settings(max_examples=60)
@given(roots())
def test_roots_come_back_and_are_byte_stable(root: Root) -> None:
    data = encoded(root)
    back = decode_root(data)
    assert encoded(back) == data
    assert (back.values, back.metrics, back.user, back.step) == (root.values, root.metrics, root.user, root.step)
    assert back.plan.tensor_names == root.plan.tensor_names
    for name, kind in (("tensors", TensorTable), ("chunks", ChunkTable)):
        for column, expected in columns_of(getattr(root.plan, name), kind).items():
            np.testing.assert_array_equal(getattr(getattr(back.plan, name), column), expected)


@settings(max_examples=60)
@given(parts())
def test_parts_come_back_and_are_byte_stable(part: IndexPart) -> None:
    data = encode_part(part)
    back = decode_part(data, path="part")
    assert encode_part(back) == data
    for name, expected in columns_of(part.frames, Frames).items():
        np.testing.assert_array_equal(getattr(back.frames, name), expected)


@given(json_values)
def test_json_comes_back_and_its_depth_is_known(value: Any) -> None:
    def depth(node: Any) -> int:
        if isinstance(node, list | dict):
            return 1 + max(map(depth, node.values() if isinstance(node, dict) else node), default=0)
        return 0

    text = checked_json(value).encode("ascii")
    assert parse_json(text) == value
    assert nesting_depth(text) == depth(value)


# --- the cover proof against counting ---------------------------------------------------------------------


@st.composite
def boxes_that_may_lie(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[list[int], list[int]]]]:
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    boxes = draw(partitions(shape))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets = [draw(st.integers(0, size)) for size in shape]
        sizes = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
        boxes[at] = (offsets, sizes)
    return shape, boxes


@settings(max_examples=100)
@given(boxes_that_may_lie())
def test_a_cover_is_accepted_exactly_when_it_is_one(
    content: tuple[tuple[int, ...], list[tuple[list[int], list[int]]]],
) -> None:
    shape, chunks = content
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in chunks:
        counts[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))] += 1
    rows = [([0] * len(shape), list(shape)), *chunks]  # the first array is covered for certain
    boxes = Boxes(
        shapes=np.array([shape, shape], np.int64).reshape(2, len(shape)),
        owners=np.array([0] + [1] * len(chunks), np.int64),
        offsets=np.array([row[0] for row in rows], np.int64).reshape(len(rows), len(shape)),
        sizes=np.array([row[1] for row in rows], np.int64).reshape(len(rows), len(shape)),
        name=str,
    )
    check_bounds(boxes, np.array([4, 4]))
    if np.all(counts == 1):
        check_cover(boxes)
    else:
        with pytest.raises(FormatViolation, match=r"^1: "):
            check_cover(boxes)


# --- hostile input ----------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for head in (b"", b'{"format":"savestream","version":[1,0],"requires":[],'):
        body = head + data
        seal = f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode()
        for content in (body, body + seal):
            with pytest.raises(CorruptCheckpointError):
                decode_root(content)
    with pytest.raises(CorruptCheckpointError):
        decode_part(b'{"format":"savestream-index","version":[1,0],"requires":[],' + data, path="part")


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in items for place in places(child, (*path, key)))]


wild_values = st.one_of(
    json_values, st.integers(-5, 5), st.sampled_from([1 << 62, (1 << 63) - 1, [], {"t": 0}, "../x", "x" * 64])
)


@settings(max_examples=100, deadline=None)
@given(root=roots(), data=st.data())
def test_a_root_with_one_changed_member_is_refused_or_consistent(root: Root, data: st.DataObject) -> None:
    members = json.loads(encoded(root))
    del members["sha256"]
    place = data.draw(st.sampled_from(places(members)[1:]))
    holder = members
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(wild_values)
    body = json.dumps(members, separators=(",", ":")).encode()[:-1]
    sealed = body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode()
    with contextlib.suppress(SavestreamError):
        back = decode_root(sealed)
        # What was accepted is something that the writer would write, and stays within its bounds.
        same = Root(**{**members_of(back), "version": (1, 0)})
        again = decode_root(encode_root(same, encode_plan_section(back.plan)))
        assert again.plan.tensor_names == back.plan.tensor_names
        ends = back.plan.chunks.raw_offset + back.plan.chunk_bytes
        assert all(end <= back.parts[part].raw_bytes for end, part in zip(ends, back.plan.chunks.part, strict=True))


def members_of(root: Root) -> dict[str, Any]:
    return {name: getattr(root, name) for name in Root.__struct_fields__}


# --- the example reader agrees ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(roots())
def test_the_example_reads_roots(reader: ModuleType, root: Root) -> None:
    members = reader.parse_root(encoded(root))
    assert members["parts"] == [{name: getattr(part, name) for name in part.__struct_fields__} for part in root.parts]
    for name, kind in (("tensors", TensorTable), ("chunks", ChunkTable)):
        for column, expected in columns_of(getattr(root.plan, name), kind).items():
            np.testing.assert_array_equal(reader.column(members[name][column]), expected)
    built = reader.build(members["tree"], lambda number: ("t", number), lambda number: ("v", number))
    leaves = {("t", number): name for number, name in enumerate(root.plan.tensor_names)}
    leaves |= {("v", number): name for number, name in enumerate(root.plan.value_names)}
    compare(built, root.plan.tree, leaves)


def compare(built: Any, node: StateTree, leaves: dict[tuple[str, int], str]) -> None:
    if isinstance(node, LeafNode):
        assert leaves[built] == node.fqn
        return
    if isinstance(node, MappingNode):
        assert type(built).__name__ == node.kind
        assert repr(list(built)) == repr(list(node.keys))
    elif isinstance(node, SequenceNode):
        assert type(built).__name__ == node.kind
    else:
        assert type(built) is (tuple if node.kind == "namedtuple" else dict)
    children = list(built.values()) if isinstance(built, dict) else list(built)
    assert len(children) == len(node.children)
    for child, expected in zip(children, node.children, strict=True):
        compare(child, expected, leaves)


@settings(max_examples=30)
@given(parts())
def test_the_example_reads_parts(reader: ModuleType, part: IndexPart) -> None:
    data = encode_part(part)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "path": "part", "rank": part.rank}
    members = reader.parse_part(data, entry)
    frames = members["frames"]
    for name, expected in columns_of(part.frames, Frames).items():
        if name.endswith("digest"):
            assert reader.digests(frames[name]) == [bytes(row) for row in expected]
        else:
            np.testing.assert_array_equal(reader.column(frames[name]), expected)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=0, max_size=600))
def test_columns_come_back_everywhere(reader: ModuleType, values: list[int]) -> None:
    parsed = json.loads(encode_column(np.array(values, np.int64), "<i8"))
    assert decode_column(parsed, "<i8", len(values)).tolist() == values
    assert reader.column(parsed).tolist() == values
