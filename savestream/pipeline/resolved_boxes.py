"""What a load planner gives to be filled: checked, and turned into memory that reads can go to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from savestream.arrays import ArrayAdapter, HostArray, adapter_for, dtype_from_name
from savestream.errors import PlanError, SavestreamError
from savestream.pipeline.buffers import allocate_array
from savestream.planners.base import LoadPlanner
from savestream.planners.default import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from savestream.planners.load_checks import is_castable
from savestream.planners.plan import ReadItem
from savestream.planners.target_memory import TargetArray, examine_targets

__all__ = ["ResolvedBoxes"]

# These give views and buffers of targets that their own plan has checked.
_TRUSTED = frozenset({DefaultLoadPlanner, EmptyStateDictLoadPlanner})


class _Foreign(msgspec.Struct):
    """An array that is not numpy's, and what is read in its place."""

    adapter: ArrayAdapter
    array: Any
    memory: HostArray
    is_own: bool  # whether the memory is the array's, and no buffer


class ResolvedBoxes:
    """The boxes that a planner resolves items to.

    Parameters
    ----------
    stored_dtype
        The dtype name of an item's stored chunk.

    Attributes
    ----------
    memories
        What to read into, for each item: the elements of what the planner gave, or a buffer.

    Raises
    ------
    PlanError
        The planner gave something that cannot take an item's box; names the key.
    """

    def __init__(
        self, planner: LoadPlanner, items: Sequence[ReadItem], stored_dtype: Callable[[ReadItem], str]
    ) -> None:
        self._planner = planner
        self._items = items
        self._foreign: list[_Foreign] = []
        self._given: list[Any] = _resolve(planner, items)
        if type(planner) in _TRUSTED:
            self.memories: list[HostArray] = self._given
        else:
            pairs = zip(items, self._given, strict=True)
            self.memories = [self._memory(item, array, stored_dtype(item)) for item, array in pairs]

    def begin(self) -> None:
        """Tell the frameworks, before the first byte is placed: a load that fails leaves changed arrays behind."""
        for adapter, found in _by_adapter(entry for entry in self._foreign if entry.is_own):
            adapter.changed([entry.array for entry in found])

    def commit(self) -> None:
        """Everything is read: put buffers in their places, and give the planner its own arrays."""
        for entry in self._foreign:
            if not entry.is_own:
                entry.adapter.filled(entry.array, [((0,) * entry.memory.ndim, entry.memory)])
        if type(self._planner).commit_tensor is not DefaultLoadPlanner.commit_tensor:
            for item, array in zip(self._items, self._given, strict=True):
                self._planner.commit_tensor(item, array)

    def _memory(self, item: ReadItem, given: Any, stored: str) -> HostArray:
        """The memory to fill for one item, or an error that says what is wrong with what the planner gave."""
        if type(given) is np.ndarray:
            self._require(item, given.shape == item.lengths, f"of shape {given.shape} for a box of {item.lengths}")
            if given.dtype != dtype_from_name(stored):
                self._check_dtype(item, _own_name(given, item), stored)
            self._require(item, given.flags.writeable, "that is read-only")
            self._check_apart(item, given)
            return given
        adapter = adapter_for(type(given))
        if adapter is None:
            raise self._error(item, f"{type(given).__module__}.{type(given).__qualname__}, which is no supported array")
        try:
            entry = self._open(item, adapter, given, stored)
        except PlanError:
            raise
        except SavestreamError as error:
            raise self._error(item, f"what cannot be filled: {error}") from error
        self._foreign.append(entry)
        return entry.memory

    def _open(self, item: ReadItem, adapter: ArrayAdapter, given: Any, stored: str) -> _Foreign:
        key = item.dest_index.fqn
        info = adapter.target_info(given, key)
        kind = type(given).__qualname__
        self._require(item, info.shape == item.lengths, f"({kind}) of shape {info.shape} for a box of {item.lengths}")
        if info.dtype != stored:
            self._check_dtype(item, info.dtype, stored)
        if (problem := adapter.fill_problem(given)) is not None:
            raise self._error(item, f"an array ({kind}): {problem}")
        memory = adapter.own_memory(given)
        if memory is not None:
            self._require(item, memory.flags.writeable, f"({kind}) that is read-only")
            self._check_apart(item, memory)
            return _Foreign(adapter, given, memory, True)
        if adapter.target_boxes(given, key) is not None or not adapter.is_filled_in_place(given):
            raise self._error(
                item,
                f"an array ({kind}) that has no memory a load could fill; return a numpy buffer, and put it in place "
                "in commit_tensor",
            )
        self._check_apart(item, given)
        return _Foreign(adapter, given, allocate_array(dtype_from_name(info.dtype), item.lengths), False)

    def _check_dtype(self, item: ReadItem, dtype: str, stored: str) -> None:
        if not getattr(self._planner, "cast", False):
            raise self._error(
                item,
                f"an array of dtype {dtype}, and the checkpoint holds {stored}; return one of that dtype, or give the "
                "planner cast=True",
            )
        self._require(item, is_castable(stored, dtype), f"of dtype {dtype}, to which {stored} cannot be converted")

    def _check_apart(self, item: ReadItem, array: Any) -> None:
        if type(array) is np.ndarray and array.flags.c_contiguous:
            return
        _, problems = examine_targets([TargetArray(item.dest_index.fqn, (), array)])
        self._require(item, not problems, "whose elements overlap each other")

    def _require(self, item: ReadItem, met: bool, problem: str) -> None:
        if not met:
            raise self._error(item, f"an array {problem}")

    def _error(self, item: ReadItem, problem: str) -> PlanError:
        name = type(self._planner).__qualname__
        return PlanError(f"{item.dest_index.fqn}: {name}.resolve_tensor gave {problem}")


def _resolve(planner: LoadPlanner, items: Sequence[ReadItem]) -> list[Any]:
    if isinstance(planner, DefaultLoadPlanner):
        return planner.resolve_tensors(items)
    return [planner.resolve_tensor(item) for item in items]


def _own_name(array: HostArray, item: ReadItem) -> str:
    adapter = adapter_for(np.ndarray)
    assert adapter is not None  # noqa: S101 - numpy's own
    return adapter.target_info(array, item.dest_index.fqn).dtype


def _by_adapter(entries: Iterable[_Foreign]) -> list[tuple[ArrayAdapter, list[_Foreign]]]:
    groups: dict[int, tuple[ArrayAdapter, list[_Foreign]]] = {}
    for entry in entries:
        groups.setdefault(id(entry.adapter), (entry.adapter, []))[1].append(entry)
    return list(groups.values())
