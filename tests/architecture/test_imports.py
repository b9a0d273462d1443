"""Which module may import which, and what an import of savestream may do."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys

import pytest
from sources import executed_on_import, imports, modules

# A unit is a module or package directly beneath savestream; it may import itself and what stands here. PUBLIC is the
# package root, `import savestream`.
PUBLIC = "savestream"
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "arrays": {"errors"},
    "events": {"errors"},
    "threads": {"errors"},
    "planners": {"errors", "arrays", "events"},
    "storage_backends": {"errors", "events", "threads"},
    "pipeline": {"errors", "version", "arrays", "events", "threads", "planners", "storage_backends"},
    "interchange": {"errors", "arrays", "events", "threads", "planners", "storage_backends", "pipeline"},
    "rng_state": {"errors", "arrays", "planners"},
    "blocking": {PUBLIC},
    # Its planners hand over finished plans, so torch's checkpoints join below the public API.
    "integrations": {PUBLIC, "errors", "arrays", "threads", "planners", "storage_backends", "pipeline"},
    "cli": {PUBLIC},
    "__main__": {"cli"},
}
ALLOWED[PUBLIC] = {"errors", "version", "arrays", "events", "planners", "rng_state", "storage_backends", "pipeline"}
ALLOWED[PUBLIC] |= {"interchange"}

FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "lightning", "pytorch_lightning", "transformers", "tensorflow", "cupy"}
OPTIONAL = FRAMEWORKS | {"rich", "typer", "obstore"}
# Planners are pure: they neither wait nor touch storage.
IMPURE = {"asyncio", "anyio", "aiofiles", "concurrent", "socket", "subprocess", "shutil", "tempfile", "mmap"}


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else PUBLIC


def internal_imports(module: str) -> list[tuple[str, int]]:
    found = imports(module, ast.walk(modules()[module]))
    return [(name, line) for name, line in found if name.split(".")[0] == PUBLIC]


def test_every_unit_has_its_place() -> None:
    units = {unit_of(module) for module in modules()}
    assert units <= set(ALLOWED), f"say in ALLOWED what {sorted(units - set(ALLOWED))} may import"


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    unit = unit_of(module)
    wrong = [
        f"line {line}: {module} imports {name}"
        for name, line in internal_imports(module)
        if unit_of(name) != unit and unit_of(name) not in ALLOWED[unit]
    ]
    assert not wrong


def test_planners_and_storage_backends_do_not_know_each_other() -> None:
    # Not even through something that both may import.
    reachable = {start: _reachable(start) for start in ("planners", "storage_backends")}
    assert "storage_backends" not in reachable["planners"]
    assert "planners" not in reachable["storage_backends"]


def _reachable(start: str) -> set[str]:
    found, queue = set(), [start]
    while queue:
        unit = queue.pop()
        if unit not in found:
            found.add(unit)
            members = [module for module in modules() if unit_of(module) == unit]
            queue.extend(unit_of(name) for module in members for name, _ in internal_imports(module))
    return found


def test_no_circle_of_imports() -> None:
    graph = {
        module: {name for name, _ in imports(module, executed_on_import(tree)) if name in modules()} - {module}
        for module, tree in modules().items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError naming the circle
    assert set(order) == set(modules())


@pytest.mark.parametrize("module", [module for module in modules() if unit_of(module) == "planners"])
def test_planners_are_pure(module: str) -> None:
    found = imports(module, ast.walk(modules()[module]))
    assert not [f"line {line}: {name}" for name, line in found if name.split(".")[0] in IMPURE]


@pytest.mark.parametrize("module", modules())
def test_no_framework_at_module_level(module: str) -> None:
    found = imports(module, executed_on_import(modules()[module]))
    assert not [f"line {line}: {name}" for name, line in found if name.split(".")[0] in FRAMEWORKS]


def test_the_checker_sees_what_it_must() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ntry:\n    import b\nfinally:\n"
        "    pass\nclass C:\n    import c\ndef f():\n    import d\n"
    )
    assert [name for name, _ in imports("savestream.planners.plan", executed_on_import(tree))] == ["typing", "b", "c"]
    relative = ast.parse("from . import metadata\nfrom ..errors import PlanError\nfrom savestream import errors\n")
    assert [name for name, _ in imports("savestream.planners.plan", ast.walk(relative))] == [
        "savestream.planners.metadata",
        "savestream.errors",
        "savestream.errors",
    ]


# Runs in a fresh interpreter. The dependencies come first: what they do on import is not ours.
SIDE_EFFECTS = """
import asyncio, atexit, json, logging, os, signal, sys, threading, warnings
import aiofiles, anyio, anyio.from_thread, anyio.to_thread, ml_dtypes, msgspec, numpy, xxhash, zstandard

registered = []

def watched(module, name):
    original = getattr(module, name)
    def wrapper(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "savestream":
            registered.append(f"{module.__name__}.{name} from {caller}")
        return original(*args, **kwargs)
    setattr(module, name, wrapper)

watched(atexit, "register")
watched(signal, "signal")
watched(threading, "_register_atexit")
if hasattr(os, "register_at_fork"):
    watched(os, "register_at_fork")

def snapshot():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None,
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "switch interval": sys.getswitchinterval(),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "warning filters": [repr(entry) for entry in warnings.filters],
        "log handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "own log handlers": [repr(handler) for handler in logging.getLogger("savestream").handlers],
        "log level": logging.getLogger("savestream").level,
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "loop policy": repr(asyncio.events._event_loop_policy),
    }

before = snapshot()
import savestream
after = snapshot()
print(json.dumps({
    "changed": [key for key in before if before[key] != after[key]],
    "registered": registered,
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
}))
"""


def test_importing_savestream_has_no_side_effect() -> None:
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", SIDE_EFFECTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    report = json.loads(outcome.stdout)
    assert report["changed"] == []
    assert report["registered"] == []
    assert "savestream" in report["modules"]
    assert not OPTIONAL & set(report["modules"])
