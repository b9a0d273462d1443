"""One conversion, or DCP's load, in this process alone; prints its time and peak of resident memory as JSON."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import Machine, make_durable
from benchmarks.memory_probe import peak_memory
from benchmarks.states import (
    Tree,
    as_tensor,
    flat_items,
    gpt2_train_state,
    map_leaves,
    poison,
    require_equal,
    total_bytes,
)
from benchmarks.systems import LOAD_INTO, System, peer_systems
from savestream import SaveOptions, blocking

__all__ = ["CONVERSIONS", "DCP_LOAD", "PREPARE", "PREPARE_DCP", "Conversion"]

PREPARE, PREPARE_DCP = "prepare", "prepare DCP"
DCP_LOAD = "DCP: load into target"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """``run(directory, options)`` converts what was prepared there; ``load`` gives what came of it, by dotted names."""

    run: Callable[[str, SaveOptions], object]
    load: Callable[[str], Tree]
    needs_dcp: bool


def _import(function: Callable[..., object], source: str, *, verify: bool) -> Callable[[str, SaveOptions], object]:
    def run(directory: str, options: SaveOptions) -> object:
        return function(f"{directory}/{source}", f"{directory}/made", options=options, verify=verify)

    return run


def _export(directory: str, options: SaveOptions) -> object:
    del options
    return blocking.export_safetensors(f"{directory}/checkpoint", f"{directory}/made/model.safetensors")


def _load(directory: str) -> Tree:
    return dict(flat_items(blocking.load(f"{directory}/made")))


def _load_exported(directory: str) -> Tree:
    """Read by hand: the library need not be there."""
    path = f"{directory}/made/model.safetensors"
    with open(path, "rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(begin - 8))
    data = np.memmap(path, np.uint8, "r")[begin:]
    return {
        name: data[slice(*entry["data_offsets"])].view(np.float32).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


CONVERSIONS = {
    "import_dcp, unverified": Conversion(_import(blocking.import_dcp, "dcp", verify=False), _load, True),
    "import_dcp, verified": Conversion(_import(blocking.import_dcp, "dcp", verify=True), _load, True),
    "export_safetensors": Conversion(_export, _load_exported, False),
    "import_safetensors, unverified": Conversion(
        _import(blocking.import_safetensors, "exported", verify=False), _load, False
    ),
    "import_safetensors, verified": Conversion(
        _import(blocking.import_safetensors, "exported", verify=True), _load, False
    ),
}


def _state(layers: int) -> Tree:
    return gpt2_train_state(layers) if layers else gpt2_train_state(1, width=96, vocabulary=4096)


def _prepare(directory: str, state: Tree, *, dcp: bool) -> None:
    if dcp:
        Path(directory, "dcp").mkdir()
        _dcp(state, state).save(f"{directory}/dcp")
    else:
        blocking.save(state, f"{directory}/checkpoint", options=SaveOptions(compression="none"))
        blocking.export_safetensors(f"{directory}/checkpoint", f"{directory}/exported")
    make_durable(directory)


def _measure(machine: Machine, directory: str, operation: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a cold operation, and how far it raised resident memory."""
    peaks = []

    def measured() -> None:
        with peak_memory() as peak:
            operation()
        peaks.append(peak.bytes)

    machine.evict(directory)
    seconds, _ = machine.timed(measured)
    return seconds, peaks[0]


def _dcp(state: Tree, target: Tree) -> System:
    peers, absent = peer_systems(state, target)
    if "DCP" in absent:
        raise RuntimeError(absent["DCP"])
    return next(peer for peer in peers if peer.name == "DCP")


def _load_with_dcp(machine: Machine, directory: str, state: Tree) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as elsewhere:  # what only the first call imports is not DCP's figure
        small = {"w": np.zeros(1, np.float32)}
        warm = _dcp(small, small)
        warm.save(elsewhere)
        warm.loads[LOAD_INTO](elsewhere)
    target = map_leaves(np.zeros_like, state)
    poison(target)  # every page is there before the load
    load = _dcp(state, target).loads[LOAD_INTO]
    measured = _measure(machine, f"{directory}/dcp", lambda: load(f"{directory}/dcp"))
    require_equal(map_leaves(as_tensor, target), state, "DCP")
    return measured


def _convert(machine: Machine, directory: str, step: str, layers: int, options: SaveOptions) -> tuple[float, int]:
    conversion = CONVERSIONS[step]
    shutil.rmtree(f"{directory}/made", ignore_errors=True)
    measured = _measure(machine, directory, lambda: conversion.run(directory, options))
    require_equal(conversion.load(directory), dict(flat_items(_state(layers))), step)
    shutil.rmtree(f"{directory}/made")
    return measured


def main(step: str, directory: str, layers: int, compression: Any) -> None:
    quick = not layers
    state = None if step in CONVERSIONS else _state(layers)
    nbytes = total_bytes(state) if state is not None else _stated_bytes(directory)
    machine = Machine(2 * nbytes, drop_all_caches=not quick)
    seconds, peak = 0.0, 0
    if step in CONVERSIONS:
        seconds, peak = _convert(machine, directory, step, layers, SaveOptions(compression=compression))
    elif state is not None and step == DCP_LOAD:
        seconds, peak = _load_with_dcp(machine, directory, state)
    elif state is not None:
        _prepare(directory, state, dcp=step == PREPARE_DCP)
    found = {"seconds": seconds, "peak_bytes": peak, "data_bytes": nbytes, "eviction": machine.eviction}
    print(json.dumps(found))


def _stated_bytes(directory: str) -> int:
    return blocking.read_manifest(f"{directory}/checkpoint").raw_bytes


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
