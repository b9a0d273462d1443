"""What one process saves through torch.distributed.checkpoint comes back, through torch and through savestream."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, files_beneath, load, save, varied_state, with_bits, zeroed
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import savestream.blocking
from savestream import LoadOptions, SaveOptions
from savestream.errors import LoadMismatchError, PlanError, UnsafeObjectError, UsageError
from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.storage_backends.file import FileBackend
from savestream.storage_backends.memory import MemoryBackend
from savestream.storage_backends.wrappers import Operation, WrapperBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]

Result = TypeVar("Result")


class CountingBackend(WrapperBackend):
    """Counts the bytes that are read from data objects."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.read_bytes = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        self.read_bytes += operation.bytes if operation.kind == "read_into" else 0
        return await call()

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        self.read_bytes += operation.bytes if operation.kind == "read_into" else 0
        call()


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    state = varied_state()
    save(state, StorageWriter(tmp_path / "checkpoint"))
    target = zeroed(state)
    kept = target["layouts"]["transposed"]
    load(target, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, state)
    assert target["layouts"]["transposed"] is kept
    assert target["layouts"]["parameter"].requires_grad


def test_a_state_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    state = varied_state()
    save(state, StorageWriter(tmp_path / "checkpoint"))
    assert_same_state(_load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "checkpoint")), state)
    some = _load_state_dict_from_keys({"tied", "groups.0"}, storage_reader=StorageReader(tmp_path / "checkpoint"))
    assert_same_state(some, {"tied": state["tied"], "groups": state["groups"][:1]})


