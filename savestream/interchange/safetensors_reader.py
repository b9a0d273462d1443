"""Safetensors files, one or the shards of a model, as a state whose arrays lie in them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from typing import Any

from savestream.arrays.file_arrays import FileArray
from savestream.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError, UnsafeObjectError
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported, file_within, locating
from savestream.interchange.safetensors_header import (
    LENGTH_BYTES,
    SafetensorsHeader,
    header_length,
    import_description,
    parse_header,
)
from savestream.pipeline.limits import violations_are_corruption
from savestream.pipeline.strict_json import parse_json

__all__ = ["INDEX_SUFFIX", "read_safetensors"]

INDEX_SUFFIX = ".index.json"
_SUFFIX = ".safetensors"
_SHARD_NAME = re.compile(r".*-\d+-of-(\d+)\.safetensors")
_MAXIMUM_INDEX_BYTES = 256 * 1024 * 1024
_SHARDING_KEY = "DCP_SHARDING_INFO"


def read_safetensors(path: str, files: ForeignFiles, on_unsupported: OnUnsupported) -> ForeignState:
    """Read the headers; no element is read.

    Raises
    ------
    CheckpointNotFoundError
        A directory holds no safetensors file.
    CorruptCheckpointError, UnsafeObjectError
        A header contradicts itself, its file or the index; a dtype has no counterpart.
    """
    path = _index_of(path) if os.path.isdir(path) else path
    if os.path.isdir(path):
        names = _shards_without_index(path)
        shards = {name: _read_header(os.path.join(path, name), files) for name in names}
        return _Merged(path, shards, None, files, on_unsupported).state()
    if path.endswith(".json"):
        directory = os.path.dirname(path)
        with locating(path):
            weight_map = _read_index(path, files)
        shards = {name: _read_shard(path, name, files) for name in dict.fromkeys(weight_map.values())}
        return _Merged(directory, shards, weight_map, files, on_unsupported).state()
    shards = {os.path.basename(path): _read_header(path, files)}
    return _Merged(os.path.dirname(path), shards, None, files, on_unsupported).state()


def _index_of(directory: str) -> str:
    """The index in a directory; the directory itself where there is none."""
    found = sorted(glob.glob(os.path.join(glob.escape(directory), f"*{_SUFFIX}{INDEX_SUFFIX}")))
    if len(found) > 1:
        names = ", ".join(os.path.basename(name) for name in found)
        raise PlanError(f"{directory}: it holds several indexes ({names}); name the one to import")
    return found[0] if found else directory


def _shards_without_index(directory: str) -> list[str]:
    names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIX))
    if not names:
        raise CheckpointNotFoundError(f"{directory}: there is no safetensors file in it")
    partial = [name for name in names if _is_shard(name)]
    if partial:
        raise CorruptCheckpointError(
            f"{directory}: the shards of a model ({partial[0]} ...) without their index, so nothing tells whether all "
            "are there; fetch the index, or import the files one by one"
        )
    return names


def _is_shard(name: str) -> bool:
    """Whether a file is one of several of a model. (What DCP calls a shard is told apart by its content.)"""
    found = _SHARD_NAME.fullmatch(name)
    return found is not None and int(found[1]) > 1 and not name.startswith("shard-")


def _read_index(path: str, files: ForeignFiles) -> dict[str, str]:
    source = files.pool.file(path)
    nbytes = source.size_bytes()
    if nbytes > _MAXIMUM_INDEX_BYTES:
        raise CorruptCheckpointError(f"it has {nbytes} bytes; up to {_MAXIMUM_INDEX_BYTES} are read")
    with violations_are_corruption("the index"):
        index: Any = parse_json(source.read(0, nbytes))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptCheckpointError("the index has no weight_map from tensors to files")
    return weight_map


def _read_shard(index: str, name: str, files: ForeignFiles) -> SafetensorsHeader:
    with locating(index):
        path = file_within(os.path.dirname(index), name, follow_links=True)
    if not os.path.exists(path):
        raise CorruptCheckpointError(f"{path}: missing, although {os.path.basename(index)} names it")
    return _read_header(path, files)


def _read_header(path: str, files: ForeignFiles) -> SafetensorsHeader:
    files.check_stop()
    source = files.pool.file(path)
    with locating(path):
        size = source.size_bytes()
        nbytes = header_length(source.read(0, min(LENGTH_BYTES, size)), size)
        return parse_header(source.read(LENGTH_BYTES, nbytes), size - LENGTH_BYTES - nbytes)


class _Merged:
    """Tensors of all files under their names."""

    def __init__(
        self,
        directory: str,
        shards: Mapping[str, SafetensorsHeader],
        weight_map: Mapping[str, str] | None,
        files: ForeignFiles,
        on_unsupported: OnUnsupported,
    ) -> None:
        self._directory = directory
        self._shards = shards
        self._weight_map = weight_map
        self._files = files
        self._on_unsupported = on_unsupported
        self._arrays: dict[str, FileArray] = {}
        self._skipped: dict[str, str] = {}

    def state(self) -> ForeignState:
        self._refuse_partial_tensors()
        for name, header in self._shards.items():
            self._add(name, header)
        if self._weight_map is not None:
            absent = [key for key in self._weight_map if key not in self._arrays and key not in self._skipped]
            if absent:
                raise CorruptCheckpointError(
                    f"{os.path.join(self._directory, self._weight_map[absent[0]])}: {absent[0]} is not in it, although "
                    "the index says so"
                )
            self._arrays = {key: self._arrays[key] for key in self._weight_map if key in self._arrays}
        return ForeignState(self._arrays, self._metadata(), self._skipped)

    def _refuse_partial_tensors(self) -> None:
        for name, header in self._shards.items():
            path = os.path.join(self._directory, name)
            with locating(path):
                key = _partial_tensor((header.metadata or {}).get(_SHARDING_KEY))
            if key is not None:
                raise UnsafeObjectError(
                    f"{path}: DCP wrote it, and of {key[:200]} it holds a part only; join such files with "
                    "torch.distributed.checkpoint's consolidate_safetensors_files first"
                )

    def _add(self, name: str, header: SafetensorsHeader) -> None:
        path = os.path.join(self._directory, name)
        source = self._files.pool.file(path)
        begin = self._data_begins(path, source)
        for entry in header.entries:
            with locating(f"{path}: {entry.name}"):
                try:
                    self._check_place(entry.name, name)
                    dtype, shape = import_description(entry)
                except UnsafeObjectError as error:
                    if self._on_unsupported != "skip":
                        raise
                    self._skipped[entry.name] = str(error)
                    continue
                self._arrays[entry.name] = FileArray(source, begin + entry.start, dtype, shape, name=entry.name)

    def _data_begins(self, path: str, source: Any) -> int:
        with locating(path):
            return LENGTH_BYTES + int.from_bytes(source.read(0, LENGTH_BYTES), "little")

    def _check_place(self, key: str, name: str) -> None:
        if key in self._arrays:
            raise CorruptCheckpointError("another file holds a tensor of that name")
        if self._weight_map is not None and self._weight_map.get(key) != name:
            raise UnsafeObjectError(
                "the index does not name it; correct the index, or leave such tensors out (on_unsupported='skip')"
            )

    def _metadata(self) -> dict[str, object] | None:
        """The files' metadata in one: where they differ, by file."""
        given = {name: header.metadata for name, header in self._shards.items() if header.metadata is not None}
        if not given:
            return None
        merged: dict[str, object] = {}
        for key in dict.fromkeys(key for metadata in given.values() for key in metadata):
            values = {name: metadata[key] for name, metadata in given.items() if key in metadata}
            merged[key] = next(iter(values.values())) if len(set(values.values())) == 1 else values
        return merged


def _partial_tensor(sharding: str | None) -> str | None:
    """A tensor of which DCP says that the file does not hold its beginning."""
    if sharding is None:
        return None
    with violations_are_corruption(_SHARDING_KEY):
        info: Any = parse_json(sharding.encode())
    for key, fields in info.items() if isinstance(info, dict) else ():
        offsets = fields.get("saved_offsets") if isinstance(fields, dict) else None
        if isinstance(offsets, list) and any(offsets):
            return str(key)
    return None
