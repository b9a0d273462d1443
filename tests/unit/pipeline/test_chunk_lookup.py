"""Finding a tensor's chunk by where it begins."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from savestream.pipeline.manifest import ChunkTable, PlanSection, Root, TensorTable
from savestream.pipeline.open_checkpoint import OpenCheckpoint
from savestream.pipeline.plan_section import check_section
from savestream.planners.structure import LeafNode, MappingNode
from savestream.storage_backends import Location
from savestream.storage_backends.memory import MemoryBackend


def opened(chunks: list[tuple[int, int]]) -> OpenCheckpoint:
    """A checkpoint of one vector of 6 elements in chunks ``(offset, size)``."""
    section = PlanSection(
        dtypes=["float32"],
        tree=MappingNode("dict", ("w",), (LeafNode("w"),)),
        tensors=TensorTable(*(np.array([value]) for value in (0, 0, 1, 6, len(chunks)))),
        chunks=ChunkTable(
            part=np.zeros(len(chunks), np.int64),
            raw_offset=np.array([4 * offset for offset, _ in chunks]),
            offsets=np.array([offset for offset, _ in chunks]),
            sizes=np.array([size for _, size in chunks]),
        ),
        tensor_names=["w"],
        value_names=[],
    )
    check_section(section)
    root = Root(checkpoint_id="0" * 32, created="", writer="", values=[], parts=[], plan=section)
    return OpenCheckpoint(Location(MemoryBackend("lookup"), ""), root)


@pytest.mark.parametrize("chunks", list(itertools.permutations([(0, 2), (2, 4), (2, 0), (0, 0), (6, 0)])))
def test_an_empty_chunk_does_not_hide_the_one_that_begins_where_it_does(chunks: list[tuple[int, int]]) -> None:
    checkpoint = opened(chunks)
    found = {offset: checkpoint.chunk_location("w", (offset,)) for offset in (0, 2, 6)}
    assert {offset: (chunk.raw_offset, chunk.sizes) for offset, chunk in found.items()} == {
        0: (0, (2,)),
        2: (8, (4,)),
        6: (24, (0,)),
    }
    with pytest.raises(KeyError):
        checkpoint.chunk_location("w", (1,))
