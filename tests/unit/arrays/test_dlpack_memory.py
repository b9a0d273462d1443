"""What is read out of a DLPack capsule: every dtype and layout, device memory, and what no capsule may say."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dlpack_exporters import (
    Broken,
    Exporter,
    MutableUnversioned,
    NoCopies,
    NoSlices,
    OnDevice,
    StaysOnDevice,
    StrangeSlices,
    Unversioned,
)

from savestream.arrays import adapter_for, adapter_of
from savestream.arrays.dlpack_memory import export
from savestream.errors import PlanError, UnsafeObjectError

BASE = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(2, 0, 1),
    "strided": BASE[::2, ::-1, 1:4],
    "broadcast": np.broadcast_to(np.arange(4.0), (3, 4)),
    "empty": np.zeros((3, 0, 2), np.float16),
    "scalar": np.array(7, np.uint8),
    "offset": np.arange(9.0)[5:],
}


@pytest.mark.parametrize("kind", [Exporter, Unversioned])
@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(kind: Any, array: np.ndarray) -> None:
    if not array.flags.writeable:
        if kind is Unversioned:
            array = np.lib.stride_tricks.as_strided(np.arange(4.0), (3, 4), (0, 8))
        else:
            assert export(kind(array)).read_only is True
    exported = export(kind(array))
    view = exported.view()
    assert (view.dtype, view.shape) == (array.dtype, array.shape)
    assert view.tobytes() == array.tobytes()
    if array.size:
        assert not view.flags.writeable
        assert view.__array_interface__["data"][0] == exported.address == array.__array_interface__["data"][0]
        assert view.strides == exported.strides == array.strides


NATIVE = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NATIVE += ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("name", NATIVE)
def test_dtypes_of_numpy(name: str) -> None:
    array = np.arange(6).astype(name)
    assert export(Exporter(array)).dtype == name
    assert export(Exporter(array)).view().tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        (4, 16, "bfloat16"),
        (8, 8, "float8_e4m3"),
        (10, 8, "float8_e4m3fn"),
        (11, 8, "float8_e4m3fnuz"),
        (12, 8, "float8_e5m2"),
        (13, 8, "float8_e5m2fnuz"),
        (14, 8, "float8_e8m0fnu"),
        (7, 8, "float8_e3m4"),
        (9, 8, "float8_e4m3b11fnuz"),
    ],
)
def test_dtypes_that_numpy_does_not_import(code: int, bits: int, name: str) -> None:
    raw = np.arange(12, dtype=f"u{bits // 8}").reshape(3, 4).T
    exported = export(Exporter(raw, code=code, bits=bits))
    view = exported.view()
    assert exported.dtype == name
    assert view.dtype == np.dtype(getattr(ml_dtypes, name))
    assert view.tobytes() == raw.tobytes()


def test_small_elements_are_taken_only_where_each_has_its_byte() -> None:
    raw = np.array([-8, 7, 0], np.int8)
    assert export(Exporter(raw, bits=4, flags=4)).view().tolist() == [-8, 7, 0]
    with pytest.raises(ValueError, match="4 x 1 bits"):
        export(Exporter(raw, bits=4))


@pytest.mark.parametrize(
    "says",
    [{"lanes": 2}, {"code": 3}, {"code": 99}, {"bits": 128}, {"code": 5, "bits": 16}, {"ndim": -1}, {"ndim": 65}],
    ids=str,
)
def test_what_has_no_name_is_refused(says: Any) -> None:
    with pytest.raises(ValueError, match="it exports"):
        export(Exporter(np.zeros(4), **says))


def test_a_newer_version_is_refused() -> None:
    exporter = Exporter(np.zeros(4), major=2)
    with pytest.raises(ValueError, match=r"version 2\.0 of DLPack"):
        export(exporter)


def test_strides_may_be_left_out() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    assert export(Exporter(array, strides=None)).strides == array.strides


def test_an_export_lives_as_long_as_a_view_of_it() -> None:
    array = np.arange(1000.0)
    count = sys.getrefcount(array)
    for kind in (Exporter, Unversioned):
        view = export(kind(array)).view()[10:20]
        assert sys.getrefcount(array) == count + 1
        assert view.tolist() == list(range(10, 20))
        del view
        assert sys.getrefcount(array) == count


def test_writable_or_not() -> None:
    array = np.zeros(3)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for value, problem in (
        (Exporter(array), False),
        (Exporter(frozen), True),
        (Unversioned(array), True),  # nothing says that it may be written
        (MutableUnversioned(array), False),
        (Exporter(array, device_type=3), False),  # pinned host memory
        (OnDevice(array), True),
    ):
        adapter = adapter_of(value)
        assert (adapter.fill_problem(value) is not None) is problem
        memory = adapter.own_memory(value)
        assert (memory is None) is problem
        if memory is not None:
            memory[...] += 1
    assert array.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (BufferError("no export"), "BufferError: no export"),
        (RuntimeError("gone"), "RuntimeError: gone"),
        (TypeError("no"), "TypeError: no"),
        (KeyError("x"), "KeyError: 'x'"),
        (None, "returned NoneType"),
        (3, "returned int"),
        (object(), "returned object"),
    ],
)
def test_failures_of_the_exporter_are_errors_that_name_the_key(outcome: Any, text: str) -> None:
    value = Broken(outcome)
    adapter = adapter_of(value)
    with pytest.raises(UnsafeObjectError, match=r"the_key: dlpack_exporters\.Broken does not give") as caught:
        adapter.info(value, "the_key")
    assert text in str(caught.value)
    with pytest.raises(PlanError, match="Broken"):
        adapter.host_view(value)
    assert text in (adapter.fill_problem(value) or "")
    assert adapter.own_memory(value) is None
    assert adapter.addresses([value]) == [0]


# --- devices ---


def copied_elements(value: Any, start: int, stop: int) -> np.ndarray:
    target = np.empty(stop - start, value.array.dtype)
    adapter_of(value).copy_elements(value, start, stop, target)
    return target


@pytest.mark.parametrize("kind", [OnDevice, StrangeSlices, NoSlices])
@pytest.mark.parametrize("array", [BASE, BASE.transpose(2, 0, 1), BASE[:, ::2], np.arange(7.0), np.array(3.5)])
def test_a_device_array_is_copied_by_ranges(kind: Any, array: np.ndarray) -> None:
    value = kind(array)
    info = adapter_of(value).info(value, "key")
    assert info.variant == "device 2:0"
    assert value.copied == []
    flat = array.reshape(-1)
    for start in range(array.size):
        for stop in range(start + 1, array.size + 1, 3):
            assert copied_elements(value, start, stop).tobytes() == flat[start:stop].tobytes()
    assert adapter_of(value).host_view(value).tobytes() == array.tobytes()


def test_only_the_rows_that_are_asked_for_leave_the_device() -> None:
    array = np.arange(1000.0).reshape(100, 10)
    value = OnDevice(array)
    copied_elements(value, 25, 41)
    assert value.copied == [3 * 80]
    strange = StrangeSlices(array)
    copied_elements(strange, 25, 41)
    assert strange.copied == [array.nbytes]


@pytest.mark.parametrize("kind", [StaysOnDevice, NoCopies])
def test_a_device_array_that_cannot_be_copied_is_refused(kind: Any) -> None:
    value = kind(np.zeros(4))
    with pytest.raises(PlanError, match="copy it to a numpy array before saving"):
        adapter_of(value).host_view(value)


# --- which classes are arrays ---


def test_classes_may_be_forgotten() -> None:
    kind = type("Passing", (Exporter,), {})
    assert adapter_for(kind) is not None
    reference = weakref.ref(kind)
    del kind
    gc.collect()
    assert reference() is None
