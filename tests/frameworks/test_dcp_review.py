"""Loads and saves with torch.distributed.checkpoint beside threads, overwrites, odd targets and subclasses."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import anyio
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import load, save
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.planner import WriteItemType

import savestream.blocking
from savestream.errors import CoordinationError
from savestream.integrations.dcp import targets
from savestream.integrations.dcp.frameworks import run_on_engine
from savestream.integrations.dcp.staging import stage_state
from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.pipeline.engine import current_engine
from savestream.storage_backends.faults import Fault, FaultyBackend
from savestream.storage_backends.file import FileBackend

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")]


# --- a reader of several threads --------------------------------------------------------------------------


class _Meeting(dcp.DefaultLoadPlanner):
    """Goes on when the other thread has got as far, each time before the reader is called."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def set_up_planner(self, *args: Any, **options: Any) -> None:
        self.barrier.wait()  # both have read their metadata
        super().set_up_planner(*args, **options)

    def finish_plan(self, central_plan: Any) -> Any:
        self.barrier.wait()  # neither has begun to read
        return super().finish_plan(central_plan)


def test_threads_that_share_a_reader_load_what_each_asked_for(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": 2.0}
    for name, value in values.items():
        save({"w": torch.full((10,), value), "step": value}, StorageWriter(tmp_path / name))
    reader = StorageReader()
    barrier = threading.Barrier(2, timeout=30)
    found: dict[str, dict[str, Any]] = {}

    def work(name: str) -> None:
        target = {"w": torch.zeros(10), "step": 0.0}
        dcp.load(target, checkpoint_id=tmp_path / name, storage_reader=reader, planner=_Meeting(barrier), no_dist=True)
        found[name] = target

    threads = [threading.Thread(target=work, args=(name,)) for name in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: target["step"] for name, target in found.items()} == values
    assert {name: target["w"].unique().tolist() for name, target in found.items()} == {"a": [1.0], "b": [2.0]}


def test_a_plan_of_another_save_is_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, StorageWriter(tmp_path / "c"))

    class Other(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan: Any) -> Any:
            save({"w": torch.full((3,), 2.0)}, StorageWriter(tmp_path / "c"))
            reader.read_metadata()
            return super().finish_plan(central_plan)

    reader = StorageReader(tmp_path / "c")
    target = {"w": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointException, match="the plan was made for save") as caught:
        load(target, reader, planner=Other())
    assert isinstance(caught.value.failures[0][0], CoordinationError)
    assert not target["w"].any()


# --- a refused load ---------------------------------------------------------------------------------------


def _sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: torch.zeros(1).expand(2, 2), {}, "z: the target's elements overlap each other"),
        (lambda: torch.zeros(2, 2, dtype=torch.float64), {"cast": False}, r"z \(checkpoint float32, target float64\)"),
        (_sparse, {}, "z: a tensor of layout torch.sparse_coo"),
    ],
    ids=["self-overlapping", "dtype", "layout"],
)
def test_a_refused_load_leaves_the_target_as_it_was(tmp_path: Path, make: Any, options: Any, message: str) -> None:
    """What cannot be filled comes last, after values and after tensors of more than one batch."""
    saved = {"value": {"x": 5, "y": [1, 2]}, "a": torch.arange(4.0), "b": torch.ones(3), "z": torch.ones(2, 2)}
    save(saved, StorageWriter(tmp_path / "c"))
    target = {"value": {"x": 0, "y": [0]}, "a": torch.zeros(4), "b": torch.zeros(3), "z": make()}
    version = target["a"]._version
    with (
        mock.patch.object(targets, "_BATCH_BYTES", 0),
        pytest.raises(dcp.CheckpointException, match=message),
    ):
        load(target, StorageReader(tmp_path / "c", **options))
    assert target["value"] == {"x": 0, "y": [0]}
    assert not target["a"].any()
    assert target["a"]._version == version
    assert not target["b"].any()


def test_a_refused_value_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    state = {"a": np.arange(4.0), "plain": {"x": 3}, "unsafe": complex}
    savestream.blocking.save(state, tmp_path / "c", options=savestream.SaveOptions(allow_pickle=True))
    target: dict[str, Any] = {"a": torch.zeros(4, dtype=torch.float64), "plain": {"x": 0}, "unsafe": None}
    with pytest.raises(dcp.CheckpointException, match="unsafe: stored with pickle"):
        load(target, StorageReader(tmp_path / "c"))
    assert target["plain"] == {"x": 0}
    assert not target["a"].any()


# --- targets beside each other ----------------------------------------------------------------------------


def _targets(tensors: dict[str, torch.Tensor]) -> list[targets.Target]:
    return [
        targets.Target(SimpleNamespace(dest_index=SimpleNamespace(fqn=name)), tensor, None, None, False)  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    ]


def test_columns_of_one_matrix_are_filled_together() -> None:
    whole = torch.zeros(50, 3000)
    columns = {f"c{number}": whole[:, number] for number in range(3000)}
    assert [len(group) for group in targets.rounds(_targets(columns))] == [3000]
    crossing = {**columns, "row": whole[7], "block": whole[10:20, 5:8], "c5 again": whole[:, 5]}
    assert [[target.name for target in group] for group in targets.rounds(_targets(crossing))] == [
        list(columns),
        ["row", "block"],
        ["c5 again"],
    ]


