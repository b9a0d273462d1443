"""Train, kill the trainer in the middle of a save, resume, and compare every bit with a run that was never disturbed.

    make demo            or            python examples/demo.py [--quick] [--root DIRECTORY]

Three runs of ``tiny_trainer.py``, each a process of its own: one to the end; one that is killed (SIGKILL) while a save
is on its way to the disk; one that resumes from what the killed one had committed. Exits with 1 if the kill missed
every save, if the unfinished save can be seen or loaded, or if anything differs in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from demo_display import RunDisplay, megabytes
from rich.console import Console
from tiny_trainer import committed, digests, leaves

import savestream

__all__ = ["main"]

TRAINER = Path(__file__).with_name("tiny_trainer.py")
# One thread each, so that sums are taken in the same order in every run.
SINGLE_THREADED = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
POLL_SECONDS = 0.0005
SECONDS_PER_SAVE = 0.5  # of the run that gets killed


class DemoError(Exception):
    """The demo could not show what it claims."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is trained."""

    steps: int
    save_every: int
    hidden_units: int


FULL = Scale(steps=80, save_every=8, hidden_units=2432)
QUICK = Scale(steps=24, save_every=4, hidden_units=1024)


@dataclasses.dataclass
class Demo:
    """The three runs and their comparison."""

    scale: Scale
    root: Path
    console: Console

    async def run(self) -> None:
        whole, cut = self.root / "uninterrupted", self.root / "interrupted"
        print(f"Checkpoints go to {self.root}")
        print(f"\n1. Train {self.scale.steps} steps, saving in the background every {self.scale.save_every}")
        expected = await self.train_to_the_end(whole)
        print(
            f"  loss {expected['first_loss']:.4f} -> {expected['loss']:.4f}, "
            f"{expected['accuracy']:.1%} of unseen digits read correctly"
        )
        if not expected["loss"] < expected["first_loss"] / 2:
            raise DemoError("the network did not learn")

        rate = expected["bytes"] / SECONDS_PER_SAVE
        print(f"\n2. The same again, but kill the trainer in mid-save (writes held to {megabytes(rate)}/s in this run,")
        print("   so that there is a middle to hit on the fastest disk)")
        unfinished = await self.train_and_kill(cut, rate)
        await self.check_invisible(cut, unfinished)

        print("\n3. Start it once more: it resumes from the newest committed checkpoint")
        actual = await self.train_to_the_end(cut)

        print("\n4. Compare the two")
        await self.compare(expected, actual, whole, cut)

    async def train_to_the_end(self, root: Path) -> dict[str, Any]:
        """Run the trainer and return its last report, with the size of its state."""
        process = await self._start(root)
        last: dict[str, Any] = {}
        with RunDisplay(self.console, self.scale.steps) as display:
            async for event in _reports(process):
                display.show(event)
                if event["event"] == "started" and event["resumed_from"]:
                    print(f"  resumed at step {event['step']} from {event['resumed_from']}")
                last = {**last, **event}
        if await process.wait() != 0 or last.get("event") != "finished":
            raise DemoError(f"the trainer failed with status {process.returncode}")
        return last

    async def train_and_kill(self, root: Path, write_bytes_per_second: float) -> Path:
        """Kill the trainer in mid-save, and return the directory of the save that it could not finish.

        A save may commit between the look and the kill; then the trainer resumes and its next save is tried.
        """
        last_step = 0
        while last_step < self.scale.steps:
            process = await self._start(root, "--write-bytes-per-second", str(write_bytes_per_second))
            with RunDisplay(self.console, self.scale.steps) as display:
                showing = asyncio.create_task(_show_all(process, display))
                try:
                    caught = await self._wait_for_half_a_save(root, process)
                finally:
                    if process.returncode is None:
                        process.kill()
                    await process.wait()
                    await showing
                if caught is None:
                    raise DemoError(f"no save could be caught half-way; the trainer ended with {process.returncode}")
                last_step = _step_of(caught)
                if not (caught / "manifest.json").exists():
                    display.show_kill(last_step)
                    return caught
            print(f"  the save of step {last_step} was quicker than the kill; trying the next one")
        raise DemoError("every save was quicker than the kill")

    async def _wait_for_half_a_save(self, root: Path, process: asyncio.subprocess.Process) -> Path | None:
        while process.returncode is None:
            found = _half_a_save(root, self.scale.steps // 2)
            if found is not None:
                return found
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def check_invisible(self, root: Path, unfinished: Path) -> None:
        """What the killed save left on the disk is no checkpoint to anybody."""
        print(f"  on disk: {unfinished.name}/ with {_describe_files(unfinished)}, but no manifest.json")
        visible = [Path(location).name for location in await committed(str(root))]
        if unfinished.name in visible or not visible:
            raise DemoError(f"list_checkpoints shows {visible}")
        print(f"  list_checkpoints: {', '.join(name.removeprefix('step-').lstrip('0') for name in visible)}")
        try:
            await savestream.load(unfinished)
        except savestream.CheckpointNotFoundError as error:
            print(f"  load refuses it: {str(error).replace(str(self.root), '...')}")
        else:
            raise DemoError("the unfinished save could be loaded")

    async def compare(self, expected: dict[str, Any], actual: dict[str, Any], whole: Path, cut: Path) -> None:
        """Compare what the trainers held in memory at the end, and what their last checkpoints hold."""
        name = f"step-{self.scale.steps:012d}"
        loaded = [await savestream.load(root / name) for root in (whole, cut)]
        in_memory = [expected["digests"], actual["digests"]]
        differing = [path for path in in_memory[0] if in_memory[0][path] != in_memory[1].get(path)]
        differing += _differing_leaves(*loaded)
        if in_memory[0].keys() != in_memory[1].keys() or any(digests(state) != in_memory[0] for state in loaded):
            differing.append("a checkpoint and the state that was saved in it")
        if differing or expected["loss"] != actual["loss"]:
            raise DemoError(f"these differ: {', '.join(sorted(set(differing)))}; {expected['loss']} {actual['loss']}")
        arrays = [leaf for _, leaf in leaves(loaded[0]) if isinstance(leaf, np.ndarray)]
        print(f"  final loss: {expected['loss']!r} uninterrupted, {actual['loss']!r} killed and resumed")
        print(f"  compared in memory and on disk: {len(in_memory[0])} leaves, of these")
        print(f"  {len(arrays)} arrays with {megabytes(sum(array.nbytes for array in arrays))}")

    async def _start(self, root: Path, *more: str) -> asyncio.subprocess.Process:
        scale = self.scale
        sizes = {"--steps": scale.steps, "--save-every": scale.save_every, "--hidden-units": scale.hidden_units}
        options = [text for name, value in sizes.items() for text in (name, str(value))]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(TRAINER),
            "--root",
            str(root),
            *options,
            *more,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **SINGLE_THREADED},
        )


