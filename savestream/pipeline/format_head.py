"""The first bytes of roots and parts: format, version, required features. Readable whatever else a version brings.

Every version writes ``{"format":"...","version":[major,minor],"requires":[...]`` first and exactly so, without spaces.
A reader that does not know the major version or a required feature stops here, and can say what it lacks.
"""

from __future__ import annotations

import json
import re

import msgspec

from savestream.errors import UnsupportedFormatError
from savestream.pipeline.limits import FormatViolation

__all__ = [
    "FORMAT_VERSION",
    "KNOWN_FEATURES",
    "PART_FORMAT",
    "ROOT_FORMAT",
    "FormatHead",
    "check_head",
    "head_text",
    "read_head",
]

FORMAT_VERSION = (1, 0)
ROOT_FORMAT = "savestream"
PART_FORMAT = "savestream-index"
KNOWN_FEATURES: frozenset[str] = frozenset()  # version 1.0 requires nothing

_FEATURE = rb'"[ !#-\[\]-~]{1,80}"'  # printable ASCII without quotes and backslashes
_HEAD = re.compile(
    rb'\{"format":"(?P<format>[a-z-]{1,40})","version":\[(?P<major>0|[1-9][0-9]{0,8}),(?P<minor>0|[1-9][0-9]{0,8})\],'
    rb'"requires":\[(?P<requires>(?:' + _FEATURE + rb"(?:," + _FEATURE + rb"){0,63})?)\][,}]"
)


class FormatHead(msgspec.Struct, frozen=True):
    """What a root or part says of itself before anything else."""

    format: str
    version: tuple[int, int]
    requires: tuple[str, ...]


def head_text(name: str, version: tuple[int, int] = FORMAT_VERSION, requires: tuple[str, ...] = ()) -> str:
    """The opening brace and the first three members."""
    features = ",".join(f'"{feature}"' for feature in requires)
    return f'{{"format":"{name}","version":[{version[0]},{version[1]}],"requires":[{features}]'


def read_head(data: bytes, name: str) -> FormatHead:
    """Read the head of ``data``, of which the first 8 KiB suffice.

    Raises
    ------
    FormatViolation
        It is nothing of the format ``name``.
    """
    match = _HEAD.match(data)
    if match is None or match["format"].decode() != name:
        raise FormatViolation(f"not a savestream file, it begins with {bytes(data[:24])!r}")
    requires = tuple(json.loads(b"[" + match["requires"] + b"]"))
    return FormatHead(name, (int(match["major"]), int(match["minor"])), requires)


def check_head(data: bytes, name: str, what: str) -> FormatHead:
    """Like :func:`read_head`, and refuse what this savestream cannot read.

    Raises
    ------
    UnsupportedFormatError
        Another major version, or a required feature that is unknown here; ``what`` and the cause are named.
    """
    head = read_head(data, name)
    if head.version[0] != FORMAT_VERSION[0]:
        version = ".".join(map(str, head.version))
        raise UnsupportedFormatError(
            f"{what}: format version {version}; this savestream reads version {FORMAT_VERSION[0]}. "
            "Load it with a newer savestream"
        )
    unknown = [feature for feature in head.requires if feature not in KNOWN_FEATURES]
    if unknown:
        raise UnsupportedFormatError(
            f"{what}: it requires {', '.join(unknown)}, which this savestream does not know. "
            "Load it with a newer savestream"
        )
    return head
