"""Index parts: round trips, agreement with the root, and lies."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from manifest_samples import ID, compact, edited_part, entry_for, small_frames, small_part

from savestream.errors import CorruptCheckpointError, PlanError, UnsupportedFormatError
from savestream.pipeline.manifest import Frames, IndexPart, ObjectEntry, PartEntry, decode_part, encode_part

PATH = f"{ID}/r00000.index.json"


def columns_of(frames: Frames) -> dict[str, Any]:
    return {name: column for name, column in vars(frames).items() if name != "raw_starts"}


def assert_same_part(found: IndexPart, expected: IndexPart) -> None:
    for name in ("checkpoint_id", "rank", "values", "objects"):
        assert getattr(found, name) == getattr(expected, name)
    for name, column in columns_of(expected.frames).items():
        back = getattr(found.frames, name)
        assert back.dtype == column.dtype
        np.testing.assert_array_equal(back, column)


def many_frames(count: int) -> Frames:
    random = np.random.default_rng(count)
    raw = random.integers(1, 1 << 22, count)
    return Frames(
        raw_length=raw,
        object=np.zeros(count, np.uint32),
        offset=np.cumsum(raw) - raw,
        stored_length=raw,
        codec=np.zeros(count, np.uint8),
        itemsize=np.ones(count, np.uint32),
        stored_digest=random.integers(0, 256, (count, 16), np.uint8),
        raw_digest=random.integers(0, 256, (count, 16), np.uint8),
    )


def test_a_part_comes_back_whole() -> None:
    part = small_part(values=[{"$int": "0x20000000000001"}, "ü"], rank=3)
    data = encode_part(part)
    assert data.isascii()
    entry = entry_for(data, rank=3)
    assert_same_part(decode_part(data, path=PATH, entry=entry), part)
    assert encode_part(decode_part(data, path=PATH)) == data


def test_many_frames_come_back() -> None:
    frames = many_frames(5000)
    total = int(frames.raw_length.sum())
    part = small_part(objects=[ObjectEntry(f"{ID}/r00000-0000.bin", total)], frames=frames)
    data = encode_part(part)
    back = decode_part(data, path=PATH, entry=entry_for(data, raw_bytes=total))
    assert_same_part(back, part)
    assert back.frames.raw_starts[0] == 0
    assert back.frames.raw_starts[-1] == total
    assert encode_part(back) == data


def test_a_part_without_frames() -> None:
    part = small_part(objects=[], frames=many_frames(0))
    data = encode_part(part)
    back = decode_part(data, path=PATH, entry=entry_for(data, raw_bytes=0))
    assert len(back.frames) == 0
    assert back.frames.raw_starts.tolist() == [0]


def test_raw_starts() -> None:
    assert small_frames().raw_starts.tolist() == [0, 96, 104, 111]
    assert len(small_frames()) == 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bytes": 1}, "the root says 1"),
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"rank": 1}, "rank"),
        ({"raw_bytes": 110}, "111 raw bytes"),
        ({"path": "f" * 32 + "/r00000.index.json"}, "belongs to checkpoint"),
    ],
)
def test_a_part_must_agree_with_the_root(entry: dict[str, Any], message: str) -> None:
    data = encode_part(small_part())
    good = {"rank": 0, "path": PATH, "bytes": len(data), "raw_bytes": 111, "sha256": entry_for(data).sha256}
    decode_part(data, path=PATH, entry=PartEntry(**good))
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        decode_part(data, path=PATH, entry=PartEntry(**{**good, **entry}))
    assert PATH in str(caught.value)


def test_every_flipped_bit_is_noticed() -> None:
    data = encode_part(small_part())
    entry = entry_for(data)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptCheckpointError):
            decode_part(bytes(damaged), path=PATH, entry=entry)


def set_column(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda members: members["frames"].update({name: value})


def set_object(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda members: members["objects"][0].update(changes)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no checkpoint_id": lambda members: members.pop("checkpoint_id"),
    "no rank": lambda members: members.pop("rank"),
    "no frames": lambda members: members.pop("frames"),
    "no objects": lambda members: members.pop("objects"),
    "no values": lambda members: members.pop("values"),
    "checkpoint_id of another type": lambda members: members.update(checkpoint_id=7),
    "rank below 0": lambda members: members.update(rank=-1),
    "rank as a float": lambda members: members.update(rank=0.0),
    "rank as a bool": lambda members: members.update(rank=False),
    "frames as a list": lambda members: members.update(frames=[]),
    "objects as numbers": lambda members: members.update(objects=[1, 2]),
    "object twice": lambda members: members.update(objects=[members["objects"][0]] * 2),
    "path upwards": set_object(path="../../etc/passwd"),
    "path up from the id": set_object(path=f"{ID}/../r00000-0000.bin"),
    "absolute path": set_object(path="/etc/passwd"),
    "path without id": set_object(path="r00000-0000.bin"),
    "path in another checkpoint": set_object(path="f" * 32 + "/r00000-0000.bin"),
    "path to a directory": set_object(path=f"{ID}/"),
    "path with a newline": set_object(path=f"{ID}/r00000-0000.bin\n"),
    "path with other digits": set_object(path=f"{ID}/r\u0660\u0660\u0660\u0660\u0660-0000.bin"),
    "path with a backslash": set_object(path=f"{ID}\\r00000-0000.bin"),
    "path with a NUL": set_object(path=f"{ID}/r00000-0000.bin\0"),
    "path to the part": set_object(path=PATH),
    "path as a number": set_object(path=1),
    "negative object size": set_object(bytes=-1),
    "object size as text": set_object(bytes="8192"),
    "object too short": set_object(bytes=4103),
    "negative source": set_object(source=-1),
    "absurd source": set_object(source=1 << 20),
    "no source": lambda members: members["objects"][0].pop("source"),
    "negative raw_length": set_column("raw_length", [96, -8, 7]),
    "huge raw_length": set_column("raw_length", [1 << 31, 8, 7]),
    "raw_length too large for 64 bits": set_column("raw_length", [1 << 63, 8, 7]),
    "stored longer than raw": set_column("stored_length", [97, 8, 7]),
    "raw frame of another length": set_column("stored_length", [60, 7, 7]),
    "negative stored_length": set_column("stored_length", [-1, 8, 7]),
    "negative offset": set_column("offset", [-1, 4096, 10]),
    "offset beyond the object": set_column("offset", [0, 4096, 11]),
    "offset that would overflow": set_column("offset", [(1 << 63) - 1, 4096, 10]),
    "object out of range": set_column("object", [0, 0, 2]),
    "negative object": set_column("object", [0, 0, -1]),
    "unknown codec": set_column("codec", [3, 0, 0]),
    "codec out of type": set_column("codec", [300, 0, 0]),
    "itemsize 0": set_column("itemsize", [4, 0, 1]),
    "planes of no numbers": set_column("itemsize", [3, 8, 1]),
    "fewer rows": set_column("offset", [0, 4096]),
    "more rows": set_column("offset", [0, 4096, 10, 10]),
    "float rows": set_column("offset", [0.0, 4096.0, 10.0]),
    "column as text": set_column("offset", "0"),
    "digests as integers": set_column("raw_digest", [1, 2, 3]),
    "fewer digests": set_column("raw_digest", {"type": "|V16", "count": 2, "b64": "A" * 43 + "="}),
    "claimed digests": set_column("stored_digest", {"type": "|V16", "count": 1 << 40, "b64": "A" * 64}),
    "claimed rows": set_column("offset", {"type": "<i8", "count": 1 << 40, "zstd_b64": "KLUv/SAAAQAA"}),
    "missing column": lambda members: members["frames"].pop("codec"),
    "missing digests": lambda members: members["frames"].pop("stored_digest"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_part_is_refused_without_allocating_for_it(lie: str) -> None:
    data = edited_part(LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=f"index part {PATH}: "):
            decode_part(data, path=PATH)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_sample_itself_is_accepted() -> None:
    # Otherwise the lies above might be refused for another reason.
    assert_same_part(decode_part(edited_part(lambda _: None), path=PATH), small_part())


def test_an_object_of_another_checkpoint_needs_a_source() -> None:
    other = "f" * 32 + "/r00000-0000.bin"
    part = decode_part(edited_part(set_object(path=other, source=1)), path=PATH)
    assert part.objects[0] == ObjectEntry(other, 8192, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\x80\x04.", b'{"format":"savestream"}', b"[" * 10**6, b'{"format":"savestream-index",' * 1000],
)
def test_what_is_no_part_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_part(data, path=PATH)


def test_duplicate_keys_and_deep_nesting() -> None:
    data = encode_part(small_part())
    for text in (b',"rank":0}', b',"x":' + b"[" * 1000 + b"]" * 1000 + b"}", b',"x":' + b"[" * 10**6):
        with pytest.raises(CorruptCheckpointError):
            decode_part(data[:-1] + text, path=PATH)
    assert decode_part(data[:-1] + b',"x":[]}', path=PATH).rank == 0


def test_newer_formats() -> None:
    members = json.loads(encode_part(small_part()))
    with pytest.raises(UnsupportedFormatError, match=r"7\.1"):
        decode_part(compact({**members, "version": [7, 1]}), path=PATH)
    with pytest.raises(UnsupportedFormatError, match="holes"):
        decode_part(compact({**members, "requires": ["holes"]}), path=PATH)
    assert decode_part(compact({**members, "version": [1, 5]}), path=PATH).rank == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_id": "A" * 32}, "checkpoint_id"),
        ({"rank": -1}, "rank"),
        ({"values": [float("nan")]}, "JSON"),
        ({"values": [{1: 2}]}, "strings as keys"),
        ({"objects": [ObjectEntry("a/b.bin", 1)]}, "no path of a data object"),
        ({"frames": small_frames(codec=np.array([9, 0, 0], np.uint8))}, "frame 0: its codec"),
        ({"frames": small_frames(offset=np.array([0, 8185, 10], np.int64))}, "frame 1: it reaches outside"),
        ({"frames": small_frames(object=np.array([0, 0], np.uint32))}, "frames.object has shape"),
        ({"frames": small_frames(raw_digest=np.zeros((3, 8), np.uint8))}, "frames.raw_digest has shape"),
    ],
)
def test_the_writer_refuses_what_the_reader_would(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        encode_part(small_part(**changes))
