"""Index parts: where each frame of one rank's raw stream is stored. No I/O.

A part is the JSON object that ``docs/format.md`` calls an index part. Its frames, concatenated, are the raw stream.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import msgspec
import numpy as np
import numpy.typing as npt

from savestream.pipeline.codecs import CODECS, PLANES_ZSTD, RAW
from savestream.pipeline.columns import IntegerColumn, decode_column, decode_digests, encode_column, encode_digests
from savestream.pipeline.format_head import PART_FORMAT, check_head, head_text
from savestream.pipeline.limits import (
    DIGEST_BYTES,
    MAXIMUM_FRAME_BYTES,
    MAXIMUM_ROOT_BYTES,
    MAXIMUM_TABLE_ROWS,
    FormatViolation,
    violations_are_corruption,
    violations_are_plan_errors,
)
from savestream.pipeline.strict_json import JsonValue, json_list_text, json_text, member, parse_json, require

__all__ = [
    "CHECKPOINT_ID",
    "Frames",
    "IndexPart",
    "ObjectEntry",
    "PartEntry",
    "check_object_path",
    "decode_part",
    "encode_part",
    "is_count",
]

CHECKPOINT_ID = re.compile(r"[0-9a-f]{32}")
_DATA_PATH = re.compile(r"([0-9a-f]{32})/r[0-9]{5,10}-[0-9]{4,10}\.bin")
_MAXIMUM_BYTES = 1 << 62
_MAXIMUM_SOURCE = 0xFFFF
_DIGEST_COLUMNS = ("stored_digest", "raw_digest")
_FRAME_COLUMNS = {
    "raw_length": "<i8",
    "object": "<u4",
    "offset": "<i8",
    "stored_length": "<i8",
    "codec": "|u1",
    "itemsize": "<u4",
}


class ObjectEntry(msgspec.Struct, frozen=True, gc=False):
    """A data object: its path beneath the checkpoint, its size, and whose it is (0: this checkpoint's)."""

    path: str
    bytes: int
    source: int = 0


class PartEntry(msgspec.Struct, frozen=True, gc=False):
    """What the root knows of a part: whose it is, where, its size, the length of its raw stream, and its SHA-256."""

    rank: int
    path: str
    bytes: int
    raw_bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Frames:
    """One row a frame, in the order of the raw stream.

    Attributes
    ----------
    raw_length, stored_length
        Bytes before and after encoding.
    object, offset
        Index in the part's objects, and position in that object in bytes.
    codec
        Index in :data:`savestream.pipeline.codecs.CODECS`.
    itemsize
        Bytes of the numbers whose byte planes are taken; 1 where there are none.
    stored_digest, raw_digest
        XXH3-128 in canonical byte order, shape ``(n, 16)``.
    """

    raw_length: IntegerColumn
    object: IntegerColumn
    offset: IntegerColumn
    stored_length: IntegerColumn
    codec: IntegerColumn
    itemsize: IntegerColumn
    stored_digest: npt.NDArray[np.uint8]
    raw_digest: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.raw_length)

    @functools.cached_property
    def raw_starts(self) -> npt.NDArray[np.int64]:
        """Where each frame begins in the raw stream, and where the last one ends: ``n + 1`` ascending positions."""
        starts = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.raw_length, out=starts[1:])
        return starts


class IndexPart(msgspec.Struct, frozen=True):
    """What one rank wrote: its data objects, its frames and the values that are its alone."""

    checkpoint_id: str
    rank: int
    values: list[object]
    objects: list[ObjectEntry]
    frames: Frames


# --- encode -----------------------------------------------------------------------------------------------


def encode_part(part: IndexPart) -> bytes:
    """Encode an index part; :class:`PlanError` where a reader would refuse it."""
    with violations_are_plan_errors(f"the index part of rank {part.rank}"):
        _check_part(part)
        head = (
            f'{head_text(PART_FORMAT)},"checkpoint_id":"{part.checkpoint_id}","rank":{part.rank},'
            f'"values":{json_list_text(part.values)},"objects":{json_text(_objects(part))},"frames":{{'
        )
        columns = [b'"%b":%b' % (name.encode(), column) for name, column in _encoded_columns(part.frames)]
        data = b"".join([head.encode("ascii"), b",".join(columns), b"}}"])
        require(len(data) <= MAXIMUM_ROOT_BYTES, f"it has {len(data)} bytes, more than {MAXIMUM_ROOT_BYTES}")
    return data


def _objects(part: IndexPart) -> JsonValue:
    return [{"path": entry.path, "bytes": entry.bytes, "source": entry.source} for entry in part.objects]


def _encoded_columns(frames: Frames) -> Iterator[tuple[str, bytes]]:
    for name, kind in _FRAME_COLUMNS.items():
        yield name, encode_column(getattr(frames, name), kind)
    for name in _DIGEST_COLUMNS:
        yield name, encode_digests(getattr(frames, name))


# --- decode -----------------------------------------------------------------------------------------------


def decode_part(data: bytes, *, path: str, entry: PartEntry | None = None) -> IndexPart:
    """Decode an index part that was read from ``path``.

    Parameters
    ----------
    data
        The whole part.
    path
        Names it in errors.
    entry
        What the root says of it. Where given, size, SHA-256, rank and length of the raw stream must agree.

    Raises
    ------
    CorruptCheckpointError
        It is damaged, is no part, contradicts itself or the root, or exceeds a limit.
    UnsupportedFormatError
        It was written in a newer format.
    """
    with violations_are_corruption(f"index part {path}"):
        require(len(data) <= MAXIMUM_ROOT_BYTES, f"it has {len(data)} bytes, more than {MAXIMUM_ROOT_BYTES}")
        if entry is not None:
            _check_bytes(data, entry)
        check_head(data, PART_FORMAT, f"index part {path}")
        part = _part_of(parse_json(data))
        _check_part(part)
        _check_place(part, entry)
    return part


