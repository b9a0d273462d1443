"""Every operation of a save and of a load fails once, before and after it took effect, with each kind of error."""

from __future__ import annotations

import errno
import itertools
import os
import threading

import pytest
from fault_support import LARGE, assert_same, everything, make_state, new_backend, open_files, save_in_mode

import savestream
from savestream.errors import StorageError
from savestream.storage_backends import Fault, FaultyBackend, TracingBackend

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.EACCES]
OLD, NEW, NEXT = make_state(1), make_state(2, LARGE), make_state(3)
OPTIONS = savestream.SaveOptions(memory_budget_bytes=4 << 20, threads=2, compression="none")
# A failure to remove what a committed overwrite replaced is not a failure of the save.
CLEANUP = ("list", "delete")
# Before it is overwritten, what stands there is looked at; that it cannot be read does not protect it.
PEEKS = ("open_reader", "read_into")


async def loaded(backend, name="new"):
    return await savestream.load((backend, name))


class Scene:
    """A store that holds an older checkpoint, and a save that is about to fail."""

    def __init__(self, kind, tmp_path, *, overwrite):
        self.plain = new_backend(kind, tmp_path)
        self.overwrite = overwrite

    async def prepare(self):
        await savestream.save(OLD, (self.plain, "old"))
        if self.overwrite:
            await savestream.save(OLD, (self.plain, "new"))
        self.before = await everything(self.plain)

    async def count(self, mode):
        """The operations of this save, learnt in a store of their own kind."""
        tracing = TracingBackend(self.plain)
        await save_in_mode(mode, NEW, (tracing, "new"), options=OPTIONS, overwrite=self.overwrite)
        kinds = [record.kind for record in tracing.records]
        await self.reset()
        return kinds

    async def reset(self):
        """The store as it was before the save."""
        await savestream.delete((self.plain, "new"))
        if self.overwrite:
            await savestream.save(OLD, (self.plain, "new"))
        self.before = await everything(self.plain)

    async def check_old_alone(self):
        """Nothing new is left, and what there was is there bit by bit, so it loads as it did."""
        assert await everything(self.plain) == self.before
        assert await savestream.exists((self.plain, "new")) == self.overwrite

    async def check_new(self):
        assert_same(await loaded(self.plain), NEW)
        assert_same(await loaded(self.plain, "old"), OLD)

    async def check_next_save(self):
        await savestream.save(NEXT, (self.plain, "new"), overwrite=True)
        assert_same(await loaded(self.plain), NEXT)
        await self.reset()


@pytest.mark.parametrize(
    ("kind", "mode", "overwrite"),
    [
        ("file", "save", False),
        ("file", "save", True),
        ("file", "eager", True),
        ("file", "lazy", False),
        ("memory", "save", False),
        ("memory", "save", True),
        ("memory", "eager", False),
        ("memory", "eager", True),
        ("memory", "lazy", False),
        ("memory", "lazy", True),
    ],
)
async def test_any_operation_of_a_save_may_fail(kind, mode, overwrite, tmp_path):
    scene = Scene(kind, tmp_path, overwrite=overwrite)
    await scene.prepare()
    kinds = await scene.count(mode)
    assert {"head", "open_writer", "write", "finish", "put"} <= set(kinds)
    assert kinds.count("open_writer") > 1
    descriptors, threads = open_files(), threading.active_count()
    failed_kinds = set()
    for index in range(len(kinds)):
        # A close that fails before it took effect would leave the file open, which is not what is tested here.
        for after in (False, True) if kinds[index] != "close" else (True,):
            number = ERRORS[(2 * index + after) % len(ERRORS)]
            fault = Fault(None, number, nth=index + 1, after=after)
            hit = []
            fault.hook = hit.append
            save = save_in_mode(
                mode, NEW, (FaultyBackend(scene.plain, [fault]), "new"), options=OPTIONS, overwrite=overwrite
            )
            try:
                await save
            except StorageError as error:
                check_error(error, number, hit[0])
                if error.outcome == "unknown":
                    assert (hit[0].kind, after) in [("create", True), ("replace", True)]
                    await scene.check_new()
                    await scene.check_next_save()
                else:
                    await scene.check_old_alone()
            else:
                peeked = hit[0].kind in PEEKS and number == errno.EIO
                assert peeked or hit[0].kind in CLEANUP
                await scene.check_new()
                await scene.check_next_save()
            assert fault.hits == 1
            if hit[0].kind not in failed_kinds:
                failed_kinds.add(hit[0].kind)
                await scene.check_next_save()
    assert_same(await loaded(scene.plain, "old"), OLD)
    assert open_files() == descriptors
    assert threading.active_count() <= threads + 8


