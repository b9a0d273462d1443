"""What no file of the project may say: places that exist on one machine only, and work put off."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sources import PROJECT

# Each is written in two halves, so that this file does not contain it.
FORBIDDEN = [
    re.compile("/" + r"(work|farm|root)/"),
    re.compile(r"/\." + "library"),
    re.compile(r"pypi\." + "org"),
    re.compile("python" + "hosted"),
    re.compile(r"deb\." + "debian"),
    re.compile("npm" + "js"),
    re.compile(r"\bTO" + r"DO\b"),
    re.compile(r"\bFIX" + r"ME\b"),
]
GENERATED = {"build", "dist", "__pycache__", "demo-checkpoints"}


def project_files() -> Iterator[Path]:
    """What git tracks; without git, everything that no tool has generated."""
    if (PROJECT / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True)
        candidates = [PROJECT / name for name in listing.stdout.split("\0") if name]
    else:
        candidates = [path for path in PROJECT.rglob("*") if not _is_generated(path.relative_to(PROJECT))]
    yield from (path for path in candidates if path.is_file())


def _is_generated(path: Path) -> bool:
    directories = path.parts[:-1]
    return any(part in GENERATED or part.startswith(".") or part.endswith(".egg-info") for part in directories)


def test_no_file_says_a_forbidden_word() -> None:
    found, seen = [], 0
    for path in project_files():
        seen += 1
        lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
        bad = [(number, line) for number, line in enumerate(lines, 1) if any(word.search(line) for word in FORBIDDEN)]
        found += [f"{path.relative_to(PROJECT)}:{number}: {line.strip()}" for number, line in bad]
    assert seen >= 20
    assert found == []


def test_the_words_are_recognised() -> None:
    samples = ["cd /" + "work/main", "/" + "root/x", "#" + " TO" + "DO: later", "FIX" + "ME"]
    assert all(any(word.search(sample) for word in FORBIDDEN) for sample in samples)
