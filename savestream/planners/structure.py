"""The recorded nesting of a state: a small tree of container nodes whose leaves are names."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["LeafNode", "MappingNode", "RecordNode", "SequenceNode", "StateTree"]


class LeafNode(msgspec.Struct, frozen=True, gc=False):
    """An array, or a subtree of plain values that is stored as one value."""

    fqn: str


class MappingNode(msgspec.Struct, frozen=True):
    """A mapping: ``kind`` is ``dict``, ``OrderedDict``, ``defaultdict`` or ``Counter``; order and key types are kept.

    ``extra`` is the name of a defaultdict's factory where it is a builtin; the text of an OrderedDict's metadata, see
    :mod:`savestream.planners.state_metadata`; or None.
    """

    kind: str
    keys: tuple[object, ...]
    children: tuple[StateTree, ...]
    extra: str | None = None


class SequenceNode(msgspec.Struct, frozen=True):
    """A sequence: ``kind`` is ``list``, ``tuple`` or ``deque``; ``max_length`` belongs to a deque."""

    kind: str
    children: tuple[StateTree, ...]
    max_length: int | None = None


class RecordNode(msgspec.Struct, frozen=True):
    """A namedtuple or dataclass: ``kind`` says which, ``type_name`` is ``module:qualname``."""

    kind: str
    type_name: str
    fields: tuple[str, ...]
    children: tuple[StateTree, ...]


StateTree: TypeAlias = LeafNode | MappingNode | SequenceNode | RecordNode
