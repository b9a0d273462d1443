"""Random structures, names, values and box layouts against plain oracles."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import struct
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_support import load, same, save

from savestream.errors import CorruptCheckpointError
from savestream.planners import (
    ChunkStorageMetadata,
    Index,
    MetadataIndex,
    SavePlan,
    ShardedArray,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    decode_value,
    dedup_save_plans,
    flatten_state_dict,
    parse_fqn,
    path_to_fqn,
)
from savestream.planners.flattening import flatten
from savestream.planners.load_plans import create_read_items
from savestream.planners.rebuilding import rebuild_from_tree
from savestream.planners.validation import check_chunks
from savestream.planners.values import decode_value_bytes, encode_value_bytes

TEXT = st.text(st.sampled_from(".\\[]ab\n\ud800é:$01"), max_size=4)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), TEXT, st.binary(max_size=4)
)
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, st.binary(max_size=3)),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
ARRAYS = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 9, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["float32", "int8", ">u2", "bool", "complex64"]),
    st.integers(0, 99),
)


def containers(inner: Any) -> Any:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(TEXT, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(TEXT, inner, max_size=3).map(lambda found: collections.defaultdict(list, found)),
    )


VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(containers(inner), st.frozensets(KEYS, max_size=3)), max_leaves=12
)
STATES = st.recursive(st.one_of(ARRAYS, SCALARS), containers, max_leaves=12)


@given(STATES)
def test_structures_round_trip(state: Any) -> None:
    flat = flatten(state)
    leaves, mappings = flatten_state_dict(state)
    assert len(leaves) == len(flat.names)
    assert [path_to_fqn(path) for path in mappings.values()] == list(leaves)
    assert same(rebuild_from_tree(flat.tree(), leaves), state)


@given(STATES)
@settings(max_examples=60)
def test_states_round_trip_through_both_planners(state: Any) -> None:
    assert same(load(save(state)), state)


@given(st.lists(st.lists(st.one_of(KEYS, st.integers(0, 20).map(Index)), max_size=3).map(tuple), max_size=6))
def test_names_are_injective_and_parse_back(paths: list[tuple[Any, ...]]) -> None:
    by_text: dict[str, str] = {}
    for path in paths:
        text = path_to_fqn(path)
        text.encode()
        assert repr(parse_fqn(text)) == repr(path)
        assert by_text.setdefault(text, repr(path)) == repr(path)


@given(VALUES)
def test_values_round_trip_bit_by_bit(value: Any) -> None:
    data = encode_value_bytes(value, "k")
    assert same(decode_value_bytes(data), value)
    assert encode_value_bytes(decode_value_bytes(data), "k") == data


@given(st.integers(0, 2**64 - 1))
def test_every_float_keeps_its_bits(bits: int) -> None:
    (value,) = struct.unpack(">d", struct.pack(">Q", bits))
    assert struct.pack(">d", decode_value_bytes(encode_value_bytes([value], "k"))[0]) == struct.pack(">d", value)


TAGS = ["$tuple", "$dict", "$set", "$int", "$float", "$scalar", "$enum", "$dataclass", "$deque", "$datetime", "$path"]
TREES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-9, 99), st.floats(allow_nan=False), st.sampled_from(["0x1", "a", "<i4"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*TAGS, "a"]), inner, max_size=2)
    ),
    max_leaves=10,
)


@given(TREES)
def test_decoding_never_fails_in_an_unforeseen_way(tree: Any) -> None:
    with contextlib.suppress(CorruptCheckpointError):
        decode_value(tree, key="k")


# --- boxes ---


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], list[ChunkStorageMetadata]]:
    """A shape, and boxes that cover it exactly once: a random division into boxes, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return shape, [ChunkStorageMetadata(*box) for box in draw(divisions(shape))]


@st.composite
def divisions(draw: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes.pop(number)
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[axis]))
        left, right, moved = list(sizes), list(sizes), list(offsets)
        left[axis], right[axis], moved[axis] = cut, sizes[axis] - cut, offsets[axis] + cut
        boxes += [(offsets, tuple(left)), (tuple(moved), tuple(right))]
    return draw(st.permutations(boxes))


def cells(box: ChunkStorageMetadata) -> set[tuple[int, ...]]:
    spans = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


