"""Whether leaves are still what the plan says of them when they are staged: one that was replaced would be stored as
something that it is not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from savestream.arrays import adapter_of
from savestream.errors import PlanError, SavestreamError
from savestream.planners.plan import TensorWriteData, WriteItem

__all__ = ["PlannedLeaves"]

_data_of = operator.attrgetter("tensor_data")
_sizes_of = operator.attrgetter("chunk.sizes")
_dtype_name_of = operator.attrgetter("properties.dtype")
_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")


class PlannedLeaves:
    """Compares leaves with the items of a plan; any thread may ask.

    Parameters
    ----------
    items
        What is planned of each chunk, in their order.
    """

    def __init__(self, items: Sequence[WriteItem]) -> None:
        self._items = items
        self._known: set[tuple[str, type, Any]] = set()  # planned dtypes, and the leaves' classes and dtypes that fit

    def check(self, chunks: Sequence[int], leaves: Sequence[Any]) -> None:
        """Compare column by column: a call for each leaf would cost more than staging it.

        Raises
        ------
        PlanError
            A leaf has another shape or dtype than was planned; names it.
        """
        planned: list[TensorWriteData] = list(map(_data_of, map(self._items.__getitem__, chunks)))
        try:
            same = list(map(_shape_of, leaves)) == list(map(_sizes_of, planned))
            kinds = list(zip(map(_dtype_name_of, planned), map(type, leaves), map(_dtype_of, leaves), strict=True))
            unknown = set(kinds) - self._known
        except Exception:  # an array of another library, which has no such attributes: its adapter knows
            same, kinds, unknown = False, [], set()
        if same:
            for kind in unknown:
                position = kinds.index(kind)
                self._check_one(chunks[position], leaves[position])
        else:
            for chunk, leaf in zip(chunks, leaves, strict=True):
                self._check_one(chunk, leaf)
        self._known |= unknown

    def _check_one(self, chunk: int, leaf: Any) -> None:
        item = self._items[chunk]
        key, planned = item.index.fqn, item.tensor_data
        assert planned is not None  # noqa: S101 - leaves are arrays
        try:
            info = adapter_of(leaf, key).info(leaf, key)
        except SavestreamError:
            return  # deleted or freed meanwhile: reading it says so, and what to do about it
        if info.shape != planned.chunk.sizes or info.dtype != planned.properties.dtype:
            raise PlanError(
                f"{key}: it was planned as {planned.properties.dtype} of shape {planned.chunk.sizes} and is now "
                f"{info.dtype} of shape {info.shape}; do not replace or resize arrays before the save is staged"
            )
