"""The ``.metadata`` file of a DCP checkpoint, read without PyTorch and without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.interchange.inert_objects import InertObject, NamedGlobal, show
from savestream.interchange.inert_pickle import read_pickle
from savestream.interchange.read_limits import ReadLimits
from savestream.interchange.torch_pickles import METADATA_DTYPES, TENSOR_NAMES, TorchDtype

__all__ = ["DcpChunk", "DcpItem", "DcpMetadata", "DcpTensor", "parse_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata."
_LEGACY = "torch.distributed._shard.sharded_tensor.metadata."
_MAXIMUM_DIMENSIONS = 64
_LIMIT = 1 << 62
_MAXIMUM_TRANSFORMS = 16
_MAXIMUM_PATH_PARTS = 128
# What a chunk and a part of a path take in memory.
_CHUNK_BYTES = 400
_PART_BYTES = 16

Shape = tuple[int, ...]


class DcpItem(msgspec.Struct, frozen=True):
    """Where an item's bytes lie, and what was done to them (in the order in which to undo it)."""

    path: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


class DcpChunk(msgspec.Struct, frozen=True):
    """A box of a tensor and the item that holds it."""

    offsets: Shape
    sizes: Shape
    item: DcpItem


class DcpTensor(msgspec.Struct, frozen=True):
    """A tensor: dtype name, shape, and the chunks that are stored."""

    dtype: str
    shape: Shape
    chunks: tuple[DcpChunk, ...]


class DcpMetadata(msgspec.Struct, frozen=True):
    """What a DCP checkpoint holds.

    Attributes
    ----------
    entries
        By key, in stored order: a tensor, or the item of an object.
    paths
        By key: dict keys (str) and list positions (int) that lead to it; None where the planner left none.
    """

    entries: Mapping[str, DcpTensor | DcpItem]
    paths: Mapping[str, tuple[str | int, ...]] | None


def _inert(name: str) -> NamedGlobal:
    """A class whose objects are made of nothing and then given their state."""

    def make(*arguments: object) -> InertObject:
        if arguments:
            raise CorruptCheckpointError(f"a {name} is made of arguments")
        return InertObject(name)

    return NamedGlobal(name, make)


