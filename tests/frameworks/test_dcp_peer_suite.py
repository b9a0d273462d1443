"""The same assertions on torch's own storage and on savestream's, in one process; several ranks: test_dcp_ranks.py.

Where torch's storage does something else on purpose or by mistake, the difference is asserted too.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import KINDS, assert_same_state, files_beneath, load, quiet, save, varied_state, with_bits, zeroed
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from savestream import SaveOptions
from savestream.errors import CheckpointExistsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


@dataclasses.dataclass
class Peer:
    """One of the two storages, in a directory of the test's."""

    kind: str
    place: Path

    def writer(self, name: str = "checkpoint", **options: Any) -> Any:
        return KINDS[self.kind][0](self.place / name, **options)

    def reader(self, name: str = "checkpoint") -> Any:
        return KINDS[self.kind][1](self.place / name)

    def data_files(self, name: str = "checkpoint") -> list[Path]:
        ending = ".bin" if self.kind == "savestream" else ".distcp"
        return sorted(path for path in (self.place / name).rglob("*") if path.suffix == ending)

    def is_committed(self, name: str = "checkpoint") -> bool:
        root = "manifest.json" if self.kind == "savestream" else ".metadata"
        return (self.place / name / root).exists()


@pytest.fixture(params=KINDS)
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    yield Peer(request.param, tmp_path)
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


# --- what is saved comes back -----------------------------------------------------------------------------


def test_dtypes_shapes_layouts_keys_and_values(peer: Peer) -> None:
    state = varied_state()
    save(state, peer.writer())
    target = zeroed(state)
    identities = {key: id(value) for key, value in target["layouts"].items()}
    load(target, peer.reader())
    assert_same_state(target, state)
    assert {key: id(value) for key, value in target["layouts"].items()} == identities


def test_a_state_from_the_metadata_alone(peer: Peer) -> None:
    state = varied_state()
    save(state, peer.writer())
    assert_same_state(_load_state_dict_from_keys(storage_reader=peer.reader()), state)
    some = _load_state_dict_from_keys({"shapes", "groups.0"}, storage_reader=peer.reader())
    assert some["shapes"].keys() == state["shapes"].keys()
    assert some["groups"] == state["groups"][:1]
    assert some.keys() == {"shapes", "groups"}


def test_a_view_stores_only_its_own_elements(peer: Peer) -> None:
    base = torch.arange(1_000_000.0)
    save({"view": base[500:510], "wide": base.reshape(1000, 1000)[:, 7]}, peer.writer())
    assert sum(path.stat().st_size for path in peer.data_files()) < 20_000
    target = load({"view": torch.zeros(10), "wide": torch.zeros(1000)}, peer.reader())
    assert_same_state(target, {"view": base[500:510], "wide": base.reshape(1000, 1000)[:, 7]})


def test_what_has_been_transformed_says_so_itself(peer: Peer) -> None:
    """The reader is told nothing of the compression."""
    state = {"zeros": torch.zeros(100_000), "v": "x" * 10_000}
    options = {"torch": {"_extensions": [ZStandard()]}, "savestream": {"options": SaveOptions(compression="zstd")}}
    save(state, peer.writer(**options[peer.kind]))
    assert sum(path.stat().st_size for path in peer.data_files()) < 10_000
    assert_same_state(load(zeroed(state), peer.reader()), state)


