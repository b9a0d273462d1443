"""What brings tensors from a device to host memory; the host itself stands in for one where there is no other."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

import savestream
from savestream.arrays.torch_devices import copy_range, join_on_device, wait_for_devices

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("plain", torch.arange(60.0).reshape(3, 20)),
        ("transposed", torch.arange(60.0).reshape(3, 20).t()),
        ("stepped", torch.arange(120, dtype=torch.int64)[::2]),
        ("brain floats", torch.arange(60).bfloat16()),
        ("conjugated", torch.randn(60, dtype=torch.complex64).conj()),
        ("negated", torch.randn(60, dtype=torch.complex64).conj().imag),
        ("parameter", torch.nn.Parameter(torch.randn(60))),
        ("expanded", torch.arange(3.0).expand(20, 3)),
    ],
)
def test_a_range_is_copied(device, name, tensor):
    del name
    expected = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    itemsize = tensor.element_size()
    target = np.full(7 * itemsize, 0xEE, np.uint8)
    copy_range(torch, tensor.to(device), 13, 20, target)
    assert target.tobytes() == expected[13 * itemsize : 20 * itemsize].tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_joined(device):
    tensors = [torch.randn(3, 4), torch.randn(5, 2).t(), torch.tensor(7.0), torch.zeros(0, 3)]
    expected = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    assert join_on_device(torch, [tensor.to(device) for tensor in tensors]).tobytes() == expected


def test_every_device_is_waited_for():
    waited = []
    framework = types.SimpleNamespace(
        cuda=types.SimpleNamespace(synchronize=lambda index=None: waited.append(("cuda", index))),
        mps=types.SimpleNamespace(synchronize=lambda: waited.append(("mps", None))),
    )
    devices = [torch.device("cuda:1"), torch.device("cuda", 0), torch.device("mps"), torch.device("xla", 2)]
    wait_for_devices(framework, devices)
    assert waited == [("cuda", 1), ("cuda", 0), ("mps", None)]


@pytest.mark.parametrize("device", DEVICES)
async def test_tensors_go_to_a_checkpoint_and_come_back_on_their_device(device, tmp_path):
    state = {
        "big": torch.randn(3 << 20, device=device),
        "transposed": torch.randn(700, 900, device=device).t(),
        "small": {f"p{index}": torch.randn(8, device=device).to(torch.bfloat16) for index in range(100)},
        "conjugated": torch.randn(9, dtype=torch.complex64, device=device).conj(),
    }
    handle = await savestream.start_save(state, tmp_path / "c")
    wanted = {name: state[name].detach().cpu().clone() for name in ("big", "transposed", "conjugated")}
    small = {name: tensor.cpu().clone() for name, tensor in state["small"].items()}
    for tensor in (state["big"], state["transposed"], state["conjugated"], *state["small"].values()):
        tensor.zero_()
    await handle
    restored = await savestream.load(tmp_path / "c", state)
    assert restored["big"] is state["big"]
    assert restored["big"].device.type == device
    for name, tensor in wanted.items():
        assert torch.equal(restored[name].cpu(), tensor)
    for name, tensor in small.items():
        assert torch.equal(restored["small"][name].cpu(), tensor)
