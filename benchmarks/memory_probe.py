"""One save or load in this process alone; prints how far it raised the peak of resident memory, as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.states import Tree, gpt2_train_state, map_leaves, poison, require_equal
from benchmarks.systems import LOAD_INTO, System, peer_systems, savestream_system

_STATUS = Path("/proc/self/status")
_CLEAR_REFERENCES = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SAMPLE_SECONDS = 0.002


class Peak:
    """``bytes`` is how far resident memory rose at most."""

    bytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the body: by the kernel's own high-water mark on Linux, by sampling elsewhere."""
    peak = Peak()
    if _CLEAR_REFERENCES.exists():
        _CLEAR_REFERENCES.write_text(_RESET_PEAK, encoding="ascii")
        before = _status_bytes("VmRSS")
        yield peak
        peak.bytes = _status_bytes("VmHWM") - before
    else:
        with _sampled() as (before, highest):
            yield peak
        peak.bytes = highest() - before


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


@contextmanager
def _sampled() -> Iterator[tuple[int, Callable[[], int]]]:
    import psutil

    process = psutil.Process()
    seen = [process.memory_info().rss]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen[0], lambda: max(seen)
    finally:
        stop.set()
        thread.join()


def main(step: str, directory: str, layers: int) -> None:
    state = gpt2_train_state(layers) if layers else gpt2_train_state(1, width=96, vocabulary=4096)
    saves = "save" in step
    target = state if saves else map_leaves(np.zeros_like, state)
    if saves:
        shutil.rmtree(directory, ignore_errors=True)
        Path(directory).mkdir()
    else:
        poison(target)  # every page is there before the load
    system = _system(step, state, target)
    with peak_memory() as peak:
        if saves:
            system.save(directory)
        else:
            system.loads[LOAD_INTO](directory)
    if not saves:
        require_equal(target, state, step)
    print(json.dumps({"step": step, "peak_bytes": peak.bytes}))


def _system(step: str, state: Tree, target: Tree) -> System:
    if step.startswith("dcp"):
        peers, _ = peer_systems(state, target)
        return next(peer for peer in peers if peer.name == "DCP")
    return savestream_system(state, target, compression="zstd" if step.endswith("zstd") else "none")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
