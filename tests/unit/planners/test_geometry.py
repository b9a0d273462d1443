"""Boxes: few comparisons whatever the layout, and validation that names what is wrong."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from savestream.errors import PlanError
from savestream.planners import (
    BytesIOWriteData,
    ChunkStorageMetadata,
    MetadataIndex,
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    create_default_global_save_plan,
    dedup_save_plans,
    validate_global_plan,
)
from savestream.planners.geometry import BoxJoin, Match, intersect, match_boxes, narrow, overlapping_pairs
from savestream.planners.validation import check_chunks, check_global_plan


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets, sizes)


def grid(count: int, size: int, dimensions: int) -> list[ChunkStorageMetadata]:
    places = itertools.product(range(count), repeat=dimensions)
    return [box(tuple(size * n for n in place), (size,) * dimensions) for place in places]


def comparisons(boxes: list[ChunkStorageMetadata]) -> int:
    join = BoxJoin(lambda _, __: True)
    starts = np.array([one.offsets for one in boxes])
    edges = (starts, starts + np.array([one.sizes for one in boxes]))
    join.run(edges, edges)
    return join.tests


LAYOUTS = {
    "1-D split": lambda n: grid(n, 3, 1),
    "2-D grid": lambda n: grid(math.isqrt(n), 4, 2),
    "3-D grid": lambda n: grid(round(n ** (1 / 3)), 2, 3),
    "rows": lambda n: [box((0, row), (1000, 1)) for row in range(n)],
    "columns": lambda n: [box((column, 0), (1, 1000)) for column in range(n)],
    "rows of blocks of other widths": lambda n: [
        box((7 * row, start), (7, 1 + row % 5))
        for row in range(math.isqrt(n))
        for start in range(0, math.isqrt(n) * (1 + row % 5), 1 + row % 5)
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_comparisons_grow_near_linearly(layout: str) -> None:
    small, large = LAYOUTS[layout](1000), LAYOUTS[layout](8000)
    needed = comparisons(large)
    assert needed < 8 * len(large) * math.log2(len(large))  # all pairs: 64 million
    assert needed / len(large) < 2 * comparisons(small) / len(small)


def test_many_equal_boxes_stop_early() -> None:
    assert len(overlapping_pairs([box((0, 0), (3, 3))] * 20_000, limit=8)) == 8


def test_matches() -> None:
    stored, wanted = [box((0,), (3,)), box((3,), (3,)), box((6,), (0,))], [box((2,), (2,)), box((5,), (1,))]
    expected: list[Match] = [(0, 0, (2,), (1,)), (1, 0, (3,), (1,)), (1, 1, (5,), (1,))]
    assert match_boxes(stored, wanted) == expected
    assert match_boxes([box((), ())], [box((), ())]) == [(0, 0, (), ())]
    assert match_boxes([], wanted) == []
    assert intersect(box((0, 0), (2, 2)), box((2, 0), (2, 2))) is None


def test_narrow() -> None:
    array = np.arange(12).reshape(3, 4)
    assert narrow(array, (1, 2), (2, 0)).shape == (2, 0)
    assert narrow(array, (1, 1), (1, 2)).tolist() == [[5, 6]]
    assert narrow(array, (1, 1), (1, 2)).base is array.base
    scalar = np.array(3)
    assert narrow(scalar, (), ()) is scalar


# --- validation ---


@pytest.mark.parametrize(
    ("size", "chunks", "text"),
    [
        ((4,), [((0,), (4,))], None),
        ((4,), [((0,), (2,)), ((2,), (2,))], None),
        ((4,), [((0,), (4,)), ((4,), (0,))], None),
        ((), [((), ())], None),
        ((0,), [((0,), (0,))], None),
        ((0,), [], None),
        ((4,), [], "4 of 4 elements"),
        ((), [], "1 of 1 elements"),
        ((), [((), ()), ((), ())], "overlapping"),
        ((0,), [((0,), (0,)), ((0,), (0,))], "one is enough"),
        ((0,), [((0,), (1,))], "out of bounds"),
        ((4,), [((0,), (3,))], "1 of 4 elements"),
        ((4,), [((0,), (3,)), ((2,), (2,))], r"overlapping boxes: box at \(0,\).*box at \(2,\)"),
        ((4,), [((0,), (5,))], "out of bounds"),
        ((4,), [((-1,), (5,))], "out of bounds"),
        ((4,), [((5,), (0,))], "out of bounds"),
        ((4,), [((0, 0), (4, 1))], "out of bounds"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (1, 1))], "1 of 4 elements"),
        ((-1,), [((0,), (-1,))], "impossible"),
    ],
)
def test_coverage(
    size: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], text: str | None
) -> None:
    found = check_chunks("key", size, [box(*chunk) for chunk in chunks])
    if text is None:
        assert found == []
    else:
        with pytest.raises(AssertionError, match=f"key: .*{text}"):
            raise AssertionError(found[0])


def item(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], size: tuple[int, ...], **options: object
) -> WriteItem:
    kind = WriteItemType.TENSOR if sizes == size else WriteItemType.SHARD
    data = TensorWriteData(box(offsets, sizes), TensorProperties("float32"), size)
    return WriteItem(MetadataIndex(name, offsets), kind, None, data, **options)  # type: ignore[arg-type]


def value(name: str, nbytes: int = 1) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, BytesIOWriteData(nbytes, "json"))


def problems(*plans: list[WriteItem]) -> list[str]:
    return validate_global_plan(*create_default_global_save_plan([SavePlan(plan) for plan in plans]))


def test_global_plans() -> None:
    assert problems([item("w", (0,), (2,), (4,)), value("v")], [item("w", (2,), (2,), (4,))]) == []
    assert problems([item("w", (0,), (2,), (4,))]) == ["w: 2 of 4 elements of shape (4,) are in no box (a hole)"]
    assert problems([value("v")], [value("v")]) == ["v: planned 2 times, by rank 0, 1"]
    (found,) = problems([item("w", (0,), (4,), (4,))] * 2)
    assert found.startswith("w: overlapping boxes: box at (0,) of sizes (4,) of rank 0")
    plans, metadata = create_default_global_save_plan([SavePlan([item("w", (0,), (4,), (4,))])])
    (found,) = validate_global_plan([SavePlan([])], metadata)
    assert found == "w: the plans hold 0 chunks, the metadata 1"
    (found,) = validate_global_plan([SavePlan([*plans[0].items, value("x")])], metadata)
    assert found == "x: planned by rank 0, but not in the metadata"
    with pytest.raises(PlanError, match=r"nothing has been written: x: planned by rank 0"):
        check_global_plan([SavePlan([*plans[0].items, value("x")])], metadata)


# --- deduplication ---


def loads(plans: list[SavePlan]) -> list[int]:
    return [sum(one.chunk_nbytes for one in plan.items) for plan in plans]


def test_bytes_are_balanced_by_chunk() -> None:
    sizes = [4096, 4096 * 11, 1024, 64, 1] * 24
    replicated = [item(f"p{n}", (0,), (size,), (size,)) for n, size in enumerate(sizes)]
    sharded = [[item("big", (rank * 9000,), (9000,), (36_000,))] for rank in range(4)]
    plans = [SavePlan([*sharded[rank], *replicated]) for rank in range(4)]
    kept = dedup_save_plans(plans)
    assert sorted(one.index.fqn for plan in kept for one in plan.items) == sorted(
        [one.index.fqn for one in replicated] + ["big"] * 4
    )
    assert max(loads(kept)) <= 1.1 * sum(loads(kept)) / 4
    assert [plan.items for plan in dedup_save_plans(plans)] == [plan.items for plan in kept]


def test_small_items_stay_on_few_ranks() -> None:
    scalars = [item(f"s{n}", (), (), ()) for n in range(400)]
    sharded = [[item("big", (rank * 10**6,), (10**6,), (4 * 10**6,))] for rank in range(4)]
    kept = dedup_save_plans([SavePlan([*sharded[rank], *scalars]) for rank in range(4)])
    assert sorted(len(plan.items) for plan in kept) == [1, 1, 1, 401]


def test_lowest_rank() -> None:
    plans = [SavePlan([value("a")]), SavePlan([value("a"), value("b")]), SavePlan([value("b"), value("c")])]
    kept = dedup_save_plans(plans, save_to_lowest_rank=True)
    assert [[one.index.fqn for one in plan.items] for plan in kept] == [["a"], ["b"], ["c"]]


def test_aliases_stay_with_what_they_share() -> None:
    first = item("a", (0,), (100,), (100,))
    alias = item("b", (0,), (100,), (100,), alias_of=first.index)
    others = [item(f"o{n}", (0,), (50,), (50,)) for n in range(8)]
    kept = dedup_save_plans([SavePlan([first, alias, *others]) for _ in range(3)])
    (holder,) = [plan for plan in kept if any(one.index == alias.index for one in plan.items)]
    assert first in holder.items
    assert alias in holder.items
    alone = dedup_save_plans([SavePlan([first]), SavePlan([first, alias])], save_to_lowest_rank=True)
    assert alone[1].items[0].alias_of is None


def test_undeclared_shards_are_not_deduplicated() -> None:
    shard = item("w", (0,), (2,), (4,))
    assert [len(plan.items) for plan in dedup_save_plans([SavePlan([shard])] * 2)] == [1, 1]
