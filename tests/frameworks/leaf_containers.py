"""Every container that a leaf may lie in, beside a plain value, and what such containers come back as."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from savestream import RecordedDataclass, RecordedTuple

__all__ = ["ALONE", "CONTAINERS", "RECORD_TYPES", "Box", "Container", "Pair", "leaf_of", "outline"]


class Pair(NamedTuple):
    leaf: Any
    marker: object


@dataclasses.dataclass
class Box:
    marker: object
    leaf: Any


RECORD_TYPES = (Pair, Box)


class Container(NamedTuple):
    """A container by name; ``wrap`` makes one of a leaf and a plain value."""

    name: str
    wrap: Callable[[Any, object], Any]


def _odd_keys(leaf: Any, marker: object) -> Any:
    return {
        "a.b": {"": {None: {2.5: {("t", 1): {b"\0": {"ä[0]\\": leaf}}}}}},
        "a": {"b": marker, True: [], 1.5: ()},
    }


ALONE = Container("alone", lambda leaf, marker: leaf)
CONTAINERS: tuple[Container, ...] = (
    Container("dict", lambda leaf, marker: {"leaf": leaf, "marker": marker}),
    Container("list", lambda leaf, marker: [marker, leaf]),
    Container("tuple", lambda leaf, marker: (leaf, marker)),
    Container("namedtuple", Pair),
    Container("dataclass", lambda leaf, marker: Box(marker, leaf)),
    Container("OrderedDict", lambda leaf, marker: collections.OrderedDict(second=marker, first=leaf)),
    Container("defaultdict", lambda leaf, marker: collections.defaultdict(list, {"leaf": leaf, "marker": marker})),
    Container("Counter", lambda leaf, marker: collections.Counter({"leaf": leaf, "marker": marker})),
    Container("deque", lambda leaf, marker: collections.deque([leaf, marker], maxlen=5)),
    Container("int keys", lambda leaf, marker: {0: {-7: [({2**70: leaf},)], 3: marker}, "0": "zero"}),
    Container("odd keys", _odd_keys),
    ALONE,
)
_LEAF = object()


def outline(tree: Any, leaf: Any, *, known_types: bool = True) -> object:
    """A tree as nested tuples of classes, keys in order and values; ``leaf`` is a mark.

    Where the classes of records were not given, what stands for them carries their names.
    """
    if tree is leaf:
        return _LEAF
    kind = type(tree)
    if isinstance(tree, RecordedTuple | RecordedDataclass):
        names = tree._fields if isinstance(tree, RecordedTuple) else tuple(tree)
        values = tuple(tree) if isinstance(tree, RecordedTuple) else tuple(tree.values())
        return kind, tree.type_name, names, tuple(outline(value, leaf) for value in values)
    if kind in RECORD_TYPES:
        names = Pair._fields if kind is Pair else tuple(field.name for field in dataclasses.fields(Box))
        values = tuple(outline(getattr(tree, name), leaf, known_types=known_types) for name in names)
        recorded = kind if known_types else RecordedTuple if kind is Pair else RecordedDataclass
        return recorded, f"{kind.__module__}:{kind.__qualname__}", names, values
    if isinstance(tree, dict):
        extra = tree.default_factory if kind is collections.defaultdict else None
        entries = [(type(key), key, outline(value, leaf, known_types=known_types)) for key, value in tree.items()]
        return kind, extra, tuple(entries)
    if isinstance(tree, list | tuple | collections.deque):
        extra = tree.maxlen if kind is collections.deque else None
        return kind, extra, tuple(outline(value, leaf, known_types=known_types) for value in tree)
    return kind, tree


def leaf_of(tree: Any) -> Any:
    """The one array in a tree: the one thing that is neither a container nor a plain value."""
    found = list(_leaves(tree))
    assert len(found) == 1, f"{len(found)} leaves in {tree!r}"
    return found[0]


def _leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        children = list(tree.values())
    elif isinstance(tree, list | tuple | collections.deque):
        children = list(tree)
    elif isinstance(tree, Box):
        children = [tree.marker, tree.leaf]
    elif tree is None or isinstance(tree, int | str):
        return
    else:
        yield tree
        return
    for child in children:
        yield from _leaves(child)
