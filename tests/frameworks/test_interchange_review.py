"""Files of torch.save that other programs wrote again, or that change while they are read."""

from __future__ import annotations

import collections
import os
import warnings
import zipfile

import pytest
import torch
from dcp_support import assert_same_state

from savestream import SaveOptions, blocking
from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.events import SavePlanned


def recompressed(source, target):
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as after:
        for member in before.infolist():
            after.writestr(member.filename, before.read(member.filename))


def test_compressed_archives_are_refused_by_member(tmp_path):
    state = {"w": torch.arange(100_000.0), "noise": torch.randint(0, 256, (900_000,), dtype=torch.uint8)}
    torch.save(state, tmp_path / "stored.pt")
    recompressed(tmp_path / "stored.pt", tmp_path / "file.pt")
    # PyTorch maps the compressed bytes as if they were the elements.
    assert_same_state(torch.load(tmp_path / "file.pt", weights_only=True), state)
    with pytest.raises(UnsafeObjectError, match=r"file\.pt: '.*data\.pkl' is compressed \(method 8\)"):
        blocking.import_torch(tmp_path / "file.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path):
    state = {f"w{number}": torch.rand(1_000_000) for number in range(8)}
    torch.save(state, tmp_path / "file.pt")

    def truncate(event):
        if isinstance(event, SavePlanned):
            os.truncate(tmp_path / "file.pt", 1000)

    options = SaveOptions(memory_budget_bytes=8 * 1024 * 1024)
    with pytest.raises(CorruptCheckpointError, match=r"file\.pt: truncated"):
        blocking.import_torch(tmp_path / "file.pt", tmp_path / "out", options=options, observer=truncate)
    assert not (tmp_path / "out").exists()


class Marked(torch.Tensor):
    """A subclass, which may mean anything."""


def test_attributes_of_tensors_are_left_and_subclasses_refused_by_key(tmp_path):
    plain, parameter = torch.arange(3.0), torch.nn.Parameter(torch.arange(4.0))
    plain.note = parameter.note = "mine"
    torch.save({"plain": plain, "parameter": parameter}, tmp_path / "file.pt")
    blocking.import_torch(tmp_path / "file.pt", tmp_path / "out")
    expected = {"plain": torch.arange(3.0), "parameter": torch.arange(4.0)}
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), expected)
    torch.save({"plain": plain, "marked": torch.ones(2).as_subclass(Marked)}, tmp_path / "file.pt")
    with pytest.raises(UnsafeObjectError, match=r"marked: it needs .*Marked"):
        blocking.import_torch(tmp_path / "file.pt", tmp_path / "out", overwrite=True)


def test_quantised_tensors_and_unknown_containers_are_left_out_by_key(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
        quantised = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    state = {
        "w": torch.ones(2),
        "quantised": quantised,
        "defaults": collections.defaultdict(list, {"a": [1]}),
        "storage": torch.ones(3).untyped_storage(),
        "meta": torch.ones(2, device="meta"),
    }
    torch.save(state, tmp_path / "file.pt")
    info = blocking.import_torch(tmp_path / "file.pt", tmp_path / "out", on_unsupported="skip")
    assert info.skipped == ("quantised", "defaults", "storage", "meta")
    assert_same_state(blocking.load(tmp_path / "out", framework="torch"), {"w": torch.ones(2)})
