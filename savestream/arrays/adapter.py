"""What savestream asks of an array leaf, whatever framework it comes from. Imports no framework."""

from __future__ import annotations

import abc
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from savestream.arrays.elements import HostArray, as_plain_elements, copy_elements

__all__ = ["ArrayAdapter", "ArrayInfo", "Box", "HostArray", "Layout", "Shape", "effective_strides"]

Shape: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Shape, Shape]  # offsets and sizes, in elements
Layout: TypeAlias = tuple[str, Shape, Shape, str]  # dtype, shape, effective strides and variant


def effective_strides(shape: Shape, strides: Shape) -> Shape:
    """The strides, with 0 for each axis of one element: nothing is that step away, so any number may stand there."""
    if 1 not in shape:
        return strides
    return tuple([0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)])


class ArrayInfo(msgspec.Struct, frozen=True, gc=False):
    """What planning needs of a leaf, but for its contents and its address.

    Attributes
    ----------
    dtype
        Its dtype name, see :mod:`savestream.arrays.dtypes`.
    shape, strides
        In elements, and in bytes.
    itemsize
        Bytes of one element.
    variant
        Whatever else decides how the elements are read: device type, conjugation, negation, weak type.
    """

    dtype: str
    shape: Shape
    strides: Shape
    itemsize: int
    variant: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def layout(self) -> Layout:
        """Equal for arrays that are the same elements where they begin at the same address."""
        return self.dtype, self.shape, effective_strides(self.shape, self.strides), self.variant


class ArrayAdapter(abc.ABC):
    """One framework's leaves. Methods run in worker threads and keep nothing of the arrays that they are given."""

    framework: str

    # --- saving ---

    @abc.abstractmethod
    def info(self, array: Any, key: str) -> ArrayInfo:
        """Describe a leaf, or refuse it by ``key`` (:class:`~savestream.errors.UnsafeObjectError`)."""

    def infos(self, arrays: Sequence[Any], keys: Sequence[str]) -> list[ArrayInfo]:
        """Describe many leaves."""
        return [self.info(array, key) for array, key in zip(arrays, keys, strict=True)]

    def describe(self, arrays: Sequence[Any], keys: Sequence[str]) -> tuple[list[int], dict[int, ArrayInfo]]:
        """Describe many leaves by those that are alike, in class and description.

        Returns
        -------
        firsts
            For each leaf the position of the first one like it.
        infos
            The descriptions at these positions.
        """
        known: dict[tuple[type, ArrayInfo], int] = {}
        pairs = zip(map(type, arrays), self.infos(arrays, keys), strict=True)
        firsts = [known.setdefault(pair, position) for position, pair in enumerate(pairs)]
        return firsts, {position: info for (_, info), position in known.items()}

    @abc.abstractmethod
    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        """Addresses of the first elements; equal ones (with equal infos) mean the same memory. 0 means unknown."""

    def split(self, array: Any, key: str) -> Sequence[tuple[Shape, Any]] | None:
        """``(offsets, array)`` of the boxes that this process writes of a sharded leaf; None where it is whole."""
        del array, key
        return None

    @abc.abstractmethod
    def host_view(self, array: Any) -> HostArray:
        """The leaf's elements as a numpy array of the stored dtype; a view where host memory has them so."""

    def copy_elements(self, array: Any, start: int, stop: int, target: HostArray) -> None:
        """Copy elements ``start:stop``, counted in C order, into the flat array ``target`` of as many bytes.

        ``target`` has the stored dtype, records as opaque bytes of the same size.
        """
        source = self.host_view(array)
        copy_elements(source if source.dtype.names is None else source.view(target.dtype), start, stop, target)

    def join(self, arrays: Sequence[Any]) -> HostArray:
        """All elements of many small leaves, one leaf after the other, as bytes."""
        views = [as_plain_elements(self.host_view(array)) for array in arrays]
        parts = [np.ascontiguousarray(view).reshape(-1).view(np.uint8) for view in views]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    # --- loading ---

    def target_info(self, array: Any, key: str) -> ArrayInfo:
        """Describe what a load target expects, or refuse it by ``key``."""
        return self.info(array, key)

    def target_infos(self, arrays: Sequence[Any], keys: Sequence[str]) -> list[ArrayInfo]:
        """:meth:`target_info` of many targets."""
        return [self.target_info(array, key) for array, key in zip(arrays, keys, strict=True)]

    def fill_problem(self, array: Any) -> str | None:
        """Why a load cannot fill this target ("the target is read-only; ..."), or None."""
        del array
        return None

    def own_memory(self, array: Any) -> HostArray | None:
        """The target's own elements as a writable numpy view of the stored dtype; None where it needs a buffer."""
        del array
        return None

    def own_memories(self, arrays: Sequence[Any]) -> list[HostArray | None]:
        """:meth:`own_memory` of many targets."""
        return [self.own_memory(array) for array in arrays]

    def changed(self, arrays: Sequence[Any]) -> None:  # noqa: B027 - most frameworks need not know
        """Called once for targets whose own memory is filled, before the first byte is placed."""

    def is_filled_in_place(self, array: Any) -> bool:
        """Whether a load changes the target itself, so that no other target may share its memory."""
        return self.own_memory(array) is not None

    def identity(self, array: Any) -> Hashable | None:
        """Equal for targets that have no memory yet and are to share what they get, as tied weights do; else None."""
        del array
        return None

    def local_array(self, array: Any) -> Any:
        """The array whose memory a load changes: the target itself, or what this process holds of it."""
        return array

    def target_boxes(self, array: Any, key: str) -> Sequence[Box] | None:
        """The boxes that a sharded target holds in this process; None where it is filled as a whole."""
        del array, key
        return None

    def filled(self, array: Any, parts: Sequence[tuple[Shape, HostArray]]) -> Any:
        """The leaf that takes the target's place, now that its boxes are read.

        Only for targets without memory of their own. ``parts`` are offsets and elements of each box, in the order of
        :meth:`target_boxes`; of the whole array at offsets 0 where there are none. They are fresh, page-aligned buffers
        that nobody else keeps. Targets that can be changed are changed and returned.
        """
        raise NotImplementedError(f"{type(self).__qualname__}: its arrays have memory of their own")

    def tied(self, array: Any, made: Any) -> Any:
        """The leaf that takes the target's place, with the memory of ``made``: that of an equal :meth:`identity`."""
        raise NotImplementedError(f"{type(self).__qualname__}: its targets are never to share what they get")

    @abc.abstractmethod
    def from_host(self, array: HostArray, dtype: str) -> Any:
        """A leaf of this framework over a fresh numpy array; the array itself where the framework lacks its dtype."""
