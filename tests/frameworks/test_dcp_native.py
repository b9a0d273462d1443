"""torch.distributed.checkpoint loads what savestream itself saved."""

from __future__ import annotations

import datetime
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, load, zeroed
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import savestream.blocking
from savestream import LoadOptions, SaveOptions, ShardedArray
from savestream.errors import UnsafeObjectError
from savestream.integrations.torch import StorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def test_a_training_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 3, "name": "run"}
    savestream.blocking.save(state, tmp_path / "checkpoint")
    target = zeroed(state)
    load(target, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, state)
    optimizer.load_state_dict(target["optimizer"])


def test_names_are_those_that_torch_gives(tmp_path: Path) -> None:
    x = np.arange(3.0)
    state = {
        "a": {"b": x, 0: x + 1, True: x + 2, None: x + 3, "c.d": x + 4},
        "list": [x, 1, {"y": x}],
        "values": {"deep": {"list": [1, {"k": 2}, [3, {"m": 4}]], "plain": [1, [2]], "tuple": ({"z": 1},), "none": {}}},
        "tuple": (x, 5),
        "ordered": OrderedDict(k=1, j=2),
        "empty": [],
    }
    savestream.blocking.save(state, tmp_path / "checkpoint")
    metadata = StorageReader(tmp_path / "checkpoint").read_metadata()
    assert metadata.planner_data == {
        "a.b": ("a", "b"),
        "a.0": ("a", "0"),
        "a.True": ("a", "True"),
        "a.None": ("a", "None"),
        "a.c.d": ("a", "c.d"),
        "list.0": ("list", 0),
        "list.1": ("list", 1),
        "list.2.y": ("list", 2, "y"),
        "values.deep.list.0": ("values", "deep", "list", 0),
        "values.deep.list.1.k": ("values", "deep", "list", 1, "k"),
        "values.deep.list.2.0": ("values", "deep", "list", 2, 0),
        "values.deep.list.2.1.m": ("values", "deep", "list", 2, 1, "m"),
        "values.deep.plain": ("values", "deep", "plain"),
        "values.deep.tuple": ("values", "deep", "tuple"),
        "tuple.0": ("tuple", 0),
        "tuple.1": ("tuple", 1),
        "ordered.k": ("ordered", "k"),
        "ordered.j": ("ordered", "j"),
        "empty": ("empty",),
    }
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "checkpoint"))
    assert found["values"]["deep"]["tuple"] == ({"z": 1},)
    assert found["a"]["c.d"].tolist() == [4, 5, 6]
    same = torch.distributed.checkpoint._nested_dict.flatten_state_dict(
        {key: value for key, value in state.items() if key not in ("a", "tuple", "list")}
    )[1]
    assert same.items() <= metadata.planner_data.items()


def test_names_that_clash_keep_savestreams_own(tmp_path: Path) -> None:
    x = torch.arange(3.0)
    state = {"a": {"b": x}, "a.b": x + 1, "n": {1: x + 2, "1": x + 3}, "v": {"w.x": 1, "w": {"x": 2}}, "fine": x + 4}
    savestream.blocking.save(state, tmp_path / "checkpoint")
    metadata = StorageReader(tmp_path / "checkpoint").read_metadata()
    assert list(metadata.state_dict_metadata) == ["a\\.b", "n[int:1]", "v.w\\.x", "v.w.x", "fine"] or set(
        metadata.state_dict_metadata
    ) == {"a.b", "a\\.b", "n[int:1]", "n.1", "v.w\\.x", "v.w.x", "fine"}
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "checkpoint"))
    assert found["a\\.b"].tolist() == [1, 2, 3]
    assert found["n[int:1]"].tolist() == [2, 3, 4]
    assert found["v.w\\.x"] == 1
    assert found["v.w.x"] == 2


