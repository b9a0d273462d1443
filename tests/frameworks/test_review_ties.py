"""Targets whose memory other targets share, in part or whole, and targets that a load replaces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from savestream import LoadMismatchError, SaveOptions, blocking
from savestream.planners import DefaultLoadPlanner, DefaultSavePlanner, MetadataIndex, ShardedArray

# --- arrays of no dimension for numbers ---


EXACT: list[tuple[Any, torch.dtype]] = [
    (True, torch.bool),
    *[(7, dtype) for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64)],
    (-(2**63), torch.int64),
    (2**64 - 1, torch.uint64),
    *[(-1.5, dtype) for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2)],
    (0.1, torch.float64),
    (-0.0, torch.float32),
    (-0.0, torch.float8_e4m3fn),
    (0.0, torch.float8_e4m3fnuz),
    (math.inf, torch.float16),
    (math.nan, torch.float32),
    (1 - 2j, torch.complex64),
    (complex(-0.0, 0.0), torch.complex64),
]
INEXACT: list[tuple[Any, torch.dtype]] = [
    (300, torch.uint8),
    (-1, torch.uint64),
    (2**70, torch.int64),
    (0.1, torch.float32),
    (1e300, torch.float32),
    (16777217.0, torch.float32),
    (0.1j, torch.complex64),
    (-0.0, torch.float8_e4m3fnuz),  # which has no such zero
    (-0.0, torch.float8_e5m2fnuz),
    (1, torch.float32),
    (1.0, torch.int64),
]


@pytest.mark.parametrize(("number", "dtype"), EXACT)
def test_a_target_without_memory_takes_a_number(number: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    blocking.save({"n": number, "inside": [number, "text"], "w": torch.ones(2)}, tmp_path / "c")
    target = {"n": torch.empty((), dtype=dtype, device="meta"), "w": torch.zeros(2)}
    target["inside"] = [target["n"], ""]
    loaded = blocking.load(tmp_path / "c", target)
    for found in (loaded["n"], loaded["inside"][0]):
        assert (found.dtype, found.shape, found.is_cpu) == (dtype, torch.Size(()), True)
        assert repr(type(number)(found.item())) == repr(number)
    assert loaded["n"].data_ptr() != loaded["inside"][0].data_ptr()


@pytest.mark.parametrize(("number", "dtype"), INEXACT)
def test_a_number_that_would_lose_bits_is_refused(number: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    blocking.save({"n": number, "w": torch.ones(1)}, tmp_path / "c")
    target = {"n": torch.empty((), dtype=dtype, device="meta"), "w": torch.zeros(1)}
    with pytest.raises(LoadMismatchError, match="n: the checkpoint has a plain value, the target an array"):
        blocking.load(tmp_path / "c", target)
    assert not target["w"].any()


def test_one_array_of_jax_takes_different_numbers(tmp_path: Path) -> None:
    blocking.save({"a": 1, "b": [2, 3], "w": np.ones(2)}, tmp_path / "c")
    zero = jax.numpy.zeros((), "int32")
    loaded = blocking.load(tmp_path / "c", {"a": zero, "b": [zero, zero], "w": np.zeros(2)})
    found = [loaded["a"], *loaded["b"]]
    assert [(int(array), array.dtype, array.weak_type) for array in found] == [
        (number, np.int32, False) for number in (1, 2, 3)
    ]
    assert int(zero) == 0


def test_a_number_is_placed_on_all_devices(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    blocking.save({"n": 7, "w": np.ones(2)}, tmp_path / "c")
    zero = jax.device_put(jax.numpy.zeros((), "int32"), sharding)
    found = blocking.load(tmp_path / "c", {"n": zero, "w": np.zeros(2)})["n"]
    assert found.sharding == sharding
    assert [int(shard.data) for shard in found.addressable_shards] == [7] * 8


def test_no_number_is_written_into_memory_that_targets_share(tmp_path: Path) -> None:
    blocking.save({"a": 1.0, "b": 2.0, "w": np.arange(3.0)}, tmp_path / "c")
    blocking.save([1, 2], tmp_path / "list")
    shared, whole = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    counter = torch.tensor(0)
    for place, target in (
        ("c", {"a": shared, "b": shared, "w": np.zeros(3)}),
        ("c", {"a": whole[0], "b": 2.0, "w": whole}),
        ("list", [counter, counter]),
    ):
        with pytest.raises(LoadMismatchError, match="the checkpoint has a plain value, the target an array"):
            blocking.load(tmp_path / place, target)
    assert not shared
    assert not whole.any()
    assert not counter


# --- one memory in several guises ---


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def saved_bytes(state: Any, place: Path) -> int:
    return blocking.save(state, place, options=SaveOptions(compression="none")).statistics.raw_bytes


def test_numpy_arrays_over_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = Tied()
    weight = model.embedding.weight.detach()
    before = weight.clone()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    guises = {
        "numpy": state,
        "with another": {**state, "other": torch.ones(0)},
        "dlpack": [np.from_dlpack(weight), np.from_dlpack(weight)],
        "numpy first": [*state.values(), weight, weight[:]],
        "torch first": [weight, *state.values(), weight[:], weight.numpy()],
        "in between": [state["head.weight"], weight, weight.numpy(), torch.from_numpy(state["head.weight"])],
        "one axis more": [weight.numpy()[None], weight[None], torch.as_strided(weight, (1, 8, 4), (1, 4, 1))],
        "all axes more": [weight.numpy().reshape(1, 8, 4), torch.as_strided(weight, (1, 8, 4), (7, 4, 1))],
    }
    for name, guise in guises.items():
        assert saved_bytes(guise, tmp_path / name) == weight.nbytes
        with torch.no_grad():
            weight.zero_()
        blocking.load(tmp_path / name, guise)
        assert torch.equal(weight, before)
    blocking.load(tmp_path / "numpy", model.state_dict())
    assert torch.equal(weight, before)


@pytest.mark.parametrize("contiguous", [True, False])
def test_strides_of_axes_of_one_element_do_not_count(contiguous: bool, tmp_path: Path) -> None:
    row = torch.arange(5.0)
    other = torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t()
    state = {"a": row.view(1, 5), "b": torch.as_strided(row, (1, 5), (1, 1)), "other": other}
    assert state["a"].stride() != state["b"].stride()
    assert saved_bytes(state, tmp_path / "c") == row.nbytes + other.nbytes
    row.zero_()
    blocking.load(tmp_path / "c", state)
    assert row.tolist() == [0, 1, 2, 3, 4]


# --- boxes of sharded arrays ---


def test_boxes_over_tensors_are_the_plain_tensors(tmp_path: Path) -> None:
    whole = torch.rand(4, 3).bfloat16()
    before = whole.clone()
    state = {
        "a": ShardedArray((4, 3), [((0, 0), whole[:3]), ((3, 0), whole[3:])]),
        "b": ShardedArray((4, 3), [((0, 0), whole[:1]), ((1, 0), whole[1:])]),
        "c": ShardedArray((8, 3), [((1, 0), whole[:3]), ((0, 0), whole[3:]), ((4, 0), torch.ones(4, 3).bfloat16())]),
    }
    saved_bytes(state, tmp_path / "overlapping")
    with pytest.raises(LoadMismatchError, match="share a part of their memory"):
        blocking.load(tmp_path / "overlapping", state)
    del state["b"]
    state["d"], state["e"] = whole[:3], whole[3:]
    assert saved_bytes(state, tmp_path / "c") == whole.nbytes + 24
    whole.zero_()
    loaded = blocking.load(tmp_path / "c", state)
    assert loaded["a"] is state["a"]
    assert torch.equal(whole, before)
    assert blocking.load(tmp_path / "c")["c"].shape == (8, 3)


def test_a_box_of_jax_is_the_array_that_was_placed(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2), ("x",))
    pieces = [jax.device_put(jax.numpy.arange(6.0) + place, device) for place, device in enumerate(jax.devices()[:2])]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.make_array_from_single_device_arrays((12,), sharding, pieces)
    state = {"whole": whole, "piece": pieces[0], "again": whole.addressable_shards[1].data}
    assert saved_bytes(state, tmp_path / "c") == whole.nbytes
    loaded = blocking.load(tmp_path / "c", state)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


# --- tied targets without memory ---


def test_tied_targets_without_memory_get_one_storage(tmp_path: Path) -> None:
    weight = torch.rand(40, 3).bfloat16()
    blocking.save({"a": weight, "b": [weight, weight, weight]}, tmp_path / "c")
    base = torch.empty(40, 3, dtype=torch.bfloat16, device="meta")
    frozen = torch.nn.Parameter(base, requires_grad=False)
    target = {"a": base, "b": [torch.nn.Parameter(base), frozen, base.detach().requires_grad_()]}
    loaded = blocking.load(tmp_path / "c", target)
    found = [loaded["a"], *loaded["b"]]
    assert [(type(tensor), tensor.requires_grad, tensor.is_leaf) for tensor in found] == [
        (torch.Tensor, False, True),
        (torch.nn.Parameter, True, True),
        (torch.nn.Parameter, False, True),
        (torch.Tensor, True, True),
    ]
    assert len({tensor.untyped_storage()._cdata for tensor in found}) == 1
    assert all(torch.equal(tensor, weight) for tensor in found)
    before = [tensor._version for tensor in found]
    with torch.no_grad():
        found[2].zero_()
    assert [tensor._version for tensor in found] == [version + 1 for version in before]
    assert not any(tensor.any() for tensor in found)
    torch.save(loaded, tmp_path / "tied.pt")
    torch.save({"a": weight, "b": [weight, weight.detach(), weight.data]}, tmp_path / "usual.pt")
    assert (tmp_path / "tied.pt").stat().st_size < (tmp_path / "usual.pt").stat().st_size + weight.nbytes


def test_a_change_through_one_tied_tensor_is_noticed_through_the_other(tmp_path: Path) -> None:
    weight = torch.rand(5)
    blocking.save({"a": weight, "b": weight}, tmp_path / "c")
    base = torch.empty(5, device="meta")
    loaded = blocking.load(tmp_path / "c", {"a": base.detach(), "b": base.detach()})
    product = (torch.ones(5, requires_grad=True) * loaded["a"]).sum()
    loaded["b"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tied_distributed_tensors_without_memory_get_one_storage(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        weight = torch.rand(6, 2)
        blocking.save({"a": weight, "b": weight}, tmp_path / "c")
        base = distribute_tensor(weight, mesh, [Shard(0)]).to("meta")
        target = {"a": base, "b": torch.nn.Parameter(base)}
        loaded = blocking.load(tmp_path / "c", target)
    finally:
        torch.distributed.destroy_process_group()
    locals_ = [loaded["a"].to_local(), loaded["b"].to_local()]
    assert type(loaded["b"].data) is type(loaded["a"])
    assert isinstance(loaded["b"], torch.nn.Parameter)
    assert len({tensor.untyped_storage()._cdata for tensor in locals_}) == 1
    assert all(torch.equal(tensor, weight) for tensor in locals_)


# --- names on plain tensors ---


class LooksUpEach(DefaultSavePlanner):
    """Overrides what is asked for each item, and so is asked for each."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index)


class LooksUpEachTarget(DefaultLoadPlanner):
    """As LooksUpEach, for loads."""

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        return super().lookup_tensor(index)


@pytest.mark.parametrize("kind", [torch.Tensor.detach, torch.nn.Parameter])
@pytest.mark.parametrize("state_of", [lambda t: t, lambda t: {"a": t}, lambda t: {"a": t, "b": 1}])
def test_a_name_on_a_plain_tensor_makes_no_sharded_one(kind: Any, state_of: Any, tmp_path: Path) -> None:
    def named(tensor: torch.Tensor) -> torch.Tensor:
        tensor = kind(tensor)
        tensor.global_shape = (8, 3)
        return tensor

    saved, own = torch.rand(4, 3), named(torch.zeros(4, 3))
    blocking.save(state_of(named(saved)), tmp_path / "c", planner=LooksUpEach())
    blocking.save(state_of(named(saved)), tmp_path / "usual")
    blocking.load(tmp_path / "c", state_of(own), planner=LooksUpEachTarget())
    assert torch.equal(own, saved)
    with torch.no_grad():
        own.zero_()
    blocking.load(tmp_path / "usual", state_of(own))
    assert torch.equal(own, saved)
    assert own.global_shape == (8, 3)
