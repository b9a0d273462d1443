"""What the tests of the blocking facade run in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from savestream import SaveOptions, blocking
from savestream.pipeline.engine import Operation
from savestream.storage_backends import Fault, FaultyBackend, FileBackend

OLD, NEW = {"w": np.full(200_000, 1.0)}, {"w": np.full(200_000, 2.0)}


class Interrupt:
    """Sends Ctrl-C to this process, and lets the operation go on when the main thread has cancelled the work for it."""

    def __init__(self) -> None:
        # A shell that starts a program in the background lets it, and all its children, ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._noticed = threading.Event()
        cancel = Operation.cancel

        def noticing(operation: Operation[Any]) -> None:
            cancel(operation)
            self._noticed.set()

        Operation.cancel = noticing  # type: ignore[method-assign]  # in this child process only

    def __call__(self, _operation: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert self._noticed.wait(60)


def interrupt_during(place: str, kind: str, overwrite: str) -> None:
    """Ctrl-C arrives while an operation of that kind is under way."""
    if overwrite == "overwrite":
        blocking.save(OLD, place)

    backend = FaultyBackend(FileBackend(place), [Fault(kind, None, hook=Interrupt())])
    try:
        blocking.save(NEW, (backend, ""), overwrite=overwrite == "overwrite")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        print("saved", flush=True)
    # What it was doing has ended by now: the directory does not change any more, and another save works.
    print(sorted(entry for entry in os.listdir(place)) if os.path.exists(place) else [], flush=True)
    print(blocking.load(place)["w"][0] if blocking.exists(place) else None, flush=True)
    blocking.save(OLD, place, overwrite=True)
    print(blocking.load(place)["w"][0], flush=True)


def interrupt_load(place: str) -> None:
    """Ctrl-C in a load: nothing is written to the target afterwards."""
    blocking.save(NEW, place)

    target = {"w": np.zeros(200_000)}
    try:
        blocking.load((FaultyBackend(FileBackend(place), [Fault("get", None, hook=Interrupt())]), ""), target)
    except KeyboardInterrupt:
        print("interrupted", target["w"].any(), flush=True)
    print(blocking.load(place)["w"][0], flush=True)


def save_before_exit(place: str) -> None:
    """The last statement of the program starts a save; a slow one."""
    blocking.start_save(NEW, place, options=SaveOptions(write_bytes_per_second=8_000_000, compression="none"))


def first_save_from_a_thread(place: str) -> None:
    """The engine starts in a thread that ends; no signal handler is installed anywhere."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    thread = threading.Thread(target=blocking.save, args=(NEW, place))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    print(blocking.load(place)["w"][0])


def save_in_a_thread_at_exit(place: str) -> None:
    """The main thread ends before the first save; another thread goes on, as trainers do."""

    def train() -> None:
        threading.main_thread().join()
        for step in range(3):
            handle = blocking.start_save(OLD, f"{place}-{step}")
            handle.result()
        assert blocking.load(f"{place}-2")["w"][0] == 1.0
        blocking.save(NEW, place, options=SaveOptions(write_bytes_per_second=8_000_000, compression="none"))

    blocking.save(OLD, f"{place}-first")
    threading.Thread(target=train).start()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
