"""The README's blocks that use PyTorch or JAX run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    if re.search(r"^import (torch|jax)", block, re.M)
]


def test_there_are_such_blocks() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block_runs(number: int, tmp_path: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[number]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stderr == ""
