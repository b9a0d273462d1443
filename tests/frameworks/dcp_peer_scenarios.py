"""Scenarios with the same outcome for torch's own storage and for savestream's; see :mod:`dcp_ranks`."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_rank_support import Ranks, failure_of
from dcp_support import assert_same_state, with_bits, zeroed
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = ["PEER_SCENARIOS"]

PEER_SCENARIOS: dict[str, Callable[[Ranks], None]] = {}


def scenario(play: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    PEER_SCENARIOS[play.__name__.replace("_", " ")] = play
    return play


def _grid_tensors() -> dict[str, torch.Tensor]:
    """Sizes that divide evenly, unevenly, and leave some ranks without any part."""
    shapes = {"uneven": (7, 5), "few": (3, 2), "vector": (6,), "large": (513, 257)}
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in shapes.items()
    }


def _distribute(ranks: Ranks, tensors: dict[str, torch.Tensor], mesh: Any, placements: Any) -> dict[str, Any]:
    return {
        name: ranks.distributed(whole, mesh, *[_fitting(placement, whole) for placement in placements])
        for name, whole in tensors.items()
    }


def _fitting(placement: Any, whole: torch.Tensor) -> Any:
    return Shard(0) if isinstance(placement, Shard) and placement.dim >= whole.dim() else placement


def _assert_whole(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert_same_state(whole, expected[name], name)


@scenario
def distributed_tensors_from_every_layout_to_every_other(ranks: Ranks) -> None:
    line, grid = ranks.mesh(4), ranks.mesh(2, 2)
    layouts = {
        "rows": (line, (Shard(0),)),
        "columns": (line, (Shard(1),)),
        "replicated": (line, (Replicate(),)),
        "blocks": (grid, (Shard(0), Shard(1))),
        "replicated, columns": (grid, (Replicate(), Shard(1))),
    }
    tensors = _grid_tensors()
    nothing = {name: torch.zeros_like(whole) for name, whole in tensors.items()}
    for name, (mesh, placements) in layouts.items():
        ranks.save(_distribute(ranks, tensors, mesh, placements), name)
    for name, (mesh, placements) in itertools.product(layouts, layouts.values()):
        target = _distribute(ranks, nothing, mesh, placements)
        _assert_whole(ranks.load(target, name), tensors)
    for name in layouts:
        _assert_whole(
            ranks.load({key: value.clone() for key, value in nothing.items()}, name), tensors
        )  # to plain ones
    ranks.save(tensors, "plain")
    for mesh, placements in layouts.values():
        _assert_whole(ranks.load(_distribute(ranks, nothing, mesh, placements), "plain"), tensors)


@scenario
def fewer_and_more_ranks(ranks: Ranks) -> None:
    """Saved by some of the ranks, loaded by others of another number."""
    tensors = _grid_tensors()
    nothing = {name: torch.zeros_like(whole) for name, whole in tensors.items()}
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 3, 4)}
    meshes = {count: ranks.mesh(count) for count in groups}

    def state_on(count: int, content: dict[str, torch.Tensor]) -> dict[str, Any]:
        return _distribute(ranks, content, meshes[count], (Shard(0),))

    for count, group in groups.items():
        state = state_on(count, tensors)  # every rank takes part in making it
        if ranks.rank < count:
            ranks.save(state, f"of {count}", process_group=group)
        dist.barrier()
    for saved, (count, group) in itertools.product(groups, groups.items()):
        target = state_on(count, nothing)
        if ranks.rank < count:
            _assert_whole(ranks.load(target, f"of {saved}", process_group=group), tensors)
        dist.barrier()


@scenario
def any_group_of_ranks(ranks: Ranks) -> None:
    """Ranks 3 and 1, in that order, of which rank 3 coordinates nothing: the group's rank counts."""
    group = dist.new_group([1, 3])
    if ranks.rank in (1, 3):
        state = {"own": torch.full((3,), float(ranks.rank)), "step": ranks.rank}
        ranks.save(state, process_group=group)
        found = ranks.load({"own": torch.zeros(3), "step": -1}, process_group=group)
        assert found["step"] in (1, 3)
        assert found["own"].tolist() in ([1, 1, 1], [3, 3, 3])
    dist.barrier()


