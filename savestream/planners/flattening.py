"""One walk over a state: names, leaves, and what the fingerprint and the recorded tree need of its containers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayAdapter, ArrayInfo, adapter_for, array_refusal, plain_array_types
from savestream.errors import PlanError, UnsafeObjectError
from savestream.planners.containers import (
    MAPPINGS,
    SEQUENCES,
    Category,
    category_of,
    container_node,
    container_token,
    contents,
)
from savestream.planners.paths import part_suffix
from savestream.planners.sharding import is_sharded
from savestream.planners.structure import LeafNode, MappingNode, StateTree
from savestream.planners.value_encoding import MAXIMUM_DEPTH, SCALAR_TYPES, describe_type, plain_class, refusal

__all__ = ["ARRAY", "SHARDED", "VALUE", "DescribedArrays", "FlatState", "flatten", "flatten_top_level"]

ARRAY, SHARDED, VALUE = 0, 1, 2
_SPECIAL = re.compile(r"[.\\\[]")


class FlatState:
    """A state as leaves.

    Attributes
    ----------
    names
        Fqn of each leaf, in the order of the walk.
    leaves
        The leaves themselves: arrays, sharded arrays, and subtrees of plain values.
    kinds
        ``ARRAY``, ``SHARDED`` or ``VALUE`` for each leaf.
    tokens
        One text for each container that is not part of a value: class, number of children, position. With the
        names it determines the structure.
    """

    __slots__ = ("_described", "_opened", "_root", "_tree", "_types", "flattened", "kinds", "leaves", "names", "tokens")

    def __init__(self, root: Any, walker: _Walker, tokens: list[str], flattened: bool) -> None:
        self._root = root
        self._opened = walker.opened
        self._tree: StateTree | None = None
        self._described: DescribedArrays | None = None
        self._types: set[type] | None = None
        self.names = walker.names
        self.leaves = walker.leaves
        self.kinds = walker.kinds
        self.tokens = tokens
        self.flattened = flattened

    @property
    def types(self) -> set[type]:
        """The classes of the leaves."""
        if self._types is None:
            self._types = set(map(type, self.leaves))
        return self._types

    def positions(self, kind: int) -> Iterator[int]:
        """Positions of the leaves of one kind."""
        position = self.kinds.find(kind)
        while position >= 0:
            yield position
            position = self.kinds.find(kind, position + 1)

    def split_leaf(self, position: int, leaf: Any) -> None:
        """Plan a sharded array in place of a leaf; the recorded tree stays that of the state."""
        self.tree()
        self.leaves[position] = leaf
        self.kinds[position] = SHARDED
        self._described = self._types = None

    def described_arrays(self) -> DescribedArrays:
        """Descriptions and addresses of the arrays that are not numpy's; found once.

        Raises
        ------
        UnsafeObjectError
            An array cannot be stored; the message names its key.
        """
        if self._described is None:
            self._described = _describe_arrays(self)
        return self._described

    def tree(self) -> StateTree:
        """The nesting of the state; built when first asked for."""
        if self._tree is None:
            if self.flattened:
                builder = _TreeBuilder(self.names, self.leaves, self._opened)
                self._tree = builder.build(self._root)
                builder.check_complete()
            else:
                self._tree = MappingNode("dict", tuple(self.names), tuple(map(LeafNode, self.names)))
        return self._tree


class DescribedArrays(msgspec.Struct):
    """Array leaves of other frameworks than numpy.

    Attributes
    ----------
    positions, addresses
        Where each is among the leaves, and in memory.
    firsts
        The position of the first leaf that is like it in class and description.
    infos
        The descriptions of those first leaves, by position.
    """

    positions: Sequence[int]
    addresses: list[int]
    firsts: list[int]
    infos: dict[int, ArrayInfo]


def _describe_arrays(flat: FlatState) -> DescribedArrays:
    found = DescribedArrays([], [], [], {})
    described: list[int] = []
    groups: dict[int, tuple[ArrayAdapter, set[type]]] = {}
    for kind in flat.types - {np.ndarray}:
        adapter = adapter_for(kind)
        if adapter is not None:
            groups.setdefault(id(adapter), (adapter, set()))[1].add(kind)
    for adapter, kinds in groups.values():
        if flat.types == kinds:  # mostly all leaves are arrays of one framework
            firsts, infos = adapter.describe(flat.leaves, flat.names)
            return DescribedArrays(range(len(firsts)), adapter.addresses(flat.leaves), firsts, infos)
        positions = _positions_of(flat, kinds)
        leaves = [flat.leaves[position] for position in positions]
        firsts, infos = adapter.describe(leaves, [flat.names[position] for position in positions])
        described += positions
        found.addresses += adapter.addresses(leaves)
        found.firsts += map(positions.__getitem__, firsts)
        found.infos.update({positions[first]: info for first, info in infos.items()})
    found.positions = described
    return found


def _positions_of(flat: FlatState, kinds: set[type]) -> list[int]:
    pairs = enumerate(zip(flat.leaves, flat.kinds, strict=True))
    return [position for position, (leaf, kind) in pairs if kind == ARRAY and type(leaf) in kinds]


def flatten(state: Any, *, allow_pickle: bool = False) -> FlatState:
    """Flatten a state of nested containers.

    A subtree that holds plain values only is one leaf. The root is one leaf only where it is no container.

    Raises
    ------
    UnsafeObjectError
        A leaf cannot be stored; the message names its key.
    PlanError
        A container contains itself, or containers nest more than ``MAXIMUM_DEPTH`` levels deep.
    """
    walker = _Walker(allow_pickle)
    category = category_of(state)
    if category is None:
        walker.add(state, "", 0)
    else:
        walker.walk(state, category, "", 0)
    return FlatState(state, walker, walker.tokens, True)


def flatten_top_level(state: Any, *, allow_pickle: bool = False) -> FlatState:
    """A state whose entries are its leaves: a dict with str keys, which are the names as they stand."""
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise PlanError(
            f"flatten_state_dict=False needs a dict with str keys, not {describe_type(state)}; flatten the state first"
        )
    walker = _Walker(allow_pickle)
    for name, leaf in state.items():
        if category_of(leaf) is None:
            walker.add(leaf, name, 1)
        else:
            walker.append(name, leaf, VALUE)  # encoding refuses arrays inside
    return FlatState(state, walker, ["flat"], False)


class _Opened:
    """Looks into containers, once into each: JAX makes the children of some of its nodes anew whenever it looks."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Sequence[object], Sequence[Any]]] = {}

    def contents(self, container: Any, category: Category, name: str) -> tuple[Sequence[object], Sequence[Any]]:
        known = self._known.get(id(container))
        if known is None:
            known = self._known[id(container)] = (container, *contents(container, category, name))
        return known[1:]


