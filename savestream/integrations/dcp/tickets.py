"""How the ranks of one save learn its id.

Every object of a save lies beneath the save's id, which the coordinator draws; the others learn it from the plan that
they are sent. With plan caching they are sent an empty plan, and torch's planner then puts the plan of an earlier save
in its place: what the storage attached to that plan is stale. So a rank does not look at the plan that it is given but
at what arrived: a ticket notes its own arrival, by unpickling, in the inbox that the rank's writer had opened in this
thread when the save began. The exchange happens in the thread that saves, after that moment and before the writing.

Nothing depends on an object in storage, which might be of an earlier attempt or of somebody else's. A ticket that is
wrong all the same cannot do harm: the coordinator commits only parts that bear its own id.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Inbox", "SaveTicket", "open_inbox"]


class SaveTicket:
    """A save's id, which of how many ranks the plan is for, and whether keys have to be checked."""

    def __init__(self, save_id: str, rank: int, world_size: int, checks_keys: bool = True) -> None:
        self.save_id = save_id
        self.rank = rank
        self.world_size = world_size
        self.checks_keys = checks_keys

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrived, (self.save_id, self.rank, self.world_size, self.checks_keys))


class Inbox:
    """Holds the first ticket that arrives in this thread after it was opened."""

    def __init__(self) -> None:
        self.ticket: SaveTicket | None = None


class _Opened(threading.local):
    inbox: Inbox | None = None


_opened = _Opened()


def open_inbox() -> Inbox:
    """A new inbox for this thread; the one before it gets no more tickets."""
    _opened.inbox = inbox = Inbox()
    return inbox


def _arrived(save_id: str, rank: int, world_size: int, checks_keys: bool) -> SaveTicket:
    ticket = SaveTicket(save_id, rank, world_size, checks_keys)
    inbox = _opened.inbox
    if inbox is not None and inbox.ticket is None:
        inbox.ticket = ticket
    return ticket
