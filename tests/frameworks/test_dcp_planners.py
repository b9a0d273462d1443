"""torch's planners and subclasses of them, with and without plan caching, on one rank."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, load, save, with_bits, zeroed
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner

import savestream.blocking
from savestream import SaveOptions
from savestream.errors import PlanError
from savestream.integrations.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")

CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


@pytest.fixture(autouse=True)
def _no_cached_plans() -> Iterator[None]:
    """torch keeps plans on the class, for the whole process."""
    yield
    for name in CACHES:
        getattr(SavePlanner, name).clear()


# --- plan caching -----------------------------------------------------------------------------------------


class CachingPlanner(dcp.DefaultSavePlanner):
    """Remembers whether torch made a plan or took a cached one."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.was_cached = False

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.was_cached = not plan.usable
        return plan


def caching() -> CachingPlanner:
    return CachingPlanner()


def test_a_cached_plan_stores_todays_state(tmp_path: Path) -> None:
    """Names and shapes stay, so torch plans nothing; dtypes, values and their sizes change."""
    states: list[dict[str, Any]] = [
        {"w": with_bits(torch.float32, 8, 3), "v": "short", "g": torch.ones(2)},
        {"w": with_bits(torch.bfloat16, 8, 3), "v": "long" * 1000, "g": torch.ones(2, requires_grad=True)},
        {"w": with_bits(torch.float64, 8, 3), "v": None, "g": torch.ones(2, requires_grad=True)},
        {"w": with_bits(torch.int8, 3, 8).t(), "v": [1, 2], "g": torch.ones(2)},
        {"w": with_bits(torch.float32, 8, 3), "v": "short", "g": torch.ones(2)},
    ]
    for number, state in enumerate(states):
        planner = caching()
        returned = save(state, StorageWriter(tmp_path / str(number)), planner=planner)
        assert planner.was_cached == bool(number)
        plain = save(state, StorageWriter(tmp_path / f"plain-{number}"))
        for metadata in (returned, StorageReader(tmp_path / str(number)).read_metadata()):
            assert metadata.state_dict_metadata == plain.state_dict_metadata
            assert metadata.planner_data == plain.planner_data
            assert metadata.version == "1.0.0"
        assert_same_state(load(zeroed(state), StorageReader(tmp_path / str(number))), state)
        assert savestream.blocking.verify(tmp_path / str(number)).raw_bytes > 0
        found = savestream.blocking.load(tmp_path / str(number))
        assert str(found["w"].dtype) == str(state["w"].dtype).removeprefix("torch.")


def test_cached_and_fresh_plans_give_equal_checkpoints(tmp_path: Path) -> None:
    state = {"w": with_bits(torch.float32, 8, 3), "deep": {"list": [torch.ones(3), 5]}}
    for number in range(3):
        save(state, StorageWriter(tmp_path / f"cached-{number}"), planner=caching())
    save(state, StorageWriter(tmp_path / "fresh"))
    (fresh,) = (tmp_path / "fresh").rglob("*.bin")
    seen = set()
    for number in range(3):
        (data,) = (tmp_path / f"cached-{number}").rglob("*.bin")
        assert data.read_bytes() == fresh.read_bytes()
        seen.add(StorageReader(tmp_path / f"cached-{number}").read_metadata().storage_meta.save_id)
    assert len(seen) == 3


def test_a_cached_plan_of_another_nesting_does_not_bring_its_paths(tmp_path: Path) -> None:
    save({"a": {"b": torch.ones(2)}, "c": 1}, StorageWriter(tmp_path / "nested"), planner=caching())
    returned = save({"a.b": torch.ones(2), "c": 1}, StorageWriter(tmp_path / "flat"), planner=caching())
    assert returned.planner_data == {"a.b": ("a.b",), "c": ("c",)}
    assert StorageReader(tmp_path / "flat").read_metadata().planner_data == returned.planner_data
    assert list(savestream.blocking.load(tmp_path / "flat")) == ["a.b", "c"]


def test_a_changed_shape_is_planned_again(tmp_path: Path) -> None:
    for number, shape in enumerate([(4, 2), (2, 4), (8,), (8, 1), ()]):
        state = {"w": with_bits(torch.float32, *shape)}
        save(state, StorageWriter(tmp_path / str(number)), planner=caching())
        assert_same_state(load(zeroed(state), StorageReader(tmp_path / str(number))), state)


