"""The plan-determined part of a root: dtypes, tree, tensors and chunks. Encoded once, reused while the plan is.

Every check of this module binds writer and reader alike: a section that a reader would refuse is never encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from savestream.arrays import dtype_itemsize
from savestream.pipeline.columns import IntegerColumn, decode_column, encode_column
from savestream.pipeline.coverage import Boxes, check_bounds, check_cover, volumes
from savestream.pipeline.limits import (
    MAXIMUM_DIMENSIONS,
    MAXIMUM_TABLE_ROWS,
    FormatViolation,
    violations_are_plan_errors,
)
from savestream.pipeline.strict_json import JsonValue, json_text, member, require
from savestream.pipeline.tree_codec import decode_tree, encode_tree
from savestream.planners.structure import StateTree

__all__ = [
    "KIND_BYTES",
    "KIND_JSON",
    "KIND_PICKLE",
    "KIND_TENSOR",
    "ChunkTable",
    "PlanSection",
    "TensorTable",
    "check_section",
    "decode_plan_section",
    "encode_plan_section",
]

KIND_TENSOR, KIND_BYTES, KIND_PICKLE, KIND_JSON = 0, 1, 2, 3

_TENSOR_COLUMNS = {"kind": "|u1", "dtype": "<u4", "ndim": "|u1", "shape": "<i8", "n_chunks": "<u4"}
_CHUNK_COLUMNS = {"part": "<u4", "raw_offset": "<i8", "offsets": "<i8", "sizes": "<i8"}

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TensorTable:
    """One row a tensor, or opaque item of bytes.

    Attributes
    ----------
    kind
        0 for an array, 1 for bytes, 2 for a pickle; the latter two are uint8 arrays of one dimension and chunk.
    dtype
        Index in the section's ``dtypes``.
    ndim, shape
        Number of dimensions, and all shapes one after the other, in elements.
    n_chunks
        How many rows of the chunk table belong to it; they stand in the order of the tensors.
    """

    kind: IntegerColumn
    dtype: IntegerColumn
    ndim: IntegerColumn
    shape: IntegerColumn
    n_chunks: IntegerColumn

    def __len__(self) -> int:
        return len(self.kind)

    @functools.cached_property
    def shape_starts(self) -> Integers:
        """Where each shape begins in ``shape``; one more entry than tensors."""
        return _starts(self.ndim)

    @functools.cached_property
    def chunk_starts(self) -> Integers:
        """The first row of each tensor in the chunk table; one more entry than tensors."""
        return _starts(self.n_chunks)

    @functools.cached_property
    def chunk_owners(self) -> Integers:
        """The tensor that each row of the chunk table belongs to."""
        return np.repeat(np.arange(len(self)), self.n_chunks.astype(np.int64))

    @functools.cached_property
    def box_starts(self) -> Integers:
        """Where each chunk's box begins in the chunk table's ``offsets`` and ``sizes``; one more entry than chunks."""
        return _starts(self.ndim[self.chunk_owners])


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """One row a chunk; ``part`` is an index in the root's parts, ``raw_offset`` bytes in that part's raw stream.

    ``offsets`` and ``sizes`` hold the boxes one after the other, in elements. Chunks with equal part and raw offset
    are the same bytes.
    """

    part: IntegerColumn
    raw_offset: IntegerColumn
    offsets: IntegerColumn
    sizes: IntegerColumn

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, eq=False)
class PlanSection:
    """Everything of a root that its plan determines.

    ``tensor_names[i]`` and ``value_names[j]`` are the fully qualified names of the leaves ``{"t":i}`` and ``{"v":j}``.
    """

    dtypes: list[str]
    tree: StateTree
    tensors: TensorTable
    chunks: ChunkTable
    tensor_names: list[str]
    value_names: list[str]

    @functools.cached_property
    def itemsizes(self) -> Integers:
        """Bytes of an element, per tensor."""
        sizes = np.fromiter(map(dtype_itemsize, self.dtypes), np.int64, len(self.dtypes))
        return sizes[self.tensors.dtype]

    @functools.cached_property
    def chunk_bytes(self) -> Integers:
        """Bytes of each chunk."""
        nbytes = np.empty(len(self.chunks), np.int64)
        for ndim in np.unique(self.tensors.ndim):
            rows, boxes = self.boxes(int(ndim))
            nbytes[rows] = volumes(boxes.sizes)
        nbytes *= self.itemsizes[self.tensors.chunk_owners]
        return nbytes

    def boxes(self, ndim: int) -> tuple[Integers, Boxes]:
        """The tensors of ``ndim`` dimensions with their chunks, and the rows of those in the chunk table."""
        tensors, chunks = self.tensors, self.chunks
        selected = np.flatnonzero(tensors.ndim == ndim)
        rows = np.flatnonzero(tensors.ndim[tensors.chunk_owners] == ndim)
        columns = np.arange(ndim)
        in_boxes = tensors.box_starts[rows][:, None] + columns
        boxes = Boxes(
            shapes=tensors.shape[tensors.shape_starts[selected][:, None] + columns],
            owners=np.searchsorted(selected, tensors.chunk_owners[rows]),
            offsets=chunks.offsets[in_boxes],
            sizes=chunks.sizes[in_boxes],
            name=lambda row: repr(self.tensor_names[int(selected[row])]),
        )
        return rows, boxes


def _starts(lengths: IntegerColumn) -> Integers:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


# --- encode and decode ------------------------------------------------------------------------------------


def encode_plan_section(section: PlanSection) -> bytes:
    """The members ``"dtypes":...,"tree":...,"tensors":...,"chunks":...`` of a root, without the braces around them.

    Raises
    ------
    PlanError
        A reader would refuse it; the message says why.
    """
    with violations_are_plan_errors("the plan"):
        check_section(section)
        tree = encode_tree(section.tree, section.tensor_names, section.value_names)
        tensors = _encode_table(section.tensors, _TENSOR_COLUMNS)
        chunks = _encode_table(section.chunks, _CHUNK_COLUMNS)
        head = f'"dtypes":{json_text(section.dtypes)},"tree":{tree}'.encode("ascii")
    return b'%b,"tensors":%b,"chunks":%b' % (head, tensors, chunks)


def decode_plan_section(members: JsonValue) -> PlanSection:
    """The section behind a root's parsed members; raises :class:`FormatViolation`, or for a dtype that does not exist
    :class:`CorruptCheckpointError`."""
    dtypes = member(members, "dtypes", list)
    require(set(map(type, dtypes)) <= {str}, "dtypes holds something that is no string")
    tree, tensor_names, value_names = decode_tree(member(members, "tree", dict))
    tensors = _decode_tensors(member(members, "tensors", dict), len(tensor_names))
    chunks = _decode_chunks(member(members, "chunks", dict), tensors)
    section = PlanSection(dtypes, tree, tensors, chunks, tensor_names, value_names)
    check_section(section)
    return section


def _encode_table(table: TensorTable | ChunkTable, kinds: Mapping[str, str]) -> bytes:
    columns = []
    for name, kind in kinds.items():
        with _naming(name):
            columns.append(b'"%b":%b' % (name.encode(), encode_column(getattr(table, name), kind)))
    return b"{" + b",".join(columns) + b"}"


def _decode_tensors(value: Mapping[str, JsonValue], count: int) -> TensorTable:
    require(count <= MAXIMUM_TABLE_ROWS, f"{count} tensors, more than {MAXIMUM_TABLE_ROWS}")
    columns: dict[str, IntegerColumn] = {}
    for name, kind in _TENSOR_COLUMNS.items():
        rows = int(columns["ndim"].sum(dtype=np.int64)) if name == "shape" else count
        columns[name] = _decode_named("tensors", value, name, kind, rows)
    return TensorTable(**columns)


def _decode_chunks(value: Mapping[str, JsonValue], tensors: TensorTable) -> ChunkTable:
    count = int(tensors.n_chunks.sum(dtype=np.int64))
    require(count <= MAXIMUM_TABLE_ROWS, f"{count} chunks, more than {MAXIMUM_TABLE_ROWS}")
    box_rows = int((tensors.n_chunks.astype(np.int64) * tensors.ndim).sum())
    columns = {}
    for name, kind in _CHUNK_COLUMNS.items():
        rows = box_rows if name in ("offsets", "sizes") else count
        columns[name] = _decode_named("chunks", value, name, kind, rows)
    return ChunkTable(**columns)


def _decode_named(table: str, value: Mapping[str, Any], name: str, kind: str, rows: int) -> IntegerColumn:
    with _naming(f"{table}.{name}"):
        require(name in value, "missing")
        return decode_column(value[name], kind, rows)


class _naming:  # noqa: N801 - reads as a statement
    """Put the column's name in front of a violation."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FormatViolation):
            raise FormatViolation(f"{self._name}: {error}") from error


