"""Wrapped and distributed models: DDP, FSDP, distributed tensors, in one process and in several."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import distributed_children
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch_training_support import (
    Lifetimes,
    assert_same_state,
    assert_same_tensor,
    bits,
    copied,
    fresh_place,
    seeded,
    stored_names,
    tensors_of,
)

from savestream import LoadMismatchError, PlanCache, UnsafeObjectError, blocking
from savestream.arrays.torch_distributed import local_boxes


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    rendezvous = tmp_path_factory.mktemp("mesh") / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def sharded_network(seed: int, mesh: Any) -> nn.Module:
    model = seeded(seed, network)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def plain(state: Any) -> Any:
    """The same state with ordinary tensors."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state


@pytest.mark.usefixtures("mesh")
def test_a_model_inside_ddp() -> None:
    model = seeded(1, network)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, 0, 2)
    place = fresh_place()
    blocking.save(wrapped.state_dict(), place)
    assert stored_names(place)[0] == "module\\.0\\.bias"
    other = DistributedDataParallel(seeded(2, network))
    blocking.load(place, other.state_dict())
    assert_same_state(dict(other.state_dict()), dict(wrapped.state_dict()))
    train(other, torch.optim.SGD(other.parameters(), 0.1), 2, 3)
    bare = seeded(3, network)
    blocking.load(place, {f"module.{key}": tensor for key, tensor in bare.state_dict().items()})
    assert_same_state(dict(bare.state_dict()), dict(model.state_dict()))


def test_a_sharded_model_and_its_optimizer_go_on(mesh: Any) -> None:
    model = sharded_network(1, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer, 0, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert all(type(tensor) is DTensor for tensor in state["model"].values())
    place, cache = fresh_place(), PlanCache()
    assert not blocking.save(state, fresh_place(), plan_cache=cache).statistics.plan_cached
    assert blocking.save(state, place, plan_cache=cache).statistics.plan_cached
    saved = copied(plain(state))
    loaded = blocking.load(place, framework="torch")
    assert_same_state(dict(loaded["model"]), saved["model"])
    assert_same_state(loaded["optimizer"], saved["optimizer"])

    other = sharded_network(2, mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), foreach=False)
    train(other, other_optimizer, 0, 3)
    target = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    held = [(tensor, tensor.to_local().data_ptr()) for tensor in target["model"].values()]
    blocking.load(place, target)
    other_optimizer.load_state_dict(target["optimizer"])
    assert all(one is tensor for (one, _), tensor in zip(held, target["model"].values(), strict=True))
    assert [address for _, address in held] == [t.to_local().data_ptr() for t in other.state_dict().values()]
    train(model, optimizer, 3, 6)
    train(other, other_optimizer, 3, 6)
    assert_same_state(plain(other.state_dict()), plain(model.state_dict()))
    assert_same_state(plain(other_optimizer.state_dict()), plain(optimizer.state_dict()))

    bare = seeded(3, network)
    blocking.load(place, {"model": bare.state_dict()}, strict=False)
    assert_same_state(dict(bare.state_dict()), saved["model"])


def test_an_ordinary_checkpoint_fills_a_sharded_model(mesh: Any) -> None:
    source, model = seeded(1, network), sharded_network(2, mesh)
    place = fresh_place()
    blocking.save(source.state_dict(), place)
    parameters = dict(model.named_parameters())
    before = [(parameter, parameter._version) for parameter in parameters.values()]
    blocking.load(place, parameters)
    assert [(parameter, parameter._version - 1) for parameter in parameters.values()] == before
    value = torch.ones(2, 5)
    assert bits(model(value)) == bits(source(value))


