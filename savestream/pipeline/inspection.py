"""What a checkpoint holds, without reading its arrays."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from savestream.errors import CorruptCheckpointError
from savestream.pipeline.open_checkpoint import metadata_of, open_checkpoint
from savestream.planners.metadata import Metadata
from savestream.planners.values import decode_value
from savestream.storage_backends import Location
from savestream.threads import run_in_worker

__all__ = ["CheckpointManifest", "inspect_checkpoint"]


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The root manifest, for people and tools.

    Attributes
    ----------
    location, save_id, created, writer, version
        Where it is, and who wrote it when (UTC, ISO 8601) in which format version.
    step, metrics, metadata
        What the caller of ``save`` gave.
    world_size
        Ranks that wrote it.
    raw_bytes
        Bytes of array data before the codec.
    contents
        Names, shapes, dtypes and chunks: ``contents.state_dict_metadata`` maps each key to its storage metadata.
    """

    location: str
    save_id: str
    created: str
    writer: str
    version: tuple[int, ...]
    step: int | None
    metrics: Mapping[str, float] | None
    metadata: object
    world_size: int
    raw_bytes: int
    contents: Metadata


def _decode_metrics(metrics: Mapping[str, object] | None) -> dict[str, float] | None:
    if metrics is None:
        return None
    return {name: _decode_metric(name, value) for name, value in metrics.items()}


def _decode_metric(name: str, value: object) -> float:
    number = decode_value(value, key=name)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise CorruptCheckpointError(f"the manifest's metric {name!r} is a {type(number).__qualname__}, not a number")
    return number  # an int stays an int: a float could not hold every one of them


async def inspect_checkpoint(location: Location) -> CheckpointManifest:
    """Read the root only."""
    checkpoint = await open_checkpoint(location)
    root = checkpoint.root
    return CheckpointManifest(
        location=checkpoint.place,
        save_id=root.checkpoint_id,
        created=root.created,
        writer=root.writer,
        version=tuple(root.version),
        step=root.step,
        metrics=_decode_metrics(root.metrics),
        metadata=decode_value(root.user, key="metadata"),
        world_size=root.world_size,
        raw_bytes=sum(part.raw_bytes for part in root.parts),
        contents=await run_in_worker(metadata_of, checkpoint),
    )
