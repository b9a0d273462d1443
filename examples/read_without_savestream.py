"""Read a savestream checkpoint without savestream: numpy, zstandard and the standard library suffice.

    python read_without_savestream.py CHECKPOINT

prints every leaf. ``read_checkpoint(path)`` returns the state: containers and Python values, numpy arrays as leaves.
Namedtuples come back as tuples, dataclasses as dicts, enum members as their values, objects of frameworks and random
generators as their states, pickles as their bytes: nothing that the files hold is executed. Without ``ml_dtypes`` its
types come back as unsigned integers of the same bits. With ``xxhash`` every frame's digest is checked; SHA-256 of root
and parts always is.

It follows docs/format.md, whose section numbers stand in the comments, and doubles as a test of that document.
"""

from __future__ import annotations

import argparse
import base64
import bisect
import collections
import datetime
import decimal
import fractions
import functools
import hashlib
import json
import pathlib
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None  # type: ignore[assignment]
try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]

SEAL_BYTES = len(',"sha256":"') + 64 + len('"}')
LARGEST_WINDOW_BYTES = 8 * 1024 * 1024


class FormatError(ValueError):
    """The files are no checkpoint of version 1, or are damaged."""


def expect(condition: object, problem: str) -> None:
    if not condition:
        raise FormatError(problem)


# --- 3, 4: root and parts ---------------------------------------------------------------------------------


def parse_root(data: bytes) -> dict[str, Any]:
    """Parse a root manifest and check its SHA-256."""
    expect(data.startswith(b'{"format":"savestream","version":['), "not a savestream manifest")
    body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    expect(seal == b',"sha256":"%b"}' % hashlib.sha256(body).hexdigest().encode(), "the root's SHA-256 differs")
    return checked_version(json.loads(data, object_pairs_hook=unique_members))


def parse_part(data: bytes, entry: dict[str, Any]) -> dict[str, Any]:
    """Parse an index part and check it against the root's entry for it."""
    expect(len(data) == entry["bytes"], f"{entry['path']}: wrong size")
    expect(hashlib.sha256(data).hexdigest() == entry["sha256"], f"{entry['path']}: its SHA-256 differs")
    expect(data.startswith(b'{"format":"savestream-index","version":['), f"{entry['path']}: not an index part")
    part = checked_version(json.loads(data, object_pairs_hook=unique_members))
    expect(part["rank"] == entry["rank"], f"{entry['path']}: belongs to another rank")
    return part


def checked_version(members: dict[str, Any]) -> dict[str, Any]:
    expect(members["version"][0] == 1, f"format version {members['version']} is newer than this reader")
    expect(not members["requires"], f"requires {members['requires']}, which this reader does not know")
    return members


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    expect(len(members) == len(pairs), "an object repeats a key")
    return members


# --- 5: columns -------------------------------------------------------------------------------------------


def column(value: Any) -> np.ndarray:
    """An integer column."""
    if isinstance(value, list):
        return np.array(value, np.int64)
    dtype, count = np.dtype(value["type"]), value["count"]
    planes = decompress(base64.b64decode(value["zstd_b64"], validate=True), count * dtype.itemsize)
    rows = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T
    return np.ascontiguousarray(rows).reshape(-1).view(dtype).astype(np.int64)


def digests(value: Any) -> list[bytes]:
    """A column of 16-byte digests."""
    data = base64.b64decode(value["b64"], validate=True)
    expect(value["type"] == "|V16" and len(data) == 16 * value["count"], "a damaged column of digests")
    return [data[start : start + 16] for start in range(0, len(data), 16)]


def decompress(frame: bytes, nbytes: int) -> bytes:
    """One zstd frame, whose header must confirm ``nbytes`` before anything is allocated for it."""
    header = zstandard.get_frame_parameters(frame)
    expect(header.content_size == nbytes, "a zstd frame of another length than stated")
    expect(header.window_size <= LARGEST_WINDOW_BYTES, "a zstd frame with too large a window")
    if nbytes == 0:
        return b""
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=nbytes, allow_extra_data=False)


# --- 6: dtype names ---------------------------------------------------------------------------------------


