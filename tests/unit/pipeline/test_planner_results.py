"""What planners of users give, and what became of leaves since they were planned, is checked before it is used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import savestream
from savestream import DefaultLoadPlanner, DefaultSavePlanner, PlanError, SaveOptions, UnsafeObjectError
from savestream.pipeline.buffers import allocate_array
from savestream.planners import LoadPlanner, create_default_local_load_plan
from savestream.storage_backends import MemoryBackend


class Giving(LoadPlanner):
    """Resolves every item to the same array."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.committed: list[Any] = []

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state, self.metadata = state_dict, metadata

    def create_local_plan(self) -> Any:
        return create_default_local_load_plan(self.state, self.metadata)

    def create_global_plan(self, global_plan: Any) -> Any:
        return global_plan

    def finish_plan(self, central_plan: Any) -> Any:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError("there are only arrays")

    def resolve_tensor(self, read_item: Any) -> Any:
        return self.given

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed.append(tensor)


class Transforming(DefaultLoadPlanner):
    def __init__(self, given: Any, **options: Any) -> None:
        super().__init__(**options)
        self.given = given
        self.committed: list[Any] = []

    def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
        return self.given

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed.append(tensor)


class LookingUp(DefaultLoadPlanner):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def lookup_tensor(self, index: Any) -> Any:
        return self.given


SOURCE = np.arange(6, dtype="f4").reshape(2, 3)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "larger": (lambda: np.zeros((4, 2, 3), "f4"), r"shape \(4, 2, 3\)"),
    "longer": (lambda: np.zeros((3, 3), "f4"), r"shape \(3, 3\)"),
    "smaller": (lambda: np.zeros(3, "f4"), r"shape \(3,\)"),
    "read-only": (lambda: read_only(np.zeros((2, 3), "f4")), "read-only"),
    "integers": (lambda: np.zeros((2, 3), "i2"), "dtype int16"),
    "wider": (lambda: np.zeros((2, 3), "f8"), "dtype float64"),
    "swapped": (lambda: np.zeros((2, 3), ">f4"), "dtype >f4"),
    "overlapping": (lambda: as_strided(np.zeros(3, "f4"), (2, 3), (0, 4)), "overlap"),
    "list": (lambda: [[0.0] * 3] * 2, "list"),
    "nothing": (lambda: None, "NoneType"),
}


async def saved(array: np.ndarray = SOURCE) -> Any:
    place = MemoryBackend(), "c"
    await savestream.save({"w": array}, place, options=SaveOptions(compression="none"))
    return place


@pytest.mark.parametrize("kind", [Giving, Transforming])
@pytest.mark.parametrize(("given", "problem"), WRONG.values(), ids=list(WRONG))
async def test_what_cannot_take_a_box_is_refused_by_key(given: Any, problem: str, kind: Any) -> None:
    planner = kind(given())
    before = np.array(planner.given).tobytes() if isinstance(planner.given, np.ndarray) else None
    target = np.zeros_like(SOURCE)
    with pytest.raises(PlanError, match=rf"^w: {kind.__name__}\.resolve_tensor gave .*{problem}"):
        await savestream.load(await saved(), {"w": target}, planner=planner)
    assert not target.any()
    assert not planner.committed
    if before is not None:
        assert planner.given.tobytes() == before


@pytest.mark.parametrize("count", [1 << 18, 1 << 19, (1 << 19) + 1, 1 << 20])
async def test_large_arrays_that_storage_reads_straight_into(count: int) -> None:
    source = np.arange(1 << 19, dtype="f4")
    given = allocate_array(np.dtype("f4"), (count,))
    given[:] = 7
    load = savestream.load(await saved(source), {"w": np.zeros_like(source)}, planner=Transforming(given))
    if count == len(source):
        await load
        assert given.tobytes() == source.tobytes()
        return
    with pytest.raises(PlanError, match=r"^w: "):
        await load
    assert (given == 7).all()


async def test_a_large_read_only_array_is_refused() -> None:
    source = np.arange(1 << 19, dtype="f4")
    given = read_only(allocate_array(np.dtype("f4"), source.shape))
    with pytest.raises(PlanError, match=r"^w: .*read-only"):
        await savestream.load(await saved(source), {"w": np.zeros_like(source)}, planner=Transforming(given))


async def test_a_cast_that_the_planner_allows() -> None:
    given = np.zeros((2, 3), "f8", order="F")
    planner = Transforming(given, cast=True)
    await savestream.load(await saved(), {"w": np.zeros_like(SOURCE)}, planner=planner)
    assert (given == SOURCE).all()
    assert len(planner.committed) == 1
    assert planner.committed[0] is given
    complex_source = SOURCE.astype("c8")
    with pytest.raises(PlanError, match=r"^w: .*cannot be converted"):
        await savestream.load(
            await saved(complex_source), {"w": complex_source * 0}, planner=Transforming(given, cast=True)
        )


