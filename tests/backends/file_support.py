"""The conformance tests' raw access to files, and system calls that stop or fail where a test says."""

from __future__ import annotations

import os
import pathlib
import threading

from savestream.storage_backends import WrapperBackend

PATIENCE_SECONDS = 30


def innermost(backend):
    while isinstance(backend, WrapperBackend):
        backend = backend.inner
    return backend


class RawFiles:
    """``raw_get`` and ``raw_set`` of the conformance tests."""

    def raw_get(self, backend, path):
        try:
            return (pathlib.Path(innermost(backend).root) / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def raw_set(self, backend, path, data):
        place = pathlib.Path(innermost(backend).root) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def open_descriptors() -> dict[str, str]:
    """Descriptors of this process that name files, sockets and pipes aside."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("/") and not target.startswith(("/proc", "/dev")):
            found[name] = target
    return found


class Stopper:
    """Replaces one function of ``os`` by one that stops at its ``nth`` call in a worker thread until it is let go."""

    def __init__(self, monkeypatch, name: str, nth: int = 1) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        self.finished = threading.Event()
        self._main = threading.get_ident()
        self._left = nth
        original = getattr(os, name)

        def replacement(*arguments, **keywords):
            if threading.get_ident() == self._main:
                return original(*arguments, **keywords)
            self._left -= 1
            if self._left:
                return original(*arguments, **keywords)
            self.reached.set()
            assert self.released.wait(PATIENCE_SECONDS)
            try:
                return original(*arguments, **keywords)
            finally:
                self.finished.set()

        monkeypatch.setattr(os, name, replacement)


class Failing:
    """Replaces one function of ``os`` by one whose calls from the ``nth`` on, ``times`` of them, raise ``number``."""

    def __init__(
        self, monkeypatch, name: str, number: int, *, nth: int = 1, times: int | None = None, when=None
    ) -> None:
        self.calls = 0
        self.failures = 0
        original = getattr(os, name)

        def replacement(*arguments, **keywords):
            if when is not None and not when(*arguments, **keywords):
                return original(*arguments, **keywords)
            self.calls += 1
            if self.calls >= nth and (times is None or self.calls < nth + times):
                self.failures += 1
                raise OSError(number, os.strerror(number))
            return original(*arguments, **keywords)

        monkeypatch.setattr(os, name, replacement)
