"""Array leaves of any framework, seen as dtype name, shape and host bytes. Imports no framework.

Each framework has an adapter, found by the leaf's class; everything behind it works on numpy views.
"""

from savestream.arrays.adapter import ArrayAdapter, ArrayInfo
from savestream.arrays.dtypes import dtype_from_name, dtype_itemsize, dtype_name, is_opaque_dtype
from savestream.arrays.elements import HostArray, as_plain_elements, copy_elements
from savestream.arrays.registry import (
    adapter_for,
    adapter_of,
    array_info,
    array_refusal,
    as_plain_array,
    framework_adapter,
    host_view,
    is_array,
    plain_array_types,
)

__all__ = [
    "ArrayAdapter",
    "ArrayInfo",
    "HostArray",
    "adapter_for",
    "adapter_of",
    "array_info",
    "array_refusal",
    "as_plain_array",
    "as_plain_elements",
    "copy_elements",
    "dtype_from_name",
    "dtype_itemsize",
    "dtype_name",
    "framework_adapter",
    "host_view",
    "is_array",
    "is_opaque_dtype",
    "plain_array_types",
]
