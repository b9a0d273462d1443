"""numpy's arrays as leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo, HostArray
from savestream.arrays.dtypes import interned_dtype_name
from savestream.errors import UnsafeObjectError

__all__ = ["NUMPY_TYPES", "NumpyAdapter"]

NUMPY_TYPES: frozenset[type] = frozenset({np.ndarray, np.memmap, np.recarray})


class NumpyAdapter(ArrayAdapter):
    """numpy.ndarray, memmap and recarray in any layout; object dtypes are refused."""

    framework = "numpy"

    def info(self, array: Any, key: str) -> ArrayInfo:
        dtype = array.dtype
        try:
            name = interned_dtype_name(dtype)
        except UnsafeObjectError as error:
            raise UnsafeObjectError(f"{key}: {error}") from None
        if name is None:
            raise UnsafeObjectError(
                f"{key}: arrays of dtype {dtype} hold Python objects, which only pickle could store; "
                "convert it to a numeric or fixed-width dtype, or to a list of plain values"
            )
        return ArrayInfo(name, array.shape, array.strides, dtype.itemsize)

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [array.__array_interface__["data"][0] for array in arrays]

    def host_view(self, array: Any) -> HostArray:
        return np.asarray(array)

    def fill_problem(self, array: Any) -> str | None:
        return None if array.flags.writeable else "the target is read-only; load into a copy of it"

    def own_memory(self, array: Any) -> HostArray | None:
        return np.asarray(array)

    def from_host(self, array: HostArray, dtype: str) -> Any:
        del dtype
        return array
