"""Where a writer or reader works: what the user gave, or the id that torch gives with each save or load."""

from __future__ import annotations

import os
import pathlib
import threading
from typing import Any

from savestream.errors import PlanError, UsageError
from savestream.storage_backends import Location, Place, resolve_location, with_typed_errors
from savestream.storage_backends.memory import MemoryBackend

__all__ = ["Destination"]


class Destination:
    """A place, and the one that torch has set for the thread's own save.

    Several saves may run at once with one writer, each in a thread of its own, so the place that :meth:`reset` sets
    counts for its thread, and for threads that set none.
    """

    def __init__(self, place: Place | None) -> None:
        self._given = _absolute(place)
        self._shared = self._given
        self._own = threading.local()

    @classmethod
    def accepts(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a storage backend for a place."""
        try:
            cls(checkpoint_id)
        except PlanError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Use another place; a path beneath the same backend where ``(backend, path)`` had been given."""
        place: Place = checkpoint_id
        if isinstance(self._given, tuple) and "://" not in os.fsdecode(checkpoint_id):
            place = (self._given[0], os.fsdecode(checkpoint_id))
        self._own.place = self._shared = _absolute(place)

    @property
    def place(self) -> Place | None:
        """The place in force; None where none is known yet."""
        found: Place | None = getattr(self._own, "place", self._shared)
        return found

    @property
    def text(self) -> str | None:
        """The place as text, for torch's log and metadata: a path, or a URL without credentials."""
        place = self.place
        if place is None or (isinstance(place, str) and "://" not in place):
            return place
        return resolve_location(place).url

    def locate(self) -> Location:
        """The backend and path."""
        place = self.place
        if place is None:
            raise PlanError(
                "no place is known: give the storage writer or reader one, or pass checkpoint_id= to torch's function"
            )
        return with_typed_errors(resolve_location(place))

    def __getstate__(self) -> dict[str, Any]:
        place = self.place
        if place is not None and isinstance(resolve_location(place).backend, MemoryBackend):
            raise UsageError(
                f"{place!r} lies in this process's memory, so another process cannot write or read it; use a path or a "
                "URL that both can reach"
            )
        return {"place": place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(Destination(state["place"]).__dict__)


def _absolute(place: Place | None) -> Place | None:
    """A path made absolute at once: the process may change its directory, and another one may have its own.

    Refuses what is no place.
    """
    if place is None:
        return None
    resolve_location(place)
    if isinstance(place, tuple):
        return place
    text = os.fsdecode(place)
    return text if "://" in text else str(pathlib.Path(text).absolute())
