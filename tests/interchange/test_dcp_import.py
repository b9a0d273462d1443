"""DCP checkpoints put together by hand: what is right is imported exactly, what is wrong is refused by name."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import zstandard
from dcp_builder import (
    METADATA,
    DcpBuilder,
    archive_of,
    element_strides,
    size,
    tensor_archive,
    tensor_program,
)
from import_support import assert_equal, imported, open_descriptors
from pickle_support import (
    NONE,
    applied,
    array,
    attributes,
    instance,
    mapping,
    named,
    number,
    numbers,
    pickled,
    sequence,
    text,
)

import savestream
from savestream import blocking
from savestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    StorageError,
    UnsafeObjectError,
)

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
OTHER = np.arange(5, dtype=np.int64)


@pytest.fixture
def builder():
    return DcpBuilder()


@pytest.fixture
def source(tmp_path):
    return tmp_path / "dcp"


def refused(builder, source, tmp_path, error, *messages, **options):
    """The import is refused, by these words, and leaves nothing behind."""
    builder.write(source)
    with pytest.raises(error) as caught:
        blocking.import_dcp(source, tmp_path / "out", **options)
    for message in messages:
        assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert open_descriptors(tmp_path) == []
    return caught.value


def test_nested_state(builder, source, tmp_path):
    builder.tensor("model.w", VALUES, ("model", "w"))
    builder.tensor("model.layers.0", OTHER, ("model", "layers", 0))
    builder.tensor("model.layers.1.x", VALUES[0], ("model", "layers", 1, "x"))
    builder.object("step", archive_of(number(7)), ("step",))
    builder.object("note", archive_of(sequence([text("a"), array([number(1), NONE])])), ("note",))
    builder.tensor("a.dotted.key", VALUES[1], ("a.dotted.key",))
    builder.tensor("scalar", np.float32(2.5)[...], ("scalar",))
    builder.tensor("empty", np.empty((0, 3), np.float32), ("empty",))
    builder.write(source)
    expected = {
        "model": {"w": VALUES, "layers": [OTHER, {"x": VALUES[0]}]},
        "step": 7,
        "note": ("a", [1, None]),
        "a.dotted.key": VALUES[1],
        "scalar": np.float32(2.5)[...],
        "empty": np.empty((0, 3), np.float32),
    }
    assert_equal(imported(blocking.import_dcp, source, tmp_path), expected)


async def test_the_result_says_what_was_done(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    events = []
    info = await savestream.import_dcp(builder.write(source), tmp_path / "out", observer=events.append)
    assert isinstance(info, savestream.CheckpointInfo)
    assert (info.skipped, info.step) == ((), None)
    assert info.statistics.raw_bytes == VALUES.nbytes
    assert 0 < info.statistics.stages["inspect"].busy_seconds < info.statistics.total_seconds
    assert info.statistics.stages["verify"].bytes == VALUES.nbytes
    assert {"SavePlanned", "SaveStaged", "SaveCommitted"} <= {type(event).__name__ for event in events}
    assert (await savestream.verify(tmp_path / "out")).raw_bytes == VALUES.nbytes
    unverified = await savestream.import_dcp(source, tmp_path / "other", verify=False)
    assert "verify" not in unverified.statistics.stages


def test_without_paths_the_keys_are_flat(builder, source, tmp_path):
    builder.tensor("model.w", VALUES, ("model", "w"))
    builder.tensor("[0]", OTHER)
    for planner_data in (NONE, mapping([(text("model.w"), sequence([text("model")]))]), number(3)):
        builder.planner_data = planner_data
        builder.write(source)
        assert_equal(imported(blocking.import_dcp, source, tmp_path), {"model.w": VALUES, "[0]": OTHER})


def test_lists_keep_the_place_of_what_the_paths_leave_out(builder, source, tmp_path):
    builder.tensor("l.2", VALUES, ("l", 2))
    builder.tensor("l.0", OTHER, ("l", 0))
    builder.write(source)
    assert_equal(imported(blocking.import_dcp, source, tmp_path), {"l": [OTHER, None, VALUES]})


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([("a",), ("a",)], "another entry"),
        ([("a",), ("a", "b")], "leads through another entry"),
        ([("a", "b"), ("a",)], "leads to others"),
        ([("a", "b"), ("a", 0)], "among str keys"),
        ([("a", 0), ("a", "b")], "among int keys"),
        ([("a", 10**9), ("b",)], "far from all others"),
        ([("a", -1), ("b",)], "far from all others"),
        ([(0,), ("b",)], "its path in the state"),
        ([("a", *["x"] * 200), ("b",)], "levels deep"),
    ],
)
def test_paths_that_make_no_state_are_refused(paths, message, builder, source, tmp_path):
    for place, path in enumerate(paths):
        builder.tensor(f"key {place}", VALUES, path)
    refused(builder, source, tmp_path, CorruptCheckpointError, message, "key ")


@pytest.mark.parametrize("layout", ["transposed", "strided", "broadcast", "part", "conjugated", "big-endian"])
def test_layouts(layout, builder, source, tmp_path):
    stored, members = VALUES, {}
    count, offset = VALUES.size, 0
    shape, strides = VALUES.shape, element_strides(VALUES)
    expected = VALUES
    if layout == "transposed":
        shape, strides, expected = shape[::-1], strides[::-1], VALUES.T
    elif layout == "strided":
        shape, strides, offset, expected = (2, 2), [8, 2], 1, VALUES[::2, 1::2]
    elif layout == "broadcast":
        shape, strides, expected = (3, 4, 5), [4, 1, 0], np.broadcast_to(VALUES[..., None], (3, 4, 5))
    elif layout == "part":
        shape, strides, offset, expected = (4,), [1], 4, VALUES[1]
    elif layout == "big-endian":
        stored, members = VALUES.astype(">f4"), {"byteorder": b"big"}
    program = tensor_program("float32", shape, strides, offset=offset, count=count)
    if layout == "conjugated":
        expected = (VALUES + 1j).astype(np.complex64)
        stored = np.conjugate(expected)
        marks = mapping([(text("conj"), b"\x88"), (text("neg"), b"\x89")])
        program = tensor_program("complex64", shape, strides, count=count)[:-2] + marks + b"tR"
    dtype = expected.dtype.name
    builder.describe("w", dtype, shape, [((0,) * len(shape), shape)])
    builder.store("w", (0,) * len(shape), builder.item(archive_of(program, {"data/0": stored.tobytes(), **members})))
    builder.write(source)
    assert_equal(imported(blocking.import_dcp, source, tmp_path), {"w": np.ascontiguousarray(expected)})


def test_chunks_make_up_an_array(builder, source, tmp_path):
    whole = np.arange(6 * 7, dtype=np.float32).reshape(6, 7)
    boxes = [(0, 4, 0, 3), (0, 4, 3, 7), (4, 6, 0, 7)]
    chunks = [((a, c), np.ascontiguousarray(whole[a:b, c:d])) for a, b, c, d in boxes]
    builder.sharded("w", "float32", whole.shape, [*chunks, ((6, 0), np.empty((0, 7), np.float32))])
    builder.sharded("zstd", "float32", whole.shape, [])
    builder.entries.pop()
    builder.paths.pop()
    builder.write(source)
    place = tmp_path / "out"
    blocking.import_dcp(source, place)
    assert_equal(blocking.load(place), {"w": whole})
    entry = blocking.read_manifest(place).contents.state_dict_metadata["w"]
    assert [chunk.offsets for chunk in entry.chunks] == [(0, 0), (0, 3), (4, 0)]


CHUNKS = {
    "a hole": ([(0, 2, 0, 7), (3, 6, 0, 7)], "leave 7 elements"),
    "an overlap": ([(0, 4, 0, 7), (3, 6, 0, 7)], "overlap"),
    "outside": ([(0, 6, 0, 7), (6, 8, 0, 7)], "outside shape"),
    "none": ([], "leave 42 elements"),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_chunks_that_do_not_make_up_an_array_are_refused(kind, builder, source, tmp_path):
    boxes, message = CHUNKS[kind]
    chunks = [((a, c), np.zeros((b - a, d - c), np.float32)) for a, b, c, d in boxes]
    builder.sharded("layer.w", "float32", (6, 7), chunks)
    refused(builder, source, tmp_path, CorruptCheckpointError, "layer.w", message)


def compressed(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


def add_item(builder, key, values, data, transforms=()):
    builder.describe(key, values.dtype.name, values.shape, [((0,) * values.ndim, values.shape)])
    builder.store(key, (0,) * values.ndim, builder.item(data, transforms=transforms))


def test_compressed_items(builder, source, tmp_path):
    large = np.random.default_rng(0).integers(0, 9, (900, 1000)).astype(np.int64)
    add_item(builder, "w", VALUES, compressed(tensor_archive(VALUES)), ["stream.zstd/1"])
    add_item(builder, "large", large, compressed(tensor_archive(large)), ["stream.zstd/1.2"])
    add_item(builder, "twice", OTHER, compressed(compressed(tensor_archive(OTHER))), ["stream.zstd/1"] * 2)
    builder.entries.append((text("o"), named(METADATA + "BytesStorageMetadata") + b")\x81"))
    builder.store("o", None, builder.item(compressed(archive_of(text("x"))), transforms=["stream.zstd/1"]))
    builder._add_path("o", None)
    builder.write(source)
    expected = {"w": VALUES, "large": large, "twice": OTHER, "o": "x"}
    assert_equal(imported(blocking.import_dcp, source, tmp_path), expected)


@pytest.mark.parametrize("transform", ["stream.zstd/2", "stream.zstd", "stream.rot13/1", "stream.zstd@home/1", ""])
def test_unknown_extensions_are_refused_by_name(transform, builder, source, tmp_path):
    add_item(builder, "w", VALUES, compressed(tensor_archive(VALUES)), [transform])
    refused(builder, source, tmp_path, UnsafeObjectError, "w: ", repr(transform), "on_unsupported='skip'")


def test_compressed_items_do_not_become_more_than_their_tensor(builder, source, tmp_path):
    bomb = compressed(tensor_archive(VALUES, more=bytes(256 << 20)))
    assert len(bomb) < 100_000
    add_item(builder, "w", VALUES, bomb, ["stream.zstd/1"])
    refused(builder, source, tmp_path, CorruptCheckpointError, "w: ", "decompresses to more than")


def test_compressed_objects_do_not_become_more_than_any_object(builder, source, tmp_path):
    bomb = compressed(archive_of(text("x"), {"more": bytes(65 << 20)}))
    builder.entries.append((text("o"), named(METADATA + "BytesStorageMetadata") + b")\x81"))
    builder.store("o", None, builder.item(bomb, transforms=["stream.zstd/1"]))
    builder._add_path("o", None)
    refused(builder, source, tmp_path, CorruptCheckpointError, "o: ", "decompresses to more than")


def test_compressed_items_cut_off(builder, source, tmp_path):
    data = compressed(tensor_archive(VALUES))
    add_item(builder, "w", VALUES, data[: len(data) // 2], ["stream.zstd/1"])
    refused(builder, source, tmp_path, CorruptCheckpointError, "w: ")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


EVIL_PLACES = ["metadata", "an entry", "planner data", "a tensor", "an object", "a key of an object"]


@pytest.mark.parametrize("place", EVIL_PLACES)
def test_nothing_is_run(place, builder, source, tmp_path):
    marker = tmp_path / "marker"
    program = pickle.dumps(Evil(marker), 2)[2:-1]
    builder.tensor("w", VALUES)
    if place == "an entry":
        builder.entries.append((text("evil"), program))
    elif place == "planner data":
        builder.planner_data = program
    elif place == "a tensor":
        add_item(builder, "evil", VALUES, archive_of(program, {"data/0": VALUES.tobytes()}))
    elif place == "an object":
        builder.object("evil", archive_of(program))
    elif place == "a key of an object":
        builder.object("evil", archive_of(mapping([(program, number(1))])))
    builder.write(source)
    if place == "metadata":
        (source / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    for options in ({}, {"on_unsupported": "skip"} if "object" not in place and place != "a tensor" else {}):
        with pytest.raises(UnsafeObjectError, match=r"posix\.system|nt\.system"):
            blocking.import_dcp(source, tmp_path / "out", **options)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    pickle.loads(pickled(program))
    assert marker.exists(), "the pickle of this test does nothing, so it proves nothing"


@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.metadata.__builtins__", "some.planner.Data", "torch.load", "pathlib.Path"]
)
def test_unknown_globals_of_the_metadata_are_refused_by_name(name, builder, source, tmp_path):
    builder.tensor("w", VALUES)
    builder.planner_data = named(name)
    refused(builder, source, tmp_path, UnsafeObjectError, ".metadata", name)


def test_what_other_releases_and_systems_write_in_the_metadata(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    legacy = "torch.distributed._shard.sharded_tensor.metadata."
    original = builder.metadata

    def metadata():
        data = original().replace(
            f"c{METADATA}TensorProperties".rpartition(".")[0].encode() + b"\nTensorProperties",
            f"c{legacy[:-1]}\nTensorProperties".encode(),
        )
        data = data.replace(
            f"c{METADATA[:-1]}\n_MEM_FORMAT_ENCODING".encode(), f"c{legacy[:-1]}\nMEM_FORMAT_ENCODING".encode()
        )
        return data.replace(b"cpathlib\nPosixPath", b"cpathlib._local\nWindowsPath")

    builder.metadata = metadata
    builder.write(source)
    assert legacy.encode()[:-1] in (source / ".metadata").read_bytes()
    assert b"_local" in (source / ".metadata").read_bytes()
    assert_equal(imported(blocking.import_dcp, source, tmp_path), {"w": VALUES})


def test_properties_as_attributes(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    state = attributes(dtype=named("torch.float32"), requires_grad=b"\x89")
    entry = attributes(
        properties=instance(METADATA + "TensorProperties", state),
        size=size(VALUES.shape),
        chunks=array(
            [instance(METADATA + "ChunkStorageMetadata", attributes(offsets=size((0, 0)), sizes=size(VALUES.shape)))]
        ),
    )
    builder.entries = [(text("w"), instance(METADATA + "TensorStorageMetadata", entry))]
    builder.write(source)
    assert_equal(imported(blocking.import_dcp, source, tmp_path), {"w": VALUES})


@pytest.mark.parametrize("kind", ["pickle", "dtype", "tensor", "object of objects"])
def test_unsupported_keys_are_skipped_where_that_is_asked_for(kind, builder, source, tmp_path, caplog):
    builder.tensor("w", VALUES, ("model", "w"))
    if kind == "pickle":
        builder.object("model.extra", archive_of(applied("some.module.Class", number(1))), ("model", "extra"))
    elif kind == "dtype":
        builder.describe("model.extra", "qint8", (2,), [((0,), (2,))], ("model", "extra"))
        builder.store("model.extra", (0,), builder.item(b"whatever"))
    elif kind == "tensor":
        builder.describe("model.extra", "float32", (2,), [((0,), (2,))], ("model", "extra"))
        builder.store(
            "model.extra", (0,), builder.item(archive_of(applied("torch._utils._rebuild_sparse_tensor", NONE)))
        )
    else:
        builder.object("model.extra", archive_of(array([named("torch.FloatStorage")])), ("model", "extra"))
    refused(builder, source, tmp_path, UnsafeObjectError, "model.extra", "on_unsupported='skip'")
    with caplog.at_level(logging.WARNING, "savestream"):
        info = blocking.import_dcp(source, tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("model.extra",)
    assert "model.extra" in caplog.text
    assert_equal(blocking.load(tmp_path / "out"), {"model": {"w": VALUES}})


ESCAPES = ["../outside", "sub/../../outside", "/outside", "C:\\outside", "..\\outside", "link", "sub/link", "sub/", "."]


@pytest.mark.parametrize("path", ESCAPES)
def test_files_outside_of_the_directory_are_not_read(path, builder, source, tmp_path):
    data = tensor_archive(VALUES)
    outside = tmp_path / "outside"
    outside.write_bytes(data)
    (source / "sub").mkdir(parents=True)
    for link in (source / "link", source / "sub" / "link"):
        link.symlink_to(outside)
    builder.describe("w", "float32", VALUES.shape, [((0, 0), VALUES.shape)])
    builder.store("w", (0, 0), builder.place(path, 0, len(data)))
    builder.write(source)
    with pytest.raises((CorruptCheckpointError, StorageError), match="w: "):
        blocking.import_dcp(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_and_directories_inside_are_followed(builder, source, tmp_path):
    data = tensor_archive(VALUES)
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "real").write_bytes(data)
    (source / "link").symlink_to("sub/real")
    for key, path in (("a", "link"), ("b", "sub/real")):
        builder.describe(key, "float32", VALUES.shape, [((0, 0), VALUES.shape)])
        builder.store(key, (0, 0), builder.place(path, 0, len(data)))
    builder.write(source)
    linked = tmp_path / "by link"
    linked.symlink_to(source)
    assert_equal(imported(blocking.import_dcp, linked, tmp_path), {"a": VALUES, "b": VALUES})


def test_a_metadata_that_leads_out_is_not_read(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    builder.write(source)
    (tmp_path / "outside").write_bytes((source / ".metadata").read_bytes())
    (source / ".metadata").unlink()
    (source / ".metadata").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        blocking.import_dcp(source, tmp_path / "out")


def test_files_cut_off_anywhere_are_refused_by_key(builder, source, tmp_path):
    for key in ("a", "b", "c"):
        builder.tensor(key, VALUES)
    builder.write(source)
    data = (source / "__0_0.distcp").read_bytes()
    third = len(data) // 3
    for length in (0, 1, third - 1, third, third + 1, 2 * third, len(data) - 1):
        (source / "__0_0.distcp").write_bytes(data[:length])
        key = "abc"[length // third]
        end = (length // third + 1) * third
        with pytest.raises(CorruptCheckpointError) as caught:
            blocking.import_dcp(source, tmp_path / "out")
        assert f": {key}: __0_0.distcp" in str(caught.value)
        assert f"the file at byte {length}; {min(end - length, third)} bytes are missing" in str(caught.value)
    (source / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match="missing, although the metadata names it"):
        blocking.import_dcp(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_metadata_cut_off_anywhere_is_refused(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    builder.write(source)
    data = (source / ".metadata").read_bytes()
    for length in range(0, len(data), 17):
        (source / ".metadata").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata: "):
            blocking.import_dcp(source, tmp_path / "out")


def tensor_lies():
    """Archives of a (3, 4) float32 tensor that contradict the metadata or themselves."""
    plain = {"data/0": VALUES.tobytes()}

    def program(shape=(3, 4), strides=(4, 1), **options):
        return tensor_program("float32", shape, strides, **{"count": 12, **options})

    return {
        "another shape": (archive_of(program((4, 3), (3, 1)), plain), "shape (4, 3) is stored"),
        "another dtype": (
            archive_of(tensor_program("int64", (3, 4), (4, 1), count=12), {"data/0": bytes(96)}),
            "int64",
        ),
        "beyond the storage": (archive_of(program(offset=1), plain), "reaches to byte 52"),
        "huge strides": (archive_of(program(strides=(1 << 50, 1)), plain), "reaches to byte"),
        "a huge shape": (archive_of(program((1 << 40, 4), (4, 1)), plain), "reaches to byte"),
        "a spread": (archive_of(program((1 << 30, 12), (0, 1)), plain), "spreads 48 stored bytes"),
        "negative strides": (archive_of(program(strides=(-4, 1)), plain), "strides"),
        "too many strides": (archive_of(program(strides=(4, 1, 1)), plain), "has 3 strides"),
        "a storage too short": (archive_of(program(), {"data/0": bytes(44)}), "is said to have 48 bytes and has 44"),
        "a storage too long": (archive_of(program(), {"data/0": bytes(52)}), "is said to have 48 bytes and has 52"),
        "no storage": (archive_of(program(key="1"), plain), "storage '1' is not in the archive"),
        "no tensor": (archive_of(number(3), plain), "not a tensor"),
        "a list of tensors": (archive_of(array([program()]), plain), "not a tensor"),
        "a byte order": (archive_of(program(), {**plain, "byteorder": b"middle"}), "byte order"),
        "no pickle": (archive_of(program(), {"data.pkl": b""}), "malformed"),
        "another archive": (b"PK\x05\x06" + bytes(18), "no data.pkl"),
        "no archive": (b"x" * 500, "no zip archive"),
        "nothing": (b"", "no zip archive"),
        "hooks": (archive_of(program()[:-2] + b"tR", plain), None),
    }


LIES = tensor_lies()
LIES.pop("hooks")


@pytest.mark.parametrize("lie", LIES)
def test_tensors_that_lie_are_refused_by_key(lie, builder, source, tmp_path):
    data, message = LIES[lie]
    add_item(builder, "layer.w", VALUES, data)
    refused(builder, source, tmp_path, CorruptCheckpointError, "layer.w", "__0_0.distcp", message)


def test_hooks_and_unknown_marks_are_refused(builder, source, tmp_path):
    plain = {"data/0": VALUES.tobytes()}
    program = tensor_program("float32", (3, 4), (4, 1), count=12)
    hooks = named("collections.OrderedDict") + b")R"
    with_hooks = program.replace(hooks, hooks + b"(" + text("a") + number(1) + b"u")
    for changed, message in (
        (with_hooks, "hooks"),
        (program[:-2] + mapping([(text("color"), b"\x88")]) + b"tR", "carries"),
        (program[:-2] + mapping([(text("conj"), number(1))]) + b"tR", "carries"),
    ):
        builder = DcpBuilder()
        add_item(builder, "w", VALUES, archive_of(changed, plain))
        refused(builder, source, tmp_path, UnsafeObjectError, "w: ", message)


def test_compressed_archives_are_refused(builder, source, tmp_path):
    zeros = np.zeros((300, 300), np.float32)
    program = tensor_program("float32", zeros.shape, (300, 1), count=zeros.size)
    data = archive_of(program, {"data/0": zeros.tobytes()}, method=zipfile.ZIP_DEFLATED)
    add_item(builder, "w", zeros, data)
    refused(builder, source, tmp_path, UnsafeObjectError, "w: ", "compressed")


def test_scripts_are_refused(builder, source, tmp_path):
    builder.object("module", archive_of(number(1), {"constants.pkl": pickled(b")")}))
    refused(builder, source, tmp_path, UnsafeObjectError, "module: ", "TorchScript")


def metadata_lies():
    chunk = METADATA + "ChunkStorageMetadata"

    def entry(**fields):
        properties = instance(METADATA + "TensorProperties", sequence([named("torch.float32"), NONE]))
        box = instance(chunk, attributes(offsets=size((0,)), sizes=size((2,))))
        plain = {"properties": properties, "size": size((2,)), "chunks": array([box])}
        return [(text("w"), instance(METADATA + "TensorStorageMetadata", attributes(**{**plain, **fields})))]

    return {
        "no dict of entries": ({"entries": number(1)}, "lists no entries"),
        "no dict of places": ({"stored": number(1)}, "where anything is stored"),
        "a key of a number": ({"entries": mapping([(number(1), NONE)])}, "no text"),
        "an entry of a number": ({"entries": mapping([(text("w"), number(1))])}, "TensorStorageMetadata belongs"),
        "a negative size": ({"entries": mapping(entry(size=size((2,)).replace(numbers([2]), numbers([-2]))))}, "size"),
        "a size of texts": ({"entries": mapping(entry(size=sequence([text("2")])))}, "its shape"),
        "chunks of a number": ({"entries": mapping(entry(chunks=number(1)))}, "its chunks"),
        "a chunk of a number": ({"entries": mapping(entry(chunks=array([number(1)])))}, "ChunkStorageMetadata belongs"),
        "no properties": ({"entries": mapping(entry(properties=NONE))}, "its dtype"),
        "nothing stored": ({"entries": mapping(entry())}, "nothing is stored for the chunk at (0,)"),
    }


METADATA_LIES = metadata_lies()


@pytest.mark.parametrize("lie", METADATA_LIES)
def test_metadata_that_lies_is_refused(lie, source, tmp_path):
    parts, message = METADATA_LIES[lie]
    source.mkdir()
    fields = {
        "state_dict_metadata": parts.get("entries", mapping([])),
        "planner_data": NONE,
        "storage_data": parts.get("stored", mapping([])),
    }
    (source / ".metadata").write_bytes(pickled(instance(METADATA + "Metadata", attributes(**fields))))
    with pytest.raises((CorruptCheckpointError, UnsafeObjectError)) as caught:
        blocking.import_dcp(source, tmp_path / "out")
    assert message in str(caught.value)


def test_places_that_lie_are_refused(builder, source, tmp_path):
    data = builder.item(tensor_archive(VALUES))
    cases = [
        (builder.place("__0_0.distcp", 1 << 50, 10), "truncated"),
        (builder.place("__0_0.distcp", 0, 1 << 61), "truncated"),
        (builder.place("", 0, 10), "its file is"),
        (
            instance("torch.distributed.checkpoint.filesystem._StorageInfo", attributes(relative_path=text("x"))),
            "place",
        ),
        (instance("torch.distributed.checkpoint.filesystem._StorageInfo", number(1)), "_StorageInfo belongs"),
        (builder.place("__0_0.distcp", 0, 10, ["x"])[:-1] + b"b", "not known"),
    ]
    for info, message in cases:
        broken = DcpBuilder()
        broken.files = builder.files
        broken.describe("w", "float32", VALUES.shape, [((0, 0), VALUES.shape)])
        broken.store("w", (0, 0), info)
        broken.write(source)
        with pytest.raises((CorruptCheckpointError, UnsafeObjectError), match=message):
            blocking.import_dcp(source, tmp_path / "out")
    twice = DcpBuilder()
    twice.files = builder.files
    twice.describe("w", "float32", VALUES.shape, [((0, 0), VALUES.shape)])
    twice.store("w", (0, 0), data)
    twice.store("w", (0, 0), data)
    twice.write(source)
    with pytest.raises(CorruptCheckpointError, match="two items are stored"):
        blocking.import_dcp(source, tmp_path / "out")


def test_values_that_contain_themselves_or_are_endless_are_refused(source, tmp_path):
    loop = b"]q\x00h\x00a"
    level = b"]"
    for depth in range(40):
        level = level + b"q" + bytes([depth]) + b"]" + (b"h" + bytes([depth]) + b"a") * 2
    for program, message in ((loop, "nest too deeply"), (level, "repeats or expands its parts")):
        broken = DcpBuilder()
        broken.object("w", archive_of(program))
        refused(broken, source, tmp_path, CorruptCheckpointError, "w: ", message)


@pytest.mark.parametrize("nested", range(2))
def test_objects_with_tensors_inside(nested, builder, source, tmp_path):
    members = {"data/0": VALUES.tobytes(), "data/1": OTHER.tobytes()}
    first = tensor_program("float32", (3, 4), (4, 1), count=12)
    second = tensor_program("int64", (5,), (1,), count=5, key="1")
    parameter = applied("torch._utils._rebuild_parameter", first, b"\x88", named("collections.OrderedDict") + b")R")
    value = sequence([parameter, mapping([(text("x"), second)]), named("collections.OrderedDict") + b")R"])
    builder.object("pair", archive_of(array([value]) if nested else value, members))
    builder.write(source)
    expected = (VALUES, {"x": OTHER}, OrderedDict())
    assert_equal(imported(blocking.import_dcp, source, tmp_path), {"pair": [expected] if nested else expected})


def test_objects_of_torch_are_recorded(builder, source, tmp_path):
    objects = [named("torch.bfloat16"), applied("torch.Size", numbers([1, 2])), applied("torch.device", text("cpu"))]
    objects.append(applied("torch.device", text("cuda"), number(1)))
    builder.object("objects", archive_of(array(objects)))
    builder.write(source)
    states = {"torch.dtype": "bfloat16", "torch.Size": (1, 2), "torch.device": "cpu"}
    code = "import sys; from savestream import blocking; assert 'torch' not in sys.modules\n"
    code += "for item in blocking.load(sys.argv[1])['objects']: print(item.type_name, item.state)"
    blocking.import_dcp(source, tmp_path / "out")
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert printed == [*(f"{name} {state}" for name, state in states.items()), "torch.device cuda:1"]


@pytest.mark.parametrize("arguments", [[text("cpu; rm")], [number(1)], [text("cuda"), text("x")], []])
def test_devices_that_are_none_are_refused(arguments, builder, source, tmp_path):
    builder.object("w", archive_of(applied("torch.device", *arguments)))
    refused(builder, source, tmp_path, CorruptCheckpointError, "w: ")


def test_what_is_no_dcp_checkpoint_says_what_it_is(builder, source, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        blocking.import_dcp(source, tmp_path / "out")
    with pytest.raises(CheckpointNotFoundError, match="download it first"):
        blocking.import_dcp("s3://bucket/run", tmp_path / "out")
    for wrong in (3, None, "", b"/tmp", "a\0b"):
        with pytest.raises(PlanError, match="src="):
            blocking.import_dcp(wrong, tmp_path / "out")
    source.mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"no \.metadata in it"):
        blocking.import_dcp(source, tmp_path / "out")
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="import_safetensors"):
        blocking.import_dcp(source, tmp_path / "out")
    (source / "__0.metadata").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="use_collectives=False"):
        blocking.import_dcp(source, tmp_path / "out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PlanError, match="this is a file"):
        blocking.import_dcp(tmp_path / "file", tmp_path / "out")
    builder.tensor("w", VALUES)
    builder.files["__0_0.distcp"][:] = struct.pack("<Q", 100) + b'{"w":' + bytes(2000)
    refused(builder, source, tmp_path, UnsafeObjectError, "w: ", "safetensors mode", "default mode")


def test_a_metadata_of_any_size_is_not_read(builder, source, tmp_path, monkeypatch):
    builder.tensor("w", VALUES)
    monkeypatch.setattr("savestream.interchange.dcp_reader._MAXIMUM_METADATA_BYTES", 100)
    refused(builder, source, tmp_path, CorruptCheckpointError, ".metadata", "up to 100 are read")


@pytest.mark.parametrize(
    "options",
    [{"on_unsupported": "ignore"}, {"verify": 1}, {"overwrite": None}, {"options": 3}, {"observer": 3}],
    ids=repr,
)
def test_wrong_arguments_are_refused_by_name(options, builder, source, tmp_path):
    builder.tensor("w", VALUES)
    refused(builder, source, tmp_path, PlanError, next(iter(options)), **options)


def test_a_standing_checkpoint_is_replaced_only_where_that_is_asked_for(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    builder.write(source)
    blocking.save({"old": OTHER}, tmp_path / "out")
    (source / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointExistsError):  # found before the damaged source is looked at
        blocking.import_dcp(source, tmp_path / "out")
    with pytest.raises(CorruptCheckpointError):
        blocking.import_dcp(source, tmp_path / "out", overwrite=True)
    assert_equal(blocking.load(tmp_path / "out"), {"old": OTHER})
    builder.write(source)
    blocking.import_dcp(source, tmp_path / "out", overwrite=True)
    assert_equal(blocking.load(tmp_path / "out"), {"w": VALUES})


def test_errors_of_reading_keep_their_number(builder, source, tmp_path):
    builder.tensor("w", VALUES)
    builder.write(source)
    (source / "__0_0.distcp").unlink()
    (source / "__0_0.distcp").mkdir()
    with pytest.raises(StorageError, match="no regular file") as caught:
        blocking.import_dcp(source, tmp_path / "out")
    assert caught.value.errno == errno.EINVAL
