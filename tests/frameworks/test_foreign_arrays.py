"""Tensors of a library that savestream has no adapter for, by DLPack alone."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorplay
import torch
from torch_training_support import fresh_place

import savestream
from savestream import LoadMismatchError, PlanCache, SaveOptions, UnsafeObjectError, blocking

DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "complex128",
]
DTYPES += ["bfloat16", "uint16", "uint32", "uint64", "complex32"]


def filled(name: str, shape: tuple[int, ...] = (3, 4)) -> Any:
    """A tensor with various elements, written through its own memory."""
    tensor = tensorplay.zeros(list(shape), dtype=getattr(tensorplay, name))
    _memory(tensor)[...] = np.arange(tensor.numel() if shape else 1).reshape(shape)
    return tensor


def _memory(tensor: Any) -> np.ndarray:
    from savestream.arrays import adapter_of

    memory = adapter_of(tensor).own_memory(tensor)
    assert memory is not None
    return memory


def bits(value: Any) -> bytes:
    return (value if isinstance(value, np.ndarray) else _memory(value)).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    place, tensor = fresh_place(), filled(name)
    blocking.save({"x": tensor}, place)
    found = blocking.load(place)["x"]
    assert (found.dtype.name, found.shape) == (name, (3, 4))
    assert bits(found) == bits(tensor)
    target = tensorplay.zeros([3, 4], dtype=getattr(tensorplay, name))
    assert blocking.load(place, {"x": target})["x"] is target
    assert bits(target) == bits(tensor)


LAYOUTS = {
    "transposed": lambda: filled("float32").t(),
    "rows": lambda: filled("int32", (6, 5))[1:4],
    "columns": lambda: filled("bfloat16", (6, 5))[:, 1:3],
    "expanded": lambda: filled("float32", (1, 4)).expand(3, 4),
    "scalar": lambda: filled("float64", ()),
    "empty": lambda: tensorplay.zeros([0, 3]),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(make: Any) -> None:
    place, tensor = fresh_place(), make()
    blocking.save({"x": tensor}, place)
    found = blocking.load(place)["x"]
    assert found.shape == tuple(tensor.shape)
    assert bits(found) == bits(tensor)


def trained() -> tuple[Any, Any]:
    """A small model and its optimizer after a few steps."""
    model = tensorplay.nn.Sequential(tensorplay.nn.Linear(4, 8), tensorplay.nn.ReLU(), tensorplay.nn.Linear(8, 2))
    optimizer = tensorplay.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(tensorplay.ones([5, 4])).sum().backward()
        optimizer.step()
    return model, optimizer


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in flat(value)]
    return [bits(state) if hasattr(state, "__dlpack__") else state]


def test_a_training_state() -> None:
    model, optimizer = trained()
    place = fresh_place()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    blocking.save(state, place)
    found = blocking.load(place)
    assert flat(found) == flat(state)
    assert found["model"]._metadata == state["model"]._metadata
    other, fresh = trained()
    for parameter in other.parameters():
        _memory(parameter)[...] = 0
    target = {"model": other.state_dict(), "optimizer": fresh.state_dict(), "step": 0}
    blocking.load(place, target)
    assert flat(target) == flat(state)
    assert [bits(parameter) for parameter in other.parameters()] == [bits(one) for one in model.parameters()]
    assert other(tensorplay.ones([1, 4])).tolist() == model(tensorplay.ones([1, 4])).tolist()


def test_parameters_are_arrays_too() -> None:
    model, place = tensorplay.nn.Linear(3, 2), fresh_place()
    blocking.save(dict(model.named_parameters()), place)
    other = tensorplay.nn.Linear(3, 2)
    target = dict(other.named_parameters())
    found = blocking.load(place, target)
    assert all(found[name] is parameter for name, parameter in other.named_parameters())
    assert flat(target) == flat(dict(model.named_parameters()))


def test_beside_arrays_of_other_frameworks() -> None:
    place = fresh_place()
    state = {
        "tensorplay": filled("bfloat16"),
        "torch": torch.arange(5, dtype=torch.bfloat16),
        "jax": jax.numpy.arange(4, dtype=jax.numpy.bfloat16),
        "numpy": np.arange(3).astype(ml_dtypes.bfloat16),
    }
    blocking.save(state, place)
    for framework in ("numpy", "torch", "jax"):
        found = blocking.load(place, framework=framework)
        assert [np.asarray(savestream_bits(value)).size for value in found.values()] == [12, 5, 4, 3]
        assert [savestream_bits(found[name]).tobytes() for name in state] == [
            savestream_bits(state[name]).tobytes() for name in state
        ]


def savestream_bits(value: Any) -> np.ndarray:
    from savestream.arrays import host_view

    return host_view(value)


def test_the_same_tensor_is_stored_once() -> None:
    tensor = filled("float32", (100, 100))
    state, place = {"a": tensor, "b": tensor, "view": tensor.t()}, fresh_place()
    info = blocking.save(state, place, options=SaveOptions(compression="none"))
    assert info.statistics.raw_bytes == 2 * 40_000  # a transposed view is another order of elements
    target = tensorplay.zeros([100, 100])
    blocking.load(place, {"a": target, "b": target}, keys=["a", "b"])
    assert bits(target) == bits(tensor)


def test_a_tensor_and_numpys_view_of_it_are_one() -> None:
    tensor = filled("float32", (100, 100))
    info = blocking.save({"a": tensor, "b": _memory(tensor)}, fresh_place())
    assert info.statistics.raw_bytes == 40_000


async def test_what_happens_after_staging_is_not_stored() -> None:
    tensor, place = filled("bfloat16", (500, 500)), fresh_place()
    expected = bits(tensor)
    handle = await savestream.start_save({"x": tensor}, place)
    _memory(tensor)[...] = 0
    await handle
    assert bits((await savestream.load(place))["x"]) == expected


def test_a_cached_plan_reads_the_new_elements() -> None:
    cache, tensor = PlanCache(), filled("float32")
    blocking.save({"x": tensor}, fresh_place(), plan_cache=cache)
    _memory(tensor)[...] = 7
    place = fresh_place("again")
    blocking.save({"x": tensor}, place, plan_cache=cache)
    assert cache.statistics().hits == 1
    assert bits(blocking.load(place)["x"]) == bits(tensor)
    blocking.save({"x": tensor.to(tensorplay.bfloat16)}, fresh_place("other"), plan_cache=cache)
    assert cache.statistics().hits == 1


def test_mismatches_touch_nothing() -> None:
    place, target = fresh_place(), tensorplay.zeros([3, 4])
    blocking.save({"x": filled("float32"), "y": filled("float32")}, place)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, {"x": target, "y": tensorplay.zeros([4, 3])})
    assert caught.value.shape_mismatches == ("y (checkpoint (3, 4), target (4, 3))",)
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, {"x": target, "y": tensorplay.zeros([3, 4], dtype=tensorplay.float64)})
    assert caught.value.dtype_mismatches == ("y (checkpoint float32, target float64)",)
    assert not _memory(target).any()


def test_what_the_library_does_not_export_is_refused_by_key() -> None:
    quantised = tensorplay.zeros([2], dtype=tensorplay.quint8)
    with pytest.raises(UnsafeObjectError, match=r"layer\.x: .*Unsupported DType for DLPack"):
        blocking.save({"layer": {"x": quantised, "y": np.zeros(2)}}, fresh_place())


def test_other_objects_of_the_library_are_refused_by_key() -> None:
    model, optimizer = trained()
    for value, cure in (
        (model, r"state_dict\(\)"),
        (optimizer, r"state_dict\(\)"),
        (tensorplay.Generator(), "convert"),
    ):
        with pytest.raises(UnsafeObjectError, match=rf"held: .*{cure}"):
            blocking.save({"held": value, "y": np.zeros(2)}, fresh_place())
