"""Storage fails, or ends unclearly, while torch.distributed.checkpoint saves: nothing half-done is ever visible."""

from __future__ import annotations

import _thread
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_support import assert_same_state, files_beneath, load, save, settle

import savestream.blocking
from savestream import SaveOptions
from savestream.errors import CheckpointExistsError, CoordinationError, SaveTimeoutError, StorageError
from savestream.integrations.dcp.tickets import SaveTicket
from savestream.integrations.torch import StorageReader, StorageWriter
from savestream.storage_backends.faults import Fault, FaultyBackend
from savestream.storage_backends.file import FileBackend
from savestream.storage_backends.memory import MemoryBackend

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((1000,), value), "deep": {"v": int(value)}}


@pytest.mark.parametrize("kind", ["write", "put", "create", "head"])
def test_a_failed_save_leaves_nothing(tmp_path: Path, kind: Any) -> None:
    writer = StorageWriter((FaultyBackend(FileBackend(tmp_path), [Fault(kind, 28)]), "c"))
    with pytest.raises(dcp.CheckpointException, match="injected") as caught:
        save(state(1), writer)
    error = caught.value.failures[0][0]
    assert isinstance(error, StorageError)
    assert error.errno == 28
    del caught, writer, error
    settle()
    assert not files_beneath(tmp_path)


@pytest.mark.parametrize("kind", ["finish", "put", "replace"])
def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path: Path, kind: Any) -> None:
    save(state(1), StorageWriter(tmp_path / "c"))
    before = files_beneath(tmp_path)
    writer = StorageWriter((FaultyBackend(FileBackend(tmp_path), [Fault(kind, 5)]), "c"))
    with pytest.raises(dcp.CheckpointException, match="injected"):
        save(state(2), writer)
    assert_same_state(load(state(0), StorageReader(tmp_path / "c")), state(1))
    del writer
    settle()
    assert files_beneath(tmp_path) == before
    save(state(3), StorageWriter(tmp_path / "c"))
    assert_same_state(load(state(0), StorageReader(tmp_path / "c")), state(3))
    assert len(files_beneath(tmp_path)) == len(before)
    assert files_beneath(tmp_path) & before == {"c/manifest.json"}


def test_the_writers_next_save_removes_what_the_failed_one_left(tmp_path: Path) -> None:
    writer = StorageWriter((FaultyBackend(FileBackend(tmp_path), [Fault("put", 28)]), "c"))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(state(1), writer)
    save(state(2), writer)
    assert {name.split("/")[1] for name in files_beneath(tmp_path)} - {"manifest.json"} == {
        StorageReader(tmp_path / "c").read_metadata().storage_meta.save_id
    }
    assert caught.value.failures


def test_without_overwriting_nothing_is_staged(tmp_path: Path) -> None:
    save(state(1), StorageWriter(tmp_path / "c"))
    before = files_beneath(tmp_path)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise AssertionError("something was resolved")

    with pytest.raises(dcp.CheckpointException, match="already there") as caught:
        save(state(2), StorageWriter(tmp_path / "c", overwrite=False), planner=Planner())
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    assert files_beneath(tmp_path) == before


def test_another_save_that_commits_first_is_left_alone(tmp_path: Path) -> None:
    for overwrite in (False, True):
        place = tmp_path / str(overwrite)
        if overwrite:
            save(state(1), StorageWriter(place))
        winner: list[Any] = []
        fault = Fault("put", hook=lambda _, to=place, won=winner: won.append(save(state(2), StorageWriter(to))))
        writer = StorageWriter((FaultyBackend(FileBackend(place), [fault]), ""), overwrite=overwrite)
        with pytest.raises(dcp.CheckpointException, match="another save committed here first"):
            save(state(3), writer)
        assert winner
        assert_same_state(load(state(0), StorageReader(place)), state(2))
        savestream.blocking.verify(place)
        assert len({name.split("/")[0] for name in files_beneath(place)}) == 2


