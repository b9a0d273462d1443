"""An opened checkpoint as torch.distributed.checkpoint sees it: its metadata, and what each item of a plan asks for."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from savestream.arrays import HostArray, dtype_from_name, framework_adapter
from savestream.errors import PlanError, UnsafeObjectError
from savestream.integrations.dcp.extras import Extras, decode_extras
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.leaves import Leaf, Leaves, find_leaves
from savestream.pipeline.buffers import allocate_array
from savestream.pipeline.open_checkpoint import ChunkLocation, OpenCheckpoint, metadata_of
from savestream.pipeline.options import LoadOptions
from savestream.pipeline.plan_section import KIND_JSON, KIND_PICKLE
from savestream.pipeline.rank_reads import BoxRead, read_boxes
from savestream.planners.metadata import Metadata, TensorStorageMetadata
from savestream.planners.value_decoding import unpickle_object
from savestream.planners.values import decode_value, decode_value_bytes

__all__ = ["ReadableCheckpoint", "open_readable"]


class ReadableCheckpoint:
    """Names of DCP's, and where their content is."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        metadata: Metadata,
        leaves: Leaves,
        extras: Extras | None,
        options: LoadOptions,
    ) -> None:
        self.checkpoint = checkpoint
        self.save_id = checkpoint.root.checkpoint_id
        self._entries = metadata.state_dict_metadata
        self._leaves = leaves
        self._by_name = {leaf.fqn: leaf for leaf in leaves.leaves}
        self._extras = extras
        self._options = options
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
        try:
            return self.checkpoint.chunk_location(leaf.name, None if index.offset is None else tuple(index.offset))
        except StopIteration:
            raise PlanError(
                f"{index.fqn}: the plan asks for a chunk at {tuple(index.offset)}, which {self.checkpoint.place} lacks"
            ) from None

    async def read_value(self, fqn: str) -> io.BytesIO:
        """What a planner's ``load_bytes`` takes: the bytes that a planner produced, or torch's form of a value."""
        leaf = self._by_name.get(fqn)
        if leaf is None:
            raise PlanError(f"{fqn}: the plan asks for a value that {self.checkpoint.place} does not hold")
        value = leaf.value if leaf.source == "value" else await self._read_stored(leaf)
        if isinstance(value, UnsafeObjectError):
            raise value
        if self._extras is not None and isinstance(value, bytes):
            return io.BytesIO(value)  # as the planner made them; read_value of torch's is the planner's business
        stream = io.BytesIO()
        torch_module().save(value, stream)
        stream.seek(0)
        return stream

    async def _read_stored(self, leaf: Leaf) -> Any:
        """A stored item that is no tensor for torch: bytes, a pickled object, or an array of a dtype that it lacks."""
        plan = self.checkpoint.root.plan
        kind = plan.tensors.kind[plan.tensor_names.index(leaf.name)]
        if leaf.source == "tensor":
            return await self._read_array(leaf.name)
        data = (await self._read_array(leaf.name)).tobytes()
        if kind == KIND_PICKLE:
            return unpickle_object(data, allow_pickle=self._options.allow_pickle, key=leaf.fqn)
        return data

    async def _read_array(self, name: str) -> HostArray:
        return await _read_whole(self.checkpoint, self._entries[name], name, self._options)


async def _read_whole(checkpoint: OpenCheckpoint, entry: object, name: str, options: LoadOptions) -> HostArray:
    if isinstance(entry, TensorStorageMetadata):
        array = allocate_array(dtype_from_name(entry.properties.dtype), entry.size)
        boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    else:
        size = checkpoint.chunk_location(name, None).sizes
        array = allocate_array(np.dtype(np.uint8), size)
        boxes = [((0,), size)]
    reads = []
    for offsets, sizes in boxes:
        part = array[tuple([slice(first, first + size) for first, size in zip(offsets, sizes, strict=True)])]
        chunk = checkpoint.chunk_location(name, offsets)
        reads.append(BoxRead(name, chunk, (0,) * len(sizes), sizes, part))
    await read_boxes(checkpoint, reads, options)
    return array


async def open_readable(checkpoint: OpenCheckpoint, options: LoadOptions) -> ReadableCheckpoint:
    """Find out what an opened checkpoint holds for torch; reads its plain values, and no arrays."""
    metadata = metadata_of(checkpoint)
    extras = decode_extras(checkpoint.root.user, checkpoint.place)
    values = _decoded(checkpoint, options)
    plan = checkpoint.root.plan
    for name, kind in zip(plan.tensor_names, plan.tensors.kind.tolist(), strict=True):
        if kind == KIND_JSON:
            array = await _read_whole(checkpoint, None, name, options)
            values[name] = _decoding(array.tobytes(), name, options)
    return ReadableCheckpoint(checkpoint, metadata, find_leaves(checkpoint, values, extras), extras, options)


def _decoded(checkpoint: OpenCheckpoint, options: LoadOptions) -> dict[str, Any]:
    names = checkpoint.root.plan.value_names
    return {name: _decoding(node, name, options) for name, node in zip(names, checkpoint.root.values, strict=True)}


def _decoding(node: object, name: str, options: LoadOptions) -> Any:
    """A plain value; where it holds a pickle without the opt-in, the error, for whoever asks for that value."""
    decode: Any = decode_value_bytes if isinstance(node, bytes) else decode_value
    try:
        return decode(node, types=options.types, allow_pickle=options.allow_pickle, key=name)
    except UnsafeObjectError as error:
        return error
