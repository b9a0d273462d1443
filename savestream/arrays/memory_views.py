"""Numpy views of memory that another object owns."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from savestream.arrays.elements import HostArray

__all__ = ["view_of_memory"]


@functools.lru_cache(maxsize=4096)
def _memory_class(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    # The slot costs a third of the dict that an attribute would make.
    return type("Memory", (ctypes.c_char * nbytes,), {"__slots__": ("owner",)})


def view_of_memory(
    address: int,
    nbytes: int,
    owner: object,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
) -> HostArray:
    """A writable array over ``nbytes`` of memory at ``address``, which lives as long as ``owner``.

    ``strides`` are in bytes and not negative; None means C order without gaps.
    """
    memory: Any = _memory_class(nbytes).from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory, 0, strides)
