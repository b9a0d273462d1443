"""Checks that a global plan stores every element of every array exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from savestream.errors import PlanError
from savestream.planners.geometry import in_bounds, overlapping_pairs, volume
from savestream.planners.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    Shape,
    TensorStorageMetadata,
)
from savestream.planners.plan import SavePlan, WriteItem

__all__ = ["check_chunks", "check_global_plan", "is_whole", "validate_global_plan"]

_MAXIMUM_MESSAGE_LENGTH = 2000
_LARGEST_SIZE = 1 << 62


def check_global_plan(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Raise PlanError unless :func:`validate_global_plan` finds nothing."""
    errors = validate_global_plan(plans, metadata)
    if errors:
        text = "; ".join(errors)
        if len(text) > _MAXIMUM_MESSAGE_LENGTH:
            text = f"{text[:_MAXIMUM_MESSAGE_LENGTH]}... ({len(errors)} in all)"
        raise PlanError(f"the plan is invalid, nothing has been written: {text}")


def validate_global_plan(plans: Sequence[SavePlan], metadata: Metadata) -> list[str]:
    """What is wrong with a global plan.

    Whatever the number of plans: every chunk lies in its array, no two overlap, together they cover it; every item is
    planned once, by one rank, with the dtype and size that the metadata names. Zero-dimensional and empty arrays are no
    exception: an empty array has one empty chunk or none. Empty chunks of other arrays are ignored.

    Returns
    -------
    list of str
        One message for each fault, with key, boxes and ranks.
    """
    if len(plans) == 1 and _is_plain(plans[0], metadata):
        return []
    single: dict[str, WriteItem] = {}
    owners: dict[str, int] = {}
    several: dict[str, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.index.fqn
            first = single.setdefault(name, item)
            owner = owners.setdefault(name, rank)
            if first is not item:
                several.setdefault(name, [(owner, first)]).append((rank, item))
    errors: list[str] = []
    entries = metadata.state_dict_metadata
    simple: dict[tuple[int, int], bool] = {}  # arrays of equal description share their entry and their item's data
    for name, entry in entries.items():
        held_once = single.get(name)
        if held_once is not None and name not in several:
            pair = (id(entry), id(held_once.tensor_data))
            if pair not in simple:
                simple[pair] = _is_simple(entry, held_once)
            if simple[pair]:
                continue
        holders = several.get(name) or ([(owners[name], held_once)] if held_once is not None else [])
        if isinstance(entry, BytesStorageMetadata):
            errors += _check_value(name, holders)
        else:
            errors += _check_tensor(name, entry, holders)
    strangers = [name for name in single if name not in entries]
    errors += [
        f"{name}: planned by {_ranks(several.get(name) or [(owners[name], single[name])])}, but not in the metadata"
        for name in strangers
    ]
    return errors


def _is_plain(plan: SavePlan, metadata: Metadata) -> bool:
    """Whether a lone plan's items are, one by one, all of what the metadata lists: the usual case, seen in one pass."""
    entries = metadata.state_dict_metadata
    if len(plan.items) != len(entries):
        return False
    simple: set[tuple[int, int]] = set()
    for item, (name, entry) in zip(plan.items, entries.items(), strict=True):
        if item.index.fqn != name:
            return False
        pair = (id(entry), id(item.tensor_data))
        if pair not in simple:
            if not _is_simple(entry, item):
                return False
            simple.add(pair)
    return True


def _is_simple(entry: TensorStorageMetadata | BytesStorageMetadata, item: WriteItem) -> bool:
    """Whether one item plainly is all of what an entry says, which is the usual case."""
    data = item.tensor_data
    if data is None or isinstance(entry, BytesStorageMetadata):
        return data is None and isinstance(entry, BytesStorageMetadata)
    chunks = entry.chunks
    if len(chunks) != 1 or data.size != entry.size or data.properties != entry.properties:
        return False
    return chunks[0] == data.chunk and is_whole(data.chunk, data.size)


def _check_value(name: str, held: Sequence[tuple[int, WriteItem]]) -> list[str]:
    if any(item.tensor_data is not None for _, item in held):
        return [f"{name}: planned as an array and as a value, by {_ranks(held)}"]
    return [f"{name}: planned {len(held)} times, by {_ranks(held)}"] if len(held) > 1 else []


def _check_tensor(name: str, entry: TensorStorageMetadata, held: Sequence[tuple[int, WriteItem]]) -> list[str]:
    errors = []
    ranks: dict[tuple[Shape, Shape], list[int]] = {}
    for rank, item in held:
        data = item.tensor_data
        if data is None:
            return [f"{name}: planned as an array and as a value, by {_ranks(held)}"]
        if data.size != entry.size or data.properties != entry.properties:
            errors.append(
                f"{name}: planned as {data.properties.dtype}{list(data.size)} by rank {rank} and as "
                f"{entry.properties.dtype}{list(entry.size)} elsewhere; two leaves may have been given the same name"
            )
        ranks.setdefault((data.chunk.offsets, data.chunk.sizes), []).append(rank)
    if errors:
        return errors
    planned = [item.tensor_data.chunk for _, item in held if item.tensor_data is not None]
    if len(planned) != len(entry.chunks) and sorted(map(_box, planned)) != sorted(map(_box, entry.chunks)):
        errors.append(f"{name}: the plans hold {len(planned)} chunks, the metadata {len(entry.chunks)}")
    return errors + check_chunks(name, entry.size, planned if held else entry.chunks, ranks)


def _box(chunk: ChunkStorageMetadata) -> tuple[Shape, Shape]:
    return (chunk.offsets, chunk.sizes)


def is_whole(chunk: ChunkStorageMetadata, size: Shape) -> bool:
    """Whether a chunk is all of a possible array."""
    return chunk.sizes == size and chunk.offsets == (0,) * len(size) and _is_possible(size)


def _is_possible(size: Shape) -> bool:
    return not size or (min(size) >= 0 and max(size) < _LARGEST_SIZE)


def check_chunks(
    name: str,
    size: Shape,
    chunks: Sequence[ChunkStorageMetadata],
    ranks: Mapping[tuple[Shape, Shape], Sequence[int]] | None = None,
) -> list[str]:
    """What is wrong with the chunks of one array: out of bounds, overlapping, or leaving elements out.

    Parameters
    ----------
    name, size
        Key and global shape of the array.
    chunks
        Its boxes; empty ones hold nothing and are only checked for bounds.
    ranks
        Who holds each box ``(offsets, sizes)``, for messages.
    """
    if len(chunks) == 1 and is_whole(chunks[0], size):
        return []
    if not _is_possible(size):
        return [f"{name}: the shape {size} is impossible"]

    def show(chunk: ChunkStorageMetadata) -> str:
        held = ranks.get(_box(chunk)) if ranks else None
        owners = f" of rank {', '.join(map(str, sorted(set(held))))}" if held else ""
        return f"box at {chunk.offsets} of sizes {chunk.sizes}{owners}"

    outside = [chunk for chunk in chunks if not in_bounds(chunk, size)]
    if outside:
        return [f"{name}: {show(chunk)} is out of bounds of {size}" for chunk in outside]
    full = [chunk for chunk in chunks if volume(chunk.sizes)]
    total = volume(size)
    errors = []
    if not total and len(chunks) > 1:
        errors.append(f"{name}: an empty array has {len(chunks)} chunks; one is enough")
    clashes = _clashes(full)
    for first, second in clashes:
        cure = (
            "; give two leaves two names, or declare identical boxes with replicated=True"
            if _box(full[first]) == _box(full[second])
            else ""
        )
        errors.append(f"{name}: overlapping boxes: {show(full[first])} and {show(full[second])}{cure}")
    covered = sum(volume(chunk.sizes) for chunk in full)
    if not clashes and covered != total:
        errors.append(f"{name}: {total - covered} of {total} elements of shape {size} are in no box (a hole)")
    return errors


def _clashes(chunks: Sequence[ChunkStorageMetadata]) -> list[tuple[int, int]]:
    if len(chunks) > 1 and not chunks[0].offsets:
        return [(0, 1)]  # two chunks of a zero-dimensional array
    return overlapping_pairs(chunks)


def _ranks(held: Sequence[tuple[int, WriteItem]]) -> str:
    return "rank " + ", ".join(str(rank) for rank in sorted({rank for rank, _ in held}))
