"""Storage for PyTorch's distributed checkpoint (DCP), with torch's own planners, on one rank or many.

::

    import torch.distributed.checkpoint as dcp
    from savestream.integrations.torch import StorageReader, StorageWriter

    dcp.save(state, storage_writer=StorageWriter("checkpoints/step-000000000100"))
    dcp.load(state, storage_reader=StorageReader("checkpoints/step-000000000100"))

``async_save`` works too, with threads and with processes. The checkpoint is an ordinary one: ``savestream.load``,
``read_manifest`` and ``verify`` work on it without PyTorch. Its tree follows the paths that torch's planner recorded.
What is no tensor for torch is stored as the bytes that its planner produced (``torch.save``), and ``savestream.load``
returns those bytes.

The other way round, a :class:`StorageReader` reads what ``savestream.save`` wrote: each leaf under the dotted name that
DCP would give it, plain values as torch would have stored them, arrays of a dtype that torch lacks as numpy arrays. A
tuple that holds arrays is no single value there: its elements are ``name.0``, ``name.1``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from savestream.integrations.torch.frameworks import checkpoint_module
from savestream.integrations.torch.reader import ReaderHooks
from savestream.integrations.torch.writer import WriterHooks

if TYPE_CHECKING:
    StorageReader: Any
    StorageWriter: Any

__all__ = ["StorageReader", "StorageWriter"]

_WRITER_TEXT = """Writes checkpoints for ``torch.distributed.checkpoint``.

    Parameters
    ----------
    destination
        The checkpoint's place: a path, a URL or ``(backend, path)``; or None, where torch's ``checkpoint_id=`` says it.
        With ``(backend, path)`` a ``checkpoint_id`` is a path in that backend.
    overwrite
        Replace a checkpoint that is there; as in torch's own writers that is the default. The old one stays loadable
        until the new one is durable, and where a save fails. With False the save fails before anything is staged.
    options
        Compression, memory, threads. ``timeout_seconds`` bounds the writing of one rank's data.

    Notes
    -----
    Nothing is visible before ``finish`` on the coordinator has found that every planned item was written exactly once.
    A failure on any rank reaches every rank through torch's own exchange, and nothing is published. What a failed save
    wrote is removed at the writer's next save, or when nothing refers to the writer any more; torch tells no storage
    writer that a save has failed on another rank.

    Tensors are stored as they are found, also where a cached plan describes an earlier state: the metadata that
    ``save`` returns then say what was stored. A writer can be pickled, as ``async_save`` with a process does, unless
    its place lies in this process's memory. ``use_collectives=False`` with several ranks is refused.
    """

_READER_TEXT = """Reads checkpoints for ``torch.distributed.checkpoint``, whether torch or savestream saved them.

    Parameters
    ----------
    source
        The checkpoint's place: a path, a URL or ``(backend, path)``; or None, where torch's ``checkpoint_id=`` says it.
    cast
        Convert to the target's dtype, as torch does silently. With False another dtype is refused before tensors of it
        are touched.
    options
        Threads, digests, and the classes that values may be rebuilt from.

    Notes
    -----
    Only the frames that hold a wanted part of a tensor are read, straight into the target where that has its own memory
    in the stored form. A target whose elements overlap each other is refused. Nothing is unpickled here; torch's own
    planner unpickles values (``torch.load(weights_only=False)``), as it does with its own checkpoints.
    """


@functools.cache
def _classes() -> dict[str, type]:
    storage = checkpoint_module("storage")
    made = {}
    for name, hooks, text in (
        ("StorageWriter", WriterHooks, _WRITER_TEXT),
        ("StorageReader", ReaderHooks, _READER_TEXT),
    ):
        namespace = {"__module__": __name__, "__qualname__": name, "__doc__": text}
        made[name] = type(storage.StorageWriter)(name, (hooks, getattr(storage, name)), namespace)
    return made


def __getattr__(name: str) -> Any:
    """The classes derive from torch's, which is imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classes()[name]
