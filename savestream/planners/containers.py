"""The containers that a state may be made of: how to look into them, describe them and put new content in."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from savestream.errors import CorruptCheckpointError
from savestream.planners.paths import Index
from savestream.planners.pytrees import (
    Category,
    PytreeNode,
    is_pytree,
    open_pytree,
    pytree_category,
    rebuild_pytree,
)
from savestream.planners.recorded import (
    RecordedDataclass,
    RecordedTuple,
    class_name,
    is_dataclass_type,
    is_namedtuple_type,
    rebuild_dataclass,
    rebuild_namedtuple,
    replace_fields,
)
from savestream.planners.state_metadata import attach_metadata, metadata_text
from savestream.planners.structure import MappingNode, RecordNode, SequenceNode, StateTree
from savestream.planners.value_decoding import decode_value
from savestream.planners.value_encoding import FACTORIES, SCALAR_TYPES, dataclass_fields, encode_value, factory_name

__all__ = [
    "ABSENT",
    "MAPPINGS",
    "SEQUENCES",
    "Category",
    "assemble",
    "category_of",
    "container_node",
    "container_token",
    "contents",
    "has_str_keys",
    "is_replaced",
    "put_contents",
    "refill_sequence",
]

ABSENT: Any = object()  # stands for an entry that a dict does not have

MAPPINGS: frozenset[type] = frozenset({dict, collections.OrderedDict, collections.defaultdict, collections.Counter})
SEQUENCES: frozenset[type] = frozenset({list, tuple, collections.deque})


def category_of(value: object) -> Category | None:
    """What sort of container ``value`` is, by exact class; None for everything else (sets hold no arrays).

    Classes that are registered with JAX are looked into as JAX does it, dataclasses among them.
    """
    kind = type(value)
    if kind in MAPPINGS:
        return "mapping"
    if kind in SEQUENCES:
        return "sequence"
    if kind in (RecordedTuple, RecordedDataclass):
        return "record"
    if is_namedtuple_type(kind) and not getattr(value, "__dict__", None):
        return "record"
    category = pytree_category(value)
    return "record" if category is None and is_dataclass_type(kind) else category


def has_str_keys(value: object, node: MappingNode) -> bool:
    """Whether a plain dict and a recorded mapping have only str keys, which compare as they are."""
    return type(value) is dict and set(map(type, value)) <= {str} and set(map(type, node.keys)) <= {str}


def contents(value: Any, category: Category, key: str) -> tuple[Sequence[object], Sequence[Any]]:
    """Parts and children of a container, in order; ``key`` names it in errors."""
    kind = type(value)
    if kind in MAPPINGS:
        return list(value), list(value.values())
    if kind in SEQUENCES:
        return [Index(position) for position in range(len(value))], list(value)
    if category != "record" or is_pytree(value):
        node = open_pytree(value, key)
        return list(map(Index, node.parts)) if node.category == "sequence" else node.parts, node.children
    fields = _record_fields(value, key)
    return fields, _field_values(value, fields)


def _record_fields(value: Any, key: str) -> Sequence[str]:
    """The field names of a namedtuple or dataclass."""
    if isinstance(value, RecordedDataclass):
        return list(value)
    return dataclass_fields(value, key) if dataclasses.is_dataclass(value) else list(value._fields)


def _field_values(value: Any, fields: Sequence[str]) -> list[Any]:
    """The values of a namedtuple's or dataclass's fields."""
    if isinstance(value, RecordedDataclass):
        return list(value.values())
    return list(value) if isinstance(value, tuple) else [getattr(value, name) for name in fields]


def _record_class(value: Any) -> str:
    """The recorded class name of a namedtuple or dataclass."""
    return value.type_name if isinstance(value, RecordedTuple | RecordedDataclass) else class_name(type(value))


def container_token(value: Any, category: Category, key: str) -> str:
    """Text that tells a container from one of another class, for the fingerprint."""
    kind = type(value)
    if kind not in MAPPINGS and kind not in SEQUENCES and is_pytree(value):
        return f"{open_pytree(value, key).kind} {class_name(kind)}"
    if category == "record":
        return f"{'namedtuple' if isinstance(value, tuple) else 'dataclass'} {_record_class(value)}"
    if kind is collections.defaultdict or kind is collections.OrderedDict:
        return f"{kind.__name__} {_mapping_extra(value, key)}"
    return f"deque {value.maxlen}" if kind is collections.deque else kind.__name__


def container_node(value: Any, category: Category, children: tuple[StateTree, ...], key: str) -> StateTree:
    """The recorded form of a container."""
    kind = type(value)
    if kind not in MAPPINGS and kind not in SEQUENCES and is_pytree(value):
        return _pytree_node(open_pytree(value, key), class_name(kind), children)
    if category == "mapping":
        return MappingNode(kind.__name__, tuple(value), children, _mapping_extra(value, key))
    if category == "sequence":
        return SequenceNode(kind.__name__, children, value.maxlen if kind is collections.deque else None)
    record = "namedtuple" if isinstance(value, tuple) else "dataclass"
    return RecordNode(record, _record_class(value), tuple(_record_fields(value, key)), children)


def _pytree_node(node: PytreeNode, name: str, children: tuple[StateTree, ...]) -> StateTree:
    if node.category == "mapping":
        return MappingNode(node.kind, tuple(node.parts), children)
    if node.category == "sequence":
        return SequenceNode(node.kind, children)
    return RecordNode(node.kind, name, tuple(node.parts), children)


def _mapping_extra(value: Any, key: str) -> str | None:
    """What a mapping has besides its entries."""
    if type(value) is collections.defaultdict:
        return factory_name(value, key)
    return metadata_text(value, key) if type(value) is collections.OrderedDict else None


def assemble(node: MappingNode | SequenceNode | RecordNode, children: Sequence[Any], types: Mapping[str, type]) -> Any:
    """A new container from its recorded form and its children.

    Classes come from ``types`` by recorded name; without one, namedtuples and dataclasses become
    :class:`RecordedTuple` and :class:`RecordedDataclass`.
    """
    if isinstance(node, MappingNode):
        return _assemble_mapping(node, children, types)
    if isinstance(node, SequenceNode):
        if node.kind == "deque":
            return collections.deque(children, node.max_length)
        return tuple(children) if node.kind == "tuple" else list(children)
    kind = types.get(node.type_name)
    if node.kind == "namedtuple":
        if kind is None:
            return RecordedTuple(node.type_name, node.fields, children)
        return rebuild_namedtuple(kind, node.fields, children)
    if kind is None:
        return RecordedDataclass(node.type_name, zip(node.fields, children, strict=True))
    return rebuild_dataclass(kind, node.fields, children)


def _assemble_mapping(node: MappingNode, children: Sequence[Any], types: Mapping[str, type]) -> Any:
    found: dict[Any, Any]
    if node.kind == "OrderedDict":
        found = collections.OrderedDict()
        if node.extra is not None:
            attach_metadata(found, node.extra)
    elif node.kind == "Counter":
        found = collections.Counter()
    elif node.kind == "defaultdict":
        found = collections.defaultdict(None if node.extra is None else FACTORIES.get(node.extra))
    else:
        found = {}
    pairs = zip([_own_key(key, types) for key in node.keys] if types else node.keys, children, strict=True)
    try:
        if node.kind == "Counter":
            dict.update(found, pairs)  # Counter's own update would add
        else:
            found.update(pairs)
    except TypeError as error:
        raise CorruptCheckpointError(f"the recorded structure has a dict key that cannot be one: {error}") from error
    return found


def _own_key(key: object, types: Mapping[str, type]) -> object:
    """A recorded dict key with its enums and namedtuples rebuilt by the caller's classes."""
    if type(key) in SCALAR_TYPES:
        return key
    return decode_value(encode_value(key, "a dict key"), types=tuple(types.values()), key="a dict key")


