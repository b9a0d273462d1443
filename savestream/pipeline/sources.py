"""Where a block's bytes come from (the leaves, or what a planner makes of them), and their copy into a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from savestream.arrays import ArrayAdapter, HostArray, adapter_of, as_plain_elements, copy_elements, host_view
from savestream.errors import PlanError
from savestream.pipeline.buffers import Bytes
from savestream.pipeline.layout import Block, Piece
from savestream.pipeline.planned_leaves import PlannedLeaves
from savestream.planners.plan import WriteItem

__all__ = ["ChunkSources", "LiveSources", "ResolvedSources", "fill_block"]

_GATHER_LEAVES = 4096


def _plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.names is None else np.dtype((np.void, dtype.itemsize))


class ChunkSources:
    """Gives the elements of a chunk as an array; one object serves one thread at a time."""

    def get(self, chunk: int) -> HostArray:
        """The chunk's elements, with the dtype and shape that the plan says."""
        raise NotImplementedError(f"chunk {chunk} is asked for, though every block is staged and the state let go")

    def copy(self, chunk: int, start: int, stop: int, target: Bytes) -> None:
        """Copy bytes ``start:stop`` of a chunk into ``target``."""
        source = self.get(chunk)
        itemsize = source.dtype.itemsize
        copy_elements(source, start // itemsize, stop // itemsize, target.view(source.dtype))

    def join(self, chunks: Sequence[int]) -> bytes | HostArray:
        """Several small chunks, one after the other."""
        return _join([self.get(chunk) for chunk in chunks])

    def retain_only(self, chunk: int | None) -> None:
        """Forget everything made for other chunks."""

    def release(self) -> None:
        """Let go of the state; no chunk can be asked for afterwards."""


class LiveSources(ChunkSources):
    """The leaves themselves: nothing is created, so any thread may ask for any chunk.

    ``dtypes`` and ``names`` say of a chunk what the plan does; a leaf that is no longer there is named in the error.
    The first chunks are compared with the items that ``planned`` has for them.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        dtypes: Callable[[int], np.dtype[Any]],
        names: Callable[[int], str] = "chunk {}".format,
        planned: Sequence[WriteItem] = (),
    ) -> None:
        self._arrays = arrays
        self._dtypes = dtypes
        self._names = names
        self._planned = PlannedLeaves(planned)
        self._compared = len(planned)

    def get(self, chunk: int) -> HostArray:
        return as_plain_elements(host_view(self._arrays[chunk]))

    def copy(self, chunk: int, start: int, stop: int, target: Bytes) -> None:
        leaf = self._arrays[chunk]
        self._check([chunk], [leaf])
        if type(leaf) is np.ndarray:
            super().copy(chunk, start, stop, target)
            return
        dtype = _plain_dtype(self._dtypes(chunk))
        try:
            adapter_of(leaf).copy_elements(leaf, start // dtype.itemsize, stop // dtype.itemsize, target.view(dtype))
        except PlanError as error:
            raise PlanError(f"{self._names(chunk)}: {error}") from error

    def join(self, chunks: Sequence[int]) -> bytes | HostArray:
        arrays = self._arrays
        leaves = [arrays[chunk] for chunk in chunks]
        self._check(chunks, leaves)
        kinds = set(map(type, leaves))
        if kinds == {np.ndarray}:
            return _join(leaves)
        adapters: list[ArrayAdapter] = list({id(found): found for found in map(adapter_of, leaves)}.values())
        try:
            return adapters[0].join(leaves) if len(adapters) == 1 else _join([host_view(leaf) for leaf in leaves])
        except PlanError as error:
            raise self._named(chunks, error) from error

    def _check(self, chunks: Sequence[int], leaves: Sequence[Any]) -> None:
        if max(chunks, default=0) < self._compared:
            self._planned.check(chunks, leaves)
        elif self._compared:
            pairs = [pair for pair in zip(chunks, leaves, strict=True) if pair[0] < self._compared]
            self._planned.check([chunk for chunk, _ in pairs], [leaf for _, leaf in pairs])

    def _named(self, chunks: Sequence[int], error: PlanError) -> PlanError:
        """The error of the first of several leaves that cannot be read, with its name."""
        for chunk in chunks:
            try:
                self.get(chunk)
            except PlanError as own:
                return PlanError(f"{self._names(chunk)}: {own}")
        return error

    def release(self) -> None:
        self._arrays = ()


class ResolvedSources(ChunkSources):
    """Chunks that a planner makes on request (casts, pickles); each is made once and kept while it is being staged."""

    def __init__(self, resolve: Callable[[int], HostArray]) -> None:
        self._resolve = resolve
        self._made: dict[int, HostArray] = {}

    def get(self, chunk: int) -> HostArray:
        if chunk not in self._made:
            self._made[chunk] = as_plain_elements(self._resolve(chunk))
        return self._made[chunk]

    def retain_only(self, chunk: int | None) -> None:
        kept = self._made.get(chunk) if chunk is not None else None
        self._made.clear()
        if chunk is not None and kept is not None:
            self._made[chunk] = kept


def fill_block(block: Block, order: Sequence[int], sources: ChunkSources, data: Bytes) -> None:
    """Copy a block's bytes from their sources; gaps become zeros, so that no old memory reaches storage."""
    end = 0
    for piece in block.pieces:
        if piece.position > end:
            data[end : piece.position] = 0
        if isinstance(piece, Piece):
            end = piece.position + piece.stop - piece.start
            sources.copy(piece.chunk, piece.start, piece.stop, data[piece.position : end])
        else:
            end = piece.position + piece.nbytes
            _gather(order[piece.first : piece.last], sources, data[piece.position : end])
    data[end : block.buffer_bytes] = 0


def _join(arrays: list[Any]) -> bytes:  # of buffers, which numpy's stubs do not say below Python 3.12
    """The elements of all arrays as bytes; asking each whether it is contiguous would cost more than the joining."""
    try:
        return b"".join(arrays)
    except TypeError:  # an array that is not contiguous in C order is no simple buffer
        contiguous: list[Any] = [np.ascontiguousarray(as_plain_elements(array)) for array in arrays]
        return b"".join(contiguous)


def _gather(chunks: Sequence[int], sources: ChunkSources, target: Bytes) -> None:
    """Whole small chunks, one after the other: joining bytes costs a fraction of an assignment for each."""
    position = 0
    for start in range(0, len(chunks), _GATHER_LEAVES):
        joined = sources.join(chunks[start : start + _GATHER_LEAVES])
        if position + len(joined) > len(target):
            break
        target[position : position + len(joined)] = np.frombuffer(joined, np.uint8)
        position += len(joined)
    if position != len(target):
        raise PlanError(
            "leaves changed their size between planning and staging; do not replace or resize arrays before the "
            "save is staged"
        )
