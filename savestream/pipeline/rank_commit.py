"""What stands at a save's destination, the root that its parts make up, and its publication. One process does this."""

from __future__ import annotations

import datetime
import logging

import msgspec
from anyio import CancelScope

from savestream.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
from savestream.pipeline.codecs import CODECS
from savestream.pipeline.commit import describe, discard, own_root, publish, read_root
from savestream.pipeline.manifest import PartEntry, Root, encode_root
from savestream.storage_backends import Location
from savestream.storage_backends.base import ObjectInfo
from savestream.threads import run_in_worker
from savestream.version import __version__

__all__ = [
    "RootContent",
    "Standing",
    "commit_root",
    "discard_quietly",
    "encode_content",
    "examine_destination",
    "may_be_visible",
]

logger = logging.getLogger("savestream")


class Standing(msgspec.Struct, frozen=True):
    """The checkpoint that a save replaces: its root as storage describes it, and its save id; None where unknown."""

    replaces: ObjectInfo | None = None
    superseded: str | None = None


class RootContent(msgspec.Struct):
    """What a root holds besides its plan section."""

    save_id: str
    parts: list[PartEntry]
    values: list[object]
    world_size: int = 1
    user: object = None
    step: int | None = None
    metrics: dict[str, object] | None = None
    fingerprint: bytes | None = None


async def examine_destination(location: Location, *, overwrite: bool) -> Standing:
    """Look at what a save would replace, before anything is staged.

    Raises
    ------
    CheckpointExistsError
        A checkpoint is there and ``overwrite`` is False.
    """
    existing = await own_root(location)
    if existing is None:
        return Standing()
    if not overwrite:
        raise CheckpointExistsError(
            f"{describe(location)}: a checkpoint is already there; save elsewhere, or pass overwrite=True to replace it"
        )
    try:
        return Standing(existing, (await read_root(location)).checkpoint_id)
    except CheckpointNotFoundError:
        return Standing()  # deleted just now
    except CorruptCheckpointError:
        return Standing(existing)  # replaced all the same; data that a damaged root cannot name stays


async def commit_root(
    location: Location, content: RootContent, section: bytes, *, standing: Standing, overwrite: bool
) -> None:
    """Make the checkpoint exist. Every part that ``content`` names must be durable."""
    root = await run_in_worker(encode_content, content, section)
    await publish(
        location,
        root,
        save_id=content.save_id,
        overwrite=overwrite,
        replaces=standing.replaces,
        superseded=standing.superseded,
    )


def encode_content(content: RootContent, section: bytes) -> bytes:
    """The root as bytes."""
    root = Root(
        checkpoint_id=content.save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        writer=f"savestream {__version__}",
        step=content.step,
        metrics=content.metrics,
        user=content.user,
        world_size=content.world_size,
        fingerprint=content.fingerprint.hex() if content.fingerprint is not None else "",
        codecs=list(CODECS),
        parts=content.parts,
        values=content.values,
    )
    return encode_root(root, section)


def may_be_visible(error: BaseException) -> bool:
    """Whether a commit that ended so may have taken place: then its data must stay."""
    return isinstance(error, StorageError) and error.outcome == "unknown"


async def discard_quietly(location: Location, save_id: str) -> None:
    """Remove what a failed save wrote, best effort, even while it is being cancelled."""
    with CancelScope(shield=True):
        try:
            await discard(location, save_id)
        except Exception:  # the error that led here must reach the caller; what is left bears this save's id alone
            logger.warning("%s: data of a failed save stays behind", describe(location), exc_info=True)