def check_error(error, number, operation):
    assert error.errno == number
    assert isinstance(error, OSError)
    assert os.strerror(number) in str(error)
    assert operation.path in str(error)


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("kind", ["open_writer", "write", "finish", "put", "create"])
@pytest.mark.parametrize("store", ["file", "memory"])
async def test_every_error_at_every_kind_of_operation(store, kind, number, tmp_path):
    scene = Scene(store, tmp_path, overwrite=False)
    await scene.prepare()
    with pytest.raises(StorageError) as caught:
        await savestream.save(NEXT, (FaultyBackend(scene.plain, [Fault(kind, number)]), "new"))
    assert (caught.value.errno, caught.value.outcome) == (number, "failed")
    await scene.check_old_alone()
    await scene.check_next_save()


@pytest.mark.parametrize("kind", ["head", "open_writer", "write", "finish", "put", "create"])
@pytest.mark.parametrize("after", [False, True])
async def test_an_untyped_error_of_a_backend_is_typed_for_the_caller(kind, after, tmp_path):
    """A backend of somebody else's may let PermissionError through as it is."""
    scene = Scene("file", tmp_path, overwrite=False)
    await scene.prepare()
    error = PermissionError(errno.EACCES, "Permission denied", "/some/place")
    with pytest.raises(StorageError, match=r"/some/place") as caught:
        await savestream.save(NEW, (FaultyBackend(scene.plain, [Fault(kind, error, after=after)]), "new"))
    assert caught.value.errno == errno.EACCES
    assert caught.value.outcome == ("unknown" if (kind, after) == ("create", True) else "failed")
    if caught.value.outcome == "unknown":
        await scene.check_new()
    else:
        await scene.check_old_alone()


@pytest.mark.parametrize("kind", ["open_writer", "write", "finish", "put", "create"])
@pytest.mark.parametrize("store", ["file", "memory"])
async def test_a_failing_clean_up_hides_neither_the_error_nor_stops_the_rest_of_it(store, kind, tmp_path, caplog):
    scene = Scene(store, tmp_path, overwrite=False)
    await scene.prepare()
    descriptors = open_files()
    faults = [Fault(kind, errno.ENOSPC, path_contains="new", nth=2 if kind in ("open_writer", "write") else 1)]
    # On files the abort fails after it took effect, or the test itself would leave them open.
    faults += [Fault("abort", errno.EIO, times=None, after=store == "file")]
    faults += [Fault(cleanup, errno.EIO, times=None, path_contains="new") for cleanup in ("list", "delete")]
    with pytest.raises(StorageError) as caught:
        await savestream.save(NEW, (FaultyBackend(scene.plain, faults), "new"), options=OPTIONS)
    assert caught.value.errno == errno.ENOSPC
    assert not await savestream.exists((scene.plain, "new"))
    assert "stays behind" in caplog.text or "could not be removed" in caplog.text
    assert_same(await loaded(scene.plain, "old"), OLD)
    await savestream.save(NEXT, (scene.plain, "new"))
    assert_same(await loaded(scene.plain), NEXT)
    assert open_files() == descriptors


async def test_one_abort_that_fails_does_not_keep_the_other_objects_open(tmp_path):
    scene = Scene("file", tmp_path, overwrite=False)
    await scene.prepare()
    descriptors = open_files()
    # The abort fails after it took effect: what remains open then is what nobody tried to close.
    faults = [Fault("put", errno.ENOSPC), Fault("abort", errno.EIO, times=None, after=True)]
    with pytest.raises(StorageError, match=r"index\.json"):
        await savestream.save(NEW, (FaultyBackend(scene.plain, faults), "new"), options=OPTIONS)
    faults = [Fault("finish", errno.ENOSPC), Fault("abort", errno.EIO, times=None, after=True)]
    with pytest.raises(StorageError, match=r"\.bin"):
        await savestream.save(NEW, (FaultyBackend(scene.plain, faults), "new"), options=OPTIONS)
    assert open_files() == descriptors
    await scene.check_old_alone()


