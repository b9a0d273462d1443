"""Comparison of states bit by bit, and small helpers of the round-trip tests."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import importlib.util
import struct
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from savestream import ShardedArray
from savestream.storage_backends import MemoryBackend, StorageBackend, WrapperBackend
from savestream.storage_backends.base import ObjectInfo, ObjectReader, ObjectWriter


def assert_same(found: Any, expected: Any, path: str = "state") -> None:
    """Fail unless both are the same bit by bit: values, dtypes, shapes, classes, key types, order."""
    assert type(found) is type(expected), f"{path}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, np.ndarray):
        _assert_same_array(found, expected, path)
    elif isinstance(expected, ShardedArray):
        assert (found.global_shape, found.global_offsets) == (expected.global_shape, expected.global_offsets), path
        assert_same(list(found.shards), list(expected.shards), f"{path}.shards")
    elif isinstance(expected, dict):
        _assert_same_mapping(found, expected, path)
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected), path
        if isinstance(expected, collections.deque):
            assert found.maxlen == expected.maxlen, path
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{position}]")
    elif isinstance(expected, set | frozenset):
        assert sorted(map(_canonical, found)) == sorted(map(_canonical, expected)), path
    elif isinstance(expected, enum.Enum):
        assert found is expected, path
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name), f"{path}.{field.name}")
    else:
        assert _canonical(found) == _canonical(expected), f"{path}: {found!r} instead of {expected!r}"


def _assert_same_mapping(found: Any, expected: Any, path: str) -> None:
    assert [_canonical(key) for key in found] == [_canonical(key) for key in expected], f"{path}: keys differ"
    if isinstance(expected, collections.defaultdict):
        assert found.default_factory is expected.default_factory, path
    if hasattr(expected, "type_name"):
        assert found.type_name == expected.type_name, path
    for (key, one), other in zip(expected.items(), found.values(), strict=True):  # nan keys cannot be looked up
        assert_same(other, one, f"{path}[{key!r}]")


def _assert_same_array(found: np.ndarray, expected: np.ndarray, path: str) -> None:
    assert found.dtype == expected.dtype, f"{path}: {found.dtype} instead of {expected.dtype}"
    assert found.dtype.itemsize == expected.dtype.itemsize, path
    assert found.dtype.fields == expected.dtype.fields, path
    assert found.shape == expected.shape, f"{path}: {found.shape} instead of {expected.shape}"
    if expected.dtype.names is None:
        assert value_bytes(found) == value_bytes(expected), f"{path}: other bits"
        return
    for name in expected.dtype.names:
        _assert_same_array(found[name], expected[name], f"{path}.{name}")


def value_bytes(array: np.ndarray) -> bytes:
    """The bits of an array's values; those that pad an 80-bit number to 16 bytes mean nothing, and numpy drops them."""
    if array.dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        numbers = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
        return numbers[:, :10].tobytes()
    return array.tobytes()


def _canonical(value: Any) -> tuple[str, str]:
    """Class and content of a plain value as text that tells -0.0 from 0.0, one nan from another, and 1 from True."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.generic):
        return kind, f"{value.dtype.str} {value.tobytes().hex()}"
    if isinstance(value, float):
        return kind, struct.pack(">d", value).hex()
    if isinstance(value, complex):
        return kind, struct.pack(">dd", value.real, value.imag).hex()
    if isinstance(value, tuple | list):
        return kind, repr([_canonical(item) for item in value])
    if isinstance(value, set | frozenset):
        return kind, repr(sorted(_canonical(item) for item in value))
    if isinstance(value, datetime.datetime | datetime.time):
        return kind, f"{value!r} {value.fold}"
    return kind, repr(value)


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Everything beneath a directory: contents of files, None for directories."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def fresh_place(name: str = "checkpoint") -> tuple[MemoryBackend, str]:
    """A place in memory that nobody else uses."""
    return MemoryBackend("test"), name


def load_example(name: str) -> ModuleType:
    """An example as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LowerCasingBackend(WrapperBackend):
    """Storage that does not tell upper from lower case: every path is lower-cased."""

    async def open_writer(self, path: str) -> ObjectWriter:
        return await super().open_writer(path.lower())

    async def open_reader(self, path: str) -> ObjectReader:
        return await super().open_reader(path.lower())

    async def get(self, path: str, *, maximum_bytes: int) -> bytes:
        return await super().get(path.lower(), maximum_bytes=maximum_bytes)

    async def put(self, path: str, data: bytes) -> None:
        await super().put(path.lower(), data)

    async def create(self, path: str, data: bytes, *, scratch: str) -> None:
        await super().create(path.lower(), data, scratch=scratch.lower())

    async def replace(self, path: str, data: bytes, *, scratch: str, expected_etag: str | None) -> None:
        await super().replace(path.lower(), data, scratch=scratch.lower(), expected_etag=expected_etag)

    async def head(self, path: str) -> ObjectInfo | None:
        return await super().head(path.lower())

    async def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return await super().list_objects(prefix.lower())

    async def list_directories(self, prefix: str) -> list[str]:
        return await super().list_directories(prefix.lower())

    async def delete(self, paths: Sequence[str]) -> None:
        await super().delete([path.lower() for path in paths])


async def stored_bytes(backend: StorageBackend, path: str = "") -> int:
    """Bytes of all data objects beneath a path."""
    return sum(found.size_bytes for found in await backend.list_objects(path) if found.path.endswith(".bin"))
