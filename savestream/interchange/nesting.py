"""From keys with paths to nested dicts and lists."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

from savestream.errors import CorruptCheckpointError

__all__ = ["Path", "nest"]

Path: TypeAlias = tuple[str | int, ...]

_MAXIMUM_DEPTH = 128
_MAXIMUM_ABSENT = 1 << 16
# States have far fewer containers than leaves; paths of contradicting depth could make many for each.
_CONTAINERS_FOR_ALL = 100_000
_CONTAINERS_PER_LEAF = 8


class _Node:
    """A container that is being filled: a dict where its keys are text, a list where they are positions."""

    __slots__ = ("children", "kind")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.children: dict[str | int, Any] = {}


def nest(leaves: Mapping[str, object], paths: Mapping[str, Path]) -> dict[str, Any]:
    """The state whose leaves are at these paths.

    A text is a key of a dict, a number a position in a list. Positions that nothing is at hold None: whoever wrote the
    paths left out what held no leaf.

    Raises
    ------
    CorruptCheckpointError
        Two paths contradict each other, or one is deeper or further along a list than any state is.
    """
    tree = _Tree(_CONTAINERS_FOR_ALL + _CONTAINERS_PER_LEAF * len(leaves))
    for key, leaf in leaves.items():
        tree.insert(key, paths[key], leaf)
    built: dict[str, Any] = tree.build(tree.root)
    return built


class _Tree:
    """Containers beneath a dict, in bounded number, and with a bounded number of positions that nothing is at."""

    def __init__(self, maximum_containers: int) -> None:
        self.root = _Node(str)
        self._containers_left = maximum_containers
        self._absent_left = _MAXIMUM_ABSENT

    def insert(self, key: str, path: Path, leaf: object) -> None:
        """Put a leaf where its path leads."""
        if len(path) > _MAXIMUM_DEPTH:
            raise CorruptCheckpointError(f"{key}: its path is {len(path)} levels deep; up to {_MAXIMUM_DEPTH} are read")
        node = self.root
        for part, following in itertools.pairwise(path):
            _check_part(key, node, part)
            child = node.children.get(part)
            if child is None and part not in node.children:
                child = node.children[part] = self._new_node(key, type(following))
            if type(child) is not _Node:
                raise CorruptCheckpointError(f"{key}: its path {path} leads through another entry")
            node = child
        _check_part(key, node, path[-1])
        if path[-1] in node.children:
            raise CorruptCheckpointError(f"{key}: its path {path} is that of another entry, or leads to others")
        node.children[path[-1]] = leaf

    def _new_node(self, key: str, kind: type) -> _Node:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise CorruptCheckpointError(f"{key}: the paths up to here make far more containers than there are entries")
        return _Node(kind)

    def build(self, node: _Node) -> Any:
        """The container that a node stands for."""
        if node.kind is not str:
            self._count_absent(node)
        children = {part: self.build(child) if type(child) is _Node else child for part, child in node.children.items()}
        if node.kind is str:
            return children
        return [children.get(position) for position in range(max(children) + 1)]  # type: ignore[operator]

    def _count_absent(self, node: _Node) -> None:
        last = max(node.children)
        self._absent_left -= last + 1 - len(node.children)  # type: ignore[operator]
        if self._absent_left < 0:
            raise CorruptCheckpointError(
                f"its paths leave out more than {_MAXIMUM_ABSENT} list positions; the last of this list is {last}"
            )


def _check_part(key: str, node: _Node, part: str | int) -> None:
    if type(part) is not node.kind:
        raise CorruptCheckpointError(f"{key}: its path has {part!r} among {node.kind.__name__} keys of other entries")
    if isinstance(part, int) and (part < 0 or part > len(node.children) + _MAXIMUM_ABSENT):
        raise CorruptCheckpointError(f"{key}: its path has the list position {part}, far from all others")
