"""What the ranks report of their writing, checked by the coordinator before anything is made visible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from savestream.errors import CoordinationError, PlanError
from savestream.integrations.dcp.nesting import DcpPath
from savestream.pipeline.index_part import PartEntry
from savestream.planners.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["CollectedTensor", "RankPart", "WrittenItem", "collect_results", "read_results"]

Box: TypeAlias = tuple[int, ...] | None  # where a chunk begins; None for bytes


class RankPart(msgspec.Struct, frozen=True):
    """What a rank wrote altogether; all its results share one object.

    ``paths`` are those of its state where a cached plan remembers other ones.
    """

    save_id: str
    entry: PartEntry
    paths: dict[str, DcpPath]


class WrittenItem(msgspec.Struct, frozen=True):
    """A :class:`WriteResult`'s ``storage_data``: what lies where in which part."""

    part: RankPart
    offsets: Box
    sizes: tuple[int, ...]
    dtype: str
    requires_grad: bool | None
    raw_offset: int


class CollectedTensor(msgspec.Struct):
    """One tensor, or item of bytes, of the checkpoint: its description, and where each chunk lies."""

    fqn: str
    is_bytes: bool
    described: TensorStorageMetadata
    raw_offsets: list[int]
    parts: list[int]
    requires_grad: bool


class _Written(msgspec.Struct):
    rank: int
    item: WrittenItem


def read_results(save_id: str, results: Sequence[Sequence[Any]]) -> tuple[list[PartEntry], list[list[WrittenItem]]]:
    """The parts that were written, and each rank's items.

    Raises
    ------
    CoordinationError
        A rank wrote for another save.
    """
    parts: list[PartEntry] = []
    items: list[list[WrittenItem]] = []
    for rank, written in enumerate(results):
        items.append([_checked(result, rank, save_id) for result in written])
        if written:
            parts.append(items[-1][0].part.entry)
    return parts, items


def _checked(result: Any, rank: int, save_id: str) -> WrittenItem:
    item = result.storage_data
    if not isinstance(item, WrittenItem):
        raise CoordinationError(
            f"{result.index.fqn}: rank {rank} returned a result of {type(item).__qualname__}, so it used another "
            "storage writer than the coordinator; give all ranks a savestream StorageWriter"
        )
    if item.part.save_id != save_id or item.part.entry.rank != rank:
        raise CoordinationError(
            f"{result.index.fqn}: rank {rank} wrote it as rank {item.part.entry.rank} of save {item.part.save_id}, but "
            f"this is save {save_id}; nothing was published. Give each save a storage writer or a thread of its own"
        )
    return item


def collect_results(
    metadata: Any, results: Sequence[Sequence[Any]], items: Sequence[Sequence[WrittenItem]], owners: Mapping[Any, int]
) -> list[CollectedTensor]:
    """Match what was planned with what was written: every chunk and value exactly once.

    Parameters
    ----------
    metadata
        What the planner says the checkpoint holds.
    results, items
        Of each rank.
    owners
        Which rank was to write an ``(fqn, offsets)``, where that is known.

    Raises
    ------
    CoordinationError
        Something is missing, was written twice or was not planned; names fqn and rank.
    PlanError
        Ranks wrote chunks of one tensor with different dtypes.
    """
    written = _by_name(results, items)
    part_numbers = {rank: number for number, rank in enumerate(rank for rank, found in enumerate(items) if found)}
    collected = []
    for fqn, entry in metadata.state_dict_metadata.items():
        chunks = written.pop(fqn, {})
        if hasattr(entry, "chunks"):
            collected.append(_tensor(fqn, entry, chunks, owners, part_numbers))
        else:
            collected.append(_bytes(fqn, chunks, owners, part_numbers))
        if chunks:
            offsets, found = next(iter(chunks.items()))
            raise CoordinationError(f"{_name(fqn, offsets)}: rank {found.rank} wrote it, but nobody had planned it")
    for fqn, chunks in written.items():
        rank = next(iter(chunks.values())).rank
        raise CoordinationError(f"{fqn}: rank {rank} wrote it, but it is not in the planner's metadata")
    return collected


