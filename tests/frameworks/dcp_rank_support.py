"""What a scenario of several ranks has to hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_support import KINDS, quiet
from torch.distributed.tensor import DeviceMesh, DTensor, distribute_tensor

__all__ = ["Ranks", "failure_of"]


@dataclass(frozen=True)
class Ranks:
    """One rank of a scenario: who it is, where it works, and with whose storage."""

    rank: int
    world_size: int
    place: Path
    kind: str

    def writer(self, name: str = "checkpoint", **options: Any) -> Any:
        return KINDS[self.kind][0](self.place / name, **options)

    def reader(self, name: str = "checkpoint") -> Any:
        return KINDS[self.kind][1](self.place / name)

    def save(self, state: dict[str, Any], name: str = "checkpoint", **options: Any) -> Any:
        return self.save_with(self.writer(name), state, **options)

    def save_with(self, writer: Any, state: dict[str, Any], **options: Any) -> Any:
        with warnings.catch_warnings():
            quiet()
            return dcp.save(state, storage_writer=writer, **options)

    def load(self, state: dict[str, Any], name: str = "checkpoint", **options: Any) -> dict[str, Any]:
        with warnings.catch_warnings():
            quiet()
            dcp.load(state, storage_reader=options.pop("storage_reader", None) or self.reader(name), **options)
        return state

    def is_committed(self, name: str = "checkpoint") -> bool:
        root = "manifest.json" if self.kind == "savestream" else ".metadata"
        return (self.place / name / root).exists()

    def mesh(self, *shape: int) -> DeviceMesh:
        """The first ranks in a grid; every rank has to make it."""
        return DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))

    def distributed(self, whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
        """A distributed tensor, on every rank of the mesh and the others."""
        return distribute_tensor(whole.clone(), mesh, placements)


def failure_of(call: Callable[[], object]) -> dcp.CheckpointException:
    """The exception that reached this rank, as torch tells each rank of any rank's failure."""
    try:
        call()
    except dcp.CheckpointException as error:
        return error
    raise AssertionError(f"rank {dist.get_rank()} saw no failure")
