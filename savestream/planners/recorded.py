"""Stand-ins for classes that a checkpoint names and nobody supplied, and the rebuilding of those that were.

A checkpoint never imports a class: that would be execution. Without ``types`` a namedtuple comes back as
:class:`RecordedTuple`, a dataclass as :class:`RecordedDataclass` and an enum member as :class:`RecordedEnum`; an object
of a framework that is not imported comes back as :class:`RecordedObject`. All carry the recorded name and are saved
again as what they stand for.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from savestream.errors import PlanError

__all__ = [
    "RecordedDataclass",
    "RecordedEnum",
    "RecordedObject",
    "RecordedTuple",
    "class_name",
    "index_types",
    "is_dataclass_type",
    "is_namedtuple_type",
    "rebuild_dataclass",
    "rebuild_enum",
    "rebuild_namedtuple",
    "replace_fields",
]

_BUILTIN_BASES = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)


class RecordedTuple(tuple[Any, ...]):  # noqa: SLOT001 - a tuple subclass cannot have non-empty slots
    """A namedtuple whose class was not given: a tuple with field names and the recorded class name."""

    type_name: str
    _fields: tuple[str, ...]

    def __new__(cls, type_name: str, fields: Iterable[str], values: Iterable[Any]) -> Self:
        self = super().__new__(cls, values)
        self.type_name = type_name
        self._fields = tuple(fields)
        if len(self._fields) != len(self):
            raise ValueError(f"{type_name} has {len(self._fields)} fields and {len(self)} values")
        return self

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", ())
        if name in fields:
            return self[fields.index(name)]
        raise AttributeError(f"{self.__dict__.get('type_name')} has no field {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (RecordedTuple, (self.type_name, self._fields, tuple(self)))

    def __repr__(self) -> str:
        pairs = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"RecordedTuple({self.type_name}: {pairs})"


class RecordedDataclass(dict[str, Any]):
    """A dataclass instance whose class was not given: its fields as a dict, plus the recorded class name."""

    __slots__ = ("type_name",)

    def __init__(self, type_name: str, fields: Iterable[tuple[str, Any]] | Mapping[str, Any] = ()) -> None:
        super().__init__(fields)
        self.type_name = type_name

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (RecordedDataclass, (self.type_name, dict(self)))

    def __repr__(self) -> str:
        return f"RecordedDataclass({self.type_name}: {dict(self)!r})"


class RecordedEnum(msgspec.Struct, frozen=True):
    """An enum member whose class was not given. ``name`` is None for an unnamed combination of flags."""

    type_name: str
    name: str | None
    value: Any

    def __hash__(self) -> int:
        return hash((self.type_name, self.name))


class RecordedObject(msgspec.Struct, frozen=True):
    """An object of a known type that could not be made: its framework is not imported here, or lacks it.

    Attributes
    ----------
    type_name
        What was recorded, such as ``torch.dtype`` or ``torch.Generator``.
    state
        A plain value that determines the object: ``"bfloat16"``, or device and state of a generator.
    """

    type_name: str
    state: Any

    def __hash__(self) -> int:
        return hash(self.type_name)


def class_name(kind: type) -> str:
    """The name under which a class is recorded: ``module:qualname``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def index_types(types: Sequence[type]) -> dict[str, type]:
    """Look-up table of the classes that may be rebuilt, by recorded name."""
    return {class_name(kind): kind for kind in types}


def is_namedtuple_type(kind: type) -> bool:
    """Whether instances of ``kind`` are namedtuples (subclasses of one included)."""
    fields = getattr(kind, "_fields", None)
    return issubclass(kind, tuple) and type(fields) is tuple and all(type(name) is str for name in fields)


def is_dataclass_type(kind: type) -> bool:
    """Whether instances of ``kind`` are dataclasses that hold nothing but their fields.

    A dataclass that also is a dict, a list or a number carries content that its fields do not show.
    """
    return dataclasses.is_dataclass(kind) and not issubclass(kind, _BUILTIN_BASES)


def rebuild_namedtuple(kind: type, fields: Sequence[str], values: Iterable[Any]) -> Any:
    """An instance of the namedtuple class ``kind``; its fields must be those recorded."""
    if not is_namedtuple_type(kind) or tuple(kind._fields) != tuple(fields):  # type: ignore[attr-defined]
        raise PlanError(_fields_differ(kind, fields))
    return tuple.__new__(kind, values)


def rebuild_dataclass(kind: type, fields: Sequence[str], values: Sequence[Any]) -> Any:
    """An instance of the dataclass ``kind`` with exactly the recorded field values.

    ``__init__`` runs, so attributes that are no fields exist; the fields are then set to the recorded values, since
    ``__post_init__`` may have changed them.
    """
    declared = {field.name: field.init for field in dataclasses.fields(kind)} if is_dataclass_type(kind) else {}
    if set(declared) != set(fields):
        raise PlanError(_fields_differ(kind, fields))
    content = dict(zip(fields, values, strict=True))
    try:
        instance = kind(**{name: value for name, value in content.items() if declared[name]})
    except Exception as error:
        raise PlanError(
            f"{class_name(kind)} could not be rebuilt from its fields ({error}); load into a target that has one"
        ) from error
    return _set_fields(instance, content)


def replace_fields(instance: Any, changed: Mapping[str, Any]) -> Any:
    """A dataclass instance with new field values: the same object, or a copy where the class is frozen."""
    if not changed:
        return instance
    if not type(instance).__dataclass_params__.frozen:
        return _set_fields(instance, changed)
    duplicate = object.__new__(type(instance))
    state = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return _set_fields(duplicate, {**getattr(instance, "__dict__", {}), **state, **changed})


def _set_fields(instance: Any, content: Mapping[str, Any]) -> Any:
    for name, value in content.items():
        object.__setattr__(instance, name, value)  # also works where the class is frozen
    return instance


def rebuild_enum(kind: type, name: str | None, value: Any) -> Any:
    """The member of the enum class ``kind`` with the recorded name (or value, for combined flags)."""
    if not issubclass(kind, enum.Enum):
        raise PlanError(f"types holds {class_name(kind)}, which was saved as an enum and is none now")
    if name is not None and name in kind.__members__:
        return kind.__members__[name]
    try:
        return kind(value)
    except ValueError as error:
        raise PlanError(f"{class_name(kind)} has no member {name!r} any more (value {value!r})") from error


def _fields_differ(kind: type, fields: Sequence[str]) -> str:
    return f"types holds {class_name(kind)}, whose fields are not the recorded ones ({', '.join(fields)})"
