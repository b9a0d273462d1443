"""Wrong use by callers: refused by name, at once, without harm to what else goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import fractions
import functools
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from roundtrip_support import assert_same, fresh_place

import savestream
from savestream import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    LoadMismatchError,
    LoadOptions,
    PlanCache,
    PlanError,
    SaveOptions,
    SavestreamError,
    StagingPool,
    UnsafeObjectError,
    UsageError,
)
from savestream.pipeline.engine import current_engine
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend

STATE = {"a": np.arange(6, dtype=np.float32), "step": 3}


def untouchable() -> tuple[FaultyBackend, str]:
    """A place that may not even be looked at."""
    return FaultyBackend(MemoryBackend(), [Fault(None, AssertionError("storage was touched"), times=None)]), "c"


async def do(form: str, state: Any, place: Any, **arguments: Any) -> Any:
    if form == "save":
        return await savestream.save(state, place, **arguments)
    return await (await savestream.start_save(state, place, **arguments))


# --- arguments --------------------------------------------------------------------------------------------


async def coroutine_observer(event: object) -> None: ...


class Wide(savestream.Coordinator):
    rank, world_size = 0, 2

    async def put(self, key: str, value: bytes) -> None: ...

    async def get(self, key: str, timeout_seconds: float) -> bytes:
        return b""

    async def heartbeat(self) -> None: ...


SAVE_ARGUMENTS = [
    ("options", {"compression": "none"}),
    ("options", LoadOptions()),
    ("options", SaveOptions),
    ("planner", DefaultSavePlanner),
    ("planner", DefaultLoadPlanner()),
    ("planner", "default"),
    ("plan_cache", {}),
    ("plan_cache", PlanCache),
    ("plan_cache", True),
    ("coordinator", 0),
    ("coordinator", Wide()),
    ("overwrite", 1),
    ("overwrite", "no"),
    ("overwrite", None),
    ("observer", []),
    ("observer", coroutine_observer),
    ("step", "7"),
    ("step", 7.0),
    ("step", True),
    ("step", np.bool_(True)),
    ("step", -1),
    ("step", 1 << 63),
    ("step", np.arange(3)),
    ("metrics", [("loss", 1.0)]),
    ("metrics", 0.5),
    ("metrics", {1: 0.5}),
    ("metrics", {"loss": "low"}),
    ("metrics", {"loss": None}),
    ("metrics", {"loss": True}),
    ("metrics", {"loss": np.bool_(True)}),
    ("metrics", {"loss": 1j}),
    ("metrics", {"loss": np.arange(2)}),
    ("metrics", {"loss": 10**400}),
    ("metrics", {"loss": -(10**5000)}),
    ("metrics", {"loss": fractions.Fraction(10**400)}),
]


@pytest.mark.parametrize("form", ["save", "start_save"])
@pytest.mark.parametrize(("name", "value"), SAVE_ARGUMENTS)
async def test_a_wrong_argument_of_a_save_is_refused_by_name(form: str, name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"^{name}\b"):
        await do(form, STATE, untouchable(), **{name: value})


@pytest.mark.parametrize("value", ["Eager", None, True, b"lazy"])
async def test_a_wrong_stage_is_refused(value: Any) -> None:
    with pytest.raises(PlanError, match=r"^stage="):
        await savestream.start_save(STATE, untouchable(), stage=value)


PLACES = [None, 5, b"", "", ["/tmp/x"], ("/tmp", "x"), (MemoryBackend(), "../x"), (MemoryBackend(), 3), "nope://x/y"]


@pytest.mark.parametrize("value", PLACES)
async def test_a_wrong_place_is_refused_everywhere(value: Any) -> None:
    calls = [
        savestream.save(STATE, value),
        savestream.start_save(STATE, value),
        *(function(value) for function in (savestream.load, savestream.exists, savestream.delete)),
        *(function(value) for function in (savestream.verify, savestream.read_manifest, savestream.list_checkpoints)),
    ]
    for call in calls:
        with pytest.raises(PlanError, match=r"place|backend for nope"):
            await call
    with pytest.raises(PlanError, match=r"place|backend for nope"):
        savestream.iter_arrays(value)


LOAD_ARGUMENTS = [
    ("options", SaveOptions()),
    ("options", {"threads": 2}),
    ("options", LoadOptions),
    ("planner", DefaultLoadPlanner),
    ("planner", DefaultSavePlanner()),
    ("coordinator", "me"),
    ("coordinator", Wide()),
    ("observer", 3),
    ("observer", coroutine_observer),
    ("strict", 0),
    ("strict", "yes"),
    ("cast", None),
    ("cast", "float32"),
    ("framework", "tensorflow"),
    ("framework", None),
    ("keys", 5),
    ("keys", b"a"),
    ("keys", {"a": 1}),
    ("keys", ["a", 5]),
    ("keys", (key for key in "a")),
]


@pytest.mark.parametrize(("name", "value"), LOAD_ARGUMENTS)
async def test_a_wrong_argument_of_a_load_is_refused_by_name(name: str, value: Any) -> None:
    for target in (None, {"a": np.zeros(6, "f4"), "step": 0}):
        with pytest.raises(PlanError, match=rf"^{name}\b"):
            await savestream.load(untouchable(), target, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("options", SaveOptions()), ("options", LoadOptions), ("observer", 3), ("observer", coroutine_observer)],
)
async def test_a_wrong_argument_of_verify_and_iter_arrays_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"^{name}\b"):
        await savestream.verify(untouchable(), **{name: value})
    if name == "options":
        with pytest.raises(PlanError, match=rf"^{name}\b"):
            savestream.iter_arrays(untouchable(), options=value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SaveOptions(threads=0),
        lambda: SaveOptions(threads=True),
        lambda: SaveOptions(memory_budget_bytes=100),
        lambda: SaveOptions(timeout_seconds=0),
        lambda: SaveOptions(write_bytes_per_second="1"),
        lambda: SaveOptions(staging_pool=5),
        lambda: SaveOptions(allow_pickle=1),
        lambda: LoadOptions(threads=-1),
        lambda: LoadOptions(types=dict),
        lambda: LoadOptions(types=["Point"]),
        lambda: LoadOptions(verify_digests=None),
        lambda: StagingPool(0),
    ],
)
def test_a_wrong_option_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(PlanError, match=r"threads|memory_budget|timeout|write_bytes|pool|pickle|types|verify|limit"):
        make()


async def test_numbers_of_numpy_are_numbers_and_ints_stay_exact() -> None:
    metrics = {
        "loss": np.float32(0.1),
        "accuracy": np.array(0.75),
        "count": np.int64(-3),
        "large": 2**60 + 1,
        "seen": np.uint64(2**64 - 1),
        "ratio": fractions.Fraction(1, 4),
        "nan": float("nan"),
        "worst": float("-inf"),
    }
    for step in (np.int64(12), np.uint8(12), np.array(12), 12):
        place = fresh_place()
        info = await savestream.save(STATE, place, step=step, metrics=metrics)
        found = await savestream.read_manifest(place)
        assert type(info.step) is type(found.step) is int
        assert info.step == found.step == 12
        assert found.metrics is not None
        assert list(found.metrics) == list(metrics)
        assert found.metrics["loss"] == float(np.float32(0.1))
        exact = {name: found.metrics[name] for name in ("accuracy", "count", "large", "seen", "ratio", "worst")}
        assert exact == {
            "accuracy": 0.75,
            "count": -3,
            "large": 2**60 + 1,
            "seen": 2**64 - 1,
            "ratio": 0.25,
            "worst": float("-inf"),
        }
        assert np.isnan(found.metrics["nan"])


async def test_what_a_planner_decides_is_not_asked_for_beside_it() -> None:
    target = {"a": np.zeros(6, "f4"), "step": 0}
    beside: list[dict[str, Any]] = [
        {"keys": "a"},
        {"keys": []},
        {"strict": False},
        {"cast": True},
        {"options": LoadOptions(types=[int])},
        {"options": LoadOptions(allow_pickle=True)},
    ]
    for arguments in beside:
        for planner, own in ((DefaultLoadPlanner(), target), (EmptyStateDictLoadPlanner(), None)):
            name = "types|allow_pickle" if "options" in arguments else next(iter(arguments))
            with pytest.raises(PlanError, match=rf"({name}).*with planner= the planner decides"):
                await savestream.load(untouchable(), own, planner=planner, **arguments)
    with pytest.raises(PlanError, match="planner=DefaultLoadPlanner fills a target"):
        await savestream.load(untouchable(), planner=DefaultLoadPlanner())
    place = fresh_place()
    await savestream.save(STATE, place)
    with pytest.raises(PlanError, match="needs an empty state dict"):
        await savestream.load(place, target, planner=EmptyStateDictLoadPlanner())
    assert target["a"].tolist() == [0.0] * 6


# --- one planner, two at once -----------------------------------------------------------------------------


async def test_a_save_planner_serves_one_save_at_a_time() -> None:
    backend, gate, planner = MemoryBackend(), Gate(), DefaultSavePlanner()
    faulty = FaultyBackend(backend, [Fault("open_writer", hook=gate)])
    first = asyncio.create_task(savestream.save({"a": np.ones(9)}, (faulty, "first"), planner=planner))
    await gate.reached()
    for form in ("save", "start_save"):
        with pytest.raises(UsageError, match="DefaultSavePlanner serves another save or load"):
            await do(form, {"b": np.zeros(5)}, (backend, "second"), planner=planner)
    gate.open()
    await first
    assert_same(await savestream.load((backend, "first")), {"a": np.ones(9)})
    assert not await savestream.exists((backend, "second"))
    await savestream.save({"b": np.zeros(5)}, (backend, "second"), planner=planner)
    assert_same(await savestream.load((backend, "second")), {"b": np.zeros(5)})


async def test_a_save_planner_is_free_again_after_a_failure_and_a_cancellation() -> None:
    backend, planner = MemoryBackend(), DefaultSavePlanner()
    for error in (28, RuntimeError("lost")):
        with pytest.raises((savestream.StorageError, RuntimeError)):
            await savestream.save(STATE, (FaultyBackend(backend, [Fault("write", error)]), "c"), planner=planner)
    with pytest.raises(UnsafeObjectError):
        await savestream.save({"bad": object()}, (backend, "c"), planner=planner)
    gate = Gate()
    handle = await savestream.start_save(
        STATE, (FaultyBackend(backend, [Fault("put", hook=gate)]), "c"), planner=planner
    )
    await gate.reached()
    handle.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await handle
    await savestream.save(STATE, (backend, "c"), planner=planner)
    assert_same(await savestream.load((backend, "c")), STATE)


async def test_a_load_planner_serves_one_load_at_a_time() -> None:
    backend, gate, planner = MemoryBackend(), Gate(), DefaultLoadPlanner()
    await savestream.save(STATE, (backend, "c"))
    faulty = FaultyBackend(backend, [Fault("open_reader", hook=gate, path_contains=".bin")])
    one, two = ({"a": np.zeros(6, "f4"), "step": 0} for _ in range(2))
    first = asyncio.create_task(savestream.load((faulty, "c"), one, planner=planner))
    await gate.reached()
    with pytest.raises(UsageError, match="DefaultLoadPlanner serves another save or load"):
        await savestream.load((backend, "c"), two, planner=planner)
    gate.open()
    await first
    assert_same(one, STATE)
    assert two["a"].tolist() == [0.0] * 6
    with pytest.raises(LoadMismatchError):
        await savestream.load((backend, "c"), {"other": np.zeros(6, "f4")}, planner=planner)
    assert_same(await savestream.load((backend, "c"), two, planner=planner), STATE)


# --- what planners, observers and callbacks raise ---------------------------------------------------------

RAISED = [
    TimeoutError("the planner's own"),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    concurrent.futures.CancelledError(),
    GeneratorExit(),
    StopIteration(),
    StopAsyncIteration(),
]
METHODS = [
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "plan_fingerprint",
]


def raising(kind: type, method: str, error: BaseException) -> Any:
    def fail(self: object, *_: object, **__: object) -> None:
        raise error

    return type("Raising", (kind,), {method: fail})()


async def assert_typed(call: Any, error: BaseException) -> None:
    """The call fails like an ordinary one: not with what would end the program or the caller's task."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - that it is an Exception at all is what is tested
        await call
    if isinstance(error, TimeoutError):
        assert type(caught.value) is TimeoutError
        assert caught.value.args == error.args
    elif not isinstance(error, Exception) or isinstance(error, concurrent.futures.CancelledError):
        assert isinstance(caught.value, SavestreamError)
        assert type(error).__name__ in str(caught.value)
    assert not isinstance(caught.value, savestream.SaveTimeoutError)


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("form", ["save", "start_save"])
async def test_whatever_a_save_planner_raises_ends_that_save_alone(form: str, error: BaseException) -> None:
    await savestream.save(STATE, fresh_place())
    engine, backend = current_engine(), MemoryBackend()
    for method in METHODS:
        for options in (None, SaveOptions(timeout_seconds=60.0)):
            planner = raising(DefaultSavePlanner, method, error)
            call = do(form, STATE, (backend, "c"), planner=planner, options=options, plan_cache=PlanCache())
            await assert_typed(call, error)
    assert current_engine() is engine
    assert await backend.list_objects("") == []
    await savestream.save(STATE, (backend, "c"))