async def _reports(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.endswith(b"\n"):  # a killed trainer may leave half a line
            yield json.loads(line)


async def _show_all(process: asyncio.subprocess.Process, display: RunDisplay) -> None:
    async for event in _reports(process):
        display.show(event)


def _half_a_save(root: Path, from_step: int) -> Path | None:
    """A step directory that holds some data but no manifest, if there is a committed checkpoint to go back to."""
    steps = sorted(root.glob("step-*"))
    complete = [directory for directory in steps if (directory / "manifest.json").exists()]
    for directory in steps:
        if complete and directory not in complete and _step_of(directory) >= from_step and _has_data(directory):
            return directory
    return None


def _has_data(directory: Path) -> bool:
    try:
        return any(path.stat().st_size > 0 for path in directory.glob("*/*.bin"))
    except FileNotFoundError:  # a save that tidies up after itself
        return False


def _describe_files(directory: Path) -> str:
    sizes_bytes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    return f"{len(sizes_bytes)} file(s), {megabytes(sum(sizes_bytes))}"


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _differing_leaves(one: Any, other: Any) -> list[str]:
    left, right = dict(leaves(one)), dict(leaves(other))
    differing = list(left.keys() ^ right.keys())
    for path in left.keys() & right.keys():
        a, b = left[path], right[path]
        if isinstance(a, np.ndarray):
            same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
            same = same and a.tobytes() == b.tobytes()
        else:
            same = type(a) is type(b) and a == b
        if not same:
            differing.append(path)
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller network and fewer steps")
    parser.add_argument(
        "--root", type=Path, help="an empty directory to keep the checkpoints in; default: a temporary one"
    )
    arguments = parser.parse_args()
    if arguments.root is not None and arguments.root.exists() and any(arguments.root.iterdir()):
        parser.error(f"{arguments.root} is not empty")
    with tempfile.TemporaryDirectory(prefix="savestream-demo-") as temporary:
        root = (arguments.root or Path(temporary)).resolve()
        try:
            asyncio.run(Demo(QUICK if arguments.quick else FULL, root, Console()).run())
        except DemoError as error:
            print(f"\nFAILED: {error}")
            return 1
    print("\nPASSED: killed in mid-save, resumed, and identical to the undisturbed run, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