def test_a_sharded_model_without_memory(mesh: Any) -> None:
    source = seeded(1, network)
    place = fresh_place()
    blocking.save(source.state_dict(), place)
    with torch.device("meta"):
        model = sharded_network(2, mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    loaded = blocking.load(place, model.state_dict())
    assert {type(tensor) for tensor in loaded.values()} == {DTensor}
    model.load_state_dict(loaded, assign=True)
    value = torch.ones(2, 5)
    assert bits(model(value)) == bits(source(value))
    target = {key: nn.Parameter(tensor.to("meta")) for key, tensor in loaded.items()}
    blocking.load(place, target)
    assert all(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in target.values())
    assert_same_state(plain(target), dict(source.state_dict()))


def test_tied_distributed_tensors_without_memory(mesh: Any) -> None:
    weight = torch.randn(4, 3)
    place = fresh_place()
    blocking.save({"a": weight, "b": weight, "c": weight}, place)
    own = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]).to("meta")
    target = {"a": own, "b": own, "c": own.detach()}
    blocking.load(place, target)
    assert target["a"] is target["b"]
    assert target["a"].to_local().data_ptr() == target["c"].to_local().data_ptr()
    assert_same_state(plain(target), {"a": weight, "b": weight, "c": weight})


def test_parameters_that_fsdp_has_freed_are_refused(mesh: Any) -> None:
    model = sharded_network(1, mesh)
    model[0].unshard()
    gathered = {"weight": model[0].weight, "bias": model[0].bias}
    assert {type(tensor) for tensor in gathered.values()} == {nn.Parameter}
    place = fresh_place()
    blocking.save(gathered, place)
    expected = copied(gathered)
    model[0].reshard()  # frees the gathered memory, which a save must not have forbidden
    assert not any(tensor.untyped_storage().nbytes() for tensor in gathered.values())
    for name in gathered:
        with pytest.raises(UnsafeObjectError, match=f"^{name}: the tensor's storage was freed"):
            blocking.save({name: gathered[name]}, fresh_place())
        with pytest.raises(LoadMismatchError, match=f"{name}: the tensor's storage was freed"):
            blocking.load(place, {name: gathered[name]}, strict=False)
    assert_same_state(blocking.load(place, framework="torch"), expected)


def test_distributed_tensors_are_tied_like_others(mesh: Any, tmp_path: Path) -> None:
    weight = distribute_tensor(torch.randn(40, 30), mesh, [Shard(0)])
    state = {"a": weight, "b": weight.detach(), "local": weight.to_local(), "t": nn.Parameter(weight)}
    blocking.save(state, tmp_path / "tied")
    blocking.save({"a": weight}, tmp_path / "alone")
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).rglob("*.bin")) for name in ("tied", "alone")]
    assert sizes[0] == sizes[1]
    own = distribute_tensor(torch.zeros(40, 30), mesh, [Replicate()])
    blocking.load(tmp_path / "tied", {"a": own, "b": own.detach(), "local": own.to_local(), "t": own})
    assert_same_tensor(own.full_tensor(), weight.full_tensor())
    apart = {"a": torch.zeros(40, 30), "b": torch.ones(40, 30)}
    blocking.save(apart, tmp_path / "apart")
    with pytest.raises(LoadMismatchError, match="are the same memory"):
        blocking.load(tmp_path / "apart", {"a": own, "b": own.detach()})
    assert_same_tensor(own.full_tensor(), weight.full_tensor())


