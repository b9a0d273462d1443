"""Recorded trees: paths of leaves, merging the ranks' trees, fitting a tree to renamed or skipped items."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from savestream.errors import CorruptCheckpointError, PlanError
from savestream.planners.paths import Index, Path, parse_fqn, part_text, path_to_fqn
from savestream.planners.state_metadata import merge_metadata
from savestream.planners.structure import LeafNode, MappingNode, RecordNode, SequenceNode, StateTree
from savestream.planners.value_encoding import MAXIMUM_DEPTH

__all__ = [
    "flat_keys",
    "leaf_names",
    "merge_trees",
    "node_parts",
    "prune_tree",
    "structure_for_items",
    "tree_from_names",
    "tree_mappings",
]

Container: TypeAlias = MappingNode | SequenceNode | RecordNode


def node_parts(node: Container) -> Sequence[object]:
    """The path part that leads to each child of a node."""
    if isinstance(node, MappingNode):
        return node.keys
    if isinstance(node, RecordNode):
        return node.fields
    return [Index(position) for position in range(len(node.children))]


def tree_mappings(tree: StateTree | None) -> dict[str, Path]:
    """The typed path of each leaf, by fqn, in order; empty without a tree.

    Raises
    ------
    CorruptCheckpointError
        Two leaves have the same name, or the tree nests too deeply.
    """
    mappings: dict[str, Path] = {}
    if tree is not None and _collect(tree, (), mappings) != len(mappings):
        raise CorruptCheckpointError("the recorded structure names a leaf twice")
    return mappings


def _collect(node: StateTree, path: Path, mappings: dict[str, Path]) -> int:
    if type(node) is LeafNode:
        mappings[node.fqn] = path
        return 1
    if len(path) > MAXIMUM_DEPTH:
        raise CorruptCheckpointError(f"the recorded structure nests more than {MAXIMUM_DEPTH} levels deep")
    container: Container = node  # type: ignore[assignment]
    count = 0
    for part, child in zip(node_parts(container), container.children, strict=True):
        if type(child) is LeafNode:
            mappings[child.fqn] = (*path, part)
            count += 1
        else:
            count += _collect(child, (*path, part), mappings)
    return count


def leaf_names(tree: StateTree) -> list[str]:
    """Fqns of a tree's leaves, in order."""
    if isinstance(tree, LeafNode):
        return [tree.fqn]
    return [name for child in tree.children for name in leaf_names(child)]


def merge_trees(trees: Sequence[StateTree | None]) -> StateTree | None:
    """One tree with the leaves of all ranks: entries of dicts are united, everything else must agree.

    Raises
    ------
    PlanError
        Two ranks have different containers, or sequences of different lengths, at the same place.
    """
    merged: StateTree | None = None
    for rank, tree in enumerate(trees):
        if tree is None or merged is tree:
            continue
        merged = tree if merged is None or merged == tree else _merge(merged, tree, rank, ())
    return merged


def _merge(first: StateTree, second: StateTree, rank: int, path: Path) -> StateTree:
    if first == second:
        return first
    if isinstance(first, MappingNode) and isinstance(second, MappingNode):
        if first.kind == second.kind and (first.extra == second.extra or first.kind == "OrderedDict"):
            return _merge_mappings(first, second, rank, path)
    elif type(first) is type(second) and not isinstance(first, LeafNode) and _same_shape(first, second):
        inner = zip(node_parts(first), first.children, second.children, strict=True)  # type: ignore[union-attr]
        children = tuple([_merge(a, b, rank, (*path, part)) for part, a, b in inner])
        return msgspec.structs.replace(first, children=children)
    raise PlanError(
        f"{path_to_fqn(path) or 'the state'}: rank {rank} holds {_describe(second)} where an earlier rank holds "
        f"{_describe(first)}; ranks may differ only in which dict entries they hold"
    )


