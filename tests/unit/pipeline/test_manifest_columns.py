"""Columns, strict JSON and the proof of exact cover."""

from __future__ import annotations

import base64
import itertools
import json
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard

from savestream.pipeline import coverage
from savestream.pipeline.columns import LIST_ROWS, decode_column, decode_digests, encode_column, encode_digests
from savestream.pipeline.coverage import Boxes, check_bounds, check_cover
from savestream.pipeline.limits import MAXIMUM_COLUMN_ROWS, MAXIMUM_JSON_NESTING, FormatViolation
from savestream.pipeline.strict_json import checked_json, json_text, nesting_depth, parse_json

KINDS = ["|u1", "<u2", "<u4", "<i8"]
Chunk = tuple[int, list[int], list[int]]  # array, offsets, sizes


# --- columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, LIST_ROWS, LIST_ROWS + 1, 5000])
def test_columns_come_back(kind: str, rows: int) -> None:
    information = np.iinfo(kind)
    values = np.random.default_rng(rows).integers(0, information.max, rows, kind, endpoint=True)
    values[:1] = information.max
    text = encode_column(values, kind)
    assert text.isascii()
    parsed = json.loads(text)
    assert isinstance(parsed, list) == (rows <= LIST_ROWS)
    back = decode_column(parsed, kind, rows)
    assert back.dtype == np.dtype(kind)
    np.testing.assert_array_equal(back, values)


def test_the_stored_form_is_what_the_format_says() -> None:
    values = np.arange(300, dtype=np.int64) * 1000
    parsed = json.loads(encode_column(values, "<i8"))
    assert parsed["type"] == "<i8"
    assert parsed["count"] == 300
    planes = zstandard.ZstdDecompressor().decompress(base64.b64decode(parsed["zstd_b64"]))
    assert planes[:300] == bytes(int(value) & 0xFF for value in values)
    assert planes[300:600] == bytes(int(value) >> 8 & 0xFF for value in values)


def test_narrower_stored_types_are_read() -> None:
    for stored in ("|u1", "|i1", "<u2", "<i4"):
        parsed = json.loads(encode_column(np.full(300, 100), stored))
        assert decode_column(parsed, "<i8").tolist() == [100] * 300


@pytest.mark.parametrize(("values", "kind"), [([256], "|u1"), ([-1], "|u1"), ([1 << 32], "<u4"), ([-1] * 300, "<u4")])
def test_values_that_do_not_fit_are_not_written(values: list[int], kind: str) -> None:
    with pytest.raises(FormatViolation, match="does not fit"):
        encode_column(np.array(values), kind)


def long_column(nbytes: int = 300 * 8, **changes: object) -> dict[str, object]:
    frame = zstandard.ZstdCompressor().compress(bytes(nbytes))
    return {"type": "<i8", "count": 300, "zstd_b64": base64.b64encode(frame).decode(), **changes}


def frame_of(frame: bytes) -> dict[str, object]:
    return long_column(zstd_b64=base64.b64encode(frame).decode())


def unsized(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def wide(data: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=len(data))
    return compressor.compress(data) + compressor.flush()


GOOD_FRAME = zstandard.ZstdCompressor().compress(bytes(2400))


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        {},
        [1, 2, True],
        [1.0],
        ["1"],
        [None],
        [[1]],
        [1 << 63],
        [-(1 << 63) - 1],
        [10**400],
        long_column(type="<f8"),
        long_column(type="<u8"),
        long_column(type=">i8"),
        long_column(type="|O"),
        long_column(type="<M8[ns]"),
        long_column(type=8),
        long_column(count=-1),
        long_column(count=True),
        long_column(count=300.0),
        long_column(count=299),
        long_column(count=10**12),
        long_column(count=None),
        long_column(zstd_b64=None),
        long_column(zstd_b64="!!!!"),
        long_column(zstd_b64="ü"),
        long_column(zstd_b64=""),
        long_column(zstd_b64="AAA"),
        frame_of(GOOD_FRAME[:-1]),
        frame_of(GOOD_FRAME + b"\0"),
        frame_of(GOOD_FRAME * 2),
        frame_of(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + GOOD_FRAME),
        frame_of(unsized(bytes(2400))),
        frame_of(zstandard.ZstdCompressor().compress(bytes(2408))),
        {"type": "<i8", "count": 300, "b64": ""},
    ],
)
def test_what_is_no_column_is_refused(value: object) -> None:
    with pytest.raises(FormatViolation):
        decode_column(value, "<i8")


