"""Files of the safetensors library: read by savestream, and savestream's read by the library."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import DTYPES, assert_same_state, quiet, with_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savestream import SaveOptions, blocking

NUMPY_DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "<c8"]
ARRAYS = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=5))
)
# A lone surrogate is no text that JSON of UTF-8 can hold.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__")
LACKING = {torch.complex128, torch.complex32}
TENSORS = {
    **{str(dtype): with_bits(dtype, 4, 6) for dtype in DTYPES if dtype not in LACKING},
    "scales": with_bits(torch.float8_e8m0fnu, 5),
    "pairs": with_bits(torch.float4_e2m1fn_x2, 2, 3),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.zeros(0, 7),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=st.dictionaries(NAMES, ARRAYS, max_size=5),
    compression=st.sampled_from(["none", "zstd"]),
    shard_bytes=st.integers(1, 400),
)
def test_there_and_back_again(arrays, compression, shard_bytes, tmp_path):
    options = SaveOptions(compression=compression)
    blocking.save(arrays, tmp_path / "a", options=options, metadata={"k": "v"}, overwrite=True)
    written = blocking.export_safetensors(tmp_path / "a", tmp_path / "x", max_shard_bytes=shard_bytes, overwrite=True)
    found = {}
    for path in written:
        if path.suffix == ".safetensors":
            found |= safetensors.numpy.load_file(path)
    blocking.import_safetensors(tmp_path / "x", tmp_path / "b", overwrite=True, options=options)
    again = blocking.load(tmp_path / "b")
    assert blocking.read_manifest(tmp_path / "b").metadata == {"k": "v"}
    assert found.keys() == arrays.keys() == again.keys()
    for name, array in arrays.items():
        for other in (found[name], again[name]):
            assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_files_of_the_library(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    blocking.import_safetensors(tmp_path / "model.safetensors", tmp_path / "out")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), TENSORS)
    assert blocking.read_manifest(tmp_path / "out").metadata == {"format": "pt"}


def test_files_for_the_library(tmp_path):
    state = {"model": TENSORS, "blocks": [{"w": torch.ones(2, 3).t()}, {"w": torch.zeros(3, dtype=torch.bfloat16)}]}
    blocking.save(state, tmp_path / "in")
    (path,) = blocking.export_safetensors(tmp_path / "in", tmp_path / "out.safetensors", metadata={"format": "pt"})
    expected = {f"model.{name}": tensor for name, tensor in TENSORS.items()}
    expected |= {"blocks.0.w": torch.ones(3, 2), "blocks.1.w": torch.zeros(3, dtype=torch.bfloat16)}
    assert_same_state(safetensors.torch.load_file(path), expected)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(expected)
        assert torch.equal(file.get_slice("blocks.0.w")[1:], torch.ones(2, 2))


def test_a_module_through_the_library(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.LayerNorm(40))
    safetensors.torch.save_model(module, tmp_path / "model.safetensors")
    blocking.import_safetensors(tmp_path / "model.safetensors", tmp_path / "checkpoint")
    (path,) = blocking.export_safetensors(tmp_path / "checkpoint", tmp_path / "out")
    other = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.LayerNorm(40))
    assert safetensors.torch.load_model(other, path) == (set(), [])
    assert_same_state(dict(other.state_dict()), dict(module.state_dict()))


def hugging_face(state: dict[str, torch.Tensor], directory: Path, **options: object) -> Path:
    with warnings.catch_warnings():
        quiet()
        warnings.simplefilter("ignore")
        writer = dcp.HuggingFaceStorageWriter(str(directory), **options)
        dcp.save(state, storage_writer=writer, no_dist=True)
    return directory


@pytest.mark.parametrize("mode", ["whole", "distributed", "consolidated", "two files"])
def test_what_dcp_writes_for_hugging_face(mode, tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    options = {
        "whole": {},
        "distributed": {"save_distributed": True},
        "consolidated": {"save_distributed": True, "enable_consolidation": True},
        "two files": {"fqn_to_index_mapping": {"w": 1, "b": 2}},
    }[mode]
    source = hugging_face(state, tmp_path / "hf", **options)
    blocking.import_safetensors(source, tmp_path / "out")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), state)


def test_numpy_reads_sharded_exports_by_their_index(tmp_path):
    arrays = {f"layer.{number}": np.full((3, number + 1), number, np.float32) for number in range(9)}
    blocking.save(arrays, tmp_path / "in")
    written = blocking.export_safetensors(tmp_path / "in", tmp_path / "out", max_shard_bytes=100)
    weight_map = json.loads(written[-1].read_text())["weight_map"]
    assert len(set(weight_map.values())) == len(written) - 1 > 1
    for name, array in arrays.items():
        with safetensors.safe_open(tmp_path / "out" / weight_map[name], "np") as file:
            np.testing.assert_array_equal(file.get_tensor(name), array)
