"""Large plain values lie with the arrays: the manifest, which every load reads whole, stays small."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from roundtrip_support import assert_same, load_example

from savestream import PlanCache, SaveOptions, blocking
from savestream.planners import save_plans
from savestream.storage_backends import MemoryBackend

reader = load_example("read_without_savestream")

BYTES_LIMIT, JSON_LIMIT = 64 * 1024, 1024 * 1024


def noise(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def test_the_limits_are_those_of_this_test() -> None:
    assert (save_plans._INLINE_BYTES, save_plans._INLINE_JSON_BYTES) == (BYTES_LIMIT, JSON_LIMIT)


VALUES = {
    "bytes at the limit": (noise(BYTES_LIMIT), False),
    "bytes beyond it": (noise(BYTES_LIMIT + 1), True),
    "text at the limit": ("x" * (JSON_LIMIT - 2), False),
    "text beyond it": ("x" * (JSON_LIMIT - 1), True),
    "text of two bytes a letter": ("é" * (JSON_LIMIT // 2), True),
    "a list": ([f"{number:0200}" for number in range(5_400)], True),
    "a dict": ({f"key{number:0200}": [number, None, -0.0] for number in range(5_400)}, True),
    "tuple keys": ({(number, "a" * 1000): {number} for number in range(1_100)}, True),
}


@pytest.mark.parametrize("name", VALUES)
def test_large_values_come_back_with_and_without_a_target(name: str, tmp_path: pathlib.Path) -> None:
    value, is_stored = VALUES[name]
    state = {"before": np.arange(3), "nested": [{"value": value, "w": np.ones(2)}, 1], "after": "small"}
    blocking.save(state, tmp_path, options=SaveOptions(compression="zstd"))
    stored = sum(part.stat().st_size for part in tmp_path.rglob("*.bin"))
    root = (tmp_path / "manifest.json").stat().st_size
    assert (root < 10_000) == is_stored
    assert stored > 0
    assert_same(blocking.load(tmp_path), state)
    own = value if isinstance(value, dict) else type(value)()
    target = {"before": np.zeros(3, int), "nested": [{"value": own, "w": np.zeros(2)}, 0], "after": ""}
    assert_same(blocking.load(tmp_path, target), state)
    assert_same(blocking.load(tmp_path, keys="after"), {"after": "small"})
    assert_same(reader.read_checkpoint(tmp_path), state)
    blocking.verify(tmp_path)


def test_only_a_length_that_crosses_the_limit_or_changes_beyond_it_changes_the_plan() -> None:
    cache, backend = PlanCache(), MemoryBackend()

    def save(value: object) -> bool:
        state = {"value": value, "w": np.arange(5)}
        info = blocking.save(state, (backend, "c"), overwrite=True, plan_cache=cache)
        assert_same(blocking.load((backend, "c")), state)
        return info.statistics.plan_cached

    assert not save(b"short")
    assert save(b"another")
    assert save(noise(BYTES_LIMIT, 1))
    assert not save(noise(BYTES_LIMIT + 1, 2))
    assert save(noise(BYTES_LIMIT + 1, 3)), "equal lengths are equal plans, whatever the bytes"
    assert not save(noise(BYTES_LIMIT + 2, 4))
    assert save(b""), "back in the manifest"
    assert save(["a list"])
    assert not save("y" * JSON_LIMIT)
    assert save("z" * JSON_LIMIT)
    assert not save("y" * (JSON_LIMIT + 1))
    assert not save(noise(JSON_LIMIT + 3, 5)), "as many bytes as the text has, but bytes"
    assert save(7)


def test_a_large_value_costs_little_memory_beyond_itself(tmp_path: pathlib.Path) -> None:
    script = """
import resource, sys
import numpy as np
from savestream import SaveOptions, blocking
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
size = 64 << 20
options = SaveOptions(memory_budget_bytes=16 << 20, compression=sys.argv[2])
blocking.save({"w": bytes(100_000)}, "memory://m/warm", options=options)
value = np.random.default_rng(0).bytes(size)
before = peak()
blocking.save({"value": value, "w": np.arange(3)}, sys.argv[1], options=options)
print(peak() - before)
del value
before = peak()
assert len(blocking.load(sys.argv[1])["value"]) == size
print(peak() - before)
"""
    for compression in ("none", "zstd"):
        place = str(tmp_path / compression)
        done = subprocess.run(
            [sys.executable, "-c", script, place, compression], check=True, timeout=60, capture_output=True, text=True
        )
        saving, loading = (int(line) for line in done.stdout.split())
        assert saving < 40 * 2**20, "no copy of the whole value beside the staging memory"
        assert loading < 3 * 64 * 2**20
