"""Boxes out of chunks, against numpy's own slicing."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from savestream.arrays import copy_elements
from savestream.pipeline import placement
from savestream.pipeline.placement import box_spans, place_elements


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, offsets, lengths


@settings(max_examples=300, deadline=None)
@given(box=boxes(), cuts=st.lists(st.floats(0, 1), max_size=4), target_dtype=st.sampled_from(["i4", "f8"]))
def test_pieces_of_a_chunk_fill_exactly_the_box(box, cuts, target_dtype):
    shape, offsets, lengths = box
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    wanted = array[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    target = np.full(lengths, -1, target_dtype)
    edges = sorted({0, array.size, *(int(cut * array.size) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        place_elements(array.reshape(-1)[start:stop], start, stop, shape, offsets, lengths, target)
    assert (target == wanted).all()


@settings(max_examples=300, deadline=None)
@given(box=boxes(), gap=st.integers(1, 300))
def test_spans_hold_every_element_of_the_box_in_order(box, gap):
    shape, offsets, lengths = box
    saved, placement._SPAN_GAP_BYTES = placement._SPAN_GAP_BYTES, gap
    try:
        spans = list(box_spans(shape, offsets, lengths, 4))
    finally:
        placement._SPAN_GAP_BYTES = saved
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    wanted = set(array[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].reshape(-1).tolist())
    held = {element for start, stop in spans for element in range(start // 4, stop // 4)}
    assert wanted <= held
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4))
def test_ranges_of_elements_of_any_layout(data, shape):
    array = np.arange(np.prod(shape, dtype=int) * 2).reshape(*shape, 2)[..., data.draw(st.integers(0, 1))]
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    if array.ndim and data.draw(st.booleans()):
        array = array[::-1]
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    target = np.full(stop - start, -1)
    copy_elements(array, start, stop, target)
    assert (target == array.reshape(-1)[start:stop]).all()
