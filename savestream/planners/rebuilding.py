"""Putting loaded leaves back: into a target, or into new containers."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from savestream.planners.containers import (
    ABSENT,
    SEQUENCES,
    assemble,
    category_of,
    contents,
    has_str_keys,
    is_replaced,
    put_contents,
    refill_sequence,
)
from savestream.planners.framework_values import adopting_form, adoption_problem
from savestream.planners.paths import Index, Path, part_text
from savestream.planners.recorded import RecordedEnum, class_name, index_types, rebuild_enum
from savestream.planners.scalars import array_of_number, takes_number
from savestream.planners.structure import LeafNode, MappingNode, StateTree
from savestream.planners.trees import node_parts
from savestream.planners.value_encoding import encode_value_bytes

__all__ = ["Filled", "merge_value", "nest_picked", "pick", "rebuild_from_tree", "rebuild_into", "replace_at"]


def rebuild_from_tree(tree: StateTree, leaves: Mapping[str, Any], *, types: Sequence[type] = ()) -> Any:
    """New containers as recorded, with ``leaves`` (by fqn) in them.

    Namedtuples and dataclasses are rebuilt where ``types`` has their class, and are ``RecordedTuple`` and
    ``RecordedDataclass`` elsewhere.
    """
    known = index_types(types)

    def build(node: StateTree) -> Any:
        if type(node) is LeafNode:
            return leaves[node.fqn]
        children = [build(child) for child in node.children]  # type: ignore[union-attr]
        return assemble(node, children, known)  # type: ignore[arg-type]

    return build(tree)


def rebuild_into(target: Any, tree: StateTree, leaves: Mapping[str, Any]) -> Any:
    """Put ``leaves`` (by fqn) into ``target`` and return it.

    Dicts, lists, deques and unfrozen dataclasses are changed in place; tuples, namedtuples and frozen dataclasses are
    made anew by the target's own class where one of their elements changed, and so are JAX's pytree nodes, with their
    static data. Places without a leaf are left alone.
    """
    if isinstance(tree, LeafNode):
        return leaves.get(tree.fqn, target)
    category = category_of(target)
    if category is None:
        return target
    if isinstance(tree, MappingNode) and has_str_keys(target, tree):
        return _rebuild_dict(target, tree, leaves)
    parts, children = contents(target, category, "")
    places = {part_text(part): (part, child) for part, child in zip(parts, children, strict=True)}
    changes: dict[Any, Any] = {}
    for part, node in zip(node_parts(tree), tree.children, strict=True):
        place = places.get(part_text(part))
        if place is None:
            continue
        own, child = place
        rebuilt = leaves.get(node.fqn, child) if type(node) is LeafNode else rebuild_into(child, node, leaves)
        if rebuilt is not child:
            changes[_subscript(own)] = rebuilt
    return put_contents(target, category, changes)


def _rebuild_dict(target: dict[str, Any], tree: MappingNode, leaves: Mapping[str, Any]) -> Any:
    """The usual case, without a text for each entry."""
    for key, node in zip(tree.keys, tree.children, strict=True):
        child = target.get(key, ABSENT)  # type: ignore[call-overload]  # all keys are str
        if child is ABSENT:
            continue
        rebuilt = leaves.get(node.fqn, child) if type(node) is LeafNode else rebuild_into(child, node, leaves)
        if rebuilt is not child:
            target[key] = rebuilt  # type: ignore[index]
    return target


Filled: TypeAlias = dict[int, tuple[Any, Any]]  # by identity: a container of the target, and the value that it took


def merge_value(target: Any, saved: Any, filled: Filled | None = None) -> Any:
    """A saved plain value in the target's containers.

    Containers keep the target's class and identity. A sequence takes the saved length: a history that has grown since
    comes back whole. Of mappings and records, entries that only the target has stay, and those that only the saved
    value has are ignored. A random generator takes over the saved one's state. An array of no dimension that cannot be
    changed is replaced by one of the saved number. Where nothing can be matched, the saved value itself is the result.

    ``filled`` is what earlier merges of the same load have filled. A container or generator that the target holds at
    several places stays shared where all take the same value; where they do not, the later ones get one of their own.
    """
    filled = {} if filled is None else filled
    form = adopting_form(target)
    if form is not None and adoption_problem(target, saved) is None:
        if _takes_another(target, saved, filled):
            return saved
        form.adopt(target, saved)
        return target
    if takes_number(target, saved):
        return array_of_number(target, saved)
    if isinstance(saved, RecordedEnum) and isinstance(target, enum.Enum):
        same = class_name(type(target)) == saved.type_name
        return rebuild_enum(type(target), saved.name, saved.value) if same else saved
    category = category_of(target)
    if category is None or category != category_of(saved):
        return saved
    parts, children = contents(saved, category, "")
    target = _unshared(target, saved, filled)
    if type(target) in SEQUENCES and len(target) != len(children):
        merged = [merge_value(own, child, filled) for own, child in zip(target, children, strict=False)]
        return refill_sequence(target, [*merged, *children[len(merged) :]])
    values = {part_text(part): child for part, child in zip(parts, children, strict=True)}
    changes: dict[Any, Any] = {}
    for own, child in zip(*contents(target, category, ""), strict=True):
        if (text := part_text(own)) in values:
            merged = merge_value(child, values[text], filled)
            if merged is not child:
                changes[_subscript(own)] = merged
    return put_contents(target, category, changes)


def _unshared(target: Any, saved: Any, filled: Filled) -> Any:
    """The container itself, or a copy where another place of the target holds it too and took another value."""
    if is_replaced(target):
        return target
    return copy.copy(target) if _takes_another(target, saved, filled) else target


def _takes_another(target: Any, saved: Any, filled: Filled) -> bool:
    """Whether another place of the target holds the same object and took another value than ``saved``."""
    _, taken = filled.setdefault(id(target), (target, saved))
    return taken is not saved and _encoded(taken) != _encoded(saved)


def _encoded(value: Any) -> bytes:
    return encode_value_bytes(value, "", allow_pickle=True)  # only to compare exactly; never stored, never unpickled


def pick(value: Any, path: Path) -> Any:
    """The element of a plain value at ``path``; ``LookupError`` where there is none."""
    for part in path:
        category = category_of(value)
        if category is None:
            raise LookupError(part)
        wanted = part_text(part)
        matches = [child for own, child in zip(*contents(value, category, ""), strict=True) if part_text(own) == wanted]
        if not matches:
            raise LookupError(part)
        value = matches[0]
    return value


def replace_at(target: Any, path: Path, value: Any) -> Any:
    """``target`` with the element at ``path`` replaced; immutable containers on the way are made anew."""
    if not path:
        return merge_value(target, value)
    category = category_of(target)
    if category is not None:
        for own, child in zip(*contents(target, category, ""), strict=True):
            if part_text(own) == part_text(path[0]):
                replaced = replace_at(child, path[1:], value)
                changes = {} if replaced is child else {_subscript(own): replaced}
                return put_contents(target, category, changes)
    raise LookupError(path[0])


def _subscript(part: object) -> Any:
    return part.position if isinstance(part, Index) else part


def nest_picked(value: Any, paths: Sequence[Path]) -> Any:
    """The elements of a plain value at some paths, as nested dicts that keep only these."""
    picked: dict[Any, Any] = {}
    for path in paths:
        inner = picked
        for part in path[:-1]:
            inner = inner.setdefault(_subscript(part), {})
        inner[_subscript(path[-1])] = pick(value, path)
    return picked
