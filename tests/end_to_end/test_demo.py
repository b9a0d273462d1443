"""The demo does what it claims, killed trainer and all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *arguments], capture_output=True, text=True, timeout=180, check=False
    )


def test_quick_demo_passes_and_leaves_the_evidence(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    outcome = run_demo("--quick", "--root", str(root))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stderr == ""
    assert outcome.stdout.rstrip().splitlines()[-1].startswith("PASSED")
    # Plain lines where there is no terminal: nothing that overwrites or colours.
    assert "\r" not in outcome.stdout
    assert "\x1b" not in outcome.stdout

    killed = [line for line in outcome.stdout.splitlines() if "killed in mid-save" in line]
    step = int(killed[0].split()[1].rstrip(":"))
    directory = root / "interrupted" / f"step-{step:012d}"
    # The killed attempt's data still lies beside that of the attempt that committed after the resume.
    assert (directory / "manifest.json").is_file()
    assert len([path for path in directory.iterdir() if path.is_dir()]) == 2


def test_demo_refuses_a_directory_in_use(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    outcome = run_demo("--quick", "--root", str(tmp_path))
    assert outcome.returncode == 2
    assert "not empty" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
