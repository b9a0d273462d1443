"""What stands for the classes, functions and objects of a pickle that is read without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError

__all__ = ["Constructor", "InertObject", "NamedGlobal", "UnreadObject", "WithUnread", "show"]

Constructor: TypeAlias = Callable[..., object]


class NamedGlobal:
    """What a pickle names: a class or function, as its name and what applying it to arguments means here."""

    __slots__ = ("constructor", "name")

    def __init__(self, name: str, constructor: Constructor | None = None) -> None:
        self.name = name
        self.constructor = constructor

    def apply(self, arguments: object) -> object:
        """The object that the pickle wants made."""
        if self.constructor is None or type(arguments) is not tuple:
            raise UnsafeObjectError(f"it applies {self.name}, which would be code to run")
        for argument in arguments:
            if type(argument) is UnreadObject:  # what is made of something unread is unread too
                return argument
        try:
            return self.constructor(*arguments)
        except SavestreamError:
            raise
        except (TypeError, ValueError, OverflowError, KeyError, IndexError, AttributeError) as error:
            raise CorruptCheckpointError(f"its arguments for {self.name} make no sense ({error})") from error


class InertObject:
    """An object of a class in the table: the class's name and the state that the pickle gives it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def set_state(self, state: object) -> None:
        """Take the state; classes that check it override this."""
        self.state = state


class UnreadObject(InertObject):
    """What only running code could make; whatever the pickle does with it is ignored, so that the rest can be read."""

    __slots__ = ()

    def set_state(self, state: object) -> None:
        """Nothing is kept."""


class WithUnread(dict[str, object]):
    """A table of names in which all that it lacks makes unread objects instead of being refused at once."""

    def __missing__(self, name: str) -> NamedGlobal:
        return NamedGlobal(name, lambda *_: UnreadObject(name))


def show(value: object) -> str:
    """A short text for messages; the whole of what a file made may be endless."""
    if isinstance(value, str | bytes):
        return repr(value[:80])
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(part, int) for part in value):
        return f"({', '.join(map(show, value))})"
    if isinstance(value, InertObject):
        return f"a {value.kind}"
    return value.name if isinstance(value, NamedGlobal) else f"a {type(value).__name__}"
