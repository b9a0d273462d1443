"""The plan cache and the fingerprint."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from savestream.errors import PlanError
from savestream.planners import DefaultSavePlanner, PlanCache, ShardedArray


def test_least_recently_used_goes_first() -> None:
    cache = PlanCache(max_entries=2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    assert cache.get(b"a") == 1
    cache.put(b"c", 3)
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (1, None, 3)
    found = cache.statistics()
    assert (found.hits, found.misses, found.entries) == (3, 1, 2)
    cache.clear()
    assert cache.statistics().entries == 0


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_sizes_are_checked(wrong: Any) -> None:
    with pytest.raises(PlanError, match="max_entries"):
        PlanCache(wrong)


def test_many_threads() -> None:
    cache = PlanCache(max_entries=3)

    def use(number: int) -> None:
        for step in range(300):
            key = bytes([(number + step) % 5])
            cache.put(key, key)
            assert cache.get(key) in (key, None)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = cache.statistics()
    assert found.hits + found.misses == 1200
    assert found.entries == 3


def print_of(state: Any, **options: Any) -> bytes:
    planner = DefaultSavePlanner(**options)
    planner.set_up_planner(state)
    planner.capture_values()
    found = planner.plan_fingerprint()
    assert found is not None
    return found


class Pair(NamedTuple):
    a: Any
    b: Any


class Twin(NamedTuple):
    a: Any
    b: Any


class Opaque:
    def __init__(self, text: str) -> None:
        self.text = text


def test_content_does_not_count() -> None:
    first = {"w": np.zeros(3), "n": 9, "cfg": {"lr": 0.1}}
    assert print_of(first) == print_of({"w": np.ones(3), "n": 10, "cfg": {"lr": "long text", "more": [1]}})


BASE = np.zeros(16)
STATES = [
    {"w": np.zeros(8)},
    {"v": np.zeros(8)},
    {"w": np.zeros((8, 1))},
    {"w": np.zeros(8, np.float32)},
    {"w": np.zeros(8, ">f8")},
    {"w": np.zeros(8, np.int64)},
    {"w": BASE[::2]},
    {"w": [np.zeros(8)]},
    {"w": (np.zeros(8),)},
    {"w": collections.deque([np.zeros(8)])},
    {"w": collections.deque([np.zeros(8)], 3)},
    {"w": {0: np.zeros(8)}},
    {"w": {"0": np.zeros(8)}},
    {"w": collections.OrderedDict({0: np.zeros(8)})},
    {"w": collections.defaultdict(list, {0: np.zeros(8)})},
    {"w": collections.defaultdict(dict, {0: np.zeros(8)})},
    {"w": Pair(np.zeros(8), 1)},
    {"w": Twin(np.zeros(8), 1)},
    {"w": np.zeros(8), "x": 1},
    {"x": 1, "w": np.zeros(8)},
    {"w": 1},
    {"w": ShardedArray((8,), [((0,), np.zeros(8))])},
    {"w": ShardedArray((8,), [((0,), np.zeros(4)), ((4,), np.zeros(4))])},
    {"w": ShardedArray((8,), [((0,), np.zeros(8))], replicated=True)},
    {"a\nb": np.zeros(1), "c": np.zeros(1)},
    {"a": np.zeros(1), "b\nc": np.zeros(1)},
    {"a": BASE[:4], "b": BASE[:4], "c": BASE[4:8]},
    {"a": BASE[:4], "b": BASE[4:8], "c": BASE[4:8]},
    {"a": BASE[:4], "b": BASE[4:8], "c": BASE[8:12]},
]


def test_whatever_changes_the_plan_changes_the_fingerprint() -> None:
    prints = [print_of(state) for state in STATES]
    prints += [print_of(STATES[0], dedup_save_to_lowest_rank=True), print_of(STATES[0], allow_pickle=True)]
    prints += [print_of(STATES[0], flatten_state_dict=False)]
    prints += [print_of({"o": Opaque(text)}, allow_pickle=True) for text in ("a", "ab")]
    assert len(set(prints)) == len(prints)


def test_addresses_do_not_count_but_sharing_does() -> None:
    def tied() -> Any:
        array = np.zeros(4)
        return {"a": array, "b": array}

    assert print_of(tied()) == print_of(tied())
    assert print_of(tied()) != print_of({"a": np.zeros(4), "b": np.zeros(4)})


def test_fingerprints_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np\nfrom savestream.planners import DefaultSavePlanner\n"
        "p = DefaultSavePlanner()\np.set_up_planner({'w': [np.zeros(3)], 's': {'a', 'b'}})\n"
        "print(p.plan_fingerprint().hex())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {print_of({"w": [np.zeros(3)], "s": {"a", "b"}}).hex() + "\n"}
