"""Leaves out of a state what cannot be stored."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from savestream.arrays import adapter_for
from savestream.errors import UnsafeObjectError
from savestream.interchange.inert_objects import UnreadObject
from savestream.planners.paths import Index, path_to_fqn
from savestream.planners.value_encoding import MAXIMUM_DEPTH, encode_value

__all__ = ["leave_out_unsupported"]

_ABSENT = object()


def leave_out_unsupported(state: Any) -> tuple[Any, dict[str, str]]:
    """The state without the leaves that have no safe encoding, and why each was left out, by key.

    Containers are changed, not copied. Where an element of a list or tuple is left out, None stands.
    """
    skipped: dict[str, str] = {}
    kept = _visit(state, (), skipped)
    return (None if kept is _ABSENT else kept), skipped


def _visit(value: Any, path: tuple[object, ...], skipped: dict[str, str]) -> Any:
    kind = type(value)
    if len(path) > MAXIMUM_DEPTH:  # a save refuses it, by its name
        return value
    if kind in (dict, OrderedDict):
        for key in list(value):
            found = _visit(value[key], (*path, key), skipped)
            if found is _ABSENT:
                del value[key]
            else:
                value[key] = found
        return value
    if kind in (list, tuple):
        items = [_visit(item, (*path, Index(place)), skipped) for place, item in enumerate(value)]
        kept = [None if item is _ABSENT else item for item in items]
        if kind is tuple:
            return tuple(kept)
        value[:] = kept
        return value
    reason = _problem(value, path)
    if reason is None:
        return value
    skipped[path_to_fqn(path)] = reason
    return _ABSENT


def _problem(leaf: Any, path: tuple[object, ...]) -> str | None:
    """Why a leaf cannot be stored."""
    key, adapter = path_to_fqn(path), adapter_for(type(leaf))
    if type(leaf) is UnreadObject:
        return f"{key}: it needs {leaf.kind[:200]}, which is not among what is read without running code"
    try:
        if adapter is None:
            encode_value(leaf, key)
        else:
            adapter.info(leaf, key)
    except UnsafeObjectError as error:
        return str(error)
    return None
