"""DCP checkpoints put together without PyTorch, so that every part of them can be wrong."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pickle_support import (
    FALSE,
    NONE,
    applied,
    array,
    attributes,
    instance,
    mapping,
    named,
    number,
    numbers,
    persistent,
    pickled,
    sequence,
    text,
)

METADATA = "torch.distributed.checkpoint.metadata."
STORAGES = {
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "complex64": "ComplexFloatStorage",
}


def size(values: Sequence[int]) -> bytes:
    return applied("torch.Size", numbers(values))


def zipped(members: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with these members in the directory ``archive``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def storage(dtype: str, key: str, count: int) -> bytes:
    """A reference to a storage in the archive."""
    kind = named(f"torch.{STORAGES[dtype]}")
    return persistent(sequence([text("storage"), kind, text(key), text("cpu"), number(count)]))


def tensor_program(
    dtype: str, shape: Sequence[int], strides: Sequence[int], *, offset: int = 0, count: int, key: str = "0"
) -> bytes:
    """How a tensor is pickled."""
    hooks = named("collections.OrderedDict") + b")R"
    return applied(
        "torch._utils._rebuild_tensor_v2",
        storage(dtype, key, count),
        number(offset),
        numbers(shape),
        numbers(strides),
        FALSE,
        hooks,
    )


def element_strides(values: np.ndarray[Any, Any]) -> list[int]:
    return [step // values.itemsize for step in values.strides]


def tensor_archive(values: np.ndarray[Any, Any], **members: bytes) -> bytes:
    """What ``torch.save`` makes of a tensor; further members replace or add."""
    dtype = values.dtype.name
    program = tensor_program(dtype, values.shape, element_strides(values), count=values.size)
    stored = values.tobytes() if values.flags.c_contiguous else values.T.tobytes()
    return archive_of(program, {"data/0": stored, **members})


def archive_of(
    program: bytes, members: Mapping[str, bytes] | None = None, *, method: int = zipfile.ZIP_STORED
) -> bytes:
    parts = {"data.pkl": pickled(program), "byteorder": b"little", "version": b"3\n"}
    return zipped({**parts, **(members or {})}, method=method)


class DcpBuilder:
    """Collects items, then writes the directory. Everything may be overridden after it was added."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.entries: list[tuple[bytes, bytes]] = []
        self.paths: list[tuple[bytes, bytes]] = []
        self.stored: list[tuple[bytes, bytes]] = []
        self.planner_data: bytes | None = None

    def item(self, data: bytes, name: str = "__0_0.distcp", *, transforms: Sequence[str] = ()) -> bytes:
        """Append an item to a file; what the metadata says of it."""
        content = self.files.setdefault(name, bytearray())
        offset = len(content)
        content += data
        return self.place(name, offset, len(data), transforms)

    def place(self, name: str, offset: int, nbytes: int, transforms: Sequence[str] = ()) -> bytes:
        fields = {"relative_path": text(name), "offset": number(offset), "length": number(nbytes)}
        if transforms:
            fields["transform_descriptors"] = array(map(text, transforms))
        return instance("torch.distributed.checkpoint.filesystem._StorageInfo", attributes(**fields))

    def store(self, key: str, offsets: Sequence[int] | None, info: bytes) -> None:
        fields = {"fqn": text(key), "index": NONE}
        if offsets is not None:
            fields["offset"] = size(offsets)
        self.stored.append((instance(METADATA + "MetadataIndex", attributes(**fields)), info))

    def tensor(self, key: str, values: np.ndarray[Any, Any], path: Sequence[str | int] | None = None) -> None:
        """A whole tensor, under its path (default: its key)."""
        self.sharded(key, values.dtype.name, values.shape, [((0,) * values.ndim, values)], path)

    def sharded(
        self,
        key: str,
        dtype: str,
        shape: Sequence[int],
        chunks: Sequence[tuple[Sequence[int], np.ndarray[Any, Any]]],
        path: Sequence[str | int] | None = None,
        *,
        transforms: Sequence[str] = (),
    ) -> None:
        self.describe(key, dtype, shape, [(offsets, values.shape) for offsets, values in chunks], path)
        for offsets, values in chunks:
            self.store(key, offsets, self.item(tensor_archive(values), transforms=transforms))

    def describe(
        self,
        key: str,
        dtype: str,
        shape: Sequence[int],
        chunks: Sequence[tuple[Sequence[int], Sequence[int]]],
        path: Sequence[str | int] | None = None,
    ) -> None:
        """The entry of a tensor, without its items."""
        layout = applied("torch.serialization._get_layout", text("torch.strided"))
        memory_format = applied(METADATA + "_MEM_FORMAT_ENCODING", number(0))
        state = sequence([named(f"torch.{dtype}"), layout, FALSE, memory_format, FALSE])
        boxes = [
            instance(METADATA + "ChunkStorageMetadata", attributes(offsets=size(offsets), sizes=size(sizes)))
            for offsets, sizes in chunks
        ]
        entry = attributes(
            properties=instance(METADATA + "TensorProperties", state), size=size(shape), chunks=array(boxes)
        )
        self.entries.append((text(key), instance(METADATA + "TensorStorageMetadata", entry)))
        self._add_path(key, path)

    def object(self, key: str, data: bytes, path: Sequence[str | int] | None = None) -> None:
        """The item of an object: ``data`` are its bytes."""
        self.entries.append((text(key), named(METADATA + "BytesStorageMetadata") + b")\x81"))
        self.store(key, None, self.item(data))
        self._add_path(key, path)

    def _add_path(self, key: str, path: Sequence[str | int] | None) -> None:
        parts = [text(part) if isinstance(part, str) else number(part) for part in path or (key,)]
        self.paths.append((text(key), sequence(parts)))

    def metadata(self) -> bytes:
        """The pickle."""
        meta = attributes(checkpoint_id=applied("pathlib.PosixPath", text("/"), text("tmp")), save_id=NONE)
        return pickled(
            instance(
                METADATA + "Metadata",
                attributes(
                    state_dict_metadata=mapping(self.entries),
                    planner_data=mapping(self.paths) if self.planner_data is None else self.planner_data,
                    storage_data=mapping(self.stored),
                    storage_meta=instance(METADATA + "StorageMeta", meta),
                    version=text("1.0.0"),
                ),
            )
        )

    def write(self, directory: Path) -> Path:
        directory.mkdir(exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        (directory / ".metadata").write_bytes(self.metadata())
        return directory


def volume(shape: Sequence[int]) -> int:
    return math.prod(shape)
