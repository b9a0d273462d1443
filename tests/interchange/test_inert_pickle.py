"""Pickles are read without running anything: values come out exactly, everything else is refused by name."""

from __future__ import annotations

import copyreg
import os
import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickle_support import applied, mapping, named, number, pickled, sequence, text

from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError
from savestream.interchange.inert_objects import InertObject, NamedGlobal, show
from savestream.interchange.inert_pickle import read_pickle
from savestream.interchange.numpy_pickles import NUMPY_NAMES, PickledArray
from savestream.interchange.torch_pickles import VALUE_NAMES

PROTOCOLS = (2, 3, 4, 5)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.sets(st.integers()) | st.frozensets(st.text()) | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


class Evil:
    """Would run a command when it is unpickled."""

    def __init__(self, marker: os.PathLike[str]) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def canonical(value: object) -> object:
    """Class and content, in which 1, True and 1.0 differ and the order of a set does not."""
    if isinstance(value, dict):
        return type(value), [(canonical(key), canonical(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    return type(value), repr(value)


def same(found: object, expected: object) -> bool:
    return canonical(found) == canonical(expected)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_values_come_out_as_they_were(value, protocol):
    assert same(read_pickle(pickle.dumps(value, protocol), VALUE_NAMES), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_and_shared_values(protocol):
    shared = [1, 2]
    value = {
        "many": list(range(5000)),
        "pairs": {str(i): i for i in range(3000)},
        "a": shared,
        "b": shared,
        "t": "x" * 70_000,
    }
    found = read_pickle(pickle.dumps(value, protocol), {})
    assert same(found, value)
    assert found["a"] is found["b"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(1, 2, 0),
        np.array(["ab", "c"]),
        np.array([b"x", b"yz"]),
        np.array([True, False]),
        np.zeros((0, 3), np.complex64),
        np.array(2.5, np.float16),
    ],
    ids=str,
)
def test_numpy_arrays(array, protocol):
    found = read_pickle(pickle.dumps(array, protocol), VALUE_NAMES)
    assert isinstance(found, PickledArray)
    assert (found.array.dtype, found.array.shape) == (array.dtype, array.shape)
    assert found.array.tobytes() == array.tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("scalar", [np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1 - 2j)], ids=repr)
def test_numpy_scalars(scalar, protocol):
    found = read_pickle(pickle.dumps(scalar, protocol), VALUE_NAMES)
    assert type(found) is type(scalar)
    assert found == scalar


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_objects_are_refused(protocol):
    for value in (np.array([{}], dtype=object), np.zeros(2, [("a", "i4")]), np.datetime64("2020-01-01")):
        with pytest.raises(UnsafeObjectError):
            read_pickle(pickle.dumps(value, protocol), VALUE_NAMES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_run(protocol, nested, tmp_path):
    evil = Evil(tmp_path / "marker")
    data = pickle.dumps({"a": [evil]} if nested else evil, protocol)
    with pytest.raises(UnsafeObjectError, match=f"{os.name if os.name == 'nt' else 'posix'}.system"):
        read_pickle(data, VALUE_NAMES)
    assert not (tmp_path / "marker").exists()
    pickle.loads(data)
    assert (tmp_path / "marker").exists(), "the pickle of this test does nothing, so it proves nothing"


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "builtins.getattr", "builtins.__import__", "torch.load", "collections.Counter", "os.Popen"],
)
def test_other_globals_are_refused_by_name(name):
    for program in (named(name), applied(name, text("x"))):
        with pytest.raises(UnsafeObjectError, match=name):
            read_pickle(pickled(program), VALUE_NAMES)


def test_a_dotted_name_cannot_reach_an_attribute():
    program = text("collections") + text("OrderedDict.fromkeys") + b"\x93"
    with pytest.raises(UnsafeObjectError, match=r"OrderedDict\.fromkeys"):
        read_pickle(pickled(program), VALUE_NAMES)


def test_opcodes_that_pickles_of_today_do_not_use_are_refused():
    unknown = {
        "INT",
        "LONG",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "FLOAT",
        "LIST",
        "DICT",
        "DUP",
        "GET",
    }
    unknown |= {"PUT", "INST", "OBJ", "PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    refused = set()
    for opcode in pickletools.opcodes:
        try:
            read_pickle(pickled(opcode.code.encode("latin1") + b"0\n" * 40), VALUE_NAMES)
        except UnsafeObjectError as error:
            if f"opcode {opcode.code.encode('latin1')!r}" in str(error):
                refused.add(opcode.name)
        except CorruptCheckpointError:
            continue
    assert refused == unknown


def test_registered_extensions_are_not_looked_up():
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(UnsafeObjectError, match="opcode"):
            read_pickle(pickled(b"\x82\xf0"), VALUE_NAMES)
    finally:
        copyreg.remove_extension("os", "system", 240)


def test_state_cannot_be_set_on_anything_else():
    ordered = named("collections.OrderedDict")
    for target in (b"]", b"}", ordered, number(1), named("torch.float32")):
        with pytest.raises(SavestreamError):
            read_pickle(pickled(target + mapping([(text("__class__"), number(1))]) + b"b"), VALUE_NAMES)
    found = read_pickle(pickled(ordered + b")R" + mapping([(text("__class__"), number(1))]) + b"b"), VALUE_NAMES)
    assert vars(found) == {}
    with pytest.raises(UnsafeObjectError, match="sets the state"):
        read_pickle(pickled(ordered + b")R" + number(1) + b"b"), VALUE_NAMES)


def test_of_the_attributes_of_an_ordered_dict_only_the_metadata_of_a_state_dict_is_kept():
    data = OrderedDict(a=1)
    data._metadata, data.other = {"": {"version": 1}}, 3
    for protocol in PROTOCOLS:
        found = read_pickle(pickle.dumps(data, protocol), VALUE_NAMES)
        assert same(found, OrderedDict(a=1))
        assert vars(found) == {"_metadata": {"": {"version": 1}}}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_off_anywhere_is_refused(protocol):
    data = pickle.dumps({"a": [1, 2.5, "text", b"bytes", (1, 2), {3}], "b": np.arange(3)}, protocol)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            read_pickle(data[:length], VALUE_NAMES)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_pickles_give_values_or_errors_of_ours(data):
    sample = pickle.dumps(
        {"a": [1, 2.5, "text"], "b": np.arange(3), "c": {1: (None, frozenset([2]))}},
        data.draw(st.sampled_from(PROTOCOLS)),
    )
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(damaged), VALUE_NAMES)
    except SavestreamError:
        return


CLAIMS = {
    "memo slot": text("x") + b"r" + struct.pack("<I", 0xFFFFFFFF),
    "bytes": b"\x8e" + struct.pack("<Q", 1 << 60),
    "text": b"\x8d" + struct.pack("<Q", 1 << 62),
    "bytearray": b"\x96" + struct.pack("<Q", 1 << 40),
    "int": b"\x8b" + struct.pack("<I", 0xFFFFFFFF),
    "frame": b"\x95" + struct.pack("<Q", 1 << 60) + number(1),
    "marks": b"(" * 20_000,
    "array": applied("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), number(1), text("b"))
    + sequence([number(1), sequence([number(1 << 40)]), applied("numpy.dtype", text("f8")), b"\x89", b"C\x00"])
    + b"b",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_of_memory_are_not_believed(claim):
    tracemalloc.start()
    try:
        read_pickle(pickled(CLAIMS[claim]), NUMPY_NAMES)
    except CorruptCheckpointError:
        pass
    else:
        assert claim in ("memo slot", "frame")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


def test_more_containers_than_any_checkpoint_needs(monkeypatch):
    monkeypatch.setattr("savestream.interchange.inert_pickle._MAXIMUM_CONTAINERS", 1000)
    read_pickle(pickled(b"](" + b"}" * 900 + b"e"), {})
    with pytest.raises(CorruptCheckpointError, match="containers"):
        read_pickle(pickled(b"](" + b"}" * 1100 + b"e"), {})


def test_deep_keys_do_not_exhaust_the_stack():
    deep = b")" + b"\x85" * 300_000
    for program in (b"}" + deep + number(1) + b"s", b"\x8f(" + deep + b"\x90", b"(" + deep + b"\x91"):
        with pytest.raises(CorruptCheckpointError, match="key"):
            read_pickle(pickled(program), {})


def test_unhashable_and_foreign_keys_are_refused():
    for key in (b"]", b"}", sequence([b"]"]), named("a.b")):
        with pytest.raises(CorruptCheckpointError, match="key"):
            read_pickle(pickled(b"}" + key + number(1) + b"s"), {"a.b": NamedGlobal("a.b")})


def test_only_what_the_table_says_can_be_applied():
    with pytest.raises(UnsafeObjectError, match=r"applies a\.b"):
        read_pickle(pickled(applied("a.b")), {"a.b": NamedGlobal("a.b")})
    with pytest.raises(UnsafeObjectError, match="no class or function"):
        read_pickle(pickled(text("eval") + b")R"), {})
    with pytest.raises(CorruptCheckpointError, match="arguments"):
        read_pickle(pickled(applied("torch._utils._rebuild_tensor", text("x"))), VALUE_NAMES)
    with pytest.raises(UnsafeObjectError, match="keyword"):
        read_pickle(pickled(named("torch.Size") + b")" + mapping([(text("a"), number(1))]) + b"\x92"), VALUE_NAMES)
    with pytest.raises(UnsafeObjectError, match="outside"):
        read_pickle(pickled(text("x") + b"Q"), VALUE_NAMES)


@pytest.mark.parametrize("protocol", [0, 1, 6, 255])
def test_other_protocols_are_refused(protocol):
    with pytest.raises(CorruptCheckpointError, match="protocol"):
        read_pickle(bytes([0x80, protocol]) + b"N.", {})


def test_what_messages_show_is_short():
    endless = []
    endless.append(endless)
    for value in (
        endless,
        {"a": endless},
        10**5000,
        "x" * 10_000,
        b"x" * 10_000,
        (1,) * 10_000,
        InertObject("Metadata"),
    ):
        assert len(show(value)) < 100
    assert show((1, 2)) == "(1, 2)"