# --- checks -----------------------------------------------------------------------------------------------


def check_section(section: PlanSection) -> None:
    """Refuse a section whose tables contradict themselves, each other or the limits (:class:`FormatViolation`)."""
    tensors, chunks = section.tensors, section.chunks
    _check_lengths(section)
    require(len(section.dtypes) == len(set(section.dtypes)), "a dtype is listed twice")
    _refuse(section, tensors.kind > KIND_JSON, f"its kind is above {KIND_JSON}")
    _refuse(section, tensors.dtype >= len(section.dtypes), "its dtype is not among the dtypes")
    _refuse(section, tensors.ndim > MAXIMUM_DIMENSIONS, f"it has more than {MAXIMUM_DIMENSIONS} dimensions")
    require(not np.any(chunks.raw_offset < 0), "chunks.raw_offset is negative")
    for ndim in np.unique(tensors.ndim):
        boxes = section.boxes(int(ndim))[1]
        check_bounds(boxes, section.itemsizes[tensors.ndim == ndim])
        check_cover(boxes)
    _check_opaque(section)


def _refuse(section: PlanSection, wrong: npt.NDArray[np.bool_], problem: str) -> None:
    if wrong.any():
        raise FormatViolation(f"{section.tensor_names[int(wrong.argmax())]!r}: {problem}")


