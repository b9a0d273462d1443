"""What the tests that kill processes run in them. A nursery forks each child, so that starting one costs little."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import savestream
from savestream import blocking

LEAVES = 12


def step_state(step: int) -> dict[str, object]:
    """Every byte tells the step, so that a mix of two steps cannot go unseen."""
    arrays = {f"layer{number}": np.full((300, 40 + number), step * 1000 + number, np.int32) for number in range(LEAVES)}
    return {**arrays, "step": step, "note": f"step {step}"}


def check_step_state(state: dict[str, object]) -> int:
    """Return the step that the whole state belongs to."""
    step = state["step"]
    expected = step_state(step)
    assert list(state) == list(expected)
    for key, value in expected.items():
        same = np.array_equal(state[key], value) if isinstance(value, np.ndarray) else state[key] == value
        assert same, f"{key} does not belong to step {step}"
    return step


def save_steps(root: str) -> None:
    """Steps 1, 2, 3, ... each to its own place, until killed."""
    step = 1
    while True:
        blocking.save(step_state(step), f"{root}/step-{step:012d}", step=step)
        step += 1


def overwrite(root: str) -> None:
    """The same place over and over, until killed."""
    entries = blocking.list_checkpoints(root)
    step = blocking.read_manifest(f"{root}/current").step if entries else 0
    while True:
        step += 1
        blocking.save(step_state(step), f"{root}/current", overwrite=True, step=step)


def save_and_leave(root: str) -> None:
    """Save in the background and end: the interpreter's exit waits for the save."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    step = 1
    while True:
        handle = blocking.start_save(step_state(step), f"{root}/step-{step:012d}", step=step)
        handle.result()
        step += 1


WORK = {work.__name__: work for work in (save_steps, overwrite, save_and_leave)}


def nursery() -> None:
    """Fork one child for each line ``work root``; answer with its process id, and with its status when it ends."""
    for line in sys.stdin:
        work, root = line.rstrip("\n").split(" ", 1)
        child = os.fork()
        if child == 0:
            os.close(0)
            code = 1
            try:
                WORK[work](root)
            except SystemExit as leaving:
                code = leaving.code
            finally:
                leave(code)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


def leave(code: int) -> None:
    """End a forked child as the interpreter would: wait for the threads that are not daemons."""
    import threading

    threading._shutdown()
    os._exit(code)


def read_while_overwritten(place: str, seconds: float) -> None:
    """Load again and again; print how many loads there were and how many steps they saw."""
    end = time.monotonic() + seconds
    seen: list[int] = []
    while time.monotonic() < end:
        seen.append(check_step_state(blocking.load(place)))
        assert savestream.blocking.exists(place)
    assert seen == sorted(seen), "an older state came back"
    print(len(seen), len(set(seen)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nursery()
    else:
        read_while_overwritten(sys.argv[2], float(sys.argv[3]))
