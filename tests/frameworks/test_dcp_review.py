"""Loads and saves with torch.distributed.checkpoint beside threads, overwrites, odd targets and subclasses."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import load, save

from savestream.errors import CoordinationError
from savestream.integrations.torch import StorageReader, StorageWriter

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
