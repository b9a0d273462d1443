"""What the benchmarks do to the machine, alike for every system, and what they record of it."""

from __future__ import annotations

import gc
import importlib.metadata
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["Machine", "anonymous_memory", "count_files", "describe_machine", "make_durable", "working_directory"]

Result = TypeVar("Result")

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGE_BYTES = 4096


def anonymous_memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Page-aligned memory, on huge pages where there are any, every page touched."""
    if hasattr(mmap, "MADV_HUGEPAGE"):  # shared memory, which is the default, has no huge pages
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, max(nbytes, 1))
    data = np.frombuffer(memory, np.uint8)
    data[::_PAGE_BYTES] = 1
    return data


class Machine:
    """Brings the machine into the same condition before every timed operation.

    Parameters
    ----------
    touch_bytes
        How much free memory is touched and freed again just before an operation. A virtual machine may have handed its
        free memory back to the host, and then whoever uses it first pays for it.
    drop_all_caches
        Empty the page cache before a load where that is allowed; else only the files of that load leave it.
    """

    def __init__(self, touch_bytes: int, *, drop_all_caches: bool) -> None:
        self._touch_bytes = touch_bytes
        self._drops_all = drop_all_caches and _DROP_CACHES.exists() and os.access(_DROP_CACHES, os.W_OK)

    @property
    def eviction(self) -> str:
        """How files leave the page cache before a load."""
        if self._drops_all:
            return "sync and /proc/sys/vm/drop_caches"
        return "posix_fadvise(DONTNEED) on the files" if hasattr(os, "posix_fadvise") else "not possible here"

    def timed(self, operation: Callable[[], Result]) -> tuple[float, Result]:
        """Seconds of wall time that ``operation`` takes, and its result."""
        gc.collect()
        anonymous_memory(self._touch_bytes)
        started = time.perf_counter()
        result = operation()
        return time.perf_counter() - started, result

    def evict(self, directory: str) -> None:
        """Make the next load of what lies in ``directory`` a cold one."""
        if self._drops_all:
            os.sync()
            _DROP_CACHES.write_text("3", encoding="ascii")
        elif hasattr(os, "posix_fadvise"):
            for path in _files(directory):
                with _opened(path) as descriptor:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def clear(self, directory: str) -> None:
        """Delete old data, and let that settle before anything is timed."""
        shutil.rmtree(directory, ignore_errors=True)
        Path(directory).mkdir()
        if hasattr(os, "sync"):
            os.sync()


def make_durable(directory: str) -> None:
    """Flush every file and directory; near free for what a system has flushed already, the rest is charged to it."""
    for path in [*_files(directory), *(entry[0] for entry in os.walk(directory))]:
        if os.name == "nt" and Path(path).is_dir():
            continue  # directories cannot be flushed there
        with _opened(path) as descriptor:
            os.fsync(descriptor)


def count_files(directory: str) -> int:
    return len(list(_files(directory)))


def _files(directory: str) -> Iterator[str]:
    for place, _, names in os.walk(directory):
        yield from (str(Path(place, name)) for name in names)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def working_directory(root: str | None) -> Iterator[str]:
    """A new directory beneath ``root``, removed afterwards. The default is one that is not usually kept in memory."""
    if root is None:
        root = "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()  # noqa: S108 - mkdtemp is safe there
    Path(root).mkdir(parents=True, exist_ok=True)
    directory = tempfile.mkdtemp(prefix="savestream-benchmark-", dir=root)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def describe_machine(directory: str) -> dict[str, object]:
    """What a reader of the figures needs to know of where they were taken."""
    packages = ("savestream", "numpy", "xxhash", "zstandard", "torch", "torchsnapshot")
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "file_system": _file_system(directory),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name)) is not None},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _file_system(directory: str) -> str:
    """Type of the file system that holds ``directory``."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "unknown"
    resolved = os.path.realpath(directory)
    holding = [(len(mount[1]), mount[2]) for mount in mounts if os.path.commonpath([resolved, mount[1]]) == mount[1]]
    return max(holding)[1] if holding else "unknown"


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    described = subprocess.run(
        [git, "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None
