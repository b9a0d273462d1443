"""The ``_metadata`` that the OrderedDicts from PyTorch's ``state_dict()`` carry: the version of each module's entries.

It is recorded as the text of a plain value. One that has no safe encoding is left out: ``load_state_dict()`` then takes
the entries for those of the oldest version, as it does with any dict.
"""

from __future__ import annotations

import collections
from typing import Any

from savestream.errors import UnsafeObjectError
from savestream.planners.value_decoding import decode_value_bytes
from savestream.planners.value_encoding import encode_value_bytes

__all__ = ["attach_metadata", "merge_metadata", "metadata_text"]


def metadata_text(mapping: collections.OrderedDict[Any, Any], key: str) -> str | None:
    """The recorded form of a mapping's metadata, or None where there is none."""
    metadata = getattr(mapping, "_metadata", None)
    if metadata is None:
        return None
    try:
        return encode_value_bytes(metadata, key).decode()
    except UnsafeObjectError:
        return None


def attach_metadata(mapping: Any, text: str) -> None:
    """Give an OrderedDict its recorded metadata."""
    mapping._metadata = decode_value_bytes(text.encode(), key="the metadata of an OrderedDict")


def merge_metadata(first: str | None, second: str | None) -> str | None:
    """The metadata of both: two ranks may hold different modules of one model."""
    if second is None or first == second:
        return first
    if first is None:
        return second
    one, other = (decode_value_bytes(text.encode()) for text in (first, second))
    if isinstance(one, dict) and isinstance(other, dict):
        one.update({key: value for key, value in other.items() if key not in one})
    return encode_value_bytes(one, "the metadata of an OrderedDict").decode()
