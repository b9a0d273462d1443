"""What the machine itself can do: the copy, write and read rates that no checkpoint library can beat."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import Machine, anonymous_memory, make_durable
from benchmarks.states import Tree, leaves, total_bytes

__all__ = ["COPY", "READ", "WRITE", "DiskFloors", "MemoryFloor"]

COPY = "floor: copy, 2 threads"
WRITE = "floor: direct write, 2 threads"
READ = "floor: direct read, 4 threads"

_SPAN_BYTES = 32 << 20
_WRITE_BYTES = 16 << 20
_READ_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


def _in_threads(count: int, jobs: Sequence[Any], work: Callable[[int, Any], object]) -> None:
    """Hand ``jobs`` to ``count`` threads; ``work`` gets the thread's number and a job."""
    remaining = iter(list(jobs))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            while True:
                with lock:
                    job = next(remaining, None)
                if job is None:
                    return
                work(number, job)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class MemoryFloor:
    """Copies a state with two threads into memory that is already there: the least that staging can take."""

    def __init__(self, state: Tree) -> None:
        memory = anonymous_memory(total_bytes(state))
        self._spans: list[tuple[Bytes, Bytes]] = []
        position = 0
        for array in leaves(state):
            source = array.reshape(-1).view(np.uint8)
            for start in range(0, source.size, _SPAN_BYTES):
                part = source[start : start + _SPAN_BYTES]
                self._spans.append((memory[position : position + part.size], part))
                position += part.size

    def seconds(self) -> float:
        """Copy once."""
        started = time.perf_counter()
        _in_threads(2, self._spans, lambda _, span: np.copyto(*span))
        return time.perf_counter() - started


class DiskFloors:
    """Writes and reads ``nbytes`` past the page cache (through it where there is no direct I/O)."""

    def __init__(self, machine: Machine, directory: str, nbytes: int) -> None:
        self._machine = machine
        self._directory = directory
        self._nbytes = nbytes
        random = np.random.default_rng(1)
        self._buffers = [anonymous_memory(_WRITE_BYTES) for _ in range(4)]
        for buffer in self._buffers:
            buffer[:] = random.integers(0, 256, buffer.size, np.uint8)

    def run(self) -> dict[str, float]:
        """Write a file and read it again."""
        self._machine.clear(self._directory)
        path = f"{self._directory}/data"
        written, _ = self._machine.timed(lambda: self._write(path))
        self._machine.evict(self._directory)
        read, _ = self._machine.timed(lambda: self._read(path))
        self._machine.clear(self._directory)
        return {WRITE: written, READ: read}

    def _write(self, path: str) -> None:
        descriptor = _open_direct(path, os.O_WRONLY | os.O_CREAT)
        try:
            self._each(
                2,
                _WRITE_BYTES,
                lambda number, offset, size: _write_all(descriptor, self._buffers[number][:size], offset),
            )
            os.ftruncate(descriptor, self._nbytes)
        finally:
            os.close(descriptor)
        make_durable(self._directory)

    def _read(self, path: str) -> None:
        descriptor = _open_direct(path, os.O_RDONLY)
        try:
            self._each(
                4,
                _READ_BYTES,
                lambda number, offset, size: os.preadv(descriptor, [self._buffers[number][:size].data], offset),
            )
        finally:
            os.close(descriptor)

    def _each(self, threads: int, size: int, work: Callable[[int, int, int], object]) -> None:
        offsets = range(0, self._nbytes, size)
        _in_threads(
            threads, offsets, lambda number, offset: work(number, offset, _page(min(size, self._nbytes - offset)))
        )


def _page(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _write_all(descriptor: int, data: Bytes, offset: int) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, offset + done)


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
