"""Checkpoints with tensors in processes that have not imported torch: nothing imports it behind their back."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_training_support import bits

from savestream import blocking

CHILD = """
import hashlib, json, sys
import numpy as np
from savestream import blocking, PlanError

def imported():
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "jax", "jaxlib"))

place, again = sys.argv[1:3]
blocking.verify(place)
manifest = blocking.read_manifest(place)
state = blocking.load(place)
part = blocking.load(place, keys="model")
target = {"model": {key: np.zeros_like(value) for key, value in state["model"].items()}}
filled = blocking.load(place, target, strict=False)
try:
    blocking.load(place, framework="torch")
    refusal = None
except PlanError as error:
    refusal = str(error)
streamed = {key: array.tobytes() for key, array in blocking.iter_arrays(place)}
blocking.save(state, again)

def describe(value):
    return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]

def digest(tree):
    return {key: describe(value) for key, value in tree.items()}

print(json.dumps({
    "imported": imported(),
    "model": digest(state["model"]),
    "part": list(part["model"]),
    "filled": digest(filled["model"]),
    "class": type(state["model"]).__name__,
    "steps": [type(key).__name__ for key in state["optimizer"]["state"]],
    "names": sorted(manifest.contents.state_dict_metadata),
    "refusal": refusal,
    "streamed": len(streamed),
}))
"""


def in_child(*arguments: str) -> dict[str, Any]:
    """Run the child as users do: warnings are errors, and nothing is on the path that we are not."""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return json.loads(outcome.stdout)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("absent")
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    model.register_parameter("brain", nn.Parameter(torch.randn(5).bfloat16()))
    model.register_buffer("small", torch.arange(6).to(torch.float8_e4m3fn))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    model.brain.grad = torch.ones_like(model.brain)
    optimizer.step()
    blocking.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "first")
    found = in_child(str(directory / "first"), str(directory / "second"))
    return {**found, "directory": directory, "source": model.state_dict()}


def test_nothing_is_imported(report: dict[str, Any]) -> None:
    assert report["imported"] == []
    assert report["refusal"] is not None
    assert "import torch first" in report["refusal"]


def test_tensors_are_arrays_there(report: dict[str, Any]) -> None:
    source, found = report["source"], report["model"]
    assert list(found) == list(source) == report["part"]
    assert report["filled"] == found
    assert report["class"] == "OrderedDict"
    assert report["steps"] == ["int"] * 5
    assert report["streamed"] == len([name for name in report["names"] if "param_groups" not in name])
    for key, tensor in source.items():
        digest = hashlib.sha256(bits(tensor)).hexdigest()
        assert found[key] == [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def test_what_is_saved_there_comes_back_as_tensors_here(report: dict[str, Any]) -> None:
    loaded = blocking.load(report["directory"] / "second", framework="torch")
    assert {key: bits(value) for key, value in loaded["model"].items()} == {
        key: bits(value) for key, value in report["source"].items()
    }
    assert set(map(type, loaded["model"].values())) == {torch.Tensor}
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    model.register_parameter("brain", nn.Parameter(torch.zeros(5).bfloat16()))
    model.register_buffer("small", torch.zeros(6).to(torch.float8_e4m3fn))
    model.load_state_dict(loaded["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimizer"])


def test_files_hold_no_pickle(report: dict[str, Any]) -> None:
    """No protocol header of a pickle stands anywhere that a reader could take for one."""
    directory: Path = report["directory"]
    for path in directory.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:2]
            assert not (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"), path
            assert head != b"PK", path