async def test_a_looked_up_array_of_another_shape_is_not_cut_silently() -> None:
    with pytest.raises(PlanError, match=r"^w: LookingUp\.resolve_tensor gave an array of shape \(1, 3\)"):
        await savestream.load(await saved(), {"w": np.zeros_like(SOURCE)}, planner=LookingUp(np.zeros((1, 3), "f4")))


@pytest.mark.parametrize("kind", [Giving, Transforming])
async def test_buffers_of_the_standard_library_are_filled_and_given_back(kind: Any) -> None:
    memory = bytearray(24)
    given = memoryview(memory).cast("f", (2, 3))
    planner = kind(given)
    await savestream.load(await saved(), {"w": np.zeros_like(SOURCE)}, planner=planner)
    assert bytes(memory) == SOURCE.tobytes()
    assert len(planner.committed) == 1
    assert planner.committed[0] is given


@pytest.mark.parametrize("fails", [False, True])
async def test_a_planner_keeps_nothing_of_a_target(fails: bool) -> None:
    class Failing(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            raise ValueError("no")

    planner = Failing() if fails else DefaultLoadPlanner()
    array = np.zeros_like(SOURCE)
    kept = weakref.ref(array)
    caught = None
    try:
        await savestream.load(await saved(), {"w": array}, planner=planner)
    except ValueError as error:
        caught = error.with_traceback(None)
    assert (caught is not None) == fails
    del array
    await savestream.exists(await saved())  # by now the engine has done away with what it ran before
    gc.collect()
    assert kept() is None
    assert planner.state_dict == {}
    target = np.zeros_like(SOURCE)
    if not fails:  # and it serves again
        await savestream.load(await saved(), {"w": target}, planner=planner)
        assert target.tobytes() == SOURCE.tobytes()


class Meddling(DefaultSavePlanner):
    """Has something happen to the state as soon as it is planned."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self.happens = happens

    def finish_plan(self, new_plan: Any) -> Any:
        self.happens()
        return super().finish_plan(new_plan)


async def save_staged(stage: Any, state: Any, place: Any, planner: DefaultSavePlanner) -> None:
    if stage == "save":
        await savestream.save(state, place, planner=planner)
    else:
        await (await savestream.start_save(state, place, planner=planner, stage=stage))


def resized(array: np.ndarray) -> None:
    array.resize((array.shape[0] * 2,), refcheck=False)


def as_integers(array: np.ndarray) -> None:
    array.dtype = "i4"


def reshaped(array: np.ndarray) -> None:
    array.shape = (2, -1)


@pytest.mark.parametrize("happens", [resized, as_integers, reshaped], ids=lambda function: function.__name__)
@pytest.mark.parametrize("count", [8, 1 << 21], ids=["small", "large"])
@pytest.mark.parametrize("stage", ["save", "eager", "lazy"])
@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")
async def test_an_array_that_changes_after_it_was_planned_is_refused_by_key(
    happens: Any, count: int, stage: Any
) -> None:
    array = np.zeros(count, "f4")
    state = {"a": np.ones(5), "layer": {"w": array}, "z": [np.ones(3, "f4"), b"bytes"]}
    place, planner = (MemoryBackend(), "c"), Meddling(lambda: happens(array))
    with pytest.raises(PlanError, match=r"^layer\.w: it was planned as float32 of shape .* and is now"):
        await save_staged(stage, state, place, planner)
    assert not await savestream.exists(place)


async def test_arrays_that_only_change_their_elements_are_saved() -> None:
    state = {"a": np.ones(5), "w": np.zeros(1 << 20), "i": np.zeros(7, "i2"), "t": np.zeros((3, 4)).T, "o": b"x"}

    def fill() -> None:
        for array in state.values():
            if isinstance(array, np.ndarray):
                array += 5

    place = MemoryBackend(), "c"
    await savestream.save(state, place, planner=Meddling(fill))
    found = await savestream.load(place)
    assert all(np.array_equal(found[name], state[name]) for name in state)
    assert found["t"][0, 0] == 5


class Verbose:
    def __repr__(self) -> str:
        return "verbose " * 1000


@pytest.mark.parametrize("value", [1, np.ones(2)], ids=["value", "array"])
@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda mapping: mapping, "the state"),
        (lambda mapping: {"s": mapping}, "s"),
        (lambda mapping: {"a": [0, {"b.c": mapping}]}, r"a[1].b\.c"),
    ],
    ids=["root", "beneath", "deep"],
)
@pytest.mark.parametrize("key", [Verbose(), (1, Verbose()), frozenset([Verbose()])], ids=["key", "tuple", "set"])
async def test_a_refused_dict_key_is_located(key: Any, wrap: Any, place: str, value: Any) -> None:
    with pytest.raises(UnsafeObjectError) as caught:
        await savestream.save(wrap({key: value}), (MemoryBackend(), "c"))
    kind = f"{type(key).__module__}.{type(key).__qualname__}"
    assert str(caught.value).startswith(f"{place}: a dict key of class {kind}: ")
    assert "verbose" not in str(caught.value)
