"""The example that converts: every kind of source, in a process of its own as users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from dcp_builder import DcpBuilder, archive_of
from import_support import assert_equal
from pickle_support import applied, number
from safetensors_support import read, tensors

from savestream import blocking

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "convert_checkpoints.py"
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(*arguments: object, fails: bool = False) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLE), *map(str, arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == int(fails), outcome.stdout + outcome.stderr
    return outcome.stderr if fails else outcome.stdout


def test_a_dcp_directory_there_and_out_again(tmp_path):
    builder = DcpBuilder()
    builder.tensor("model.w", VALUES, ("model", "w"))
    builder.object("step", archive_of(number(3)))
    builder.object("odd", archive_of(applied("some.where.Class")))
    source = builder.write(tmp_path / "dcp")
    assert "odd" in run(source, tmp_path / "out", fails=True)
    assert "left out: odd" in run("--skip", source, tmp_path / "out")
    assert_equal(blocking.load(tmp_path / "out"), {"model": {"w": VALUES}, "step": 3})
    path = Path(run("--export", tmp_path / "out", tmp_path / "files").strip())
    assert_equal(read(path), {"model.w": VALUES})
    for kind in (path, path.parent):
        run(kind, tmp_path / kind.name)
        assert_equal(blocking.load(tmp_path / kind.name), {"model.w": VALUES})


def test_errors_are_one_line(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(tensors({"w": VALUES})[:-1])
    message = run(tmp_path / "bad.safetensors", tmp_path / "out", fails=True)
    assert message.count("\n") == 1
    assert "truncated" in message
