"""An opened checkpoint as torch.distributed.checkpoint sees it: its metadata, and what each item of a plan asks for."""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import HostArray, dtype_from_name, framework_adapter
from savestream.errors import CoordinationError, PlanError, SavestreamError, StorageError, UnsafeObjectError
from savestream.integrations.dcp.extras import decode_extras
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.leaves import Leaf, find_leaves
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.commit import read_root
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint, VanishedDataError, metadata_of
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_section import KIND_JSON, KIND_PICKLE
from savestream.pipeline.rank_reads import BoxRead, read_boxes
from savestream.planners.metadata import BytesStorageMetadata, TensorStorageMetadata
from savestream.planners.value_decoding import unpickle_object
from savestream.planners.values import decode_value, decode_value_bytes
from savestream.threads import run_in_worker

__all__ = ["ReadableCheckpoint", "StoredValue", "open_readable", "read_opened"]


class StoredValue(msgspec.Struct, frozen=True):
    """A value that is no tensor for torch, and the reads that fill ``array``; without those it is here already."""

    leaf: Leaf
    array: HostArray | None
    reads: list[BoxRead]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes if self.array is not None else 0


class ReadableCheckpoint:
    """Names of DCP's, and where their content is.

    Parameters
    ----------
    large_values
        Values that are stored beside the manifest, as JSON text, by savestream's name.
    """

    def __init__(self, checkpoint: OpenCheckpoint, large_values: Mapping[str, bytes], options: LoadOptions) -> None:
        self.checkpoint = checkpoint
        root = checkpoint.root
        self.save_id = root.checkpoint_id
        self._options = options
        self._entries = metadata_of(checkpoint).state_dict_metadata
        self._extras = decode_extras(root.user, checkpoint.place)
        inline = zip(root.plan.value_names, root.values, strict=True)
        values = {name: _decoding(node, name, options) for name, node in [*inline, *large_values.items()]}
        self._leaves = find_leaves(checkpoint, values, self._extras)
        self._by_name = {leaf.fqn: leaf for leaf in self._leaves.leaves}
        kinds = zip(root.plan.tensor_names, root.plan.tensors.kind.tolist(), strict=True)
        self._pickles = {name for name, kind in kinds if kind == KIND_PICKLE}
        self._dtypes: dict[str, Any] = {}

    def torch_metadata(self) -> Any:
        """What torch's planners plan with."""
        module = checkpoint_module("metadata")
        meta = module.StorageMeta(checkpoint_id=self.checkpoint.place, save_id=self.save_id)
        current = checkpoint_module("filesystem").CURRENT_DCP_VERSION
        return module.Metadata(
            state_dict_metadata={leaf.fqn: self._describe(leaf) for leaf in self._leaves.leaves},
            planner_data=self._leaves.planner_data,
            storage_data=None,
            storage_meta=meta,
            version=self._extras.version if self._extras is not None else current,
        )

    def _describe(self, leaf: Leaf) -> Any:
        module, torch = checkpoint_module("metadata"), torch_module()
        entry = self._entries.get(leaf.name) if leaf.source == "tensor" else None
        dtype = self._torch_dtype(entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        if dtype is None or not isinstance(entry, TensorStorageMetadata):
            return module.BytesStorageMetadata()
        chunks = [
            module.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks
        ]
        properties = module.TensorProperties(dtype=dtype, requires_grad=leaf.fqn in self._leaves.requires_grad)
        return module.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)

    def _torch_dtype(self, name: str) -> Any:
        """torch's dtype of that name; None where it has none, as for dates, strings and records."""
        if name not in self._dtypes:
            made = framework_adapter("torch").from_host(np.empty(0, dtype_from_name(name)), name)
            self._dtypes[name] = None if isinstance(made, np.ndarray) else made.dtype
        return self._dtypes[name]

    def chunk(self, index: Any) -> ChunkLocation:
        """Where a tensor's chunk lies, by torch's index; its hint is not believed."""
        leaf = self._by_name.get(index.fqn)
        if leaf is None or leaf.source != "tensor":
            raise PlanError(f"{index.fqn}: the plan asks for a tensor that {self.checkpoint.place} does not hold")
        entry = self._entries[leaf.name]
        offset = None if index.offset is None else tuple(index.offset)
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else ()
        is_there = len(chunks) != 1 or offset in (None, chunks[0].offsets)
        found = self._locate(leaf.name, offset) if is_there else None
        if found is None:
            place = self.checkpoint.place
            raise PlanError(f"{index.fqn}: the plan asks for a chunk at {offset}, where {place} has none")
        return found

    def _locate(self, name: str, offset: tuple[int, ...] | None) -> ChunkLocation | None:
        try:
            return self.checkpoint.chunk_location(name, offset)
        except KeyError:
            return None

    def stored_value(self, fqn: str) -> StoredValue:
        """What has to be read before :meth:`stream` can give a value that :meth:`check_value` has found."""
        leaf = self._by_name[fqn]
        if leaf.source == "value":
            return StoredValue(leaf, None, [])
        array, reads = _whole(self.checkpoint, self._entries[leaf.name], leaf.name)
        return StoredValue(leaf, array, reads)

    def check_value(self, fqn: str) -> None:
        """Refuse, before anything is read, a value that is not there or would need code that was not allowed."""
        leaf = self._by_name.get(fqn)
        if leaf is None:
            raise PlanError(f"{fqn}: the plan asks for a value that {self.checkpoint.place} does not hold")
        if isinstance(leaf.value, UnsafeObjectError):
            raise leaf.value
        if leaf.name in self._pickles and not self._options.allow_pickle:
            unpickle_object(b"", allow_pickle=False, key=leaf.fqn)

    def stream(self, stored: StoredValue) -> io.BytesIO:
        """What a planner's ``load_bytes`` takes: the bytes that a planner produced, or torch's form of a value."""
        value = self._value(stored)
        if self._extras is not None and isinstance(value, bytes):
            return io.BytesIO(value)  # as the planner made them
        stream = io.BytesIO()
        torch_module().save(value, stream)
        stream.seek(0)
        return stream

    def _value(self, stored: StoredValue) -> Any:
        leaf, array = stored.leaf, stored.array
        if array is None:
            return leaf.value
        if leaf.source == "tensor":
            return array  # of a dtype that torch lacks
        if leaf.name in self._pickles:
            allowed = self._options.allow_pickle
            return unpickle_object(array.tobytes(), allow_pickle=allowed, key=leaf.fqn)
        return array.tobytes()


