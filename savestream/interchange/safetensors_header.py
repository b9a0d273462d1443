"""The safetensors format: eight bytes of length, a JSON header, and the elements without gaps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.pipeline.limits import violations_are_corruption
from savestream.pipeline.strict_json import parse_json

__all__ = [
    "LENGTH_BYTES",
    "MAXIMUM_HEADER_BYTES",
    "METADATA_KEY",
    "SafetensorsEntry",
    "SafetensorsHeader",
    "encode_header",
    "entry_bytes",
    "export_dtype",
    "export_shape",
    "header_length",
    "import_description",
    "is_text",
    "parse_header",
]

LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
MAXIMUM_HEADER_BYTES = 100_000_000  # what the format's own library reads
_ALIGNMENT_BYTES = 8
_MAXIMUM_DIMENSIONS = 64
_LIMIT = 1 << 62
_SURROGATE = re.compile("[\ud800-\udfff]")

# By the format's name: bits of an element, and the dtype name it has here. F4 packs two elements into a byte; here, as
# in PyTorch, such a pair is the element.
_PACKED_PAIR = "float4_e2m1fn_x2"
_DTYPES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "BOOL": (8, "bool"),
        "U8": (8, "uint8"),
        "I8": (8, "int8"),
        "U16": (16, "uint16"),
        "I16": (16, "int16"),
        "U32": (32, "uint32"),
        "I32": (32, "int32"),
        "U64": (64, "uint64"),
        "I64": (64, "int64"),
        "F16": (16, "float16"),
        "BF16": (16, "bfloat16"),
        "F32": (32, "float32"),
        "F64": (64, "float64"),
        "C64": (64, "complex64"),
        "F8_E4M3": (8, "float8_e4m3fn"),
        "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
        "F8_E5M2": (8, "float8_e5m2"),
        "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
        "F8_E8M0": (8, "float8_e8m0fnu"),
        "F4": (4, _PACKED_PAIR),
    }
)
# Three bytes for four elements, in an order that the format leaves open.
_SIX_BITS = frozenset({"F6_E2M3", "F6_E3M2"})
_EXPORTED = {name: (code, bits) for code, (bits, name) in _DTYPES.items()}


class SafetensorsEntry(msgspec.Struct, frozen=True):
    """One tensor: the format's dtype and shape, and its bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """Tensors in the order in which they are stored, and the file's metadata (None where it has none)."""

    entries: tuple[SafetensorsEntry, ...]
    metadata: dict[str, str] | None


def is_text(value: object) -> bool:
    """Whether UTF-8, in which headers are, can hold it: surrogates alone are no characters."""
    return type(value) is str and not _SURROGATE.search(value)


def header_length(data: bytes, file_bytes: int) -> int:
    """Bytes of JSON that follow the first eight bytes."""
    if len(data) < LENGTH_BYTES:
        raise CorruptCheckpointError(f"it is no safetensors file: it has {file_bytes} bytes")
    nbytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    if nbytes > MAXIMUM_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"its header is said to have {nbytes} bytes; up to {MAXIMUM_HEADER_BYTES} are read (is it no safetensors "
            "file?)"
        )
    if LENGTH_BYTES + nbytes > file_bytes:
        raise CorruptCheckpointError(f"truncated: its header ends at byte {LENGTH_BYTES + nbytes} of {file_bytes}")
    return nbytes


def parse_header(data: bytes, data_bytes: int) -> SafetensorsHeader:
    """Read and check a header.

    Parameters
    ----------
    data
        The JSON.
    data_bytes
        Bytes of the file that follow it: the tensors must fill them, without overlap and without gap.
    """
    if not data.startswith(b"{"):
        raise CorruptCheckpointError("it is no safetensors file: its header is no JSON object")
    with violations_are_corruption("its header"):
        members = parse_json(data)
    assert isinstance(members, dict)  # noqa: S101 - it begins with a brace
    metadata = _metadata(members.pop(METADATA_KEY, None))
    entries = [_entry(name, fields) for name, fields in members.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_ranges(entries, data_bytes)
    return SafetensorsHeader(tuple(entries), metadata)


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        return value
    raise CorruptCheckpointError(f"its {METADATA_KEY} does not map texts to texts")


def _entry(name: str, fields: Any) -> SafetensorsEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CorruptCheckpointError(f"{name[:200]}: it has no dtype, shape or data_offsets")
    shape, offsets, dtype = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not _are_sizes(shape, _MAXIMUM_DIMENSIONS):
        raise CorruptCheckpointError(f"{name[:200]}: its shape is no list of sizes")
    if not _are_sizes(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptCheckpointError(f"{name[:200]}: its data_offsets are no begin and end")
    if not isinstance(dtype, str):
        raise CorruptCheckpointError(f"{name[:200]}: its dtype is no text")
    return SafetensorsEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: Any, limit: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= limit
        and all(type(value) is int and 0 <= value < _LIMIT for value in values)
    )


def _check_ranges(entries: Iterable[SafetensorsEntry], data_bytes: int) -> None:
    """The tensors lie one after the other, and the file ends with the last."""
    end, previous = 0, "the header"
    for entry in entries:
        if entry.start != end:
            how = "overlaps" if entry.start < end else f"leaves {entry.start - end} bytes after"
            raise CorruptCheckpointError(f"{entry.name[:200]}: its data {how} that of {previous[:200]}")
        end, previous = entry.stop, entry.name
    if end > data_bytes:
        raise CorruptCheckpointError(
            f"truncated: {previous[:200]} ends at byte {end} of the data, of which {data_bytes} bytes are there, so "
            f"{end - data_bytes} are missing"
        )
    if end < data_bytes:
        raise CorruptCheckpointError(f"{data_bytes - end} bytes follow the last tensor")


def import_description(entry: SafetensorsEntry) -> tuple[str, tuple[int, ...]]:
    """Dtype name and shape that a tensor has here; its bytes must be as many as these say.

    Raises
    ------
    UnsafeObjectError
        The dtype is unknown, or has no counterpart.
    """
    if entry.dtype in _SIX_BITS:
        raise UnsafeObjectError(f"dtype {entry.dtype} packs elements of 6 bits, which no array holds; convert it first")
    if entry.dtype not in _DTYPES:
        raise UnsafeObjectError(f"dtype {entry.dtype[:40]!r} is none that safetensors files of this version hold")
    bits, name = _DTYPES[entry.dtype]
    if math.prod(entry.shape) * bits != (entry.stop - entry.start) * 8:
        raise CorruptCheckpointError(
            f"{entry.stop - entry.start} bytes are stored for dtype {entry.dtype} and shape {entry.shape}"
        )
    if name != _PACKED_PAIR:
        return name, entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise UnsafeObjectError(f"dtype F4 of shape {entry.shape}: pairs of elements do not fill its last dimension")
    return name, (*entry.shape[:-1], entry.shape[-1] // 2)


def export_dtype(name: str) -> str | None:
    """The format's name of a dtype; None where it has none."""
    found = _EXPORTED.get(name)
    return found[0] if found else None


def export_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as the format counts it: two elements for a packed pair."""
    return (*shape[:-1], shape[-1] * 2) if name == _PACKED_PAIR and shape else shape


def entry_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """What a tensor takes in a header at most, wherever its data lies."""
    return len(encode_header([SafetensorsEntry(name, dtype, shape, _LIMIT, _LIMIT)], None))


def encode_header(entries: Iterable[SafetensorsEntry], metadata: Mapping[str, str] | None) -> bytes:
    """Length and header, padded with spaces so that the data begins at a multiple of eight bytes."""
    members: dict[str, object] = {} if metadata is None else {METADATA_KEY: dict(metadata)}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        members[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded
