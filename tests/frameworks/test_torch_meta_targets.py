"""Targets on the meta device: shapes without memory, in whose place a load puts real tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_training_support import TiedModel, assert_same_state, bits, copied, fresh_place, seeded

from savestream import LoadMismatchError, UnsafeObjectError, blocking


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))


def recurrent() -> nn.Module:
    return nn.GRU(4, 5, 2, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (2, 2, 4, 4)),
    "recurrent": (recurrent, (2, 3, 4)),
    "half": (lambda: nn.Linear(5, 6).bfloat16(), (2, 5)),
    "channels last": (lambda: convolutional().to(memory_format=torch.channels_last), (2, 2, 4, 4)),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def output(model: nn.Module, shape: tuple[int, ...]) -> bytes:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).dtype)
    found = model.eval()(value)
    return bits(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_memory_becomes_a_real_one(name: str) -> None:
    make, shape = MODELS[name]
    trained, model = seeded(1, make), on_meta(make)
    place = fresh_place()
    blocking.save(trained.state_dict(), place)
    target = model.state_dict()
    loaded = blocking.load(place, target)
    assert loaded is target
    assert_same_state(loaded, trained.state_dict())
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert all(parameter.is_meta for parameter in model.parameters())  # until the state is assigned
    model.load_state_dict(loaded, assign=True)
    del loaded, target
    gc.collect()
    assert output(model, shape) == output(trained, shape)
    model.train()
    first = next(model.parameters())
    first.square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert bits(first) != bits(next(trained.parameters()))


def test_parameters_stay_parameters() -> None:
    place = fresh_place()
    source = {"w": torch.randn(3), "frozen": torch.randn(2), "plain": torch.randn(4), "n": torch.tensor([1, 2])}
    blocking.save(source, place)
    target = {
        "w": nn.Parameter(torch.empty(3, device="meta")),
        "frozen": nn.Parameter(torch.empty(2, device="meta"), requires_grad=False),
        "plain": torch.empty(4, device="meta", requires_grad=True),
        "n": torch.empty(2, dtype=torch.int64, device="meta"),
    }
    blocking.load(place, target)
    assert_same_state(target, source)
    assert [type(value) for value in target.values()] == [nn.Parameter, nn.Parameter, torch.Tensor, torch.Tensor]
    assert [value.requires_grad for value in target.values()] == [True, False, True, False]
    assert all(value.is_leaf for value in target.values())


def test_real_and_meta_leaves_together() -> None:
    place = fresh_place()
    source = {"a": torch.randn(3), "b": {"c": torch.randn(2, 2)}, "d": [torch.randn(2), torch.randn(())]}
    blocking.save(source, place)
    real = torch.zeros(3)
    target = {
        "a": real,
        "b": {"c": torch.empty(2, 2, device="meta")},
        "d": [torch.zeros(2), torch.empty((), device="meta")],
    }
    assert blocking.load(place, target) is target
    assert target["a"] is real
    assert_same_state(target, source)


def test_a_tuple_of_meta_leaves_is_made_anew() -> None:
    place = fresh_place()
    source = {"pair": (torch.randn(3), torch.randn(2))}
    blocking.save(source, place)
    target = {"pair": (torch.empty(3, device="meta"), torch.empty(2, device="meta"))}
    assert_same_state(blocking.load(place, target), source)


def test_views_and_transposes_of_meta_tensors() -> None:
    place = fresh_place()
    source = {"t": torch.randn(3, 4), "row": torch.randn(4), "expanded": torch.randn(5, 2)}
    blocking.save(source, place)
    base = torch.empty(4, 3, device="meta")
    target = {"t": base.t(), "row": base[:, 0], "expanded": torch.empty(1, 2, device="meta").expand(5, 2)}
    assert_same_state(blocking.load(place, target), source)
    assert all(tensor.is_contiguous() for tensor in target.values())


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_tied_model_gets_its_weight_once() -> None:
    trained, model = TiedModel(1), on_meta(TiedModel)
    assert model.head.weight is model.embedding.weight
    place = fresh_place()
    blocking.save(trained.state_dict(), place)
    target = model.state_dict()
    blocking.load(place, target)
    assert target["head.weight"].data_ptr() == target["embedding.weight"].data_ptr()
    model.load_state_dict(target, assign=True)
    assert_same_state(model.state_dict(), trained.state_dict())
    model.head.weight = model.embedding.weight  # torch makes two parameters of them, over the same memory
    tokens = torch.tensor([1, 2, 3])
    assert bits(model(tokens)) == bits(trained(tokens))


def test_one_parameter_under_two_names_stays_one() -> None:
    trained, model = TiedModel(1), on_meta(TiedModel)
    place = fresh_place()
    blocking.save(trained.state_dict(), place)
    target = dict(model.named_parameters(remove_duplicate=False))
    blocking.load(place, target)
    assert type(target["head.weight"]) is nn.Parameter
    assert target["head.weight"] is target["embedding.weight"]
    model.load_state_dict(target, assign=True)
    assert model.head.weight is model.embedding.weight
    assert_same_state(model.state_dict(), trained.state_dict())


def test_ties_of_meta_tensors_follow_target_and_checkpoint() -> None:
    weight = torch.randn(3, 4)
    tied, apart = fresh_place(), fresh_place()
    blocking.save({"a": weight, "b": [weight, weight], "c": weight}, tied)
    blocking.save({"a": weight, "b": [weight + 1, weight + 2], "c": weight + 3}, apart)
    for place, shared in ((tied, True), (apart, False)):
        base = meta(3, 4)
        target = {"a": base, "b": [nn.Parameter(base), base.detach()], "c": meta(3, 4)}
        blocking.load(place, target)
        assert_same_state(target, blocking.load(place, framework="torch"))
        own = [target["a"], *target["b"], target["c"]]
        assert [tensor.data_ptr() == own[0].data_ptr() for tensor in own] == [True, shared, shared, False]
        assert type(target["b"][0]) is nn.Parameter
    base = meta(24)
    target = {
        "a": base[:12].view(3, 4),
        "b": [base[12:].view(3, 4), base[:12].view(4, 3).t()],
        "c": base[:12].view(3, 4),
    }
    with pytest.raises(LoadMismatchError, match=r"b\[1\] \(checkpoint \(3, 4\)"):
        blocking.load(tied, {**target, "b": [target["b"][0], meta(4, 3)]})
    blocking.load(tied, target)
    own = [target["a"], *target["b"], target["c"]]
    assert [tensor.data_ptr() == own[0].data_ptr() for tensor in own] == [True, False, False, True]
    assert_same_state(target, blocking.load(tied, framework="torch"))


def test_a_cast_of_tied_meta_tensors() -> None:
    place, weight = fresh_place(), torch.randn(5)
    blocking.save({"a": weight, "b": weight}, place)
    base = torch.empty(5, dtype=torch.bfloat16, device="meta")
    target = {"a": base, "b": base}
    blocking.load(place, target, cast=True)
    assert target["a"] is target["b"]
    assert bits(target["a"]) == bits(weight.bfloat16())


def test_a_cast_for_a_meta_target() -> None:
    place = fresh_place()
    source = {"w": torch.randn(4, 3)}
    blocking.save(source, place)
    target = {"w": torch.empty(4, 3, dtype=torch.bfloat16, device="meta")}
    with pytest.raises(LoadMismatchError, match=r"w \(checkpoint float32, target bfloat16\)"):
        blocking.load(place, target)
    assert target["w"].is_meta
    blocking.load(place, target, cast=True)
    assert_same_state(target, {"w": source["w"].bfloat16()})


def test_a_mismatch_leaves_everything_as_it_was() -> None:
    place = fresh_place()
    blocking.save({"a": torch.randn(3), "b": torch.randn(2), "c": torch.randn(1)}, place)
    target = {"a": torch.zeros(3), "b": torch.empty(4, device="meta"), "d": torch.empty(1, device="meta")}
    held, before = dict(target), copied(target["a"])
    with pytest.raises(LoadMismatchError) as caught:
        blocking.load(place, target)
    assert tuple(caught.value.missing) == ("d",)
    assert tuple(caught.value.unexpected) == ("c",)
    assert len(caught.value.shape_mismatches) == 1
    assert all(target[key] is value for key, value in held.items())
    assert bits(target["a"]) == bits(before)


def test_what_is_not_loaded_stays_meta() -> None:
    place = fresh_place()
    source = {"a": torch.randn(3), "b": torch.randn(2)}
    blocking.save(source, place)
    target = {"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}
    blocking.load(place, target, keys="b")
    assert target["a"].is_meta
    assert bits(target["b"]) == bits(source["b"])
    more = {**target, "c": torch.empty(5, device="meta")}
    blocking.load(place, more, strict=False)
    assert more["c"].is_meta
    assert bits(more["a"]) == bits(source["a"])


def test_a_meta_tensor_cannot_be_saved() -> None:
    place = fresh_place()
    model = on_meta(convolutional)
    with pytest.raises(UnsafeObjectError, match=r"^0\\\.weight: a meta tensor holds no data"):
        blocking.save(model.state_dict(), place)
    assert not blocking.exists(place)