def test_a_module_and_its_optimizer(peer: Peer) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, peer.writer())
    other, other_optimizer = trained(2)
    target = load({"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}, peer.reader())
    other_optimizer.load_state_dict(target["optimizer"])
    assert_same_state(dict(other.state_dict()), dict(model.state_dict()))
    # torch flattens int keys to text, and on loading adds to the target what it then does not find there
    assert_same_state(target["optimizer"]["state"][0], optimizer.state_dict()["state"][0])


class Stateful:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_tensors_are_filled_others_replaced_and_stateful_objects_asked(peer: Peer) -> None:
    save({"t": torch.ones(2), "v": [1, 2], "s": Stateful(5)}, peer.writer())
    target = {"t": torch.zeros(2), "v": [0], "s": Stateful(0)}
    before = dict(target)
    load(target, peer.reader())
    assert target["t"] is before["t"]
    assert target["s"] is before["s"]
    assert (target["t"].tolist(), target["v"], target["s"].value) == ([1, 1], [1, 2], 5)


# --- metadata and items -----------------------------------------------------------------------------------


def test_the_metadata(peer: Peer) -> None:
    state = {
        "w": torch.nn.Parameter(torch.ones(4, 6)),
        "h": torch.ones(3).half(),
        "v": 5,
        "deep": [{"x": torch.ones(1)}],
    }
    returned = save(state, peer.writer())
    read = peer.reader().read_metadata()
    for metadata in (returned, read):
        assert metadata.planner_data == {"w": ("w",), "h": ("h",), "v": ("v",), "deep.0.x": ("deep", 0, "x")}
        assert list(metadata.state_dict_metadata) == ["w", "h", "v", "deep.0.x"]
        assert metadata.version == "1.0.0"
        assert metadata.state_dict_metadata["v"] == BytesStorageMetadata()
        assert metadata.state_dict_metadata["w"].properties.requires_grad
        assert metadata.state_dict_metadata["h"].properties.dtype is torch.float16
        assert metadata.state_dict_metadata["h"].chunks[0].sizes == torch.Size([3])
        assert metadata.storage_meta.save_id
    assert read.storage_meta.load_id
    assert returned.state_dict_metadata == read.state_dict_metadata


class OneBox(dcp.DefaultLoadPlanner):
    """Asks for rows 2 to 4 and columns 1 to 5, with a wrong hint where the chunk is in the metadata."""

    def create_local_plan(self) -> Any:
        low, size, zero = torch.Size((2, 1)), torch.Size((2, 4)), torch.Size((0, 0))
        index = MetadataIndex("w", (0, 0), 17)
        return dcp.LoadPlan([dcp.ReadItem(LoadItemType.TENSOR, MetadataIndex("w"), zero, index, low, size)])


def test_a_box_of_a_chunk_whatever_the_hint_says(peer: Peer) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    save({"w": whole}, peer.writer())
    target = load({"w": torch.zeros(2, 4)}, peer.reader(), planner=OneBox())
    assert_same_state(target["w"], whole[2:4, 1:5])


def test_dtypes_are_converted_to_the_targets(peer: Peer) -> None:
    save({"x": torch.tensor([1.5, -2.25, 1e30])}, peer.writer())
    target = load({"x": torch.zeros(3, dtype=torch.bfloat16)}, peer.reader())
    assert_same_state(target["x"], torch.tensor([1.5, -2.25, 1e30]).bfloat16())


# --- planners ---------------------------------------------------------------------------------------------


def test_missing_keys_partial_loads_and_sizes(peer: Peer) -> None:
    save({"a": torch.ones(3), "b": 2}, peer.writer())
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        load({"a": torch.zeros(3), "c": torch.zeros(1)}, peer.reader())
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    target = load({"a": torch.zeros(3), "c": torch.zeros(1)}, peer.reader(), planner=partial)
    assert_same_state(target, {"a": torch.ones(3), "c": torch.zeros(1)})
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(4)}, peer.reader())
    with pytest.raises(dcp.CheckpointException, match="expected BytesStorageMetadata"):
        load({"a": "no tensor"}, peer.reader())


