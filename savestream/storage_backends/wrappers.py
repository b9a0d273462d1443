"""A backend around a backend: every operation passes through one method, which subclasses override."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec

from savestream.storage_backends.base import Capabilities, ObjectInfo, ObjectReader, ObjectWriter, StorageBackend
from savestream.threads import run_shielded

__all__ = ["Operation", "OperationKind", "WrapperBackend"]

OperationKind: TypeAlias = Literal[
    "open_writer",
    "write",
    "finish",
    "abort",
    "open_reader",
    "read_into",
    "close",
    "get",
    "put",
    "create",
    "replace",
    "head",
    "list",
    "delete",
]
Result = TypeVar("Result")
Opened = TypeVar("Opened", ObjectReader, ObjectWriter)


class Operation(msgspec.Struct, frozen=True):
    """One call of a backend.

    Attributes
    ----------
    kind
        ``list`` stands for both listings; ``write`` and ``read_into`` also for their blocking forms.
    path
        The object or prefix; the paths of a ``delete`` are joined by newlines.
    offset, bytes
        Of the range that is moved. ``bytes`` is 0 where it is not known before the call (``get``).
    """

    kind: OperationKind
    path: str
    offset: int = 0
    bytes: int = 0


class WrapperBackend(StorageBackend):
    """Does what ``inner`` does. Override :meth:`around` and :meth:`around_blocking` to see or change each operation.

    What ``around`` adds after a successful open may fail: the opened object is then released again.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner

    async def around(
        self,
        operation: Operation,  # noqa: ARG002 - for subclasses
        call: Callable[[], Awaitable[Result]],
    ) -> Result:
        """Run one operation; ``call`` does it in the inner backend."""
        return await call()

    def around_blocking(
        self,
        operation: Operation,  # noqa: ARG002 - for subclasses
        call: Callable[[], None],
    ) -> None:
        """Like :meth:`around` for blocking writes and reads, in a worker thread."""
        call()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def open_writer(self, path: str) -> ObjectWriter:
        operation = Operation("open_writer", path)
        inner = await self._open(operation, lambda: self.inner.open_writer(path), lambda writer: writer.abort())
        return _WrapperWriter(self, inner)

    async def open_reader(self, path: str) -> ObjectReader:
        operation = Operation("open_reader", path)
        inner = await self._open(operation, lambda: self.inner.open_reader(path), lambda reader: reader.close())
        return _WrapperReader(self, inner)

    async def get(self, path: str, *, maximum_bytes: int) -> bytes:
        return await self.around(Operation("get", path), lambda: self.inner.get(path, maximum_bytes=maximum_bytes))

    async def put(self, path: str, data: bytes) -> None:
        await self.around(Operation("put", path, 0, len(data)), lambda: self.inner.put(path, data))

    async def create(self, path: str, data: bytes, *, scratch: str) -> None:
        operation = Operation("create", path, 0, len(data))
        await self.around(operation, lambda: self.inner.create(path, data, scratch=scratch))

    async def replace(self, path: str, data: bytes, *, scratch: str, expected_etag: str | None) -> None:
        operation = Operation("replace", path, 0, len(data))
        await self.around(
            operation, lambda: self.inner.replace(path, data, scratch=scratch, expected_etag=expected_etag)
        )

    async def head(self, path: str) -> ObjectInfo | None:
        return await self.around(Operation("head", path), lambda: self.inner.head(path))

    async def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return await self.around(Operation("list", prefix), lambda: self.inner.list_objects(prefix))

    async def list_directories(self, prefix: str) -> list[str]:
        return await self.around(Operation("list", prefix), lambda: self.inner.list_directories(prefix))

    async def delete(self, paths: Sequence[str]) -> None:
        await self.around(Operation("delete", "\n".join(paths)), lambda: self.inner.delete(paths))

    async def _open(
        self,
        operation: Operation,
        function: Callable[[], Awaitable[Opened]],
        release: Callable[[Opened], Awaitable[None]],
    ) -> Opened:
        opened: list[Opened] = []

        async def call() -> Opened:
            opened.append(await function())
            return opened[0]

        try:
            return await self.around(operation, call)
        except BaseException:
            for leftover in opened:
                await _released(release, leftover)
            raise


async def _released(release: Callable[[Opened], Awaitable[None]], leftover: Opened) -> None:
    await run_shielded(lambda: release(leftover))


class _WrapperWriter(ObjectWriter):
    def __init__(self, backend: WrapperBackend, inner: ObjectWriter) -> None:
        self.path = inner.path
        self._backend = backend
        self._inner = inner

    async def write(self, offset: int, data: memoryview) -> None:
        operation = Operation("write", self.path, offset, data.nbytes)
        await self._backend.around(operation, lambda: self._inner.write(offset, data))

    def write_blocking(self, offset: int, data: memoryview) -> None:
        operation = Operation("write", self.path, offset, data.nbytes)
        self._backend.around_blocking(operation, lambda: self._inner.write_blocking(offset, data))

    async def finish(self, size_bytes: int) -> None:
        operation = Operation("finish", self.path, 0, size_bytes)
        await self._backend.around(operation, lambda: self._inner.finish(size_bytes))

    async def abort(self) -> None:
        await self._backend.around(Operation("abort", self.path), self._inner.abort)


class _WrapperReader(ObjectReader):
    def __init__(self, backend: WrapperBackend, inner: ObjectReader) -> None:
        self.path = inner.path
        self.size_bytes = inner.size_bytes
        self._backend = backend
        self._inner = inner

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        operation = Operation("read_into", self.path, offset, buffer.nbytes)
        await self._backend.around(operation, lambda: self._inner.read_into(offset, buffer))

    def read_into_blocking(self, offset: int, buffer: memoryview) -> None:
        operation = Operation("read_into", self.path, offset, buffer.nbytes)
        self._backend.around_blocking(operation, lambda: self._inner.read_into_blocking(offset, buffer))

    async def close(self) -> None:
        await self._backend.around(Operation("close", self.path), self._inner.close)
