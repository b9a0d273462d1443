"""What DCP has to know of a checkpoint beyond savestream's own records, as one member of the root's user metadata.

``{"torch.distributed.checkpoint": {"format": 1, "version": ..., "nested": ..., "paths_from_tree": ...,
"planner_data": ..., "requires_grad": [...]}}``

``nested``: leaves stand in the tree at their path; else in one dict, by their fqn. ``paths_from_tree``: the planner's
data are those paths, and not repeated. ``requires_grad``: which tensors did, counted in the order of the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from savestream.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from savestream.planners.values import decode_value, encode_value

__all__ = ["MEMBER", "Extras", "decode_extras", "encode_extras", "refuse_unsafe"]

MEMBER = "torch.distributed.checkpoint"
_FORMAT = 1
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Extras(msgspec.Struct, frozen=True):
    """The member's content; see the module."""

    version: str | None
    nested: bool
    paths_from_tree: bool
    planner_data: Any
    requires_grad: Sequence[int]


def encode_extras(extras: Extras) -> object:
    """The user metadata of a root, encoded.

    Raises
    ------
    UnsafeObjectError
        The planner data hold something that could not be read back as it is without running code; names it.
    """
    refuse_unsafe(extras.planner_data)
    member = {"format": _FORMAT, **msgspec.structs.asdict(extras), "requires_grad": list(extras.requires_grad)}
    return encode_value({MEMBER: member}, "planner_data")


def refuse_unsafe(value: object, name: str = "planner_data") -> None:
    """Refuse planner data that :func:`encode_extras` cannot take."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():  # type: ignore[attr-defined]  # mypy does not know that it is a dict
            refuse_unsafe(key, f"a key of {name}")
            refuse_unsafe(item, f"{name}[{key!r}]")
    elif kind in (list, tuple):
        for position, item in enumerate(value):  # type: ignore[arg-type]
            refuse_unsafe(item, f"{name}[{position}]")
    elif kind not in _PLAIN:
        raise UnsafeObjectError(
            f"{name}: {kind.__module__}.{kind.__qualname__} in the planner's data cannot be stored so that reading it "
            "runs no code; use dicts, lists, tuples, numbers and strings"
        )


def decode_extras(user: object, place: str) -> Extras | None:
    """The content of the member in a root's user metadata; None where savestream itself saved the checkpoint.

    Raises
    ------
    CorruptCheckpointError
        It is not as :func:`encode_extras` makes it.
    UnsupportedFormatError
        A newer savestream made it.
    """
    decoded = decode_value(user, key=f"{place}: the metadata")
    if not isinstance(decoded, Mapping) or MEMBER not in decoded:
        return None
    member = decoded[MEMBER]
    if not isinstance(member, Mapping) or type(member.get("format")) is not int:
        raise CorruptCheckpointError(f"{place}: the metadata's member {MEMBER!r} is not as savestream writes it")
    if member["format"] != _FORMAT:
        raise UnsupportedFormatError(
            f"{place}: the metadata's member {MEMBER!r} has format {member['format']}; a newer savestream is needed"
        )
    try:
        return msgspec.convert({key: member[key] for key in Extras.__struct_fields__}, Extras)
    except (KeyError, msgspec.ValidationError) as error:
        raise CorruptCheckpointError(
            f"{place}: the metadata's member {MEMBER!r} is not as savestream writes it: {error}"
        ) from error
