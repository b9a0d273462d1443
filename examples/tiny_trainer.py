"""A training loop that saves in the background, resumes from the newest checkpoint, and reports what happens.

    python examples/tiny_trainer.py --root checkpoints --steps 80 --save-every 8

Started again, it goes on where the newest committed checkpoint stands. Reports are JSON objects on standard output, one
a line; ``demo.py`` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tiny_network import State, accuracy, initial_state, train_step

import savestream

__all__ = ["committed", "digests", "leaves", "train"]

_report_lock = threading.Lock()  # the observer reports from savestream's threads


def report(event: str, **fields: object) -> None:
    with _report_lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def report_commit(step: int, event: savestream.Event) -> None:
    """The observer of one save."""
    if isinstance(event, savestream.SaveCommitted):
        done = event.statistics
        report("committed", step=step, seconds=done.total_seconds, raw=done.raw_bytes, stored=done.stored_bytes)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and lists with its path."""
    if isinstance(tree, dict | list):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(child, f"{path}/{key}")
    else:
        yield path, tree


def digests(state: State) -> dict[str, str]:
    """SHA-256 of every leaf's type and bits."""
    found = {}
    for path, leaf in leaves(state):
        if isinstance(leaf, np.ndarray):
            found[path] = hashlib.sha256(f"{leaf.dtype.str} {leaf.shape} ".encode() + leaf.tobytes()).hexdigest()
        else:
            found[path] = hashlib.sha256(f"{type(leaf).__name__} {leaf!r}".encode()).hexdigest()
    return found


async def committed(root: str) -> list[str]:
    """The committed checkpoints beneath ``root``, oldest first."""
    return [found.location for found in await savestream.list_checkpoints(root)]


async def train(arguments: argparse.Namespace) -> State:
    """Train to the last step, saving in the background on the way."""
    options = savestream.SaveOptions(write_bytes_per_second=arguments.write_bytes_per_second)
    found = await committed(arguments.root)
    state: State = await savestream.load(found[-1]) if found else initial_state(arguments.seed, arguments.hidden_units)
    size_bytes = sum(leaf.nbytes for _, leaf in leaves(state) if isinstance(leaf, np.ndarray))
    report("started", step=state["step"], bytes=size_bytes, resumed_from=found[-1] if found else None)

    saving: savestream.SaveHandle | None = None
    while state["step"] < arguments.steps:
        loss = train_step(state)
        step: int = state["step"]
        report("step", step=step, loss=loss)
        if step % arguments.save_every == 0 or step == arguments.steps:
            stopped = time.perf_counter()
            if saving is not None:
                await saving  # one save at a time; an error of the last one surfaces here
            saving = await savestream.start_save(
                state,
                f"{arguments.root}/step-{step:012d}",
                step=step,
                metrics={"loss": loss},
                options=options,
                observer=functools.partial(report_commit, step),
            )  # from here on the state may change
            report("staged", step=step, stall_seconds=time.perf_counter() - stopped)
    if saving is not None:
        await saving
    report(
        "finished",
        step=state["step"],
        first_loss=state["loss_history"][0],
        loss=state["loss_history"][-1],
        accuracy=accuracy(state),
        digests=digests(state),
    )
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--hidden-units", type=int, default=2432)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument(
        "--write-bytes-per-second", type=float, default=None, help="upper bound for the rate of writing"
    )
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
