"""Keys, containers and plain values come back with their types, positions and order."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import struct
import uuid
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from roundtrip_support import LowerCasingBackend, assert_same, fresh_place

import savestream
from savestream import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadOptions,
    PlanCache,
    PlanError,
    RecordedDataclass,
    RecordedEnum,
    RecordedTuple,
    SaveOptions,
    UnsafeObjectError,
    blocking,
)
from savestream.storage_backends import MemoryBackend


class Point(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Settings:
    rate: Any
    name: Any = "adam"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any
    bias: Any


class Colour(enum.Enum):
    RED = "r"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flags(enum.Flag):
    A = 1
    B = 2
    C = 4


TYPES = (Point, Settings, Frozen, Colour, Level, Flags)


def x(start: float = 0) -> np.ndarray:
    return np.arange(start, start + 6, dtype=np.float32).reshape(2, 3)


def emptied(value: Any) -> Any:
    """A target of the same structure as ``value``: its arrays are zero and its plain leaves another value."""
    if isinstance(value, np.ndarray):
        return np.zeros(value.shape, value.dtype)
    if type(value) is collections.defaultdict:
        return collections.defaultdict(value.default_factory, {key: emptied(item) for key, item in value.items()})
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((key, emptied(item)) for key, item in value.items())
    if type(value) is collections.Counter:
        made: Any = collections.Counter()
        dict.update(made, {key: emptied(item) for key, item in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(emptied(item) for item in value)
    if type(value) is collections.deque:
        return collections.deque(map(emptied, value), value.maxlen)
    if type(value) is Point:
        return Point(*map(emptied, value))
    if type(value) in (Settings, Frozen):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value)(**{name: emptied(getattr(value, name)) for name in names})
    return value if isinstance(value, enum.Enum) else "to be replaced"


def round_trip(state: Any, *, types: tuple[type, ...] = TYPES, **options: Any) -> None:
    """Save; load without and with a target; compare."""
    expected = copy.deepcopy(state)
    place = fresh_place()
    blocking.save(state, place, options=SaveOptions(**options))
    assert_same(state, expected)
    assert_same(blocking.load(place, options=LoadOptions(types=types)), expected)
    target = emptied(state)
    assert_same(blocking.load(place, target), expected)


KEYS = {
    "separators": ["a/b", "a", "a.b", "c\\d", "a[0]", "[0]", "a]", "", ".", "..", "/", "\\", "\\.", "$int", "#", "%2F"],
    "paths": ["../../marker", "/tmp/marker", "C:\\x", "con", "nul.", "a\0b", "line\nbreak", "tab\t", " ", "a ", "~"],
    "unicode": ["é" * 300, "e\u0301" * 300, "🧠/layer", "İ", "ß", "SS", "ﬁ", "\u202e", "\ud800", "日本語"],
    "cases": ["Bias", "bias", "BIAS", "bIAS", "weight.Bias", "weight.bias"],
    "types": [0, 1, -1, 2**70, 0.5, -0.0, math.inf, None, b"b", "0", "1", "None", "True", (1, "a"), (), ((0,), None)],
    "bools": [True, False, "true", 2],
    "enums": [Colour.RED, Level.HIGH, datetime.date(2024, 2, 29), frozenset({1, "a"}), Point(1, 2), 1 + 2j],
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_keys(name: str, kind: Any) -> None:
    arrays = kind((key, x(number)) for number, key in enumerate(KEYS[name]))
    values = kind((key, number) for number, key in enumerate(KEYS[name]))
    nested = kind((key, {"inner": x(number)}) for number, key in enumerate(KEYS[name]))
    round_trip(arrays)
    round_trip({"arrays": arrays, "values": values, "nested": nested})


@pytest.mark.parametrize("lower_casing", [False, True])
def test_key_text_decides_no_path(lower_casing: bool, tmp_path: pathlib.Path) -> None:
    deep: Any = x()
    for level in range(5):
        deep = {f"{level}" + "k" * 119: deep}
    state = {
        "a/b": x(1),
        "a": {"b": x(2), "B": x(3)},
        "a.b": x(4),
        "c\\d": x(5),
        "é" * 300: x(6),
        "🧠/layer": x(7),
        "Bias": x(8),
        "bias": x(9),
        "deep": deep,
        "../../marker": x(10),
    }
    memory = MemoryBackend()
    place: Any = (LowerCasingBackend(memory), "Step-A") if lower_casing else tmp_path / "step"
    blocking.save(state, place)
    assert_same(blocking.load(place), state)
    assert_same(blocking.load(place, emptied(state)), state)
    if not lower_casing:
        files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert sorted(files) == ["manifest.json", "r00000-0000.bin", "r00000.index.json"]
        assert max(map(len, files)) < 32
    for key in ("Bias", "bias"):
        assert_same(blocking.load(place, keys=[key]), {key: state[key]})


def test_slash_dot_and_backslash_neither_split_nor_merge() -> None:
    state = {"a/b": x(1), "a": {"b": x(2)}, "a.b": x(3), "c\\d": x(4), "a\\": {".b": x(5)}, "a\\.": {"b": x(6)}}
    round_trip(state)


def test_optimizer_state_with_int_keys() -> None:
    state = {"state": {0: {"m": x(), "step": 1}, 1: {"m": x(9), "step": 2}}, "param_groups": [{"params": [0, 1]}]}
    round_trip(state)
    place = fresh_place()
    blocking.save(state, place)
    assert_same(blocking.load(place, keys=[("state", 1)]), {"state": {1: state["state"][1]}})


def containers(leaf: Any) -> dict[str, Any]:
    counter = collections.Counter("abca")
    return {
        "tuple": (leaf, None, {}, [], (), leaf),
        "middle": (0, (), 1),
        "namedtuple": Point(leaf, None),
        "nested": Point(Point(leaf, {}), [None, (None,)]),
        "ordered": collections.OrderedDict(z=leaf, a=leaf),
        "default": collections.defaultdict(list, {"k": [leaf], 3: []}),
        "factoryless": collections.defaultdict(None, {"k": leaf}),
        "counter": counter,
        "negative counter": collections.Counter({"a": -2, "b": 0}),
        "deque": collections.deque([leaf, None, 2], maxlen=7),
        "endless": collections.deque([1]),
        "set": {1, "a", (2, 3), None},
        "frozenset": frozenset({1.5, b"x"}),
        "dataclass": Settings(leaf, None),
        "frozen": Frozen(leaf, {"x": (leaf,)}),
        "empties": [{}, [], (), set(), collections.OrderedDict(), collections.defaultdict(int), collections.deque()],
        "nones": [None, [None], {"a": None}],
        "list": [leaf, [leaf, [leaf, []]], None, leaf],
    }


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("name", containers(None))
def test_containers(name: str, compression: str) -> None:
    for leaf in (x(), "text"):
        state = containers(leaf)[name]
        if not isinstance(state, set | frozenset):
            round_trip(state, compression=compression)
        round_trip({"before": x(), "it": state, "after": [state, state]}, compression=compression)


@pytest.mark.parametrize("key", ["layers.0.weight", "a..b", "[", "", "[3]", "\ud800", "a", "é/x"])
def test_states_that_are_not_flattened_keep_their_keys_as_they_stand(key: str) -> None:
    state = {key: x(), f"{key}v": x(1), f"{key} value": {"deep": [1, None]}}
    for cache in (None, PlanCache()):
        place = fresh_place()
        planner = DefaultSavePlanner(flatten_state_dict=False)
        blocking.save(state, place, planner=planner, plan_cache=cache)
        assert_same(blocking.load(place), state)
        assert_same(blocking.load(place, keys=[(key,)]), {key: x()})
        assert_same(blocking.load(place, emptied(state)), state)
        flat = DefaultLoadPlanner(flatten_state_dict=False)
        assert_same(blocking.load(place, emptied(state), planner=flat), state)
        blocking.verify(place)


def test_a_nested_state_fills_a_target_that_is_not_flattened() -> None:
    place = fresh_place()
    blocking.save({"a": {"b": x(1)}, "a.b": x(2), "c": 3}, place)
    target = {"a.b": x() * 0, r"a\.b": x() * 0, "c": 0}
    blocking.load(place, target, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert_same(target, {"a.b": x(1), r"a\.b": x(2), "c": 3})


def test_two_keys_that_are_no_number_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PlanError, match="nan keys"):
        blocking.save({"d": {float("nan"): x(), float("-nan"): x(1), math.nan: x(2)}}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    round_trip({(math.nan, 1): x(), "d": {math.nan: x(), 1: x(1)}})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 2**70])
def test_a_step_that_is_no_number_is_refused_at_once(step: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(PlanError, match="step="):
        blocking.save({"w": x()}, tmp_path / "c", step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", [x(), np.float64(2.5), 7, None, "text", {}, [], (), [None], {"a": {}}, Colour.RED])
def test_any_root(root: Any) -> None:
    place = fresh_place()
    blocking.save(root, place)
    assert_same(blocking.load(place, options=LoadOptions(types=TYPES)), root)


def test_without_types_classes_become_records_that_can_be_saved_again() -> None:
    state = {"p": Point(x(), Colour.BLUE), "d": Settings(x(1), Level.LOW), "v": [Point(1, None), Frozen(2, 3)]}
    place, again = fresh_place(), fresh_place()
    blocking.save(state, place)
    found = blocking.load(place)
    assert type(found["p"]) is RecordedTuple
    assert found["p"]._fields == ("a", "b")
    assert found["p"].type_name == f"{__name__}:Point"
    assert_same(found["p"].a, x())
    assert type(found["p"].b) is RecordedEnum
    assert (found["p"].b.name, found["p"].b.value) == ("BLUE", (1, 2))
    assert type(found["d"]) is RecordedDataclass
    assert list(found["d"]) == ["rate", "name"]
    assert_same(found["d"].rate, x(1))
    assert type(found["v"][0]) is RecordedTuple
    assert tuple(found["v"][0]) == (1, None)
    assert dict(found["v"][1]) == {"weight": 2, "bias": 3}

    blocking.save(found, again)
    assert_same(blocking.load(again, options=LoadOptions(types=TYPES)), state)
    assert_same(blocking.load(again, emptied(state)), state)


NAN = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
VALUES = {
    "enums": [Colour.RED, Colour.BLUE, Level.HIGH, Flags.A | Flags.C, Flags(0)],
    "times": [
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
        datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, seconds=7), "odd")),
        datetime.date(9999, 12, 31),
        datetime.time(23, 59, 59, 999999),
        datetime.timedelta(days=-3, microseconds=1),
    ],
    "ints": [0, -1, 2**53, 2**53 + 1, -(2**63), 2**64, 10**4000, -(10**300), True, False],
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, NAN, 5e-324, 1.7976931348623157e308, 0.1, 1e22],
    "complex": [complex(-0.0, math.inf), complex(NAN, -0.0), 1 + 2j],
    "bytes": [b"", b"\0\xff" * 1000, bytearray(b"abc")],
    "texts": ["", "\0", "\ud800", "é", "e\u0301", "🧠", '"\\\n', "$int", "x" * 100_000],
    "numpy scalars": [
        np.float32(np.nan),
        np.float16(-0.0),
        np.int8(-8),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.datetime64("NaT", "ns"),
        np.datetime64("2024-02-29", "D"),
        np.timedelta64(5, "25us"),
        np.str_("é"),
        np.bytes_(b"a\0b"),
        ml_dtypes.bfloat16(1.5),
        np.longdouble(1) / 3,
    ],
    "numpy dtypes": [np.dtype("f4"), np.dtype(">u2"), np.dtype([("a", "i4")]), np.dtype(ml_dtypes.bfloat16)],
    "others": [
        decimal.Decimal("1.10"),
        fractions.Fraction(2, 3),
        uuid.UUID(int=5),
        range(1, 10, 3),
        slice(None, 3),
        ...,
        pathlib.PurePosixPath("/a/b"),
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values(name: str) -> None:
    round_trip({"only": VALUES[name]})
    round_trip({"array": x(), "mixed": [x(), *VALUES[name]], "alone": tuple(VALUES[name])})


def test_values_are_captured_at_the_call(tmp_path: pathlib.Path) -> None:
    state = {"w": x(), "log": [1, {"a": 2}]}
    handle = blocking.start_save(state, tmp_path / "c", stage="lazy")
    state["log"][1]["a"] = 3
    state["log"].append(4)
    handle.result(60)
    assert blocking.load(tmp_path / "c", keys="log") == {"log": [1, {"a": 2}]}


def test_random_state_continues_identically() -> None:
    generator = random.Random(5)
    generator.gauss(0, 1)
    place = fresh_place()
    blocking.save({"python": generator.getstate()}, place)
    expected = [generator.gauss(0, 1) for _ in range(5)]
    for target in (None, {"python": random.Random(1).getstate()}):
        other = random.Random()
        other.setstate(blocking.load(place, target)["python"])
        assert [other.gauss(0, 1) for _ in range(5)] == expected


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators_continue_identically(name: str) -> None:
    kind = getattr(np.random, name)
    generator = np.random.Generator(kind(3))
    generator.integers(0, 10, size=3, dtype=np.uint32)  # leaves half a word in the buffer
    generator.standard_normal(3)
    place = fresh_place()
    blocking.save({"rng": generator.bit_generator.state}, place)
    expected = generator.integers(0, 1 << 32, size=9, dtype=np.uint32).tolist()
    for target in (None, {"rng": kind(8).state}):
        other = np.random.Generator(kind())
        other.bit_generator.state = blocking.load(place, target)["rng"]
        assert other.integers(0, 1 << 32, size=9, dtype=np.uint32).tolist() == expected


def test_legacy_random_state_continues_identically() -> None:
    generator = np.random.RandomState(4)
    generator.normal(size=3)
    place = fresh_place()
    blocking.save(generator.get_state(), place)
    expected = generator.normal(size=5).tobytes()
    other = np.random.RandomState()
    other.set_state(blocking.load(place))
    assert other.normal(size=5).tobytes() == expected


class Unknown:
    """No safe encoding."""


@pytest.mark.parametrize(
    "bad",
    [Unknown(), lambda: 0, object(), iter([]), {1: Unknown()}, collections.defaultdict(Unknown), open],
    ids=["class", "function", "object", "iterator", "inside a dict", "factory", "builtin"],
)
def test_unsafe_objects_are_refused_by_key(bad: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsafeObjectError, match=r"outer\.bad"):
        blocking.save({"w": x(), "outer": {"w": x(), "bad": bad}}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_pickle_needs_both_opt_ins(tmp_path: pathlib.Path) -> None:
    state = {"w": x(), "odd": fractions.Fraction, "inside": [1, uuid.UUID, {"k": Unknown}]}
    blocking.save(state, tmp_path / "c", options=SaveOptions(allow_pickle=True))
    with pytest.raises(UnsafeObjectError, match="allow_pickle"):
        blocking.load(tmp_path / "c")
    assert_same(blocking.load(tmp_path / "c", keys="w"), {"w": x()})
    assert_same(blocking.load(tmp_path / "c", options=LoadOptions(allow_pickle=True)), state)


# --- any state, any options ---------------------------------------------------------------------------------

DTYPES = [np.dtype(code) for code in ("?", "u1", "<i4", ">u2", "<f4", "<f8", ">f8", "<c8", "M8[s]", "<U2", "S3", "V5")]
DTYPES += [np.dtype(ml_dtypes.bfloat16), np.dtype([("a", "i2"), ("b", ">f4")])]


def _bits(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if dtype.kind in "?bU":
        return generator.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(bytearray(generator.bytes(math.prod(shape) * dtype.itemsize)), dtype).reshape(shape)


ARRAYS = st.builds(
    lambda dtype, shape, seed, turn: _bits(dtype, shape, seed).T if turn else _bits(dtype, shape, seed),
    st.sampled_from(DTYPES),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.integers(0, 1 << 32),
    st.booleans(),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=6),
    st.binary(max_size=6),
    st.datetimes(),
    st.sampled_from([Colour.RED, Level.HIGH, np.float32(-0.0), ml_dtypes.bfloat16(2), frozenset({1, "1"})]),
)
HASHABLE = st.one_of(
    st.text(st.sampled_from("a.b/[]\\0 é"), max_size=4),
    st.integers(-2, 3),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=2),
    st.tuples(st.integers(0, 1), st.text(max_size=1)),
)


def _nested(children: Any) -> Any:
    pairs = st.dictionaries(HASHABLE, children, max_size=4)
    lists = st.lists(children, max_size=4)
    return st.one_of(
        pairs,
        st.dictionaries(st.text(max_size=3), children, max_size=4),
        pairs.map(collections.OrderedDict),
        pairs.map(lambda found: collections.defaultdict(list, found)),
        lists,
        lists.map(tuple),
        lists.map(lambda found: collections.deque(found, 9)),
        st.builds(Point, children, children),
        st.builds(Settings, children, children),
        st.builds(Frozen, children, children),
    )


STATES = st.recursive(ARRAYS | SCALARS, _nested, max_leaves=14)
OPTIONS = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "zstd", "auto"]),
        "threads": st.integers(1, 4),
        "memory_budget_bytes": st.sampled_from([4 << 20, 5_000_001, 64 << 20, None]),
    }
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(state=STATES, options=OPTIONS, mode=st.sampled_from(["stream", "eager", "lazy"]), load_threads=st.integers(1, 3))
def test_any_state_with_any_options(state: Any, options: Any, mode: Any, load_threads: int) -> None:
    expected = copy.deepcopy(state)
    place = fresh_place()
    if mode == "stream":
        blocking.save(state, place, options=SaveOptions(**options))
    else:
        blocking.start_save(state, place, stage=mode, options=SaveOptions(**options)).result(60)
    assert_same(state, expected)
    how = LoadOptions(types=TYPES, threads=load_threads)
    assert_same(blocking.load(place, options=how), expected)
    if not isinstance(state, np.ndarray):  # a root array would be filled, see the next test
        assert_same(blocking.load(place, emptied(state), options=how), expected)


def test_a_root_array_is_filled() -> None:
    place = fresh_place()
    blocking.save(x(4), place)
    target = np.zeros((2, 3), np.float32)
    assert blocking.load(place, target) is target
    assert_same(target, x(4))


async def test_the_awaitable_forms_agree_with_the_blocking_ones() -> None:
    state = containers(x())
    for start in (False, True):
        place = fresh_place()
        if start:
            handle = await savestream.start_save(state, place)
            await handle.staged()
            await handle
        else:
            await savestream.save(state, place)
        assert_same(await savestream.load(place, options=LoadOptions(types=TYPES)), state)
