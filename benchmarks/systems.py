"""The systems under test, each as the same few callables on the same values."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Mapping

from benchmarks.machine import Machine, make_durable
from benchmarks.states import Tree, as_tensor, flat_items, map_leaves, poison, require_equal
from savestream import SaveOptions, blocking
from savestream.pipeline.options import Compression

__all__ = [
    "LOAD_INTO",
    "LOAD_NEW",
    "SAVE",
    "System",
    "import_problem",
    "peer_systems",
    "run_system",
    "savestream_system",
]

SAVE = "save"
LOAD_INTO = "load into target"
LOAD_NEW = "load new"


@dataclasses.dataclass(frozen=True)
class System:
    """``save`` takes a directory; a load takes it and returns a tree, or None where it filled the target."""

    name: str
    save: Callable[[str], object]
    loads: Mapping[str, Callable[[str], Tree | None]]


def run_system(system: System, machine: Machine, directory: str, state: Tree, target: Tree) -> dict[str, float]:
    """Save durably, load cold in each way, compare bit by bit, clean up. Seconds by ``<system>: <operation>``."""

    def save() -> None:
        system.save(directory)
        make_durable(directory)

    machine.clear(directory)
    seconds = {}
    seconds[f"{system.name}: {SAVE}"], _ = machine.timed(save)
    for label, load in system.loads.items():
        poison(target)
        machine.evict(directory)
        taken, loaded = machine.timed(functools.partial(load, directory))
        seconds[f"{system.name}: {label}"] = taken
        require_equal(target if loaded is None else loaded, state, f"{system.name}: {label}")
        del loaded
    machine.clear(directory)
    return seconds


def savestream_system(state: Tree, target: Tree, *, compression: Compression, name: str = "savestream") -> System:
    options = SaveOptions(compression=compression)
    return System(
        name=name,
        save=lambda directory: blocking.save(state, f"{directory}/checkpoint", options=options),
        loads={
            LOAD_INTO: lambda directory: blocking.load(f"{directory}/checkpoint", target),
            LOAD_NEW: lambda directory: blocking.load(f"{directory}/checkpoint"),
        },
    )


def peer_systems(state: Tree, target: Tree) -> tuple[list[System], dict[str, str]]:
    """The libraries that are installed, and why others are absent; they see the same memory as torch tensors."""
    systems: list[System] = []
    absent: dict[str, str] = {}
    makers: dict[str, tuple[str, Callable[[Tree, Tree], System]]] = {
        "DCP": ("torch.distributed.checkpoint", _dcp),
        "torch.save": ("torch", _torch_save),
        "torchsnapshot": ("torchsnapshot", _torchsnapshot),
    }
    for name, (module, make) in makers.items():
        problem = import_problem(module)
        if problem is None:
            systems.append(make(*(map_leaves(as_tensor, tree) for tree in (state, target))))
        else:
            absent[name] = problem
    return systems, absent


def import_problem(module: str) -> str | None:
    """Import quietly; say what stands in the way, whatever it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(module)
        except Exception as error:  # an old library beside a new one may fail in any way
            return f"{type(error).__name__}: {error}"
    return None


def _dcp(state: Tree, target: Tree) -> System:
    from torch.distributed import checkpoint as dcp

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    # Without a process group each call warns that it assumes a single process, which is what no_dist=True asks for.
    warnings.filterwarnings("ignore", module=r"torch\.distributed")

    def load(directory: str) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(directory), no_dist=True)

    return System(
        name="DCP",
        save=lambda directory: dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True),
        loads={LOAD_INTO: load},
    )


def _torch_save(state: Tree, target: Tree) -> System:  # noqa: ARG001 - torch.load fills no target
    import torch

    return System(
        name="torch.save",
        save=lambda directory: torch.save(state, f"{directory}/state.pt"),
        loads={LOAD_NEW: lambda directory: torch.load(f"{directory}/state.pt")},
    )


def _torchsnapshot(state: Tree, target: Tree) -> System:
    from torchsnapshot import Snapshot, StateDict

    def load(directory: str) -> None:
        Snapshot(f"{directory}/snapshot").restore({"state": StateDict(**dict(flat_items(target)))})

    return System(
        name="torchsnapshot",
        save=lambda directory: Snapshot.take(f"{directory}/snapshot", {"state": StateDict(**dict(flat_items(state)))}),
        loads={LOAD_INTO: load},
    )
