"""Pickles put together opcode by opcode, so that tests need none of the classes that they name."""

from __future__ import annotations

import struct
from collections.abc import Iterable

NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"


def pickled(program: bytes) -> bytes:
    """A whole pickle of protocol 2."""
    return b"\x80\x02" + program + b"."


def named(full_name: str) -> bytes:
    """A global."""
    module, _, name = full_name.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def sequence(items: Iterable[bytes]) -> bytes:
    """A tuple."""
    return b"(" + b"".join(items) + b"t"


def numbers(values: Iterable[int]) -> bytes:
    return sequence(map(number, values))


def array(items: Iterable[bytes]) -> bytes:
    """A list."""
    return b"](" + b"".join(items) + b"e"


def mapping(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def applied(full_name: str, *arguments: bytes) -> bytes:
    """A function or class called."""
    return named(full_name) + sequence(arguments) + b"R"


def instance(full_name: str, state: bytes) -> bytes:
    """An object made of nothing and given a state."""
    return named(full_name) + b")\x81" + state + b"b"


def attributes(**fields: bytes) -> bytes:
    return mapping([(text(name), value) for name, value in fields.items()])


def persistent(identifier: bytes) -> bytes:
    return identifier + b"Q"
