"""Matching a load's target with what a checkpoint holds, leaf by leaf, guided by the saved tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from savestream.arrays import adapter_for, array_refusal
from savestream.errors import SavestreamError
from savestream.planners.containers import ABSENT, SEQUENCES, Category, category_of, contents, has_str_keys
from savestream.planners.flattening import VALUE, flatten
from savestream.planners.framework_values import adoption_problem
from savestream.planners.paths import Path, part_text, path_to_fqn
from savestream.planners.scalars import NUMBERS, takes_number
from savestream.planners.sharding import is_sharded
from savestream.planners.structure import LeafNode, MappingNode, SequenceNode, StateTree
from savestream.planners.trees import Container, node_parts
from savestream.planners.value_encoding import describe_type

__all__ = ["UNKNOWN", "Alignment", "align_state_dict", "compare_value", "is_array_leaf"]

UNKNOWN: Any = object()  # a saved value that has not been read yet


class Alignment:
    """The outcome of matching a target with a tree.

    Attributes
    ----------
    targets
        Saved fqn to the target's object at that place.
    missing, unexpected
        ``(path, fqn)`` of what only the target has, and of what only the checkpoint has.
    problems
        ``(path, text)`` where the two hold things that cannot be matched.
    """

    __slots__ = ("missing", "problems", "targets", "unexpected")

    def __init__(self) -> None:
        self.targets: dict[str, Any] = {}
        self.missing: list[tuple[Path, str]] = []
        self.unexpected: list[tuple[Path, str]] = []
        self.problems: list[tuple[Path, str]] = []

    def mismatch(self, path: Path, saved: str, target: object) -> None:
        """Note that target and checkpoint hold different sorts of things."""
        name = path_to_fqn(path)
        text = f"{name or 'the state'}: the checkpoint has {saved}, the target {_describe(target)}"
        self.problems.append((path, text))


def align_state_dict(
    target: Any,
    tree: StateTree,
    *,
    is_value: Callable[[str], bool],
    value_of: Callable[[str], Any] = lambda _: UNKNOWN,
    number_of: Callable[[str], type | None] = lambda _: None,
) -> Alignment:
    """Match ``target`` with the saved ``tree``; nothing is changed.

    Parameters
    ----------
    target
        Any supported container, or a single leaf.
    tree
        The saved structure.
    is_value
        Whether a saved leaf is a plain value rather than an array.
    value_of
        The decoded saved value of a leaf, or :data:`UNKNOWN`; a known one is compared inside too: dict entries by
        key, sequences by length.
    number_of
        The class of the Python numbers that a saved array of no dimension can stand for, or None.

    Returns
    -------
    Alignment
        Containers match where both are mappings, both sequences or both records; the target's classes win.
    """
    aligner = _Aligner(is_value, value_of, number_of)
    aligner.visit(target, tree, ())
    return aligner.result


def compare_value(target: Any, saved: Any, path: Path) -> Alignment:
    """Compare a target of plain values with a saved value."""
    result = Alignment()
    _compare(target, saved, path, result)
    return result


def is_array_leaf(value: object) -> bool:
    """Whether an object of the target is an array of any kind."""
    if type(value) is np.ndarray:
        return True
    return adapter_for(type(value)) is not None or is_sharded(value)


class _Aligner:
    def __init__(
        self,
        is_value: Callable[[str], bool],
        value_of: Callable[[str], Any],
        number_of: Callable[[str], type | None],
    ) -> None:
        self._is_value = is_value
        self._value_of = value_of
        self._number_of = number_of
        self.result = Alignment()

    def visit(self, target: Any, node: StateTree, path: Path) -> None:
        if isinstance(node, LeafNode):
            self._visit_leaf(target, node.fqn, path)
            return
        category = category_of(target)
        if category != _category_of_node(node):
            self.result.mismatch(path, f"a {node.kind}", target)
            return
        if isinstance(node, MappingNode) and has_str_keys(target, node):
            self._visit_dict(target, node, path)
            return
        targets = _by_text(target, category, path)
        for part, child in zip(node_parts(node), node.children, strict=True):
            found = targets.pop(part_text(part), None)
            if found is None:
                _note_saved(child, (*path, part), self.result)
            elif type(child) is LeafNode:
                self._visit_leaf(found[1], child.fqn, (*path, part))
            else:
                self.visit(found[1], child, (*path, part))
        for part, child in targets.values():
            _note_target(child, (*path, part), self.result)

    def _visit_dict(self, target: dict[str, Any], node: MappingNode, path: Path) -> None:
        """The usual case, without a text or a path for each entry."""
        matched = 0
        for key, child in zip(node.keys, node.children, strict=True):
            found = target.get(key, ABSENT)  # type: ignore[call-overload]  # all keys are str
            if found is ABSENT:
                _note_saved(child, (*path, key), self.result)
                continue
            matched += 1
            if type(child) is not LeafNode:
                self.visit(found, child, (*path, key))
            elif type(found) is np.ndarray and not self._is_value(child.fqn):
                self.result.targets[child.fqn] = found
            else:
                self._visit_leaf(found, child.fqn, (*path, key))
        if matched < len(target):
            known = set(node.keys)
            for own, value in target.items():
                if own not in known:
                    _note_target(value, (*path, own), self.result)

    def _visit_leaf(self, target: Any, name: str, path: Path) -> None:
        if not self._is_value(name):
            if is_array_leaf(target) or (type(target) in NUMBERS and self._number_of(name) is type(target)):
                self.result.targets[name] = target
            else:
                self.result.mismatch(path, "an array", target)
            return
        saved = self._value_of(name)
        if is_array_leaf(target) and not takes_number(target, saved):
            self.result.mismatch(path, "a plain value", target)
        else:
            self.result.targets[name] = target
            if saved is not UNKNOWN:
                _compare(target, saved, path, self.result)
            elif category_of(target) is not None:
                self._note_arrays(target, path)

    def _note_arrays(self, target: Any, path: Path) -> None:
        """Arrays inside a target for which only plain values were saved can never be filled."""
        flat = flatten(target, allow_pickle=True)
        for name, kind in zip(flat.names, flat.kinds, strict=True):
            if kind != VALUE:
                self.result.missing.append((path, path_to_fqn(path) + _joined(name, path)))


def _category_of_node(node: Container) -> Category:
    if isinstance(node, MappingNode):
        return "mapping"
    return "sequence" if isinstance(node, SequenceNode) else "record"


def _by_text(target: Any, category: Category | None, path: Path) -> dict[str, tuple[object, Any]]:
    """Children of a target by the text of their part: 1, 1.0 and True are different keys."""
    if category is None:
        return {}
    parts, children = contents(target, category, path_to_fqn(path))
    return {part_text(part): (part, child) for part, child in zip(parts, children, strict=True)}


def _note_saved(node: StateTree, path: Path, result: Alignment) -> None:
    """List everything beneath a saved node that the target lacks."""
    if isinstance(node, LeafNode):
        result.unexpected.append((path, node.fqn))
        return
    if not node.children:
        result.unexpected.append((path, path_to_fqn(path)))
    for part, child in zip(node_parts(node), node.children, strict=True):
        _note_saved(child, (*path, part), result)


def _note_target(value: Any, path: Path, result: Alignment) -> None:
    """List the leaves beneath a part of the target that the checkpoint lacks."""
    name = path_to_fqn(path)
    try:
        flat = flatten({"": value}, allow_pickle=True)
    except SavestreamError:
        result.missing.append((path, name))
        return
    start = len("[str:]")
    for inner in flat.names:
        result.missing.append((path, name + inner[start:]))


def _joined(name: str, path: Path) -> str:
    return name if not path or not name or name.startswith("[") else "." + name


def _compare(target: Any, saved: Any, path: Path, result: Alignment) -> None:
    if is_array_leaf(target):
        if not takes_number(target, saved):
            result.mismatch(path, "a plain value", target)
        return
    wanted, found = category_of(target), category_of(saved)
    if target is None:  # a placeholder expects nothing
        return
    if (problem := adoption_problem(target, saved)) is not None:
        result.problems.append((path, f"{path_to_fqn(path) or 'the state'}: {problem}"))
        return
    if wanted is None or found is None:
        if wanted is not None or found is not None:
            result.mismatch(path, _describe(saved), target)
        return
    if wanted != found:
        result.mismatch(path, _describe(saved), target)
        return
    targets, values = _by_text(target, wanted, path), _by_text(saved, found, path)
    grows = type(target) in SEQUENCES
    for text, (part, child) in values.items():
        if text in targets:
            _compare(targets[text][1], child, (*path, part), result)
        elif not grows:
            result.unexpected.append(((*path, part), path_to_fqn((*path, part))))
    for text, (part, child) in targets.items():
        if text not in values and (not grows or _holds_arrays(child)):
            _note_target(child, (*path, part), result)


def _holds_arrays(value: Any) -> bool:
    """Whether an array would stay unfilled; sequences of plain values are replaced whole, whatever their lengths."""
    return any(kind != VALUE for kind in flatten({"": value}, allow_pickle=True).kinds)


def _describe(value: object) -> str:
    if is_array_leaf(value):
        return "an array"
    if category_of(value) is not None or value is None:
        return "None" if value is None else f"a {type(value).__name__}"
    if (refusal := array_refusal(value)) is not None:
        return f"an array that cannot be filled ({describe_type(value)}: {refusal})"
    return f"a plain value ({describe_type(value)})"