def _ignored(name: str) -> NamedGlobal:
    """What says nothing about the elements: layouts, memory formats, the path that was saved to."""
    return NamedGlobal(name, lambda *_: None)


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_NAMES: Mapping[str, object] = MappingProxyType(
    {
        **METADATA_DTYPES,
        "torch.Size": TENSOR_NAMES["torch.Size"],
        "torch.serialization._get_layout": _ignored("torch.serialization._get_layout"),
        **{
            _METADATA + name: _inert(name)
            for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")
        },
        **{_METADATA + name: _inert(name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")},
        _METADATA + "_MEM_FORMAT_ENCODING": _ignored("_MEM_FORMAT_ENCODING"),
        _LEGACY + "TensorProperties": _inert("TensorProperties"),
        _LEGACY + "MEM_FORMAT_ENCODING": _ignored("MEM_FORMAT_ENCODING"),
        "torch.distributed.checkpoint.filesystem._StorageInfo": _inert("_StorageInfo"),
        **{f"{module}.{name}": _ignored(name) for module in ("pathlib", "pathlib._local") for name in _PATHS},
    }
)


def parse_metadata(data: bytes, check_stop: Callable[[], None]) -> DcpMetadata:
    """Read and check the pickle. ``check_stop`` raises where nobody waits for it any more.

    Raises
    ------
    UnsafeObjectError
        It names anything but DCP's own metadata classes; nothing was run.
    CorruptCheckpointError
        It is damaged, or an entry is not stored.
    """
    limits = ReadLimits(len(data), check_stop)
    fields = _fields(read_pickle(data, _NAMES, limits=limits, text_keys=True), "Metadata")
    described = fields.get("state_dict_metadata")
    stored = _storage(fields.get("storage_data"))
    if type(described) is not dict:
        raise CorruptCheckpointError("the metadata lists no entries")
    entries: dict[str, DcpTensor | DcpItem] = {}
    for key, entry in described.items():
        if type(key) is not str:
            raise CorruptCheckpointError(f"a key is {show(key)}, no text")
        check_stop()
        entries[key] = _entry(key, entry, stored, limits)
    return DcpMetadata(entries, _paths(fields.get("planner_data"), entries, limits))


def _fields(value: object, kind: str) -> dict[str, Any]:
    """The attributes of an object of the metadata."""
    if not isinstance(value, InertObject) or value.kind != kind or type(value.state) is not dict:
        raise CorruptCheckpointError(f"{show(value)} stands where a {kind} belongs")
    return value.state


def _shape(value: object, what: str) -> Shape:
    if not isinstance(value, tuple | list) or len(value) > _MAXIMUM_DIMENSIONS:
        raise CorruptCheckpointError(f"{what} is {show(value)}")
    if not all(type(size) is int and 0 <= size < _LIMIT for size in value):
        raise CorruptCheckpointError(f"{what} is {show(value)}")
    return tuple(value)


Stored = dict[tuple[str, Shape | None], DcpItem]


def _storage(storage_data: object) -> Stored:
    """Where each chunk is stored, by key and offsets."""
    if type(storage_data) is not dict:
        raise CorruptCheckpointError("the metadata does not say where anything is stored")
    stored: Stored = {}
    for index, info in storage_data.items():
        fields = _fields(index, "MetadataIndex")
        key, offset = fields.get("fqn"), fields.get("offset")
        if type(key) is not str:
            raise CorruptCheckpointError(f"an index names {show(key)}, no key")
        place = key, None if offset is None else _shape(offset, f"{key}: a chunk's offset")
        if place in stored:
            raise CorruptCheckpointError(f"{key}: two items are stored for the chunk at {place[1]}")
        stored[place] = _item(key, info)
    return stored


def _item(key: str, info: object) -> DcpItem:
    fields = _fields(info, "_StorageInfo")
    path, transforms = fields.get("relative_path"), fields.get("transform_descriptors") or ()
    offset, nbytes = _shape((fields.get("offset"), fields.get("length")), f"{key}: the item's place")
    if type(path) is not str or not path:
        raise CorruptCheckpointError(f"{key}: its file is {show(path)}")
    few = isinstance(transforms, tuple | list) and len(transforms) <= _MAXIMUM_TRANSFORMS
    if not few or not all(type(name) is str for name in transforms):
        raise CorruptCheckpointError(f"{key}: its transforms are {show(transforms)}")
    return DcpItem(path, offset, nbytes, tuple(transforms))


def _entry(key: str, entry: object, stored: Stored, limits: ReadLimits) -> DcpTensor | DcpItem:
    if isinstance(entry, InertObject) and entry.kind == "BytesStorageMetadata":
        return _find(stored, key, None)
    fields = _fields(entry, "TensorStorageMetadata")
    dtype, shape = _dtype(key, fields.get("properties")), _shape(fields.get("size"), f"{key}: its shape")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list | tuple):
        raise CorruptCheckpointError(f"{key}: its chunks are {show(chunks)}")
    limits.charge(_CHUNK_BYTES * len(chunks))  # entries may share a list of chunks
    found = tuple([_chunk(key, chunk, stored, len(chunks) == 1) for chunk in chunks])
    return DcpTensor(dtype, shape, found)


def _chunk(key: str, chunk: object, stored: Stored, only: bool) -> DcpChunk:
    fields = _fields(chunk, "ChunkStorageMetadata")
    offsets = _shape(fields.get("offsets"), f"{key}: a chunk's offsets")
    sizes = _shape(fields.get("sizes"), f"{key}: a chunk's sizes")
    item = stored.get((key, offsets)) or (stored.get((key, None)) if only else None)
    return DcpChunk(offsets, sizes, _find(stored, key, offsets) if item is None else item)


def _find(stored: Stored, key: str, offsets: Shape | None) -> DcpItem:
    item = stored.get((key, offsets))
    if item is None:
        where = "" if offsets is None else f" for the chunk at {offsets}"
        raise CorruptCheckpointError(
            f"{key}: nothing is stored{where}, although the metadata lists it; the save that wrote it lost data"
        )
    return item


def _dtype(key: str, properties: object) -> str:
    """The dtype's name; older files keep properties as attributes, newer ones as a tuple that begins with it."""
    state = properties.state if isinstance(properties, InertObject) and properties.kind == "TensorProperties" else None
    dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    if not isinstance(dtype, TorchDtype):
        raise UnsafeObjectError(f"{key}: its dtype is {show(dtype)}, which savestream cannot store")
    return dtype.name


def _paths(data: object, entries: Mapping[str, object], limits: ReadLimits) -> dict[str, tuple[str | int, ...]] | None:
    """The planner's paths, where it left one for every key."""
    if type(data) is not dict or not entries.keys() <= data.keys():
        return None
    return {key: _path(key, data[key], limits) for key in entries}


def _path(key: str, path: object, limits: ReadLimits) -> tuple[str | int, ...]:
    if not isinstance(path, tuple | list) or not path:
        raise CorruptCheckpointError(f"{key}: its path in the state is {show(path)}")
    if len(path) > _MAXIMUM_PATH_PARTS:
        raise CorruptCheckpointError(
            f"{key}: its path in the state is {len(path)} levels deep; up to {_MAXIMUM_PATH_PARTS} are read"
        )
    if not all(type(part) in (str, int) for part in path) or type(path[0]) is not str:
        raise CorruptCheckpointError(f"{key}: its path in the state is {show(path)}")
    # Paths may share their parts; the keys of the new checkpoint repeat them.
    limits.charge(sum(_PART_BYTES + (len(part) if isinstance(part, str) else 0) for part in path))
    return tuple(path)
