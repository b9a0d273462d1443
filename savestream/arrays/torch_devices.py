"""Tensors that lie on an accelerator: waiting for what computes them, and bringing ranges of them to host memory.

PyTorch is the caller's: it is passed in. Everything here works on any device, the host included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from savestream.arrays.elements import HostArray
from savestream.arrays.memory_views import view_of_memory

__all__ = ["copy_range", "join_on_device", "wait_for_devices"]

_BYTE = np.dtype(np.uint8)


def wait_for_devices(torch: Any, devices: Iterable[Any]) -> None:
    """Wait until every stream of these devices has done its work.

    A save runs on threads of its own, whose streams know nothing of the caller's: without this, a tensor could be read
    before the kernel that fills it has run.
    """
    for device in devices:
        synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
        if synchronize is None:
            continue
        if device.index is None:
            synchronize()
        else:
            synchronize(device.index)


def copy_range(torch: Any, tensor: Any, start: int, stop: int, target: HostArray) -> None:
    """Copy elements ``start:stop``, counted in C order, into the flat host array ``target``; only they are moved."""
    with torch.no_grad():
        part = tensor.detach().reshape(-1)[start:stop].resolve_conj().resolve_neg().contiguous()
        torch.from_numpy(target.view(np.uint8)).copy_(part.view(torch.uint8))


def join_on_device(torch: Any, tensors: list[Any]) -> HostArray:
    """All elements of dense tensors of one dtype and device, as bytes: joined where they lie, moved at once."""
    with torch.no_grad():
        joined = torch._utils._flatten_dense_tensors(tensors).view(torch.uint8)
        if not joined.is_cpu:
            joined = joined.cpu()
    if not joined.numel():
        return np.empty(0, np.uint8)
    # Not numpy(): where one tensor was joined it is the caller's memory, which that would forbid to be resized.
    return view_of_memory(joined.data_ptr(), joined.untyped_storage(), (joined.numel(),), _BYTE, None)
