"""The benchmark that needs PyTorch runs; what it measures at this size means nothing."""

from __future__ import annotations

import json
import subprocess
import sys


def test_tensors(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "tensors", "--quick", "--rounds", "1"]
    report = tmp_path / "report.json"
    outcome = subprocess.run(
        [*command, "--root", str(tmp_path), "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    samples = json.loads(report.read_text())["samples"]
    for name in ("numpy: save", "torch: save", "torch: load into target", "torch: start_save stall, warm pool"):
        assert samples[name]
    assert samples["DCP: replan of an unchanged state"]
    assert "torch over numpy" in outcome.stdout
