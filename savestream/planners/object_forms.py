"""How objects of known classes are recorded: what a form has to say about one class."""

from __future__ import annotations

import abc
import sys
from typing import Any

__all__ = ["ObjectForm", "ObjectUnavailableError", "require_state"]


class ObjectUnavailableError(Exception):
    """A recorded object cannot be made here: its framework is not imported, or does not know it."""


def require_state(condition: bool, what: str) -> None:
    """Refuse a recorded state that no object has."""
    if not condition:
        raise ValueError(what)


class ObjectForm(abc.ABC):
    """How objects of one class are recorded.

    Attributes
    ----------
    name
        The recorded type name.
    module
        The module that has to be imported already where an object is made.
    keeps_identity
        Whether a load sets the state of the target's object instead of replacing it.
    """

    name: str
    module: str
    keeps_identity = False

    @property
    def root(self) -> str:
        """The top-level package of the class."""
        return self.module.partition(".")[0]

    @abc.abstractmethod
    def matches(self, value: Any) -> bool:
        """Whether ``value`` is recorded in this form."""

    @abc.abstractmethod
    def state(self, value: Any) -> object:
        """A plain value that determines the object; ``UnsafeObjectError`` (without a key) where there is none."""

    @abc.abstractmethod
    def check(self, state: Any) -> None:
        """Raise ``ValueError``, ``TypeError`` or ``LookupError`` for a state that :meth:`state` never returns."""

    @abc.abstractmethod
    def make(self, state: Any) -> object:
        """The object of a checked state, or ``ObjectUnavailableError``."""

    def difference(self, target: Any, saved: Any) -> str | None:
        """Why the state of ``saved`` does not fit into ``target``, both of this form; None where it does."""
        del target, saved
        return None

    def adopt(self, target: Any, saved: Any) -> None:
        """Give ``target`` the state of ``saved``."""
        raise NotImplementedError(f"{self.name} objects are replaced, {target!r} by {saved!r}")

    def loaded(self) -> Any:
        """The framework's module."""
        module = sys.modules.get(self.module)
        if module is None:
            raise ObjectUnavailableError(f"{self.module} is not imported")
        return module
