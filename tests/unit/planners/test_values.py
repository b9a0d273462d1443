"""Plain values survive encoding bit by bit, and hostile encodings are refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import struct
import uuid
import zoneinfo
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest

from savestream.errors import CorruptCheckpointError, PlanError, UnsafeObjectError
from savestream.planners.recorded import RecordedDataclass, RecordedEnum, RecordedTuple
from savestream.planners.values import (
    MAXIMUM_DEPTH,
    decode_value,
    decode_value_bytes,
    encode_value,
    encode_value_bytes,
)


class Point(NamedTuple):
    x: int
    y: object


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 5


class Flag(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: list[int]


@dataclasses.dataclass
class Derived:
    a: int
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = self.a * 2
        self.note = "made by __post_init__"


TYPES = [Point, Colour, Level, Flag, Frozen, Derived]
UTC2 = datetime.timezone(datetime.timedelta(hours=2), "X")
VALUES = [
    *(None, True, False, 0, 1, -(2**53), 2**53 + 1, -(2**200), 1.0, 0.1, -0.0, 1e22, 5e-324),
    *(float("inf"), float("-inf"), 3 + 0j, complex(-0.0, float("inf")), "x", "", "\ud800", "é\x00", "$a"),
    *(b"", b"ab", bytearray(b"x"), datetime.date(2020, 2, 29), datetime.time(3, 4, 5, 6, fold=1)),
    *(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2020, 1, 1, fold=1, tzinfo=UTC2)),
    *(datetime.timedelta(-1, 3), np.float32(1.5), ml_dtypes.bfloat16(2), ml_dtypes.int4(3), np.datetime64("2020")),
    *(np.datetime64("NaT", "ns"), np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.bool_(True), np.longdouble(1) / 3),
    *(np.complex64(1j), np.dtype(">u4"), np.dtype([("a", "i4"), ("b", "<M8[D]")]), np.dtype("bfloat16")),
    *(Colour.RED, Level.HIGH, Flag.A | Flag.B, Flag(0), {}, {"a": 1}, {"$a": 1}, {"": 1}, {"\ud800": 1}, [], ()),
    {1: 2, None: 3, (1, 2): 4, b"x": 5, 1.5: 2, Colour.RED: 6, frozenset({1}): 7},
    *({True: 1}, {1.0: 1}, (1, (2,)), [1, [2]], Point(1, [2]), Frozen(1, [2]), Derived(3)),
    *(collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {1: [2]}), collections.defaultdict(None)),
    *(collections.Counter("aab"), collections.Counter({"x": -1}), collections.deque([1], 3), collections.deque()),
    *({1, 2}, set(), frozenset({"a", (1,)}), range(3), range(2**70), slice(1, None), ..., pathlib.Path("/a/b")),
    *(pathlib.PureWindowsPath("c:/x"), fractions.Fraction(1, 3), decimal.Decimal("sNaN12"), decimal.Decimal("1.10")),
    *(uuid.UUID(int=5), random.Random(1).getstate(), np.array((1, 2.5), dtype=[("a", "i4"), ("b", "f8")])[()]),
]


def bits(value: object) -> object:
    """Something that is equal only for values of the same class and bits."""
    if isinstance(value, float) and type(value) is float:
        return ("float", struct.pack(">d", value))
    if isinstance(value, complex) and type(value) is complex:
        return ("complex", struct.pack(">dd", value.real, value.imag))
    if isinstance(value, np.str_):
        return (type(value), str.__str__(value))
    if isinstance(value, np.bytes_):
        return (type(value), bytes(value))
    if isinstance(value, np.generic):
        return (type(value), value.dtype.str, value.tobytes(), str(value))
    if isinstance(value, dict):
        extra = value.default_factory if isinstance(value, collections.defaultdict) else None
        return (type(value), extra, [(bits(k), bits(v)) for k, v in value.items()])
    if isinstance(value, list | tuple | collections.deque):
        return (type(value), getattr(value, "maxlen", None), [bits(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(map(repr, map(bits, value))))
    if dataclasses.is_dataclass(value):
        return (type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return (type(value), repr(value))


@pytest.mark.parametrize(
    "value",
    VALUES,
    ids=lambda value: "".join(sorted(repr(value))) if isinstance(value, frozenset) else repr(value)[:40],
)
def test_round_trip(value: object) -> None:
    data = encode_value_bytes(value, "key")
    assert bits(decode_value_bytes(data, types=TYPES)) == bits(value)
    assert encode_value_bytes(decode_value_bytes(data), "key") == data  # stand-ins encode as what they stand for


def test_nan_keeps_its_payload() -> None:
    (value,) = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))
    encoded = encode_value(value, "k")
    assert encoded == {"$float": "7ff80000deadbeef"}
    assert bits(decode_value(encoded)) == bits(value)


def test_common_values_are_plain_json() -> None:
    assert encode_value_bytes({"lr": 0.1, "on": True, "steps": [1, 2], "w": 1.0}, "k") == (
        b'{"lr":0.1,"on":true,"steps":[1,2],"w":1.0}'
    )


def test_sets_encode_the_same_whatever_their_order() -> None:
    assert encode_value({"b", "a", 1, (2,)}, "k") == encode_value({(2,), 1, "a", "b"}, "k")


def test_stand_ins() -> None:
    point, colour, frozen = (
        decode_value(encode_value(value, "k")) for value in (Point(1, 2), Colour.RED, Frozen(1, [2]))
    )
    assert isinstance(point, RecordedTuple)
    assert point == (1, 2)
    assert (point.x, point.y, point._fields) == (1, 2, ("x", "y"))
    assert point.type_name.endswith(":Point")
    assert isinstance(colour, RecordedEnum)
    assert (colour.name, colour.value) == ("RED", 1)
    assert isinstance(frozen, RecordedDataclass)
    assert (frozen.a, dict(frozen)) == (1, {"a": 1, "b": [2]})
    with pytest.raises(AttributeError):
        _ = frozen.missing
    with pytest.raises(AttributeError):
        _ = point.missing


def test_post_init_runs_and_stored_fields_win() -> None:
    value = Derived(3)
    value.total = 99
    again = decode_value(encode_value(value, "k"), types=[Derived])
    assert (again.a, again.total, again.note) == (3, 99, "made by __post_init__")


class Str(str):
    pass


class Tuple(tuple):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Str("a"),
        Tuple((1,)),
        np.zeros(2),
        np.ma.array([1]),
        lambda: 1,
        collections.defaultdict(lambda: 1),
        datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        np.dtype(object),
        collections.UserDict(),
        {Frozen(1, ()): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_unknown_objects_are_refused_by_key(value: object) -> None:
    for held in (value, [value], {"a": (value,)}):
        with pytest.raises(UnsafeObjectError, match="the_key"):
            encode_value(held, "the_key")


def test_pickle_needs_both_opt_ins() -> None:
    value = {"a": [Str("x")], "b": collections.defaultdict(Str)}
    encoded = encode_value(value, "k", allow_pickle=True)
    with pytest.raises(UnsafeObjectError, match=r"k: stored with pickle.*allow_pickle=True"):
        decode_value(encoded, key="k")
    again = decode_value(encoded, allow_pickle=True)
    assert type(again["a"][0]) is Str
    assert again["b"].default_factory is Str
    with pytest.raises(UnsafeObjectError, match="k:"):
        encode_value(np.ma.array([1]), "k", allow_pickle=True)


def test_cycles_are_refused_and_sharing_is_not() -> None:
    shared = [1]
    assert decode_value(encode_value([shared, shared], "k")) == [[1], [1]]
    cycle: list[object] = []
    cycle.append({"a": cycle})
    with pytest.raises(PlanError, match=r"k: .*contains itself"):
        encode_value(cycle, "k")


def test_depth_limit_is_the_same_on_both_sides() -> None:
    deepest: object = 1
    for _ in range(MAXIMUM_DEPTH):
        deepest = [deepest]
    assert decode_value_bytes(encode_value_bytes(deepest, "k")) == deepest
    with pytest.raises(PlanError, match="k: nested"):
        encode_value([deepest], "k")
    with pytest.raises(CorruptCheckpointError, match="nested"):
        decode_value([deepest])
    with pytest.raises(CorruptCheckpointError):
        decode_value_bytes(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$unknown": 1},
        {"$tuple": [], "a": 1},
        {"$tuple": 3},
        {"$int": "12"},
        {"$int": "0x" + "f" * (1 << 21)},
        {"$int": 5},
        {"$float": "00"},
        {"$bytes": "!!"},
        {"$bytes": 5},
        {"$complex": [1, 2]},
        {"$dict": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 2]]},
        {"$set": [1, 1]},
        {"$set": [[]]},
        {"$deque": [[1, 2], 1]},
        {"$deque": [[], "x"]},
        {"$defaultdict": ["eval", []]},
        {"$namedtuple": ["a:b", ["x"], []]},
        {"$namedtuple": ["a:b", [1], [1]]},
        {"$dataclass": ["a:b", ["x", "x"], [1, 2]]},
        {"$enum": ["a:b"]},
        {"$scalar": ["float32", "AAAA"]},
        {"$scalar": ["object", "AAAAAAAAAAA="]},
        {"$dtype": "O"},
        {"$datetime": [0] * 9},
        {"$date": [2020, 13, 1]},
        {"$timedelta": [10**30, 0, 0]},
        {"$range": [0, 1, 0]},
        {"$fraction": [1, 0]},
        {"$decimal": "x"},
        {"$uuid": "x"},
        {"$path": ["Path", "x"]},
        {"$ellipsis": 1},
        {"$str": "////"},
        {1: 2},
        object(),
    ],
    ids=lambda encoded: str(encoded).partition(" at 0x")[0][:40],
)
def test_damaged_values_are_refused(encoded: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="k"):
        decode_value(encoded, key="k")


def test_claimed_sizes_are_not_allocated() -> None:
    assert decode_value({"$range": [0, {"$int": "0x" + "f" * 100}, 1]}).stop > 2**300
    assert decode_value({"$deque": [[], 2**52]}).maxlen == 2**52


def test_not_json() -> None:
    for data in (b"", b"{", b"\xff", b"NaN", b"1e999"):
        with pytest.raises(CorruptCheckpointError):
            decode_value_bytes(data, key="k")


def test_a_class_that_changed_is_refused() -> None:
    encoded = {"$namedtuple": [f"{__name__}:Point", ["x", "z"], [1, 2]]}
    with pytest.raises(PlanError, match=r"Point.*x, z"):
        decode_value(encoded, types=[Point])
    with pytest.raises(PlanError, match="no member"):
        decode_value({"$enum": [f"{__name__}:Colour", "BLUE", 7]}, types=[Colour])


def test_encoding_is_json() -> None:
    for value in VALUES:
        encoded = encode_value(value, "k")
        assert msgspec.json.decode(msgspec.json.encode(encoded)) == encoded
