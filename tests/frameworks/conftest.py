"""Tests with PyTorch and JAX: run by 'make test-all', where both are installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("leaf_containers", "leaf_layouts", "leaf_targets")

HERE = Path(__file__).parent
# 'make test' installs neither and deselects these tests by their marker; they could not even be imported there.
collect_ignore_glob = [] if all(map(importlib.util.find_spec, ("torch", "jax"))) else ["*/test_*.py", "test_*.py"]

# Eight devices on the processor, for arrays that lie in several places. JAX reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("frameworks")
