"""Numpy views of memory that another object owns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from savestream.arrays.elements import HostArray

__all__ = ["view_of_memory"]


class _Memory:
    """Describes memory to numpy, which keeps this object, and so the memory's owner, as long as the view lives."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, description: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = description
        self.owner = owner


@functools.cache
def _transport(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    """How elements are described: by their own type, or as opaque bytes where it is none of numpy's."""
    own = dtype if dtype.isbuiltin == 1 else np.dtype((np.void, dtype.itemsize))
    return own.str, own


def view_of_memory(
    address: int,
    owner: object,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
) -> HostArray:
    """A writable array over the memory at ``address``, which lives as long as ``owner``.

    ``strides`` are in bytes; None means C order without gaps. There must be an element.
    """
    name, own = _transport(dtype)
    described = {"version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": name}
    # Telling numpy the dtype that it would find anyway halves the time.
    view = np.array(_Memory(described, owner), own, copy=False)
    return view if own is dtype else view.view(dtype)