def test_a_failed_save_does_not_spoil_the_cache(tmp_path: Path) -> None:
    state = {"w": with_bits(torch.float32, 8)}
    save(state, StorageWriter(tmp_path / "0"), planner=caching())
    with pytest.raises(dcp.CheckpointException, match="already there"):
        save(state, StorageWriter(tmp_path / "0", overwrite=False), planner=caching())
    other = {"w": with_bits(torch.bfloat16, 8)}
    save(other, StorageWriter(tmp_path / "1"), planner=caching())
    assert_same_state(load(zeroed(other), StorageReader(tmp_path / "1")), other)


# --- planners that change what is saved -------------------------------------------------------------------


class HalfPlanner(dcp.DefaultSavePlanner):
    """Stores tensors as float16; ``in_plan``: and says so in the plan."""

    in_plan = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if not self.in_plan:
            return plan
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is not None:
                data = dataclasses.replace(data, properties=dataclasses.replace(data.properties, dtype=torch.float16))
            items.append(dataclasses.replace(item, tensor_data=data))
        return dataclasses.replace(plan, items=items)

    def resolve_data(self, write_item: Any) -> Any:
        with self._lock:
            self.calls[write_item.index.fqn] = self.calls.get(write_item.index.fqn, 0) + 1
        made = super().resolve_data(write_item)
        return made if isinstance(made, io.BytesIO) else made.to(torch.float16)


@pytest.mark.parametrize("in_plan", [True, False])
def test_a_planner_that_casts(tmp_path: Path, in_plan: bool) -> None:
    state = {"w": torch.randn(600, 700), "s": torch.tensor(2.5), "step": 3}
    planner = HalfPlanner()
    planner.in_plan = in_plan
    options = SaveOptions(memory_budget_bytes=4 * 1024 * 1024, threads=2)
    returned = save(state, StorageWriter(tmp_path / "c", options=options), planner=planner)
    assert returned.state_dict_metadata["w"].properties.dtype is torch.float16
    assert planner.calls == {"w": 2, "s": 2, "step": 1}
    assert str(savestream.blocking.load(tmp_path / "c")["w"].dtype) == "float16"
    target = load(zeroed(state), StorageReader(tmp_path / "c"))
    assert_same_state(target, {"w": state["w"].half().float(), "s": torch.tensor(2.5), "step": 3})