def test_many_dtypes_and_layouts(mesh: Any) -> None:
    sources = {
        "half": torch.randn(5, 3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "large": torch.randn(600, 300),
        "small float": torch.arange(8).to(torch.float8_e4m3fn),
    }
    placements = {name: [Replicate() if tensor.ndim == 0 else Shard(0)] for name, tensor in sources.items()}
    state = {key: DTensor.from_local(tensor, mesh, placements[key]) for key, tensor in sources.items()}
    place = fresh_place()
    blocking.save(state, place)
    assert_same_state(blocking.load(place, framework="torch"), sources)
    target = {
        key: DTensor.from_local(torch.zeros(tensor.shape, dtype=tensor.dtype), mesh, placements[key])
        for key, tensor in sources.items()
    }
    blocking.load(place, target)
    assert_same_state({key: tensor.to_local() for key, tensor in target.items()}, sources)
    doubled = DTensor.from_local(torch.zeros(5, 3), mesh, [Shard(0)])
    with pytest.raises(LoadMismatchError, match=r"half \(checkpoint bfloat16, target float32\)"):
        blocking.load(place, {"half": doubled}, strict=False)
    blocking.load(place, {"half": doubled}, strict=False, cast=True)
    assert_same_tensor(doubled.to_local(), sources["half"].float())


def test_what_has_no_elements_yet_is_refused(mesh: Any) -> None:
    pending = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(UnsafeObjectError, match=r"^w: a DTensor with a pending reduction"):
        blocking.save({"w": pending}, fresh_place())
    meta = distribute_tensor(torch.ones(3), mesh, [Shard(0)]).to("meta")
    with pytest.raises(UnsafeObjectError, match=r"^w: a meta tensor holds no data"):
        blocking.save({"w": meta}, fresh_place())
    lying = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))
    with pytest.raises(UnsafeObjectError, match=r"^w: the DTensor's local tensor has shape \(3,\)"):
        blocking.save({"w": lying}, fresh_place())


def test_a_save_keeps_no_distributed_tensor(mesh: Any) -> None:
    state = {"w": distribute_tensor(torch.randn(300, 300), mesh, [Shard(0)])}
    lifetimes = Lifetimes(iter([state["w"].to_local()]))
    handle = blocking.start_save(state, fresh_place())
    handle.wait_staged(60)
    del state
    assert lifetimes.count_alive() == 0
    handle.result(60)
    assert not list(tensors_of({}))


SHARDINGS: list[Any] = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    _StridedShard(1, split_factor=3),
]
SHAPES = [(7, 4), (1, 6), (8, 8), (2, 13)]


def pieces(tensor: torch.Tensor, placement: Any, count: int) -> Sequence[torch.Tensor]:
    """What each process of one mesh dimension gets, by torch's chunk."""

    def chunk(part: torch.Tensor, number: int) -> list[torch.Tensor]:
        found = list(torch.chunk(part, number, placement.dim))
        return found + [part.narrow(placement.dim, 0, 0)] * (number - len(found))

    if placement.is_replicate():
        return [tensor] * count
    parts = [chunk(part, count) for part in chunk(tensor, getattr(placement, "split_factor", 1))]
    return [torch.cat([part[number] for part in parts], placement.dim) for number in range(count)]


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2), (3, 2)])
def test_boxes_of_every_placement(mesh_shape: tuple[int, ...]) -> None:
    for shape, placements in itertools.product(SHAPES, itertools.product(SHARDINGS, repeat=len(mesh_shape))):
        whole = torch.arange(shape[0] * shape[1]).reshape(shape)
        seen = torch.zeros(shape, dtype=torch.int64)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            local = whole
            for placement, count, position in zip(placements, mesh_shape, coordinate, strict=True):
                local = pieces(local, placement, count)[position]
            boxes = local_boxes(shape, mesh_shape, coordinate, placements)
            assert sum(part.numel() for part in (local[box.local] for box in boxes)) == local.numel()
            for box in boxes:
                where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(whole[where], local[box.local])
                seen[where] += 1
        replicas = [count for placement, count in zip(placements, mesh_shape, strict=True) if placement.is_replicate()]
        assert bool((seen == torch.tensor(replicas).prod().long()).all())


@pytest.mark.parametrize("world_size", [2])
def test_each_process_loads_its_boxes(world_size: int, tmp_path: Path) -> None:
    tensors = distributed_children.tensors()
    with torch.random.fork_rng(devices=[]):
        model = distributed_children.model(1).state_dict()
    other = torch.zeros(7, 3)
    state = {**tensors, "tied": [tensors["rows"], tensors["rows"]], "other": other, "model": model}
    blocking.save(state, tmp_path / "checkpoint")
    command = [sys.executable, "-W", "error", distributed_children.__file__]
    arguments = [str(world_size), str(tmp_path / "rendezvous"), str(tmp_path / "checkpoint")]
    children = [
        subprocess.Popen([*command, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        outcomes = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    assert outcomes == [("checked\n", "")] * world_size