class _Walker:
    def __init__(self, allow_pickle: bool) -> None:
        self.opened = _Opened()
        self.names: list[str] = []
        self.leaves: list[Any] = []
        self.kinds = bytearray()
        self.tokens: list[str] = []
        self._allow_pickle = allow_pickle
        self._arrays = 0
        self._active: set[int] = set()
        self._plain = plain_array_types()

    def append(self, name: str, leaf: Any, kind: int) -> None:
        self.names.append(name)
        self.leaves.append(leaf)
        self.kinds.append(kind)

    def walk(self, container: Any, category: Category, name: str, depth: int) -> None:
        """Walk a container; one that turns out to hold no array becomes a value leaf."""
        if id(container) in self._active:
            raise PlanError(f"{name or 'the state'}: {describe_type(container)} contains itself; break the cycle")
        if depth >= MAXIMUM_DEPTH:
            raise PlanError(f"{name}: nested more than {MAXIMUM_DEPTH} levels deep; flatten it")
        self._active.add(id(container))
        mark, token_mark, arrays = len(self.names), len(self.tokens), self._arrays
        suffixes, children = self._suffixes_and_children(container, category, name)
        kinds = set(map(type, children))
        if kinds and kinds <= self._plain:  # most arrays lie among arrays only
            self.names += [name + suffix for suffix in suffixes] if name else suffixes
            self.leaves += children
            self.kinds += bytes(len(suffixes))
            self._arrays += len(suffixes)
        else:
            self._walk_children(suffixes, children, name, depth)
        self._active.discard(id(container))
        if self._arrays == arrays and depth:
            del self.names[mark:], self.leaves[mark:], self.kinds[mark:], self.tokens[token_mark:]
            self.append(name, container, VALUE)
        else:
            token = self._token(container, category, name)
            self.tokens.append(f"{token} {len(suffixes)} {len(self.names)}")

    def _walk_children(self, suffixes: Sequence[str], children: Iterable[Any], name: str, depth: int) -> None:
        names, leaves, kinds, plain = self.names, self.leaves, self.kinds, self._plain
        for suffix, child in zip(suffixes, children, strict=True):
            kind = type(child)
            if kind in plain:
                self._arrays += 1
                names.append(name + suffix)
                leaves.append(child)
                kinds.append(ARRAY)
            elif kind in SCALAR_TYPES:
                names.append(name + suffix)
                leaves.append(child)
                kinds.append(VALUE)
            else:
                inner = category_of(child)
                if inner is None:
                    self.add(child, name + suffix, depth + 1)
                else:
                    self.walk(child, inner, name + suffix, depth + 1)

    def _suffixes_and_children(
        self, container: Any, category: Category, name: str
    ) -> tuple[Sequence[str], Iterable[Any]]:
        kind = type(container)
        if kind in MAPPINGS:
            return _key_suffixes(container, name), container.values()
        if kind in SEQUENCES:
            return [f"[{position}]" for position in range(len(container))], container
        parts, children = self.opened.contents(container, category, name)
        return [part_suffix(part, first=not name, beneath=name) for part in parts], children

    def _token(self, container: Any, category: Category, name: str) -> str:
        try:
            return container_token(container, category, name)
        except UnsafeObjectError as error:
            if not self._allow_pickle:
                raise
            raise UnsafeObjectError(f"{error}; pickle cannot store it either, since it holds arrays") from None

    def add(self, leaf: Any, name: str, depth: int) -> None:
        """Add what is no container of the known classes."""
        if is_sharded(leaf):
            self._arrays += 1
            self.append(name, leaf, SHARDED)
        elif adapter_for(type(leaf)) is not None:
            self._arrays += 1
            self.append(name, leaf, ARRAY)
        elif array_refusal(leaf) is not None:
            raise refusal(leaf, name)
        elif plain_class(leaf) or self._allow_pickle:
            if depth > MAXIMUM_DEPTH:
                raise PlanError(f"{name}: nested more than {MAXIMUM_DEPTH} levels deep; flatten it")
            self.append(name, leaf, VALUE)
        else:
            raise refusal(leaf, name)


