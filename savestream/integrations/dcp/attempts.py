"""One save as one rank sees it, from set-up to the commit, and the removal of what a failed one leaves."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from savestream.errors import CoordinationError, UsageError
from savestream.integrations.dcp.composition import Composition
from savestream.integrations.dcp.frameworks import run_on_engine
from savestream.integrations.dcp.tickets import Inbox, SaveTicket
from savestream.pipeline.commit import describe, new_save_id
from savestream.pipeline.engine import Engine, current_engine
from savestream.pipeline.rank_commit import Standing, commit_root, discard_quietly, may_be_visible
from savestream.planners.metadata import Shape
from savestream.storage_backends import Location

__all__ = ["Attempt"]

logger = logging.getLogger("savestream")


class Attempt:
    """One save from set-up to finish, as one rank sees it.

    An attempt of the coordinator's that ends without ``finish`` leaves data behind, of other ranks too: torch tells no
    storage writer that a save has failed. They are removed when the attempt is given up: at the writer's next save in
    this thread, or when nothing refers to it any more.
    """

    def __init__(self, location: Location, inbox: Inbox, *, is_coordinator: bool, rank: int | None) -> None:
        self.location = location
        self.inbox = inbox
        self.is_coordinator = is_coordinator
        self.rank = rank
        self.save_id = new_save_id()
        self.world_size = 1
        self.standing = Standing()
        self.owners: dict[tuple[str, Shape | None], int] = {}
        self.sent_plan: Any = None
        self.checks_keys = True  # see plan_cache
        self._leftovers: weakref.finalize[Any, Any] | None = None

    def may_leave_data(self) -> None:
        """From now on there may be data to remove."""
        if self.is_coordinator and self._leftovers is None:
            self._leftovers = weakref.finalize(self, _discard_in_background, self.location, self.save_id)
            self._leftovers.atexit = False  # the engine may have ended; the data bears this save's id alone

    def give_up(self) -> None:
        """Remove what the attempt left behind, unless a commit has begun."""
        if self._leftovers is not None and self._leftovers.detach():
            self._discard()

    def commit(self, composition: Composition, *, overwrite: bool) -> None:
        """Publish the checkpoint. From here on data are removed only where the commit is known to have failed."""
        if self._leftovers is not None:
            self._leftovers.detach()
        has_failed = False

        async def work() -> None:
            nonlocal has_failed
            try:
                await commit_root(
                    self.location,
                    composition.content,
                    composition.section,
                    standing=self.standing,
                    overwrite=overwrite,
                )
            except BaseException as error:
                has_failed = not may_be_visible(error)
                raise

        try:
            run_on_engine(work, "committing")
        except BaseException:  # an interrupt too, which may come when the commit has taken place
            if has_failed:
                self._discard()
            raise

    def _discard(self) -> None:
        run_on_engine(lambda: discard_quietly(self.location, self.save_id), "discarding a failed save")

    def identify(self, plan: Any) -> tuple[str, int]:
        """The save's id and this rank's number, once the coordinator has sent the plan.

        The ticket that arrived counts; that in the plan only where plans do not travel between processes.
        """
        if self.is_coordinator:
            return self.save_id, self.rank or 0
        ticket = self.inbox.ticket or plan.storage_data
        if not isinstance(ticket, SaveTicket):
            raise CoordinationError(
                "the plan came without the save's id: torch's plan exchange did not pass through the coordinator's "
                "savestream StorageWriter; give all ranks one, and call its hooks in the thread that saves"
            )
        if self.rank is not None and self.rank != ticket.rank:
            raise CoordinationError(f"rank {self.rank} was sent the plan of rank {ticket.rank}; nothing was written")
        self.checks_keys = ticket.checks_keys
        return ticket.save_id, ticket.rank


def _discard_in_background(location: Location, save_id: str) -> None:
    """Called by the garbage collector, at any point of any thread, so it takes no lock: the engine's loop goes on."""
    try:
        engine = current_engine()
    except UsageError:
        return  # forked: the data are the parent's business
    engine.post(lambda: _start_discarding(engine, location, save_id))


def _start_discarding(engine: Engine, location: Location, save_id: str) -> None:
    try:
        engine.submit(lambda: discard_quietly(location, save_id), "discarding a failed save")
    except UsageError:
        logger.warning("%s: data of a failed save stays behind, since the program ends", describe(location))
