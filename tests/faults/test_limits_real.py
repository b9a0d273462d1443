"""Limits of the operating system, not simulated: file size, space, descriptors, permissions, umask."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from fault_support import assert_same

from savestream import blocking

CHILDREN = str(pathlib.Path(__file__).with_name("limits_children.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these limits are set the Linux way")


def run_child(name, place):
    """Lines that the child printed; it must have ended well, without any warning of Python's."""
    command = [sys.executable, "-W", "error", CHILDREN, name, str(place)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.splitlines()


@contextlib.contextmanager
def mounted(place, *options):
    """Something mounted at ``place``; skips where this user may not mount."""
    result = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"mounting is not possible here: {result.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_limit_of_a_files_size(tmp_path):
    *errors, left = run_child("file_size", tmp_path)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("StorageError EFBIG failed")
        assert f"{tmp_path}/new/" in error
        assert "ulimit -f" in error
    assert left == "nothing"


def test_a_full_disk(tmp_path):
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        errors = run_child("full_disk", tmp_path)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("StorageError ENOSPC failed")
        assert str(tmp_path) in error
        assert "free space" in error


def test_five_thousand_leaves_with_few_descriptors(tmp_path):
    assert run_child("few_descriptors", tmp_path) == ["loaded 5000"]


def test_no_descriptor_left(tmp_path):
    *errors, last = run_child("no_descriptors", tmp_path)
    assert last == "works again"
    assert len(errors) >= 3
    for error in errors:
        assert error.startswith("StorageError EMFILE failed")
        assert str(tmp_path) in error
        assert "ulimit -n" in error


def check_refusals(lines, place, number):
    loaded, *errors = lines
    assert loaded == "loaded"
    assert len(errors) == 5, errors
    for error in errors:
        assert error.startswith(f"StorageError {number} failed")
        assert str(place) in error
    assert "choose another place" in errors[0]


def test_a_directory_without_write_permission(tmp_path):
    """Loading writes nothing anywhere; saving is refused at the first step, naming the place."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    place = tmp_path / "tree"
    blocking.save({"a": np.arange(5)}, place / "old")
    opened = [tmp_path, *tmp_path.parents[:-1]]
    modes = {path: path.stat().st_mode for path in opened}
    try:
        for path in opened:
            os.chmod(path, path.stat().st_mode & 0o7777 | 0o055)  # noqa: S103 - the child's user must get there
        check_refusals(run_child("nobody", place), place, "EACCES")
    finally:
        for path, mode in modes.items():
            os.chmod(path, mode & 0o7777)
    assert [path.name for path in place.iterdir()] == ["old"]


def test_a_tree_mounted_read_only(tmp_path):
    real, seen = tmp_path / "real", tmp_path / "seen"
    blocking.save({"a": np.arange(5)}, real / "old")
    seen.mkdir()
    with mounted(seen, "--bind", str(real)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(seen)], check=True)
        check_refusals(run_child("without_write_access", seen), seen, "EROFS")
    assert_same(blocking.load(real / "old")["a"].tolist(), [0, 1, 2, 3, 4])


def test_modes_follow_the_umask(tmp_path):
    lines = run_child("umask", tmp_path)
    assert set(lines) == {"directory 0o750", "file 0o640"}
    assert lines.count("file 0o640") == 3
    assert lines.count("directory 0o750") == 3