def test_the_count_must_be_the_expected_one() -> None:
    for value in ([1, 2, 3], long_column()):
        with pytest.raises(FormatViolation, match="where 4 are expected"):
            decode_column(value, "<i8", 4)


def test_a_frame_that_needs_a_large_window_is_refused() -> None:
    rows = 2 * 1024 * 1024  # 16 MiB: smaller content would be its own window
    value = {"type": "<i8", "count": rows, "zstd_b64": base64.b64encode(wide(bytes(rows * 8))).decode()}
    with pytest.raises(FormatViolation, match="window"):
        decode_column(value, "<i8")


def bomb(rows: int) -> dict[str, object]:
    """A column that really decompresses to 8 bytes a row, from a few kilobytes."""
    frame = zstandard.ZstdCompressor().compressobj(size=rows * 8)
    pieces = [frame.compress(bytes(1 << 20)) for _ in range(rows * 8 >> 20)] + [frame.flush()]
    return {"type": "<i8", "count": rows, "zstd_b64": base64.b64encode(b"".join(pieces)).decode()}


def test_a_bomb_allocates_nothing() -> None:
    value, larger = bomb(MAXIMUM_COLUMN_ROWS), bomb(2 * MAXIMUM_COLUMN_ROWS)
    tracemalloc.start()
    try:
        with pytest.raises(FormatViolation, match="more than"):
            decode_column(larger, "<i8")
        with pytest.raises(FormatViolation, match="where 3 are expected"):
            decode_column(value, "<i8", 3)
        value["count"] = 3  # the count lies, the frame does not
        with pytest.raises(FormatViolation, match="zstd frame"):
            decode_column(value, "<i8", 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_header_that_claims_more_than_it_holds() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(2400)))
    position = bytes(frame).index((2400 - 256).to_bytes(2, "little"))  # the two-byte form adds 256
    frame[position : position + 2] = (3200 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == 3200
    with pytest.raises(FormatViolation, match="zstd frame"):
        decode_column({**frame_of(bytes(frame)), "count": 400}, "<i8", 400)


# --- digests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 500])
def test_digests_come_back(rows: int) -> None:
    values = np.random.default_rng(rows).integers(0, 256, (rows, 16), np.uint8)
    back = decode_digests(json.loads(encode_digests(values)), rows)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize(
    "changes",
    [{"count": 1}, {"count": 3}, {"count": 10**15}, {"type": "|V8"}, {"b64": "AAAA"}, {"b64": "?" * 44}, {"b64": 1}],
)
def test_what_is_no_column_of_digests_is_refused(changes: dict[str, object]) -> None:
    value = json.loads(encode_digests(np.ones((2, 16), np.uint8)))
    with pytest.raises(FormatViolation):
        decode_digests({**value, **changes})
    with pytest.raises(FormatViolation):
        encode_digests(np.ones((2, 8), np.uint8))


# --- JSON -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":1}', "more than once"),
        (b'[{"b":{"a":1,"\\u0061":2}}]', "more than once"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "too large"),
        (b"[1", "not JSON"),
        (b"", "not JSON"),
        (b"[1] 2", "not JSON"),
        (b"\xff", "not JSON"),
        (b"\xef\xbb\xbf[]", "not JSON"),
        ("[1]".encode("utf-16"), "not JSON"),
        (b"[1,]", "not JSON"),
        (b"['a']", "not JSON"),
        (b'["\x01"]', "not JSON"),
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
        (b"[" * (MAXIMUM_JSON_NESTING + 1) + b"]" * (MAXIMUM_JSON_NESTING + 1), "deep"),
        (b"[" + b"9" * 5000 + b"]", "not JSON"),
    ],
)
def test_what_json_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(FormatViolation, match=message):
        parse_json(text)