def is_replaced(value: Any) -> bool:
    """Whether new children make a successor of a container, instead of changing it."""
    kind = type(value)
    return isinstance(value, tuple) or (kind not in MAPPINGS and kind not in SEQUENCES and is_pytree(value))


def put_contents(value: Any, category: Category, changes: Mapping[Any, Any]) -> Any:
    """Put new children into a container and return it, or its successor where the class is immutable.

    ``changes`` maps dict keys, positions (int) or field names to new children; all else stays.
    """
    if not changes:
        return value
    if type(value) not in MAPPINGS and type(value) not in SEQUENCES and is_pytree(value):
        return rebuild_pytree(value, changes)
    if isinstance(value, RecordedTuple):
        return RecordedTuple(value.type_name, value._fields, _replaced(value, value._fields, changes))
    if isinstance(value, tuple):
        names: Iterable[Any] = value._fields if category == "record" else range(len(value))  # type: ignore[attr-defined]
        return tuple.__new__(type(value), _replaced(value, names, changes))
    if category == "record" and not isinstance(value, RecordedDataclass):
        return replace_fields(value, changes)
    for key, child in changes.items():
        value[key] = child
    return value


def refill_sequence(value: Any, children: Sequence[Any]) -> Any:
    """Give a list or deque other children in place, or make a tuple of its class of them."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), children)
    value.clear()
    value.extend(children)
    return value


def _replaced(values: Iterable[Any], names: Iterable[Any], changes: Mapping[Any, Any]) -> list[Any]:
    return [changes.get(name, value) for name, value in zip(names, values, strict=True)]
