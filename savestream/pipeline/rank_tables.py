"""A root's tensor and chunk tables while they are filled, by a plan of one process or from the parts of many ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from savestream.pipeline.manifest import ChunkTable, TensorTable
from savestream.planners.metadata import TensorStorageMetadata

__all__ = ["SectionTables"]


class SectionTables:
    """Rows in the order in which tensors are added; descriptions that many tensors share are looked at once."""

    def __init__(self) -> None:
        self._dtypes: dict[str, int] = {}
        self._known: dict[int, tuple[TensorStorageMetadata, int, list[int], list[int]]] = {}
        self._kind: list[int] = []
        self._dtype: list[int] = []
        self._ndim: list[int] = []
        self._shape: list[int] = []
        self._n_chunks: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._part: list[int] = []
        self._raw_offset: list[int] = []

    def add(
        self, kind: int, entry: TensorStorageMetadata, raw_offsets: Iterable[int], parts: Iterable[int] | None = None
    ) -> None:
        """Append a tensor and its chunks, which lie at ``raw_offsets`` of ``parts``: numbers in the root's list.

        Parts are given for all tensors, or for none where there is only one part.
        """
        known = self._known.get(id(entry))
        if known is None:
            dtype = self._dtypes.setdefault(entry.properties.dtype, len(self._dtypes))
            offsets = [offset for chunk in entry.chunks for offset in chunk.offsets]
            sizes = [size for chunk in entry.chunks for size in chunk.sizes]
            known = self._known[id(entry)] = (entry, dtype, offsets, sizes)
        _, dtype, offsets, sizes = known
        self._kind.append(kind)
        self._dtype.append(dtype)
        self._ndim.append(len(entry.size))
        self._shape += entry.size
        self._n_chunks.append(len(entry.chunks))
        self._offsets += offsets
        self._sizes += sizes
        self._raw_offset += raw_offsets
        if parts is not None:
            self._part += parts

    @property
    def dtypes(self) -> list[str]:
        """Names of the dtypes, by the numbers in the table."""
        return list(self._dtypes)

    def tensors(self) -> TensorTable:
        """The finished table of tensors."""
        return TensorTable(
            kind=np.array(self._kind, np.uint8),
            dtype=np.array(self._dtype, np.uint32),
            ndim=np.array(self._ndim, np.uint8),
            shape=np.array(self._shape, np.int64),
            n_chunks=np.array(self._n_chunks, np.uint32),
        )

    def chunks(self) -> ChunkTable:
        """The finished table of chunks."""
        return ChunkTable(
            part=np.array(self._part or np.zeros(len(self._raw_offset)), np.uint32),
            raw_offset=np.array(self._raw_offset, np.int64),
            offsets=np.array(self._offsets, np.int64),
            sizes=np.array(self._sizes, np.int64),
        )