def test_columns_of_one_matrix_load(tmp_path: Path) -> None:
    saved = {f"c{number}": torch.full((40,), float(number)) for number in range(60)}
    save(saved, StorageWriter(tmp_path / "c"))
    whole = torch.zeros(40, 60)
    load({f"c{number}": whole[:, number] for number in range(60)}, StorageReader(tmp_path / "c"))
    assert torch.equal(whole, torch.arange(60.0).expand(40, 60))


# --- before anything is written ---------------------------------------------------------------------------


class _Unsafe(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"ours": object()}
        return plans, metadata


class _Torn(dcp.DefaultSavePlanner):
    """Plans two boxes of a tensor that have an element in common."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item,) = plan.items
        items = []
        for offset in (0, 1):
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=torch.Size((offset,)), sizes=torch.Size((2,)))
            index = dataclasses.replace(item.index, offset=chunk.offsets)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        return dataclasses.replace(plan, items=items)

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        with mock.patch.object(default_planner, "_validate_global_plan", return_value=[]):
            return super().create_global_plan(all_plans)


@pytest.mark.parametrize(
    ("planner", "message"),
    [(_Unsafe, r"planner_data\['ours'\]: builtins.object"), (_Torn, r"w: overlapping boxes: box at \(0,\)")],
)
def test_what_finish_would_refuse_is_refused_before_data_are_written(
    tmp_path: Path, planner: Any, message: str
) -> None:
    opened: list[str] = []
    backend = FaultyBackend(FileBackend(tmp_path), [Fault("open_writer", hook=opened.append, times=100)])
    with pytest.raises(dcp.CheckpointException, match=message):
        save({"w": torch.ones(3)}, StorageWriter((backend, "c")), planner=planner())
    assert not opened
    save({"w": torch.ones(3)}, StorageWriter((backend, "c")))
    assert opened


# --- interrupts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_an_interrupt_beside_the_handing_over_leaves_no_work(
    monkeypatch: pytest.MonkeyPatch, is_handed_over: bool
) -> None:
    engine = current_engine()
    post, events = engine.post, list[str]()

    def interrupted(function: Any) -> None:
        monkeypatch.undo()
        if is_handed_over:
            post(function)
        raise KeyboardInterrupt

    async def work() -> None:
        events.append("begun")
        try:
            await anyio.sleep_forever()
        finally:
            events.append("ended")

    monkeypatch.setattr(engine, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_on_engine(work, "being interrupted")
    assert events in ([["begun", "ended"], []] if is_handed_over else [[]])


# --- staging ----------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Holder:
    tensor: Any


def test_what_torch_shows_is_staged_wherever_it_is() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    seen, plain = base.conj(), torch.arange(4.0)
    negated = seen.imag
    state = {
        "object": SimpleNamespace(tensor=seen),
        "dataclass": Holder(negated),
        "deque": collections.deque([seen, plain]),
        "named": Point(base.conj(), [plain]),
        "ordered": collections.OrderedDict(a=(seen, {"b": negated})),
        "tied": [plain, plain[1:3], base],
    }
    staged = stage_state(state)
    assert type(staged["named"]) is Point
    assert type(staged["dataclass"]) is Holder
    assert type(staged["deque"]) is collections.deque
    assert type(staged["ordered"]) is collections.OrderedDict
    conjugated = [staged["object"].tensor, staged["deque"][0], staged["named"].x, staged["ordered"]["a"][0]]
    assert all(tensor.tolist() == [1 - 2j, 3 + 4j] for tensor in conjugated)
    assert all(tensor.tolist() == [-2, 4] for tensor in (staged["dataclass"].tensor, staged["ordered"]["a"][1]["b"]))
    assert not any(tensor.is_conj() for tensor in conjugated)
    assert len({tensor.data_ptr() for tensor in conjugated}) == 1
    ties = [staged["deque"][1], staged["named"].y[0], *staged["tied"][:2]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in ties}) == 1
    base.zero_()
    plain.zero_()
    assert conjugated[0].tolist() == [1 - 2j, 3 + 4j]
    assert staged["tied"][2].tolist() == [1 + 2j, 3 - 4j]
    assert ties[0].tolist() == [0, 1, 2, 3]


# --- subclasses -------------------------------------------------------------------------------------------


class NamedWriter(StorageWriter):
    def __init__(self, place: Path, name: str) -> None:
        super().__init__(place)
        self.name = name


class NamedReader(StorageReader):
    def __init__(self, place: Path, name: str) -> None:
        super().__init__(place)
        self.name = name


def test_attributes_of_subclasses_travel_to_other_processes(tmp_path: Path) -> None:
    writer = NamedWriter(tmp_path / "c", "mine")
    reader = NamedReader(tmp_path / "c", "mine")
    save({"w": torch.ones(3)}, writer)  # they hold what their hooks have kept
    load({"w": torch.zeros(3)}, reader)
    sent_writer, sent_reader = pickle.loads(pickle.dumps((writer, reader)))
    assert (sent_writer.name, sent_reader.name) == ("mine", "mine")
    save({"w": torch.full((3,), 2.0)}, sent_writer)
    assert load({"w": torch.zeros(3)}, sent_reader)["w"].tolist() == [2, 2, 2]
