"""Roots with a right hash and wrong content: refused with the place named, and without allocating for a claim."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from manifest_samples import ID, edited_root, encoded, sealed, section_of, small_root, small_section

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.pipeline.manifest import (
    ChunkTable,
    PartEntry,
    PlanSection,
    TensorTable,
    decode_root,
    encode_plan_section,
)

Change = Callable[[dict[str, Any]], object]


def put(*path: Any) -> Change:
    """Set the member at all but the last of ``path`` to the last."""

    def change(members: Any) -> None:
        for step in path[:-2]:
            members = members[step]
        members[path[-2]] = path[-1]

    return change


def drop(*path: Any) -> Change:
    def change(members: Any) -> None:
        for step in path[:-1]:
            members = members[step]
        del members[path[-1]]

    return change


def claimed(kind: str, count: int) -> dict[str, object]:
    frame = zstandard.ZstdCompressor().compress(b"")
    return {"type": kind, "count": count, "zstd_b64": base64.b64encode(frame).decode()}


def tree_bomb(members: dict[str, Any]) -> None:
    members["tree"] = {"list": [{"t": number} for number in range(4)] + [{"v": 0}, {"v": 1}]}
    members["tensors"]["n_chunks"] = [2**32 - 1] * 4
    members["chunks"]["part"] = claimed("<u4", 4 * (2**32 - 1))


def many_chunks(members: dict[str, Any]) -> None:
    members["tensors"]["n_chunks"] = [1 << 24, 0, 0, 0]
    members["chunks"]["part"] = claimed("<u4", 1 << 24)


HEAD_AND_SEAL = ("format", "version", "requires", "sha256")
PARTS = f"{ID}/r00000.index.json"

LIES: dict[str, tuple[Change, str]] = {
    # members
    **{f"no {name}": (drop(name), name) for name in json.loads(encoded(small_root())) if name not in HEAD_AND_SEAL},
    "no version": (drop("version"), "not a savestream file"),
    "no requires": (drop("requires"), "not a savestream file"),
    "version as text": (put("version", "1.0"), "not a savestream file"),
    "negative version": (put("version", [-1, 0]), "not a savestream file"),
    "requires as an object": (put("requires", {}), "not a savestream file"),
    "checkpoint_id in capitals": (put("checkpoint_id", "ABCDEF0123456789" * 2), "checkpoint_id"),
    "checkpoint_id as a path": (put("checkpoint_id", "../" + "a" * 29), "checkpoint_id"),
    "created as a number": (put("created", 5), "created"),
    "world_size as text": (put("world_size", "1"), "world_size"),
    "world_size as a bool": (put("world_size", True), "world_size"),
    "world_size 0": (put("world_size", 0), "world_size"),
    "step as a float": (put("step", 1.0), "step"),
    "negative step": (put("step", -5), "step"),
    "metrics as a list": (put("metrics", []), "metrics"),
    "writer as a list": (put("writer", []), "writer"),
    "other codecs": (put("codecs", ["zstd", "raw"]), "codecs"),
    "codecs as text": (put("codecs", "raw"), "codecs"),
    "depends_on as a path": (put("depends_on", ["../x"]), "depends_on"),
    # parts
    "parts as an object": (put("parts", {}), "parts"),
    "part as a list": (put("parts", 0, []), "missing"),
    "part without sha256": (drop("parts", 0, "sha256"), "sha256"),
    "no parts": (put("parts", []), "'t0': a chunk lies outside"),
    "part twice": (lambda members: members["parts"].append(members["parts"][0]), "rank 0 has two parts"),
    "rank beyond world_size": (put("parts", 0, "rank", 1), "world_size"),
    "negative rank": (put("parts", 0, "rank", -1), "world_size"),
    "path upwards": (put("parts", 0, "path", "../../x"), "path"),
    "path up from the id": (put("parts", 0, "path", f"{ID}/../r00000.index.json"), "path"),
    "absolute path": (put("parts", 0, "path", f"/{PARTS}"), "path"),
    "path in another checkpoint": (put("parts", 0, "path", "f" * 32 + "/r00000.index.json"), "path"),
    "path of another rank": (put("parts", 0, "path", f"{ID}/r00001.index.json"), "path"),
    "path of a data object": (put("parts", 0, "path", f"{ID}/r00000-0000.bin"), "path"),
    "path with a newline": (put("parts", 0, "path", PARTS + "\n"), "path"),
    "path with a NUL": (put("parts", 0, "path", PARTS + "\0"), "path"),
    "path with doubled slash": (put("parts", 0, "path", PARTS.replace("/", "//")), "path"),
    "path as a number": (put("parts", 0, "path", 3), "path"),
    "negative bytes": (put("parts", 0, "bytes", -1), "bytes"),
    "huge part": (put("parts", 0, "bytes", 1 << 40), "too large"),
    "negative raw_bytes": (put("parts", 0, "raw_bytes", -1), "raw_bytes"),
    "absurd raw_bytes": (put("parts", 0, "raw_bytes", 1 << 63), "raw_bytes"),
    "short raw_bytes": (put("parts", 0, "raw_bytes", 110), "'t3': a chunk lies outside"),
    "sha256 in capitals": (put("parts", 0, "sha256", "A" * 64), "sha256"),
    # dtypes
    "dtypes as text": (put("dtypes", "float32"), "dtypes"),
    "a number as dtype": (put("dtypes", 0, 3), "dtypes"),
    "an object dtype": (put("dtypes", 0, "object"), "dtype"),
    "an unknown dtype": (put("dtypes", 0, "float33"), "float33"),
    "a dtype twice": (put("dtypes", 1, "float32"), "twice"),
    "a dtype of other size": (put("dtypes", 0, "float64"), ""),
    # tree
    "tree as a list": (put("tree", []), "tree"),
    "tree without leaves": (put("tree", {"dict": []}), ""),
    "unknown node": (put("tree", {"object": []}), "no known kind"),
    "two kinds": (put("tree", {"dict": [], "list": []}), "no known kind"),
    "leaf and kind": (put("tree", {"t": 0, "list": []}), "no known kind"),
    "leaf number twice": (put("tree", "dict", 1, 1, {"t": 0}), "same number"),
    "leaf number negative": (put("tree", "dict", 0, 1, {"t": -1}), "no number"),
    "leaf number as a bool": (put("tree", "dict", 0, 1, {"t": False}), "no number"),
    "leaf number as text": (put("tree", "dict", 0, 1, {"t": "0"}), "no number"),
    "leaf number left out": (put("tree", "dict", 0, 1, {"t": 10**9}), "no leaf is tensor 0"),
    "a leaf less": (lambda members: members["tree"]["dict"].pop(0), "no leaf is tensor 0"),
    "a leaf more": (lambda members: members["tree"]["dict"].append(["x", {"t": 4}]), "tensors.kind"),
    "a value more": (lambda members: members["tree"]["dict"].append(["x", {"v": 2}]), "2 values where the tree has 3"),
    "a key twice": (put("tree", "dict", 1, 0, "t0"), "same key twice"),
    "an unhashable key": (put("tree", "dict", 0, 0, [1]), "no mapping can hold"),
    "an unhashable tuple": (put("tree", "dict", 0, 0, {"$tuple": [[1]]}), ""),
    "a key with an unknown tag": (put("tree", "dict", 0, 0, {"$eval": "1"}), "key"),
    "a pickled key": (put("tree", "dict", 0, 0, {"$tuple": [{"$eval": "x"}]}), "key"),
    "a pair of three": (put("tree", "dict", 0, ["t0", {"t": 0}, 1]), "no pair"),
    "a pair as an object": (put("tree", "dict", 0, {"t0": {"t": 0}}), "no pair"),
    "members as an object": (put("tree", {"list": {}}), "no list"),
    "a short maxlen": (put("tree", "dict", 0, ["t0", {"deque": [{"t": 0}], "maxlen": 0}]), "maxlen"),
    "a factory as a number": (put("tree", "dict", 0, ["t0", {"defaultdict": [], "factory": 1}]), "factory"),
    "a record without type": (put("tree", "dict", 0, ["t0", {"namedtuple": []}]), "type"),
    "a record with other keys": (put("tree", {"dataclass": [[1, {"t": 0}]], "type": "m:n"}), "fields"),
    # tensors
    **{
        f"{table}.{name} {what}": (put(table, name, value), f"{table}.{name}")
        for table, names in {
            "tensors": ("kind", "dtype", "ndim", "shape", "n_chunks"),
            "chunks": ("part", "raw_offset", "offsets", "sizes"),
        }.items()
        for name in names
        for what, value in {
            "as null": None,
            "as text": "x",
            "with fewer rows": [],
            "with text": ["1"] * 5,
            "with a huge count": claimed("<i8", 1 << 60),
            "with a negative count": claimed("|u1", -1),
        }.items()
    },
    "unknown kind": (put("tensors", "kind", [4, 0, 0, 1]), "'t0': its kind"),
    "negative kind": (put("tensors", "kind", [-1, 0, 0, 1]), "tensors.kind"),
    "dtype out of range": (put("tensors", "dtype", [0, 3, 1, 2]), "'t1': its dtype"),
    "too many dimensions": (put("tensors", "ndim", [255, 0, 0, 1]), "tensors.shape"),
    "other ndim": (put("tensors", "ndim", [1, 1, 0, 1]), ""),
    "negative shape": (put("tensors", "shape", [-4, 6, 7]), "'t0': its shape is negative"),
    "huge shape": (put("tensors", "shape", [1 << 40, 1 << 40, 7]), "'t0': its shape"),
    "huge empty shape": (put("tensors", "shape", [0, 1 << 62, 7]), "'t0': its shape"),
    "larger shape": (put("tensors", "shape", [5, 6, 7]), "'t0': its chunks overlap or leave a hole"),
    "bytes of another dtype": (put("tensors", "kind", [0, 1, 0, 1]), "'t1': bytes are one chunk"),
    "pickle with a shape": (put("tensors", "kind", [2, 0, 0, 1]), "'t0': bytes are one chunk"),
    "chunks of another tensor": (put("tensors", "n_chunks", [1, 2, 1, 1]), ""),
    "billions of chunks": (tree_bomb, "chunks, more than"),
    "claimed chunks": (many_chunks, "chunks.part"),
    # chunks
    "part out of range": (put("chunks", "part", [0, 1, 0, 0, 0]), "'t0': a chunk lies outside"),
    "negative part": (put("chunks", "part", [0, -1, 0, 0, 0]), "chunks.part"),
    "negative raw_offset": (put("chunks", "raw_offset", [0, 32, -96, 96, 104]), "raw_offset is negative"),
    "raw_offset beyond": (put("chunks", "raw_offset", [0, 32, 96, 96, 105]), "'t3': a chunk lies outside"),
    "raw_offset that would overflow": (put("chunks", "raw_offset", [(1 << 63) - 1, 32, 96, 96, 104]), "'t0'"),
    "negative offset": (put("chunks", "offsets", [0, 0, 0, -2, 0]), "'t0': the offsets"),
    "negative size": (put("chunks", "sizes", [4, 2, -4, 4, 7]), "'t0': the offsets"),
    "box outside": (put("chunks", "offsets", [0, 0, 0, 3, 0]), "'t0': a chunk reaches outside"),
    "offset that would overflow": (put("chunks", "offsets", [0, 0, 0, (1 << 63) - 1, 0]), "'t0': a chunk reaches"),
    "overlap": (put("chunks", "offsets", [0, 0, 0, 1, 0]), "'t0': its chunks overlap or leave a hole"),
    "hole": (put("chunks", "sizes", [4, 2, 4, 3, 7]), "'t0': its chunks overlap or leave a hole"),
    # values
    "values as an object": (put("values", {}), "values"),
    "a value less": (put("values", [3]), "1 values where the tree has 2"),
}


def test_the_sample_itself_is_accepted() -> None:
    # Otherwise the lies might be refused for another reason.
    assert encoded(decode_root(edited_root(lambda _: None))) == encoded(small_root())


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_root_is_refused_without_allocating_for_it(lie: str) -> None:
    change, message = LIES[lie]
    data = edited_root(change)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="the root manifest: ") as caught:
            decode_root(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)


def test_duplicate_keys_are_refused() -> None:
    body = encoded(small_root())[:-77]
    for text in (b',"step":8', b',"x":{"a":1,"a":1}', b',"\\u0073tep":8'):
        with pytest.raises(CorruptCheckpointError, match="more than once"):
            decode_root(sealed(body + text))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [600, 1_000_000])
def test_deep_nesting_is_refused(opening: bytes, depth: int) -> None:
    closing = (b"]" if opening == b"[" else b"}") * depth
    body = encoded(small_root())[:-77] + b',"x":' + opening * depth + b"1" + closing
    with pytest.raises(CorruptCheckpointError, match="deep"):
        decode_root(sealed(body))


def test_a_tree_that_is_too_deep() -> None:
    node: Any = {"list": []}
    for _ in range(128):
        node = {"list": [node]}
    with pytest.raises(CorruptCheckpointError, match="128 deep"):
        decode_root(edited_root(put("tree", {"dict": [["x", node]]})))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (section_of([(0, "float32", (4,), [(0, (0,), (3,))])]), "'t0': its only chunk does not cover it"),
        (section_of([(0, "float32", (4,), [(0, (2,), (3,))])]), "'t0': a chunk reaches outside"),
        (section_of([(0, "float33", (4,), [(0, (0,), (4,))])]), "float33"),
        (section_of([(0, "float32", (4,), [])]), "'t0': it has no chunk"),
        (section_of([(0, "float32", (1,) * 65, [(0, (0,) * 65, (1,) * 65)])]), "64 dimensions"),
        (section_of([(2, "float32", (4,), [(0, (0,), (4,))])]), "'t0': bytes are one chunk"),
        (section_of([(0, "int8", (1 << 62, 2), [(0, (0, 0), (1 << 62, 2))])]), r"'t0': its shape"),
        (section_of([(0, "int8", (4,), [(-1, (0,), (4,))])]), "raw_offset"),
    ],
)
def test_the_writer_refuses_such_plans(plan: PlanSection, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        encode_plan_section(plan)


@pytest.mark.parametrize(("table", "name"), [("tensors", "kind"), ("tensors", "shape"), ("chunks", "part")])
def test_the_writer_refuses_columns_of_other_lengths(table: str, name: str) -> None:
    plan = small_section()
    tables: dict[str, Any] = {}
    for kind, source in ((TensorTable, plan.tensors), (ChunkTable, plan.chunks)):
        columns = {field: getattr(source, field) for field in kind.__dataclass_fields__}
        key = "tensors" if kind is TensorTable else "chunks"
        if key == table:
            columns[name] = np.append(columns[name], columns[name][:1])
        tables[key] = kind(**columns)
    broken = PlanSection(
        plan.dtypes, plan.tree, tables["tensors"], tables["chunks"], plan.tensor_names, plan.value_names
    )
    with pytest.raises(PlanError, match="rows are expected"):
        encode_plan_section(broken)


def test_aliases_and_several_parts_are_accepted() -> None:
    plan = section_of(
        [
            (0, "float32", (4,), [(0, (0,), (2,)), (0, (2,), (2,))]),
            (0, "float32", (2,), [(0, (0,), (2,))]),
            (0, "float32", (0, 3), [(8, (0, 0), (0, 3))]),
        ],
        parts=[0, 1, 1, 0],
    )
    parts = [PartEntry(rank, f"{ID}/r{rank:05d}.index.json", 9, 8, "0" * 64) for rank in (0, 5)]
    root = small_root(plan=plan, parts=parts, values=[], world_size=6)
    back = decode_root(encoded(root))
    assert back.plan.chunks.part.tolist() == [0, 1, 1, 0]
    assert back.plan.chunk_bytes.tolist() == [8, 8, 8, 0]
