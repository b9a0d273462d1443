"""A file of ``torch.save`` as a state, loaded by PyTorch in its restricted way."""

from __future__ import annotations

import importlib
import os
import pickle  # only the class of its errors
import zipfile
from typing import Any

from savestream.errors import CorruptCheckpointError, PlanError, StorageError, UnsafeObjectError, UsageError
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported
from savestream.interchange.leaving_out import leave_out_unsupported

__all__ = ["read_torch"]


def read_torch(path: str, files: ForeignFiles, on_unsupported: OnUnsupported) -> ForeignState:
    """Map the file and rebuild its tensors and plain values.

    Raises
    ------
    UsageError
        PyTorch is not installed.
    UnsafeObjectError
        The file needs classes that ``weights_only=True`` does not allow.
    CorruptCheckpointError
        PyTorch cannot read it.
    """
    del files
    if os.path.isdir(path):
        raise PlanError(
            f"{path}: a directory; torch.save writes files (is it a DCP checkpoint? import_dcp reads those)"
        )
    state = _load(_torch(), path)
    if on_unsupported == "raise":
        return ForeignState(state)
    kept, skipped = leave_out_unsupported(state)
    return ForeignState(kept, None, skipped)


def _load(torch: Any, path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(
            f"{path}: torch.load(weights_only=True) refuses it: {error}. If you trust it, load it with PyTorch, "
            "and save what it holds with savestream.save"
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"{path}: reading it failed: {error.strerror or error}") from error
    except Exception as error:  # damaged files make PyTorch fail in many ways
        raise CorruptCheckpointError(f"{path}: PyTorch cannot read it: {type(error).__name__}: {error}") from error


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            "import_torch needs PyTorch, which is not installed: pip install 'savestream[torch]'"
        ) from error
