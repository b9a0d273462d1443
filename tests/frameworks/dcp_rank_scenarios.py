"""Scenarios of savestream's own promises to several ranks; see :mod:`dcp_ranks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_rank_support import Ranks, failure_of
from dcp_support import assert_same_state, files_beneath, settle
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Shard

import savestream.blocking
from savestream import SaveOptions
from savestream.errors import CheckpointExistsError, CoordinationError, PlanError, StorageError, UsageError
from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.storage_backends.faults import Fault, FaultyBackend
from savestream.storage_backends.file import FileBackend

__all__ = ["OWN_SCENARIOS", "SLOW_SCENARIOS"]

OWN_SCENARIOS: dict[str, Callable[[Ranks], None]] = {}
SLOW_SCENARIOS: dict[str, Callable[[Ranks], None]] = {}


def scenario(play: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    OWN_SCENARIOS[play.__name__.replace("_", " ")] = play
    return play


def _state(ranks: Ranks, offset: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    mesh = ranks.mesh(4)
    return {
        "model": {"rows": ranks.distributed(torch.arange(63.0).to(dtype) + offset, mesh, Shard(0))},
        "list": [torch.full((5,), offset), {"step": int(offset)}],
    }


def _assert_loads(ranks: Ranks, place: Path, offset: float) -> None:
    target = _state(ranks, -1.0)
    ranks.load(target, storage_reader=StorageReader(place))
    assert_same_state(target["model"]["rows"].full_tensor(), torch.arange(63.0) + offset)
    assert target["list"][1]["step"] == offset


def _only(rank: int, ranks: Ranks, check: Callable[[], object]) -> None:
    """One rank looks, the others wait."""
    if ranks.rank == rank:
        check()
    dist.barrier()


@scenario
def the_checkpoint_is_an_ordinary_one(ranks: Ranks) -> None:
    ranks.save(_state(ranks, 5.0))
    place = ranks.place / "checkpoint"

    def look() -> None:
        found = savestream.blocking.load(place)
        assert np.array_equal(found["model"]["rows"], np.arange(63, dtype=np.float32) + 5)
        assert found["list"][0].tolist() == [5] * 5
        assert type(found["list"][1]["step"]) is bytes
        savestream.blocking.verify(place)
        assert sorted(name.partition("/")[2] for name in files_beneath(place)) == [
            "",
            *[f"r{rank:05d}{suffix}" for rank in range(4) for suffix in ("-0000.bin", ".index.json")],
        ]

    _only(1, ranks, look)


@scenario
def a_rank_without_items_writes_nothing(ranks: Ranks) -> None:
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ranks.save({"x": torch.ones(4), "step": 3}, planner=planner)
    place = ranks.place / "checkpoint"
    _only(0, ranks, lambda: _assert_ranks_of(place, {"r00000"}))
    found = ranks.load({"x": torch.zeros(4), "step": 0})
    assert_same_state(found, {"x": torch.ones(4), "step": 3})


def _assert_ranks_of(place: Path, expected: set[str]) -> None:
    assert {name.partition("/")[2][:6] for name in files_beneath(place)} - {""} == expected


@scenario
def cached_plans_of_a_changing_state(ranks: Ranks) -> None:
    """torch plans nothing after the first save, and its cached metadata say float32."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    for number, dtype in enumerate(dtypes):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        returned = ranks.save(_state(ranks, float(number), dtype), f"c{number}", planner=planner)
        read = StorageReader(ranks.place / f"c{number}").read_metadata()
        for metadata in (returned, read):
            assert metadata.state_dict_metadata["model.rows"].properties.dtype is dtype
    for number, dtype in enumerate(dtypes):
        target = _state(ranks, -1.0, dtype)
        ranks.load(target, f"c{number}")
        expected = torch.arange(63.0).to(dtype) + number
        assert_same_state(target["model"]["rows"].full_tensor(), expected)
    # Each save has an id of its own, although the cached plan still carries the first one's.
    names = {next(iter(files_beneath(ranks.place / f"c{number}") - {"manifest.json"}))[:32] for number in range(4)}
    assert len(names) == 4
    _forget_cached_plans()


@scenario
def a_cached_plan_that_one_rank_replaces(ranks: Ranks) -> None:
    """One rank's shape changes: torch plans again for all, and some ranks keep their cached final plan."""
    for number, length in enumerate([3, 3, 4, 4, 3]):
        own = torch.full((length if ranks.rank == 2 else 2,), float(number))
        state = {f"of rank {ranks.rank}": own, "shared": torch.full((7,), float(number))}
        ranks.save(state, f"c{number}", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        assert_same_state(ranks.load(target, f"c{number}"), state)
    _forget_cached_plans()


def _forget_cached_plans() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.SavePlanner, f"_cached_{name}").clear()


@scenario
def dtypes_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    part = torch.ones(4, dtype=torch.float16 if ranks.rank == 3 else torch.float32)
    error = failure_of(lambda: ranks.save({"w": DTensor.from_local(part, ranks.mesh(4), [Shard(0)])}))
    assert isinstance(error.failures[0][0], PlanError)
    assert "w: its chunks have different dtypes (float32 on rank 2, float16 on rank 3)" in str(error)
    assert not ranks.is_committed()