@pytest.mark.parametrize("error", RAISED, ids=repr)
async def test_whatever_a_load_planner_raises_ends_that_load_alone(error: BaseException) -> None:
    place = fresh_place()
    await savestream.save(STATE, place)
    engine = current_engine()
    for method in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes"):
        planner = raising(DefaultLoadPlanner, method, error)
        await assert_typed(savestream.load(place, {"a": np.zeros(6, "f4"), "step": 0}, planner=planner), error)
    for method in ("resolve_tensor", "commit_tensor", "finish_load"):
        planner = raising(DefaultLoadPlanner, method, error)
        await assert_typed(savestream.load(place, {"a": np.zeros(6, "f4"), "step": 0}, planner=planner), error)
    assert current_engine() is engine
    assert_same(await savestream.load(place), STATE)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
async def test_whatever_observers_and_callbacks_raise_ends_nothing(error: BaseException, caplog: Any) -> None:
    def fail(_: object) -> None:
        raise error

    place, gate = fresh_place(), Gate()
    await savestream.save(STATE, place, observer=fail)
    engine = current_engine()
    called = threading.Event()
    faulty = FaultyBackend(place[0], [Fault("create", hook=gate)])
    handle = await savestream.start_save(STATE, (faulty, "d"), observer=fail)
    handle.add_done_callback(fail)
    handle.add_done_callback(lambda _: called.set())
    await gate.reached()
    gate.open()
    async with asyncio.timeout(30):
        await handle
    assert await asyncio.to_thread(called.wait, 30)
    handle.add_done_callback(fail)  # at once: the save has ended
    assert_same(await savestream.load(place, observer=fail), STATE)
    await savestream.verify(place, observer=fail)
    assert current_engine() is engine
    assert sum("a done callback failed" in record.message for record in caplog.records) == 2
    assert any("an observer failed" in record.message for record in caplog.records)