def test_endless_numbers_are_refused_where_python_would_convert_them() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(FormatViolation, match="5000 digits"):
            parse_json(b"[" + b"9" * 5000 + b"]")
        assert parse_json(b"[" + b"9" * 4300 + b"]") == [10**4300 - 1]
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"1", 0),
        (b'"[[["', 0),
        (b"[]", 1),
        (b'[[],{"a":[1]}]', 3),
        (b'["\\"[[[", {}]', 2),
        (b'["\\\\", [["\\\\\\"[["]]]', 3),
        (b'{"[":"{","\\\\":[[]]}', 3),
    ],
)
def test_depth(text: bytes, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    json.loads(text)
    assert nesting_depth(text) == depth
    for window in range(1, len(text) + 1):
        monkeypatch.setattr("savestream.pipeline.strict_json._SCAN_BYTES", window)
        assert nesting_depth(text) == depth


def test_json_keeps_what_it_can_and_refuses_the_rest() -> None:
    value = {"a": [1, -2.5, 1e300, None, True, 'ü\ud800\x00\\"'], "": {}}
    assert parse_json(checked_json(value).encode("ascii")) == value
    for refused in ({1: 2}, (1,), {"a": {None: 1}}, float("inf"), {1, 2}, b"x"):
        with pytest.raises(FormatViolation):
            checked_json(refused)
    assert json_text((1,)) == "[1]"


# --- exact cover ------------------------------------------------------------------------------------------


def boxes_of(shapes: list[list[int]], chunks: list[Chunk]) -> Boxes:
    ndim = len(shapes[0])
    return Boxes(
        shapes=np.array(shapes, np.int64).reshape(len(shapes), ndim),
        owners=np.array([chunk[0] for chunk in chunks], np.int64),
        offsets=np.array([chunk[1] for chunk in chunks], np.int64).reshape(len(chunks), ndim),
        sizes=np.array([chunk[2] for chunk in chunks], np.int64).reshape(len(chunks), ndim),
        name=lambda row: f"array {row}",
    )


PINWHEEL = [(0, [0, 0], [2, 1]), (0, [0, 1], [1, 2]), (0, [1, 2], [2, 1]), (0, [2, 0], [1, 2]), (0, [1, 1], [1, 1])]


def test_covers_that_are_exact() -> None:
    check_cover(boxes_of([[3, 3]], PINWHEEL))
    check_cover(boxes_of([[3, 3]], [*PINWHEEL, (0, [1, 1], [0, 2])]))  # an empty chunk harms nothing
    check_cover(boxes_of([[]], [(0, [], [])]))
    check_cover(boxes_of([[0, 5]], [(0, [0, 0], [0, 5]), (0, [0, 0], [0, 2])]))
    check_cover(boxes_of([[0, 5]], []))


@pytest.mark.parametrize(
    ("shapes", "chunks", "message"),
    [
        ([[3, 3]], PINWHEEL[:-1], "array 0: its chunks overlap or leave a hole"),
        ([[3, 3]], [*PINWHEEL, PINWHEEL[-1]], "overlap"),
        ([[3, 3]], [*PINWHEEL[:-1], (0, [0, 0], [1, 1])], "overlap"),  # the volume is right
        ([[3, 3], [2, 2]], [*PINWHEEL], "array 1: it has no chunk"),
        ([[4]], [(0, [0], [3])], "does not cover"),
        ([[4]], [(0, [0], [2]), (0, [1], [2])], "overlap"),
        ([[4], [4]], [(0, [0], [4]), (1, [0], [2]), (1, [0], [2])], "array 1"),
        ([[]], [(0, [], []), (0, [], [])], "overlap"),
        ([[2] * 9], [(0, list(at), [1] * 9) for at in itertools.product((0, 1), repeat=9)], "cut along 9 dimensions"),
    ],
)
def test_covers_that_are_not(shapes: list[list[int]], chunks: list[Chunk], message: str) -> None:
    with pytest.raises(FormatViolation, match=message):
        check_cover(boxes_of(shapes, chunks))


def test_batches_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_BATCH_CORNERS", 40)
    chunks = [(array, offsets, sizes) for array in range(6) for _, offsets, sizes in PINWHEEL]
    check_cover(boxes_of([[3, 3]] * 6, chunks))
    chunks[4 * 5] = (4, [0, 0], [1, 1])
    with pytest.raises(FormatViolation, match="array 4"):
        check_cover(boxes_of([[3, 3]] * 6, chunks))
    monkeypatch.setattr(coverage, "_MAXIMUM_CORNERS", 23)
    with pytest.raises(FormatViolation, match="too many chunks"):
        check_cover(boxes_of([[3, 3]], PINWHEEL))


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "message"),
    [
        ([4], [-1], [4], "negative"),
        ([4], [0], [-1], "negative"),
        ([4], [1], [4], "outside"),
        ([4], [(1 << 63) - 1], [(1 << 63) - 1], "outside"),
        ([-4], [0], [0], "shape is negative"),
        ([1 << 40, 1 << 40], [0, 0], [0, 0], "2\\*\\*62"),
        ([0, 1 << 62, 1 << 62], [0, 0, 0], [0, 0, 0], "2\\*\\*62"),
        ([1 << 60], [0], [1], "2\\*\\*62"),
    ],
)
def test_bounds(shape: list[int], offsets: list[int], sizes: list[int], message: str) -> None:
    with pytest.raises(FormatViolation, match=f"array 0: .*{message}"):
        check_bounds(boxes_of([shape], [(0, offsets, sizes)]), np.array([8]))