@given(st.data())
def test_read_items_fill_every_cell_once(data: Any) -> None:
    shape, stored = data.draw(layouts())
    wanted = [ChunkStorageMetadata(*box) for box in data.draw(divisions(shape))]
    wanted += [wanted[0]] if data.draw(st.booleans()) else []
    if math.prod(shape) == 0:
        stored = stored[:1]
    filled: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {number: {} for number in range(len(wanted))}
    entry = TensorStorageMetadata(TensorProperties("int8"), shape, stored)
    for item in create_read_items("w", entry, wanted):
        assert item.dest_index.index is not None
        assert item.storage_index.index is not None
        assert math.prod(item.lengths) > 0
        target, source = filled[item.dest_index.index], stored[item.storage_index.index]
        assert item.storage_index.offset == source.offsets
        for cell in itertools.product(*map(range, item.lengths)):
            place = tuple(a + b for a, b in zip(cell, item.dest_offsets, strict=True))
            assert place not in target
            local = tuple(a + b for a, b in zip(cell, item.storage_offsets, strict=True))
            assert all(0 <= one < size for one, size in zip(local, source.sizes, strict=True))
            target[place] = tuple(a + b for a, b in zip(local, source.offsets, strict=True))
    for number, box in enumerate(wanted):
        expected = {tuple(a - b for a, b in zip(cell, box.offsets, strict=True)): cell for cell in cells(box)}
        assert filled[number] == expected


@given(st.data())
def test_validation_agrees_with_counting_cells(data: Any) -> None:
    shape, chunks = data.draw(layouts())
    changes = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(-1, 1)), max_size=2))
    for number, axis, step in changes:
        if chunks and shape:
            chosen = chunks[number % len(chunks)]
            sizes = list(chosen.sizes)
            sizes[axis % len(shape)] += step
            chunks[number % len(chunks)] = ChunkStorageMetadata(chosen.offsets, tuple(sizes))
    if data.draw(st.booleans()) and chunks:
        chunks.pop()
    counts = collections.Counter(cell for chunk in chunks for cell in cells(chunk))
    whole = cells(ChunkStorageMetadata((0,) * len(shape), shape))
    legal = all(min(chunk.sizes, default=0) >= 0 for chunk in chunks) and all(
        offset + size <= dimension
        for chunk in chunks
        for offset, size, dimension in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    covered = set(counts) == whole and all(count == 1 for count in counts.values())
    expected = legal and covered and (bool(whole) or len(chunks) <= 1)
    assert (check_chunks("w", shape, chunks) == []) == expected


@given(st.data())
@settings(max_examples=60)
def test_any_layout_loads_into_any_other(data: Any) -> None:
    shape, chunks = data.draw(layouts())
    whole = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    ranks = data.draw(st.integers(1, 3))
    parts: list[list[tuple[tuple[int, ...], Any]]] = [[] for _ in range(ranks)]
    for number, chunk in enumerate(chunks):
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        parts[number % ranks].append((chunk.offsets, whole[(*box, ...)]))
    stored = save(*({"w": ShardedArray(shape, part, dtype="int16")} for part in parts))
    assert same(load(stored)["w"], whole)
    filled = np.zeros_like(whole)
    for offsets, sizes in data.draw(divisions(shape)):
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        load(stored, {"w": ShardedArray(shape, [(offsets, filled[(*box, ...)])])})
    assert same(filled, whole)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 500)), max_size=8), min_size=1, max_size=4),
    st.booleans(),
)
def test_every_index_is_kept_by_exactly_one_of_its_ranks(ranks: list[list[tuple[int, int]]], lowest: bool) -> None:
    sizes: dict[int, int] = {}
    plans = []
    for held in ranks:
        items = {name: sizes.setdefault(name, size) for name, size in held}
        plans.append(SavePlan([tensor(name, size) for name, size in items.items()]))
    kept = dedup_save_plans(plans, lowest)
    seen = collections.Counter(item.index for plan in kept for item in plan.items)
    assert set(seen) == {item.index for plan in plans for item in plan.items}
    assert set(seen.values()) <= {1}
    for plan, before in zip(kept, plans, strict=True):
        assert set(plan.items) <= set(before.items)


def tensor(name: int, size: int) -> WriteItem:
    data = TensorWriteData(ChunkStorageMetadata((0,), (size,)), TensorProperties("int8"), (size,))
    return WriteItem(MetadataIndex(str(name), (0,)), WriteItemType.TENSOR, None, data)
