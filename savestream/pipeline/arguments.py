"""Checks of what callers pass, made before any work: a wrong argument is refused by its name."""

from __future__ import annotations

import difflib
import numbers
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from savestream.errors import PlanError, UsageError

__all__ = [
    "check_flag",
    "check_keys",
    "check_kind",
    "check_metrics",
    "check_observer",
    "check_step",
    "exclusive",
    "suggest_keys",
]

_MAXIMUM_STEP = 1 << 62


def check_kind(name: str, value: object, kind: type) -> None:
    """``value`` is None or an instance of ``kind``."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type) and issubclass(value, kind):
        raise PlanError(f"{name} is the class {value.__qualname__}; pass an instance: {value.__qualname__}()")
    raise PlanError(f"{name}={value!r}: must be a {kind.__qualname__} or None")


def check_flag(name: str, value: object) -> None:
    """``value`` is True or False; anything else would silently count as one of them."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: must be True or False")


def check_observer(observer: object) -> None:
    """An observer can be called, and is no coroutine function, which nobody would await."""
    if observer is None:
        return
    if not callable(observer):
        raise PlanError(f"observer={observer!r}: must be callable with one event")
    code = getattr(observer, "__code__", None)
    if code is not None and code.co_flags & 0x80:  # inspect.CO_COROUTINE
        raise PlanError("observer is an async function, which nothing would await; pass an ordinary function")


def check_step(step: object) -> int | None:
    """A step as an int; numpy integers count as such, bools do not."""
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # that is what is being found out
    except TypeError:
        number = -1
    if isinstance(step, bool | np.bool_) or not 0 <= number <= _MAXIMUM_STEP:
        raise PlanError(f"step={step!r}: must be an integer from 0 to 2**62")
    return number


def check_metrics(metrics: object) -> dict[str, int | float] | None:
    """Metrics as plain numbers: ints stay exact, numpy scalars and 0-d arrays become Python's own."""
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise PlanError(f"metrics={metrics!r}: must map names to numbers")
    return {_metric_name(name): _metric_value(name, value) for name, value in metrics.items()}


def _metric_name(name: object) -> str:
    if not isinstance(name, str):
        raise PlanError(f"metrics has the name {name!r}: names are strings")
    return name


def _metric_value(name: object, value: Any) -> int | float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise PlanError(f"metrics[{name!r}]={value!r}: must be a number; use float(value)")
    try:
        number = float(value)  # an int too, so that metrics can always be compared with one another
    except OverflowError as error:
        raise PlanError(f"metrics[{name!r}] is too large for a float") from error
    return int(value) if isinstance(value, numbers.Integral) else number


def check_keys(keys: object) -> list[str | tuple[object, ...]] | None:
    """Keys as a list: a str or a tuple is one key, any other collection holds several."""
    if keys is None:
        return None
    if isinstance(keys, str | tuple):
        return [keys]
    if not isinstance(keys, Sequence | set | frozenset):
        raise PlanError(f"keys={keys!r}: must be a key such as 'model.w', a tuple of raw parts, or a list of those")
    found: list[str | tuple[object, ...]] = []
    for key in keys:
        if not isinstance(key, str | tuple):
            raise PlanError(f"keys holds {key!r}: a key is a string such as 'model.w', or a tuple of raw parts")
        found.append(key)
    return found


def suggest_keys(missing: Sequence[str], names: Sequence[str]) -> str:
    """What a key that the checkpoint lacks may have meant: the same without escapes, or one of similar letters."""
    plain = {name.replace("\\", ""): name for name in names}
    meant = []
    for key in missing[:3]:
        exact = plain.get(key) or next((name for text, name in plain.items() if text.startswith(key + ".")), None)
        close = [exact] if exact else difflib.get_close_matches(key, names[:10_000], n=1)
        meant += [f"{key!r}: did you mean {name!r}?" for name in close if name != key]
    return "; " + " ".join(meant) if meant else ""


class _InUse:
    """The planners that serve a save or load at this moment."""

    def __init__(self) -> None:
        self.planners: set[int] = set()
        self.lock = threading.Lock()


_in_use = _InUse()


@contextmanager
def exclusive(planner: object) -> Iterator[None]:
    """Keep a planner to one save or load at a time: it holds that one's state, and would mix up two."""
    if planner is None:
        yield
        return
    with _in_use.lock:
        if id(planner) in _in_use.planners:
            raise UsageError(
                f"this {type(planner).__qualname__} serves another save or load that has not ended; make one for each, "
                "or wait for the other one"
            )
        _in_use.planners.add(id(planner))
    try:
        yield
    finally:
        with _in_use.lock:
            _in_use.planners.discard(id(planner))
