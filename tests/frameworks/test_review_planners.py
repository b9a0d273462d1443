"""Planners of users with tensors: what they give, what is kept of it, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch_training_support import fresh_place

import savestream
from savestream import (
    CorruptCheckpointError,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadMismatchError,
    LoadOptions,
    PlanError,
    SaveOptions,
    ShardedArray,
    UnsafeObjectError,
    blocking,
)
from savestream.arrays import adapter_for, host_view
from savestream.planners import LoadItemType
from savestream.storage_backends import Fault, FaultyBackend, Gate, MemoryBackend

SOURCE = {"w": torch.arange(8.0), "z": torch.complex(torch.arange(4.0), torch.ones(4))}


def targets() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in SOURCE.items()}


@pytest.fixture
def place() -> Any:
    found = fresh_place()
    blocking.save(SOURCE, found)
    return found


class Giving(DefaultLoadPlanner):
    """Fills arrays of its own, by name."""

    def __init__(self, hook: str, own: dict[str, Any]) -> None:
        super().__init__()
        self.hook, self.own = hook, own
        self.committed: dict[str, Any] = {}

    def lookup_tensor(self, index: Any) -> Any:
        return self.own[index.fqn] if self.hook == "lookup_tensor" else super().lookup_tensor(index)

    def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
        found = super().transform_tensor(read_item, tensor)
        return self.own[read_item.dest_index.fqn] if self.hook == "transform_tensor" else found

    def resolve_tensor(self, read_item: Any) -> Any:
        found = super().resolve_tensor(read_item)
        return self.own[read_item.dest_index.fqn] if self.hook == "resolve_tensor" else found

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed[read_item.dest_index.fqn] = tensor


HOOKS = ("lookup_tensor", "transform_tensor", "resolve_tensor")


@pytest.mark.parametrize("hook", HOOKS)
def test_tensors_that_a_planner_gives_are_filled_noticed_and_given_back(place: Any, hook: str) -> None:
    own = {"w": torch.zeros(8, requires_grad=True), "z": torch.zeros(4, dtype=torch.complex64).conj()}
    planner = Giving(hook, own)
    blocking.load(place, targets(), planner=planner)
    for name, tensor in own.items():
        assert torch.equal(tensor, SOURCE[name]), name
        assert tensor._version == 1, name
        assert planner.committed[name] is tensor, name
    assert own["z"].is_conj()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda: torch.zeros(1).expand(8), "overlap"),
        (lambda: torch.zeros(8, dtype=torch.int16), "dtype int16"),
        (lambda: torch.zeros(2, 4), r"shape \(2, 4\)|cannot be had"),
        (lambda: torch.zeros(8, device="meta"), "no memory"),
        (lambda: torch.zeros(8).to_sparse(), "sparse|cannot be had"),
        (lambda: jnp.zeros(8), "no memory"),
    ],
    ids=["overlapping", "integers", "shape", "meta", "sparse", "jax"],
)
def test_arrays_that_cannot_take_a_box_are_refused_by_key(place: Any, hook: str, given: Any, problem: str) -> None:
    planner = Giving(hook, {"w": given(), "z": torch.zeros(4, dtype=torch.complex64)})
    with pytest.raises(PlanError, match=rf"^w: .*({problem})"):
        blocking.load(place, targets(), planner=planner)
    assert planner.own["z"]._version == 0
    assert not planner.own["z"].any()
    assert not planner.committed


def test_boxes_of_a_tensor_that_a_planner_looks_up() -> None:
    found = fresh_place()
    source = np.arange(12.0, dtype="f4").reshape(4, 3)
    blocking.save({"w": ShardedArray((4, 3), [((0, 0), source[:1]), ((1, 0), source[1:])])}, found)
    own = torch.zeros(3, 4).T
    blocking.load(found, {"w": np.zeros((4, 3), "f4")}, planner=Giving("lookup_tensor", {"w": own}))
    assert (own.numpy() == source).all()
    assert own._version > 0


COUNT = 1 << 19


def damaged(tmp_path: Any) -> Any:
    """A checkpoint of two tensors, of which the second is damaged."""
    path = tmp_path / "damaged"
    state = {"a": torch.ones(COUNT), "b": torch.ones(COUNT)}
    blocking.save(state, path, options=SaveOptions(compression="none"))
    (data,) = path.glob("*/*.bin")
    with data.open("r+b") as file:
        file.seek(data.stat().st_size - 5000)
        file.write(b"\x55" * 10)
    return path


def frames_of(error: BaseException | None) -> Any:
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            yield trace.tb_frame
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def test_storages_may_be_freed_while_the_planner_of_a_load_is_kept(place: Any) -> None:
    planner = DefaultLoadPlanner()
    target = targets()
    blocking.load(place, target, planner=planner)
    target["w"].untyped_storage().resize_(0)
    assert not [leaf for leaf in planner.state_dict.values() if isinstance(leaf, np.ndarray)]
    kept = weakref.ref(target["w"])
    del target
    assert blocking.exists(place)  # by now the engine has done away with what it ran before
    gc.collect()
    assert kept() is None


def test_a_failed_load_leaves_no_view_of_the_target(tmp_path: Any) -> None:
    place = damaged(tmp_path)
    planner = DefaultLoadPlanner()
    with pytest.raises(CorruptCheckpointError) as caught:
        blocking.load(place, {"a": torch.zeros(COUNT), "b": torch.zeros(COUNT)}, planner=planner)
    assert planner.state_dict == {}
    found = [
        (frame.f_code.co_name, name)
        for frame in frames_of(caught.value)
        for name, value in frame.f_locals.items()
        if isinstance(value, np.ndarray)
    ]
    assert found == []


def test_a_finished_planner_that_is_driven_by_hand_holds_the_leaves_themselves(place: Any) -> None:
    planner = DefaultLoadPlanner()
    target = targets()
    blocking.load(place, target, planner=_Recording(planner))
    assert planner.state_dict["w"] is target["w"]
    assert planner.state_dict["z"] is target["z"]


class _Recording(DefaultLoadPlanner):
    """Passes everything on to another planner, which the pipeline does not know."""

    def __init__(self, inner: DefaultLoadPlanner) -> None:
        super().__init__()
        self.inner = inner

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.inner.set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> Any:
        plan = self.inner.create_local_plan()
        assert all(item.type is LoadItemType.TENSOR for item in plan.items)
        return plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: Any) -> Any:
        return self.inner.resolve_tensor(read_item)

    def finish_load(self) -> Any:
        return self.inner.finish_load()


class Graph:
    """A product whose gradient needs the tensor that a load then fills."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.x = torch.ones(COUNT, requires_grad=True)
        self.y = (self.x * kept).sum()

    def assert_noticed(self) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            self.y.backward()


