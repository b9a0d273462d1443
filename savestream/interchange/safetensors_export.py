"""Writes a checkpoint's arrays to safetensors files, with little memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from anyio import CancelScope

from savestream.arrays import dtype_from_name
from savestream.arrays.strided_reads import element_boxes
from savestream.errors import PlanError
from savestream.interchange.export_files import ExportDirectory, ScratchFile, require_absent
from savestream.interchange.safetensors_header import is_text
from savestream.interchange.safetensors_plan import ExportFile, ExportTensor, plan_export
from savestream.pipeline.buffers import aligned_bytes
from savestream.pipeline.open_checkpoint import OpenCheckpoint, following_overwrites, metadata_of
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.rank_reads import BoxRead, read_boxes
from savestream.planners.geometry import intersect, narrow
from savestream.planners.metadata import ChunkStorageMetadata, Metadata, PlannerData
from savestream.planners.values import decode_value
from savestream.storage_backends import Location
from savestream.threads import run_in_worker, task_group

__all__ = ["Export"]

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_BATCH_BYTES = 32 * 1024 * 1024
_WRITERS = 2


class Export(msgspec.Struct):
    """The caller's arguments."""

    location: Location
    dest: str
    keys: Sequence[str | tuple[object, ...]] | None
    maximum_bytes: int
    texts: Mapping[str, str] | None
    overwrite: bool

    async def run(self) -> list[Path]:
        """Export, or raise and leave nothing behind; the files' paths, an index last."""
        return await following_overwrites(self.location, self._export)

    async def _export(self, checkpoint: OpenCheckpoint) -> list[Path]:
        files = await run_in_worker(self._plan, checkpoint)
        names = _Names(self.dest)
        directory = ExportDirectory(names.directory)
        if not self.overwrite:
            await run_in_worker(require_absent, names.directory, names.all(len(files)))
        try:
            await run_in_worker(directory.prepare)
            written = names.files(len(files))
            for name, file in zip(written, files, strict=True):
                await _write_file(checkpoint, file, await run_in_worker(directory.begin, name))
            if len(files) > 1:
                await run_in_worker(directory.put, names.index, _index(written, files))
                written.append(names.index)
            await run_in_worker(_publish, directory, names, written, self.overwrite)
        finally:
            with CancelScope(shield=True):
                await run_in_worker(directory.clean_up)
        return [Path(directory.path(name)) for name in written]

    def _plan(self, checkpoint: OpenCheckpoint) -> list[ExportFile]:
        metadata: Metadata = metadata_of(checkpoint)
        paths = metadata.planner_data.mappings if isinstance(metadata.planner_data, PlannerData) else {}
        texts = self.texts
        if texts is None:
            texts = _as_texts(decode_value(checkpoint.root.user, key="metadata"))
        return plan_export(metadata, self.keys, paths, texts, self.maximum_bytes, checkpoint.place)


def _as_texts(metadata: Any) -> Mapping[str, str] | None:
    """The checkpoint's own metadata where the format can hold it."""
    if type(metadata) is not dict:
        return None
    pairs = metadata.items()
    return metadata if all(is_text(text) for pair in pairs for text in pair) else None


