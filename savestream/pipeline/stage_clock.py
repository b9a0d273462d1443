"""Adds up what each stage of one save or load did, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from savestream.events import BlockProcessed, Observer, StageStatistics, notify

__all__ = ["StageClock"]


class StageClock:
    """Bytes, busy seconds and waits a stage; every measured call is also an event for the observer."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer
        self.started_seconds = time.perf_counter()
        self._lock = threading.Lock()
        self._stages: dict[str, StageStatistics] = {}

    @contextmanager
    def measure(self, stage: str, block: int, nbytes: int) -> Iterator[None]:
        """Time the enclosed work; it counts only when it succeeds."""
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.add(stage, nbytes, ended - started)
        if self.observer is not None:
            event = BlockProcessed(stage, block, nbytes, started, ended, threading.get_ident())
            notify(self.observer, event)

    def add(self, stage: str, nbytes: int, seconds: float) -> None:
        """Count work of a stage."""
        with self._lock:
            old = self._stages.get(stage, StageStatistics())
            self._stages[stage] = StageStatistics(
                old.bytes + nbytes, old.busy_seconds + seconds, old.wait_seconds, old.operations + 1
            )

    def add_wait(self, stage: str, seconds: float) -> None:
        """Count time for which work stood still before it could enter a stage."""
        with self._lock:
            old = self._stages.get(stage, StageStatistics())
            self._stages[stage] = StageStatistics(
                old.bytes, old.busy_seconds, old.wait_seconds + seconds, old.operations
            )

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self.started_seconds

    def snapshot(self) -> dict[str, StageStatistics]:
        """The stages so far."""
        with self._lock:
            return dict(self._stages)
