"""Small files whose parts are referred to again and again take little memory, and little time."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from dcp_builder import METADATA, DcpBuilder, archive_of, size, tensor_program, zipped
from import_support import assert_equal, imported
from pickle_support import applied, array, attributes, instance, mapping, named, number, pickled, text

from savestream import SaveOptions, blocking
from savestream.errors import CorruptCheckpointError, PlanError, SaveTimeoutError
from savestream.interchange.dcp_metadata import parse_metadata
from savestream.interchange.foreign import ForeignFiles
from savestream.interchange.inert_pickle import read_pickle
from savestream.interchange.nesting import nest
from savestream.interchange.read_limits import ReadLimits
from savestream.interchange.torch_pickles import VALUE_NAMES

MIB = 1024 * 1024
# An import in a process of its own, which reports how far its memory grew.
CHILD = """
import resource, sys
from savestream import blocking
blocking.exists(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    blocking.import_dcp(sys.argv[1], sys.argv[2])
    print("imported", end=" ")
except Exception as error:
    print(type(error).__name__, end=" ")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def put(place: int) -> bytes:
    return b"q" + bytes([place])


def got(place: int) -> bytes:
    return b"h" + bytes([place])


def binary(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def kept(value: bytes, place: int) -> bytes:
    """Make a value, keep it, and leave nothing on the stack."""
    return value + put(place) + b"0"


BIG_BYTES = kept(binary(bytes(4 * MIB)), 0)
COPIES = {
    "bytearray": BIG_BYTES + array([applied("builtins.bytearray", got(0))] * 2000),
    "encoded text": kept(text("a" * 4 * MIB), 0) + array([applied("_codecs.encode", got(0), text("latin1"))] * 2000),
    "set": kept(array([number(value) for value in range(100_000)]), 0)
    + array([applied("builtins.set", got(0))] * 2000),
    "array by state": BIG_BYTES
    + kept(applied("numpy.dtype", text("u1"), b"\x89", b"\x88"), 1)
    + kept(b"(" + number(1) + number(4 * MIB) + b"\x85" + got(1) + b"\x89" + got(0) + b"t", 2)
    + array(
        [
            applied("numpy.core.multiarray._reconstruct", b"cnumpy\nndarray\n", number(0) + b"\x85", binary(b"b"))
            + got(2)
            + b"b"
        ]
        * 2000
    ),
    "memo": b"N" + b"\x94" * 8 * MIB,
    "sets": b"](" + b"\x8f" * MIB + b"e",
}


@pytest.mark.parametrize("kind", COPIES)
def test_objects_of_a_pickle_are_limited_by_its_size(kind):
    with pytest.raises(CorruptCheckpointError, match="16 times its own bytes"):
        read_pickle(pickled(COPIES[kind]), VALUE_NAMES)


def object_checkpoint(program: bytes, source: Path) -> Path:
    builder = DcpBuilder()
    builder.object("value", archive_of(program))
    return builder.write(source)


SHARED = {
    "text": kept(text("a" * MIB), 0) + array([got(0)] * 5000),
    "bytes": kept(binary(bytes(MIB)), 0) + array([got(0)] * 5000),
    "list of None": kept(array([b"N"] * 100_000), 0) + array([got(0)] * 5000),
    "doubling": kept(b"N", 0) + b"".join(kept(array([got(0)] * 2), 0) for _ in range(60)) + got(0),
    "long keys": mapping([(text("k" * MIB), array([b"N"] * 5000))]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_values_that_are_referred_to_many_times_are_limited(kind, tmp_path):
    source = object_checkpoint(SHARED[kind], tmp_path / "dcp")
    command = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert result[0] == "CorruptCheckpointError"
    assert int(result[1]) < 250  # MiB
    assert not (tmp_path / "out").exists()


def test_an_item_that_many_keys_name_counts_once(tmp_path):
    builder = DcpBuilder()
    item = builder.item(archive_of(text("a" * 8 * MIB)))
    for place in range(100):
        key = f"key {place}"
        builder.entries.append((text(key), named(METADATA + "BytesStorageMetadata") + b")\x81"))
        builder.store(key, None, item)
        builder._add_path(key, None)
    with pytest.raises(CorruptCheckpointError, match="16 times its own bytes"):
        blocking.import_dcp(builder.write(tmp_path / "dcp"), tmp_path / "out")


def test_shared_values_are_imported_where_they_are_few(tmp_path):
    program = kept(array([number(1), text("b")]), 0) + kept(mapping([(text("x"), got(0))]), 1)
    program += array([got(0), got(1), got(0), got(1)])
    found = imported(blocking.import_dcp, object_checkpoint(program, tmp_path / "dcp"), tmp_path)
    assert found == {"value": [[1, "b"], {"x": [1, "b"]}, [1, "b"], {"x": [1, "b"]}]}


def test_values_that_contain_themselves_are_refused(tmp_path):
    source = object_checkpoint(b"]" + put(0) + got(0) + b"a", tmp_path / "dcp")
    with pytest.raises(CorruptCheckpointError, match="contain themselves"):
        blocking.import_dcp(source, tmp_path / "out")


def chunk(offset: int) -> bytes:
    return instance(METADATA + "ChunkStorageMetadata", attributes(offsets=size([offset]), sizes=size([1])))


def go_on() -> None:
    """Nobody asks for an end."""


def test_entries_cannot_share_many_chunks():
    builder = DcpBuilder()
    builder.tensor("first", np.zeros(1, np.float32))
    chunks = kept(array([kept(chunk(0), 1) + got(1), *[got(1)] * 10_000]), 0)
    for place in range(300):
        key = f"key {place}"
        builder.describe(key, "float32", [1], [])
        entry = builder.entries.pop()[1]
        builder.entries.append((text(key), entry.replace(text("chunks") + array([]), text("chunks") + got(0))))
        builder.store(key, [0], builder.place("__0_0.distcp", 0, 1))
    data = builder.metadata()
    data = data[:2] + chunks + data[2:]
    assert len(data) < 250_000
    with pytest.raises(CorruptCheckpointError, match="16 times its own bytes"):
        parse_metadata(data, go_on)


def test_entries_cannot_share_long_paths_or_transforms():
    builder = DcpBuilder()
    values = np.zeros(1, np.float32)
    for place in range(300):
        builder.tensor(f"key {place}", values)
    builder.paths = [(text(f"key {place}"), b"(" + text(f"key {place}") + got(0) + b"t") for place in range(300)]
    data = builder.metadata()
    with pytest.raises(CorruptCheckpointError, match="16 times its own bytes"):
        parse_metadata(data[:2] + kept(text("k" * MIB), 0) + data[2:], go_on)
    builder = DcpBuilder()
    item = builder.place("__0_0.distcp", 0, 1, ["stream.zstd/1"] * 17)
    builder.tensor("key", values)
    builder.stored = []
    builder.store("key", [0], item)
    with pytest.raises(CorruptCheckpointError, match="its transforms are"):
        parse_metadata(builder.metadata(), go_on)


def test_positions_that_nothing_is_at_are_limited_in_total():
    paths = {f"k{place}": (f"k{place}", 60_000) for place in range(100)}
    with pytest.raises(CorruptCheckpointError, match="leave out more than 65536 list positions"):
        nest(dict.fromkeys(paths, 0), paths)
    one = nest({"k": 0}, {"k": ("k", 60_000)})
    assert len(one["k"]) == 60_001


def test_containers_of_paths_are_limited_in_total():
    paths = {f"k{place}": (f"k{place}", *["x"] * 127) for place in range(2000)}
    with pytest.raises(CorruptCheckpointError, match="far more containers than there are entries"):
        nest(dict.fromkeys(paths, 0), paths)


def test_expanded_tensors_are_limited_in_total(tmp_path):
    builder = DcpBuilder()
    count = 12 * MIB
    programs = [tensor_program("float32", [count], [0], count=1, key=str(place)) for place in range(3)]
    members = {f"data/{place}": bytes(4) for place in range(3)}
    builder.object("values", zipped({"data.pkl": pickled(array(programs)), "byteorder": b"little", **members}))
    with pytest.raises(CorruptCheckpointError, match="16 times its own bytes"):
        blocking.import_dcp(builder.write(tmp_path / "dcp"), tmp_path / "out")


def test_what_limits_count():
    limits = ReadLimits(4)
    limits.charge(64 * MIB + 64)
    limits.grant(1, "file", 0)
    limits.grant(1, "file", 0)
    limits.charge(16)
    with pytest.raises(CorruptCheckpointError):
        limits.charge(1)


class Ended(Exception):
    """The reader was told to end."""


def predictable_keys(count: int) -> list[bytes]:
    """Numbers that all have the same hash."""
    return [number(place * ((1 << 61) - 1)) for place in range(2, count + 2)]


KEY_KINDS = {
    "dict": lambda keys: mapping([(key, b"N") for key in keys]),
    "one by one": lambda keys: b"}" + b"".join(key + b"Ns" for key in keys),
    "set": lambda keys: b"\x8f(" + b"".join(keys) + b"\x90",
    "frozenset": lambda keys: b"(" + b"".join(keys) + b"\x91",
    "set of a list": lambda keys: applied("builtins.set", array(keys)),
    "tuples": lambda keys: mapping([(key + b"\x85", b"N") for key in keys]),
}


@pytest.mark.parametrize("kind", KEY_KINDS)
def test_keys_of_equal_hashes_are_limited(kind):
    with pytest.raises(CorruptCheckpointError, match="more than 10000 keys that are tuples"):
        read_pickle(pickled(KEY_KINDS[kind](predictable_keys(10_001))), VALUE_NAMES)
    read_pickle(pickled(KEY_KINDS[kind](predictable_keys(1000))), VALUE_NAMES)


def test_keys_of_metadata_are_texts_or_objects():
    with pytest.raises(CorruptCheckpointError, match="a key is a int, no text"):
        parse_metadata(pickled(mapping([(number(1), b"N")])), go_on)


@pytest.mark.parametrize("program", [b"N0" * 5000, array([b"N" * 20]) * 1000, mapping([(text("k"), b"N")] * 5000)])
def test_reading_a_pickle_ends_when_it_is_told_to(program):
    def end() -> None:
        raise Ended

    with pytest.raises(Ended):
        read_pickle(pickled(program), VALUE_NAMES, None, ReadLimits(1_000_000, end))
    with pytest.raises(Ended):
        parse_metadata(pickled(program), end)


def test_a_deadline_ends_the_reading_of_metadata(tmp_path, monkeypatch):
    """The pickle is endless for its reader: each step waits until the import was given up."""
    builder = DcpBuilder()
    builder.tensor("key", np.zeros(1, np.float32))
    source = builder.write(tmp_path / "dcp")
    (source / ".metadata").write_bytes(pickled(b"N0" * 100_000))
    given_up = threading.Event()
    original = ForeignFiles.check_stop

    def check(files: ForeignFiles) -> None:
        assert files.stop.wait(30), "nobody told the reader to end"
        given_up.set()
        original(files)

    monkeypatch.setattr(ForeignFiles, "check_stop", check)
    with pytest.raises(SaveTimeoutError, match="timeout_seconds"):
        blocking.import_dcp(source, tmp_path / "out", options=SaveOptions(timeout_seconds=0.2))
    assert given_up.is_set()


def test_headers_that_nobody_could_open_are_split(tmp_path, monkeypatch):
    """As if a header could have 4000 bytes."""
    for module in ("safetensors_header", "safetensors_plan"):
        monkeypatch.setattr(f"savestream.interchange.{module}.MAXIMUM_HEADER_BYTES", 4000)
    state = {f"{place:02d}{'n' * 500}": np.full(3, place, np.float32) for place in range(20)}
    blocking.save(state, tmp_path / "saved")
    metadata = {"note": "m" * 1000}
    *files, index = blocking.export_safetensors(tmp_path / "saved", tmp_path / "out", metadata=metadata)
    assert index.name == "model.safetensors.index.json"
    lengths = [int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    assert 2000 < max(lengths) <= 4000
    blocking.import_safetensors(tmp_path / "out", tmp_path / "again")
    assert_equal(blocking.load(tmp_path / "again"), state)


@pytest.mark.parametrize(("name", "note"), [("n" * 4000, "m"), ("n", "m" * 4000), ("n" * 2500, "m" * 2500)])
def test_what_no_header_can_hold_is_refused(name, note, tmp_path, monkeypatch):
    for module in ("safetensors_header", "safetensors_plan"):
        monkeypatch.setattr(f"savestream.interchange.{module}.MAXIMUM_HEADER_BYTES", 4000)
    blocking.save({name: np.ones(3)}, tmp_path / "saved")
    with pytest.raises(PlanError, match=r"take.* more than the 4000 bytes"):
        blocking.export_safetensors(tmp_path / "saved", tmp_path / "out", metadata={"note": note})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\udfff": "b"}])
def test_metadata_that_utf8_cannot_hold_is_refused(metadata, tmp_path):
    blocking.save({"w": np.ones(3)}, tmp_path / "saved", metadata=metadata)
    with pytest.raises(PlanError, match=r"metadata=.*in UTF-8"):
        blocking.export_safetensors(tmp_path / "saved", tmp_path / "out", metadata=metadata)
    assert not (tmp_path / "out").exists()
    # The checkpoint's own is used where the format can hold it.
    (path,) = blocking.export_safetensors(tmp_path / "saved", tmp_path / "out")
    assert b"__metadata__" not in path.read_bytes()
