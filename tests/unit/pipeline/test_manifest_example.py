"""The example that reads checkpoints without savestream, against savestream's own encoders."""

from __future__ import annotations

import ast
import collections
import datetime
import decimal
import enum
import fractions
import hashlib
import importlib.util
import pathlib
import subprocess
import sys
import uuid
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from manifest_samples import ID, encoded, section_of, small_root

from savestream.arrays import dtype_name
from savestream.pipeline.codecs import CODECS, PLANES_ZSTD, RAW, ZSTD, FrameEncoder
from savestream.pipeline.manifest import Frames, IndexPart, ObjectEntry, PartEntry, PlanSection, encode_part
from savestream.planners.values import encode_value

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "read_without_savestream.py"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_without_savestream", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_imports_nothing_of_savestream() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules = {name.partition(".")[0] for name in found}
    assert modules - set(sys.stdlib_module_names) == {"numpy", "zstandard", "ml_dtypes", "xxhash"}


class Colour(enum.Enum):
    RED = 3


class Point(NamedTuple):
    x: int
    y: Any


@dataclass
class Setting:
    name: str
    value: Any


PLAIN_VALUES = [
    None,
    True,
    0,
    -(1 << 200),
    1.5,
    float("inf"),
    -0.0,
    1 - 2j,
    complex(float("-inf"), -0.0),
    "ü\ud800",
    b"\x00\xff",
    bytearray(b"x"),
    [1, [2.0, "$a"]],
    (1, (2,)),
    {"a": {"$b": 1}, "c": []},
    {1: "x", None: (), (1, 2): 3.5, "k": b""},
    {1, 2},
    frozenset({"x"}),
    collections.OrderedDict(a=1),
    collections.Counter({"a": -2}),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": [1]}),
    collections.deque([1, 2], 5),
    datetime.date(2025, 1, 31),
    datetime.datetime(2025, 1, 31, 12, 30, 1, 5, tzinfo=datetime.UTC, fold=1),
    datetime.datetime(2025, 1, 31),
    datetime.time(1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=-3), "X")),
    datetime.timedelta(-1, 5, 7),
    range(1, 1 << 60, 3),
    slice(None, 3, "x"),
    ...,
    pathlib.PurePosixPath("a/b"),
    pathlib.PureWindowsPath("a\\b"),
    decimal.Decimal("1.50"),
    fractions.Fraction(-3, 7),
    uuid.UUID(int=5),
    np.float32(1.5),
    np.int64(-1),
    np.bool_(True),
    np.datetime64("2025-01-31", "ns"),
    ml_dtypes.bfloat16(2.5),
    np.str_("x"),
    np.bytes_(b"y"),
    np.dtype(">i4"),
]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]!a}")
def test_values(reader: ModuleType, value: Any) -> None:
    found = reader.decode_value(encode_value(value, "key"))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_values_of_classes_become_plain(reader: ModuleType) -> None:
    value = {"p": Point(1, (2,)), "s": Setting("x", {3: 4}), "c": Colour.RED}
    found = reader.decode_value(encode_value(value, "key"))
    assert found == {"p": (1, (2,)), "s": {"name": "x", "value": {3: 4}}, "c": 3}
    assert type(found["p"]) is tuple


def test_every_tag_of_the_encoder_is_known(reader: ModuleType) -> None:
    from savestream.planners.value_decoding import _DECODERS

    assert set(reader.TAGS) == set(_DECODERS)


def test_a_pickle_is_not_loaded(reader: ModuleType) -> None:
    encoded_value = encode_value(Unsafe(), "key", allow_pickle=True)
    assert b"Unsafe" in reader.decode_value(encoded_value)
    with pytest.raises(reader.FormatError, match="eval"):
        reader.decode_value({"$eval": "1"})


class Unsafe:
    """Stored only with pickle."""