class _Names:
    """Where an export goes: ``dest`` is a file's name, or a directory that gets a ``model``."""

    def __init__(self, dest: str) -> None:
        is_file = dest.endswith(_SUFFIX)
        self.directory = os.path.dirname(dest) if is_file else dest
        self.stem = os.path.basename(dest).removesuffix(_SUFFIX) if is_file else "model"
        if not self.stem:
            raise PlanError(f"dest={dest!r}: a file needs a name before {_SUFFIX}")
        self.single = self.stem + _SUFFIX
        self.index = self.stem + _INDEX_SUFFIX
        self._shard = re.compile(rf"{re.escape(self.stem)}-\d{{5,}}-of-\d{{5,}}\.safetensors")

    def files(self, count: int) -> list[str]:
        """Names of the files with tensors."""
        if count == 1:
            return [self.single]
        return [f"{self.stem}-{number + 1:05d}-of-{count:05d}{_SUFFIX}" for number in range(count)]

    def all(self, count: int) -> list[str]:
        """Every name that an export uses, or that would be mistaken for a part of it."""
        return list(dict.fromkeys([*self.files(count), self.single, self.index]))

    def superseded(self, written: Sequence[str]) -> list[str]:
        """Files of an earlier export to the same place: its single file, its index, and what that names."""
        found = [name for name in (self.single, self.index) if os.path.lexists(os.path.join(self.directory, name))]
        if self.index in found:
            found += self._indexed()
        return [name for name in found if name not in written]

    def _indexed(self) -> list[str]:
        try:
            with open(os.path.join(self.directory, self.index), "rb") as file:
                names = set(json.load(file)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no index of an export, so nothing of ours
            return []
        return sorted(name for name in names if isinstance(name, str) and self._shard.fullmatch(name))


def _publish(directory: ExportDirectory, names: _Names, written: Sequence[str], overwrite: bool) -> None:
    """Single files replace what is there at once; shards only while no index names them."""
    if not overwrite:
        directory.publish(written, overwrite=False)
        return
    superseded = names.superseded(written)
    if names.index in written:
        directory.remove([names.index])
        directory.sync()
    directory.publish(written, overwrite=True)
    directory.remove(sorted(superseded, key=lambda name: name != names.index))
    directory.sync()


def _index(names: Sequence[str], files: Sequence[ExportFile]) -> bytes:
    weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
    total = sum(file.data_bytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


async def _write_file(checkpoint: OpenCheckpoint, file: ExportFile, scratch: ScratchFile) -> None:
    await run_in_worker(scratch.write, 0, memoryview(file.header))
    batches = iter(await run_in_worker(list, _batches(file)))
    options = LoadOptions(threads=2)

    async def work() -> None:
        buffer = aligned_bytes(_BATCH_BYTES, share_with_forks=False)
        for batch in batches:
            data = buffer[: batch.nbytes]
            await read_boxes(checkpoint, await run_in_worker(batch.reads, checkpoint, data), options)
            await run_in_worker(scratch.write, len(file.header) + batch.start, data.data)

    async with task_group() as group:
        for _ in range(_WRITERS):
            group.start_soon(work)
    await run_in_worker(scratch.finish)


class _Slice(msgspec.Struct, frozen=True):
    """Elements ``start:stop`` of a tensor, at ``position`` of the batch."""

    tensor: ExportTensor
    start: int
    stop: int
    position: int


class _Batch(msgspec.Struct, frozen=True):
    """Bytes of a file's data that are read and written at once."""

    start: int
    nbytes: int
    slices: list[_Slice]

    def reads(self, checkpoint: OpenCheckpoint, data: np.ndarray[Any, Any]) -> list[BoxRead]:
        """What to read where in ``data``."""
        found: list[BoxRead] = []
        for piece in self.slices:
            nbytes = (piece.stop - piece.start) * piece.tensor.itemsize
            elements = data[piece.position : piece.position + nbytes]
            found += _reads(checkpoint, piece, elements.view(dtype_from_name(piece.tensor.entry.properties.dtype)))
        return found


def _batches(file: ExportFile) -> Iterator[_Batch]:
    """The file's data in order, in batches of at most 32 MiB."""
    batch = _Batch(0, 0, [])
    for tensor, tensor_start in zip(file.tensors, file.starts, strict=True):
        count, done = tensor.nbytes // tensor.itemsize, 0
        while done < count:
            room = (_BATCH_BYTES - batch.nbytes) // tensor.itemsize
            if not room:
                yield batch
                batch = _Batch(tensor_start + done * tensor.itemsize, 0, [])
                continue
            stop = min(done + room, count)
            batch.slices.append(_Slice(tensor, done, stop, batch.nbytes))
            batch = _Batch(batch.start, batch.nbytes + (stop - done) * tensor.itemsize, batch.slices)
            done = stop
    if batch.nbytes:
        yield batch


def _reads(checkpoint: OpenCheckpoint, piece: _Slice, elements: np.ndarray[Any, Any]) -> Iterator[BoxRead]:
    """The stored boxes that make up a range of a tensor's elements."""
    key, entry = piece.tensor.key, piece.tensor.entry
    for offsets, sizes, position in element_boxes(tuple(entry.size), piece.start, piece.stop):
        target = elements[position : position + int(np.prod(sizes, dtype=np.int64))].reshape(sizes)
        wanted = ChunkStorageMetadata(offsets, sizes)
        for chunk in entry.chunks:
            common = intersect(chunk, wanted)
            if common is None:
                continue
            inside = tuple(a - b for a, b in zip(common.offsets, chunk.offsets, strict=True))
            place = tuple(a - b for a, b in zip(common.offsets, offsets, strict=True))
            location = checkpoint.chunk_location(key, chunk.offsets)
            yield BoxRead(key, location, inside, common.sizes, narrow(target, place, common.sizes))
