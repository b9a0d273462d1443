"""The tree of a state as JSON. Leaves are numbers; names are not stored, since they follow from the paths.

==========================================================  ====================================================
``{"t":i}``, ``{"v":j}``                                    leaf: tensor ``i``, value ``j``
``{"dict":[[key,node],...]}``                               likewise ``OrderedDict``, ``Counter``
``{"OrderedDict":[[key,node],...],"metadata":value}``       one that carries ``_metadata``; ``value`` is encoded
``{"defaultdict":[[key,node],...],"factory":name}``         ``name`` of a builtin, or null
``{"list":[node,...]}``, ``{"tuple":[node,...]}``
``{"deque":[node,...],"maxlen":n}``                         ``n`` or null
``{"namedtuple":[[field,node],...],"type":"module:name"}``  likewise ``dataclass``
==========================================================  ====================================================

A key is a JSON string, or for any other key its :func:`~savestream.planners.values.encode_value` form.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from json.encoder import encode_basestring_ascii
from typing import cast

from savestream.errors import SavestreamError
from savestream.pipeline.limits import MAXIMUM_DEPTH, MAXIMUM_JSON_NESTING, FormatViolation
from savestream.pipeline.strict_json import JsonValue, json_text, member, nesting_depth, parse_json, require
from savestream.planners.paths import part_suffix
from savestream.planners.structure import LeafNode, MappingNode, RecordNode, SequenceNode, StateTree
from savestream.planners.values import decode_value, encode_value

__all__ = ["decode_tree", "encode_tree"]

_MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
_SEQUENCES = frozenset({"list", "tuple", "deque"})
_RECORDS = frozenset({"namedtuple", "dataclass"})
_KINDS = _MAPPINGS | _SEQUENCES | _RECORDS
_LEAVES = frozenset({"t", "v"})


def encode_tree(tree: StateTree, tensor_names: Sequence[str], value_names: Sequence[str]) -> str:
    """JSON text of a tree.

    Parameters
    ----------
    tree
        Each leaf's ``fqn`` must be the text of its path, and stand exactly once in one of the lists.
    tensor_names, value_names
        Position in its list is a leaf's number.

    Raises
    ------
    FormatViolation
        The names do not follow from the tree, or it is too deep.
    """
    return _TreeWriter(tensor_names, value_names).text(tree)


def decode_tree(node: JsonValue) -> tuple[StateTree, list[str], list[str]]:
    """The tree behind parsed JSON, with the names of its tensors and of its values by number.

    Raises
    ------
    FormatViolation
        It is no tree, is too deep, repeats a key, or its leaves are not numbered from 0 without gap.
    """
    reader = _TreeReader()
    tree = reader.read(node, "", 0)
    return tree, _by_number(reader.tensors, "tensor"), _by_number(reader.values, "value")


class _TreeWriter:
    def __init__(self, tensor_names: Sequence[str], value_names: Sequence[str]) -> None:
        self._leaves = {name: f'{{"t":{number}}}' for number, name in enumerate(tensor_names)}
        self._leaves.update((name, f'{{"v":{number}}}') for number, name in enumerate(value_names))
        self._holds_values = False
        require(len(self._leaves) == len(tensor_names) + len(value_names), "two leaves have the same name")

    def text(self, tree: StateTree) -> str:
        text = self._node(tree, "", 0)
        if self._leaves:
            raise FormatViolation(f"{next(iter(self._leaves))!r} is no leaf of the tree")
        if self._holds_values:  # a node nests four deep at most, but a value within it as deep as it likes
            depth = nesting_depth(text.encode()) + 1
            require(depth <= MAXIMUM_JSON_NESTING, f"keys or metadata make the tree nest {depth} deep; flatten them")
        return text

    def _node(self, node: StateTree, name: str, depth: int) -> str:
        if isinstance(node, LeafNode):
            return self._leaf(node, name)
        require(depth < MAXIMUM_DEPTH, f"{name!r} nests more than {MAXIMUM_DEPTH} deep")
        require(node.kind in _KINDS, f"{name!r} is of an unknown kind {node.kind!r}")
        if isinstance(node, SequenceNode):
            extra = f',"maxlen":{json_text(node.max_length)}' if node.kind == "deque" else ""
            return f'{{"{node.kind}":[{",".join(self._items(node, name, depth))}]{extra}}}'
        if isinstance(node, RecordNode):
            _check_unique(node.fields, len(node.children), name)
            extra = f',"type":{encode_basestring_ascii(node.type_name)}'
            return f'{{"{node.kind}":[{",".join(self._pairs(node.fields, node.children, name, depth))}]{extra}}}'
        _check_unique(node.keys, len(node.children), name)
        extra = f',"factory":{json_text(node.extra)}' if node.kind == "defaultdict" else ""
        if node.kind == "OrderedDict" and node.extra is not None:
            extra = f',"metadata":{json_text(parse_json(node.extra.encode()))}'
            self._holds_values = True
        return f'{{"{node.kind}":[{",".join(self._pairs(node.keys, node.children, name, depth))}]{extra}}}'

    def _value(self, value: object, name: str) -> str:
        self._holds_values = True
        return json_text(encode_value(value, name))

    def _leaf(self, node: LeafNode, name: str) -> str:
        if node.fqn != name:
            raise FormatViolation(f"a leaf is called {node.fqn!r}, but its path is {name!r}")
        text = self._leaves.pop(name, None)
        if text is None:
            raise FormatViolation(f"the leaf {name!r} is neither among the tensors nor among the values")
        return text

    def _items(self, node: SequenceNode, name: str, depth: int) -> list[str]:
        return [self._node(child, f"{name}[{position}]", depth + 1) for position, child in enumerate(node.children)]

    def _pairs(self, keys: Sequence[object], children: Sequence[StateTree], name: str, depth: int) -> list[str]:
        pairs = []
        for key, child in zip(keys, children, strict=True):
            key_text = encode_basestring_ascii(key) if type(key) is str else self._value(key, name)
            child_text = self._node(child, name + _suffix(key, not name), depth + 1)
            pairs.append(f"[{key_text},{child_text}]")
        return pairs


class _TreeReader:
    def __init__(self) -> None:
        self.tensors: dict[int, str] = {}
        self.values: dict[int, str] = {}

    def read(self, node: JsonValue, name: str, depth: int) -> StateTree:
        # Messages are made only where they are raised: this runs once for every leaf.
        if type(node) is not dict:
            raise FormatViolation(f"tree: no node at {name!r}")
        kind = _kind_of(node, name)
        body = node[kind]
        if kind in _LEAVES:
            return self._leaf(body, name, self.tensors if kind == "t" else self.values)
        require(depth < MAXIMUM_DEPTH, f"tree: {name[:80]!r} nests more than {MAXIMUM_DEPTH} deep")
        require(type(body) is list, f"tree: {name!r} has no list of members")
        if kind in _SEQUENCES:
            items = tuple([self.read(item, f"{name}[{at}]", depth + 1) for at, item in enumerate(body)])
            return SequenceNode(kind, items, _maximum_length(node.get("maxlen"), len(items), kind, name))
        keys, children = self._pairs(body, name, depth)
        if kind in _MAPPINGS:
            return MappingNode(kind, keys, children, _extra(node, kind, name))
        require(all(type(key) is str for key in keys), f"tree: {name!r} has fields that are no strings")
        return RecordNode(kind, member(node, "type", str), cast("tuple[str, ...]", keys), children)

    def _leaf(self, number: JsonValue, name: str, names: dict[int, str]) -> LeafNode:
        if type(number) is not int or number < 0:
            raise FormatViolation(f"tree: {name!r} has no number")
        if number in names:
            raise FormatViolation(f"tree: {name!r} has the same number {number} as another leaf")
        names[number] = name
        return LeafNode(name)

    def _pairs(self, body: list[JsonValue], name: str, depth: int) -> tuple[tuple[object, ...], tuple[StateTree, ...]]:
        keys: list[object] = []
        children = []
        for pair in body:
            if type(pair) is not list or len(pair) != 2:
                raise FormatViolation(f"tree: {name!r} has a member that is no pair")
            key = pair[0] if type(pair[0]) is str else decode_value(pair[0], key=f"a key of {name!r}")
            suffix = _suffix(key, not name) if type(key) is str else _other_suffix(key, name)
            keys.append(key)
            children.append(self.read(pair[1], name + suffix, depth + 1))
        _check_unique(keys, len(keys), name)
        return tuple(keys), tuple(children)


def _suffix(key: object, first: bool) -> str:
    """:func:`part_suffix`, several times as fast for the keys that nearly all states have."""
    if type(key) is str and key and key.isascii():
        text = key.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")
        return text if first else "." + text
    return part_suffix(key, first=first)


def _kind_of(node: dict[str, JsonValue], name: str) -> str:
    if len(node) == 1:
        (kind,) = node
        if kind in _LEAVES or kind in _KINDS:
            return kind
    kinds = [kind for kind in node if kind in _KINDS or kind in _LEAVES]
    require(len(kinds) == 1, f"tree: the node at {name[:80]!r} is of no known kind: {str(list(node))[:80]}")
    return kinds[0]


def _other_suffix(key: object, name: str) -> str:
    require(isinstance(key, Hashable), f"tree: {name!r} has a key that no mapping can hold")
    try:
        return part_suffix(key, first=not name)
    except SavestreamError as error:
        raise FormatViolation(f"tree: a key of {name!r}: {error}") from error


def _check_unique(keys: Sequence[object], count: int, name: str) -> None:
    require(len(keys) == count, f"{name!r} has {len(keys)} keys for {count} members")
    try:
        unique = len(set(keys)) == count
    except TypeError as error:
        raise FormatViolation(f"{name!r} has a key that no mapping can hold: {error}") from error
    require(unique, f"{name!r} has the same key twice")


def _maximum_length(value: JsonValue, length: int, kind: str, name: str) -> int | None:
    if kind != "deque" or value is None:
        return None
    require(type(value) is int and value >= length, f"tree: {name!r} has a maxlen that is below its length")
    return cast("int", value)


def _extra(node: dict[str, JsonValue], kind: str, name: str) -> str | None:
    if kind == "OrderedDict" and "metadata" in node:
        decode_value(node["metadata"], key=f"the metadata of {name!r}")  # refuses what is no value
        return json_text(node["metadata"])
    factory = node.get("factory") if kind == "defaultdict" else None
    require(factory is None or type(factory) is str, f"tree: {name!r} has a factory that is no name")
    return cast("str | None", factory)


def _by_number(names: dict[int, str], what: str) -> list[str]:
    try:
        return [names[number] for number in range(len(names))]
    except KeyError as error:
        raise FormatViolation(f"tree: no leaf is {what} {error} of {len(names)}") from error