def test_where_paths_make_no_tree_the_names_are_kept(tmp_path: Path) -> None:
    gaps = [{}, {"x": torch.ones(2)}, {}]  # torch drops what is empty
    save({"gaps": gaps, "y": torch.ones(3)}, StorageWriter(tmp_path / "gaps"))
    found = savestream.blocking.load(tmp_path / "gaps")
    assert list(found["gaps"]) == [1]
    assert found["gaps"][1]["x"].tolist() == [1, 1]
    assert StorageReader(tmp_path / "gaps").read_metadata().planner_data == {"gaps.1.x": ("gaps", 1, "x"), "y": ("y",)}

    flat = {"a.b": torch.ones(2), "a": torch.ones(3), "a.b.c": torch.ones(4), "": torch.ones(5)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    metadata = save(flat, StorageWriter(tmp_path / "flat"), planner=planner)
    assert metadata.planner_data is None
    assert StorageReader(tmp_path / "flat").read_metadata().planner_data is None
    found = savestream.blocking.load(tmp_path / "flat")
    assert {key: array.shape for key, array in found.items()} == {"a.b": (2,), "a": (3,), "a.b.c": (4,), "": (5,)}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    assert_same_state(load(zeroed(flat), StorageReader(tmp_path / "flat"), planner=planner), flat)


def test_a_planner_that_names_leaves_otherwise(tmp_path: Path) -> None:
    class Renaming(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.state_dict = {f"new.{key}": value for key, value in self.state_dict.items()}
            self.mappings = {f"new.{key}": path for key, path in self.mappings.items()}

    save({"a": {"x": torch.ones(2)}}, StorageWriter(tmp_path / "c"), planner=Renaming())
    metadata = StorageReader(tmp_path / "c").read_metadata()
    assert list(metadata.state_dict_metadata) == ["new.a.x"]
    assert metadata.planner_data == {"new.a.x": ("a", "x")}
    assert savestream.blocking.load(tmp_path / "c")["a"]["x"].tolist() == [1, 1]
    found = load({"new": {"a": {"x": torch.zeros(2)}}}, StorageReader(tmp_path / "c"))
    assert found["new"]["a"]["x"].tolist() == [1, 1]


def test_an_empty_state(tmp_path: Path) -> None:
    save({}, StorageWriter(tmp_path / "checkpoint"))
    assert savestream.blocking.load(tmp_path / "checkpoint") == {}
    assert load({}, StorageReader(tmp_path / "checkpoint")) == {}


def test_savestream_reads_it_without_torch(tmp_path: Path) -> None:
    state = {"layer.1": {"w": with_bits(torch.bfloat16, 4, 5).t(), "b": torch.arange(3)}, "list": [torch.ones(2), 5]}
    save(state, StorageWriter(tmp_path / "checkpoint"))
    script = """
import json, sys
import savestream.blocking
state = savestream.blocking.load(sys.argv[1])
w = state["layer.1"]["w"]
report = savestream.blocking.verify(sys.argv[1])
print(json.dumps({
    "w": [str(w.dtype), w.shape, w.tobytes().hex()], "b": state["layer.1"]["b"].tolist(), "list": len(state["list"]),
    "value": type(state["list"][1]).__name__, "raw": report.raw_bytes, "torch": "torch" in sys.modules,
}))
"""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(outcome.stdout)
    w = state["layer.1"]["w"].contiguous().view(torch.int16).numpy()
    assert found["w"] == ["bfloat16", [5, 4], w.tobytes().hex()]
    assert (found["b"], found["list"], found["value"], found["torch"]) == ([0, 1, 2], 2, "bytes", False)


def test_values_are_the_bytes_that_the_planner_made(tmp_path: Path) -> None:
    save({"a": {"x": torch.ones(2), "step": 12}}, StorageWriter(tmp_path / "checkpoint"))
    stored = savestream.blocking.load(tmp_path / "checkpoint")["a"]["step"]
    assert torch.load(io.BytesIO(stored), weights_only=True) == 12
    manifest = savestream.blocking.read_manifest(tmp_path / "checkpoint")
    assert manifest.metadata["torch.distributed.checkpoint"]["version"] == "1.0.0"


def test_reading_the_metadata_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": {"x": torch.ones(2), "y": 5}}, StorageWriter(tmp_path / "checkpoint"))
    assert all(name.endswith((".json", ".bin")) for name in files_beneath(tmp_path / "checkpoint"))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    reader = StorageReader(tmp_path / "checkpoint")
    assert list(reader.read_metadata().state_dict_metadata) == ["a.x", "a.y"]
    with pytest.raises(dcp.CheckpointException, match="was unpickled"):  # torch's planner, as with its own checkpoints
        load({"a": {"y": 0}}, StorageReader(tmp_path / "checkpoint"))


def test_the_metadata_say_what_is_there(tmp_path: Path) -> None:
    state = {"w": torch.nn.Parameter(with_bits(torch.bfloat16, 4, 6)), "s": torch.tensor(1), "v": "text"}
    returned = save(state, StorageWriter(tmp_path / "checkpoint"))
    reader = StorageReader(tmp_path / "checkpoint")
    first, second = reader.read_metadata(), reader.read_metadata()
    for metadata in (returned, first):
        w = metadata.state_dict_metadata["w"]
        assert isinstance(w, TensorStorageMetadata)
        assert (w.properties.dtype, w.properties.requires_grad, w.size) == (torch.bfloat16, True, torch.Size((4, 6)))
        assert [(chunk.offsets, chunk.sizes) for chunk in w.chunks] == [(torch.Size((0, 0)), torch.Size((4, 6)))]
        assert metadata.state_dict_metadata["s"].size == torch.Size(())
        assert not metadata.state_dict_metadata["s"].properties.requires_grad
        assert isinstance(metadata.state_dict_metadata["v"], BytesStorageMetadata)
        assert metadata.planner_data == {"w": ("w",), "s": ("s",), "v": ("v",)}
        assert metadata.version == "1.0.0"
        manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_bytes())
        assert metadata.storage_meta.save_id == manifest["checkpoint_id"]
    assert first.storage_meta.load_id != second.storage_meta.load_id


def test_tied_tensors_are_stored_once_and_a_view_stores_its_own_elements(tmp_path: Path) -> None:
    base = torch.arange(100_000, dtype=torch.float64)
    state = {"a": base, "b": base, "c": base.view(-1), "view": base[10:20], "other": base.view(torch.int64)}
    save(state, StorageWriter(tmp_path / "checkpoint"))
    assert sum(part["raw_bytes"] for part in _root(tmp_path / "checkpoint")["parts"]) == 2 * base.nbytes + 80
    target = load(zeroed({key: value.clone() for key, value in state.items()}), StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, state)


def _root(place: Path) -> Any:
    return json.loads((place / "manifest.json").read_bytes())


def test_a_part_of_a_tensor_reads_only_its_frames(tmp_path: Path) -> None:
    store = CountingBackend(FileBackend(tmp_path))
    big = torch.arange(4 * 1024 * 1024, dtype=torch.float32).reshape(1024, 4096)  # 16 MiB: four frames
    save({"big": big}, StorageWriter((store, "checkpoint"), options=SaveOptions(compression="none")))

    class Rows(dcp.DefaultLoadPlanner):
        """Asks for the rows 700 to 710 only, as a rank that holds a shard does."""

        def create_local_plan(self) -> Any:
            index = MetadataIndex("big", (0, 0), 99)  # a wrong hint
            where = torch.Size((700, 0)), torch.Size((0, 0)), torch.Size((10, 4096))
            item = dcp.ReadItem(
                dcp.planner.LoadItemType.TENSOR, MetadataIndex("big"), where[1], index, where[0], where[2]
            )
            return dcp.LoadPlan([item])

    target = {"big": torch.zeros(10, 4096)}
    load(target, StorageReader((store, "checkpoint")), planner=Rows())
    assert torch.equal(target["big"], big[700:710])
    assert 0 < store.read_bytes <= 4 * 1024 * 1024 + 2 * 4096


def test_a_large_tensor_of_many_blocks_in_a_small_budget(tmp_path: Path) -> None:
    state = {"big": torch.randn(3000, 5001), "more": torch.randn(2000, 1000).t()}
    options = SaveOptions(memory_budget_bytes=8 * 1024 * 1024, threads=2)
    save(state, StorageWriter(tmp_path / "checkpoint", options=options))
    assert_same_state(load(zeroed(state), StorageReader(tmp_path / "checkpoint")), state)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_options_reach_the_codec(tmp_path: Path, compression: Any) -> None:
    state = {"zeros": torch.zeros(1_000_000)}
    save(state, StorageWriter(tmp_path / "checkpoint", options=SaveOptions(compression=compression)))
    report = savestream.blocking.verify(tmp_path / "checkpoint")
    assert (report.stored_bytes < 100_000) == (compression == "zstd")
    assert_same_state(load({"zeros": torch.ones(1_000_000)}, StorageReader(tmp_path / "checkpoint")), state)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.ones(3)}
    memory = MemoryBackend("dcp places")
    monkeypatch.chdir(tmp_path)
    writers = {
        "relative": StorageWriter("relative"),
        "url": StorageWriter((tmp_path / "url").as_uri()),
        "memory": StorageWriter("memory://dcp-places/a"),
        "backend": StorageWriter((memory, "b")),
    }
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # a relative path was made absolute at once
    for writer in writers.values():
        save(state, writer)
    places = [tmp_path / "relative", tmp_path / "url", "memory://dcp-places/a", (memory, "b")]
    for place in places:
        assert_same_state(load({"x": torch.zeros(3)}, StorageReader(place)), state)
    assert writers["relative"].checkpoint_id == str(tmp_path / "relative")
    assert writers["memory"].checkpoint_id == "memory://dcp-places/a"


