"""The commit on files: the order of its steps, and what is there after each of them failed."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from conformance import PAGE, aligned, pattern, refused, write_object
from file_support import Failing, open_descriptors

from savestream.storage_backends import FileBackend

pytestmark = pytest.mark.skipif(os.name != "posix", reason="directory descriptors are POSIX")

SCRATCH = "id/manifest.tmp"


@pytest.fixture
def backend(tmp_path):
    return FileBackend(tmp_path / "root")


@pytest.fixture
def calls(monkeypatch, backend):
    """Every fsync, link, move and unlink, with the names of what they touch, in order."""
    noted = []

    def note(name, describe):
        original = getattr(os, name)

        def noting(*arguments, **keywords):
            described = describe(*arguments)
            result = original(*arguments, **keywords)
            noted.append((name, *described))
            return result

        monkeypatch.setattr(os, name, noting)

    def place(descriptor):
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), backend.root)
        return (path,)

    note("fsync", place)
    note("mkdir", lambda path, *rest: (os.path.basename(path),))
    note("link", lambda first, second: (first, second))
    note("replace", lambda first, second: (first, second))
    note("unlink", lambda name: (name,))
    return noted


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors come from /proc")
async def test_create_makes_everything_durable_before_and_after_it_appears(backend, calls):
    await backend.create("c/manifest.json", b"{}", scratch="c/id/manifest.tmp")
    assert calls == [
        ("mkdir", "root"),
        ("fsync", ".."),
        ("mkdir", "c"),
        ("fsync", "."),
        ("mkdir", "id"),
        ("fsync", "c"),
        ("fsync", "c/id/manifest.tmp"),
        ("fsync", "c/id"),
        ("fsync", "c"),
        ("fsync", "."),
        ("link", "manifest.tmp", "manifest.json"),
        ("fsync", "c"),
        ("unlink", "manifest.tmp"),
        ("fsync", "c"),  # the scratch file's directory, empty now, is gone
    ]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors come from /proc")
async def test_replace_in_order(backend, calls):
    await backend.create("manifest.json", b"old", scratch=SCRATCH)
    calls.clear()
    await backend.replace("manifest.json", b"new", scratch=SCRATCH, expected_etag=None)
    assert calls == [
        ("mkdir", "id"),
        ("fsync", "."),
        ("fsync", SCRATCH),
        ("fsync", "id"),
        ("fsync", "."),
        ("replace", "manifest.tmp", "manifest.json"),
        ("fsync", "."),
    ]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors come from /proc")
async def test_data_objects_and_deletions_are_durable(backend, calls):
    await backend.put("c/other", b"x")
    calls.clear()
    await write_object(backend, "c/a.bin", b"data")
    assert calls == [("fsync", "c/a.bin"), ("fsync", "c")]
    calls.clear()
    await backend.delete(["c/a.bin"])
    assert calls == [("unlink", "a.bin"), ("fsync", "c")]


# The fsyncs of one create in an existing tree, in order: scratch file, its directory, root, then after the link root.
@pytest.mark.parametrize(("nth", "outcome"), [(2, "failed"), (3, "failed"), (4, "failed"), (5, "unknown")])
@pytest.mark.parametrize("operation", ["create", "replace"])
async def test_each_fsync_that_fails_is_final(backend, monkeypatch, nth, outcome, operation):
    await backend.put("other", b"x")
    (pathlib.Path(backend.root) / "id").mkdir()
    failing = Failing(monkeypatch, "fsync", errno.EIO, nth=nth - 1, times=1)
    with refused(errno.EIO, match=r"manifest\.(json|tmp) failed") as caught:
        if operation == "create":
            await backend.create("manifest.json", b"{}", scratch=SCRATCH)
        else:
            await backend.replace("manifest.json", b"{}", scratch=SCRATCH, expected_etag=None)
    assert caught.value.outcome == outcome
    assert ("look again" in str(caught.value)) == (outcome == "unknown")
    assert (await backend.head("manifest.json") is None) == (outcome == "failed")
    assert await backend.head(SCRATCH) is None
    assert failing.calls == nth - 1, "a failed fsync must be the last"
    assert (pathlib.Path(backend.root) / "id").is_dir(), "the directory is not this backend's to remove"


@pytest.mark.parametrize("nth", [1, 2])
async def test_a_failed_fsync_of_data_fails_the_object_for_good(backend, monkeypatch, nth):
    await backend.put("other", b"x")
    failing = Failing(monkeypatch, "fsync", errno.EIO, nth=nth, times=1)
    async with await backend.open_writer("a.bin") as writer:
        await writer.write(0, aligned(pattern(PAGE)))
        with refused(errno.EIO, match="durable"):
            await writer.finish(PAGE)
        with refused(errno.EBADF):
            await writer.finish(PAGE)
    assert failing.calls == nth
    assert await backend.head("a.bin") is None


@pytest.mark.parametrize(
    ("call", "nth"),
    [("open", 1), ("link", 1), *(("mkdir", n) for n in (1, 2, 3)), *(("fsync", n) for n in (1, 3, 4, 7))],
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_a_failed_create_leaves_nothing_and_the_next_succeeds(backend, monkeypatch, call, nth, number):
    before = open_descriptors()
    with monkeypatch.context() as patch:
        only_new = (lambda name, flags, *rest, **keywords: bool(flags & os.O_CREAT)) if call == "open" else None
        Failing(patch, call, number, nth=nth, times=1, when=only_new)
        with refused(number, match="choose another place|quota"):
            await backend.create("c/manifest.json", b"{}", scratch="c/id/manifest.tmp")
    assert await backend.list_objects("") == []
    assert await backend.list_directories("") == []
    assert open_descriptors() == before
    await backend.create("c/manifest.json", b"{}", scratch="c/id/manifest.tmp")
    assert await backend.get("c/manifest.json", maximum_bytes=10) == b"{}"


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
async def test_an_error_of_a_link_that_was_made_is_success(backend, monkeypatch, error):
    """A network file system may repeat a request whose answer was lost."""
    original = os.link

    def link(*arguments, **keywords):
        original(*arguments, **keywords)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", link)
    await backend.create("manifest.json", b"{}", scratch=SCRATCH)
    assert await backend.get("manifest.json", maximum_bytes=10) == b"{}"


async def test_an_error_of_a_move_that_was_made_is_success(backend, monkeypatch):
    original = os.replace

    def replace(*arguments, **keywords):
        original(*arguments, **keywords)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    await backend.put("manifest.json", b"old")
    monkeypatch.setattr(os, "replace", replace)
    await backend.replace("manifest.json", b"{}", scratch=SCRATCH, expected_etag=None)
    assert await backend.get("manifest.json", maximum_bytes=10) == b"{}"


async def test_what_cannot_be_looked_at_is_unknown(backend, monkeypatch):
    await backend.put("other", b"x")
    Failing(monkeypatch, "link", errno.EIO)
    Failing(monkeypatch, "open", errno.EACCES, when=lambda name, *rest, **keywords: name == "manifest.json")
    with refused(errno.EACCES) as caught:
        await backend.create("manifest.json", b"{}", scratch=SCRATCH)
    assert caught.value.outcome == "unknown"


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV]
)
async def test_without_links_the_weaker_promise_is_said_once(backend, monkeypatch, caplog, number):
    Failing(monkeypatch, "link", number)
    assert not backend.links_refused
    with caplog.at_level(logging.WARNING, logger="savestream"):
        await backend.create("a", b"{}", scratch=SCRATCH)
        await backend.create("b", b"{}", scratch=SCRATCH)
        with refused(errno.EEXIST):
            await backend.create("a", b"[]", scratch=SCRATCH)
    assert backend.links_refused
    assert backend.capabilities.conditional_create
    assert [record.message.count("without hard links") for record in caplog.records] == [1]
    assert [info.path for info in await backend.list_objects("")] == ["a", "b"]


async def test_a_scratch_file_that_cannot_be_removed_does_not_fail_the_commit(backend, monkeypatch, caplog):
    await backend.put("id/part", b"x")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="savestream"):
        Failing(patch, "unlink", errno.EIO, nth=2)
        await backend.create("manifest.json", b"{}", scratch=SCRATCH)
    assert "stays behind" in caplog.text
    assert [info.path for info in await backend.list_objects("")] == [SCRATCH, "id/part", "manifest.json"]
    # The leftover is the manifest's other name: using it again must not write through it.
    with refused(errno.EEXIST):
        await backend.create("manifest.json", b"[]", scratch=SCRATCH)
    await backend.put(SCRATCH, b"else")
    assert await backend.get("manifest.json", maximum_bytes=10) == b"{}"


async def test_a_failed_put_leaves_the_old_object(backend, monkeypatch):
    await backend.put("a", b"old")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            Failing(patch, call, errno.ENOSPC)
            with refused(errno.ENOSPC, match="writing .*free space"):
                await backend.put("a", b"new")
        assert await backend.get("a", maximum_bytes=10) == b"old"
        assert [info.path for info in await backend.list_objects("")] == ["a"]


RACER = """
    import asyncio, os, sys
    from savestream.errors import StorageError
    from savestream.storage_backends import FileBackend

    root, me, rounds, links = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "links"
    if not links:
        def link(*arguments, **keywords):
            raise PermissionError(1, "no links here")
        os.link = link

    async def main():
        for number in range(rounds):
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                await FileBackend(root).create(f"{number}/manifest.json", me.encode(), scratch=f"{number}/{me}/tmp")
            except StorageError as error:
                print("lost", error.errno, flush=True)
            else:
                print("won", flush=True)

    asyncio.run(main())
"""


@pytest.mark.parametrize("links", ["links", "no links"])
def test_of_two_racing_processes_one_wins(tmp_path, links):
    rounds = 20
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RACER), str(tmp_path / "root"), name, str(rounds), links],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("left", "right")
    ]
    try:
        for number in range(rounds):
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
            for racer in racers:
                racer.stdin.write("go\n")
            for racer in racers:
                racer.stdin.flush()
            outcomes = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(outcomes) == [f"lost {errno.EEXIST}", "won"]
            winner = ("left", "right")[outcomes.index("won")]
            assert (tmp_path / "root" / str(number) / "manifest.json").read_text() == winner
    finally:
        for racer in racers:
            racer.stdin.close()
            racer.wait(30)
            racer.stdout.close()
