"""How the ranks of one save or load agree. This version coordinates a single process."""

from __future__ import annotations

import abc

from savestream.errors import CoordinationError, PlanError

__all__ = ["Coordinator", "SingleProcessCoordinator", "choose_coordinator"]


class Coordinator(abc.ABC):
    """A mailbox between ranks: whatever is put under a key, any rank can get."""

    rank: int
    world_size: int

    @abc.abstractmethod
    async def put(self, key: str, value: bytes) -> None:
        """Make ``value`` available to every rank under ``key``."""

    @abc.abstractmethod
    async def get(self, key: str, timeout_seconds: float) -> bytes:
        """Wait for the value under ``key``; a CoordinationError names the key when the time is over."""

    @abc.abstractmethod
    async def heartbeat(self) -> None:
        """Tell the others that this rank is alive."""


class SingleProcessCoordinator(Coordinator):
    """One rank, its own mailbox."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    async def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    async def get(self, key: str, timeout_seconds: float) -> bytes:
        if key not in self._values:
            raise CoordinationError(
                f"nothing was put under {key!r}; waiting {timeout_seconds} s would not help, as there is no other rank"
            )
        return self._values[key]

    async def heartbeat(self) -> None:
        return


def choose_coordinator(coordinator: Coordinator | None) -> Coordinator:
    """The coordinator to use; more than one rank is refused until the pipeline can plan across ranks."""
    if coordinator is None:
        return SingleProcessCoordinator()
    if coordinator.world_size != 1:
        raise PlanError(
            f"coordinator has world_size={coordinator.world_size}: this version saves and loads from one process. "
            "Save from one rank, or give each rank a destination of its own"
        )
    return coordinator
