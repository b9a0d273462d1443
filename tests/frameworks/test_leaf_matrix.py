"""Every dtype in every layout and container, saved and loaded in every way, comes back bit for bit."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leaf_containers import ALONE, RECORD_TYPES, leaf_of, outline
from leaf_dtypes import DTYPES, FRAMEWORKS, element_bits
from leaf_layouts import BuiltLeaf, build
from leaf_matrix import MATRIX, TURNS, WAYS_TO_SAVE, Row, WayToSave, pairs_of, possible_pairs
from leaf_targets import (
    MODES,
    Mode,
    assert_filled,
    assert_free,
    assert_untouched,
    host_elements,
    make_target,
    target_dtype,
    version_of,
)

from savestream import LoadMismatchError, LoadOptions, SaveOptions, blocking
from savestream.planners import TensorStorageMetadata
from savestream.storage_backends import MemoryBackend


class Saved(NamedTuple):
    """A checkpoint of some rows, and the elements that were saved; each row is one entry of a dict, or alone."""

    place: tuple[MemoryBackend, str]
    rows: Sequence[Row]
    expected: Sequence[np.ndarray]


def save_rows(rows: Sequence[Row], seed: int) -> Saved:
    generator = np.random.default_rng(seed)
    built = [build(row.dtype, row.layout, generator) for row in rows]
    trees = [row.container.wrap(leaf.leaf, row.number) for row, leaf in zip(rows, built, strict=True)]
    place = (MemoryBackend("test"), "checkpoint")
    save(together(rows, trees), built, rows[0].way, place)
    return Saved(place, rows, [leaf.expected for leaf in built])


def together(rows: Sequence[Row], trees: Sequence[Any]) -> Any:
    return trees[0] if rows[0].container is ALONE else dict(zip(map(str, rows), trees, strict=True))


def apart(rows: Sequence[Row], state: Any) -> list[Any]:
    return [state] if rows[0].container is ALONE else [state[str(row)] for row in rows]


def save(state: Any, leaves: Sequence[BuiltLeaf], way: WayToSave, place: tuple[MemoryBackend, str]) -> None:
    options = SaveOptions(compression=way.compression)
    if way.eagerly:
        handle = blocking.start_save(state, place, options=options)
        for leaf in leaves:
            leaf.memory[...] = 0x5A  # what is staged may be changed
        handle.result()
    else:
        blocking.save(state, place, options=options)


def load_rows(saved: Saved, mode: Mode) -> int:
    """Load what a mode concerns, and check it; the number of leaves."""
    if not any(mode in row.modes for row in saved.rows):
        return 0
    check = {"free": load_freely, "refuse": load_refused}.get(mode.kind, load_into)
    return check(saved, mode)


def load_freely(saved: Saved, mode: Mode) -> int:
    options = LoadOptions(types=RECORD_TYPES if mode.types else ())
    with x64(mode):
        state = blocking.load(saved.place, framework=mode.framework, options=options)
        for row, tree, expected in zip(saved.rows, apart(saved.rows, state), saved.expected, strict=True):
            with naming(row, mode):
                leaf = leaf_of(tree)
                model = row.container.wrap(leaf, row.number)
                assert outline(tree, leaf) == outline(model, leaf, known_types=mode.types)
                assert_free(leaf, expected, row.dtype, mode)
    return len(saved.rows)


@contextlib.contextmanager
def x64(mode: Mode) -> Iterator[None]:
    """JAX with 64 bits, in all threads."""
    jax.config.update("jax_enable_x64", mode.x64)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@contextlib.contextmanager
def naming(row: Row, mode: Mode) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"{row}, {mode.name}")
        raise


class Targets(NamedTuple):
    """Targets for the rows that a mode concerns, arrays of another shape for all others, and the state of these."""

    leaves: list[Any]
    versions: list[int | None]
    concerned: list[bool]
    state: Any
    keys: list[tuple[str, ...]] | None


def make_targets(saved: Saved, mode: Mode) -> Targets:
    concerned = [mode in row.modes for row in saved.rows]
    leaves, trees = [], []
    for row, expected, is_concerned in zip(saved.rows, saved.expected, concerned, strict=True):
        dtype = target_dtype(row.dtype, mode)
        leaf = np.full(7, 7) if not is_concerned or dtype is None else make_target(expected.shape, dtype, mode)
        leaves.append(leaf)
        trees.append(row.container.wrap(leaf, "to be replaced"))
    names = [(str(row),) for row, is_concerned in zip(saved.rows, concerned, strict=True) if is_concerned]
    keys = None if all(concerned) else names
    return Targets(leaves, list(map(version_of, leaves)), concerned, together(saved.rows, trees), keys)


def load_into(saved: Saved, mode: Mode) -> int:
    targets = make_targets(saved, mode)
    found = blocking.load(saved.place, targets.state, keys=targets.keys, cast=mode.cast)
    rows = saved.rows
    columns = zip(
        rows, apart(rows, found), targets.leaves, targets.versions, targets.concerned, saved.expected, strict=True
    )
    for row, tree, target, version, is_concerned, expected in columns:
        with naming(row, mode):
            leaf = leaf_of(tree)
            marker = row.number if is_concerned else "to be replaced"
            assert outline(tree, leaf) == outline(row.container.wrap(leaf, marker), leaf)
            dtype = target_dtype(row.dtype, mode)
            if not is_concerned or dtype is None:
                assert leaf is target
                assert leaf.tolist() == [7] * 7
                continue
            wanted = expected
            if mode.kind != "fill":
                with np.errstate(all="ignore"):
                    wanted = expected.astype(dtype.host)
            assert_filled(leaf, target, version, wanted, dtype, mode)
    return sum(targets.concerned)


def load_refused(saved: Saved, mode: Mode) -> int:
    targets = make_targets(saved, mode)
    rows = [(row, target_dtype(row.dtype, mode)) for row in saved.rows]
    before = [
        element_bits(host_elements(leaf, dtype)) if is_concerned else b""
        for leaf, (_, dtype), is_concerned in zip(targets.leaves, rows, targets.concerned, strict=True)
    ]
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(saved.place, targets.state, keys=targets.keys, cast=mode.cast)
    assert len(caught.value.dtype_mismatches) == sum(targets.concerned)
    assert not caught.value.problems
    for (row, dtype), leaf, tree, version, bits, is_concerned in zip(
        rows, targets.leaves, apart(saved.rows, targets.state), targets.versions, before, targets.concerned, strict=True
    ):
        with naming(row, mode):
            model = row.container.wrap(leaf, "to be replaced")
            assert outline(tree, leaf) == outline(model, leaf)
            if is_concerned:
                assert_untouched(leaf, bits, version, dtype)
    return sum(targets.concerned)


@functools.cache
def saved_together(framework: str, way: WayToSave, turn: int) -> Saved:
    alike = [row for row in MATRIX if row.way == way and row.turn == turn and row.container is not ALONE]
    return save_rows([row for row in alike if row.dtype.framework == framework], seed=WAYS_TO_SAVE.index(way))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("way", WAYS_TO_SAVE, ids=str)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_leaves_in_containers(framework: str, way: WayToSave, mode: Mode) -> None:
    saved = saved_together(framework, way, MODES.index(mode) % TURNS)
    assert load_rows(saved, mode) == sum(mode in row.modes for row in saved.rows)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_leaves_that_are_the_whole_state(framework: str) -> None:
    loaded = 0
    for row in (row for row in MATRIX if row.container is ALONE and row.dtype.framework == framework):
        saved = save_rows([row], seed=row.number)
        loaded += sum(load_rows(saved, mode) for mode in row.modes)
    assert loaded > 100


@pytest.mark.parametrize("way", WAYS_TO_SAVE, ids=str)
def test_leaves_of_all_frameworks_that_are_packed_together(way: WayToSave) -> None:
    deal = random.Random(WAYS_TO_SAVE.index(way))
    rows = [row for row in deal.sample(MATRIX, 900) if row.container is not ALONE]
    saved = save_rows([row._replace(way=way) for row in rows], seed=0)
    for mode in deal.sample(MODES, 5):
        load_rows(saved, mode)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dtypes_are_stored_by_name(framework: str) -> None:
    saved = saved_together(framework, WAYS_TO_SAVE[0], 0)
    entries = blocking.read_manifest(saved.place).contents.state_dict_metadata.values()
    stored = [entry.properties.dtype for entry in entries if isinstance(entry, TensorStorageMetadata)]
    assert stored == [row.dtype.stored for row in saved.rows]


MIXTURES = [row for row in MATRIX if row.container is not ALONE]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.sampled_from(MIXTURES), min_size=1, max_size=8, unique_by=lambda row: row.number),
    way=st.sampled_from(WAYS_TO_SAVE),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_any_mixture_of_leaves(rows: list[Row], way: WayToSave, modes: list[Mode], seed: int) -> None:
    saved = save_rows([row._replace(way=way) for row in rows], seed)
    for mode in modes:
        load_rows(saved, mode)


# --- the matrix itself -------------------------------------------------------------------------------------


def test_every_two_things_meet() -> None:
    met = {pair for row in MATRIX for pair in pairs_of(row)}
    assert met == possible_pairs()
    assert len(met) > 12_000
    assert len(MATRIX) > 3_000


QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def test_every_dtype_of_the_frameworks_is_tried() -> None:
    tried = {framework: {dtype.name for dtype in DTYPES if dtype.framework == framework} for framework in FRAMEWORKS}
    torch_dtypes = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if type(dtype) is torch.dtype}
    assert torch_dtypes - QUANTISED == tried["torch"]
    extensions = {name for name in ml_dtypes.__all__ if isinstance(getattr(ml_dtypes, name), type)} - {"finfo", "iinfo"}
    assert extensions <= tried["numpy"]
    codes = {np.dtype(code).newbyteorder(order) for code in np.typecodes["All"].replace("O", "") for order in "<>"}
    hosts = [dtype.host for dtype in DTYPES if dtype.framework == "numpy"]  # a set would take some for equal
    assert {(dtype.char, dtype.isnative) for dtype in codes} <= {(host.char, host.isnative) for host in hosts}
    assert {name for name in {*tried["numpy"], *extensions} if jax_computes_with(name)} <= tried["jax"]


def jax_computes_with(name: str) -> bool:
    """Whether JAX has arrays of a dtype of numpy's, and more than holds them."""
    if not hasattr(jnp, name):
        return False
    with jax.enable_x64(True):
        try:
            return jax.device_put(np.zeros((2, 2), getattr(ml_dtypes, name, name))).T.dtype.name == name
        except (TypeError, ValueError, jax.errors.JaxRuntimeError):
            return False