def test_a_planner_that_changes_its_mind_is_refused(tmp_path: Path) -> None:
    class Fickle(HalfPlanner):
        def resolve_data(self, write_item: Any) -> Any:
            made = super().resolve_data(write_item)
            return made if self.calls[write_item.index.fqn] == 1 else made.double()

    with pytest.raises(dcp.CheckpointException, match=r"w: the planner resolved it to float16 of shape .* first"):
        save({"w": torch.ones(3)}, StorageWriter(tmp_path / "c"), planner=Fickle())
    assert not savestream.blocking.exists(tmp_path / "c")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.ones(4), "w: the planner planned a chunk of shape .3,. and resolved a tensor of shape .4,."),
        (b"bytes", "w: the planner resolved a tensor to bytes"),
    ],
)
def test_a_planner_that_resolves_something_else_is_refused(tmp_path: Path, made: Any, message: str) -> None:
    class Wrong(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
            return made

    with pytest.raises(dcp.CheckpointException, match=message) as caught:
        save({"w": torch.ones(3)}, StorageWriter(tmp_path / "c"), planner=Wrong())
    assert isinstance(caught.value.failures[0][0], PlanError)


def test_a_planner_that_leaves_a_part_out_is_refused(tmp_path: Path) -> None:
    class Half(dcp.DefaultSavePlanner):
        """Drops an item after the metadata have been made."""

        def finish_plan(self, new_plan: Any) -> Any:
            return dataclasses.replace(new_plan, items=[item for item in new_plan.items if item.index.fqn != "b.x"])

    with pytest.raises(dcp.CheckpointException, match=r"b\.x: planned, but rank 0 was to write it and did not"):
        save({"a": torch.ones(3), "b": {"x": torch.ones(2)}}, StorageWriter(tmp_path / "c"), planner=Half())
    assert not list(tmp_path.rglob("*.bin"))


def test_a_hole_in_a_tensor_is_refused(tmp_path: Path) -> None:
    """torch does not look on one rank; the reader would find undefined elements."""

    class Short(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            data = dataclasses.replace(item.tensor_data, size=torch.Size((5,)))
            return dataclasses.replace(plan, items=[dataclasses.replace(item, tensor_data=data)])

    with pytest.raises(dcp.CheckpointException, match=r"w: 2 of 5 elements of shape \(5,\) are in no box") as caught:
        save({"w": torch.ones(3)}, StorageWriter(tmp_path / "c"), planner=Short())
    assert isinstance(caught.value.failures[0][0], PlanError)
    assert not list(tmp_path.rglob("*.bin"))


# --- loading ----------------------------------------------------------------------------------------------


def test_missing_keys_and_sizes(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": 2}, StorageWriter(tmp_path / "c"))
    target: dict[str, Any] = {"a": torch.zeros(3), "more": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: more"):
        load(target, StorageReader(tmp_path / "c"))
    load(target, StorageReader(tmp_path / "c"), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert_same_state(target, {"a": torch.ones(3), "more": torch.zeros(2)})
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(4)}, StorageReader(tmp_path / "c"))


def test_resolve_and_commit_are_called_in_the_callers_thread(tmp_path: Path) -> None:
    """The pattern of torch's documentation: give the storage something to fill, and put it in place afterwards."""
    state = {f"t{number}": torch.full((5,), float(number)) for number in range(4)}
    save(state, StorageWriter(tmp_path / "c"))
    thread = threading.get_ident()

    class Materialising(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            assert threading.get_ident() == thread
            return torch.empty(read_item.lengths)

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            assert threading.get_ident() == thread
            self.state_dict[read_item.dest_index.fqn].copy_(tensor + 100)

    target = load(zeroed(state), StorageReader(tmp_path / "c"), planner=Materialising())
    assert [target[f"t{number}"][0].item() for number in range(4)] == [100, 101, 102, 103]


def test_many_made_targets_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("savestream.integrations.dcp.targets._BATCH_BYTES", 3 * 4000)
    state = {f"t{number}": torch.full((1000,), float(number)) for number in range(10)}
    save(state, StorageWriter(tmp_path / "c"))
    alive, peak = 0, 0

    class Making(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            nonlocal alive, peak
            alive += 1
            peak = max(peak, alive)
            return torch.empty(read_item.lengths)

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            nonlocal alive
            alive -= 1
            self.state_dict[read_item.dest_index.fqn].copy_(tensor)

    assert_same_state(load(zeroed(state), StorageReader(tmp_path / "c"), planner=Making()), state)
    assert peak == 4  # the one that no longer fits is resolved to learn its size


def test_a_wrong_target_is_refused_by_name(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, StorageWriter(tmp_path / "c"))

    class Wrong(dcp.DefaultLoadPlanner):
        def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
            return torch.zeros(2)

    with pytest.raises(dcp.CheckpointException, match=r"a: the plan reads a box of shape .3,. into a tensor of shape"):
        load({"a": torch.zeros(3)}, StorageReader(tmp_path / "c"), planner=Wrong())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (MetadataIndex("b", (0,)), "b: the plan asks for a tensor that .* does not hold"),
        (MetadataIndex("v"), "v: the plan asks for a tensor"),
        (MetadataIndex("a", (1,)), "a: the plan asks for a chunk at .1,., where"),
    ],
)
def test_a_plan_for_what_is_not_there_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    save({"a": torch.ones(3), "v": 5}, StorageWriter(tmp_path / "c"))

    class Wrong(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            (item,) = super().create_local_plan().items
            return dcp.LoadPlan([dataclasses.replace(item, storage_index=index)])

    with pytest.raises(dcp.CheckpointException, match=message):
        load({"a": torch.zeros(3)}, StorageReader(tmp_path / "c"), planner=Wrong())


def test_an_error_of_the_planners_is_the_one_to_see(tmp_path: Path) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise RuntimeError(f"no data for {write_item.index.fqn}")

    with pytest.raises(dcp.CheckpointException, match="no data for a"):
        save({"a": torch.ones(3)}, StorageWriter(tmp_path / "c"), planner=Failing())
    assert not list(tmp_path.rglob("*.*"))


class Counter:
    """Has a state of its own, as a trainer's objects do."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weights = torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_objects_with_a_state(tmp_path: Path) -> None:
    save({"counter": Counter(7), "x": torch.ones(2)}, StorageWriter(tmp_path / "c"))
    target = {"counter": Counter(0), "x": torch.zeros(2)}
    counter, x = target["counter"], target["x"]
    load(target, StorageReader(tmp_path / "c"))
    assert target["counter"] is counter
    assert target["x"] is x
    assert (counter.count, counter.weights.tolist(), x.tolist()) == (7, [7, 7, 7], [1, 1])
