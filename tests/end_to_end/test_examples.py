"""Every example and every Python block of the README runs, and the README shows what the examples run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "examples"
# Scripts that need arguments to be quick, or other files to work on; test_demo.py runs demo.py.
ARGUMENTS = {
    "async_save.py": [],
    "custom_planner.py": [],
    "plain_loop.py": [],
    "tiny_trainer.py": ["--root", "checkpoints", "--steps", "3", "--save-every", "2", "--hidden-units", "32"],
}
LIBRARIES = {"tiny_network.py", "demo_display.py"}
TESTED_ELSEWHERE = {
    "convert_checkpoints.py",
    "dcp_storage.py",
    "demo.py",
    "read_without_savestream.py",
    "torch_training.py",
}

# Blocks that need a framework run in tests/frameworks.
README_BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```$", (PROJECT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    if not re.search(r"^import (torch|jax)", block, re.M)
]


def run(directory: Path, *command: str) -> str:
    """Run a script as users do, in a process and a directory of its own; warnings are errors here too."""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    run(tmp_path, str(EXAMPLES / name), *ARGUMENTS[name])
    assert list(tmp_path.glob("checkpoints/step-*/manifest.json"))


def test_the_trainer_resumes(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "tiny_trainer.py"), "--root", "checkpoints", "--save-every", "2", "--hidden-units", "32"]
    run(tmp_path, *command, "--steps", "4")
    assert '"resumed_from": null' not in run(tmp_path, *command, "--steps", "6")
    assert sorted(path.parent.name for path in tmp_path.glob("checkpoints/*/manifest.json")) == [
        f"step-{step:012d}" for step in (2, 4, 6)
    ]


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} <= set(ARGUMENTS) | LIBRARIES | TESTED_ELSEWHERE


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_readme_block_runs(number: int, tmp_path: Path) -> None:
    run(tmp_path, "-c", README_BLOCKS[number])


def test_the_readme_shows_the_examples() -> None:
    assert len(README_BLOCKS) >= 3
    for name in ("async_save.py", "plain_loop.py"):
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        docstring = ast.parse(source).body[0]
        code = "\n".join(source.splitlines()[docstring.end_lineno or 0 :]).strip()
        assert code in [block.strip() for block in README_BLOCKS], f"the README no longer shows examples/{name}"
