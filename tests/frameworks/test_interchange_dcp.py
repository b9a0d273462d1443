"""Checkpoints that torch.distributed.checkpoint wrote, imported exactly."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, quiet, varied_state
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat

from savestream import blocking
from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError

CHILDREN = str(Path(__file__).with_name("interchange_children.py"))


def saved(state: dict[str, Any], directory: Path, *, planner: Any = None, **options: Any) -> Path:
    with warnings.catch_warnings():
        quiet()
        warnings.filterwarnings("ignore", message=".*[Ss]afetensors.*")
        writer = dcp.FileSystemWriter(directory, **options)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return directory


def imported(source: Path, tmp_path: Path, **options: Any) -> Any:
    blocking.import_dcp(source, tmp_path / "out", **options)
    return blocking.load(tmp_path / "out", framework="torch")


class Upside(StreamTransformExtension):
    """An extension that only its author knows."""

    @staticmethod
    def registry_name() -> str:
        return "stream.upside"

    @staticmethod
    def from_descriptor(version: str) -> Upside:
        return Upside()

    def get_descriptor(self) -> str:
        return "stream.upside/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, stream: Any) -> Any:
        return stream


WRITERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several files": {"single_file_per_rank": False},
    "threads": {"thread_count": 3, "sync_files": False},
    "zstd": {"_extensions": [ZStandard()]},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_everything_that_dcp_stores(writer, tmp_path):
    state = varied_state()
    source = saved(state, tmp_path / "dcp", **WRITERS[writer])
    found = imported(source, tmp_path)
    assert list(found) == list(state)
    assert_same_state(found, state)


def test_pytorch_is_not_needed(tmp_path):
    state = varied_state()
    source = saved(state, tmp_path / "dcp")
    command = [sys.executable, "-W", "error", CHILDREN, "import_without_torch", str(source), str(tmp_path / "out")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["frameworks"] == []
    assert report["shapes"] == {key: list(value.shape) for key, value in state["layouts"].items()}
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), state)


def test_a_model_and_its_optimizer(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 20)).square().sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "epoch": 3}
    found = imported(saved(state, tmp_path / "dcp"), tmp_path)
    model.load_state_dict(found["model"])
    assert_same_state(found["model"], dict(state["model"]))
    moments = {str(key): value for key, value in state["optimizer"]["state"].items()}  # DCP makes keys text
    assert_same_state(found["optimizer"]["state"], moments)
    assert_same_state(found["optimizer"]["param_groups"], state["optimizer"]["param_groups"])
    assert_same_state(found["rng"], state["rng"])


def test_without_flattening(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    state = {"model": {"parts": (module,)}, "nested": {"n": [1, (2.5, None)]}, "w": torch.ones(3)}
    source = saved(state, tmp_path / "dcp", planner=DefaultSavePlanner(flatten_state_dict=False))
    found = imported(source, tmp_path)
    assert_same_state(found, state)
    (part,) = found["model"]["parts"]
    assert type(part) is OrderedDict
    assert part._metadata == module._metadata


def test_values_of_every_kind(tmp_path):
    state = {
        "numbers": (1, -(10**30), 2.5, float("inf"), 1 - 2j, True),
        "texts": ("a", "\N{BRAIN}", b"\x00\xff", bytearray(b"x")),
        "sets": (frozenset([1, 2]), {"a"}, frozenset()),
        "numpy": (np.float64(0.1), np.arange(6, dtype=np.int16).reshape(2, 3), np.array(["ab"]), np.bool_(True)),
        "torch": (torch.Size([1, 2]), torch.nn.Parameter(torch.ones(2)), torch.arange(3)[1:]),
        "objects": (torch.device("cuda", 1), torch.device("cpu"), torch.bfloat16),
        "nested": [{"a": (1, [2, {"b": None}])}],
    }
    found = imported(saved(state, tmp_path / "dcp"), tmp_path)
    assert repr(found["numbers"]) == repr(state["numbers"])
    assert repr(found["texts"]) == repr(state["texts"])
    assert found["sets"] == state["sets"]
    assert found["nested"] == state["nested"]
    assert (found["numpy"][0], found["numpy"][3]) == (state["numpy"][0], state["numpy"][3])
    assert type(found["numpy"][0]) is np.float64
    for one, other in zip(found["numpy"][1:3], state["numpy"][1:3], strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
    assert found["torch"][0] == torch.Size([1, 2])
    assert type(found["torch"][0]) is torch.Size
    assert found["objects"] == state["objects"]
    assert_same_state(list(found["torch"][1:]), [torch.ones(2), torch.tensor([1, 2])])


class Custom:
    """What only its own code could rebuild."""


def test_objects_of_other_classes_are_refused_or_skipped(tmp_path):
    state = {"w": torch.ones(2), "custom": Custom(), "buffer": io.BytesIO(b"x"), "partial": {"a": slice(1)}}
    source = saved(state, tmp_path / "dcp")
    with pytest.raises(UnsafeObjectError, match=r"custom: .*test_interchange_dcp\.Custom.*on_unsupported='skip'"):
        blocking.import_dcp(source, tmp_path / "out")
    info = blocking.import_dcp(source, tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("custom", "buffer", "partial.a")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), {"w": torch.ones(2)})


@pytest.mark.parametrize("tensor", ["sparse", "quantised", "meta"])
def test_tensors_without_plain_elements_are_refused(tensor, tmp_path):
    made = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": lambda: torch.empty(3, device="meta"),
    }[tensor]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = (made(),)  # as a tuple DCP pickles it as a whole
    source = saved({"w": torch.ones(2), "odd": value}, tmp_path / "dcp")
    with pytest.raises(UnsafeObjectError, match="odd: "):
        blocking.import_dcp(source, tmp_path / "out")


def test_other_extensions_are_refused_by_name(tmp_path):
    source = saved({"w": torch.ones(2)}, tmp_path / "dcp", _extensions=[Upside()])
    with pytest.raises(UnsafeObjectError, match=r"w: .*stream\.upside/1"):
        blocking.import_dcp(source, tmp_path / "out")


def test_the_safetensors_mode_is_recognised(tmp_path):
    source = saved(
        {"w": torch.ones(20), "v": torch.ones(300)},
        tmp_path / "dcp",
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    with pytest.raises(UnsafeObjectError, match=r"[wv]: .*safetensors mode"):
        blocking.import_dcp(source, tmp_path / "out")


def test_rank_local_checkpoints_are_recognised(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        writer = dcp.FileSystemWriter(tmp_path / "dcp")
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, use_collectives=False)
    finally:
        dist.destroy_process_group()
    with pytest.raises(SavestreamError, match="use_collectives=False"):
        blocking.import_dcp(tmp_path / "dcp", tmp_path / "out")


def test_flipped_bits_are_refused_or_in_the_elements(tmp_path):
    weights = torch.arange(64.0)
    source = saved({"w": weights, "n": 1}, tmp_path / "dcp")
    files = {path: path.read_bytes() for path in source.iterdir()}
    random = np.random.default_rng(0)
    outcomes = set()
    for number in range(50):
        path = list(files)[number % len(files)]
        data = bytearray(files[path])
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        path.write_bytes(data)
        try:
            blocking.import_dcp(source, tmp_path / "out", overwrite=True, verify=False)
        except SavestreamError:
            outcomes.add("refused")
        else:
            outcomes.add("imported")
        path.write_bytes(files[path])
    assert outcomes == {"refused", "imported"}


def test_a_plan_that_lost_a_write_is_noticed(tmp_path):
    source = saved({"w": torch.ones(2), "v": torch.ones(3)}, tmp_path / "dcp", single_file_per_rank=False)
    (source / "__0_1.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"v: .*__0_1\.distcp.*missing"):
        blocking.import_dcp(source, tmp_path / "out")


def test_two_ranks(tmp_path):
    arguments = [sys.executable, CHILDREN, "save_shards"]
    store, directory = str(tmp_path / "store"), str(tmp_path / "dcp")
    children = [
        subprocess.Popen([*arguments, str(rank), store, directory], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    found = imported(tmp_path / "dcp", tmp_path)
    rows = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    expected = {
        "rows": rows,
        "columns": rows.to(torch.bfloat16),
        "replicated": rows[:2],
        "one row": rows[:1],
        "plain": rows[:, 0],
        "step": 5,
    }
    assert_same_state(found, expected)
    entries = blocking.read_manifest(tmp_path / "out").contents.state_dict_metadata
    assert [chunk.offsets for chunk in entries["rows"].chunks] == [(0, 0), (4, 0)]
    assert [chunk.offsets for chunk in entries["columns"].chunks] == [(0, 0), (0, 3)]
