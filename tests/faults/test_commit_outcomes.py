"""What becomes of a save whose commit went wrong, of places that are not savestream's, and of a program's last save."""

from __future__ import annotations

import errno
import pathlib
import subprocess
import sys

import pytest
from fault_support import assert_same, everything, make_state, save_in_mode

import savestream
from savestream import CheckpointExistsError, CheckpointNotFoundError, PlanError, StorageError, blocking
from savestream.pipeline import iteration
from savestream.storage_backends import Fault, FaultyBackend, FileBackend, MemoryBackend

OLD, NEW, OTHER = make_state(1), make_state(2), make_state(3)
MODES = ["save", "eager"]


@pytest.fixture(params=["file", "memory"])
def plain(request, tmp_path):
    return FileBackend(tmp_path / "store") if request.param == "file" else MemoryBackend("store")


def ids_of(found):
    """The save ids under which something lies at "c"."""
    return {pathlib.PurePosixPath(path).parts[1] for path in found} - {"manifest.json"}


# --- the commit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_that_took_place_and_then_raised_is_never_taken_back(plain, mode, overwrite):
    if overwrite:
        await savestream.save(OLD, (plain, "c"))
    fault = Fault("replace" if overwrite else "create", RuntimeError("a bug in the backend"), after=True)
    with pytest.raises(StorageError, match=r"a bug in the backend; the checkpoint may be visible") as caught:
        await save_in_mode(mode, NEW, (FaultyBackend(plain, [fault]), "c"), overwrite=overwrite)
    assert caught.value.outcome == "unknown"
    assert fault.hits == 1
    assert_same(await savestream.load((plain, "c")), NEW)
    await savestream.verify((plain, "c"))


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_repeated_request_that_meets_its_own_commit_has_succeeded(plain, mode, overwrite):
    """The reply was lost; the client's own repetition is answered with "exists"."""
    if overwrite:
        await savestream.save(OLD, (plain, "c"))
    fault = Fault("replace" if overwrite else "create", errno.EEXIST, after=True)
    info = await save_in_mode(mode, NEW, (FaultyBackend(plain, [fault]), "c"), overwrite=overwrite)
    assert fault.hits == 1
    assert (await savestream.read_manifest((plain, "c"))).save_id == info.save_id
    assert_same(await savestream.load((plain, "c")), NEW)
    assert ids_of(await everything(plain)) == {info.save_id}


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, RuntimeError("lost")], ids=["exists", "io", "runtime"])
@pytest.mark.parametrize("reading", ["head", "get"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_that_cannot_be_read_back_keeps_its_data(plain, mode, reading, error):
    commit = Fault("create", error, after=True)
    unreadable = Fault(reading, RuntimeError("no answer"), path_contains="manifest.json", times=None)
    backend = FaultyBackend(plain, [commit])
    commit.hook = lambda _: backend.faults.append(unreadable)
    with pytest.raises(StorageError) as caught:
        await save_in_mode(mode, NEW, (backend, "c"))
    assert caught.value.outcome == "unknown"
    assert unreadable.hits
    assert_same(await savestream.load((plain, "c")), NEW)


@pytest.mark.parametrize("kind", ["list", "delete"])
@pytest.mark.parametrize("error", [RuntimeError("a bug in the backend"), errno.EIO], ids=["runtime", "io"])
@pytest.mark.parametrize("mode", MODES)
async def test_superseded_data_that_cannot_be_removed_fails_no_save(plain, mode, error, kind, caplog):
    await savestream.save(OLD, (plain, "c"))
    backend = FaultyBackend(plain)
    fault = Fault(kind, error, times=None)
    backend.faults.append(Fault("replace", after=True, hook=lambda _: backend.faults.append(fault)))
    info = await save_in_mode(mode, NEW, (backend, "c"), overwrite=True)
    assert fault.hits
    assert "the replaced data could not be removed" in caplog.text
    assert (await savestream.read_manifest((plain, "c"))).save_id == info.save_id
    assert_same(await savestream.load((plain, "c")), NEW)


@pytest.mark.parametrize(
    ("overwrite", "cure"), [(False, "pass overwrite=True"), (True, "save again")], ids=["fresh", "overwrite"]
)
@pytest.mark.parametrize("mode", MODES)
async def test_the_loser_of_a_commit_is_told_how_to_go_on_and_leaves_nothing(plain, mode, overwrite, cure):
    if overwrite:
        await savestream.save(OLD, (plain, "c"))
    winner = []

    async def commit_first(_operation):
        winner.append(await savestream.save(OTHER, (plain, "c"), overwrite=overwrite))

    fault = Fault("replace" if overwrite else "create", hook=commit_first)
    with pytest.raises(CheckpointExistsError, match=cure) as caught:
        await save_in_mode(mode, NEW, (FaultyBackend(plain, [fault]), "c"), overwrite=overwrite)
    assert ("overwrite=True" in str(caught.value)) != overwrite
    assert ids_of(await everything(plain)) == {winner[0].save_id}
    assert_same(await savestream.load((plain, "c")), OTHER)


@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
async def test_another_commit_between_the_two_looks_at_the_destination(plain, overwrite):
    """What is looked at first decides nothing that a later look contradicts."""

    async def commit_first(_operation):
        await savestream.save(OTHER, (plain, "c"))

    fault = Fault("head", path_contains="manifest.json", after=True, hook=commit_first)
    with pytest.raises(CheckpointExistsError, match="save again" if overwrite else "pass overwrite=True"):
        await savestream.save(NEW, (FaultyBackend(plain, [fault]), "c"), overwrite=overwrite)
    assert_same(await savestream.load((plain, "c")), OTHER)
    assert len(ids_of(await everything(plain))) == 1


# --- what a planner does around the commit ----------------------------------------------------------------


class Dropping(savestream.DefaultSavePlanner):
    """Forgets an item of the plan whose metadata lists it."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def finish_plan(self, new_plan):
        plan = super().finish_plan(new_plan)
        return savestream.planners.SavePlan(
            [item for item in plan.items if item.index.fqn != self.name], planner_data=plan.planner_data
        )


@pytest.mark.parametrize("name", ["model.bias", "empty", "step", "large"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_plan_that_writes_less_than_its_metadata_lists_is_refused_by_key(plain, mode, name):
    state = {**NEW, "large": bytes(100_000)}
    with pytest.raises(PlanError, match=rf"^{name}: .*no item of the finished plan writes"):
        await save_in_mode(mode, state, (plain, "c"), planner=Dropping(name))
    assert await everything(plain) == {}


@pytest.mark.parametrize("error", [ValueError("too late"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("mode", MODES)
async def test_a_planner_that_fails_after_the_commit_fails_no_save(plain, mode, error, caplog):
    class Late(savestream.DefaultSavePlanner):
        def commit_plan(self):
            raise error

    info = await save_in_mode(mode, NEW, (plain, "c"), planner=Late())
    assert info.save_id
    assert "committed, but the planner's commit_plan failed" in caplog.text
    assert_same(await savestream.load((plain, "c")), NEW)


async def test_every_planner_is_told_of_the_commit(plain):
    class Wrapping(savestream.SavePlanner):
        """Not derived from the default planner, only made of one."""

        def __init__(self):
            self.inner = savestream.DefaultSavePlanner()
            self.commits = 0

        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_local_plan(self):
            return self.inner.create_local_plan()

        def create_global_plan(self, all_plans):
            return self.inner.create_global_plan(all_plans)

        def finish_plan(self, new_plan):
            return self.inner.finish_plan(new_plan)

        def resolve_data(self, write_item):
            return self.inner.resolve_data(write_item)

        def commit_plan(self):
            self.commits += 1

    planner = Wrapping()
    with pytest.raises(StorageError):
        await savestream.save(NEW, (FaultyBackend(plain, [Fault("create", errno.EIO)]), "c"), planner=planner)
    assert planner.commits == 0
    await savestream.save(NEW, (plain, "c"), planner=planner)
    assert planner.commits == 1
    assert_same(await savestream.load((plain, "c")), NEW)


# --- a reader that is overtaken ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["overwritten", "deleted"])
async def test_iterating_over_what_changes_meanwhile_says_so(plain, what, monkeypatch):
    monkeypatch.setattr(iteration, "_ITERATION_BYTES", 1)  # one array at a time
    await savestream.save(OLD, (plain, "c"))
    arrays = savestream.iter_arrays((plain, "c"))
    key, array = await anext(arrays)
    assert_same({key: array}, {"model.weight": OLD["model"]["weight"]})
    if what == "overwritten":
        await savestream.save(NEW, (plain, "c"), overwrite=True)
        expected, message = savestream.CorruptCheckpointError, r"c: it was overwritten while it was iterated over"
    else:
        await savestream.delete((plain, "c"))
        expected, message = CheckpointNotFoundError, r"c: it was deleted while it was iterated over"
    with pytest.raises(expected, match=message):
        await anext(arrays)


# --- places that are somebody else's ----------------------------------------------------------------------

FOREIGN = {
    "json": b'{"name": "my web app", "icons": []}',
    "empty": b"",
    "short": b"{}",
    "similar": b'{"format":"savestream-index","version":[1,0]}',
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_manifest_of_somebody_else_is_left_alone(plain, name):
    await plain.put("c/manifest.json", FOREIGN[name])
    await plain.put("c/notes.txt", b"mine")
    before = await everything(plain)
    assert not await savestream.exists((plain, "c"))
    assert await savestream.list_checkpoints((plain, "")) == []
    with pytest.raises((CheckpointNotFoundError, StorageError), match=r"c"):
        await savestream.delete((plain, "c"))
    for overwrite in (False, True):
        for mode in MODES:
            with pytest.raises(StorageError, match=r"is not savestream's.*Save to another directory") as caught:
                await save_in_mode(mode, NEW, (plain, "c"), overwrite=overwrite)
            assert caught.value.errno == errno.EEXIST
            assert not isinstance(caught.value, CheckpointExistsError)
    assert await everything(plain) == before


@pytest.mark.parametrize("position", [0, 3, 12, 22])
async def test_a_root_of_our_own_that_is_damaged_is_still_ours(plain, position):
    await savestream.save(NEW, (plain, "c"))
    await plain.put("c/notes.txt", b"mine")
    data = bytearray((await everything(plain))["c/manifest.json"])
    data[position] ^= 4
    await plain.put("c/manifest.json", bytes(data))
    assert await savestream.exists((plain, "c"))
    assert [entry.name for entry in await savestream.list_checkpoints((plain, ""))] == ["c"]
    with pytest.raises(savestream.CorruptCheckpointError):
        await savestream.load((plain, "c"))
    with pytest.raises(CheckpointExistsError):
        await savestream.save(NEW, (plain, "c"))
    await savestream.delete((plain, "c"))
    assert list(await everything(plain)) == ["c/notes.txt"]
    await savestream.save(OLD, (plain, "c"))
    assert_same(await savestream.load((plain, "c")), OLD)


async def test_what_is_missing_is_said(plain):
    for step in (3, 12):
        await savestream.save(NEW, (plain, f"run/step-{step:012d}"))
    with pytest.raises(CheckpointNotFoundError, match=r"run: .* holds 2; load one of them, such as .*0012 "):
        await savestream.load((plain, "run"))
    with pytest.raises(CheckpointNotFoundError, match=r"name its directory, not the manifest\.json in it"):
        await savestream.load((plain, "run/step-000000000003/manifest.json"))
    with pytest.raises(CheckpointNotFoundError, match=r"elsewhere: no checkpoint \(there is no manifest\.json\)"):
        await savestream.load((plain, "elsewhere"))
    messages = []

    async def look(_operation):
        with pytest.raises(CheckpointNotFoundError) as caught:
            await savestream.load((plain, "new"))
        messages.append(str(caught.value))

    await savestream.save(NEW, (FaultyBackend(plain, [Fault("create", hook=look)]), "new"))
    assert "incomplete" in messages[0]
    assert "still runs" in messages[0]


# --- the last save of a program ---------------------------------------------------------------------------

LAST = """
import asyncio, logging, sys
import numpy as np
import savestream
from savestream import blocking, SaveOptions
from savestream.storage_backends import Fault, FaultyBackend, FileBackend

place, form, keep, overwrite, fails = sys.argv[1:]
logging.basicConfig(stream=sys.stderr)
state = {"w": np.full(50_000, 2.0)}
dest = (FaultyBackend(FileBackend(place), [Fault("create" if overwrite == "fresh" else "replace", 28)]), "")
dest = dest if fails == "fails" else place
if overwrite == "overwrite":
    blocking.save({"w": np.full(50_000, 1.0)}, place)
options = SaveOptions(write_bytes_per_second=8e6, compression="none")
arguments = {"options": options, "overwrite": overwrite == "overwrite"}
kept = []

async def main():
    handle = await savestream.start_save(state, dest, **arguments)
    if keep == "kept":
        kept.append(handle)

if form == "async":
    asyncio.run(main())
else:
    handle = blocking.start_save(state, dest, **arguments)
    if keep == "kept":
        kept.append(handle)
    del handle
"""


@pytest.mark.parametrize(
    ("form", "keep", "overwrite"),
    [
        ("blocking", "kept", "fresh"),
        ("blocking", "dropped", "overwrite"),
        ("async", "dropped", "fresh"),
        ("async", "kept", "overwrite"),
    ],
)
def test_a_save_that_starts_right_before_the_end_commits(form, keep, overwrite, tmp_path):
    done = last_program(tmp_path / "c", form, keep, overwrite, "works")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert blocking.load(tmp_path / "c")["w"].tolist() == [2.0] * 50_000
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.parametrize(("form", "keep"), [("blocking", "dropped"), ("async", "kept")])
def test_a_save_that_starts_right_before_the_end_and_fails_is_not_silent(form, keep, tmp_path):
    done = last_program(tmp_path / "c", form, keep, "fresh", "fails")
    assert "ERROR:savestream:" in done.stderr
    assert "No space left on device" in done.stderr
    assert str(tmp_path / "c") in done.stderr
    assert not blocking.exists(tmp_path / "c")


def last_program(place, *words):
    command = [sys.executable, "-c", LAST, str(place), *words]
    return subprocess.run(command, timeout=60, capture_output=True, text=True)
