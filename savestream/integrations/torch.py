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

from savestream.integrations.dcp.reader import StorageReader
from savestream.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
