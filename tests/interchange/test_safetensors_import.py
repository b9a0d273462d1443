"""Safetensors files: what the format allows is imported exactly, everything else is refused by name."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from import_support import assert_equal, imported, open_descriptors
from safetensors_support import CODES, file_of, tensors, varied

from savestream import blocking
from savestream.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError, UnsafeObjectError

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def refused(data, path, error, *messages, **options):
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        blocking.import_safetensors(path, path.parent / "out", **options)
    for message in (str(path), *messages):
        assert message in str(caught.value)
    assert not (path.parent / "out").exists()
    assert open_descriptors(path.parent) == []


@pytest.mark.parametrize("padding", [0, 1, 7, 1000])
def test_every_dtype_and_shape(padding, path, tmp_path):
    path.write_bytes(tensors(varied(), padding=padding))
    assert_equal(imported(blocking.import_safetensors, path, tmp_path), varied())


def test_pairs_of_four_bits(path, tmp_path):
    data = bytes(range(12))
    path.write_bytes(file_of({"w": {"dtype": "F4", "shape": [2, 3, 4], "data_offsets": [0, 12]}}, data))
    found = imported(blocking.import_safetensors, path, tmp_path)["w"]
    assert (found.shape, found.tobytes()) == ((2, 3, 2), data)
    blocking.import_safetensors(path, tmp_path / "out")
    properties = blocking.read_manifest(tmp_path / "out").contents.state_dict_metadata["w"].properties
    assert properties.dtype == "float4_e2m1fn_x2"


def test_metadata_is_kept(path, tmp_path):
    for metadata in ({"format": "pt", "\N{BRAIN}": ""}, {}, None):
        path.write_bytes(tensors({"w": VALUES}, metadata))
        blocking.import_safetensors(path, tmp_path / "out", overwrite=True)
        assert blocking.read_manifest(tmp_path / "out").metadata == metadata


def test_no_tensors(path, tmp_path):
    path.write_bytes(tensors({}))
    assert imported(blocking.import_safetensors, path, tmp_path) == {}


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DATA = VALUES.tobytes()
LIES = {
    "an empty file": (b"", "no safetensors file"),
    "seven bytes": (b"\x08" + bytes(6), "no safetensors file"),
    "a huge header": ((1 << 62).to_bytes(8, "little") + b"{}", "is said to have"),
    "a header of 100 MB": ((100_000_001).to_bytes(8, "little") + b"{}", "is said to have"),
    "a header beyond the end": ((100).to_bytes(8, "little") + b"{}", "truncated: its header ends at byte 108 of 10"),
    "no JSON": (file_of(b"{nothing}"), "not JSON"),
    "no object": (file_of([1]), "no JSON object"),
    "leading space": (file_of(b" {}"), "no JSON object"),
    "no UTF-8": (file_of(b'{"\xff":1}'), "not JSON"),
    "nested": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nests"),
    "a key twice": (file_of(b'{"w":1,"w":2}'), "'w' more than once"),
    "a field twice": (file_of(b'{"w":{"dtype":"F32","dtype":"F16"}}'), "'dtype' more than once"),
    "no fields": (file_of({"w": 1}), "w: it has no dtype"),
    "no dtype": (file_of({"w": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "w: it has no dtype"),
    "a dtype of a number": (file_of({"w": entry(dtype=3)}, DATA), "w: its dtype"),
    "a negative size": (file_of({"w": entry(shape=[-2, -3])}, DATA), "w: its shape"),
    "a size of a float": (file_of({"w": entry(shape=[2.0, 3])}, DATA), "w: its shape"),
    "a size of true": (file_of({"w": entry(shape=[True, 3])}, DATA), "w: its shape"),
    "a huge size": (file_of({"w": entry(shape=[1 << 63])}, DATA), "w: its shape"),
    "too many dimensions": (file_of({"w": entry(shape=[1] * 65)}, DATA), "w: its shape"),
    "a shape of text": (file_of({"w": entry(shape="23")}, DATA), "w: its shape"),
    "one offset": (file_of({"w": entry(offsets=[24])}, DATA), "w: its data_offsets"),
    "offsets reversed": (file_of({"w": entry(offsets=[24, 0])}, DATA), "w: its data_offsets"),
    "a wrong size": (file_of({"w": entry(shape=[2, 4])}, DATA), "24 bytes are stored for dtype F32 and shape (2, 4)"),
    "another dtype": (file_of({"w": entry("F16")}, DATA), "24 bytes are stored"),
    "a product that overflows": (file_of({"w": entry(shape=[1 << 61, 1 << 61, 1 << 61])}, DATA), "24 bytes are stored"),
    "a hole": (file_of({"w": entry(offsets=[4, 28])}, DATA + bytes(4)), "leaves 4 bytes after that of the header"),
    "a hole between": (
        file_of({"w": entry(), "v": entry(offsets=[25, 49])}, DATA * 3),
        "leaves 1 bytes after that of w",
    ),
    "an overlap": (file_of({"w": entry(), "v": entry(offsets=[20, 44])}, DATA * 2), "v: its data overlaps"),
    "the same bytes": (file_of({"w": entry(), "v": entry()}, DATA), "overlaps"),
    "bytes left over": (file_of({"w": entry()}, DATA + b"x"), "1 bytes follow the last tensor"),
    "beyond the end": (file_of({"w": entry()}, DATA[:-5]), "w ends at byte 24 of the data, of which 19"),
    "metadata of a list": (file_of({"__metadata__": []}), "__metadata__"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_refused(lie, path):
    data, message = LIES[lie]
    refused(data, path, CorruptCheckpointError, message)
    refused(data, path, CorruptCheckpointError, message, on_unsupported="skip")


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F6_E2M3", [8], "6 bits"),
        ("F6_E3M2", [8], "6 bits"),
        ("F4", [3, 3], "pairs"),
        ("F128", [2], "'F128'"),
        ("__import__('os')", [2], "__import__"),
    ],
)
def test_dtypes_without_counterpart_are_refused_or_skipped(dtype, shape, message, path, tmp_path, caplog):
    nbytes = {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}.get(dtype, 8)
    shape = [2, 4] if dtype == "F4" else shape
    header = {"w": entry(), "odd": {"dtype": dtype, "shape": shape, "data_offsets": [24, 24 + nbytes]}}
    if dtype == "F4":
        header["odd"]["shape"] = [8, 1]
    data = file_of(header, DATA + bytes(nbytes))
    refused(data, path, UnsafeObjectError, "odd: ", message)
    with caplog.at_level(logging.WARNING, "savestream"):
        info = blocking.import_safetensors(path, tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("odd",)
    assert message in caplog.text
    assert_equal(blocking.load(tmp_path / "out"), {"w": VALUES})


def test_files_cut_off_anywhere_are_refused(path):
    data = tensors({"w": VALUES, "v": VALUES[0]})
    for length in range(len(data)):
        refused(data[:length], path, CorruptCheckpointError)


class Model:
    """A model in three files, with an index."""

    def __init__(self, directory):
        self.directory = directory
        self.arrays = {f"layer.{number}": np.full((2, number + 1), number, np.float32) for number in range(6)}
        self.weight_map = {}
        for shard in range(3):
            name = f"model-{shard + 1:05d}-of-00003.safetensors"
            held = dict(list(self.arrays.items())[2 * shard : 2 * shard + 2])
            (directory / name).write_bytes(tensors(held, {"format": "pt", "part": str(shard)}))
            self.weight_map.update(dict.fromkeys(held, name))
        self.index = directory / "model.safetensors.index.json"
        self.write()

    def write(self, **members):
        content = {"metadata": {"total_size": 168}, "weight_map": self.weight_map, **members}
        self.index.write_text(json.dumps(content))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    return Model(directory)


@pytest.mark.parametrize("by", ["index", "directory"])
def test_a_model_in_several_files(by, model, tmp_path):
    (model.directory / "consolidated.safetensors").write_bytes(b"not in the index, so it is not looked at")
    source = model.index if by == "index" else model.directory
    blocking.import_safetensors(source, tmp_path / "out")
    assert_equal(blocking.load(tmp_path / "out"), model.arrays)
    metadata = blocking.read_manifest(tmp_path / "out").metadata
    assert metadata["format"] == "pt"
    assert metadata["part"] == {f"model-{shard + 1:05d}-of-00003.safetensors": str(shard) for shard in range(3)}


def test_the_order_is_that_of_the_index(model, tmp_path):
    model.weight_map = dict(reversed(model.weight_map.items()))
    model.write()
    assert list(imported(blocking.import_safetensors, model.index, tmp_path)) == list(reversed(model.arrays))


def test_several_files_without_an_index(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(tensors({"w": VALUES}))
    (tmp_path / "b.safetensors").write_bytes(tensors({"v": VALUES[0]}))
    (tmp_path / "README.md").write_text("hello")
    assert_equal(imported(blocking.import_safetensors, tmp_path, tmp_path), {"w": VALUES, "v": VALUES[0]})
    (tmp_path / "b.safetensors").write_bytes(tensors({"w": VALUES[0]}))
    with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors: w: another file"):
        blocking.import_safetensors(tmp_path, tmp_path / "out")


def test_shards_without_their_index_are_refused(model, tmp_path):
    model.index.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model-00001-of-00003\.safetensors.*without their index"):
        blocking.import_safetensors(model.directory, tmp_path / "out")
    for name in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (model.directory / name).unlink()
    with pytest.raises(CorruptCheckpointError, match="without their index"):
        blocking.import_safetensors(model.directory, tmp_path / "out")
    (model.directory / "model-00001-of-00003.safetensors").rename(model.directory / "model-00001-of-00001.safetensors")
    found = imported(blocking.import_safetensors, model.directory, tmp_path)
    assert list(found) == ["layer.0", "layer.1"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/../../x", "C:x", "", "."])
def test_an_index_cannot_name_files_elsewhere(name, model, tmp_path):
    (tmp_path / "outside.safetensors").write_bytes(tensors({"layer.0": VALUES}))
    model.weight_map["layer.0"] = name
    model.write()
    with pytest.raises(CorruptCheckpointError, match="not inside of"):
        blocking.import_safetensors(model.index, tmp_path / "out")


def test_links_in_a_cache_are_followed(model, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(model.directory.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert_equal(imported(blocking.import_safetensors, model.directory, tmp_path), model.arrays)


def test_missing_shards_and_tensors_are_named(model, tmp_path):
    model.weight_map["layer.9"] = "model-00002-of-00003.safetensors"
    model.write()
    with pytest.raises(CorruptCheckpointError, match=r"model-00002-of-00003\.safetensors: layer\.9 is not in it"):
        blocking.import_safetensors(model.index, tmp_path / "out")
    del model.weight_map["layer.9"]
    del model.weight_map["layer.3"]
    model.write()
    with pytest.raises(UnsafeObjectError, match=r"layer\.3: the index does not name it"):
        blocking.import_safetensors(model.index, tmp_path / "out")
    info = blocking.import_safetensors(model.index, tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("layer.3",)
    (model.directory / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"model-00003-of-00003\.safetensors: missing, although model\.saf"
    ):
        blocking.import_safetensors(model.index, tmp_path / "other")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": 1}}', '{"weight_map": {}, "weight_map": {}}'],
)
def test_a_wrong_index_is_refused(content, model, tmp_path):
    model.index.write_text(content)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors\.index\.json: the index"):
        blocking.import_safetensors(model.index, tmp_path / "out")


def test_an_index_of_any_size_is_not_read(model, tmp_path, monkeypatch):
    monkeypatch.setattr("savestream.interchange.safetensors_reader._MAXIMUM_INDEX_BYTES", 100)
    with pytest.raises(CorruptCheckpointError, match="up to 100 are read"):
        blocking.import_safetensors(model.index, tmp_path / "out")


def test_several_indexes_are_refused(model, tmp_path):
    (model.directory / "model.fp16.safetensors.index.json").write_bytes(model.index.read_bytes())
    with pytest.raises(PlanError, match=r"model\.fp16\.safetensors\.index\.json, model\.safetensors\.index\.json"):
        blocking.import_safetensors(model.directory, tmp_path / "out")


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no safetensors file"):
        blocking.import_safetensors(tmp_path, tmp_path / "out")


def test_parts_that_dcp_wrote_are_refused_with_the_cure(tmp_path):
    def write(number, name, offsets):
        sharding = json.dumps({name: {"saved_offsets": offsets}})
        path = tmp_path / f"shard-0000{number}-model-00001-of-00001.safetensors"
        path.write_bytes(tensors({name: VALUES}, {"DCP_SHARDING_INFO": sharding}))

    write(1, "w", [0, 0])
    write(2, "v", [0, 0])
    assert_equal(imported(blocking.import_safetensors, tmp_path, tmp_path), {"w": VALUES, "v": VALUES})
    write(2, "w", [2, 0])
    with pytest.raises(UnsafeObjectError, match=r"shard-00002.*of w it holds a part.*consolidate_safetensors_files"):
        blocking.import_safetensors(tmp_path, tmp_path / "out")
    (tmp_path / "x.safetensors").write_bytes(tensors({"x": VALUES}, {"DCP_SHARDING_INFO": "{"}))
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors: DCP_SHARDING_INFO"):
        blocking.import_safetensors(tmp_path, tmp_path / "out")


def test_the_dtypes_are_those_of_the_format():
    assert len(CODES) == 19
