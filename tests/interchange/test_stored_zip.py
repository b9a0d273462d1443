"""Archives as zipfile and PyTorch write them, and archives that lie."""

from __future__ import annotations

import io
import random
import struct
import zipfile

import pytest

from savestream.arrays.file_sources import ByteSource, EndOfSourceError
from savestream.errors import CorruptCheckpointError, SavestreamError, UnsafeObjectError
from savestream.interchange.stored_zip import StoredZip, Window

MEMBERS = {"a/data.pkl": b"pickle", "a/data/0": bytes(range(256)) * 40, "a/\N{BRAIN}": b"", "a/version": b"3\n"}


class Memory(ByteSource):
    """Bytes in memory; remembers how much was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes_read = 0

    def describe(self) -> str:
        return "memory"

    def read_into(self, offset: int, buffer: memoryview) -> None:
        found = self.data[offset : offset + len(buffer)]
        if len(found) < len(buffer):
            raise EndOfSourceError(len(self.data))
        self.bytes_read += len(found)
        buffer[:] = found


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


def opened(data: bytes, before: bytes = b"", after: bytes = b"") -> StoredZip:
    return StoredZip(Window(Memory(before + data + after), len(before), len(data)))


def contents(found: StoredZip) -> dict[str, bytes]:
    return {name: found.read(member, 1 << 20) for name, member in found.members.items()}


@pytest.mark.parametrize("before", [b"", b"PK\3\4 something else" * 100])
def test_members_are_found_wherever_the_archive_lies(before):
    found = opened(archive(MEMBERS), before, b"more")
    assert contents(found) == MEMBERS
    member = found.members["a/data/0"]
    start = len(before) + found.data_offset(member)
    assert (before + archive(MEMBERS))[start : start + member.nbytes] == MEMBERS["a/data/0"]


def test_of_a_large_archive_only_the_edges_are_read():
    source = Memory(archive({"a/data.pkl": b"x", "a/data/0": bytes(1 << 20)}))
    found = StoredZip(Window(source, 0, len(source.data)))
    assert found.data_offset(found.members["a/data/0"]) > 0
    assert source.bytes_read < 10_000


def test_many_members_have_a_directory_beyond_the_edge():
    members = {f"a/data/{number}": bytes([number % 251]) * number for number in range(1500)}
    assert contents(opened(archive(members))) == members


def test_sizes_of_64_bits():
    data = archive({"a/0": b"abc"})
    end = data.rindex(b"PK\5\6")
    directory = data.index(b"PK\1\2")
    entry = bytearray(data[directory:end])
    size, offset = struct.unpack_from("<I", entry, 24)[0], struct.unpack_from("<I", entry, 42)[0]
    extra = struct.pack("<HHQQQ", 1, 24, size, size, offset)
    struct.pack_into("<II", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, len(extra))
    entry = bytes(entry) + extra
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), directory)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, directory + len(entry), 1)
    ending = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    whole = data[:directory] + entry + record + locator + ending
    assert contents(opened(whole)) == {"a/0": b"abc"}
    with pytest.raises(CorruptCheckpointError, match="size"):
        opened(whole.replace(extra, b"\2" + extra[1:]))
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        opened(whole.replace(b"PK\6\6", b"PK\6\5"))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused(method):
    with pytest.raises(UnsafeObjectError, match=r"a/data/0.*compressed"):
        opened(archive({"a/data/0": bytes(1000)}, method))


def test_encrypted_members_are_refused():
    data = bytearray(archive({"a/0": b"abc"}))
    data[data.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(UnsafeObjectError, match="encrypted"):
        opened(bytes(data))


def patched(place: bytes, offset: int, layout: str, value: int) -> bytes:
    data = bytearray(archive(MEMBERS))
    struct.pack_into(layout, data, data.index(place) + offset, value)
    return bytes(data)


LIES = {
    "the size in the directory": (patched(b"PK\1\2", 24, "<I", 5), "stored in"),
    "both sizes": (patched(b"PK\1\2", 20, "<I", 7), "stored in"),
    "the place of the header": (patched(b"PK\1\2", 42, "<I", 3), "are needed"),
    "a place beyond the end": (patched(b"PK\1\2", 42, "<I", 1 << 30), "reaches into"),
    "the name in the header": (patched(b"PK\3\4", 30, "<B", ord("b")), "is not where"),
    "the method in the header": (patched(b"PK\3\4", 8, "<H", 8), "is not where"),
    "the place of the directory": (patched(b"PK\5\6", 16, "<I", 1), "damaged"),
    "the size of the directory": (patched(b"PK\5\6", 12, "<I", 1 << 31), "is said to have"),
    "the number of entries": (patched(b"PK\5\6", 10, "<H", 9), "cut off"),
    "a comment": (patched(b"PK\5\6", 20, "<H", 1), "no zip archive"),
}


@pytest.mark.parametrize("lie", LIES)
def test_archives_that_lie_are_refused(lie):
    data, message = LIES[lie]
    with pytest.raises(CorruptCheckpointError, match=message):
        contents(opened(data))


def test_a_name_that_stands_twice_is_refused():
    data = archive({"a/0": b"x", "a/1": b"y"}).replace(b"a/1", b"a/0")
    with pytest.raises(CorruptCheckpointError, match="twice"):
        opened(data)


def test_members_over_each_other_are_refused():
    inner = archive({"a/1": b"y"})
    inner_header = inner[: inner.index(b"PK\1\2")]
    data = bytearray(archive({"a/0": inner_header, "a/1": b"y"}))
    where = data.rindex(b"PK\1\2")
    struct.pack_into("<I", data, where + 42, data.index(inner_header))
    with pytest.raises(CorruptCheckpointError, match="over each other"):
        contents(opened(bytes(data)))


def test_an_archive_cut_off_anywhere_is_refused():
    data = archive(MEMBERS)
    for length in [*range(40), *range(40, len(data), 97), *range(len(data) - 300, len(data))]:
        with pytest.raises(CorruptCheckpointError):
            contents(opened(data[:length]))


def test_damage_is_either_refused_or_harmless():
    data = archive(MEMBERS)
    chosen = random.Random(7)
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(chosen.randint(1, 3)):
            damaged[chosen.randrange(len(data))] = chosen.randrange(256)
        try:
            found = contents(opened(bytes(damaged)))
        except SavestreamError:
            continue
        assert sum(map(len, found.values())) <= len(data)


def test_reading_more_than_is_allowed_is_refused():
    found = opened(archive(MEMBERS))
    with pytest.raises(CorruptCheckpointError, match="up to 100"):
        found.read(found.members["a/data/0"], 100)