async def test_a_commit_whose_outcome_cannot_be_learnt_keeps_its_data(tmp_path):
    """The connection breaks after the commit, and the look whether it happened fails as well."""
    for kind in ("file", "memory"):
        scene = Scene(kind, tmp_path, overwrite=False)
        await scene.prepare()
        faults = [
            Fault("create", errno.EIO, after=True),
            Fault("get", errno.EIO, path_contains="new/manifest.json", times=None),
        ]
        with pytest.raises(StorageError) as caught:
            await savestream.save(NEW, (FaultyBackend(scene.plain, faults), "new"))
        assert (caught.value.errno, caught.value.outcome) == (errno.EIO, "unknown")
        await scene.check_new()


async def raised(load, error, hit):
    """Whether the load failed; if so, it must have failed as it should."""
    found = None
    try:
        await load
    except StorageError as failure:
        found = failure
    if found is None:
        return False
    assert found.errno == (error if isinstance(error, int) else errno.EACCES)
    assert (hit[0].path if isinstance(error, int) else "/some/place") in str(found)
    return True


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("with_target", [False, True], ids=["new", "target"])
async def test_any_operation_of_a_load_may_fail(kind, with_target, tmp_path):
    plain = new_backend(kind, tmp_path)
    await savestream.save(NEW, (plain, "old"), options=OPTIONS)
    descriptors, threads = open_files(), threading.active_count()
    for kind_of_operation in ("get", "open_reader", "read_into", "close"):
        for nth in itertools.count(1):
            # A close that fails before it took effect would leave the file open, which is not what is tested here.
            for after in (False, True) if kind_of_operation != "close" else (True,):
                error = (*ERRORS, PermissionError(errno.EACCES, "refused", "/some/place"))[(nth + after) % 6]
                hit = []
                fault = Fault(kind_of_operation, error, nth=nth, after=after, hook=hit.append)
                target = make_state(5, LARGE) if with_target else None
                load = savestream.load((FaultyBackend(plain, [fault]), "old"), target)
                if await raised(load, error, hit):
                    continue
                assert not hit
            if not hit:
                break
        assert nth > 1
    assert open_files() == descriptors
    assert threading.active_count() <= threads + 8
    assert_same(await loaded(plain, "old"), NEW)


async def test_every_reader_is_closed_although_closing_one_fails(tmp_path):
    plain = new_backend("file", tmp_path)
    await savestream.save(NEW, (plain, "old"), options=OPTIONS)
    descriptors = open_files()
    faults = [Fault("close", errno.EIO, times=None, after=True)]
    with pytest.raises(StorageError):
        await loaded(FaultyBackend(plain, faults), "old")
    assert open_files() == descriptors
    assert faults[0].hits > 1
    # An error that came first is the one to see.
    faults = [Fault("read_into", errno.EMFILE), Fault("close", errno.EIO, times=None, after=True)]
    with pytest.raises(StorageError) as caught:
        await loaded(FaultyBackend(plain, faults), "old")
    assert caught.value.errno == errno.EMFILE
    assert open_files() == descriptors


@pytest.mark.parametrize("function", ["read_manifest", "verify", "exists", "list_checkpoints", "delete"])
@pytest.mark.parametrize("error", [errno.EIO, PermissionError(errno.EACCES, "refused", "/some/place")], ids=str)
async def test_every_other_function_fails_with_a_typed_error_too(function, error, tmp_path):
    plain = new_backend("memory", tmp_path)
    await savestream.save(OLD, (plain, "all/old"))
    path = "all" if function == "list_checkpoints" else "all/old"
    backend = FaultyBackend(plain, [Fault(None, error)])
    with pytest.raises(StorageError):
        await getattr(savestream, function)((backend, path))
    assert_same(await loaded(plain, "all/old"), OLD)
