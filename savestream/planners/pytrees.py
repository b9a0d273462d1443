"""Containers that JAX knows as pytree nodes and savestream has no form of its own for, seen one level deep.

Among them are frozen dicts, module states, modules, and dataclasses with static fields: whatever is registered with
``jax.tree_util``, where the caller has imported JAX. By its keys a node is

- a mapping, if all are dict keys (or there are none, and it is a ``collections.abc.Mapping``): recorded as a dict;
- a record, if all are attribute names (or there are none, and it is a dataclass): recorded as a dataclass of these
  fields, by the name of its class;
- a sequence otherwise: recorded as a tuple.

What JAX calls static, or auxiliary, data is not stored: functions, optimisers, shapes, names. A load into a target
keeps that of the target and its class; without a target the recorded containers come back.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from savestream.errors import PlanError, SavestreamError

__all__ = ["Category", "PytreeNode", "is_pytree", "open_pytree", "pytree_category", "rebuild_pytree"]

Category: TypeAlias = Literal["mapping", "sequence", "record"]

_PLAIN = (enum.Enum, np.generic, np.dtype)  # stored as the values that they are, even where a class is registered


class PytreeNode(msgspec.Struct, frozen=True):
    """One level of a pytree: dict keys, field names or positions, the children behind them, and how JAX builds it."""

    category: Category
    parts: Sequence[Any]
    children: Sequence[Any]
    definition: Any

    @property
    def kind(self) -> str:
        """What it is recorded as."""
        return {"mapping": "dict", "sequence": "tuple", "record": "dataclass"}[self.category]


def is_pytree(value: object) -> bool:
    """Whether ``value``, which is no dict, list or tuple, is a node; namedtuples have a form of their own."""
    tree_util = sys.modules.get("jax.tree_util")
    if tree_util is None or value is None or isinstance(value, _PLAIN) or not hasattr(tree_util, "all_leaves"):
        return False
    if tree_util.all_leaves((value,)):
        return False
    return not (isinstance(value, tuple) and hasattr(value, "_fields"))


def pytree_category(value: object) -> Category | None:
    """What sort of container a node is; None for what is none."""
    if not is_pytree(value):
        return None
    try:
        return open_pytree(value, "").category
    except SavestreamError:  # raised again, with its name, when its contents are asked for
        return "sequence"


def open_pytree(value: Any, key: str) -> PytreeNode:
    """Look into a node; ``key`` names it in errors.

    Raises
    ------
    PlanError
        JAX cannot look into it, or two of its children have the same key.
    """
    tree_util = sys.modules["jax.tree_util"]
    first = itertools.chain(
        (False,), itertools.repeat(True)
    )  # stop at the children, even at one that is the node itself
    try:
        pairs, definition = tree_util.tree_flatten_with_path(value, is_leaf=lambda _: next(first))
    except Exception as error:  # from the function that was registered with the class
        raise PlanError(f"{key or 'the state'}: JAX cannot look into {_described(value)}: {error}") from error
    keys = [path[0] for path, _ in pairs]
    children = [child for _, child in pairs]
    if all(isinstance(entry, tree_util.DictKey) for entry in keys) and (keys or isinstance(value, Mapping)):
        found = PytreeNode("mapping", [entry.key for entry in keys], children, definition)
    elif _are_names(keys) and (keys or dataclasses.is_dataclass(value)):
        found = PytreeNode("record", [entry.name for entry in keys], children, definition)
    else:
        return PytreeNode("sequence", range(len(keys)), children, definition)
    _check_distinct(value, found.parts, key)
    return found


def _are_names(keys: Sequence[Any]) -> bool:
    attribute = sys.modules["jax.tree_util"].GetAttrKey
    return all(isinstance(entry, attribute) and type(entry.name) is str for entry in keys)


def _check_distinct(value: object, parts: Sequence[Any], key: str) -> None:
    try:
        repeated = len(set(parts)) < len(parts)
    except TypeError as error:
        raise PlanError(
            f"{key or 'the state'}: {_described(value)} has a key that cannot be one of a dict: {error}"
        ) from error
    if repeated:
        name = next(part for part, count in collections.Counter(parts).items() if count > 1)
        raise PlanError(
            f"{key or 'the state'}: {_described(value)} has two children under the key {name!r}, of which one would be "
            "lost; register it with keys that differ"
        )


def rebuild_pytree(value: Any, changes: Mapping[Any, Any]) -> Any:
    """A node like ``value``, static data included, with other children; ``changes`` maps parts to them."""
    node = open_pytree(value, "")
    children = [changes.get(part, child) for part, child in zip(node.parts, node.children, strict=True)]
    try:
        return sys.modules["jax.tree_util"].tree_unflatten(node.definition, children)
    except Exception as error:  # from the function that was registered with the class
        raise PlanError(f"JAX cannot build {_described(value)} anew: {error}") from error


def _described(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