@scenario
def sharded_tensors(ranks: Ranks) -> None:
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    whole = torch.arange(96.0).reshape(8, 12)

    def rows(content: torch.Tensor) -> Any:
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(4)])
        made = sharded_tensor.zeros(spec, 8, 12)
        made.local_shards()[0].tensor.copy_(content[2 * ranks.rank : 2 * ranks.rank + 2])
        return made

    def blocks(content: torch.Tensor) -> Any:
        """A grid of four, dealt backwards; rank 0 holds two blocks and rank 3 none."""
        boxes = [([0, 0], [4, 6], 2), ([0, 6], [4, 6], 1), ([4, 0], [4, 6], 0), ([4, 6], [4, 6], 0)]
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=low, shard_sizes=size, placement=f"rank:{rank}/cpu")
                for low, size, rank in boxes
            ]
        )
        made = sharded_tensor.zeros(spec, 8, 12)
        for shard in made.local_shards():
            (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(content[top : top + height, left : left + width])
        return made

    makers = {"rows": rows, "blocks": blocks}
    for name, make in makers.items():
        ranks.save({"w": make(whole), "deep": {"s": make(whole + 1)}}, name)
    for name, make in itertools.product(makers, makers.values()):
        target = ranks.load({"w": make(whole * 0), "deep": {"s": make(whole * 0)}}, name)
        for found, expected in ((target["w"], make(whole)), (target["deep"]["s"], make(whole + 1))):
            for shard, same in zip(found.local_shards(), expected.local_shards(), strict=True):
                assert_same_state(shard.tensor, same.tensor)
        plain = ranks.load({"w": torch.zeros(8, 12), "deep": {"s": torch.zeros(8, 12)}}, name)
        assert_same_state(plain, {"w": whole, "deep": {"s": whole + 1}})
    ranks.save({"w": whole, "deep": {"s": whole + 1}}, "plain")
    for make in makers.values():
        target = ranks.load({"w": make(whole * 0), "deep": {"s": make(whole * 0)}}, "plain")
        for shard, same in zip(target["w"].local_shards(), make(whole).local_shards(), strict=True):
            assert_same_state(shard.tensor, same.tensor)


@scenario
def dtypes_of_shards(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8, torch.int64, torch.bool)
    wholes = {str(dtype): with_bits(dtype, 9, 4) for dtype in dtypes}

    def mine(content: dict[str, torch.Tensor]) -> dict[str, Any]:
        parts = {name: whole.tensor_split([3, 6, 9])[ranks.rank] for name, whole in content.items()}  # none for rank 3
        return {
            name: DTensor.from_local(part.clone(), mesh, [Shard(0)], shape=torch.Size((9, 4)), stride=(4, 1))
            for name, part in parts.items()
        }

    state = mine(wholes)
    ranks.save(state)
    target = mine({name: torch.zeros_like(whole) for name, whole in wholes.items()})
    ranks.load(target)
    for name, tensor in target.items():
        assert_same_state(tensor.to_local(), state[name].to_local(), name)


@scenario
def replicated_items_are_stored_once(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    state = {
        **{f"t{number}": torch.full((50,), float(number)) for number in range(8)},
        "replicated": ranks.distributed(torch.arange(64.0), mesh, Replicate()),
        "rows": ranks.distributed(torch.arange(64.0), mesh, Shard(0)),
        "values": {"step": 3, "names": ["a", "b"]},
    }
    metadata = ranks.save(state)
    assert [len(metadata.state_dict_metadata[name].chunks) for name in ("t0", "replicated", "rows")] == [1, 1, 4]
    results: list[Any] = [None] * 4
    dist.all_gather_object(results, metadata.state_dict_metadata)
    assert results.count(results[0]) == 4
    lowest = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ranks.save(state, "lowest", planner=lowest)
    for name in ("checkpoint", "lowest"):
        target = {f"t{number}": torch.zeros(50) for number in range(8)}
        target["values"] = {"step": 0, "names": []}  # type: ignore[assignment]
        ranks.load(target, name)
        assert target["values"] == {"step": 3, "names": ["a", "b"]}
        assert all(target[f"t{number}"].eq(number).all() for number in range(8))


@scenario
def the_order_of_keys_differs_between_ranks(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    names = [f"k{number}" for number in range(8)]
    order = names[ranks.rank :] + names[: ranks.rank]
    wholes = {name: torch.arange(16.0) + number for number, name in enumerate(names)}
    made = {name: ranks.distributed(wholes[name], mesh, Shard(0)) for name in names}
    ranks.save({name: made[name] for name in order})
    empty = {name: ranks.distributed(torch.zeros(16), mesh, Shard(0)) for name in names}
    target = ranks.load({name: empty[name] for name in reversed(order)})
    _assert_whole({name: target[name] for name in names}, wholes)


@scenario
def ranks_hold_different_keys(ranks: Ranks) -> None:
    state = {
        "shared": torch.ones(4),
        f"rank {ranks.rank}": torch.full((2,), float(ranks.rank)),
        f"v{ranks.rank}": ranks.rank,
    }
    metadata = ranks.save(state)
    assert len(metadata.state_dict_metadata) == 9
    target = zeroed(state)
    assert_same_state(ranks.load(target), state)
    other = (ranks.rank + 1) % 4
    found = ranks.load({f"rank {other}": torch.zeros(2), f"v{other}": -1})
    assert_same_state(found, {f"rank {other}": torch.full((2,), float(other)), f"v{other}": other})


@scenario
def missing_keys_reach_every_rank(ranks: Ranks) -> None:
    ranks.save({"a": torch.ones(4)})
    target = {"a": torch.zeros(4), **({"more": torch.zeros(2)} if ranks.rank == 2 else {})}
    error = failure_of(lambda: ranks.load(target))
    assert list(error.failures) == [2]
    assert "Missing key in checkpoint state_dict: more" in str(error)
    ranks.load(target, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert target["a"].tolist() == [1, 1, 1, 1]


@scenario
def a_model_and_its_optimizer_under_fully_sharded_data_parallel(ranks: Ranks) -> None:
    def trained(seed: int, steps: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(9, 21), torch.nn.ReLU(), torch.nn.Linear(21, 3))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(4, 9)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    mesh = ranks.mesh(4)
    model, optimizer = trained(1, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    ranks.save({"model": model_state, "optimizer": optimizer_state})
    other, other_optimizer = trained(2, 1)
    target_model, target_optimizer = get_state_dict(other, other_optimizer)
    ranks.load({"model": target_model, "optimizer": target_optimizer})
    set_state_dict(other, other_optimizer, model_state_dict=target_model, optim_state_dict=target_optimizer)
    for one, same in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_state(one.full_tensor(), same.full_tensor())
    for one, same in zip(other_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert_same_state(one["exp_avg"].full_tensor(), same["exp_avg"].full_tensor())
        assert one["step"] == same["step"]


@scenario
def what_changes_after_async_save_is_not_saved(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    whole = torch.arange(64.0)
    state = {"rows": ranks.distributed(whole, mesh, Shard(0)), "plain": torch.ones(5), "step": 1}
    future = dcp.async_save(state, storage_writer=ranks.writer())
    state["rows"].to_local().fill_(-1)
    state["plain"].fill_(-1)
    state["step"] = 2
    future.result(timeout=60)
    dist.barrier()
    target = {"rows": ranks.distributed(torch.zeros(64), mesh, Shard(0)), "plain": torch.zeros(5), "step": 0}
    ranks.load(target)
    assert_same_state(target["rows"].full_tensor(), whole)
    assert_same_state({"plain": target["plain"], "step": target["step"]}, {"plain": torch.ones(5), "step": 1})


@scenario
def every_rank_saves_by_itself(ranks: Ranks) -> None:
    name = f"of rank {ranks.rank}"
    ranks.save({"x": torch.full((3,), float(ranks.rank))}, name, no_dist=True)
    assert ranks.load({"x": torch.zeros(3)}, name, no_dist=True)["x"].tolist() == [ranks.rank] * 3


@scenario
def overwriting_with_fewer_ranks(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    ranks.save({"x": ranks.distributed(torch.arange(64.0), mesh, Shard(0))})
    ranks.save({"x": torch.arange(64.0) + 1})
    assert_same_state(ranks.load({"x": torch.zeros(64)}), {"x": torch.arange(64.0) + 1})
    refusing = ranks.writer(overwrite=False)
    error = failure_of(lambda: ranks.save_with(refusing, {"x": torch.zeros(64)}))
    assert 0 in error.failures
    assert_same_state(ranks.load({"x": torch.zeros(64)}), {"x": torch.arange(64.0) + 1})


@scenario
def cached_plans_of_an_unchanged_state(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    for number in range(3):
        whole = torch.arange(64.0) + number
        state = {
            "rows": ranks.distributed(whole, mesh, Shard(0)),
            "plain": torch.full((5,), float(number)),
            "step": number,
        }
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        ranks.save(state, f"c{number}", planner=planner)
    for number in range(3):
        target = {"rows": ranks.distributed(torch.zeros(64), mesh, Shard(0)), "plain": torch.zeros(5), "step": -1}
        ranks.load(target, f"c{number}")
        assert_same_state(target["rows"].full_tensor(), torch.arange(64.0) + number)
        assert (target["step"], target["plain"].tolist()) == (number, [number] * 5)
    _forget_cached_plans()


def _forget_cached_plans() -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(dcp.SavePlanner, f"_cached_{name}").clear()


# --- failures at each hook, on each rank ------------------------------------------------------------------


class InjectedError(Exception):
    """Raised where a scenario says so."""


def _failing(instance: Any, hook: str) -> Any:
    """The same object, of which one method fails; torch looks at the signatures."""

    @functools.wraps(getattr(instance, hook))
    def fail(*_: object, **__: object) -> Any:
        raise InjectedError(hook)

    setattr(instance, hook, fail)
    return instance


def _failing_future(instance: Any, hook: str) -> Any:
    """The same object, whose method succeeds and whose future fails: what it did is in storage."""
    original = getattr(instance, hook)

    def fail(*arguments: Any) -> Any:
        original(*arguments).wait()
        future: Any = torch.futures.Future()
        future.set_exception(InjectedError(hook))
        return future

    setattr(instance, hook, fail)
    return instance


def _assert_failed(ranks: Ranks, call: Callable[[], object], hook: str, rank: int) -> None:
    error = failure_of(call)
    assert list(error.failures) == [rank], (hook, rank, error)
    assert isinstance(error.failures[rank][0], InjectedError), (hook, error)


@scenario
def a_save_that_fails_anywhere_fails_everywhere(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    state = {"rows": ranks.distributed(torch.arange(64.0), mesh, Shard(0)), "plain": torch.ones(5), "step": 1}
    everywhere = ("set_up_storage_writer", "prepare_local_plan", "write_data", "future", "storage_meta")
    hooks = [(hook, rank) for hook in everywhere for rank in range(4)]
    hooks += [("prepare_global_plan", 0), ("finish", 0)]
    for hook, rank in hooks:
        writer = ranks.writer(f"{hook} {rank}")
        if ranks.rank == rank:
            writer = _failing_future(writer, "write_data") if hook == "future" else _failing(writer, hook)
        _assert_failed(ranks, lambda used=writer: ranks.save_with(used, state), hook, rank)
        assert not ranks.is_committed(f"{hook} {rank}"), (hook, rank)
    for hook in ("set_up_planner", "create_local_plan", "finish_plan", "resolve_data"):
        for rank in (0, 3):
            planner = dcp.DefaultSavePlanner()
            if ranks.rank == rank:
                _failing(planner, hook)
            name = f"{hook} {rank}"
            _assert_failed(ranks, lambda used=planner, to=name: ranks.save(state, to, planner=used), hook, rank)
            assert not ranks.is_committed(name), name
    ranks.save(state)
    assert ranks.is_committed()


@scenario
def a_load_that_fails_anywhere_fails_everywhere(ranks: Ranks) -> None:
    mesh = ranks.mesh(4)
    ranks.save({"rows": ranks.distributed(torch.arange(64.0), mesh, Shard(0)), "step": 1})
    hooks = [
        (hook, rank)
        for hook in ("set_up_storage_reader", "prepare_local_plan", "read_data", "future")
        for rank in (0, 2)
    ]
    for hook, rank in [*hooks, ("prepare_global_plan", 0)]:
        reader = ranks.reader()
        if ranks.rank == rank:
            reader = _failing_future(reader, "read_data") if hook == "future" else _failing(reader, hook)
        target = {"rows": ranks.distributed(torch.zeros(64), mesh, Shard(0)), "step": 0}
        _assert_failed(ranks, lambda used=reader, to=target: ranks.load(to, storage_reader=used), hook, rank)
    target = {"rows": ranks.distributed(torch.zeros(64), mesh, Shard(0)), "step": 0}
    assert_same_state(ranks.load(target)["rows"].full_tensor(), torch.arange(64.0))


@scenario
def any_rank_may_coordinate(ranks: Ranks) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    mesh = ranks.mesh(4)
    state = {"rows": ranks.distributed(torch.arange(64.0), mesh, Shard(0)), "plain": torch.ones(5)}
    _save_state_dict(state, ranks.writer(), coordinator_rank=2, planner=dcp.DefaultSavePlanner())
    target = {"rows": ranks.distributed(torch.zeros(64), mesh, Shard(0)), "plain": torch.zeros(5)}
    _load_state_dict(target, ranks.reader(), coordinator_rank=1)
    assert_same_state(target["rows"].full_tensor(), torch.arange(64.0))
    writer = ranks.writer("failing")
    if ranks.rank == 2:
        _failing(writer, "finish")
    error = failure_of(lambda: _save_state_dict(state, writer, coordinator_rank=2))
    assert list(error.failures) == [2]
    assert not ranks.is_committed("failing")
