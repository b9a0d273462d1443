"""One process of several that hold distributed tensors together: saves nothing, loads its boxes, and checks them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from savestream import DefaultSavePlanner, LoadMismatchError, PlanError, blocking
from savestream.arrays import adapter_for


def full(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


SHAPES = {"rows": (7, 3), "columns": (4, 5), "copied": (3,), "few": (1, 6), "half": (6, 2)}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "few": Shard(0), "half": Shard(0)}


def tensors() -> dict[str, torch.Tensor]:
    found = {name: full(name, *shape) for name, shape in SHAPES.items()}
    found["half"] = found["half"].bfloat16()
    return found


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def main(rank: int, world_size: int, rendezvous: str, place: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    check_boxes_to_write(mesh, rank)
    check_loads(mesh, place)
    check_meta_targets(mesh, place)
    check_ties(mesh, place)
    check_sharded_model(mesh, place)
    distributed.barrier()
    distributed.destroy_process_group()
    print("checked", flush=True)


def distributed_tensors(mesh: object, *, zeros: bool = False) -> dict[str, DTensor]:
    sources = {name: torch.zeros_like(tensor) if zeros else tensor for name, tensor in tensors().items()}
    return {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in sources.items()}


def check_boxes_to_write(mesh: object, rank: int) -> None:
    adapter = adapter_for(DTensor)
    for name, tensor in distributed_tensors(mesh).items():
        boxes = adapter.split(tensor, name)
        if name == "copied":
            assert boxes is None
            continue
        assert len(boxes) == (0 if name == "few" and rank else 1)
        for offsets, box in boxes:
            part = tuple(slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True))
            assert torch.equal(tensors()[name][part], box)
    rows = distributed_tensors(mesh)["rows"]
    planner = DefaultSavePlanner()
    planner.set_up_planner({"first": rows, "tied": rows.detach(), "apart": rows.clone()}, None, True)
    planner.capture_values()
    assert [item.alias_of is None for item in planner.create_local_plan().items] == [True, False, True]


def check_loads(mesh: object, place: str) -> None:
    target, expected = distributed_tensors(mesh, zeros=True), distributed_tensors(mesh)
    held = dict(target)
    parameter = nn.Parameter(target["rows"])
    target["rows"] = parameter
    loss = (parameter * parameter).sum()
    blocking.load(place, target, keys=list(target))
    assert all(target[name] is tensor for name, tensor in held.items() if name != "rows")
    assert target["rows"] is parameter
    for name, tensor in target.items():
        assert torch.equal(tensor.to_local(), expected[name].to_local()), name
        assert torch.equal(tensor.full_tensor(), tensors()[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    wrong = {"rows": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])}
    with pytest.raises(LoadMismatchError, match=r"rows \(checkpoint \(7, 3\), target \(8, 3\)\)"):
        blocking.load(place, wrong, keys="rows")
    with pytest.raises(PlanError, match="rows"):  # half a tensor is no whole one
        blocking.save({"rows": target["rows"]}, place + "-alone")


def check_meta_targets(mesh: object, place: str) -> None:
    target = {name: tensor.to("meta") for name, tensor in distributed_tensors(mesh).items()}
    expected = distributed_tensors(mesh)
    assert all(tensor.to_local().is_meta for tensor in target.values())
    blocking.load(place, target, keys=list(target))
    for name, tensor in target.items():
        assert type(tensor) is DTensor
        assert tensor.placements == expected[name].placements
        assert torch.equal(tensor.to_local(), expected[name].to_local()), name


def check_ties(mesh: object, place: str) -> None:
    own = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    blocking.load(place, {"tied": [own, own.detach()]}, keys="tied")
    assert torch.equal(own.full_tensor(), tensors()["rows"])
    before = own.to_local().clone()
    with pytest.raises(LoadMismatchError, match="are the same memory"):
        blocking.load(place, {"rows": own, "other": own.detach()}, keys=["rows", "other"])
    assert torch.equal(own.to_local(), before)


def check_sharded_model(mesh: object, place: str) -> None:
    plain, sharded = model(1), model(2)
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    blocking.load(place, {"model": sharded.state_dict()}, keys="model")
    for name, tensor in sharded.state_dict().items():
        assert torch.equal(tensor.full_tensor(), plain.state_dict()[name])
    value = torch.ones(2, 3)
    assert torch.equal(sharded(value), plain(value))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