@scenario
def parts_that_are_not_as_their_placement_says_are_refused(ranks: Ranks) -> None:
    """torch's own storage saves them, with elements of one rank missing and of another twice."""
    part = torch.ones((3, 3, 2, 1)[ranks.rank])
    state = {"w": DTensor.from_local(part, ranks.mesh(4), [Shard(0)], shape=torch.Size((9,)), stride=(1,))}
    error = failure_of(lambda: ranks.save(state))
    assert list(error.failures) == [2, 3]
    assert "w: the planner planned a chunk of shape (0,) and resolved a tensor of shape (1,)" in str(error)
    assert not ranks.is_committed()


@scenario
def a_failed_overwrite_leaves_the_old_checkpoint(ranks: Ranks) -> None:
    place = ranks.place / "checkpoint"
    ranks.save(_state(ranks, 1.0))
    kept = files_beneath(place)
    for kind, rank in [("write", 2), ("finish", 0), ("put", 3), ("replace", 0)]:
        backend = FaultyBackend(FileBackend(place), [Fault(kind, 5)] if ranks.rank == rank else [])
        writer = StorageWriter((backend, ""))
        error = failure_of(lambda used=writer: ranks.save_with(used, _state(ranks, 2.0)))
        assert list(error.failures) == [rank], (kind, error)
        assert isinstance(error.failures[rank][0], StorageError)
        assert error.failures[rank][0].errno == 5
        _assert_loads(ranks, place, 1.0)
        del writer, error
        if ranks.rank == 0:
            settle()  # nothing refers to the failed save any more: the coordinator removes what all ranks left
        dist.barrier()
        assert files_beneath(place) == kept, kind
        dist.barrier()
    ranks.save(_state(ranks, 3.0))
    _assert_loads(ranks, place, 3.0)
    dist.barrier()
    assert len(files_beneath(place)) == len(kept)
    assert files_beneath(place) & kept == {"manifest.json"}


@scenario
def what_a_failed_save_left_goes_with_the_next_one(ranks: Ranks) -> None:
    place = ranks.place / "checkpoint"
    faults = [Fault("put", 5)] if ranks.rank == 3 else []
    writer = StorageWriter((FaultyBackend(FileBackend(place), faults), ""))
    error = failure_of(lambda: ranks.save_with(writer, _state(ranks)))  # kept, with all that it refers to
    dist.barrier()
    assert {name.partition("/")[2][:6] for name in files_beneath(place)} >= {"r00000", "r00001", "r00002"}
    dist.barrier()
    ranks.save_with(writer, _state(ranks, 4.0))
    dist.barrier()
    assert len({name.partition("/")[0] for name in files_beneath(place)}) == 2  # manifest.json and one save
    _assert_loads(ranks, place, 4.0)
    assert list(error.failures) == [3]


@scenario
def ranks_without_collectives_are_refused(ranks: Ranks) -> None:
    with pytest.raises(UsageError, match="use_collectives=False with several ranks"):
        ranks.save(_state(ranks), use_collectives=False)
    assert not (ranks.place / "checkpoint").exists()
    dist.barrier()


class Dishonest(StorageWriter):
    """Changes what it reports of its writing."""

    def __init__(self, place: Path, change: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__(place)
        self.change = change

    def write_data(self, plan: Any, planner: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.change(super().write_data(plan, planner).wait()))
        return future


@scenario
def results_that_do_not_match_the_plan_are_refused(ranks: Ranks) -> None:
    def renamed(results: list[Any]) -> list[Any]:
        index = dataclasses.replace(results[0].index, fqn="other")
        return [*results, dataclasses.replace(results[0], index=index)]

    def foreign(results: list[Any]) -> list[Any]:
        return [dataclasses.replace(result, storage_data=None) for result in results]

    cases: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
        "missing": (
            lambda results: results[:-1],
            "model.rows at (32,): planned, but rank 2 was to write it and did not",
        ),
        "twice": (lambda results: [*results, results[-1]], "model.rows at (32,): written by rank 2 and by rank 2"),
        "unplanned": (renamed, "other: rank 2 wrote it, but it is not in the planner's metadata"),
        "foreign": (foreign, "rank 2 returned a result of NoneType"),
    }
    for name, (change, message) in cases.items():
        honest: Callable[[list[Any]], list[Any]] = lambda results: results  # noqa: E731
        writer = Dishonest(ranks.place / name, change if ranks.rank == 2 else honest)
        error = failure_of(lambda used=writer: ranks.save_with(used, {"model": _state(ranks)["model"]}))
        assert isinstance(error.failures[0][0], CoordinationError), error
        assert message in str(error), (message, str(error))
        dist.barrier()
        assert not files_beneath(ranks.place / name), name  # finish knows that all have written, and removes it


