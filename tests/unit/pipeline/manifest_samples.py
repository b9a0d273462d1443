"""Small manifests to begin with, and tools to tell lies with them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from savestream.pipeline.manifest import (
    ChunkTable,
    Frames,
    IndexPart,
    ObjectEntry,
    PartEntry,
    PlanSection,
    Root,
    TensorTable,
    encode_part,
    encode_plan_section,
    encode_root,
)
from savestream.planners.paths import path_to_fqn
from savestream.planners.structure import LeafNode, MappingNode, StateTree

ID = "0123456789abcdef" * 2
SEAL_BYTES = 77

Box = tuple[int, Sequence[int], Sequence[int]]  # raw_offset, offsets, sizes


def leaf(*path: object) -> LeafNode:
    return LeafNode(path_to_fqn(path))


def flat_tree(names: Sequence[str]) -> StateTree:
    return MappingNode("dict", tuple(names), tuple(leaf(name) for name in names))


def section_of(
    tensors: Sequence[tuple[int, str, Sequence[int], Sequence[Box]]],
    values: int = 0,
    tree: StateTree | None = None,
    parts: Sequence[int] | None = None,
) -> PlanSection:
    """A section from (kind, dtype, shape, chunks) rows, called ``t0``, ``t1``, ...; all chunks in part 0 by default."""
    names = [f"t{number}" for number in range(len(tensors))]
    value_names = [f"v{number}" for number in range(values)]
    dtypes = list(dict.fromkeys(row[1] for row in tensors))
    boxes = [box for row in tensors for box in row[3]]
    return PlanSection(
        dtypes=dtypes,
        tree=tree if tree is not None else flat_tree([*names, *value_names]),
        tensors=TensorTable(
            kind=np.array([row[0] for row in tensors], np.uint8),
            dtype=np.array([dtypes.index(row[1]) for row in tensors], np.uint32),
            ndim=np.array([len(row[2]) for row in tensors], np.uint8),
            shape=np.array([size for row in tensors for size in row[2]], np.int64),
            n_chunks=np.array([len(row[3]) for row in tensors], np.uint32),
        ),
        chunks=ChunkTable(
            part=np.array(parts if parts is not None else [0] * len(boxes), np.uint32),
            raw_offset=np.array([box[0] for box in boxes], np.int64),
            offsets=np.array([number for box in boxes for number in box[1]], np.int64),
            sizes=np.array([number for box in boxes for number in box[2]], np.int64),
        ),
        tensor_names=names,
        value_names=value_names,
    )


def small_section() -> PlanSection:
    """A matrix in two chunks, a scalar, an alias of it, opaque bytes; two values."""
    return section_of(
        [
            (0, "float32", (4, 6), [(0, (0, 0), (4, 2)), (32, (0, 2), (4, 4))]),
            (0, "int64", (), [(96, (), ())]),
            (0, "int64", (), [(96, (), ())]),
            (1, "uint8", (7,), [(104, (0,), (7,))]),
        ],
        values=2,
    )


def small_root(**changes: Any) -> Root:
    members = {
        "checkpoint_id": ID,
        "created": "2025-01-31T12:00:00.123Z",
        "writer": "savestream 0.1.0",
        "plan": small_section(),
        "values": [3, {"$tuple": [1, None]}],
        "parts": [PartEntry(0, f"{ID}/r00000.index.json", 500, 111, "0" * 64)],
        "step": 7,
        "metrics": {"loss": 0.5},
        "user": {"note": "käse", "list": [1, 2.5, None, True]},
        "fingerprint": "ab" * 16,
    }
    return Root(**{**members, **changes})


def encoded(root: Root) -> bytes:
    return encode_root(root, encode_plan_section(root.plan))


def small_frames(**changes: Any) -> Frames:
    columns = {
        "raw_length": np.array([96, 8, 7], np.int64),
        "object": np.array([0, 0, 1], np.uint32),
        "offset": np.array([0, 4096, 10], np.int64),
        "stored_length": np.array([60, 8, 7], np.int64),
        "codec": np.array([2, 0, 0], np.uint8),
        "itemsize": np.array([4, 8, 1], np.uint32),
        "stored_digest": np.arange(48, dtype=np.uint8).reshape(3, 16),
        "raw_digest": np.arange(48, dtype=np.uint8)[::-1].reshape(3, 16),
    }
    return Frames(**{**columns, **changes})


def small_part(**changes: Any) -> IndexPart:
    members = {
        "checkpoint_id": ID,
        "rank": 0,
        "values": [],
        "objects": [ObjectEntry(f"{ID}/r00000-0000.bin", 8192), ObjectEntry(f"{ID}/r00000-0001.bin", 17)],
        "frames": small_frames(),
    }
    return IndexPart(**{**members, **changes})


def entry_for(data: bytes, *, raw_bytes: int = 111, rank: int = 0) -> PartEntry:
    return PartEntry(rank, f"{ID}/r{rank:05d}.index.json", len(data), raw_bytes, hashlib.sha256(data).hexdigest())


def compact(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def sealed(body: bytes) -> bytes:
    """A root from all but its last member, with the right hash."""
    return body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def resealed(members: dict[str, Any]) -> bytes:
    """A root that lies, with the right hash."""
    members = {name: value for name, value in members.items() if name != "sha256"}
    return sealed(compact(members)[:-1])


def edited_root(change: Callable[[dict[str, Any]], object]) -> bytes:
    members = json.loads(encoded(small_root()))
    change(members)
    return resealed(members)


def edited_part(change: Callable[[dict[str, Any]], object]) -> bytes:
    members = copy.deepcopy(json.loads(encode_part(small_part())))
    change(members)
    return compact(members)