class Prefixing(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Halving(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        made = super().resolve_data(write_item)
        return made if isinstance(made, io.BytesIO) else made.to(torch.float16)


class Collecting(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        return dataclasses.replace(super().create_local_plan(), planner_data="of this rank")

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        self.flatten_state_dict = False  # whose planner data this replaces
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=[plan.planner_data for plan in plans])


def test_the_planners_of_torchs_documentation(peer: Peer) -> None:
    state = {"x": torch.tensor([1.0, 2.0]), "deep": {"y": torch.tensor([3.0])}, "v": 7}
    save(state, peer.writer("prefixed"), planner=Prefixing())
    found = load({"foo_x": torch.zeros(2), "foo_deep": {"y": torch.zeros(1)}, "foo_v": 0}, peer.reader("prefixed"))
    assert_same_state(found, {f"foo_{key}": value for key, value in state.items()})
    save(state, peer.writer("halved"), planner=Halving())
    assert peer.reader("halved").read_metadata().state_dict_metadata["x"].properties.dtype is torch.float16
    assert_same_state(load(zeroed(state), peer.reader("halved")), state)
    save(state, peer.writer("collected"), planner=Collecting())
    assert peer.reader("collected").read_metadata().planner_data == ["of this rank"]
    assert_same_state(load(zeroed(state), peer.reader("collected")), state)


def test_a_cached_plan_of_an_unchanged_state_saves_what_a_fresh_one_saves(peer: Peer) -> None:
    for number in range(3):
        state = {"x": torch.full((4,), float(number)), "v": number, "deep": [torch.ones(2) * number]}
        save(state, peer.writer(f"c{number}"), planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        fresh = save(state, peer.writer(f"f{number}"))
        cached = peer.reader(f"c{number}").read_metadata()
        assert cached.state_dict_metadata == fresh.state_dict_metadata
        assert cached.planner_data == fresh.planner_data
        assert_same_state(load(zeroed(state), peer.reader(f"c{number}")), state)


# --- overwriting and failures -----------------------------------------------------------------------------


def test_overwriting(peer: Peer) -> None:
    save({"x": torch.ones(3)}, peer.writer())
    save({"x": torch.full((3,), 2.0)}, peer.writer())  # the default of both
    with pytest.raises(dcp.CheckpointException, match="already") as caught:
        save({"x": torch.full((3,), 3.0)}, peer.writer(overwrite=False))
    kind = {"torch": RuntimeError, "savestream": CheckpointExistsError}[peer.kind]
    assert isinstance(caught.value.failures[0][0], kind)
    assert load({"x": torch.zeros(3)}, peer.reader())["x"].tolist() == [2, 2, 2]


def test_one_writer_and_reader_for_many_checkpoints(peer: Peer) -> None:
    writer, reader = peer.writer("unused"), peer.reader("unused")
    for step in range(3):
        save({"x": torch.full((3,), float(step))}, writer, checkpoint_id=peer.place / str(step))
    for step in range(3):
        found = load({"x": torch.zeros(3)}, reader, checkpoint_id=peer.place / str(step))
        assert found["x"].tolist() == [step] * 3
    assert not peer.is_committed("unused")


@pytest.mark.parametrize(
    "hook", ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
)
def test_a_failing_hook(peer: Peer, hook: str) -> None:
    writer = peer.writer()

    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"{hook} failed")

    setattr(writer, hook, fail)
    with pytest.raises(dcp.CheckpointException, match=f"{hook} failed"):
        save({"x": torch.ones(3)}, writer)
    assert not peer.is_committed()


def test_loading_what_is_not_there(peer: Peer) -> None:
    with pytest.raises(dcp.CheckpointException):
        load({"x": torch.zeros(3)}, peer.reader("nothing"))


def test_what_changes_after_async_save_is_not_saved(peer: Peer) -> None:
    state = {"x": torch.ones(1000), "deep": [torch.ones(3)], "v": [1]}
    with warnings.catch_warnings():
        quiet()
        future = dcp.async_save(state, storage_writer=peer.writer())
    state["x"].fill_(2)
    state["deep"][0].fill_(2)
    state["v"].append(2)
    future.result(timeout=60)
    target = load({"x": torch.zeros(1000), "deep": [torch.zeros(3)], "v": []}, peer.reader())
    assert_same_state(target, {"x": torch.ones(1000), "deep": [torch.ones(3)], "v": [1]})


@pytest.mark.parametrize("fails", ["finish", "planner"])
def test_a_failed_save_keeps_nothing_of_the_state(peer: Peer, fails: str) -> None:
    state = {"x": torch.ones(1000)}
    alive = weakref.ref(state["x"])
    writer, planner = peer.writer(), dcp.DefaultSavePlanner()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("failed")

    setattr(*((writer, "finish", fail) if fails == "finish" else (planner, "resolve_data", fail)))
    with pytest.raises(dcp.CheckpointException, match="failed"):
        save(state, writer, planner=planner)
    del state, writer, planner
    gc.collect()
    assert alive() is None


def test_a_sparse_tensor_is_refused(peer: Peer) -> None:
    outcome = _outcome(lambda: save({"x": torch.ones(3).to_sparse()}, peer.writer()))
    said = {"torch": "Cannot access storage", "savestream": "x: a tensor of layout torch.sparse_coo cannot be stored"}
    assert said[peer.kind] in outcome
    assert not peer.is_committed()


# --- known differences ------------------------------------------------------------------------------------


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except dcp.CheckpointException as error:
        return f"refused: {error.failures[0][0]}"
    return "done"


def test_difference_damage(peer: Peer) -> None:
    """One flipped bit in the middle of a tensor's data."""
    options = {"torch": {}, "savestream": {"options": SaveOptions(compression="none")}}
    save({"x": torch.ones(100_000)}, peer.writer(**options[peer.kind]))
    (data,) = peer.data_files()
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    target = {"x": torch.zeros(100_000)}
    outcome = _outcome(lambda: load(target, peer.reader()))
    if peer.kind == "torch":
        assert outcome == "done"
        assert not torch.equal(target["x"], torch.ones(100_000))  # loaded in silence
    else:
        assert "keys affected: 'x'" in outcome


def test_difference_a_cached_plan_of_another_dtype(peer: Peer) -> None:
    for number, dtype in enumerate([torch.float32, torch.float64]):
        state = {"x": torch.full((4,), 1 / 3, dtype=dtype)}
        save(state, peer.writer(str(number)), planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    found = _load_state_dict_from_keys(storage_reader=peer.reader("1"))["x"]
    assert found.dtype is (torch.float32 if peer.kind == "torch" else torch.float64)  # torch truncates


def test_difference_a_failed_overwrite(peer: Peer) -> None:
    """The new save fails when its data have been written."""
    save({"x": torch.ones(3)}, peer.writer())
    writer = peer.writer()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("failed")

    writer.finish = fail
    with pytest.raises(dcp.CheckpointException, match="failed"):
        save({"x": torch.full((3,), 2.0)}, writer)
    found = load({"x": torch.zeros(3)}, peer.reader())["x"].tolist()
    assert found == ([2, 2, 2] if peer.kind == "torch" else [1, 1, 1])  # torch has written over the old data


def test_difference_what_an_overwrite_leaves(peer: Peer) -> None:
    """Two data files first, then one."""
    options = {"torch": {"thread_count": 2}, "savestream": {}}
    save({"x": torch.ones(3), "y": torch.ones(3)}, peer.writer(**options[peer.kind]))
    save({"x": torch.ones(3)}, peer.writer())
    assert len(peer.data_files()) == (2 if peer.kind == "torch" else 1)
    assert len(files_beneath(peer.place)) == 3


def test_difference_tied_tensors(peer: Peer) -> None:
    tied = torch.randn(100_000)
    save({"a": tied, "b": tied}, peer.writer())
    size = sum(path.stat().st_size for path in peer.data_files())
    assert size > 2 * tied.nbytes if peer.kind == "torch" else size < 1.1 * tied.nbytes
    target = load({"a": torch.zeros(100_000), "b": torch.zeros(100_000)}, peer.reader())
    assert_same_state(target, {"a": tied, "b": tied})


def test_difference_a_hole_on_one_rank(peer: Peer) -> None:
    """torch looks at the volume of the chunks only where there are several ranks."""

    class Short(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            data = dataclasses.replace(plan.items[0].tensor_data, size=torch.Size((5,)))
            return dataclasses.replace(plan, items=[dataclasses.replace(plan.items[0], tensor_data=data)])

    outcome = _outcome(lambda: save({"w": with_bits(torch.float32, 3)}, peer.writer(), planner=Short()))
    assert outcome == "done" if peer.kind == "torch" else "in no box (a hole)" in outcome
