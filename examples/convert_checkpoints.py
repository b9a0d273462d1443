"""Convert what other libraries wrote into savestream checkpoints, and checkpoints into safetensors files.

    python convert_checkpoints.py SOURCE CHECKPOINT            a DCP directory, safetensors, or a file of torch.save
    python convert_checkpoints.py --export CHECKPOINT FILES    a directory, or a name that ends with .safetensors

Models larger than memory convert. A DCP directory and safetensors need neither PyTorch nor any other library, and
nothing in the files is run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import savestream

Importer = Callable[..., Awaitable[savestream.ConversionInfo]]


def importer_for(source: Path) -> Importer:
    """The function for what is there."""
    if (source / ".metadata").exists():
        return savestream.import_dcp
    if source.is_dir() or source.suffix in (".safetensors", ".json"):
        return savestream.import_safetensors
    return savestream.import_torch


async def convert(importer: Importer, source: str, checkpoint: str, *, skip: bool) -> None:
    """Import, and say what came of it."""
    info = await importer(source, checkpoint, on_unsupported="skip" if skip else "raise")
    print(f"{info.location}: {info.statistics.raw_bytes / 1e6:.1f} MB in {info.statistics.total_seconds:.2f} s")
    for key in info.skipped:
        print(f"left out: {key}")


async def export(checkpoint: str, files: str) -> None:
    """Write the arrays of a checkpoint; keys that hold no array are left out."""
    manifest = await savestream.read_manifest(checkpoint)
    entries = manifest.contents.state_dict_metadata
    arrays = [key for key, entry in entries.items() if hasattr(entry, "chunks")]
    for path in await savestream.export_safetensors(checkpoint, files, keys=arrays):
        print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("dest")
    parser.add_argument("--export", action="store_true", help="SOURCE is a checkpoint, DEST becomes safetensors files")
    parser.add_argument("--skip", action="store_true", help="leave out what only running code could rebuild")
    arguments = parser.parse_args()
    if arguments.export:
        work = export(arguments.source, arguments.dest)
    else:
        importer = importer_for(Path(arguments.source))
        work = convert(importer, arguments.source, arguments.dest, skip=arguments.skip)
    try:
        asyncio.run(work)
    except savestream.SavestreamError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