def _merge_mappings(first: MappingNode, second: MappingNode, rank: int, path: Path) -> MappingNode:
    entries = {part_text(key): (key, child) for key, child in zip(first.keys, first.children, strict=True)}
    for key, child in zip(second.keys, second.children, strict=True):
        text = part_text(key)
        if text in entries:
            child = _merge(entries[text][1], child, rank, (*path, key))
        entries[text] = (entries[text][0] if text in entries else key, child)
    keys, children = zip(*entries.values(), strict=True) if entries else ((), ())
    extra = merge_metadata(first.extra, second.extra) if first.kind == "OrderedDict" else first.extra
    return MappingNode(first.kind, tuple(keys), tuple(children), extra)


def _same_shape(first: StateTree, second: StateTree) -> bool:
    if isinstance(first, SequenceNode) and isinstance(second, SequenceNode):
        lengths = (len(first.children), len(second.children))
        return first.kind == second.kind and first.max_length == second.max_length and lengths[0] == lengths[1]
    if isinstance(first, RecordNode) and isinstance(second, RecordNode):
        return (first.kind, first.type_name, first.fields) == (second.kind, second.type_name, second.fields)
    return False


def _describe(node: StateTree) -> str:
    if isinstance(node, LeafNode):
        return "a leaf"
    if isinstance(node, RecordNode):
        return f"a {node.kind} {node.type_name}"
    return f"a {node.kind} of {len(node.children)}"


def structure_for_items(tree: StateTree | None, names: Iterable[str]) -> StateTree:
    """The tree of a plan whose items a planner renamed, added or skipped.

    Leaves that are not among ``names`` are dropped, with the containers that held nothing else; names that are not in
    ``tree`` become entries of dicts and lists at their own path.

    Raises
    ------
    PlanError
        A skipped leaf is an element of a sequence or record, whose other elements must not shift; or a new name
        leads into a leaf, a sequence or a record that is there already, or new names leave a position out.
    """
    wanted = list(dict.fromkeys(names))
    if tree is None:
        return tree_from_names(wanted)
    present = leaf_names(tree)
    if present == wanted:
        return tree
    known = set(present)
    keep = set(wanted)
    pruned = tree if known <= keep else _skip(tree, keep, ())
    return _insert_all(pruned, [name for name in wanted if name not in known])


def tree_from_names(names: Iterable[str]) -> StateTree:
    """A tree of dicts and lists for leaves of which nothing but the names is known."""
    wanted = list(names)
    if wanted == [""]:
        return LeafNode("")
    return _insert_all(MappingNode("dict", (), ()), wanted)


def _skip(node: StateTree, keep: Collection[str], path: Path) -> StateTree | None:
    """The node without leaves outside ``keep``; None where it is such a leaf, or held nothing else."""
    if isinstance(node, LeafNode):
        return node if node.fqn in keep else None
    parts = node_parts(node)
    children = [_skip(child, keep, (*path, part)) for part, child in zip(parts, node.children, strict=True)]
    kept = [(part, child) for part, child in zip(parts, children, strict=True) if child is not None]
    if children and not kept:
        return None
    if len(kept) < len(children) and not isinstance(node, MappingNode):
        gone = next(part for part, child in zip(parts, children, strict=True) if child is None)
        raise PlanError(
            f"{path_to_fqn((*path, gone))}: the plan skips an element of {_describe(node)}, whose other elements would "
            "shift; skip the whole of it, or keep the element"
        )
    if isinstance(node, MappingNode):
        return MappingNode(node.kind, tuple([part for part, _ in kept]), tuple([c for _, c in kept]), node.extra)
    return msgspec.structs.replace(node, children=tuple([child for _, child in kept]))


