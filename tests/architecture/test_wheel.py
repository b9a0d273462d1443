"""The wheel holds the package and nothing else, and works with nothing but its declared dependencies."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from sources import PACKAGE, PROJECT

pytestmark = pytest.mark.slow

ROUND_TRIP = """
import sys
import numpy as np
from savestream import blocking

state = {"weights": np.arange(100_000, dtype=np.float32), "step": 3, "names": ("a", "b")}
blocking.save(state, sys.argv[1])
restored = blocking.load(sys.argv[1])
assert restored["weights"].tobytes() == state["weights"].tobytes()
assert restored["step"] == 3 and restored["names"] == ("a", "b")
assert not {"torch", "jax", "rich", "typer", "obstore"} & {name.partition(".")[0] for name in sys.modules}
"""


def run(*command: str | Path, cwd: Path) -> str:
    outcome = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, PROJECT, cwd=directory)
    (built,) = directory.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {path.relative_to(PROJECT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert "savestream/py.typed" in names
    others = {name for name in names if not name.startswith("savestream/")}
    assert all(name.split("/")[0].endswith(".dist-info") for name in others)
    assert any(name.endswith("licenses/LICENSE") for name in others)


def test_the_core_works_with_its_declared_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    run(python, "-W", "error", "-c", ROUND_TRIP, tmp_path / "checkpoint", cwd=tmp_path)
