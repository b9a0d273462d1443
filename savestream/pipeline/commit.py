"""The commit and all around it: publish, resolve, list, discard, delete. A checkpoint exists iff its root does."""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Sequence

import msgspec
from anyio import CancelScope

from savestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from savestream.pipeline.limits import MAXIMUM_ROOT_BYTES
from savestream.pipeline.manifest import Root, decode_root
from savestream.storage_backends import Location
from savestream.storage_backends.base import ObjectInfo, StorageBackend
from savestream.threads import run_in_worker

__all__ = [
    "ROOT_NAME",
    "CheckpointEntry",
    "delete_checkpoint",
    "describe",
    "discard",
    "find_checkpoints",
    "head_root",
    "join_path",
    "new_save_id",
    "own_root",
    "publish",
    "read_root",
]

logger = logging.getLogger("savestream")

ROOT_NAME = "manifest.json"
_SCRATCH_NAME = "manifest.tmp"
_ROOT_BEGIN = b'{"format":"savestream",'
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
# Also what a crash may leave of a small file: it is written under a private name and renamed.
_OWN_FILE = re.compile(r"r\d{5,}(-\d{4,})?\.(bin|index\.json)|manifest\.tmp|\.r\d{5,}\.index\.json\.[0-9a-f]+\.tmp")
_STEP_NAME = re.compile(r"step-(\d{12,})")


class CheckpointEntry(msgspec.Struct, frozen=True):
    """A committed checkpoint beneath a root.

    Attributes
    ----------
    name
        Its directory's name.
    location
        Path or URL that ``load`` takes.
    step
        The step in a name of the form ``step-000000000123``, else None.
    """

    name: str
    location: str
    step: int | None


def join_path(prefix: str, name: str) -> str:
    """A path beneath a prefix that may be empty."""
    return f"{prefix}/{name}" if prefix else name


def describe(location: Location, name: str = "") -> str:
    """How messages call a place; :func:`~savestream.storage_backends.resolve_location` takes it back."""
    return (location.child(name) if name else location).url


def new_save_id() -> str:
    """128 random bits: no two saves ever share a name."""
    return secrets.token_hex(16)


async def head_root(location: Location) -> ObjectInfo | None:
    """The root manifest as storage describes it, or None where no checkpoint is committed.

    A ``manifest.json`` of somebody else's is no root: it does not begin as ours do, and no data of ours lies beside it.
    """
    found, is_own = await _look_at_root(location)
    return found if is_own else None


async def own_root(location: Location) -> ObjectInfo | None:
    """:func:`head_root`, for those who write or delete there: a ``manifest.json`` of somebody else's is an error."""
    found, is_own = await _look_at_root(location)
    if found is not None and not is_own:
        raise StorageError(
            errno.EEXIST,
            f"{describe(location, ROOT_NAME)} exists and is not savestream's; it is never overwritten or deleted. Save "
            "to another directory",
        )
    return found


async def _look_at_root(location: Location) -> tuple[ObjectInfo | None, bool]:
    """What stands where the root would, and whether it is savestream's."""
    found = await location.backend.head(join_path(location.path, ROOT_NAME))
    if found is None:
        return None, False
    begin = bytearray(min(found.size_bytes, len(_ROOT_BEGIN)))
    try:
        async with await location.backend.open_reader(found.path) as reader:
            await reader.read_into(0, memoryview(begin))
    except StorageError as error:
        if error.errno == errno.ENOENT:  # deleted just now
            return None, False
        if error.errno != errno.EIO:
            raise
        begin.clear()  # cut short just now, or unreadable
    return found, bytes(begin) == _ROOT_BEGIN or bool(await _save_ids(location))


async def read_root(location: Location) -> Root:
    """Read and check the root manifest; absence is an error that says whether an unfinished save lies there."""
    try:
        data = await location.backend.get(join_path(location.path, ROOT_NAME), maximum_bytes=MAXIMUM_ROOT_BYTES)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(await _absence(location)) from error
        if error.errno == errno.EFBIG:
            raise CorruptCheckpointError(f"{describe(location, ROOT_NAME)}: larger than any root manifest") from error
        raise
    try:
        return await run_in_worker(decode_root, data)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise type(error)(f"{describe(location, ROOT_NAME)}: {error}") from error


async def _absence(location: Location) -> str:
    place = describe(location)
    if await _save_ids(location):
        return (
            f"{place}: incomplete; a save here has not committed, because it still runs, or never did, because it was "
            "killed, so there is nothing to load. Load an earlier checkpoint, or save here again"
        )
    if location.path.rpartition("/")[2] == ROOT_NAME or place.endswith("/" + ROOT_NAME):
        return f"{place}: no checkpoint; name its directory, not the {ROOT_NAME} in it"
    beneath = await find_checkpoints(location)
    if beneath:
        return (
            f"{place}: no checkpoint itself, but a place that holds {len(beneath)}; load one of them, such as "
            f"{beneath[-1].location} (list_checkpoints names them all)"
        )
    return f"{place}: no checkpoint (there is no {ROOT_NAME})"