def _by_name(
    results: Sequence[Sequence[Any]], items: Sequence[Sequence[WrittenItem]]
) -> dict[str, dict[Box, _Written]]:
    written: dict[str, dict[Box, _Written]] = {}
    for rank, result, item in _pairs(results, items):
        chunks = written.setdefault(result.index.fqn, {})
        this = _Written(rank, item)
        other = chunks.setdefault(item.offsets, this)
        if other is not this:
            raise CoordinationError(
                f"{_name(result.index.fqn, item.offsets)}: written by rank {other.rank} and by rank {rank}; the "
                "planner must leave each item to one rank"
            )
    return written


def _pairs(
    results: Sequence[Sequence[Any]], items: Sequence[Sequence[WrittenItem]]
) -> Iterator[tuple[int, Any, WrittenItem]]:
    for rank, (found, known) in enumerate(zip(results, items, strict=True)):
        for result, item in zip(found, known, strict=True):
            yield rank, result, item


def _tensor(
    fqn: str, entry: Any, chunks: dict[Box, _Written], owners: Mapping[Any, int], part_numbers: Mapping[int, int]
) -> CollectedTensor:
    found = [_taken(fqn, chunk, chunks, owners) for chunk in entry.chunks]
    dtypes = {written.item.dtype: written.rank for written in found}
    if len(dtypes) > 1:
        listed = ", ".join(f"{dtype} on rank {rank}" for dtype, rank in dtypes.items())
        raise PlanError(f"{fqn}: its chunks have different dtypes ({listed}); convert them all to one")
    dtype = next(iter(dtypes), "") or str(entry.properties.dtype).removeprefix("torch.")
    seen = [written.item.requires_grad for written in found if written.item.requires_grad is not None]
    described = TensorStorageMetadata(
        TensorProperties(dtype),
        tuple(entry.size),
        [ChunkStorageMetadata(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks],
    )
    return CollectedTensor(
        fqn=fqn,
        is_bytes=False,
        described=described,
        raw_offsets=[written.item.raw_offset for written in found],
        parts=[part_numbers[written.rank] for written in found],
        requires_grad=seen[0] if seen else bool(entry.properties.requires_grad),
    )


def _taken(fqn: str, chunk: Any, chunks: dict[Box, _Written], owners: Mapping[Any, int]) -> _Written:
    offsets = tuple(chunk.offsets)
    found = chunks.pop(offsets, None)
    if found is None:
        raise _missing(fqn, offsets, owners)
    if found.item.sizes != tuple(chunk.sizes):
        raise CoordinationError(
            f"{_name(fqn, offsets)}: rank {found.rank} wrote a chunk of shape {found.item.sizes}, the metadata has one "
            f"of shape {tuple(chunk.sizes)}"
        )
    return found


def _bytes(
    fqn: str, chunks: dict[Box, _Written], owners: Mapping[Any, int], part_numbers: Mapping[int, int]
) -> CollectedTensor:
    found = chunks.pop(None, None)
    if found is None:
        raise _missing(fqn, None, owners)
    size = found.item.sizes
    described = TensorStorageMetadata(TensorProperties("uint8"), size, [ChunkStorageMetadata((0,), size)])
    return CollectedTensor(fqn, True, described, [found.item.raw_offset], [part_numbers[found.rank]], False)


def _missing(fqn: str, offsets: Box, owners: Mapping[Any, int]) -> CoordinationError:
    rank = owners.get((fqn, offsets))
    who = f"rank {rank} was to write it and did not" if rank is not None else "no rank wrote it"
    return CoordinationError(f"{_name(fqn, offsets)}: planned, but {who}; nothing was published")


def _name(fqn: str, offsets: Box) -> str:
    return f"{fqn} at {offsets}" if offsets and any(offsets) else fqn
