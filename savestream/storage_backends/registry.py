"""From what a caller names (path, URL, backend and path) to a backend and a path in it."""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from savestream.errors import PlanError, StorageError
from savestream.storage_backends.base import StorageBackend
from savestream.storage_backends.file import FileBackend
from savestream.storage_backends.memory import MemoryBackend
from savestream.storage_backends.paths import directory_parts

__all__ = ["BackendFactory", "Location", "Place", "register_backend", "resolve_location"]

# One letter before the colon is a Windows drive.
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://", re.ASCII)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]+", re.ASCII)


class Location(NamedTuple):
    """A place in a backend; ``path`` is ``""`` for the backend's root."""

    backend: StorageBackend
    path: str

    @property
    def url(self) -> str:
        """The place, without credentials, for messages; ``resolve_location`` takes it back."""
        base = self.backend.url
        if not self.path:
            return base
        path = urllib.parse.quote(self.path) if base.startswith("file:") else self.path
        return f"{base.rstrip('/')}/{path}"

    def child(self, name: str) -> Location:
        """The place ``name`` (one or more path parts) beneath this one."""
        return Location(self.backend, f"{self.path}/{name}" if self.path else name)


BackendFactory: TypeAlias = Callable[[str], Location]
Place: TypeAlias = str | os.PathLike[str] | Location | tuple[StorageBackend, str]


class _Registry:
    """Factories by URL scheme, and the named memory stores of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: dict[str, MemoryBackend] = {}
        self.factories: dict[str, BackendFactory] = {"file": _file_location, "memory": self.memory_location}

    def memory_location(self, url: str) -> Location:
        name, _, path = url[len("memory://") :].partition("/")
        if not name:
            raise PlanError(f"{url!r} names no store: write memory://name/path")
        with self.lock:
            backend = self.memory.get(name)
            if backend is None:
                backend = self.memory[name] = MemoryBackend(name)
        return _checked(backend, path)


def register_backend(scheme: str, factory: BackendFactory) -> None:
    """Let ``resolve_location`` understand URLs of one more scheme, in this process.

    Parameters
    ----------
    scheme
        What stands before ``://``: at least two lower-case characters. A later registration replaces an earlier one.
    factory
        Called with the whole URL; returns the :class:`Location`, or raises PlanError.
    """
    if not SCHEME.fullmatch(scheme):
        raise PlanError(f"scheme {scheme!r}: use at least two of a-z, 0-9, '+', '.', '-', a letter first")
    if scheme in ("file", "memory"):
        raise PlanError(f"scheme {scheme!r} is savestream's own: register another one")
    with _registry.lock:
        _registry.factories[scheme] = factory


def resolve_location(place: Place) -> Location:
    """Find the backend and path that ``place`` names; touches no storage.

    Parameters
    ----------
    place
        A path (made absolute at once; ``~`` is not expanded), a ``file://`` or ``memory://name/path`` URL, a URL of a
        registered scheme, or ``(backend, path)``.

    Raises
    ------
    PlanError
        The place is empty, malformed, or of a scheme without a backend; the message tells the cure.
    """
    if isinstance(place, tuple):
        if len(place) != 2 or not isinstance(place[0], StorageBackend) or not isinstance(place[1], str):
            raise PlanError(f"a place given as a tuple is (backend, path), not {place!r}")
        return _checked(place[0], place[1])
    text = _text(place)
    url = URL.match(text)
    if url is None:
        return Location(FileBackend(text), "")
    scheme = url["scheme"].lower()
    with _registry.lock:
        factory = _registry.factories.get(scheme)
    if factory is None:
        # Never the URL itself: it may hold credentials.
        raise PlanError(
            f"this version of savestream has no backend for {scheme}:// URLs; "
            f"savestream.storage_backends.register_backend({scheme!r}, factory) adds one, or pass (backend, path)"
        )
    return factory(scheme + text[url.end("scheme") :])


def _text(place: object) -> str:
    try:
        text = os.fsdecode(place)  # type: ignore[arg-type]  # anything else is refused right here
    except TypeError:
        raise PlanError(f"a place is a path, a URL or (backend, path), not a {type(place).__name__}") from None
    if not text:
        raise PlanError("the place is empty: give a path, a URL or (backend, path)")
    if "\0" in text:
        raise PlanError(f"the place {text!r} holds a NUL byte")
    return text


def _checked(backend: StorageBackend, path: str) -> Location:
    try:
        directory_parts(path)
    except StorageError as error:
        raise PlanError(f"place in {backend.url}: {error}") from error
    return Location(backend, path)


def _file_location(url: str) -> Location:
    host, slash, path = url[len("file://") :].partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise PlanError(f"{url!r} names the host {host!r}: a file URL is file:///absolute/path")
    if "?" in path or "#" in path:
        raise PlanError(f"{url!r} has a query or fragment: write '?' as %3F and '#' as %23 in a file URL")
    if not path:
        raise PlanError(f"{url!r} names no directory: a file URL is file:///absolute/path")
    if os.name == "nt":
        from urllib.request import url2pathname

        return Location(FileBackend(_text(url2pathname(f"/{path}"))), "")
    return Location(FileBackend(_text(os.fsdecode(urllib.parse.unquote_to_bytes(f"/{path}")))), "")


_registry = _Registry()
