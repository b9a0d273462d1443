"""From the paths of DCP's flattened names to a recorded tree and back, and names for what savestream saved itself.

DCP knows a leaf by its *fqn*, the parts of its path joined by dots, which says neither where a part ends nor whether it
was a position. Its planners keep the path beside it: str for a dict's key, int for a list's position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from savestream.planners.paths import Index, path_to_fqn
from savestream.planners.structure import LeafNode, MappingNode, SequenceNode, StateTree
from savestream.planners.value_encoding import MAXIMUM_DEPTH

__all__ = ["DcpPath", "dcp_name", "dcp_path", "flat_tree", "nested_tree", "tree_paths"]

DcpPath: TypeAlias = tuple[str | int, ...]
_Branch: TypeAlias = dict[str | int, Any]  # to branches, and to numbers of leaves


def dcp_name(path: Sequence[object]) -> str:
    """The fqn that DCP makes of a path."""
    return ".".join(map(str, path))


def dcp_path(path: Sequence[object]) -> DcpPath:
    """A typed path as DCP writes it: positions are ints; other keys than str are text, as its flattening makes them."""
    return tuple([part.position if isinstance(part, Index) else str(part) for part in path])


def flat_tree(names: Iterable[str]) -> tuple[StateTree, list[str]]:
    """A dict from each name, as it stands, to its leaf; and the leaves' names in savestream's spelling."""
    keys = tuple(names)
    stored = [path_to_fqn((key,)) for key in keys]
    return MappingNode("dict", keys, tuple([LeafNode(name) for name in stored])), stored


def nested_tree(paths: Sequence[object]) -> tuple[StateTree, list[str]] | None:
    """The tree of dicts and lists that the paths describe, and each leaf's name in savestream's spelling, in order.

    A list of which some positions are missing (DCP drops empty dicts) becomes a dict from position to element. None
    where the paths describe no tree: one is no path at all, leads into a leaf, repeats another, mixes keys and
    positions in one container, or nests too deeply.
    """
    root: _Branch = {}
    for leaf, path in enumerate(paths):
        if not isinstance(path, tuple) or not _is_path(path) or not _insert(root, path, leaf):
            return None
    names = [""] * len(paths)
    return _finished(root, (), names, is_root=True), names


def _is_path(path: tuple[object, ...]) -> bool:
    return 0 < len(path) <= MAXIMUM_DEPTH and {type(part) for part in path} <= {str, int}


def _insert(root: _Branch, path: DcpPath, leaf: int) -> bool:
    """Put a leaf in its place; False where it has none."""
    branch = root
    for part in path[:-1]:
        if _differs(branch, part):
            return False
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            return False
    if _differs(branch, path[-1]) or path[-1] in branch:
        return False
    branch[path[-1]] = leaf
    return True


def _differs(branch: _Branch, part: str | int) -> bool:
    return bool(branch) and type(next(iter(branch))) is not type(part)


def _finished(branch: _Branch, path: tuple[object, ...], names: list[str], *, is_root: bool = False) -> StateTree:
    keys: list[Any] = list(branch)
    is_list = bool(keys) and not is_root and type(keys[0]) is int and sorted(keys) == list(range(len(keys)))
    if is_list:
        keys.sort()
    children = tuple([_child(branch[key], (*path, Index(key) if is_list else key), names) for key in keys])
    return SequenceNode("list", children) if is_list else MappingNode("dict", tuple(keys), children)


def _child(inner: Any, path: tuple[object, ...], names: list[str]) -> StateTree:
    if isinstance(inner, dict):
        return _finished(inner, path, names)
    names[inner] = path_to_fqn(path)
    return LeafNode(names[inner])


def tree_paths(mappings: Mapping[str, Sequence[object]]) -> dict[str, DcpPath]:
    """DCP's path of each leaf that :func:`nested_tree` named; the ints of a list with gaps stay ints."""
    return {
        name: tuple([part.position if isinstance(part, Index) else part for part in path])  # type: ignore[misc]
        for name, path in mappings.items()
    }
