"""The same functions for code without an event loop: each blocks until the engine has done the work.

``savestream.blocking.save(...)`` is ``await savestream.save(...)``, and so on; parameters, results and errors are those
of the async function. ``start_save`` returns the same :class:`~savestream.SaveHandle`; ask it with ``wait_staged()``
and ``result()``. An interrupt (Ctrl-C) cancels the work, waits for its clean-up, and is raised then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, ParamSpec, TypeVar

import savestream

__all__ = [
    "delete",
    "exists",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "import_torch",
    "iter_arrays",
    "list_checkpoints",
    "load",
    "read_manifest",
    "save",
    "start_save",
    "verify",
]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _refuse_inside_loop(name: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise savestream.UsageError(
        f"savestream.blocking.{name} was called inside a running event loop, which it would block; "
        f"use 'await savestream.{name}(...)' there"
    )


def _run(function: Callable[[], Awaitable[Result]], name: str) -> Result:
    operation = savestream.submit(function, name)
    try:
        return operation.future.result()
    except KeyboardInterrupt:
        operation.cancel()
        operation.wait_until_ended()
        raise


def _blocking(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Result]:
    @functools.wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        _refuse_inside_loop(function.__name__)
        return _run(lambda: function(*arguments, **options), function.__name__)

    return call


save = _blocking(savestream.save)
start_save = _blocking(savestream.start_save)
load = _blocking(savestream.load)
read_manifest = _blocking(savestream.read_manifest)
exists = _blocking(savestream.exists)
list_checkpoints = _blocking(savestream.list_checkpoints)
delete = _blocking(savestream.delete)
verify = _blocking(savestream.verify)
import_dcp = _blocking(savestream.import_dcp)
import_safetensors = _blocking(savestream.import_safetensors)
import_torch = _blocking(savestream.import_torch)
export_safetensors = _blocking(savestream.export_safetensors)


@functools.wraps(savestream.iter_arrays)
def iter_arrays(*arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    _refuse_inside_loop("iter_arrays")
    arrays = savestream.iter_arrays(*arguments, **options)

    async def following() -> tuple[str, Any] | None:
        return await anext(arrays, None)

    while (found := _run(following, "iter_arrays")) is not None:
        yield found
