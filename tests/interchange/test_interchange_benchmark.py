"""The benchmark of conversions runs, with and without DCP beside it; what it measures at this size means nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
OWN = {"export_safetensors", "import_safetensors, unverified", "import_safetensors, verified"}
WITH_DCP = {"DCP: load into target", "import_dcp, unverified", "import_dcp, verified"}
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.parametrize("with_torch", [pytest.param(True, marks=pytest.mark.slow)] * HAS_TORCH + [False])
def test_interchange(with_torch, tmp_path):
    environment = dict(os.environ)
    if HAS_TORCH and not with_torch:  # a module of that name that cannot be imported
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden" / "torch.py").write_text("raise ImportError('hidden by the test')\n")
        environment["PYTHONPATH"] = str(tmp_path / "hidden")
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "interchange", "--quick", "--rounds", "1"]
    outcome = subprocess.run(
        [*command, "--root", str(tmp_path / "data"), "--json", str(result)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    report = json.loads(result.read_text(encoding="utf-8"))
    assert set(report["samples"]) == (OWN | WITH_DCP if with_torch else OWN)
    assert all(values[0] > 0 for values in report["samples"].values())
    assert set(report["absent"]) == (set() if with_torch else {"DCP"})
    assert ("DCP is not measured: " in outcome.stdout) != with_torch
    goals = [goal["text"] for goal in report["goals"]]
    assert any("import_safetensors, verified: peak" in text for text in goals)
    assert any("import_dcp, verified: times as fast as DCP" in text for text in goals) == with_torch
    assert list((tmp_path / "data").iterdir()) == []  # it cleans up
