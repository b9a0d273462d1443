"""Files that torch.save wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict

import pytest
import torch
from dcp_support import assert_same_state, varied_state

from savestream import blocking
from savestream.arrays.file_sources import FilePool
from savestream.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError, UnsafeObjectError
from savestream.interchange.torch_archives import ArchiveReader


def imported(state, tmp_path, **options):
    torch.save(state, tmp_path / "file.pt", **options)
    info = blocking.import_torch(tmp_path / "file.pt", tmp_path / "out", overwrite=True)
    return blocking.load(tmp_path / "out", framework="torch"), info


@pytest.mark.parametrize("legacy", [False, True])
def test_everything_that_a_state_holds(legacy, tmp_path):
    state = varied_state()
    if legacy:  # that format never learnt of the newer dtypes
        newer = ("uint16", "uint32", "uint64", "float8", "complex32")
        state["dtypes"] = {name: value for name, value in state["dtypes"].items() if not any(n in name for n in newer)}
    found, _ = imported(state, tmp_path, _use_new_zipfile_serialization=not legacy)
    assert_same_state(found, state)


def test_tied_weights_are_stored_once_and_views_as_what_they_show(tmp_path):
    base = torch.arange(100_000.0).reshape(100, 1000)
    embedding = torch.nn.Embedding.from_pretrained(torch.randn(500, 300))
    head = torch.nn.Linear(300, 500, bias=False)
    head.weight = embedding.weight
    state = {
        "in": embedding.state_dict(),
        "out": head.state_dict(),
        "row": base[3],
        "column": base[:, 5],
        "t": base.t(),
    }
    found, info = imported(state, tmp_path)
    assert_same_state(found["in"]["weight"], found["out"]["weight"])
    assert_same_state(
        {key: found[key] for key in ("row", "column", "t")}, {"row": base[3], "column": base[:, 5], "t": base.t()}
    )
    # Twice the embedding would be 1.2 MB; the transposed array and the views are stored as they are.
    assert info.statistics.raw_bytes == 500 * 300 * 4 + 1000 * 4 + 100 * 4 + 100_000 * 4


def test_a_training_state(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(torch.randn(2, 3, 9, 9)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    found, _ = imported(state, tmp_path)
    assert type(found["model"]) is OrderedDict
    assert_same_state(found["optimizer"], state["optimizer"])
    assert_same_state(found["rng"], state["rng"])
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert_same_state(dict(model.state_dict()), dict(state["model"]))


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_is_run(legacy, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"a": Evil(marker)}, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UnsafeObjectError, match="weights_only=True" if legacy else r"a: it needs \w+\.system"):
        blocking.import_torch(tmp_path / "file.pt", tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert marker.exists(), "the file of this test does nothing, so it proves nothing"


def test_files_that_are_none_are_refused(tmp_path):
    torch.save({"w": torch.arange(100.0)}, tmp_path / "good.pt")
    data = (tmp_path / "good.pt").read_bytes()
    path = tmp_path / "file.pt"
    for content in (b"", b"x", b"hello world" * 100, data[:-1], data[: len(data) // 2], data[:100]):
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((CorruptCheckpointError, UnsafeObjectError), match=r"file\.pt"):
                blocking.import_torch(path, tmp_path / "out")
    with pytest.raises(CheckpointNotFoundError):
        blocking.import_torch(tmp_path / "nothing.pt", tmp_path / "out")
    with pytest.raises(PlanError, match="import_dcp"):
        blocking.import_torch(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_savestream_cannot_store_are_refused_by_key(tmp_path):
    sparse = torch.eye(3).to_sparse()
    state = {"w": torch.ones(2), "sparse": sparse, "list": [1, sparse, (sparse, torch.ones(1))]}
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(UnsafeObjectError, match="sparse"):
        blocking.import_torch(tmp_path / "file.pt", tmp_path / "out")
    info = blocking.import_torch(tmp_path / "file.pt", tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("sparse", "list[1]", "list[2][0]")
    expected = {"w": torch.ones(2), "list": [1, None, (None, torch.ones(1))]}
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), expected)


def run_without_pytorch(tmp_path):
    program = "import sys; from savestream import blocking; blocking.import_torch(sys.argv[1], sys.argv[2]); "
    program += "print(blocking.load(sys.argv[2])['w'].sum(), 'torch' in sys.modules)"
    command = [sys.executable, "-c", program, str(tmp_path / "file.pt"), str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_archives_need_no_pytorch(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt")
    assert run_without_pytorch(tmp_path).stdout == "2.0 False\n"


def test_without_pytorch_the_old_format_says_what_it_needs(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt", _use_new_zipfile_serialization=False)
    error = run_without_pytorch(tmp_path).stderr
    assert "UsageError" in error
    assert "import torch before import_torch" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_archives_are_read_alike_without_pytorch(protocol, tmp_path):
    state = varied_state()
    path = tmp_path / "file.pt"
    torch.save(state, path, pickle_protocol=protocol)
    with FilePool() as pool:
        value = ArchiveReader(pool.file(str(path)), 0, path.stat().st_size, "state").value()
        blocking.save(value, tmp_path / "out")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), state)


def test_big_endian_archives_are_read_as_pytorch_does(tmp_path):
    names = ("int64", "float16", "bfloat16", "complex64", "uint8")
    torch.save({name: torch.arange(10).to(getattr(torch, name)) for name in names}, tmp_path / "little.pt")
    swapped = tmp_path / "big.pt"
    with zipfile.ZipFile(tmp_path / "little.pt") as source, zipfile.ZipFile(swapped, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("/byteorder") else source.read(name))
    expected = torch.load(swapped, weights_only=True)
    assert not torch.equal(expected["int64"], torch.arange(10)), "PyTorch swaps the bytes of such a file"
    with FilePool() as pool:
        value = ArchiveReader(pool.file(str(swapped)), 0, swapped.stat().st_size, "state").value()
        blocking.save(value, tmp_path / "out")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), expected)