def test_a_dead_engine_is_replaced() -> None:
    script = """
import threading
import numpy as np
from savestream import blocking
from savestream.pipeline.engine import current_engine
threading.excepthook = lambda arguments: None
state = {"a": np.arange(3)}
blocking.save(state, "memory://m/a")
engine = current_engine()
def die(): raise SystemExit(3)
engine.post(die)
engine._thread.join(30)
assert not engine.is_alive
blocking.save(state, "memory://m/b")
assert current_engine() is not engine
assert blocking.load("memory://m/a")["a"].tolist() == [0, 1, 2]
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# --- leaves -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    rate: float = 0.1


@dataclasses.dataclass
class Derived:
    rate: float = 0.1

    def __post_init__(self) -> None:
        self.squared = self.rate**2


@dataclasses.dataclass
class Lazy:
    rate: float = 0.1

    @functools.cached_property
    def squared(self) -> float:
        return self.rate**2


async def test_attributes_that_would_be_lost_are_refused() -> None:
    for wrap in (lambda value: {"model": {"cfg": value}}, lambda value: {"model": {"cfg": value, "w": np.ones(2)}}):
        config = Plain()
        config.note = "mine"  # type: ignore[attr-defined]
        with pytest.raises(UnsafeObjectError, match=r"model(\.cfg)?: .*Plain has the attribute 'note'"):
            await savestream.save(wrap(config), fresh_place())
        lazy = Lazy(0.5)
        assert lazy.squared == 0.25
        for fine in (Plain(0.3), Derived(0.5), lazy):
            place = fresh_place()
            await savestream.save(wrap(fine), place)
            found = await savestream.load(place, options=LoadOptions(types=[Plain, Derived, Lazy]))
            assert found["model"]["cfg"] == fine
            assert getattr(found["model"]["cfg"], "squared", None) == getattr(fine, "squared", None)


async def test_what_numpy_would_lose_is_refused_by_key() -> None:
    titled = np.dtype([(("a title", "x"), "f4"), ("y", "i2")])
    for dtype in (titled, np.dtype([("inner", titled)])):
        with pytest.raises(UnsafeObjectError, match=r"^deep\.records: .*titles"):
            await savestream.save({"deep": {"records": np.zeros(3, dtype)}}, untouchable_until_planned())
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    with pytest.raises(UnsafeObjectError, match=r"^deep\.m: .*MaskedArray.*data and mask as two arrays"):
        await savestream.save({"deep": {"m": masked, "w": np.ones(1)}}, untouchable_until_planned())


def untouchable_until_planned() -> tuple[FaultyBackend, str]:
    """A place that may be looked at, but not written to."""
    kinds: tuple[Any, ...] = ("open_writer", "write", "put", "create", "replace")
    faults = [Fault(kind, AssertionError("something was written"), times=None) for kind in kinds]
    return FaultyBackend(MemoryBackend(), faults), "c"


@pytest.mark.parametrize("dtype", ["<U0", "<U1", "|S0", "|V0"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
async def test_strings_of_no_width_keep_it(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ndarray(shape, dtype)
    array[...] = np.zeros((), dtype)
    place = fresh_place()
    await savestream.save({"s": array, "w": np.ones(3)}, place)
    found = await savestream.load(place)
    assert (found["s"].dtype, found["s"].dtype.itemsize) == (array.dtype, array.dtype.itemsize)
    assert found["s"].shape == shape
    target = {"s": np.ndarray(shape, dtype), "w": np.zeros(3)}
    assert_same((await savestream.load(place, target))["w"], np.ones(3))
    async for key, one in savestream.iter_arrays(place):
        assert one.dtype == (array.dtype if key == "s" else np.float64)


@pytest.mark.parametrize("form", ["save", "start_save"])
async def test_an_array_that_no_index_could_list_is_refused_at_once(form: str) -> None:
    endless = np.broadcast_to(np.ones(1), (1 << 58,))
    started = time.perf_counter()
    with pytest.raises(PlanError, match=r"^deep\.endless: with this leaf of \d+ bytes"):
        await do(form, {"deep": {"endless": endless}}, untouchable_until_planned())
    assert time.perf_counter() - started < 5


# --- loads ------------------------------------------------------------------------------------------------


async def test_a_cast_that_was_asked_for_is_quiet() -> None:
    place = fresh_place()
    wide = np.array([np.nan, 1e300, -np.inf, 1.5] * 500)
    await savestream.save({"w": wide, "scalar": np.array(np.nan)}, place)
    for dtype in ("float16", "int8", "uint32", "bool", "complex64"):
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            target = {"w": np.zeros(2000, dtype), "scalar": np.zeros((), dtype)}
            await savestream.load(place, target, cast=True)
        with np.errstate(all="ignore"):
            assert_same(target["w"], wide.astype(dtype))


async def test_a_mismatch_names_the_checkpoint_and_what_may_have_been_meant() -> None:
    place = fresh_place("runs/step-1")
    await savestream.save({"model": {"layer.0": np.ones(2), "weight": np.ones(3)}, "a.b": {"c": np.ones(1)}}, place)
    url = f"{place[0].url}/runs/step-1"
    for wanted, meant in [
        ("model.layer.0", r"model.layer\.0"),
        ("a.b", r"a\.b"),
        ("model.wieght", "model.weight"),
    ]:
        with pytest.raises(LoadMismatchError, match=re.escape(url)) as caught:
            await savestream.load(place, keys=wanted)
        assert f"{wanted!r}: did you mean {meant!r}" in str(caught.value) or f"did you mean {meant + '.c'!r}" in str(
            caught.value
        )
        assert await savestream.load(place, keys=meant)
    with pytest.raises(LoadMismatchError, match=r"runs/step-1 does not match.*did you mean 'model\.weight'"):
        await savestream.load(place, {"model": {"wieght": np.zeros(3)}}, strict=True)
    with pytest.raises(LoadMismatchError, match=r"runs/step-1") as caught:
        await savestream.load(place, keys="entirely_different_from_all")
    assert "did you mean" not in str(caught.value)


# --- handles ----------------------------------------------------------------------------------------------


async def test_a_handle_blocks_no_running_loop_and_judges_no_running_save() -> None:
    gate = Gate()
    faulty = FaultyBackend(MemoryBackend(), [Fault("open_writer", hook=gate)])
    handle = await savestream.start_save(STATE, (faulty, "c"), stage="lazy")
    await gate.reached()
    try:
        with pytest.raises(UsageError, match="await handle"):
            handle.result()
        with pytest.raises(UsageError, match=r"await handle\.staged\(\)"):
            handle.wait_staged()
        with pytest.raises(UsageError, match="has not ended yet"):
            handle.exception()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(handle.result, 0.0)
    finally:
        gate.open()
    info = await handle
    assert handle.result() is info
    handle.wait_staged()
    assert handle.exception() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_handle_of_the_parent_is_refused_in_a_forked_child() -> None:
    script = """
import os, sys, warnings
import numpy as np
from savestream import UsageError, blocking
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend
gate = Gate()
backend = FaultyBackend(MemoryBackend(), [Fault("create", hook=gate)])
handle = blocking.start_save({"a": np.arange(3)}, (backend, "c"))
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    refused = 0
    for action in (handle.result, handle.wait_staged, handle.exception, handle.cancel):
        try:
            action()
        except UsageError:
            refused += 1
    os._exit(0 if refused == 4 else 3 + refused)
_, status = os.waitpid(child, 0)
gate.open()
handle.result()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
