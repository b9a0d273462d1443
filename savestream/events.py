"""What a save or load reports while it runs: frozen events, the observer protocol, statistics snapshots."""

from __future__ import annotations

import logging
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

__all__ = [
    "BlockProcessed",
    "Event",
    "LoadFinished",
    "LoadStarted",
    "Observer",
    "OperationFailed",
    "RangeRead",
    "SaveCommitted",
    "SavePlanned",
    "SaveStaged",
    "StageStatistics",
    "Statistics",
    "notify",
]

logger = logging.getLogger("savestream")


class StageStatistics(msgspec.Struct, frozen=True):
    """Work of one stage, summed over its threads.

    ``busy_seconds`` counts time inside the stage's calls, ``wait_seconds`` the time that work stood still for
    memory budget or throttling before it could enter the stage.
    """

    bytes: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    operations: int = 0


class Statistics(msgspec.Struct, frozen=True):
    """Snapshot of one save or load: the stage with the most seconds limits it.

    Attributes
    ----------
    stages
        ``plan``, ``stage`` (copy), ``digest``, ``encode``, ``write``, ``commit`` for a save; ``plan``, ``read``,
        ``decode``, ``place`` for a load.
    total_seconds
        Wall time from the call to the result.
    staged_seconds
        Wall time until the state could be mutated (saves only).
    raw_bytes, stored_bytes
        Bytes of array data before and after the codec.
    plan_cached
        Whether an unchanged state skipped planning.
    compression_choice
        What ``compression="auto"`` settled on, and why; otherwise the codec asked for.
    """

    stages: dict[str, StageStatistics] = {}
    total_seconds: float = 0.0
    staged_seconds: float | None = None
    raw_bytes: int = 0
    stored_bytes: int = 0
    plan_cached: bool = False
    compression_choice: str = ""


class SavePlanned(msgspec.Struct, frozen=True):
    """The plan is final: what will be written is known."""

    destination: str
    items: int
    raw_bytes: int
    plan_cached: bool


class BlockProcessed(msgspec.Struct, frozen=True):
    """One block went through a stage; times are ``time.perf_counter()`` seconds of this process."""

    stage: str
    block: int
    bytes: int
    started_seconds: float
    ended_seconds: float
    thread: int


class SaveStaged(msgspec.Struct, frozen=True):
    """Everything is copied: the caller may mutate the state."""

    destination: str
    seconds: float


class SaveCommitted(msgspec.Struct, frozen=True):
    """The checkpoint is durable and visible."""

    destination: str
    save_id: str
    statistics: Statistics


class LoadStarted(msgspec.Struct, frozen=True):
    """The manifest is read and the load is planned."""

    source: str
    items: int
    raw_bytes: int


class RangeRead(msgspec.Struct, frozen=True):
    """One range of an object was read, checked and placed."""

    object_path: str
    offset: int
    bytes: int
    started_seconds: float
    ended_seconds: float
    thread: int


class LoadFinished(msgspec.Struct, frozen=True):
    """Every array that was asked for is in place."""

    source: str
    statistics: Statistics


class OperationFailed(msgspec.Struct, frozen=True):
    """A save or load ended with an error or was cancelled; the caller receives the same error."""

    operation: str
    location: str
    error: str


Event: TypeAlias = (
    SavePlanned | BlockProcessed | SaveStaged | SaveCommitted | LoadStarted | RangeRead | LoadFinished | OperationFailed
)


@runtime_checkable
class Observer(Protocol):
    """Receives events. Called on savestream's threads, possibly several at once: be quick and thread-safe."""

    def __call__(self, event: Event, /) -> None: ...


class _FailingObservers:
    """Remembers which observers failed, so that each is logged once."""

    def __init__(self) -> None:
        self.logged: set[int] = set()

    def log(self, observer: Observer, error: BaseException) -> None:
        if id(observer) not in self.logged:
            self.logged.add(id(observer))
            logger.error("an observer failed; its further failures are not logged: %r", observer, exc_info=error)


_failing = _FailingObservers()


def notify(observer: Observer | None, event: Event) -> None:
    """Hand ``event`` to ``observer``; an exception there is logged once and never reaches the save."""
    if observer is None:
        return
    try:
        observer(event)
    except BaseException as error:  # an observer may raise anything, SystemExit too, and must never fail a save
        _failing.log(observer, error)
