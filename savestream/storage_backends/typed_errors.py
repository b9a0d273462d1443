"""Keeps the promise of typed errors where a backend of somebody else's does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from savestream.storage_backends.base import StorageBackend
from savestream.storage_backends.file import FileBackend
from savestream.storage_backends.memory import MemoryBackend
from savestream.storage_backends.registry import Location
from savestream.storage_backends.translation import translated
from savestream.storage_backends.wrappers import Operation, WrapperBackend

__all__ = ["TypedErrorsBackend", "with_typed_errors"]

Result = TypeVar("Result")


class TypedErrorsBackend(WrapperBackend):
    """Turns every OSError that ``inner`` lets through into a StorageError that names operation and object."""

    async def around(self, operation: Operation, call: Callable[[], Awaitable[Result]]) -> Result:
        with translated(operation.kind, self._place(operation)):
            return await call()

    def around_blocking(self, operation: Operation, call: Callable[[], None]) -> None:
        with translated(operation.kind, self._place(operation)):
            call()

    def _place(self, operation: Operation) -> str:
        return f"{self.inner.url.rstrip('/')}/{operation.path}"


def with_typed_errors(location: Location) -> Location:
    """The same place; our own plain backends keep the promise themselves and stay as they are."""
    backend: StorageBackend = location.backend
    if type(backend) in (FileBackend, MemoryBackend, TypedErrorsBackend):
        return location
    return Location(TypedErrorsBackend(backend), location.path)
