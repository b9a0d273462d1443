"""Processes that are killed while they save: what had been committed loads, what had not is not there."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from kill_children import check_step_state

import savestream
from savestream import blocking
from savestream.errors import CheckpointNotFoundError

CHILDREN = str(pathlib.Path(__file__).with_name("kill_children.py"))
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its children")


class Nursery:
    """Starts children that save, and kills them."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, CHILDREN, "nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def kill_after(self, seconds, work, root, number):
        """Let a child do ``work`` for a while, then send it signal ``number``; return how it ended."""
        child = self.start(work, root)
        time.sleep(seconds)
        os.kill(child, number)
        return self.status()

    def start(self, work, root):
        print(work, root, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def status(self):
        return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


def check_steps(root):
    """Committed steps load and belong together; whatever else lies there says that it is incomplete."""
    entries = blocking.list_checkpoints(root)
    names = sorted(path.name for path in pathlib.Path(root).iterdir()) if pathlib.Path(root).exists() else []
    assert [entry.step for entry in entries] == list(range(1, len(entries) + 1))
    if entries:
        assert check_step_state(blocking.load(entries[-1].location)) == len(entries)
    partial = [name for name in names if name not in {entry.name for entry in entries}]
    assert partial in ([], [f"step-{len(entries) + 1:012d}"])
    for name in partial:
        assert not blocking.exists(f"{root}/{name}")
        contents = list(pathlib.Path(root, name).iterdir())
        with pytest.raises(CheckpointNotFoundError, match="incomplete" if contents else "no checkpoint") as caught:
            blocking.load(f"{root}/{name}")
        assert isinstance(caught.value, FileNotFoundError)
        with pytest.raises(CheckpointNotFoundError):
            blocking.verify(f"{root}/{name}")
        blocking.save({"a": 1}, f"{root}/{name}")
        assert blocking.load(f"{root}/{name}") == {"a": 1}
    return len(entries), len(partial)


MORE_ROUNDS = 200  # how many it may take, on a busy machine, until a kill has hit a save


def kill_rounds(nursery, tmp_path, rounds):
    """As many rounds, and more until both a committed and a half-done save have been seen."""
    delays = random.Random(rounds)
    committed = partial = number = 0
    while number < rounds or not (committed and partial):
        assert number < rounds + MORE_ROUNDS, "no child was killed in the middle of a save"
        root = f"{tmp_path}/round{number}"
        ending = signal.SIGKILL if number % 2 else signal.SIGTERM
        nursery.kill_after(delays.uniform(0, 0.3), "save_steps", root, ending)
        found = check_steps(root)
        committed += found[0]
        partial += found[1]
        number += 1


def test_killed_at_random_moments(nursery, tmp_path):
    kill_rounds(nursery, tmp_path, 12)


@pytest.mark.slow
def test_killed_at_many_random_moments(nursery, tmp_path):
    kill_rounds(nursery, tmp_path, 100)


def overwrite_rounds(nursery, tmp_path, rounds):
    """The directory stays from round to round, with what killed saves left in it: more than one save's data."""
    delays = random.Random(rounds)
    current = tmp_path / "current"
    steps = [0]
    while len(steps) <= rounds or steps[-1] <= 1 or len([path for path in current.iterdir() if path.is_dir()]) < 2:
        assert len(steps) < rounds + MORE_ROUNDS, "no overwrite was killed half-way"
        ending = signal.SIGKILL if len(steps) % 2 else signal.SIGTERM
        nursery.kill_after(delays.uniform(0, 0.2), "overwrite", str(tmp_path), ending)
        if blocking.exists(current):
            steps.append(check_step_state(blocking.load(current)))
        else:
            assert steps[-1] == 0, "an overwrite that was killed left nothing"
            steps.append(0)
    assert steps == sorted(steps)
    assert steps[-1] > 1


def test_overwrites_killed_half_way(nursery, tmp_path):
    overwrite_rounds(nursery, tmp_path, 12)


@pytest.mark.slow
def test_many_overwrites_killed_half_way(nursery, tmp_path):
    overwrite_rounds(nursery, tmp_path, 100)


def test_a_process_that_leaves_on_sigterm_finishes_the_save_in_progress(nursery, tmp_path):
    partial = 0
    for number in range(4):
        root = f"{tmp_path}/round{number}"
        assert nursery.kill_after(0.1 + 0.01 * number, "save_and_leave", root, signal.SIGTERM) == 0
        committed, left = check_steps(root)
        assert committed
        partial += left
    assert partial == 0


def test_a_reader_sees_a_complete_state_while_another_process_overwrites_it(nursery, tmp_path):
    child = nursery.start("overwrite", str(tmp_path))
    try:
        while not blocking.exists(f"{tmp_path}/current"):
            time.sleep(0.001)
        command = [sys.executable, CHILDREN, "read", f"{tmp_path}/current", "1.0"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.kill(child, signal.SIGKILL)
        nursery.status()
    assert found.returncode == 0, found.stderr
    loads, steps = map(int, found.stdout.split())
    assert loads >= steps > 1


def test_what_a_killed_save_left_does_not_hinder_the_next(tmp_path):
    """A save that ended between its last write and its commit, and the same save again."""
    place = tmp_path / "step-000000000001"
    blocking.save({"a": 1}, place)
    (place / "manifest.json").unlink()
    assert blocking.list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError, match="incomplete"):
        blocking.load(place)
    blocking.save({"a": 2}, place)
    assert blocking.load(place) == {"a": 2}
    assert [entry.step for entry in savestream.blocking.list_checkpoints(tmp_path)] == [1]