def in_shards(tensor: torch.Tensor) -> ShardedArray:
    return ShardedArray((COUNT,), [((0,), tensor)])


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, in_shards], ids=["whole", "sharded"])
def test_autograd_learns_of_what_a_failed_load_replaced(tmp_path: Any, wrap: Any) -> None:
    tensors = {name: torch.full((COUNT,), 3.0) for name in ("a", "b")}
    graph = Graph(tensors["a"])
    with pytest.raises(CorruptCheckpointError):
        blocking.load(damaged(tmp_path), {name: wrap(tensor) for name, tensor in tensors.items()})
    assert [tensor._version for tensor in tensors.values()] == [1, 1]
    graph.assert_noticed()


def test_autograd_learns_of_what_a_failed_load_replaced_in_a_planners_own_tensors(tmp_path: Any) -> None:
    own = {name: torch.full((COUNT,), 3.0) for name in ("a", "b")}
    graph = Graph(own["a"])
    with pytest.raises(CorruptCheckpointError):
        blocking.load(
            damaged(tmp_path), {name: torch.zeros(COUNT) for name in own}, planner=Giving("lookup_tensor", own)
        )
    graph.assert_noticed()


def test_autograd_learns_of_what_a_cancelled_load_replaced() -> None:
    async def run() -> None:
        backend, gate = MemoryBackend(), Gate()
        state = {"a": torch.ones(COUNT * 4), "b": torch.ones(COUNT)}
        await savestream.save(state, (backend, "c"), options=SaveOptions(compression="none"))
        faulty = FaultyBackend(backend, [Fault("read_into", nth=2, hook=gate, path_contains=".bin")])
        target = {"a": torch.zeros(COUNT * 4), "b": torch.zeros(COUNT)}
        graph = Graph(target["a"][:COUNT])
        options = LoadOptions(threads=1)
        task = asyncio.create_task(savestream.load((faulty, "c"), target, options=options))
        await gate.reached()
        assert target["a"][0] == 1
        assert [tensor._version for tensor in target.values()] == [1, 1]
        task.cancel()
        gate.open()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        graph.assert_noticed()

    asyncio.run(run())


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, in_shards], ids=["whole", "sharded"])
def test_a_load_counts_as_one_change(wrap: Any) -> None:
    place = fresh_place()
    blocking.save({"w": torch.ones(COUNT), "n": 3}, place)
    tensor = torch.zeros(COUNT)
    blocking.load(place, {"w": wrap(tensor), "n": 0})
    assert tensor._version == 1
    assert tensor.all()


