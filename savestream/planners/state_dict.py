"""Flattening a state to named leaves and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from savestream.errors import PlanError
from savestream.planners.flattening import FlatState, flatten
from savestream.planners.paths import Index, Path
from savestream.planners.rebuilding import rebuild_from_tree
from savestream.planners.structure import StateTree
from savestream.planners.trees import structure_for_items, tree_mappings

__all__ = [
    "FlatState",
    "flatten_state_dict",
    "structure_for_items",
    "tree_mappings",
    "unflatten_state_dict",
]


def flatten_state_dict(state_dict: Any) -> tuple[dict[str, Any], dict[str, Path]]:
    """Flatten a state of nested containers.

    Returns
    -------
    leaves, mappings
        Fqn to leaf and fqn to typed path. A leaf is an array, a sharded array, or a subtree of plain values only.

    Raises
    ------
    UnsafeObjectError
        A leaf cannot be stored; the message names its key.
    PlanError
        A container contains itself, or containers nest too deeply.
    """
    flat = flatten(state_dict)
    return dict(zip(flat.names, flat.leaves, strict=True)), tree_mappings(flat.tree())


def unflatten_state_dict(
    state_dict: Mapping[str, Any],
    mappings: Mapping[str, Path],
    *,
    tree: StateTree | None = None,
    types: Sequence[type] = (),
) -> Any:
    """Nest leaves again.

    With ``tree`` the result has the recorded containers (``types`` gives the classes of namedtuples and dataclasses).
    Without, positions make lists and everything else makes dicts.

    Raises
    ------
    PlanError
        A mapping is missing, or paths contradict each other.
    """
    if tree is not None:
        return rebuild_from_tree(tree, state_dict, types=types)
    missing = [name for name in state_dict if name not in mappings]
    if missing:
        raise PlanError(f"{missing[0]!r} has no path in the mappings")
    return _nest([(mappings[name], leaf) for name, leaf in state_dict.items()], 0)


def _nest(entries: list[tuple[Path, Any]], depth: int) -> Any:
    if len(entries) == 1 and len(entries[0][0]) == depth:
        return entries[0][1]
    groups: dict[tuple[type, object], list[tuple[Path, Any]]] = {}
    for path, leaf in entries:
        if len(path) <= depth:
            raise PlanError(f"the path {path} leads to a leaf and to a container")
        groups.setdefault((type(path[depth]), path[depth]), []).append((path, leaf))
    content = {part: _nest(group, depth + 1) for (_, part), group in groups.items()}
    positions = sorted(part.position for part in content if isinstance(part, Index))
    if not positions:
        return content
    if len(positions) != len(content) or positions != list(range(len(positions))):
        raise PlanError(f"the positions {positions} do not number a list from 0 on")
    return [content[Index(position)] for position in positions]
