"""The example that trains a PyTorch model resumes exactly."""

from __future__ import annotations

import shutil
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


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = run(tmp_path, "--root", "whole", "--steps", "11", "--save-every", "4")
    assert steps_beneath(tmp_path / "whole") == [4, 8, 11]
    shutil.copytree(tmp_path / "whole" / "step-000000000004", tmp_path / "parts" / "step-000000000004")
    resumed = run(tmp_path, "--root", "parts", "--steps", "11", "--save-every", "7")
    assert resumed[0] == "resumed at step 4"
    assert resumed[-1] == whole[-1]
    assert resumed[-1].startswith("weights ")
    assert steps_beneath(tmp_path / "parts") == [4, 7, 11]


def steps_beneath(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("*/manifest.json"))