def test_checkpoint_id_says_where(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    writer, reader = StorageWriter(), StorageReader()
    for step in (1, 2):
        save({"x": torch.full((3,), float(step))}, writer, checkpoint_id=tmp_path / f"step-{step:012d}")
    for step in (1, 2):
        found = load({"x": torch.zeros(3)}, reader, checkpoint_id=str(tmp_path / f"step-{step:012d}"))
        assert_same_state(found, {"x": torch.full((3,), float(step))})
    assert [entry.step for entry in savestream.blocking.list_checkpoints(tmp_path)] == [1, 2]
    memory = MemoryBackend("ids")
    save(state, StorageWriter((memory, "a")), checkpoint_id="b")
    assert savestream.blocking.exists((memory, "b"))
    assert not savestream.blocking.exists((memory, "a"))


def test_one_rank_needs_no_collectives(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, StorageWriter(tmp_path / "c"), use_collectives=False)
    assert load({"x": torch.zeros(3)}, StorageReader(tmp_path / "c"))["x"].tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="use_collectives=False with several ranks"):
        StorageWriter(tmp_path / "d").set_up_storage_writer(False, rank=1, use_collectives=False)


def test_arguments_are_checked() -> None:
    with pytest.raises(PlanError, match="no place is known"):
        StorageWriter().set_up_storage_writer(True)
    with pytest.raises(PlanError, match="overwrite"):
        StorageWriter("x", overwrite=1)
    with pytest.raises(PlanError, match="options"):
        StorageWriter("x", options=LoadOptions())
    with pytest.raises(PlanError, match="cast"):
        StorageReader("x", cast="no")
    with pytest.raises(PlanError, match="no backend for nowhere"):
        StorageReader("nowhere://x")
    with pytest.raises(UsageError, match="set_up_storage_writer"):
        StorageWriter("x").prepare_local_plan(dcp.SavePlan([]))
    assert StorageWriter.validate_checkpoint_id("some/path")
    assert StorageReader.validate_checkpoint_id(Path("some/path"))
    assert not StorageWriter.validate_checkpoint_id("nowhere://x")
    assert isinstance(StorageWriter("x"), dcp.StorageWriter)
    assert isinstance(StorageReader("x"), dcp.StorageReader)