def dtype_from_name(name: str | dict[str, Any]) -> np.dtype:
    """The numpy dtype of a name; types of ml_dtypes become unsigned integers where that is not installed."""
    if isinstance(name, str) and name.startswith("{"):
        name = json.loads(name)
    if isinstance(name, dict):
        fields = name["fields"]
        formats = [np.dtype((dtype_from_name(inner), tuple(shape))) for _, inner, _, shape in fields]
        names, offsets = [field[0] for field in fields], [field[2] for field in fields]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": name["itemsize"]})
    if re.fullmatch(r"bfloat16|float[468]_[a-z0-9]{3,16}|u?int[124]", name):
        return np.dtype(getattr(ml_dtypes, name)) if ml_dtypes else np.dtype("u2" if name == "bfloat16" else "u1")
    dtype = np.dtype(name)
    expect(not dtype.hasobject, f"{name} is no dtype of the format")
    return dtype


# --- 7: tree and values -----------------------------------------------------------------------------------


def build(node: dict[str, Any], tensor: Callable[[int], Any], value: Callable[[int], Any]) -> Any:
    """The state behind a tree node; ``tensor`` and ``value`` give the leaves by number."""
    if "t" in node:
        return tensor(node["t"])
    if "v" in node:
        return value(node["v"])
    for kind in ("list", "tuple", "deque"):
        if kind in node:
            items = [build(item, tensor, value) for item in node[kind]]
            if kind == "deque":
                return collections.deque(items, node["maxlen"])
            return tuple(items) if kind == "tuple" else items
    for kind in ("dict", "OrderedDict", "defaultdict", "Counter", "dataclass", "namedtuple"):
        if kind in node:
            pairs = {decode_value(key): build(item, tensor, value) for key, item in node[kind]}
            expect(len(pairs) == len(node[kind]), "a mapping repeats a key")
            if kind == "namedtuple":
                return tuple(pairs.values())
            if kind == "defaultdict":
                return collections.defaultdict(FACTORIES.get(node["factory"]), pairs)
            if "metadata" in node:
                return with_metadata(pairs, decode_value(node["metadata"]))
            return {"OrderedDict": collections.OrderedDict, "Counter": counter}.get(kind, dict)(pairs)
    raise FormatError(f"a tree node of unknown kind: {list(node)}")


PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath)
FACTORIES = {kind.__name__: kind for kind in (list, dict, int, float, str, set, tuple, bool)}


def counter(pairs: dict[Any, Any]) -> collections.Counter:
    found: collections.Counter = collections.Counter()
    dict.update(found, pairs)  # Counter.update would add
    return found


def with_metadata(pairs: dict[Any, Any], metadata: Any) -> collections.OrderedDict:
    """What PyTorch's ``state_dict()`` returned: its attribute tells the version of each module's entries."""
    found: Any = collections.OrderedDict(pairs)
    found._metadata = metadata
    return found


def decode_value(node: Any) -> Any:
    """A Python value from its tagged JSON."""
    if isinstance(node, list):
        return [decode_value(item) for item in node]
    if not isinstance(node, dict):
        return node
    if not any(key.startswith("$") for key in node):
        return {key: decode_value(item) for key, item in node.items()}
    ((tag, body),) = node.items()
    expect(tag in TAGS, f"unknown value tag {tag}")
    return TAGS[tag](body)


def decode_pairs(pairs: list[Any]) -> dict[Any, Any]:
    return {decode_value(key): decode_value(item) for key, item in pairs}


def decode_scalar(body: list[str]) -> Any:
    dtype, data = dtype_from_name(body[0]), base64.b64decode(body[1])
    expect(dtype.itemsize == len(data), "a scalar of another size than its dtype's")
    return np.ndarray((), dtype, data)[()] if data else np.zeros((), dtype)[()]


def decode_zone(zone: list[Any] | None) -> datetime.tzinfo | None:
    if zone is None:
        return None
    offset = datetime.timedelta(*zone[:3])
    return datetime.timezone(offset) if zone[3] is None else datetime.timezone(offset, zone[3])


def decode_datetime(body: list[Any]) -> datetime.datetime:
    return datetime.datetime(*body[:7], tzinfo=decode_zone(body[8]), fold=body[7])


def decode_time(body: list[Any]) -> datetime.time:
    return datetime.time(*body[:4], tzinfo=decode_zone(body[5]), fold=body[4])


TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda body: int(body, 16),
    "$float": lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
    "$complex": lambda body: complex(*map(decode_value, body)),
    "$str": lambda body: base64.b64decode(body).decode("utf-8", "surrogatepass"),
    "$bytes": base64.b64decode,
    "$bytearray": lambda body: bytearray(base64.b64decode(body)),
    "$tuple": lambda body: tuple(map(decode_value, body)),
    "$set": lambda body: set(map(decode_value, body)),
    "$frozenset": lambda body: frozenset(map(decode_value, body)),
    "$dict": decode_pairs,
    "$odict": lambda body: collections.OrderedDict(decode_pairs(body)),
    "$state_dict": lambda body: with_metadata(decode_pairs(body[0]), decode_value(body[1])),
    "$counter": lambda body: counter(decode_pairs(body)),
    "$defaultdict": lambda body: collections.defaultdict(FACTORIES.get(body[0]), decode_pairs(body[1])),
    "$deque": lambda body: collections.deque(map(decode_value, body[0]), body[1]),
    "$namedtuple": lambda body: tuple(map(decode_value, body[2])),
    "$dataclass": lambda body: dict(zip(body[1], map(decode_value, body[2]), strict=True)),
    "$enum": lambda body: decode_value(body[2]),
    "$object": lambda body: decode_value(body[1]),
    "$scalar": decode_scalar,
    "$npstr": lambda body: np.str_(decode_value(body)),
    "$npbytes": lambda body: np.bytes_(base64.b64decode(body)),
    "$dtype": dtype_from_name,
    "$datetime": decode_datetime,
    "$date": lambda body: datetime.date(*body),
    "$time": decode_time,
    "$timedelta": lambda body: datetime.timedelta(*body),
    "$range": lambda body: range(*map(decode_value, body)),
    "$slice": lambda body: slice(*map(decode_value, body)),
    "$ellipsis": lambda _: ...,
    "$path": lambda body: PATHS["Windows" in body[0]](decode_value(body[1])),
    "$decimal": decimal.Decimal,
    "$fraction": lambda body: fractions.Fraction(*map(decode_value, body)),
    "$uuid": lambda body: uuid.UUID(hex=body),
    "$pickle": base64.b64decode,  # the bytes; never unpickled
}


# --- 8: frames and codecs ---------------------------------------------------------------------------------


def decode_frame(stored: bytes, codec: str, itemsize: int, raw_length: int) -> bytes:
    """The raw bytes of one frame."""
    if codec == "raw":
        raw = stored
    elif codec == "zstd":
        raw = decompress(stored, raw_length)
    else:
        raw = merge_planes(stored, 8 if itemsize == 16 else itemsize, raw_length)
    expect(len(raw) == raw_length, "a frame of another length than stated")
    return raw


def merge_planes(stored: bytes, width: int, raw_length: int) -> bytes:
    """``planes-zstd``: modes, lengths, planes, tail."""
    count, tail_bytes = divmod(raw_length, width)
    lengths = struct.unpack_from(f"<{width}I", stored, width)
    planes = np.empty((count, width), np.uint8)
    position = 5 * width
    for plane, (mode, length) in enumerate(zip(stored[:width], lengths, strict=True)):
        content = stored[position : position + length]
        position += length
        if mode == 1:
            content = decompress(content, count)
        expect(mode in (0, 1, 2) and len(content) == (1 if mode == 2 else count), "a damaged byte plane")
        planes[:, plane] = np.frombuffer(content, np.uint8)
    expect(len(stored) == position + tail_bytes, "byte planes of another length than stated")
    return planes.tobytes() + stored[position:]


class RawStream:
    """One rank's raw stream: its frames, one after the other."""

    def __init__(self, directory: pathlib.Path, checkpoint_id: str, part: dict[str, Any], codecs: list[str]) -> None:
        frames = part["frames"]
        self._paths = []
        for entry in part["objects"]:
            valid = re.fullmatch(checkpoint_id + r"/r[0-9]{5,10}-[0-9]{4,10}\.bin", entry["path"])
            expect(entry["source"] == 0 and valid, f"{entry['path']!r} is no data object of this checkpoint")
            self._paths.append(directory / entry["path"])
        names = ("raw_length", "object", "offset", "stored_length", "codec", "itemsize")
        self._rows = list(zip(*(column(frames[name]).tolist() for name in names), strict=True))
        self._stored_digests, self._raw_digests = digests(frames["stored_digest"]), digests(frames["raw_digest"])
        self._starts = np.cumsum([0, *(row[0] for row in self._rows)]).tolist()
        self._codecs = codecs
        self.frame = functools.lru_cache(maxsize=4)(self._read_frame)  # small chunks share a frame

    def _read_frame(self, number: int) -> bytes:
        raw_length, index, offset, stored_length, codec, itemsize = self._rows[number]
        with self._paths[index].open("rb") as file:
            file.seek(offset)
            stored = file.read(stored_length)
        expect(len(stored) == stored_length, f"{self._paths[index]}: too short")
        check_digest(stored, self._stored_digests[number], f"{self._paths[index]}, byte {offset}")
        raw = decode_frame(stored, self._codecs[codec], itemsize, raw_length)
        check_digest(raw, self._raw_digests[number], f"{self._paths[index]}, byte {offset}, decoded")
        return raw

    def read(self, start: int, nbytes: int) -> bytes:
        """Bytes ``start`` to ``start + nbytes`` of the stream."""
        pieces = []
        stop = start + nbytes
        while start < stop:
            number = bisect.bisect_right(self._starts, start) - 1
            expect(number < len(self._rows), "a chunk lies outside of its stream")
            base = self._starts[number]
            piece = self.frame(number)[start - base : stop - base]
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)