def _key_suffixes(mapping: Any, name: str) -> Sequence[str]:
    """The texts that the keys add to the name of a mapping. Plain str keys are checked all at once."""
    if set(map(type, mapping)) == {str}:
        joined = "".join(mapping)
        if joined.isascii() and "" not in mapping and not _SPECIAL.search(joined):
            return list(mapping) if not name else ["." + key for key in mapping]
    return [part_suffix(key, first=not name, beneath=name) for key in mapping]


class _TreeBuilder:
    """Builds the tree by a second walk: whatever is the next leaf is one, everything else is a container."""

    def __init__(self, names: list[str], leaves: list[Any], opened: _Opened) -> None:
        self._opened = opened
        self._names = names
        self._leaves = leaves
        self._position = 0

    def build(self, value: Any) -> StateTree:
        position = self._position
        if position < len(self._leaves) and self._leaves[position] is value:
            self._position += 1
            return LeafNode(self._names[position])
        category = category_of(value)
        if category is None:
            raise _changed()
        if type(value) in MAPPINGS:
            children: Any = value.values()
        elif type(value) in SEQUENCES:
            children = value
        else:
            children = self._opened.contents(value, category, "")[1]
        return container_node(value, category, tuple([self.build(child) for child in children]), "")

    def check_complete(self) -> None:
        if self._position != len(self._leaves):
            raise _changed()


def _changed() -> PlanError:
    return PlanError(
        "the state's structure changed while it was being planned; change it only after the save is staged"
    )
