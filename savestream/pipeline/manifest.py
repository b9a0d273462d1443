"""The root manifest, whose existence is the commit: schema, encoding, decoding, limits. No I/O.

``docs/format.md`` specifies it. The writer enforces every limit that the reader checks: what :func:`encode_root` gives,
:func:`decode_root` reads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from savestream.errors import UnsupportedFormatError
from savestream.pipeline.codecs import CODECS
from savestream.pipeline.format_head import FORMAT_VERSION, ROOT_FORMAT, FormatHead, check_head, head_text, read_head
from savestream.pipeline.index_part import (
    CHECKPOINT_ID,
    Frames,
    IndexPart,
    ObjectEntry,
    PartEntry,
    decode_part,
    encode_part,
    is_count,
)
from savestream.pipeline.limits import (
    MAXIMUM_DEPTH,
    MAXIMUM_ROOT_BYTES,
    FormatViolation,
    violations_are_corruption,
    violations_are_plan_errors,
)
from savestream.pipeline.plan_section import (
    ChunkTable,
    PlanSection,
    TensorTable,
    decode_plan_section,
    encode_plan_section,
)
from savestream.pipeline.strict_json import (
    JsonValue,
    checked_json,
    json_list_text,
    json_text,
    member,
    parse_json,
    require,
)
from savestream.planners.structure import MappingNode

__all__ = [
    "FORMAT_VERSION",
    "MAXIMUM_DEPTH",
    "MAXIMUM_ROOT_BYTES",
    "NO_PLAN",
    "ChunkTable",
    "FormatHead",
    "Frames",
    "IndexPart",
    "ObjectEntry",
    "PartEntry",
    "PlanSection",
    "Root",
    "TensorTable",
    "decode_part",
    "decode_plan_section",
    "decode_root",
    "encode_part",
    "encode_plan_section",
    "encode_root",
    "root_header",
]

T = TypeVar("T")

_WHAT = "the root manifest"
_DIGEST = "xxh3-128"
_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = 77
_PART_PATH = re.compile(r"([0-9a-f]{32})/r([0-9]{5,10})\.index\.json")
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)")
_FINGERPRINT = re.compile(r"[0-9a-f]{0,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAXIMUM_RANKS = 1 << 31


_NOTHING = np.zeros(0, np.int64)
NO_PLAN = PlanSection(
    dtypes=[],
    tree=MappingNode("dict", (), ()),
    tensors=TensorTable(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING),
    chunks=ChunkTable(_NOTHING, _NOTHING, _NOTHING, _NOTHING),
    tensor_names=[],
    value_names=[],
)


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """A root manifest.

    Attributes
    ----------
    checkpoint_id
        The save's id, 32 hexadecimal digits; also the directory of its parts and data.
    created
        UTC, ISO 8601: ``2025-01-31T12:00:00Z``, fractions of a second allowed.
    writer
        Program and version that wrote it.
    plan
        What the plan determines. :func:`encode_root` takes it in encoded form, and checks it against the parts
        only where it is given here too.
    values
        One for each leaf ``{"v":j}`` of the tree: JSON values, or when encoding :class:`msgspec.Raw` JSON.
    step, metrics, user
        What the caller gave to find the checkpoint by; JSON values, or None.
    world_size
        Ranks of the save; those that wrote anything have an entry in ``parts``.
    fingerprint
        The plan's, in hexadecimal.
    version, requires
        Of the format.
    codecs
        Names by codec number.
    depends_on
        Reserved: ids of other checkpoints that this one needs. Empty in version 1.
    """

    checkpoint_id: str
    created: str
    writer: str
    values: list[object]
    parts: list[PartEntry]
    plan: PlanSection = NO_PLAN
    step: int | None = None
    metrics: dict[str, object] | None = None
    user: object = None
    world_size: int = 1
    fingerprint: str = ""
    version: tuple[int, int] = FORMAT_VERSION
    requires: Sequence[str] = ()
    codecs: Sequence[str] = CODECS
    depends_on: Sequence[str] = ()


def root_header(data: bytes) -> FormatHead:
    """Version and required features of a root, of which the first 8 KiB suffice; nothing else is checked.

    Raises
    ------
    CorruptCheckpointError
        It is no root manifest.
    """
    with violations_are_corruption(_WHAT):
        return read_head(data, ROOT_FORMAT)


# --- encode -----------------------------------------------------------------------------------------------


def encode_root(root: Root, plan_section_bytes: bytes) -> bytes:
    """Encode a root.

    Parameters
    ----------
    root
        Its members; ``root.plan`` is not encoded again.
    plan_section_bytes
        What :func:`encode_plan_section` gave for ``root.plan``.

    Raises
    ------
    PlanError
        A reader would refuse it: too large, nested too deeply, or a member is wrong.
    """
    with violations_are_plan_errors(_WHAT):
        _check_root(root)
        require(tuple(root.version) == FORMAT_VERSION, f"version {root.version} is not this writer's")
        require(not root.requires, f"this writer has no feature {list(root.requires)}")
        head = head_text(ROOT_FORMAT, FORMAT_VERSION)
        body = b"".join([head.encode(), b",", _scalar_members(root), b",", plan_section_bytes, b",", _lists(root)])
        size = len(body) + _SEAL_BYTES
        require(size <= MAXIMUM_ROOT_BYTES, f"it has {size} bytes, more than {MAXIMUM_ROOT_BYTES}")
    return body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _scalar_members(root: Root) -> bytes:
    members = {
        "checkpoint_id": root.checkpoint_id,
        "created": root.created,
        "writer": root.writer,
        "step": root.step,
        "metrics": root.metrics,
        "user": root.user,
        "world_size": root.world_size,
        "fingerprint": root.fingerprint,
        "digest": _DIGEST,
        "codecs": list(root.codecs),
        "depends_on": list(root.depends_on),
    }
    encoded = []
    for name, value in members.items():
        try:
            encoded.append(f'"{name}":{checked_json(value)}')
        except FormatViolation as violation:
            raise FormatViolation(f"{name}: {violation}") from violation
    return ",".join(encoded).encode("ascii")


def _lists(root: Root) -> bytes:
    try:
        values = json_list_text(root.values)
    except FormatViolation as violation:
        raise FormatViolation(f"values: {violation}") from violation
    parts = json_text([msgspec.structs.asdict(entry) for entry in root.parts])
    return f'"values":{values},"parts":{parts}'.encode("ascii")


# --- decode -----------------------------------------------------------------------------------------------


def decode_root(data: bytes) -> Root:
    """Decode and check a root.

    Raises
    ------
    UnsupportedFormatError
        Its major version is newer, or it requires a feature that is unknown here; the message names it.
    CorruptCheckpointError
        It is damaged, no root at all, contradicts itself or exceeds a limit. Nothing it says is executed, and nothing
        is allocated for what it only claims.
    """
    with violations_are_corruption(_WHAT):
        require(len(data) <= MAXIMUM_ROOT_BYTES, f"it has {len(data)} bytes, more than {MAXIMUM_ROOT_BYTES}")
        head = _checked_head(data)
        members = parse_json(data)
        plan = decode_plan_section(members)
        root = _root_of(members, plan, head)
        _check_root(root)
    return root


def _checked_head(data: bytes) -> FormatHead:
    """Check the seal before the version, so that damage is not mistaken for a newer format."""
    read_head(data, ROOT_FORMAT)
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is not None:
        found = hashlib.sha256(memoryview(data)[:-_SEAL_BYTES]).hexdigest()
        require(found == seal[1].decode(), "its SHA-256 differs from its content: it was damaged or edited")
    head = check_head(data, ROOT_FORMAT, _WHAT)
    require(seal is not None, "it does not end with its SHA-256: it was truncated or damaged")
    return head


def _root_of(members: JsonValue, plan: PlanSection, head: FormatHead) -> Root:
    digest = member(members, "digest", str)
    if digest != _DIGEST:
        raise UnsupportedFormatError(f"{_WHAT}: digests of type {digest[:40]!r} are unknown here")
    return Root(
        checkpoint_id=member(members, "checkpoint_id", str),
        created=member(members, "created", str),
        writer=member(members, "writer", str),
        step=_optional(members, "step", int),
        metrics=_optional(members, "metrics", dict),
        user=_present(members, "user"),
        world_size=member(members, "world_size", int),
        fingerprint=member(members, "fingerprint", str),
        version=head.version,
        requires=head.requires,
        codecs=tuple(member(members, "codecs", list)),
        depends_on=tuple(member(members, "depends_on", list)),
        plan=plan,
        values=member(members, "values", list),
        parts=[_part_entry(entry) for entry in member(members, "parts", list)],
    )


def _present(members: JsonValue, name: str) -> JsonValue:
    require(name in members, f"{name} is missing")
    return members[name]


def _optional(members: JsonValue, name: str, kind: type[T]) -> T | None:
    return None if _present(members, name) is None else member(members, name, kind)


def _part_entry(value: JsonValue) -> PartEntry:
    return PartEntry(
        rank=member(value, "rank", int),
        path=member(value, "path", str),
        bytes=member(value, "bytes", int),
        raw_bytes=member(value, "raw_bytes", int),
        sha256=member(value, "sha256", str),
    )


# --- checks, the same for writer and reader ---------------------------------------------------------------


def _check_root(root: Root) -> None:
    _check_text("checkpoint_id", root.checkpoint_id, CHECKPOINT_ID)
    _check_text("created", root.created, _CREATED)
    _check_text("fingerprint", root.fingerprint, _FINGERPRINT)
    require(isinstance(root.writer, str), "writer is not a string")
    require(root.step is None or is_count(root.step), "step is not a number of at least 0")
    require(root.metrics is None or isinstance(root.metrics, dict), "metrics is not an object")
    require(is_count(root.world_size) and 1 <= root.world_size <= _MAXIMUM_RANKS, "world_size is no number of ranks")
    require(tuple(root.codecs)[: len(CODECS)] == CODECS, f"codecs do not begin with {', '.join(CODECS)}")
    for checkpoint_id in root.depends_on:
        _check_text("depends_on", checkpoint_id, CHECKPOINT_ID)
    _check_parts(root)
    if root.plan is not NO_PLAN:
        names = root.plan.value_names
        require(len(root.values) == len(names), f"{len(root.values)} values where the tree has {len(names)}")
        _check_placement(root)


def _check_text(name: str, value: object, pattern: re.Pattern[str]) -> None:
    valid = isinstance(value, str) and pattern.fullmatch(value) is not None
    require(valid, f"{name} is not as it should be: {str(value)[:80]!r}")


def _check_parts(root: Root) -> None:
    seen = set()
    for entry in root.parts:
        require(is_count(entry.rank) and entry.rank < root.world_size, "a part's rank is not within world_size")
        require(entry.rank not in seen, f"rank {entry.rank} has two parts")
        seen.add(entry.rank)
        match = _PART_PATH.fullmatch(entry.path) if isinstance(entry.path, str) else None
        if match is None or match[1] != root.checkpoint_id or int(match[2]) != entry.rank:
            raise FormatViolation(f"{str(entry.path)[:80]!r} is not the path of rank {entry.rank}'s part")
        for name in ("bytes", "raw_bytes"):
            require(is_count(getattr(entry, name)), f"rank {entry.rank}: {name} is negative or absurd")
        require(entry.bytes <= MAXIMUM_ROOT_BYTES, f"rank {entry.rank}: a part of {entry.bytes} bytes is too large")
        _check_text(f"sha256 of rank {entry.rank}'s part", entry.sha256, _SHA256)


def _check_placement(root: Root) -> None:
    """Refuse chunks that lie in no part, or reach beyond the raw stream of theirs."""
    chunks = root.plan.chunks
    if not len(chunks):
        return
    wrong = chunks.part >= len(root.parts)
    if not wrong.any():
        raw_bytes = np.array([entry.raw_bytes for entry in root.parts], np.int64)
        wrong = chunks.raw_offset > raw_bytes[chunks.part] - root.plan.chunk_bytes
    if wrong.any():
        tensor = int(root.plan.tensors.chunk_owners[wrong.argmax()])
        raise FormatViolation(f"{root.plan.tensor_names[tensor]!r}: a chunk lies outside of the stored data")
