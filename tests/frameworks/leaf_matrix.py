"""The matrix of array leaves: which dtype, layout, container, way to save and way to load are tried together.

Every dtype is saved in every layout that it can have. Containers and ways to save are dealt out over these leaves by a
fixed seed, ways to load by turns; then leaves are added until every two things that can meet have met.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from leaf_containers import ALONE, CONTAINERS, Container
from leaf_dtypes import DTYPES, LeafDtype
from leaf_layouts import Layout, layouts_of
from leaf_targets import MODES, Mode, has_target

__all__ = ["MATRIX", "TURNS", "WAYS_TO_SAVE", "Row", "WayToSave", "pairs_of", "possible_pairs"]

TURNS = 3
_SEED = 20
_MODES_OF_A_LEAF_ALONE = 4  # such leaves are checkpoints of their own, which takes longer


class WayToSave(NamedTuple):
    """How a state is saved; eagerly: with start_save, and the leaves are overwritten as soon as it returns."""

    compression: Literal["none", "zstd"]
    eagerly: bool


WAYS_TO_SAVE = tuple(itertools.starmap(WayToSave, itertools.product(("none", "zstd"), (False, True))))


class Row(NamedTuple):
    """One leaf of the matrix; those of one turn are loaded in the same ways, as far as their dtypes allow."""

    number: int
    dtype: LeafDtype
    layout: Layout
    container: Container
    way: WayToSave
    turn: int

    def __str__(self) -> str:
        return f"{self.number}: {self.dtype.framework} {self.dtype.name}, {self.layout.name}, {self.container.name}"

    @property
    def modes(self) -> list[Mode]:
        """The ways in which it is loaded."""
        concerned = _concerning(self.dtype, self.turn)
        if self.container is not ALONE:
            return concerned
        start = self.number * _MODES_OF_A_LEAF_ALONE % len(concerned)
        return [*concerned[start:], *concerned[:start]][:_MODES_OF_A_LEAF_ALONE]


@functools.cache
def _concerning(dtype: LeafDtype, turn: int) -> list[Mode]:
    return [mode for mode in MODES[turn::TURNS] if has_target(dtype, mode)]


Thing = tuple[str, str]
Pair = tuple[Thing, Thing]


def pairs_of(row: Row) -> Iterator[Pair]:
    """Every two things that meet in a row."""
    things = (*_things(row.dtype, row.layout), _thing(row.container), _thing(row.way))
    yield from itertools.combinations(things, 2)
    yield from itertools.product(things, [_thing(mode) for mode in row.modes])


def _thing(value: Container | WayToSave | Mode) -> Thing:
    return type(value).__name__, str(value) if isinstance(value, WayToSave) else value.name


def _things(dtype: LeafDtype, layout: Layout) -> tuple[Thing, Thing]:
    return ("LeafDtype", f"{dtype.framework} {dtype.name}"), ("Layout", f"{dtype.framework} {layout.name}")


_LEAVES = [(dtype, layout) for dtype in DTYPES for layout in layouts_of(dtype)]


_LEAVES_WITH: dict[Thing, list[tuple[LeafDtype, Layout]]] = {}
for _leaf in _LEAVES:
    for _thing_of_leaf in _things(*_leaf):
        _LEAVES_WITH.setdefault(_thing_of_leaf, []).append(_leaf)


def possible_pairs() -> set[Pair]:
    """Every two things that can meet."""
    containers, ways = [_thing(container) for container in CONTAINERS], [_thing(way) for way in WAYS_TO_SAVE]
    modes = [_thing(mode) for mode in MODES]
    found = {*itertools.product(containers, (*ways, *modes)), *itertools.product(ways, modes)}
    for dtype, layout in _LEAVES:
        things = _things(dtype, layout)
        concerned = [_thing(mode) for turn in range(TURNS) for mode in _concerning(dtype, turn)]
        found.add(things)
        found.update(itertools.product(things, (*containers, *ways, *concerned)))
    return found


def _design() -> Iterator[Row]:
    deal = random.Random(_SEED)
    numbers = itertools.count()
    missing = possible_pairs()
    for dtype, layout in _LEAVES:
        dealt = deal.choice(_OTHERS), deal.choice(WAYS_TO_SAVE), deal.randrange(TURNS)
        row = Row(next(numbers), dtype, layout, *dealt)
        missing.difference_update(pairs_of(row))
        yield row
    for pair in sorted(missing):
        while pair in missing:
            row = Row(next(numbers), *_holding(pair, deal))
            missing.difference_update(pairs_of(row))
            yield row


_OTHERS = [container for container in CONTAINERS if container is not ALONE]


def _holding(pair: Pair, deal: random.Random) -> tuple[LeafDtype, Layout, Container, WayToSave, int]:
    """A leaf in which two things may meet; the rest is left to chance."""
    leaves, containers, ways, turns = _LEAVES, _OTHERS, list(WAYS_TO_SAVE), list(range(TURNS))
    for thing in pair:
        leaves = _LEAVES_WITH.get(thing, leaves)  # no pair is of two things of leaves: these have met
        containers = [container for container in CONTAINERS if thing == _thing(container)] or containers
        ways = [way for way in WAYS_TO_SAVE if thing == _thing(way)] or ways
        turns = [position % TURNS for position, mode in enumerate(MODES) if thing == _thing(mode)] or turns
    return *deal.choice(leaves), deal.choice(containers), deal.choice(ways), deal.choice(turns)


MATRIX: tuple[Row, ...] = tuple(_design())