def test_torch_is_imported_when_an_instance_is_made() -> None:
    script = """
import sys
from savestream.integrations.torch import StorageReader, StorageWriter
assert "Parameters" in StorageWriter.__doc__
assert "torch" not in sys.modules
reader, writer = StorageReader("x"), StorageWriter("x")
import torch.distributed.checkpoint as dcp
assert isinstance(writer, StorageWriter) and isinstance(writer, dcp.StorageWriter)
assert isinstance(reader, StorageReader) and isinstance(reader, dcp.StorageReader)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], timeout=60, check=True)


class Derived(StorageWriter):
    """A user's own writer."""

    def __init__(self, place: Path, label: str) -> None:
        super().__init__(place)
        self.label = label
        self.finished = 0

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self.finished += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "label": self.label, "finished": self.finished}


def test_subclasses(tmp_path: Path) -> None:
    writer = Derived(tmp_path / "c", "mine")
    save({"x": torch.ones(3)}, writer)
    again = pickle.loads(pickle.dumps(writer))
    assert type(again) is type(writer)
    assert isinstance(again, Derived)
    assert isinstance(again, dcp.StorageWriter)
    assert (again.label, again.finished) == ("mine", 1)
    save({"x": torch.ones(3)}, again)
    assert again.finished == 2
    assert type(type(writer)(tmp_path / "d", "other")) is type(writer)


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="no checkpoint"):
        load({"x": torch.zeros(3)}, StorageReader(tmp_path))


# --- targets ----------------------------------------------------------------------------------------------


def test_targets_of_other_layouts_are_filled_in_place(tmp_path: Path) -> None:
    saved = {"a": with_bits(torch.float32, 6, 4), "b": with_bits(torch.complex64, 5), "c": with_bits(torch.int16, 4, 4)}
    save(saved, StorageWriter(tmp_path / "checkpoint"))
    wide = torch.zeros(6, 8)
    target = {
        "a": wide[:, ::2],
        "b": torch.zeros(5, dtype=torch.complex64).conj(),
        "c": torch.zeros(4, 4, dtype=torch.int16).t(),
    }
    addresses = {key: tensor.data_ptr() for key, tensor in target.items()}
    load(target, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, saved)
    assert {key: tensor.data_ptr() for key, tensor in target.items()} == addresses
    assert not wide[:, 1::2].any()


def test_autograd_learns_of_the_change(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, StorageWriter(tmp_path / "checkpoint"))
    x = torch.nn.Parameter(torch.zeros(3))
    loss = (x * x).sum()
    load({"x": x}, StorageReader(tmp_path / "checkpoint"))
    assert torch.equal(x.detach(), torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, StorageWriter(tmp_path / "checkpoint"))
    with torch.inference_mode():
        x = torch.zeros(3)
    load({"x": x}, StorageReader(tmp_path / "checkpoint"))
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(4, 3), (4, 0)])
def test_an_expanded_target_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    save({"x": torch.ones(shape)}, StorageWriter(tmp_path / "checkpoint"))
    base = torch.zeros(shape[0], 1)
    target = {"x": base.expand(shape)}
    if not shape[1]:
        load(target, StorageReader(tmp_path / "checkpoint"))  # it has no element that could overlap
        return
    with pytest.raises(dcp.CheckpointException, match="x: the target's elements overlap"):
        load(target, StorageReader(tmp_path / "checkpoint"))
    assert not base.any()