@pytest.mark.parametrize(
    "dtype",
    ["f4", ">f8", "?", "i1", "u8", "c16", "<M8[ns]", "m8[s]", "<U5", "S3", "V4", ml_dtypes.bfloat16, ml_dtypes.int4],
)
def test_dtypes(reader: ModuleType, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.dtype(dtype)
    assert reader.dtype_from_name(dtype_name(expected)) == expected
    monkeypatch.setattr(reader, "ml_dtypes", None)
    without = reader.dtype_from_name(dtype_name(expected))
    assert without.itemsize == expected.itemsize
    assert without == expected or expected.type.__module__.startswith("ml_dtypes")


def test_record_dtypes(reader: ModuleType) -> None:
    inner = np.dtype([("x", "<f4"), ("y", "<i2", (2, 3))], align=True)
    dtype = np.dtype({"names": ["a", "b"], "formats": [inner, ">u8"], "offsets": [4, 40], "itemsize": 64})
    assert reader.dtype_from_name(dtype_name(dtype)) == dtype


def frame_content(kind: str, nbytes: int) -> np.ndarray:
    random = np.random.default_rng(nbytes)
    if kind == "noise":
        return random.integers(0, 256, nbytes, np.uint8)
    numbers = (random.standard_normal(nbytes // 4 + 1)).astype("f4" if kind == "floats" else "f8")
    return numbers.view(np.uint8)[:nbytes].copy() if kind != "zeros" else np.zeros(nbytes, np.uint8)


@pytest.mark.parametrize("kind", ["noise", "floats", "doubles", "zeros"])
@pytest.mark.parametrize(("itemsize", "planar"), [(1, False), (2, True), (4, True), (8, True), (16, True)])
@pytest.mark.parametrize("nbytes", [0, 1, 5, 16, 1003, 300_001])
def test_frames(reader: ModuleType, kind: str, itemsize: int, planar: bool, nbytes: int) -> None:
    source = frame_content(kind, nbytes)
    output = np.empty(nbytes, np.uint8)
    frame = FrameEncoder().encode(source, itemsize, planar, output)
    stored = output[: frame.stored_length].tobytes()
    assert reader.decode_frame(stored, CODECS[frame.codec], itemsize, nbytes) == source.tobytes()
    reader.check_digest(stored, frame.stored_digest, "stored")
    reader.check_digest(source.tobytes(), frame.raw_digest, "raw")


def test_frames_of_every_codec_occur() -> None:
    codecs = set()
    for kind, planar in (("noise", True), ("floats", True), ("zeros", False)):
        source = frame_content(kind, 300_000)
        codecs.add(FrameEncoder().encode(source, 4, planar, np.empty(300_000, np.uint8)).codec)
    assert codecs == {RAW, ZSTD, PLANES_ZSTD}


def write_checkpoint(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """A checkpoint by hand: a matrix in two chunks over two frames, an alias, a scalar, bytes and values."""
    matrix = np.arange(24, dtype="<f4").reshape(4, 6)
    left, right = matrix[:, :2].tobytes(), matrix[:, 2:].tobytes()
    raw = left + right + np.int64(-5).tobytes() + b"opaque!"
    pieces, rows = [], []
    for start, stop, itemsize in ((0, 50, 4), (50, 96, 1), (96, 111, 8)):
        output = np.empty(stop - start, np.uint8)
        source = np.frombuffer(raw[start:stop], np.uint8)
        frame = FrameEncoder().encode(source, itemsize, itemsize > 1, output)
        rows.append((stop - start, sum(map(len, pieces)) + 3, frame, itemsize))
        pieces += [output[: frame.stored_length].tobytes(), b"pad"]
    data = b"pad" + b"".join(pieces)
    frames = Frames(
        raw_length=np.array([row[0] for row in rows], np.int64),
        object=np.zeros(3, np.uint32),
        offset=np.array([row[1] for row in rows], np.int64),
        stored_length=np.array([row[2].stored_length for row in rows], np.int64),
        codec=np.array([row[2].codec for row in rows], np.uint8),
        itemsize=np.array([row[3] for row in rows], np.uint32),
        stored_digest=np.array([list(row[2].stored_digest) for row in rows], np.uint8),
        raw_digest=np.array([list(row[2].raw_digest) for row in rows], np.uint8),
    )
    part = encode_part(IndexPart(ID, 0, [], [ObjectEntry(f"{ID}/r00000-0000.bin", len(data))], frames))
    path = f"{ID}/r00000.index.json"
    entry = PartEntry(0, path, len(part), len(raw), hashlib.sha256(part).hexdigest())
    (directory / ID).mkdir()
    (directory / path).write_bytes(part)
    (directory / ID / "r00000-0000.bin").write_bytes(data)
    (directory / "manifest.json").write_bytes(encoded(small_root(parts=[entry])))
    return {"t0": matrix, "t1": np.array(-5), "t2": np.array(-5)}


def test_a_whole_checkpoint(reader: ModuleType, tmp_path: pathlib.Path) -> None:
    arrays = write_checkpoint(tmp_path)
    state = reader.read_checkpoint(tmp_path)
    assert list(state) == ["t0", "t1", "t2", "t3", "v0", "v1"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(state[name], array)
        assert state[name].dtype == array.dtype
    assert state["t3"] == b"opaque!"
    assert (state["v0"], state["v1"]) == (3, (1, None))


def test_the_command_line(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path)
    done = subprocess.run([sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['t0']  float32 (4, 6)",
        "['t1']  int64 ()",
        "['t2']  int64 ()",
        "['t3']  b'opaque!'",
        "['v0']  3",
        "['v1'][0]  1",
        "['v1'][1]  None",
    ]


def test_every_damaged_byte_is_noticed(reader: ModuleType, tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path)
    for name, step in (("manifest.json", 37), (f"{ID}/r00000.index.json", 23), (f"{ID}/r00000-0000.bin", 1)):
        path = tmp_path / name
        data = path.read_bytes()
        for position in range(0, len(data), step):
            if name.endswith(".bin") and data[max(position - 2, 0) : position + 3].find(b"pad") >= 0:
                continue  # padding belongs to nobody
            damaged = bytearray(data)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises((ValueError, KeyError)):
                reader.read_checkpoint(tmp_path)
        path.write_bytes(data)
    reader.read_checkpoint(tmp_path)


def test_empty_arrays(reader: ModuleType, tmp_path: pathlib.Path) -> None:
    plan: PlanSection = section_of([(0, "float32", (0, 3), [(0, (0, 0), (0, 3))])])
    (tmp_path / "manifest.json").write_bytes(encoded(small_root(plan=plan, values=[], parts=[empty_part(tmp_path)])))
    assert reader.read_checkpoint(tmp_path)["t0"].shape == (0, 3)


def empty_part(directory: pathlib.Path) -> PartEntry:
    empty = np.zeros(0, np.int64)
    digests = np.zeros((0, 16), np.uint8)
    frames = Frames(empty, empty, empty, empty, empty, empty, digests, digests)
    data = encode_part(IndexPart(ID, 0, [], [], frames))
    path = f"{ID}/r00000.index.json"
    (directory / ID).mkdir()
    (directory / path).write_bytes(data)
    return PartEntry(0, path, len(data), 0, hashlib.sha256(data).hexdigest())