def _check_lengths(section: PlanSection) -> None:
    tensors, chunks = section.tensors, section.chunks
    for name in _TENSOR_COLUMNS:
        rows = int(tensors.shape_starts[-1]) if name == "shape" else len(section.tensor_names)
        _check_length(f"tensors.{name}", getattr(tensors, name), rows)
    require(len(tensors) <= MAXIMUM_TABLE_ROWS, f"{len(tensors)} tensors, more than {MAXIMUM_TABLE_ROWS}")
    count = int(tensors.chunk_starts[-1])
    require(count <= MAXIMUM_TABLE_ROWS, f"{count} chunks, more than {MAXIMUM_TABLE_ROWS}")
    for name in ("part", "raw_offset"):
        _check_length(f"chunks.{name}", getattr(chunks, name), count)
    for name in ("offsets", "sizes"):
        _check_length(f"chunks.{name}", getattr(chunks, name), int(tensors.box_starts[-1]))


def _check_length(name: str, column: IntegerColumn, rows: int) -> None:
    require(column.shape == (rows,), f"{name} has shape {column.shape} where {rows} rows are expected")


def _check_opaque(section: PlanSection) -> None:
    tensors = section.tensors
    byte = section.dtypes.index("uint8") if "uint8" in section.dtypes else -1
    shaped = (tensors.dtype == byte) & (tensors.ndim == 1) & (tensors.n_chunks == 1)
    _refuse(section, (tensors.kind != KIND_TENSOR) & ~shaped, "bytes are one chunk of uint8 with one dimension")