@scenario
def an_item_of_two_ranks_is_refused(ranks: Ranks) -> None:
    """A planner that leaves a replicated item to two ranks after the metadata have been made."""

    class Doubling(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
            plans, metadata = super().create_global_plan(all_plans)
            items = [item for plan in plans for item in plan.items]
            plans[1] = dataclasses.replace(plans[1], items=items)
            plans[3] = dataclasses.replace(plans[3], items=items)
            return [plans[0], plans[1], plans[2], plans[3]], metadata

    error = failure_of(lambda: ranks.save({"x": torch.ones(3)}, planner=Doubling()))
    assert "x: written by rank" in str(error)
    assert not ranks.is_committed()


@scenario
def ranks_that_see_different_saves_are_refused(ranks: Ranks) -> None:
    for name in ("one", "other"):
        ranks.save(_state(ranks), name)
    error = failure_of(lambda: ranks.load(_state(ranks, -1.0), "other" if ranks.rank == 2 else "one"))
    assert isinstance(error.failures[0][0], CoordinationError)
    assert "ranks see different saves there" in str(error)
    assert "on rank 2" in str(error)


@scenario
def a_ticket_of_another_save_is_refused(ranks: Ranks) -> None:
    """As if rank 1 had been sent the plan of an earlier save: its part is not taken for this one's."""

    class Late(StorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if ranks.rank == 1:
                self._attempts.current.inbox.ticket.save_id = "0" * 32
            return super().write_data(plan, planner)

    error = failure_of(lambda: ranks.save_with(Late(ranks.place / "checkpoint"), _state(ranks)))
    assert isinstance(error.failures[0][0], CoordinationError)
    assert "rank 1 wrote it as rank 1 of save 000000" in str(error)
    assert not ranks.is_committed()


@scenario
def two_jobs_save_to_one_place_at_once(ranks: Ranks) -> None:
    """Ranks 0 and 1 against 2 and 3: no file of one touches the other's, and a reader finds one of the two."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = ranks.rank // 2
    state = {f"of {ranks.rank % 2}": torch.full((1000,), float(job)), "job": torch.full((3,), float(job))}
    for number in range(4):
        writer = StorageWriter(ranks.place / f"c{number}", overwrite=number % 2 == 0)
        failures: list[BaseException] = []
        try:
            ranks.save_with(writer, state, process_group=groups[job])
        except dcp.CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
        assert all(isinstance(failure, CheckpointExistsError) for failure in failures), failures
        dist.barrier()
        found = ranks.load({"of 0": torch.zeros(1000), "of 1": torch.zeros(1000), "job": torch.zeros(3)}, f"c{number}")
        winner = found["job"][0]
        assert all(tensor.eq(winner).all() for tensor in found.values())
        savestream.blocking.verify(ranks.place / f"c{number}")
        dist.barrier()


@scenario
def background_saves_of_one_writer(ranks: Ranks) -> None:
    """Two at once, each in a thread and a group of its own on every rank."""
    groups = [dist.new_group(list(range(4))) for _ in range(2)]
    writer = StorageWriter()
    futures = [
        dcp.async_save(
            {"x": torch.full((5,), 10.0 * number + ranks.rank), f"r{ranks.rank}": torch.full((2,), float(number))},
            storage_writer=writer,
            checkpoint_id=ranks.place / f"c{number}",
            process_group=group,
        )
        for number, group in enumerate(groups)
    ]
    for future in futures:
        future.result(timeout=60)
    dist.barrier()
    for number in range(2):
        found = ranks.load({f"r{rank}": torch.zeros(2) for rank in range(4)}, f"c{number}")
        assert all(tensor.tolist() == [number, number] for tensor in found.values())


def saves_in_processes_of_their_own(ranks: Ranks) -> None:
    """async_save with a process for each rank, several saves one after the other, with cached plans."""
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    mesh = ranks.mesh(2)
    writer = StorageWriter(options=SaveOptions(threads=1))
    for number, dtype in enumerate(dtypes):
        whole = torch.arange(63.0).to(dtype) + number
        state = {"rows": ranks.distributed(whole, mesh, Shard(0)), "step": number}
        future = dcp.async_save(
            state,
            storage_writer=writer,
            checkpoint_id=ranks.place / f"c{number}",
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        state["rows"].to_local().fill_(-1)
        assert future.result(timeout=120).state_dict_metadata["rows"].properties.dtype is dtype
        dist.barrier()
        target = {"rows": ranks.distributed(torch.zeros(63, dtype=dtype), mesh, Shard(0)), "step": -1}
        ranks.load(target, f"c{number}")
        assert_same_state(target["rows"].full_tensor(), whole)
        assert target["step"] == number
    refusing = StorageWriter(overwrite=False)
    options = {"checkpoint_id": ranks.place / "c0", "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    error = failure_of(lambda: dcp.async_save(state, storage_writer=refusing, **options).result(timeout=120))
    assert isinstance(error.failures[0][0], CheckpointExistsError)


SLOW_SCENARIOS["saves in processes of their own"] = saves_in_processes_of_their_own