class _Entries:
    """A mapping node under construction."""

    __slots__ = ("children", "node")

    def __init__(self, node: MappingNode) -> None:
        self.node = node
        self.children: dict[str, tuple[object, StateTree | _Entries]] = {
            part_text(key): (key, child) for key, child in zip(node.keys, node.children, strict=True)
        }

    def finished(self) -> MappingNode | SequenceNode:
        keys = tuple([key for key, _ in self.children.values()])
        children = tuple([c.finished() if isinstance(c, _Entries) else c for _, c in self.children.values()])
        if any(isinstance(key, Index) for key in keys):
            return _new_list(keys, children)
        return MappingNode(self.node.kind, keys, children, self.node.extra)


def _new_list(keys: Sequence[object], children: Sequence[StateTree]) -> SequenceNode:
    """The list to which new names lead; they have to give all of its positions and nothing else."""
    positions = [key.position if isinstance(key, Index) else -1 for key in keys]
    if sorted(positions) != list(range(len(positions))):
        names = [name for child in children for name in leaf_names(child)]
        raise PlanError(
            f"{', '.join(names[:4])}: a name that the plan adds collides with the structure: positions of a sequence "
            "are left out, or mixed with other keys; give every position from [0] on"
        )
    return SequenceNode(
        "list", tuple([child for _, child in sorted(zip(positions, children, strict=True), key=lambda p: p[0])])
    )


def _insert_all(tree: StateTree | None, names: Sequence[str]) -> StateTree:
    if tree is None:
        return tree_from_names(names)
    if not names:
        return tree
    if not isinstance(tree, MappingNode):
        raise PlanError(f"{names[0]}: the plan adds this name, but the state is {_describe(tree)}, not a dict")
    root = _Entries(tree)
    for name in names:
        _insert(root, parse_fqn(name), name)
    return root.finished()


def _insert(entries: _Entries, path: Path, name: str) -> None:
    for position, part in enumerate(path):
        text = part_text(part)
        found = entries.children.get(text)
        last = position == len(path) - 1
        if last and found is not None:
            break
        if last:
            entries.children[text] = (part, LeafNode(name))
            return
        inner = found[1] if found is not None else MappingNode("dict", (), ())
        if isinstance(inner, MappingNode):
            inner = _Entries(inner)
            entries.children[text] = (found[0] if found is not None else part, inner)
        if not isinstance(inner, _Entries):
            break
        entries = inner
    raise PlanError(
        f"{name!r}: the plan adds this name, which collides with the state's structure; new names may only lead to new "
        "entries of dicts, or to new lists"
    )


def prune_tree(tree: StateTree, keep: Collection[str]) -> StateTree:
    """The tree of a selection of leaves.

    Dicts lose their other entries. A sequence or record of which only some elements are selected becomes a dict from
    position or field name to element, so that nothing shifts.
    """
    found = _prune(tree, keep)
    if found is None:
        return MappingNode("dict", (), ())
    return found


def _prune(node: StateTree, keep: Collection[str]) -> StateTree | None:
    if isinstance(node, LeafNode):
        return node if node.fqn in keep else None
    if not node.children:
        return None
    pruned = [_prune(child, keep) for child in node.children]
    kept = [(number, child) for number, child in enumerate(pruned) if child is not None]
    if not kept:
        return None
    children = tuple([child for _, child in kept])
    if isinstance(node, MappingNode):
        keys: tuple[object, ...] = tuple([node.keys[number] for number, _ in kept])
        return MappingNode(node.kind, keys, children, node.extra)
    if len(kept) == len(pruned):
        return msgspec.structs.replace(node, children=children)
    names: Mapping[int, object] = dict(enumerate(node.fields)) if isinstance(node, RecordNode) else {}
    return MappingNode("dict", tuple([names.get(number, number) for number, _ in kept]), children)


def flat_keys(names: Sequence[str], mappings: Mapping[str, Path]) -> tuple[str, ...]:
    """The keys of a state that is not flattened: a top-level str key as it stands, or else the name of the leaf."""
    keys: dict[str, None] = {}
    taken = set(names)
    for name in names:
        path = mappings.get(name, ())
        key = path[0] if len(path) == 1 else None
        keys[key if isinstance(key, str) and key not in taken else name] = None
    return tuple(keys)
