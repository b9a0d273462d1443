"""Command line: ``python -m benchmarks NAME``, or all of them without a name."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import interchange, large, memory, small, tensors
from benchmarks.report import Report

_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace, int], Report], str]]
_COMMANDS = {
    "large": (large.add_arguments, large.run, "a GPT-2 train state beside DCP, torch.save and torchsnapshot"),
    "small": (small.add_arguments, small.run, "tens of thousands of small arrays"),
    "tensors": (tensors.add_arguments, tensors.run, "torch tensors beside numpy arrays, and replans beside DCP's"),
    "memory": (memory.add_arguments, memory.run, "peak memory of a save and of a load"),
    "interchange": (interchange.add_arguments, interchange.run, "conversion from DCP, from and to safetensors"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (add_arguments, _, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_arguments(command)
        command.add_argument("--rounds", type=int, help="how many times each system has its turn")
        command.add_argument("--root", help="where to write; a file system on a disk (default: /var/tmp)")
        command.add_argument("--json", metavar="FILE", help="write all samples and conclusions there")
        command.add_argument(
            "--quick", action="store_true", help="tiny sizes, to see that it works; figures mean nothing"
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; a goal that does not hold is a result, not a failure."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        # Each in a process of its own, so that none measures what another left in memory.
        commands = [[sys.executable, "-m", "benchmarks", name] for name in _COMMANDS]
        return max(subprocess.run(command, check=False).returncode for command in commands)
    default = 2 if chosen.quick else chosen.default_rounds
    rounds = default if chosen.rounds is None else chosen.rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    report = _COMMANDS[chosen.command][1](chosen, rounds)
    report.show()
    if chosen.quick:
        print("--quick: the sizes are too small for the figures to mean anything")
    if chosen.json:
        report.write_json(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
