"""What a checkpoint holds under the names that DCP knows: tensors, bytes of a planner's, and values of savestream's.

Checkpoints that DCP wrote say how their names and paths are to be read (see :mod:`.extras`). In others every leaf gets
the name and path that DCP's flattening would give it: values in dicts, and in lists that hold dicts, one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.integrations.dcp.extras import Extras
from savestream.integrations.dcp.nesting import DcpPath, dcp_name, dcp_path, tree_paths
from savestream.pipeline.open_checkpoint import OpenCheckpoint
from savestream.planners.paths import Index, Path, path_to_fqn
from savestream.planners.recorded import RecordedDataclass
from savestream.planners.trees import tree_mappings

__all__ = ["Leaf", "LeafSource", "Leaves", "find_leaves"]

LeafSource = Literal["tensor", "bytes", "value"]


class Leaf(msgspec.Struct):
    """A leaf by DCP's name.

    Attributes
    ----------
    fqn, path
        DCP's name and path; the path is None where the planner kept none.
    source
        ``"tensor"`` and ``"bytes"`` are stored like arrays, under ``name``; a ``"value"`` is here.
    """

    fqn: str
    path: DcpPath | None
    source: LeafSource
    name: str = ""
    value: Any = None


class Leaves(msgspec.Struct):
    """All leaves in order, the planner's data, and the fqns of tensors that required gradients."""

    leaves: list[Leaf]
    planner_data: Any
    requires_grad: frozenset[str]


def find_leaves(checkpoint: OpenCheckpoint, values: Mapping[str, Any], extras: Extras | None) -> Leaves:
    """The leaves of an opened checkpoint.

    Parameters
    ----------
    values
        The decoded values, by savestream's name.
    extras
        What DCP recorded, where it wrote the checkpoint.
    """
    if extras is None:
        leaves = _unambiguous(list(_native(checkpoint, values)))
        return Leaves(leaves, {leaf.fqn: leaf.path for leaf in leaves}, frozenset())
    leaves = list(_recorded(checkpoint, values, extras))
    paths = {leaf.fqn: leaf.path for leaf in leaves}
    if len(paths) != len(leaves):
        raise CorruptCheckpointError(f"{checkpoint.place}: two leaves have the same name for torch")
    tensors = [leaf.fqn for leaf in leaves if leaf.source == "tensor"]
    numbered = dict(enumerate(leaf.fqn for leaf in leaves))
    requires_grad = frozenset(numbered.get(number, "") for number in extras.requires_grad) & frozenset(tensors)
    return Leaves(leaves, paths if extras.paths_from_tree else extras.planner_data, requires_grad)


def _recorded(checkpoint: OpenCheckpoint, values: Mapping[str, Any], extras: Extras) -> Iterator[Leaf]:
    """Leaves of a checkpoint that DCP wrote, in the order of its metadata."""
    mappings = tree_mappings(checkpoint.root.plan.tree)
    paths = tree_paths(mappings)
    explicit = _explicit_names(extras)
    for name, source in _stored(checkpoint, values):
        path = paths[name]
        fqn = explicit.get(path, dcp_name(path)) if extras.nested else str(mappings[name][0])
        yield Leaf(fqn, path if extras.nested else None, source, name)
    for name, value in values.items():  # only where savestream saved again what it had loaded
        for typed, inner in _flattened(mappings[name], value):
            path = dcp_path(typed)
            yield Leaf(explicit.get(path, dcp_name(path)), path, "value", name, inner)


def _explicit_names(extras: Extras) -> dict[Any, str]:
    """Names by path where the planner did not name leaves by their paths."""
    if extras.paths_from_tree or not extras.nested or not isinstance(extras.planner_data, Mapping):
        return {}
    return {path: name for name, path in extras.planner_data.items() if isinstance(path, tuple)}


def _stored(checkpoint: OpenCheckpoint, values: Mapping[str, Any]) -> Iterator[tuple[str, LeafSource]]:
    plan = checkpoint.root.plan
    for name, kind in zip(plan.tensor_names, plan.tensors.kind.tolist(), strict=True):
        if name not in values:
            yield name, "bytes" if kind else "tensor"


def _native(checkpoint: OpenCheckpoint, values: Mapping[str, Any]) -> Iterator[Leaf]:
    """Leaves of a checkpoint that savestream itself saved, in the order of its state."""
    sources = dict(_stored(checkpoint, values))
    for name, path in tree_mappings(checkpoint.root.plan.tree).items():
        if name in sources:
            yield Leaf(dcp_name(dcp_path(path)), dcp_path(path), sources[name], name)
            continue
        for inner, value in _flattened(path, values[name]):
            yield Leaf(dcp_name(dcp_path(inner)), dcp_path(inner), "value", path_to_fqn(inner), value)


def _flattened(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """What DCP's flattening makes of a plain value: dicts are entered, and lists that hold a dict somewhere."""
    if isinstance(value, Mapping) and not isinstance(value, RecordedDataclass):
        for key, item in value.items():
            yield from _flattened((*path, key), item)
    elif isinstance(value, list) and _holds_mapping(value):
        for position, item in enumerate(value):
            yield from _flattened((*path, Index(position)), item)
    else:
        yield path, value


def _holds_mapping(value: list[Any]) -> bool:
    return any(isinstance(item, Mapping) or (isinstance(item, list) and _holds_mapping(item)) for item in value)


def _unambiguous(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Leaves whose name or path clashes with another's get savestream's own name, which no two leaves share."""
    names = Counter(leaf.fqn for leaf in leaves)
    paths = Counter(leaf.path for leaf in leaves)
    inner = {leaf.path[:length] for leaf in leaves if leaf.path for length in range(len(leaf.path))}
    found = []
    for leaf in leaves:
        if names[leaf.fqn] > 1 or paths[leaf.path] > 1 or leaf.path in inner:
            found.append(msgspec.structs.replace(leaf, fqn=leaf.name, path=(leaf.name,)))
        else:
            found.append(leaf)
    twice = [name for name, count in Counter(leaf.fqn for leaf in found).items() if count > 1]
    if twice:
        raise PlanError(
            f"{twice[0]!r}: several leaves of this checkpoint have that name for torch; load it with savestream.load"
        )
    return found
