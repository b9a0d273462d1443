"""Columns of integers inside JSON: short ones as lists, long ones as zstd-compressed byte planes in base64.

A long column is ``{"type":"<i8","count":n,"zstd_b64":"..."}``: all lowest bytes, then all second bytes, and so on, as
one zstd frame that states its content size. Digests do not compress: ``{"type":"|V16","count":n,"b64":"..."}``.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from savestream.pipeline.limits import DIGEST_BYTES, MAXIMUM_COLUMN_ROWS, MAXIMUM_WINDOW_BYTES, FormatViolation
from savestream.pipeline.strict_json import JsonValue, json_text, require

__all__ = ["LIST_ROWS", "IntegerColumn", "decode_column", "decode_digests", "encode_column", "encode_digests"]

LIST_ROWS = 256
_ZSTD_LEVEL = 3  # its window is 2 MiB
_DIGEST_TYPE = f"|V{DIGEST_BYTES}"
_INTEGER_TYPES = frozenset({"|u1", "|i1"} | {f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)})

IntegerColumn: TypeAlias = npt.NDArray[Any]  # of one of the integer types


def encode_column(column: IntegerColumn, kind: str) -> bytes:
    """JSON text of a column.

    Parameters
    ----------
    column
        Integers, shape ``(n,)``.
    kind
        The stored type, such as ``"<i8"``; every value must fit.
    """
    values = column.astype(kind)
    require(np.array_equal(values, column), f"a value does not fit {kind}")
    require(len(values) <= MAXIMUM_COLUMN_ROWS, f"{len(values)} rows, more than {MAXIMUM_COLUMN_ROWS}")
    if len(values) <= LIST_ROWS:
        return json_text(values.tolist()).encode("ascii")
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(planes.data)
    return b'{"type":"%b","count":%d,"zstd_b64":"%b"}' % (kind.encode(), len(values), base64.b64encode(frame))


def decode_column(value: JsonValue, kind: str, count: int | None = None) -> IntegerColumn:
    """The column behind parsed JSON, as an array of type ``kind``, shape ``(n,)``.

    Nothing is allocated for a count that neither ``count`` nor the frame header confirms.

    Raises
    ------
    FormatViolation
        It is no column, holds values that ``kind`` cannot, or has not exactly ``count`` rows where that is given.
    """
    if isinstance(value, list):
        _check_count(len(value), count)
        return _from_list(value, kind)
    stored, rows, text = _members(value, "zstd_b64")
    require(stored in _INTEGER_TYPES and np.can_cast(stored, kind), f"type {stored[:20]!r} where {kind} is expected")
    _check_count(rows, count)
    itemsize = np.dtype(stored).itemsize
    planes = np.frombuffer(_decompress(_from_base64(text), rows * itemsize), np.uint8).reshape(itemsize, rows)
    values = np.ascontiguousarray(planes.T).reshape(-1).view(stored)
    return values.astype(kind, copy=False)


def encode_digests(digests: npt.NDArray[np.uint8]) -> bytes:
    """JSON text of digests, shape ``(n, 16)``, each in the canonical (big-endian) order of its bytes."""
    require(digests.dtype == np.uint8 and digests.shape[1:] == (DIGEST_BYTES,), "digests are not 16 bytes each")
    text = base64.b64encode(np.ascontiguousarray(digests).data)
    return b'{"type":"%b","count":%d,"b64":"%b"}' % (_DIGEST_TYPE.encode(), len(digests), text)


def decode_digests(value: JsonValue, count: int | None = None) -> npt.NDArray[np.uint8]:
    """The digests behind parsed JSON, shape ``(n, 16)``; raises :class:`FormatViolation`."""
    stored, rows, text = _members(value, "b64")
    require(stored == _DIGEST_TYPE, f"type {stored[:20]!r} where {_DIGEST_TYPE} is expected")
    _check_count(rows, count)
    require(len(text) == -(-rows * DIGEST_BYTES // 3) * 4, f"{rows} digests do not fill {len(text)} base64 digits")
    data = _from_base64(text)
    require(len(data) == rows * DIGEST_BYTES, f"{rows} digests do not fill {len(data)} bytes")
    return np.frombuffer(data, np.uint8).reshape(rows, DIGEST_BYTES)


def _from_list(value: list[JsonValue], kind: str) -> IntegerColumn:
    require(set(map(type, value)) <= {int}, "a row is not an integer")
    try:
        return np.array(value, dtype=kind)
    except OverflowError as error:
        raise FormatViolation(f"a row does not fit {kind}") from error


def _members(value: JsonValue, payload: str) -> tuple[str, int, str]:
    require(isinstance(value, dict), "not a column")
    stored, rows, text = value.get("type"), value.get("count"), value.get(payload)
    require(isinstance(stored, str), "a column without a type")
    require(type(rows) is int and rows >= 0, "a column without a count")
    require(isinstance(text, str), f"a column without {payload}")
    return stored, rows, text


def _check_count(rows: int, expected: int | None) -> None:
    require(rows <= MAXIMUM_COLUMN_ROWS, f"{rows} rows, more than {MAXIMUM_COLUMN_ROWS}")
    require(expected is None or rows == expected, f"{rows} rows where {expected} are expected")


def _from_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise FormatViolation(f"not base64: {error}") from error


def _decompress(frame: bytes, nbytes: int) -> bytes:
    """Decompress one zstd frame that must say that it holds ``nbytes``: its claim is checked before it is believed."""
    try:
        header = zstandard.get_frame_parameters(frame)
        require(
            header.content_size == nbytes, f"a zstd frame of {header.content_size} bytes where {nbytes} are expected"
        )
        require(header.window_size <= MAXIMUM_WINDOW_BYTES, f"a zstd window of {header.window_size} bytes")
        if not nbytes:
            require(len(frame) <= 32, "an empty zstd frame with content")
            return b""
        data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatViolation(f"a damaged zstd frame: {error}") from error
    require(len(data) == nbytes, f"a zstd frame gave {len(data)} bytes where {nbytes} are expected")
    return data