def test_what_differs_inside_values_changes_no_tensor() -> None:
    place = fresh_place()
    blocking.save({"w": torch.ones(8), "n": {"a": 1}}, place)
    tensor = torch.zeros(8)
    with pytest.raises(LoadMismatchError):
        blocking.load(place, {"w": tensor, "n": {"b": 1}})
    assert tensor._version == 0
    assert not tensor.any()


class Boxed(torch.Tensor):
    """Follows the protocol of sharded leaves with attributes alone."""


class Wrapped(torch.Tensor):
    """Gives a box as an array of a class that is not supported."""

    def __get_tensor_shard__(self, index: Any) -> Any:
        return self


def boxed(tensor: torch.Tensor, kind: type, shape: Any, where: Any, local: Any, size: Any) -> Any:
    leaf = tensor.as_subclass(kind)
    leaf.global_shape, leaf.global_offsets, leaf.local_offsets, leaf.local_sizes = shape, where, local, size
    return leaf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subclass_that_says_which_boxes_it_holds(dtype: Any) -> None:
    place = fresh_place()
    source = torch.rand(4, 3).to(dtype)
    boxes = [(0, 0), (3, 0)], [(0, 0), (3, 0)], [(3, 3), (1, 3)]
    blocking.save({"layer": {"a": boxed(source, Boxed, (4, 3), *boxes)}}, place)
    assert torch.equal(blocking.load(place, framework="torch")["layer"]["a"], source)
    memory = torch.zeros(5, 4, dtype=dtype)
    target = boxed(memory, Boxed, (4, 3), [(0, 0), (2, 0)], [(0, 0), (3, 1)], [(2, 3), (2, 3)])
    found = blocking.load(place, {"layer": {"a": target}})["layer"]["a"]
    assert found is target
    assert torch.equal(memory[:2, :3], source[:2])
    assert torch.equal(memory[3:, 1:], source[2:])
    assert not memory[2].any()
    assert memory._version > 0


def test_a_number_of_no_dimension_in_a_subclass_that_says_which_boxes_it_holds() -> None:
    place = fresh_place()
    blocking.save({"a": boxed(torch.tensor(3.0), Boxed, (), [()], [()], [()])}, place)
    assert blocking.load(place)["a"] == 3.0


def test_a_box_of_an_unsupported_class_is_refused_by_key() -> None:
    place = fresh_place()
    leaf = boxed(torch.rand(4, 3), Wrapped, (4, 3), [(0, 0)], [(0, 0)], [(4, 3)])
    with pytest.raises(UnsafeObjectError, match=r"^layer\.a: .*Wrapped is not a supported array"):
        blocking.save({"layer": {"a": leaf}}, place)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.untyped_storage().resize_(0)
    return made


