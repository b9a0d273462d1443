"""Zip archives of uncompressed members, found anywhere in a file: where the bytes of each member lie.

That is how PyTorch stores what it saves. Only the directory and the members that are asked for are read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import NamedTuple

from savestream.arrays.file_sources import ByteSource
from savestream.errors import CorruptCheckpointError, UnsafeObjectError

__all__ = ["EDGE_BYTES", "StoredMember", "StoredZip", "Window"]

_MAXIMUM_DIRECTORY_BYTES = 256 * 1024 * 1024
_MAXIMUM_MEMBERS = 1 << 20
EDGE_BYTES = 4096
_SMALL_BYTES = 64 * 1024

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ZIP64_EXTRA = 0x0001
_ALL_ONES = 0xFFFFFFFF


class StoredMember(NamedTuple):
    """A member: where its local header stands, and how many bytes it holds."""

    name: str
    header_offset: int
    nbytes: int


class Window:
    """A range of a source; its edges are read once, all of it where it is small."""

    def __init__(self, source: ByteSource, offset: int, nbytes: int) -> None:
        self.source = source
        self.offset = offset
        self.nbytes = nbytes
        edge = nbytes if nbytes <= _SMALL_BYTES else EDGE_BYTES
        self._head = source.read(offset, edge)
        self._tail_start = nbytes if edge == nbytes else nbytes - EDGE_BYTES
        self._tail = source.read(offset + self._tail_start, nbytes - self._tail_start)

    def read(self, start: int, nbytes: int) -> bytes:
        """Bytes of the window; beyond its end is damage."""
        stop = start + nbytes
        if start < 0 or nbytes < 0 or stop > self.nbytes:
            raise CorruptCheckpointError(f"its bytes {start}-{stop} are needed, it has {self.nbytes}")
        if stop <= len(self._head):
            return self._head[start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self.source.read(self.offset + start, nbytes)


class StoredZip:
    """The members of an archive by name.

    Raises
    ------
    CorruptCheckpointError
        The window holds no zip archive, or one that contradicts itself.
    UnsafeObjectError
        A member is compressed or encrypted, so its bytes do not lie there as they are.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        start, nbytes, count = self._find_directory()
        self.members: dict[str, StoredMember] = {}
        for member in self._entries(window.read(start, nbytes), count):
            if member.name in self.members:
                raise CorruptCheckpointError(f"the archive holds {member.name!r} twice")
            if member.header_offset + _LOCAL.size + member.nbytes > start:
                raise CorruptCheckpointError(f"{member.name!r} reaches into the archive's directory, or beyond")
            self.members[member.name] = member
        self._refuse_overlaps()

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory is: start, bytes, entries."""
        window = self._window
        end_offset = window.nbytes - _END.size
        if end_offset < 0:
            raise CorruptCheckpointError(f"it is no zip archive: it has {window.nbytes} bytes")
        magic, _, _, _, count, nbytes, start, comment = _END.unpack(window.read(end_offset, _END.size))
        if magic != b"PK\5\6" or comment:
            raise CorruptCheckpointError("it is no zip archive, or its end is cut off or damaged")
        found = self._find_directory64(end_offset - _END64_LOCATOR.size)
        start, nbytes, count = found or (start, nbytes, count)
        if nbytes > _MAXIMUM_DIRECTORY_BYTES or count > _MAXIMUM_MEMBERS or start + nbytes > end_offset:
            raise CorruptCheckpointError(f"its directory is said to have {nbytes} bytes and {count} entries at {start}")
        return start, nbytes, count

    def _find_directory64(self, locator_offset: int) -> tuple[int, int, int] | None:
        if locator_offset < 0:
            return None
        magic, _, offset, _ = _END64_LOCATOR.unpack(self._window.read(locator_offset, _END64_LOCATOR.size))
        if magic != b"PK\6\7":
            return None
        record = _END64.unpack(self._window.read(offset, _END64.size))
        if record[0] != b"PK\6\6":
            raise CorruptCheckpointError("the archive's end is damaged")
        return record[9], record[8], record[7]

    def _entries(self, directory: bytes, count: int) -> Iterator[StoredMember]:
        position = 0
        for _ in range(count):
            if position + _ENTRY.size > len(directory):
                raise CorruptCheckpointError("the archive's directory is cut off")
            fields = _ENTRY.unpack_from(directory, position)
            if fields[0] != b"PK\1\2":
                raise CorruptCheckpointError("the archive's directory is damaged")
            name_bytes, extra_bytes, comment_bytes = fields[10:13]
            first = position + _ENTRY.size
            name = directory[first : first + name_bytes].decode("utf-8", "replace")
            extra = directory[first + name_bytes : first + name_bytes + extra_bytes]
            yield _member(name, fields, extra)
            position = first + name_bytes + extra_bytes + comment_bytes

    def _refuse_overlaps(self) -> None:
        ordered = sorted(self.members.values(), key=lambda member: member.header_offset)
        for first, second in itertools.pairwise(ordered):
            if first.header_offset + _LOCAL.size + first.nbytes > second.header_offset:
                raise CorruptCheckpointError(f"{first.name!r} and {second.name!r} lie over each other")

    def data_offset(self, member: StoredMember) -> int:
        """Where a member's bytes begin in the window; its local header must agree with the directory."""
        fields = _LOCAL.unpack(self._window.read(member.header_offset, _LOCAL.size))
        name = self._window.read(member.header_offset + _LOCAL.size, fields[9])
        if fields[0] != b"PK\3\4" or name.decode("utf-8", "replace") != member.name or fields[3]:
            raise CorruptCheckpointError(f"{member.name!r} is not where the archive's directory says")
        start = member.header_offset + _LOCAL.size + fields[9] + fields[10]
        if start + member.nbytes > self._window.nbytes:
            raise CorruptCheckpointError(f"{member.name!r} reaches beyond the archive's end")
        return int(start)

    def read(self, member: StoredMember, maximum_bytes: int) -> bytes:
        """A small member whole."""
        if member.nbytes > maximum_bytes:
            raise CorruptCheckpointError(f"{member.name!r} has {member.nbytes} bytes; up to {maximum_bytes} are read")
        return self._window.read(self.data_offset(member), member.nbytes)


def _member(name: str, fields: tuple[int, ...], extra: bytes) -> StoredMember:
    flags, method, stored_bytes, nbytes, offset = fields[3], fields[4], fields[8], fields[9], fields[16]
    wide = iter(_zip64_values(extra))
    try:
        nbytes = next(wide) if nbytes == _ALL_ONES else nbytes
        stored_bytes = next(wide) if stored_bytes == _ALL_ONES else stored_bytes
        offset = next(wide) if offset == _ALL_ONES else offset
    except StopIteration:
        raise CorruptCheckpointError(f"{name!r}: its size is not in the archive's directory") from None
    if method or flags & 1:
        how = "encrypted" if flags & 1 else f"compressed (method {method})"
        raise UnsafeObjectError(f"{name!r} is {how}; PyTorch never writes that, so it is not read here")
    if stored_bytes != nbytes:
        raise CorruptCheckpointError(f"{name!r} is stored in {stored_bytes} bytes and said to have {nbytes}")
    return StoredMember(name, offset, nbytes)


def _zip64_values(extra: bytes) -> tuple[int, ...]:
    """The 64-bit sizes and offsets of an entry, as many as there are."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == _ZIP64_EXTRA:
            values = extra[position : position + nbytes]
            return struct.unpack(f"<{len(values) // 8}Q", values[: len(values) // 8 * 8])
        position += nbytes
    return ()