def _check_bytes(data: bytes, entry: PartEntry) -> None:
    require(len(data) == entry.bytes, f"it has {len(data)} bytes, the root says {entry.bytes}")
    found = hashlib.sha256(data).hexdigest()
    require(found == entry.sha256, "its SHA-256 differs from the one in the root: it was damaged or replaced")


def _part_of(members: JsonValue) -> IndexPart:
    return IndexPart(
        checkpoint_id=member(members, "checkpoint_id", str),
        rank=member(members, "rank", int),
        values=member(members, "values", list),
        objects=[_object_of(entry) for entry in member(members, "objects", list)],
        frames=_frames_of(member(members, "frames", dict)),
    )


def _object_of(entry: JsonValue) -> ObjectEntry:
    return ObjectEntry(member(entry, "path", str), member(entry, "bytes", int), member(entry, "source", int))


def _frames_of(value: Mapping[str, JsonValue]) -> Frames:
    columns = {}
    count = None
    # The digests come first: they are stored as they are, so no file is short that claims many frames.
    for name in (*_DIGEST_COLUMNS, *_FRAME_COLUMNS):
        try:
            require(name in value, "missing")
            kind = _FRAME_COLUMNS.get(name)
            column = decode_column(value[name], kind, count) if kind else decode_digests(value[name], count)
        except FormatViolation as violation:
            raise FormatViolation(f"frames.{name}: {violation}") from violation
        count = len(column)
        columns[name] = column
    return Frames(**columns)


# --- checks, the same for writer and reader ---------------------------------------------------------------


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer from 0 to 2**62."""
    return type(value) is int and 0 <= value <= _MAXIMUM_BYTES


def check_object_path(path: str, checkpoint_id: str | None) -> None:
    """Refuse a data object's path unless it lies beneath ``checkpoint_id`` (None: beneath any)."""
    match = _DATA_PATH.fullmatch(path)
    require(match is not None, f"{path[:80]!r} is no path of a data object")
    if match is not None and checkpoint_id is not None:
        require(match[1] == checkpoint_id, f"object {path!r} belongs to another checkpoint than {checkpoint_id}")


def _check_part(part: IndexPart) -> None:
    require(CHECKPOINT_ID.fullmatch(part.checkpoint_id), "checkpoint_id is not 32 hexadecimal digits")
    require(is_count(part.rank), "the rank is negative")
    paths = [(entry.source, entry.path) for entry in part.objects]
    require(len(paths) == len(set(paths)), "an object is listed twice")
    for entry in part.objects:
        require(is_count(entry.bytes), f"object {entry.path[:80]!r}: its size is negative or absurd")
        require(is_count(entry.source) and entry.source <= _MAXIMUM_SOURCE, f"object {entry.path[:80]!r}: bad source")
        check_object_path(entry.path, part.checkpoint_id if entry.source == 0 else None)
    _check_frames(part.frames, part.objects)


def _check_frames(frames: Frames, objects: list[ObjectEntry]) -> None:
    count = len(frames)
    require(count <= MAXIMUM_TABLE_ROWS, f"{count} frames, more than {MAXIMUM_TABLE_ROWS}")
    for field in fields(frames):
        shape = (count, DIGEST_BYTES) if field.name in _DIGEST_COLUMNS else (count,)
        found = getattr(frames, field.name).shape
        require(found == shape, f"frames.{field.name} has shape {found} where {shape} is expected")
    raw, stored, codec = frames.raw_length, frames.stored_length, frames.codec
    _refuse((raw < 0) | (raw > MAXIMUM_FRAME_BYTES), f"its raw length is not within 0 and {MAXIMUM_FRAME_BYTES}")
    _refuse((stored < 0) | (stored > raw), "its stored length is negative or exceeds its raw length")
    _refuse(codec >= len(CODECS), f"its codec is none of {', '.join(CODECS)}")
    _refuse((codec == RAW) & (stored != raw), "it is raw, and yet its stored length is not its raw length")
    _refuse(frames.itemsize < 1, "its itemsize is 0")
    no_planes = ~np.isin(frames.itemsize, (2, 4, 8, 16)) | (raw < frames.itemsize)
    _refuse((codec == PLANES_ZSTD) & no_planes, "it has byte planes of numbers that have none")
    _refuse(frames.object >= len(objects), "it lies in an object that is not listed")
    sizes = np.array([entry.bytes for entry in objects], np.int64)
    if count:
        outside = (frames.offset < 0) | (frames.offset > sizes[frames.object] - stored)
        _refuse(outside, "it reaches outside of its object")


def _refuse(wrong: npt.NDArray[np.bool_], problem: str) -> None:
    if wrong.any():
        raise FormatViolation(f"frame {int(wrong.argmax())}: {problem}")


def _check_place(part: IndexPart, entry: PartEntry | None) -> None:
    if entry is None:
        return
    checkpoint_id = entry.path.partition("/")[0]
    require(part.checkpoint_id == checkpoint_id, f"it belongs to checkpoint {part.checkpoint_id}")
    require(part.rank == entry.rank, f"it is rank {part.rank}'s, the root says rank {entry.rank}")
    total = int(part.frames.raw_starts[-1])
    require(total == entry.raw_bytes, f"its frames hold {total} raw bytes, the root says {entry.raw_bytes}")