def deleted(tensor: torch.Tensor) -> Any:
    made = jnp.zeros(tensor.shape, "float32")
    made.delete()
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.to_sparse(),
        lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint8),
        lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
        freed,
        deleted,
        lambda tensor: np.array([None] * 8),
    ],
    ids=["meta", "sparse", "quantised", "nested", "freed", "deleted", "objects"],
)
@pytest.mark.parametrize("hook", ["transform_object", "resolve_data"])
@pytest.mark.parametrize("stage", ["save", "eager", "lazy"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_a_save_planner_makes_without_elements_is_refused_by_key(make: Any, hook: str, stage: Any) -> None:
    def made(planner: Any, item: Any, *rest: Any) -> Any:
        found = getattr(DefaultSavePlanner, hook)(planner, item, *rest)
        return make(found) if item.index.fqn == "layer.w" else found

    planner = type("Making", (DefaultSavePlanner,), {hook: made})()
    state = {"a": torch.ones(3), "layer": {"w": torch.arange(8.0)}}
    place = fresh_place()
    options = {} if stage == "save" else {"stage": stage}
    save = blocking.save if stage == "save" else lambda *given, **named: blocking.start_save(*given, **named).result()
    with pytest.raises((UnsafeObjectError, PlanError), match=r"^layer\.w: "):
        save(state, place, planner=planner, **options)
    assert not blocking.exists(place)


class Meddling(DefaultSavePlanner):
    """Has something happen to the state as soon as it is planned."""

    def __init__(self, happens: Any) -> None:
        super().__init__()
        self.happens = happens

    def finish_plan(self, new_plan: Any) -> Any:
        self.happens()
        return super().finish_plan(new_plan)


def with_data(make: Any) -> Any:
    def happens(tensor: torch.Tensor) -> None:
        tensor.data = make(tensor)

    return happens


CHANGES = {
    "smaller": with_data(lambda tensor: torch.zeros(len(tensor) // 2)),
    "larger": with_data(lambda tensor: torch.zeros(len(tensor) * 2)),
    "reshaped": with_data(lambda tensor: torch.zeros(2, len(tensor) // 2)),
    "wider": with_data(lambda tensor: torch.zeros(len(tensor), dtype=torch.float64)),
    "integers": with_data(lambda tensor: torch.zeros(len(tensor), dtype=torch.int32)),
    "resized": lambda tensor: tensor.resize_(len(tensor) // 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("count", [8, 1 << 21], ids=["small", "large"])
@pytest.mark.parametrize("others", [torch.ones, np.ones], ids=["tensors", "mixed"])
def test_a_tensor_that_changes_after_it_was_planned_is_refused_by_key(change: Any, count: int, others: Any) -> None:
    tensor, place = torch.zeros(count), fresh_place()
    state = {"a": others(5), "layer": {"w": tensor}, "z": [others(3), b"bytes"]}
    with pytest.raises(PlanError, match=r"^layer\.w: it was planned as float32 of shape .* and is now"):
        blocking.save(state, place, planner=Meddling(lambda: change(tensor)))
    assert not blocking.exists(place)


@pytest.mark.parametrize("count", [8, 1 << 21], ids=["small", "large"])
def test_a_tensor_with_other_data_of_the_same_kind_is_saved(count: int) -> None:
    tensor, place = torch.zeros(count), fresh_place()
    state = {"a": torch.ones(5), "j": jnp.arange(3), "b": memoryview(b"abc"), "w": tensor}
    blocking.save(state, place, planner=Meddling(lambda: with_data(lambda found: torch.ones(len(found)))(tensor)))
    found = blocking.load(place)
    assert found["w"].all()
    assert (found["j"] == np.arange(3)).all()
    assert found["b"].tobytes() == b"abc"


def test_parameters_as_dict_keys_are_refused_by_place_and_class() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsafeObjectError) as caught:
        blocking.save({"s": optimizer.state}, fresh_place())
    assert str(caught.value).startswith("s: a dict key of class torch.nn.parameter.Parameter: ")
    assert "tensor(" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_views_of_tensors_of_many_sizes_share_a_class_and_keep_the_storage(dtype: Any) -> None:
    tensors = [torch.ones(count, dtype=torch.float32).to(dtype) for count in range(1, 100)]
    adapter = adapter_for(torch.Tensor)
    assert adapter is not None
    views = adapter.own_memories(tensors)
    assert {type(view.base) for view in views} == {type(views[0].base)}
    assert all(view.flags.writeable for view in views)
    expected = [bytes(tensor.view(torch.uint8).numpy()) for tensor in tensors]
    del tensors
    gc.collect()
    torch.zeros(1 << 12)
    assert [view.tobytes() for view in views] == expected
    strided = torch.arange(24.0).reshape(4, 6)[1:, ::2].T
    assert host_view(strided).tolist() == strided.tolist()
