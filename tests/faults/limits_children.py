"""What the tests of real limits run in processes of their own; each prints what it found."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import resource
import sys
import tempfile

import numpy as np

import savestream
from savestream import blocking
from savestream.errors import StorageError

RAW = savestream.SaveOptions(compression="none")


def report(error: StorageError) -> None:
    number = errno.errorcode[error.errno] if error.errno is not None else None
    print("StorageError", number, error.outcome, str(error).replace("\n", " "), flush=True)


def entries(place: str) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in pathlib.Path(place).rglob("*"))


def file_size(place: str) -> None:
    """A file may not grow beyond 1 MiB; afterwards a smaller state is saved."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    blocking.save({"small": np.arange(10)}, f"{place}/old")
    for number in range(3):
        try:
            blocking.save({"large": np.random.default_rng(number).random(1 << 19)}, f"{place}/new", options=RAW)
        except StorageError as error:
            report(error)
    print(entries(f"{place}/new") if os.path.exists(f"{place}/new") else "nothing")
    blocking.save({"small": np.arange(20)}, f"{place}/new")
    assert blocking.load(f"{place}/new")["small"].tolist() == list(range(20))
    assert blocking.load(f"{place}/old")["small"].tolist() == list(range(10))


def full_disk(place: str) -> None:
    """A file system of 8 MiB; a state that fits, one that does not, the first again after space has been freed."""
    fits, too_large = {"a": np.arange(1 << 18)}, {"a": np.random.default_rng(1).random(1 << 21)}
    blocking.save(fits, f"{place}/old", options=RAW)
    before = entries(place)
    for stage in ("save", "eager", "overwrite"):
        try:
            if stage == "eager":
                blocking.start_save(too_large, f"{place}/new", options=RAW).result()
            elif stage == "overwrite":
                blocking.save(too_large, f"{place}/old", options=RAW, overwrite=True)
            else:
                blocking.save(too_large, f"{place}/new", options=RAW)
        except StorageError as error:
            report(error)
        assert entries(place) == before, entries(place)
        assert blocking.load(f"{place}/old")["a"].tobytes() == fits["a"].tobytes()
    blocking.save(fits, f"{place}/new", options=RAW)
    blocking.verify(f"{place}/new")


def few_descriptors(place: str) -> None:
    """Thousands of leaves need no more than a handful of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    state = {f"leaf{number}": np.full(1 + number % 50, number) for number in range(5000)}
    blocking.save(state, f"{place}/step")
    found = blocking.load(f"{place}/step")
    target = {key: np.empty_like(value) for key, value in state.items()}
    blocking.load(f"{place}/step", target)
    assert all(np.array_equal(found[key], value) and np.array_equal(target[key], value) for key, value in state.items())
    print("loaded", len(found))


def no_descriptors(place: str) -> None:
    """Every descriptor is taken; with some given back the same calls work."""
    blocking.save({"a": np.arange(5)}, f"{place}/old")
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    taken = []
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    for free in range(6):
        for attempt in (
            lambda: blocking.save({"a": np.arange(5)}, f"{place}/new"),
            lambda: blocking.load(f"{place}/old"),
            lambda: blocking.list_checkpoints(place),
        ):
            try:
                attempt()
            except StorageError as error:
                report(error)
            except savestream.CheckpointExistsError:
                assert free
        os.close(taken.pop())
    for descriptor in taken:
        os.close(descriptor)
    if not blocking.exists(f"{place}/new"):
        blocking.save({"a": np.arange(5)}, f"{place}/new")
    assert blocking.load(f"{place}/new")["a"].tolist() == blocking.load(f"{place}/old")["a"].tolist()
    print("works again")


def without_write_access(place: str, *, refused: bool = True) -> None:
    """Load everything in a tree that may only be read, then try to save into it."""
    state = blocking.load(f"{place}/old")
    target = {key: np.zeros_like(value) for key, value in state.items()}
    blocking.load(f"{place}/old", target)
    blocking.verify(f"{place}/old")
    assert [entry.name for entry in blocking.list_checkpoints(place)] == ["old"]
    assert target["a"].tolist() == state["a"].tolist() == [0, 1, 2, 3, 4]
    print("loaded")

    for save in (
        lambda: blocking.save({"a": np.arange(5)}, f"{place}/new"),
        lambda: blocking.save({"a": np.arange(5)}, f"{place}/old", overwrite=True),
        lambda: blocking.save({"a": np.arange(5)}, f"{place}/deep/er/new"),
        lambda: blocking.start_save({"a": np.arange(5)}, f"{place}/new").result(),
    ):
        try:
            save()
        except StorageError as error:
            report(error)
        except savestream.CheckpointExistsError:
            assert not refused
    try:
        blocking.delete(f"{place}/{'old' if refused else 'new'}")
    except StorageError as error:
        report(error)
    except savestream.CheckpointNotFoundError:
        assert not refused
    assert blocking.load(f"{place}/old")["a"].tolist() == [0, 1, 2, 3, 4]


def nobody(place: str) -> None:
    """As :func:`without_write_access`, as a user to whom permissions apply.

    That user may be unable to read Python's own library: everything is imported, by use, before.
    """
    with tempfile.TemporaryDirectory() as elsewhere:
        blocking.save({"a": np.arange(5)}, f"{elsewhere}/old")
        with contextlib.redirect_stdout(io.StringIO()):
            without_write_access(elsewhere, refused=False)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    without_write_access(place)


def umask(place: str) -> None:
    os.umask(0o027)
    state = {"a": np.arange(1 << 18), "b": 1}
    blocking.save(state, f"{place}/all/step")
    blocking.save(state, f"{place}/all/step", overwrite=True)
    for path in [pathlib.Path(place, "all"), *sorted(pathlib.Path(place, "all").rglob("*"))]:
        print("directory" if path.is_dir() else "file", oct(path.stat().st_mode & 0o7777))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
