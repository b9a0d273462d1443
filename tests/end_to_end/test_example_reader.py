"""The reader that needs no savestream agrees with savestream on every sort of checkpoint."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import uuid
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from roundtrip_support import assert_same, load_example

from savestream import (
    LoadOptions,
    PlanCache,
    RecordedDataclass,
    RecordedEnum,
    RecordedTuple,
    SaveOptions,
    ShardedArray,
    blocking,
)

reader = load_example("read_without_savestream")


class Point(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Settings:
    rate: Any
    name: str = "adam"


class Colour(enum.Enum):
    RED = "r"


def plain(value: Any) -> Any:
    """What savestream loads, in the reader's classes: tuples, dicts and values in place of recorded classes."""
    if isinstance(value, RecordedTuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, RecordedDataclass):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, RecordedEnum):
        return plain(value.value)
    if isinstance(value, collections.defaultdict):
        pairs = {plain(key): plain(item) for key, item in value.items()}
        return collections.defaultdict(value.default_factory, pairs)
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((plain(key), plain(item)) for key, item in value.items())
    if isinstance(value, dict):
        made = type(value)()
        dict.update(made, {plain(key): plain(item) for key, item in value.items()})
        return made
    if isinstance(value, collections.deque):
        return collections.deque(map(plain, value), value.maxlen)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(plain, value))
    return value


def numbers(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(dtype)


W = numbers((40, 30))
BOXES = [((0, 0), numbers((3, 9))), ((3, 0), numbers((5, 4))), ((3, 4), numbers((5, 5))), ((8, 0), numbers((0, 9)))]
HOLES = np.dtype({"names": ["a", "b"], "formats": ["<u2", (">f4", (2,))], "offsets": [3, 9], "itemsize": 19})
STATES: dict[str, Any] = {
    "train": {"model": {"w": W, "tied": W, "t": W.T}, "opt": {0: {"m": W * 2}, 1: None}, "step": 7, "log": [0.5, 1.5]},
    "dtypes": {
        str(number): numbers(50, dtype)
        for number, dtype in enumerate(
            ["f2", "f4", "f8", ">f8", "c8", "c16", "i1", "u2", ">i4", "M8[s]", "m8[ns]", "?", "longdouble", "U7", "S5"]
        )
    },
    "extensions": {name: numbers(33, getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4")},
    "records": [np.zeros(7, HOLES), np.ones((2, 2), [("t", "M8[D]"), ("n", "i8"), ("s", "U3")])],
    "shapes": (numbers(()), numbers((0,)), numbers((3, 0)), numbers((1, 1, 1)), numbers(5)[::-2], np.zeros(3, "V0")),
    "large": {"smooth": np.linspace(0, 1, 3_000_000, dtype=np.float32), "same": np.ones(2_000_000, np.float64)},
    "small": {f"layer{number}.é/{number % 7}": numbers(number % 5 + 1) for number in range(700)},
    "sharded": {"w": ShardedArray((8, 9), BOXES), "empty": ShardedArray((0, 2), [], dtype="int16")},
    "containers": {
        "od": collections.OrderedDict(z=W[:2], a=1),
        "dd": collections.defaultdict(list, {"k": [W[:1]]}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([W[:1], None], 5),
        "nt": Point(W[:1], Point(1, None)),
        "dc": Settings(W[:1]),
        "empties": ({}, [], (), set(), None),
        "keys": {1: 1, 2.5: 2, None: 3, (1, "a"): 4, b"x": 5, "a.b": 6, "": 7, "$int": 8},
        "array keys": {1: W[:1], None: W[:1], (1, "a"): W[:1], Colour.RED: W[:1], "x.y[0]": W[:1]},
    },
    "values": {
        "ints": [0, -1, 2**80, -(2**63), True],
        "floats": [0.1, -0.0, float("inf"), float("nan"), 5e-324],
        "complex": complex(-0.0, float("inf")),
        "texts": ["", "\ud800", "é🧠", "\0"],
        "bytes": [b"\0\xff", bytearray(b"x")],
        "times": [
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
            datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=-5), "odd")),
            datetime.date(1, 1, 1),
            datetime.time(1, 2, tzinfo=datetime.UTC),
            datetime.timedelta(-1, 5, 7),
        ],
        "numpy": [
            np.float32(-0.0),
            np.datetime64("NaT", "ns"),
            np.str_("a\0"),
            np.bytes_(b"a\0"),
            ml_dtypes.bfloat16(2),
        ],
        "dtype": np.dtype([("a", ">i4")]),
        "others": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=7), range(3), slice(1), ...],
        "paths": [PurePosixPath("/a"), PureWindowsPath("C:/x")],
        "classes": [Point(1, Colour.RED), Settings(2), {Colour.RED: frozenset({1})}],
    },
    "an array": W,
    "a value": "text",
    "nothing": {},
}


@pytest.mark.parametrize("compression", ["none", "zstd", "auto"])
@pytest.mark.parametrize("name", STATES)
def test_the_reader_agrees(name: str, compression: Any, tmp_path: Path) -> None:
    blocking.save(STATES[name], tmp_path / "c", options=SaveOptions(compression=compression))
    found = reader.read_checkpoint(tmp_path / "c")
    assert_same(found, plain(blocking.load(tmp_path / "c")))


def test_every_codec_was_read(tmp_path: Path) -> None:
    codecs: set[str] = set()
    for name in ("large", "records", "dtypes"):
        blocking.save(STATES[name], tmp_path / name, options=SaveOptions(compression="zstd"))
        root = reader.parse_root((tmp_path / name / "manifest.json").read_bytes())
        (entry,) = root["parts"]
        part = reader.parse_part((tmp_path / name / entry["path"]).read_bytes(), entry)
        codecs.update(root["codecs"][number] for number in reader.column(part["frames"]["codec"]).tolist())
    assert codecs == {"raw", "zstd", "planes-zstd"}


def test_staged_and_cached_saves_and_an_overwrite_read_alike(tmp_path: Path) -> None:
    cache = PlanCache()
    for step in range(3):
        state = {"w": W + step, "step": step}
        handle = blocking.start_save(state, tmp_path / "c", plan_cache=cache, overwrite=step > 0)
        handle.result(60)
        assert_same(reader.read_checkpoint(tmp_path / "c"), state)


def test_pickles_come_back_as_bytes(tmp_path: Path) -> None:
    state = {"w": W, "kind": dict, "nested": [1, set]}
    blocking.save(state, tmp_path / "c", options=SaveOptions(allow_pickle=True))
    found = reader.read_checkpoint(tmp_path / "c")
    assert type(found["kind"]) is bytes
    assert type(found["nested"][1]) is bytes
    assert_same(found["w"], W)
    assert_same(blocking.load(tmp_path / "c", options=LoadOptions(allow_pickle=True)), state)


def test_damage_is_found(tmp_path: Path) -> None:
    info = blocking.save(STATES["train"], tmp_path / "c")
    data = tmp_path / "c" / info.save_id / "r00000-0000.bin"
    content = bytearray(data.read_bytes())
    content[10] ^= 4
    data.write_bytes(content)
    with pytest.raises(reader.FormatError, match="digest"):
        reader.read_checkpoint(tmp_path / "c")