def test_an_unknown_outcome_keeps_the_data() -> None:
    """The commit took place and its answer was lost."""
    memory = MemoryBackend("unknown")

    def lost(_: object) -> StorageError:
        return StorageError(5, "the answer was lost", "unknown")

    writer = StorageWriter((FaultyBackend(memory, [Fault("create", lost, after=True)]), "c"))
    with pytest.raises(dcp.CheckpointException, match="lost") as caught:
        save(state(1), writer)
    assert caught.value.failures[0][0].outcome == "unknown"
    del caught, writer
    settle()
    assert_same_state(load(state(0), StorageReader((memory, "c"))), state(1))


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_timeout(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "c" if kind == "file" else (MemoryBackend("slow"), "c")
    options = SaveOptions(timeout_seconds=0.1, write_bytes_per_second=1.0)  # which would take an hour
    with pytest.raises(dcp.CheckpointException, match=r"timeout_seconds=0\.1") as caught:
        save(state(1), StorageWriter(place, options=options))
    assert isinstance(caught.value.failures[0][0], SaveTimeoutError)
    assert not savestream.blocking.exists(place)


def test_foreign_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("somebody else's")
    with pytest.raises(dcp.CheckpointException, match="not savestream's"):
        save(state(1), StorageWriter(tmp_path))
    assert (tmp_path / "manifest.json").read_text() == "somebody else's"


def test_failed_loads_keep_nothing_of_the_state(tmp_path: Path) -> None:
    save(state(1), StorageWriter(tmp_path / "c"))
    target = state(0)
    alive = weakref.ref(target["x"])

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            raise ValueError("failed")

    with pytest.raises(dcp.CheckpointException, match="failed"):
        load(target, StorageReader(tmp_path / "c"), planner=Planner())
    del target
    gc.collect()
    assert alive() is None


def test_saves_one_after_the_other_keep_nothing(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    for number in range(3):
        content = state(number)
        alive = weakref.ref(content["x"])
        save(content, writer)
        del content
        gc.collect()
        assert alive() is None
    assert len(files_beneath(tmp_path)) == 3


def test_a_checkpoint_that_is_overwritten_during_a_load_is_said_to_be_replaced(tmp_path: Path) -> None:
    """The plan was made for what is no longer there; torch cannot start over."""
    save(state(1), StorageWriter(tmp_path / "c"))

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            save(state(2), StorageWriter(tmp_path / "c"))
            return new_plan

    with pytest.raises(dcp.CheckpointException, match=r"overwritten while it was being loaded.*load again") as caught:
        load(state(0), StorageReader(tmp_path / "c"), planner=Planner())
    assert isinstance(caught.value.failures[0][0], CoordinationError)
    assert_same_state(load(state(0), StorageReader(tmp_path / "c")), state(2))


INTERRUPTED = """
import signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from savestream.integrations.torch import StorageWriter
from savestream.storage_backends.faults import Fault, FaultyBackend
from savestream.storage_backends.file import FileBackend
import anyio
warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored from the start where a shell started the tests so

async def announce(_):
    print("writing", flush=True)
    await anyio.sleep_forever()

backend = FaultyBackend(FileBackend(sys.argv[1]), [Fault("open_writer", hook=announce)])
writer = StorageWriter((backend, "c"))
try:
    dcp.save({"x": torch.ones(1000)}, storage_writer=writer)
except dcp.CheckpointException as error:
    print("interrupted" if isinstance(error.failures[0][0], KeyboardInterrupt) else repr(error), flush=True)
"""


def test_an_interrupt_ends_the_writing(tmp_path: Path) -> None:
    """torch turns it into its own exception; the write has been cancelled and nothing stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert rest == "interrupted\n"
    assert not files_beneath(tmp_path)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """SIGINT as Python handles it, also where it is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_during_the_commit_never_removes_what_may_be_visible(tmp_path: Path, fails: bool) -> None:
    def interrupt(_: object) -> None:
        _thread.interrupt_main()  # the commit goes on all the same: it is shielded

    fault = Fault("create", 28 if fails else None, hook=interrupt)
    writer = StorageWriter((FaultyBackend(FileBackend(tmp_path), [fault]), "c"))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(state(1), writer)
    assert isinstance(caught.value.failures[0][0], KeyboardInterrupt)
    del caught, writer
    settle()
    if fails:
        assert not files_beneath(tmp_path)
    else:
        assert_same_state(load(state(0), StorageReader(tmp_path / "c")), state(1))


# --- tickets ----------------------------------------------------------------------------------------------


def _other_rank(place: Path, rank: int | None = 1) -> Any:
    writer = StorageWriter(place)
    writer.set_up_storage_writer(False, rank=rank)
    return writer


def _plan(ticket: object) -> Any:
    import pickle

    return pickle.loads(pickle.dumps(dcp.SavePlan([], storage_data=ticket)))


def test_the_ticket_that_arrived_counts(tmp_path: Path) -> None:
    writer = _other_rank(tmp_path)
    stale = SaveTicket("a" * 32, 1, 2)
    _plan(SaveTicket("b" * 32, 1, 2))
    _plan(SaveTicket("c" * 32, 1, 2))  # a later one is somebody's copy of an old plan
    assert writer._attempt.identify(dcp.SavePlan([], storage_data=stale)) == ("b" * 32, 1)
    again = _other_rank(tmp_path)  # the next save in this thread starts with an empty inbox
    assert again._attempt.identify(dcp.SavePlan([], storage_data=stale)) == ("a" * 32, 1)


def test_a_plan_without_a_ticket_is_refused(tmp_path: Path) -> None:
    writer = _other_rank(tmp_path)
    with pytest.raises(CoordinationError, match="without the save's id"):
        writer.write_data(dcp.SavePlan([]), dcp.DefaultSavePlanner())
    with pytest.raises(CoordinationError, match="without the save's id"):
        writer.write_data(dcp.SavePlan([], storage_data="of another writer"), dcp.DefaultSavePlanner())
    with pytest.raises(CoordinationError, match="rank 1 was sent the plan of rank 2"):
        writer.write_data(_plan(SaveTicket("a" * 32, 2, 3)), dcp.DefaultSavePlanner())
    unnumbered = _other_rank(tmp_path, None)  # older releases of torch do not tell
    assert unnumbered._attempt.identify(_plan(SaveTicket("a" * 32, 2, 3))) == ("a" * 32, 2)


def test_tickets_of_other_threads_do_not_arrive_here(tmp_path: Path) -> None:
    writer = _other_rank(tmp_path)
    other: list[Any] = []

    def elsewhere() -> None:
        there = _other_rank(tmp_path)
        _plan(SaveTicket("b" * 32, 1, 2))
        other.append(there._attempt.identify(dcp.SavePlan([])))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert other == [("b" * 32, 1)]
    assert writer._attempt.inbox.ticket is None
