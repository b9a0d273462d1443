"""A file of ``torch.save`` as a state, loaded by PyTorch in its restricted way."""

from __future__ import annotations

import importlib
import os
import pickle  # only the class of its errors
import zipfile
from typing import Any

from savestream.errors import CorruptCheckpointError, PlanError, UnsafeObjectError, UsageError
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported

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
    del files, on_unsupported
    if os.path.isdir(path):
        raise PlanError(
            f"{path}: a directory; torch.save writes files (is it a DCP checkpoint? import_dcp reads those)"
        )
    torch = _torch()
    try:
        return ForeignState(torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)))
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(
            f"{path}: torch.load(weights_only=True) refuses it: {error}. If you trust it, load it with PyTorch, "
            "and save what it holds with savestream.save"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CorruptCheckpointError(f"{path}: PyTorch cannot read it: {error}") from error


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            "import_torch needs PyTorch, which is not installed: pip install 'savestream[torch]'"
        ) from error