def _whole(
    checkpoint: OpenCheckpoint, entry: TensorStorageMetadata | BytesStorageMetadata, name: str
) -> tuple[HostArray, list[BoxRead]]:
    """An array for all of a stored tensor, or of an item of bytes, and the reads that fill it."""
    if isinstance(entry, TensorStorageMetadata):
        dtype, shape = entry.properties.dtype, entry.size
        boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    else:
        dtype, shape = "uint8", checkpoint.chunk_location(name, None).sizes
        boxes = [((0,), shape)]
    array = allocate_array(dtype_from_name(dtype), shape)
    reads = []
    for offsets, sizes in boxes:
        part = array[tuple([slice(first, first + size) for first, size in zip(offsets, sizes, strict=True)])]
        reads.append(BoxRead(name, checkpoint.chunk_location(name, offsets), (0,) * len(sizes), sizes, part))
    return array, reads


async def open_readable(checkpoint: OpenCheckpoint, options: LoadOptions) -> ReadableCheckpoint:
    """Find out what an opened checkpoint holds for torch; reads its plain values, and no arrays."""
    plan = checkpoint.root.plan
    large = [
        name for name, kind in zip(plan.tensor_names, plan.tensors.kind.tolist(), strict=True) if kind == KIND_JSON
    ]
    found = {name: _whole(checkpoint, BytesStorageMetadata(), name) for name in large}
    if large:
        await read_boxes(checkpoint, [read for _, reads in found.values() for read in reads], options)
    return await run_in_worker(
        ReadableCheckpoint, checkpoint, {name: array.tobytes() for name, (array, _) in found.items()}, options
    )


async def read_opened(checkpoint: OpenCheckpoint, reads: Sequence[BoxRead], options: LoadOptions) -> None:
    """Read boxes of a checkpoint that was opened before.

    Raises
    ------
    CoordinationError
        It was overwritten since.
    """
    try:
        await read_boxes(checkpoint, reads, options)
    except (VanishedDataError, StorageError) as error:
        vanished = isinstance(error, VanishedDataError) or error.errno in (errno.ENOENT, errno.ESTALE)
        if vanished and await _is_replaced(checkpoint):
            raise CoordinationError(
                f"{checkpoint.place}: overwritten while it was being loaded, so the target may hold parts of it; load "
                "again"
            ) from error
        raise


async def _is_replaced(checkpoint: OpenCheckpoint) -> bool:
    try:
        return (await read_root(checkpoint.location)).checkpoint_id != checkpoint.root.checkpoint_id
    except SavestreamError:
        return False  # deleted or unreadable: what was raised first says more


def _decoding(node: object, name: str, options: LoadOptions) -> Any:
    """A plain value; where it holds a pickle without the opt-in, the error, for whoever asks for that value."""
    decode: Any = decode_value_bytes if isinstance(node, bytes) else decode_value
    try:
        return decode(node, types=options.types, allow_pickle=options.allow_pickle, key=name)
    except UnsafeObjectError as error:
        return error