def test_dtypes_are_converted_as_torch_does_or_refused(tmp_path: Path) -> None:
    saved = {"x": torch.tensor([1.5, -2.25, 3e38]), "y": torch.tensor([1, 2, 300])}
    save(saved, StorageWriter(tmp_path / "checkpoint"))
    target = {"x": torch.zeros(3, dtype=torch.bfloat16), "y": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(dcp.CheckpointException, match="2 of another dtype") as caught:
        load(target, StorageReader(tmp_path / "checkpoint", cast=False))
    assert isinstance(caught.value.failures[0][0], LoadMismatchError)
    assert caught.value.failures[0][0].dtype_mismatches == (
        "x (checkpoint float32, target bfloat16)",
        "y (checkpoint int64, target uint8)",
    )
    assert not target["x"].any()
    load(target, StorageReader(tmp_path / "checkpoint"))
    assert_same_state(target, {"x": saved["x"].bfloat16(), "y": saved["y"].to(torch.uint8)})


def test_where_targets_share_memory_the_last_one_counts(tmp_path: Path) -> None:
    save(
        {"a": torch.full((9,), 1.0), "b": torch.full((9,), 2.0), "c": torch.full((3,), 3.0)},
        StorageWriter(tmp_path / "c"),
    )
    memory = torch.zeros(9)
    load({"a": memory, "b": memory, "c": memory[3:6]}, StorageReader(tmp_path / "c"))
    assert memory.tolist() == [2, 2, 2, 3, 3, 3, 2, 2, 2]
    load({"c": memory[3:6], "a": memory}, StorageReader(tmp_path / "c"))
    assert memory.tolist() == [1, 1, 1, 3, 3, 3, 1, 1, 1]  # torch loads in the order of the keys


# --- what is refused --------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """Whatever it means, its elements alone do not tell."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3).to_sparse(), "layout"),
        (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantised"),
        (lambda: torch.empty(3, device="meta"), "meta"),
    ],
    ids=["sparse", "subclass", "quantised", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_elements_are_refused_by_name(
    tmp_path: Path, make: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(dcp.CheckpointException, match=f"bad.one: .*{reason}") as caught:
        save({"fine": torch.ones(2), "bad": {"one": make()}}, StorageWriter(tmp_path / "checkpoint"))
    assert isinstance(caught.value.failures[0][0], UnsafeObjectError)
    assert not files_beneath(tmp_path)


def test_planner_data_without_a_safe_encoding_are_refused_by_name(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        extra: Any = None

        def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"ours": [1, self.extra]}
            return plans, metadata

    planner = Planner()
    planner.extra = np.float64
    with pytest.raises(dcp.CheckpointException, match=r"planner_data\['ours'\]\[1\]: builtins.type"):
        save({"x": torch.ones(2)}, StorageWriter(tmp_path / "checkpoint"), planner=planner)
    assert not files_beneath(tmp_path)
    planner.extra = {"nested": (1.5, None, b"bytes", ["x"], {3: True})}
    save({"x": torch.ones(2)}, StorageWriter(tmp_path / "checkpoint"), planner=planner)
    found = StorageReader(tmp_path / "checkpoint").read_metadata()
    assert found.planner_data == {"ours": [1, planner.extra]}
    assert type(found.planner_data["ours"][1]["nested"]) is tuple
    assert_same_state(load({"x": torch.zeros(2)}, StorageReader(tmp_path / "checkpoint")), {"x": torch.ones(2)})


# --- pickling, for async_save with a process --------------------------------------------------------------


def test_writers_and_readers_can_be_pickled(tmp_path: Path) -> None:
    pool = savestream.StagingPool(8 * 1024 * 1024)
    writer = StorageWriter(tmp_path / "a", overwrite=False, options=SaveOptions(staging_pool=pool, threads=1))
    save({"x": torch.ones(3)}, writer)  # with everything that a save leaves in it
    copied = pickle.loads(pickle.dumps(writer))
    assert type(copied) is type(writer)
    with pytest.raises(dcp.CheckpointException, match="already there"):
        save({"x": torch.ones(3)}, copied)
    save({"x": torch.full((3,), 2.0)}, copied, checkpoint_id=tmp_path / "b")
    reader = StorageReader(tmp_path / "a", cast=False)
    load({"x": torch.zeros(3)}, reader)
    reader = pickle.loads(pickle.dumps(reader))
    assert load({"x": torch.zeros(3)}, reader)["x"].tolist() == [1, 1, 1]
    assert load({"x": torch.zeros(3)}, reader, checkpoint_id=tmp_path / "b")["x"].tolist() == [2, 2, 2]


def test_a_place_in_memory_is_not_for_other_processes() -> None:
    with pytest.raises(UsageError, match="this process's memory"):
        pickle.dumps(StorageWriter("memory://dcp/x"))
    assert pickle.loads(pickle.dumps(StorageWriter())).checkpoint_id is None


FORKING = """
import os, sys
import torch
from torch.distributed.checkpoint import save
from savestream.integrations.torch import StorageWriter

save({"x": torch.ones(3)}, storage_writer=StorageWriter(sys.argv[1] + "/a"), no_dist=True)
child = os.fork()
if child == 0:
    try:
        save({"x": torch.ones(3)}, storage_writer=StorageWriter(sys.argv[1] + "/b"), no_dist=True)
    except BaseException as error:
        print(error, flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
"""


def test_a_fork_is_told(tmp_path: Path) -> None:
    # In a process of its own: JAX, where it has started, warns of every fork.
    outcome = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "forked after savestream had been used" in outcome.stdout
