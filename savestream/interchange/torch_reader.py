"""A file of ``torch.save`` as a state whose arrays lie in the file. PyTorch is needed for its old format only."""

from __future__ import annotations

import os
import pickle  # only the class of its errors
import sys
from typing import Any

from savestream.errors import CorruptCheckpointError, PlanError, StorageError, UnsafeObjectError, UsageError
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported, locating
from savestream.interchange.leaving_out import leave_out_unsupported
from savestream.interchange.read_limits import ReadLimits
from savestream.interchange.torch_archives import ArchiveReader

__all__ = ["read_torch"]

_ARCHIVE_MAGIC = b"PK\3\4"


def read_torch(path: str, files: ForeignFiles, on_unsupported: OnUnsupported) -> ForeignState:
    """Read what the file says of its tensors and plain values; no element is read, but of files in the old format.

    Raises
    ------
    UnsafeObjectError
        The file holds what only running code could rebuild, or its members are compressed.
    CorruptCheckpointError
        It is truncated or damaged, or torch.save did not write it.
    UsageError
        It is in the format before PyTorch 1.6, and PyTorch is not imported.
    """
    if os.path.isdir(path):
        raise PlanError(
            f"{path}: a directory; torch.save writes files (is it a DCP checkpoint? import_dcp reads those)"
        )
    with locating(path):
        source = files.pool.file(path)
        nbytes = source.size_bytes()
        is_archive = source.read(0, min(nbytes, len(_ARCHIVE_MAGIC))) == _ARCHIVE_MAGIC
        # The name is what stands before a leaf's key in messages.
        state: Any = None
        if is_archive:
            limits = ReadLimits(check_stop=files.check_stop)
            state = ArchiveReader(source, 0, nbytes, "state", limits).value(with_unread=True)
    if not is_archive:
        state = _load_old_format(path)
    kept, skipped = leave_out_unsupported(state)
    if skipped and on_unsupported == "raise":
        raise UnsafeObjectError(
            f"{path}: {len(skipped)} key(s) cannot be converted: {'; '.join(skipped.values())[:2000]}; "
            "on_unsupported='skip' leaves such keys out. If you trust the file, load it with PyTorch, and save what it "
            "holds with savestream.save"
        )
    return ForeignState(kept, None, skipped)


def _load_old_format(path: str) -> Any:
    """Everything at once, since the old format does not say where elements lie before all of it is read."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise UsageError(
            f"{path}: it is no zip archive, so it is in the format before PyTorch 1.6, if torch.save wrote it; only "
            "PyTorch reads that: import torch before import_torch"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        # PyTorch's own text, which the cause has, advises to switch the safe reader off.
        raise UnsafeObjectError(
            f"{path}: torch.load(weights_only=True) refuses what it holds, or torch.save did not write it. If you "
            "trust it, load it with PyTorch, and save what it holds with savestream.save"
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"{path}: reading it failed: {error.strerror or error}") from error
    except Exception as error:  # damaged files make PyTorch fail in many ways
        raise CorruptCheckpointError(f"{path}: PyTorch cannot read it: {type(error).__name__}: {error}") from error
