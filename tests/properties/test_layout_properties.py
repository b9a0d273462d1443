"""The layout's geometry against a plain model: every byte once, in order, where the frames say."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savestream.pipeline import layout as layout_module
from savestream.pipeline.layout import ChunkShape, Piece, plan_blocks, plan_layout
from savestream.pipeline.sources import LiveSources, fill_block

DTYPES = ["u1", "<u2", ">u4", "<f8", "V3", "V517"]


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 14), max_size=3)))
    size = math.prod(shape)
    seed = draw(st.integers(0, 2**16))
    data = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8)
    array = data.view(dtype).reshape(shape)
    order = draw(st.permutations(range(array.ndim)))
    return array.transpose(order)


def chunk_shape(array):
    row = math.prod(array.shape[1:]) * array.dtype.itemsize
    return ChunkShape(array.nbytes, array.dtype.itemsize, max(row, 1), min(array.dtype.itemsize, 2))


@settings(max_examples=100, deadline=None)
@given(
    arrays_list=st.lists(arrays(), max_size=8),
    frame_bytes=st.sampled_from([4096, 8192, 3 * 4096]),
    block_bytes=st.sampled_from([4096, 16384, 65536]),
)
def test_blocks_hold_every_byte_once_where_frames_say(arrays_list, frame_bytes, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "FRAME_BYTES", frame_bytes)
        patch.setattr(layout_module, "PACKED_FRAME_BYTES", 2048)
        patch.setattr(layout_module, "SMALL_CHUNK_BYTES", 512)
        layout = plan_layout([chunk_shape(array) for array in arrays_list])
        blocks = plan_blocks(layout, block_bytes)
    sources = LiveSources(arrays_list, lambda chunk: arrays_list[chunk].dtype)
    stream = bytearray()
    frame = 0
    for block in blocks:
        assert block.first_frame == frame
        data = np.full(block.buffer_bytes, 0xEE, np.uint8)
        fill_block(block, layout.order.tolist(), sources, data)
        covered = np.zeros(block.buffer_bytes, bool)
        for position, length in zip(block.positions, layout.frame_lengths[frame : block.last_frame], strict=True):
            stream += data[position : position + length].tobytes()
            assert not covered[position : position + length].any()
            covered[position : position + length] = True
        assert not data[~covered].any(), "gaps are zeros, never old memory"
        assert len(block.positions) == 1 or block.buffer_bytes <= block_bytes
        frame = block.last_frame
    assert frame == len(layout.frame_lengths)
    assert len(stream) == layout.raw_bytes == sum(array.nbytes for array in arrays_list)
    for array, offset in zip(arrays_list, layout.raw_offsets, strict=True):
        assert bytes(stream[offset : offset + array.nbytes]) == array.tobytes()


@given(rows=st.integers(1, 5000), row_bytes=st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_frames_end_on_rows_and_on_pages_where_both_can_be_had(rows, row_bytes):
    layout = plan_layout([ChunkShape(rows * row_bytes, 1, row_bytes, 1)])
    ends = np.cumsum(layout.frame_lengths)[:-1]
    assert (ends % row_bytes == 0).all()
    assert (layout.frame_lengths <= layout_module.FRAME_BYTES).all()
    if math.lcm(row_bytes, 4096) <= layout_module.FRAME_BYTES:
        assert (ends % 4096 == 0).all()


def test_one_element_larger_than_a_frame_stays_whole():
    layout = plan_layout([ChunkShape(3 * 5_000_000, 5_000_000, 5_000_000, 1)])
    assert layout.frame_lengths.tolist() == [5_000_000] * 3


def test_neighbouring_frames_of_a_chunk_are_one_copy():
    layout = plan_layout([ChunkShape(12 * 2**20, 4, 4096, 4)])
    (block,) = plan_blocks(layout, 16 * 2**20)
    assert block.pieces == (Piece(0, 0, 12 * 2**20, 0),)
    assert len(block.positions) == 3
