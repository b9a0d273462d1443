"""What reading a foreign file may cost: memory in proportion to its size, and time until nobody waits any more."""

from __future__ import annotations

from collections.abc import Callable

from savestream.errors import CorruptCheckpointError

__all__ = ["STEPS_BETWEEN_CHECKS", "ReadLimits"]

_RATIO = 16
_SLACK_BYTES = 64 * 1024 * 1024
# So few steps take milliseconds.
STEPS_BETWEEN_CHECKS = 4096


def _go_on() -> None:
    """Nobody asks for an end."""


class ReadLimits:
    """A budget of 16 times the bytes that were read and 64 MiB, for all that is made of them.

    Parameters
    ----------
    source_bytes
        How many bytes were read so far.
    check_stop
        Raises where the reading is to end; called every few thousand steps.
    """

    def __init__(self, source_bytes: int = 0, check_stop: Callable[[], None] = _go_on) -> None:
        self.check_stop = check_stop
        self._left = _SLACK_BYTES + _RATIO * source_bytes
        self._granted: set[tuple[str, int]] = set()

    def grant(self, source_bytes: int, file: str, offset: int) -> None:
        """More was read at this place; the same place counts once."""
        if (file, offset) not in self._granted:
            self._granted.add((file, offset))
            self._left += _RATIO * source_bytes

    def charge(self, nbytes: int) -> None:
        """Something takes so many bytes."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(
                f"what it describes takes more than {_RATIO} times its own bytes and {_SLACK_BYTES} more; it repeats "
                "or expands its parts without end"
            )