def test_dtypes_that_torch_lacks_come_as_numpy_arrays(tmp_path: Path) -> None:
    records = np.array([(1, 2.5), (3, 4.5)], [("n", "i4"), ("x", "f8")])
    state = {
        "dates": np.array(["2024-01-01", "NaT"], "M8[D]"),
        "records": records,
        "big endian": np.arange(4, dtype=">u4"),
        "strings": np.array(["a", "bc"]),
        "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "whole": np.float32(1.5),
    }
    savestream.blocking.save(state, tmp_path / "checkpoint")
    metadata = StorageReader(tmp_path / "checkpoint").read_metadata()
    kinds = {key: type(entry) for key, entry in metadata.state_dict_metadata.items()}
    assert {key for key, kind in kinds.items() if kind is not BytesStorageMetadata} == {"bf16"}
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "checkpoint"))
    for key in ("dates", "records", "big endian", "strings"):
        assert found[key].dtype.newbyteorder("=") == state[key].dtype.newbyteorder("=")  # pickle makes it native
        assert np.array_equal(found[key], state[key], equal_nan=key == "dates")
    assert torch.equal(found["bf16"], torch.arange(5).bfloat16())
    assert (found["whole"], type(found["whole"])) == (np.float32(1.5), np.float32)


def test_large_values_and_bytes(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "table": {"rows": list(range(400_000)), "name": "t"},  # more JSON than stands in a manifest
        "blob": bytes(range(256)) * 1024,
        "small": b"abc",
        "when": datetime.datetime(2024, 5, 6, 7, 8, 9),
    }
    savestream.blocking.save({**state, "x": np.ones(2)}, tmp_path / "checkpoint")
    target = {**zeroed(state), "x": torch.zeros(2)}
    load(target, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, {**state, "x": torch.ones(2, dtype=torch.float64).float()})


class Custom:
    """Only pickle can store it."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Custom

    __hash__ = None  # type: ignore[assignment]


def test_pickles_need_the_opt_in_and_spare_the_rest(tmp_path: Path) -> None:
    state = {"x": np.ones(2, np.float32), "odd": Custom(), "step": 4}
    savestream.blocking.save(state, tmp_path / "checkpoint", options=SaveOptions(allow_pickle=True))
    target = load({"x": torch.zeros(2), "step": 0}, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, {"x": torch.ones(2), "step": 4})
    with pytest.raises(dcp.CheckpointException, match="odd: stored with pickle") as caught:
        load({"odd": None}, StorageReader(tmp_path / "checkpoint"))
    assert isinstance(caught.value.failures[0][0], UnsafeObjectError)
    trusting = StorageReader(tmp_path / "checkpoint", options=LoadOptions(allow_pickle=True))
    assert load({"odd": None}, trusting)["odd"] == Custom()


def test_sharded_arrays_are_resharded(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(10, 6)
    shards = [((0, 0), whole[:4, :3]), ((0, 3), whole[:4, 3:]), ((4, 0), whole[4:])]
    array = ShardedArray((10, 6), shards)
    savestream.blocking.save({"w": array}, tmp_path / "checkpoint")
    metadata = StorageReader(tmp_path / "checkpoint").read_metadata()
    assert len(metadata.state_dict_metadata["w"].chunks) == 3
    assert_same_state(load({"w": torch.zeros(10, 6)}, StorageReader(tmp_path / "checkpoint")), {"w": whole})


def test_what_savestream_saves_again_is_still_torchs(tmp_path: Path) -> None:
    """A checkpoint of torch's, loaded and saved by savestream with its metadata, is read by torch as before."""
    from dcp_support import save

    from savestream.integrations.torch import StorageWriter

    state = {"x": torch.ones(3), "step": 5, "deep": {"list": [1, 2]}}
    save(state, StorageWriter(tmp_path / "first"))
    copied = savestream.blocking.load(tmp_path / "first")
    manifest = savestream.blocking.read_manifest(tmp_path / "first")
    savestream.blocking.save(copied, tmp_path / "second", metadata=manifest.metadata)
    assert_same_state(load(zeroed(state), StorageReader(tmp_path / "second")), state)
    assert torch.load(io.BytesIO(copied["step"]), weights_only=True) == 5


def test_damage_names_the_key(tmp_path: Path) -> None:
    savestream.blocking.save({"x": np.ones(1000, np.float32)}, tmp_path / "c", options=SaveOptions(compression="none"))
    (data,) = (tmp_path / "c").rglob("*.bin")
    content = bytearray(data.read_bytes())
    content[10] ^= 1
    data.write_bytes(content)
    with pytest.raises(dcp.CheckpointException, match="keys affected: 'x'"):
        load({"x": torch.zeros(1000)}, StorageReader(tmp_path / "c"))
    checkless = StorageReader(tmp_path / "c", options=LoadOptions(verify_digests=False))
    assert load({"x": torch.zeros(1000)}, checkless)["x"].sum() != 1000