def check_digest(data: bytes, expected: bytes, what: str) -> None:
    if xxhash is not None:
        expect(xxhash.xxh3_128(data).digest() == expected, f"{what}: its digest differs")


# --- tensors, and the whole ---------------------------------------------------------------------------------


class Tensors:
    """Arrays and opaque bytes by number."""

    def __init__(self, root: dict[str, Any], streams: list[RawStream]) -> None:
        table, chunks = root["tensors"], root["chunks"]
        self._dtypes = [dtype_from_name(name) for name in root["dtypes"]]
        self._kind, self._dtype = column(table["kind"]).tolist(), column(table["dtype"]).tolist()
        self._shapes = list(split(column(table["shape"]).tolist(), column(table["ndim"]).tolist()))
        counts = column(table["n_chunks"]).tolist()
        self._first = np.cumsum([0, *counts]).tolist()
        dimensions = np.repeat(column(table["ndim"]), counts).tolist()
        self._part, self._raw_offset = column(chunks["part"]).tolist(), column(chunks["raw_offset"]).tolist()
        self._offsets = list(split(column(chunks["offsets"]).tolist(), dimensions))
        self._sizes = list(split(column(chunks["sizes"]).tolist(), dimensions))
        self._streams = streams

    def __getitem__(self, number: int) -> Any:
        dtype, shape = self._dtypes[self._dtype[number]], self._shapes[number]
        array = np.empty(shape, dtype)
        for chunk in range(self._first[number], self._first[number + 1]):
            sizes = self._sizes[chunk]
            count = int(np.prod(sizes, dtype=np.int64))
            data = self._streams[self._part[chunk]].read(self._raw_offset[chunk], count * dtype.itemsize)
            box = tuple(slice(low, low + size) for low, size in zip(self._offsets[chunk], sizes, strict=True))
            if count and dtype.itemsize:
                array[box] = np.frombuffer(data, dtype).reshape(sizes)
        if self._kind[number] == 3:
            return decode_value(json.loads(array.tobytes()))
        return array if self._kind[number] == 0 else array.tobytes()


def split(flat: list[int], lengths: list[int]) -> Iterator[tuple[int, ...]]:
    position = 0
    for length in lengths:
        yield tuple(flat[position : position + length])
        position += length


def read_checkpoint(path: str | pathlib.Path) -> Any:
    """The state stored in the checkpoint directory ``path``."""
    directory = pathlib.Path(path)
    root = parse_root((directory / "manifest.json").read_bytes())
    checkpoint_id = root["checkpoint_id"]
    expect(re.fullmatch(r"[0-9a-f]{32}", checkpoint_id), "checkpoint_id is not 32 hexadecimal digits")
    streams = []
    for entry in root["parts"]:
        valid = re.fullmatch(checkpoint_id + r"/r[0-9]{5,10}\.index\.json", entry["path"])
        expect(valid, f"{entry['path']!r} is no part of this checkpoint")
        part = parse_part((directory / entry["path"]).read_bytes(), entry)
        streams.append(RawStream(directory, checkpoint_id, part, root["codecs"]))
    return build(root["tree"], Tensors(root, streams).__getitem__, lambda number: decode_value(root["values"][number]))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a state with a readable name."""
    if isinstance(value, dict | list | tuple | collections.deque) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}[{key!r}]")
    else:
        yield name, value


def main() -> None:
    parser = argparse.ArgumentParser(description="List what a savestream checkpoint holds, without savestream.")
    parser.add_argument("checkpoint", type=pathlib.Path)
    arguments = parser.parse_args()
    for name, leaf in leaves(read_checkpoint(arguments.checkpoint)):
        described = f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, np.ndarray) else repr(leaf)[:100]
        print(f"{name}  {described}")


if __name__ == "__main__":
    main()
