"""Which rank writes what several ranks hold."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from savestream.planners.metadata import MetadataIndex
from savestream.planners.plan import SavePlan, WriteItem, WriteItemType

__all__ = ["dedup_save_plans"]

_BUNDLES_PER_RANK = 32


def dedup_save_plans(plans: Sequence[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """Keep each replicated item on exactly one of the ranks that hold it.

    Plain arrays and values are replicated wherever they occur twice; shards only where they are declared so: the same
    undeclared box on two ranks is left for the validation to refuse. An item whose memory another one shares
    (``alias_of``) stays with it where that is possible, and is independent otherwise.

    Parameters
    ----------
    plans
        Local plans in the order of ranks.
    save_to_lowest_rank
        Give every item to the lowest rank that holds it, instead of balancing bytes.

    Returns
    -------
    list of SavePlan
        The plans without the items that another rank writes; the same for the same input. Balanced plans differ by
        a few percent where no single item is too large. Small items stay together, so that reading them back opens
        few files.
    """
    if len(plans) < 2:
        return list(plans)
    holders = _replicated_items(plans)
    owner = _lowest(holders) if save_to_lowest_rank else _balanced(plans, holders)
    return [_kept(plan, rank, owner) for rank, plan in enumerate(plans)]


def _may_repeat(item: WriteItem) -> bool:
    return item.replicated or item.type is not WriteItemType.SHARD


def _replicated_items(plans: Sequence[SavePlan]) -> dict[MetadataIndex, dict[int, WriteItem]]:
    """Rank and item of each index that several ranks hold."""
    held: dict[MetadataIndex, dict[int, WriteItem]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if _may_repeat(item):
                held.setdefault(item.index, {}).setdefault(rank, item)
    return {index: ranks for index, ranks in held.items() if len(ranks) > 1 and _agree(list(ranks.values()))}


def _agree(items: Sequence[WriteItem]) -> bool:
    """Whether all ranks plan the same; what differs is left for the validation to refuse."""
    return all(item.tensor_data == items[0].tensor_data for item in items)


def _lowest(holders: dict[MetadataIndex, dict[int, WriteItem]]) -> dict[MetadataIndex, int]:
    return {index: min(ranks) for index, ranks in holders.items()}


def _balanced(
    plans: Sequence[SavePlan], holders: dict[MetadataIndex, dict[int, WriteItem]]
) -> dict[MetadataIndex, int]:
    """Largest first, each to the least loaded of its holders; small items go in bundles."""
    loads = [
        sum(item.chunk_nbytes for item in plan.items if item.index not in holders and item.alias_of is None)
        for plan in plans
    ]
    aliases = {index for index, ranks in holders.items() if all(item.alias_of for item in ranks.values())}
    sizes = {index: next(iter(ranks.values())).chunk_nbytes for index, ranks in holders.items() if index not in aliases}
    limit = (sum(loads) + sum(sizes.values())) // (len(plans) * _BUNDLES_PER_RANK)
    owner: dict[MetadataIndex, int] = {}
    for _, _, ranks, bundle in sorted(_bundles(holders, sizes, limit)):
        _assign(ranks, bundle, sizes, loads, owner)
    for index in holders:
        if index in aliases:
            primary = next(iter(holders[index].values())).alias_of
            wanted = owner.get(primary) if primary is not None else None
            owner[index] = (
                wanted if wanted in holders[index] else min(holders[index], key=lambda rank: (loads[rank], rank))
            )
    return owner


def _bundles(
    holders: dict[MetadataIndex, dict[int, WriteItem]], sizes: dict[MetadataIndex, int], limit: int
) -> list[tuple[int, int, tuple[int, ...], list[MetadataIndex]]]:
    """``(-bytes, number, ranks, indices)``: items below the limit join a bundle of the same ranks."""
    done: list[tuple[int, int, tuple[int, ...], list[MetadataIndex]]] = []
    open_bundles: dict[tuple[int, ...], tuple[int, list[MetadataIndex]]] = defaultdict(lambda: (0, []))
    for index, size in sizes.items():
        ranks = tuple(sorted(holders[index]))
        held, bundle = open_bundles[ranks]
        if held + size > limit and bundle:
            done.append((-held, len(done), ranks, bundle))
            held, bundle = 0, []
        bundle.append(index)
        open_bundles[ranks] = (held + size, bundle)
    for ranks, (held, bundle) in open_bundles.items():
        done.append((-held, len(done), ranks, bundle))
    return done


def _assign(
    ranks: tuple[int, ...],
    bundle: list[MetadataIndex],
    sizes: dict[MetadataIndex, int],
    loads: list[int],
    owner: dict[MetadataIndex, int],
) -> None:
    _, rank = heapq.nsmallest(1, [(loads[rank], rank) for rank in ranks])[0]
    for index in bundle:
        owner[index] = rank
        loads[rank] += sizes[index]


def _kept(plan: SavePlan, rank: int, owner: dict[MetadataIndex, int]) -> SavePlan:
    items = [item for item in plan.items if not _may_repeat(item) or owner.get(item.index, rank) == rank]
    here = {item.index for item in items if item.alias_of is None}
    items = [
        item if item.alias_of is None or item.alias_of in here else msgspec.structs.replace(item, alias_of=None)
        for item in items
    ]
    return msgspec.structs.replace(plan, items=items)
