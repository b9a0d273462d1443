"""What the tests of imports share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from savestream import blocking


def imported(function: Any, source: os.PathLike[str], tmp_path: Path, **options: Any) -> Any:
    """Import, load what came of it, and leave nothing behind."""
    place = tmp_path / "imported"
    function(source, place, **options)
    try:
        return blocking.load(place)
    finally:
        blocking.delete(place)


def assert_equal(found: Any, expected: Any, path: str = "state") -> None:
    """Equal containers, keys, classes, dtypes, shapes and bits."""
    assert type(found) is type(expected), path
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{path}[{position}]")
    else:
        assert repr(found) == repr(expected), path


def open_descriptors(directory: os.PathLike[str]) -> list[str]:
    """Files beneath a directory that this process holds open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found