async def _save_ids(location: Location) -> list[str]:
    try:
        names = await location.backend.list_directories(location.path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    return [name for name in names if _SAVE_ID.fullmatch(name)]


async def publish(
    location: Location,
    data: bytes,
    *,
    save_id: str,
    overwrite: bool,
    replaces: ObjectInfo | None,
    superseded: str | None,
) -> None:
    """Make the checkpoint exist: one atomic, durable creation of the root, shielded from cancellation.

    ``replaces`` is what ``overwrite=True`` found there, if anything; ``superseded`` its save id, whose data goes
    afterwards.
    """
    backend = location.backend
    root = join_path(location.path, ROOT_NAME)
    scratch = join_path(location.path, f"{save_id}/{_SCRATCH_NAME}")
    with CancelScope(shield=True):
        try:
            if replaces is None:
                await backend.create(root, data, scratch=scratch)
            else:
                await backend.replace(root, data, scratch=scratch, expected_etag=replaces.etag)
        except Exception as error:  # whatever storage raised: what counts is what stands there now
            await _settle(location, save_id, error, overwriting=overwrite)
        if superseded is not None and superseded != save_id:
            await _discard_quietly(location, superseded)


async def _settle(location: Location, save_id: str, error: Exception, *, overwriting: bool) -> None:
    """Return if a failed commit took place all the same, else raise; data that a root may name is never given up.

    Storage that says "exists" may be answering the repetition of our own request.
    """
    number = error.errno if isinstance(error, OSError) else None
    standing = await _standing_id(location)
    if number == errno.EEXIST and standing == save_id:
        return
    if isinstance(error, StorageError) and error.outcome == "unknown":
        raise error
    if standing == save_id or standing == "":
        raise StorageError(
            number, f"{error}; the checkpoint may be visible all the same: look before you save there again", "unknown"
        ) from error
    if number == errno.EEXIST:
        cure = "it was overwritten meanwhile; save again" if overwriting else "save elsewhere, or pass overwrite=True"
        raise CheckpointExistsError(
            f"{describe(location)}: another save committed here first and was left alone; {cure}"
        ) from error
    raise error


async def _standing_id(location: Location) -> str | None:
    """The id of the save that is committed there; None where none is, "" where that cannot be learnt."""
    try:
        if await location.backend.head(join_path(location.path, ROOT_NAME)) is None:
            return None  # without the listing that a message about absence needs, and that may fail as well
        return (await read_root(location)).checkpoint_id
    except CheckpointNotFoundError:
        return None
    except Exception:  # unreadable in whatever way: the caller then keeps its data
        logger.warning("%s: the outcome of a commit cannot be read back", describe(location), exc_info=True)
        return ""


async def discard(location: Location, save_id: str) -> None:
    """Remove what a save wrote. Only names that savestream itself gives are touched."""
    prefix = join_path(location.path, save_id)
    objects = await location.backend.list_objects(prefix)
    own = [found.path for found in objects if _OWN_FILE.fullmatch(found.path.removeprefix(prefix + "/"))]
    await location.backend.delete(own)


async def _discard_quietly(location: Location, save_id: str) -> None:
    try:
        await discard(location, save_id)
    except Exception as error:  # the new checkpoint stands; what is left is garbage that a later sweep removes
        logger.warning("%s: the replaced data could not be removed: %s", describe(location, save_id), error)


async def find_checkpoints(location: Location) -> list[CheckpointEntry]:
    """The committed checkpoints directly beneath a root, by step number, then by name."""
    backend: StorageBackend = location.backend
    try:
        names = await backend.list_directories(location.path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    entries = []
    for name in names:
        child = location.child(name)
        if await head_root(child) is not None:
            match = _STEP_NAME.fullmatch(name)
            step = int(match.group(1)) if match else None
            entries.append(CheckpointEntry(name, describe(child), step))
    return sorted(entries, key=lambda entry: (-1 if entry.step is None else entry.step, entry.name))


async def delete_checkpoint(location: Location) -> None:
    """Make a checkpoint unloadable (root first), then remove its data and nothing else."""
    if await own_root(location) is None:
        raise CheckpointNotFoundError(await _absence(location))
    root = join_path(location.path, ROOT_NAME)
    doomed: Sequence[str]
    try:
        doomed = [(await read_root(location)).checkpoint_id]
    except CorruptCheckpointError:
        doomed = await _save_ids(location)  # a damaged root cannot say: everything here that bears our names
    await location.backend.delete([root])
    for save_id in doomed:
        await discard(location, save_id)
