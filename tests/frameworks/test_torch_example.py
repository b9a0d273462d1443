"""The example that trains a PyTorch model resumes exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_training.py"


def run(directory: Path, *arguments: str) -> list[str]:
    """Run the example as users do, in a process and a directory of its own; warnings are errors here too."""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout.splitlines()


def test_two_runs_end_where_one_does(tmp_path: Path) -> None:
    whole = run(tmp_path, "--root", "whole", "--steps", "12", "--save-every", "4")
    first = run(tmp_path, "--root", "parts", "--steps", "7", "--save-every", "4")
    second = run(tmp_path, "--root", "parts", "--steps", "12", "--save-every", "4")
    assert second[0] == "resumed at step 7"
    assert second[-1] == whole[-1] != first[-1]
    assert second[-1].startswith("weights ")
    assert sorted(path.parent.name for path in tmp_path.glob("parts/*/manifest.json")) == [
        f"step-{step:012d}" for step in (4, 7, 8, 12)
    ]
