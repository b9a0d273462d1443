"""The checkpoint that the coordinator commits: its tree, tables and metadata, from what was planned and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from savestream.integrations.dcp.extras import Extras, encode_extras
from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module
from savestream.integrations.dcp.nesting import DcpPath, dcp_name, flat_tree, nested_tree
from savestream.integrations.dcp.results import CollectedTensor, WrittenItem, collect_results, read_results
from savestream.pipeline.manifest import PlanSection, encode_plan_section
from savestream.pipeline.plan_section import KIND_BYTES, KIND_TENSOR
from savestream.pipeline.rank_commit import RootContent
from savestream.pipeline.rank_tables import SectionTables

__all__ = ["Composition", "compose", "correct_metadata"]


class Composition(msgspec.Struct, frozen=True):
    """What is to be committed: the root's content, its encoded plan section, and what the tensors turned out to be."""

    content: RootContent
    section: bytes
    tensors: list[CollectedTensor]
    planner_data: Any


def compose(
    metadata: Any, results: Sequence[Sequence[Any]], owners: Mapping[Any, int], *, save_id: str, world_size: int
) -> Composition:
    """Check the ranks' results and compose the root.

    Raises
    ------
    CoordinationError, PlanError, UnsafeObjectError
        Something was not written exactly once, or cannot be stored; see there.
    """
    parts, items = read_results(save_id, results)
    tensors = collect_results(metadata, results, items, owners)
    planner_data = _with_actual_paths(metadata.planner_data, items)
    names = [tensor.fqn for tensor in tensors]
    paths = [planner_data.get(name) for name in names] if isinstance(planner_data, Mapping) else []
    nested = nested_tree(paths) if len(paths) == len(names) else None
    from_tree = nested is not None and planner_data == {dcp_name(path or ()): path for path in paths}
    tree, stored = nested or flat_tree(names)
    extras = Extras(
        version=checkpoint_module("filesystem").CURRENT_DCP_VERSION,
        nested=nested is not None,
        paths_from_tree=from_tree,
        planner_data=None if from_tree else planner_data,
        requires_grad=[number for number, tensor in enumerate(tensors) if tensor.requires_grad],
    )
    tables = SectionTables()
    for tensor in tensors:
        kind = KIND_BYTES if tensor.is_bytes else KIND_TENSOR
        tables.add(kind, tensor.described, tensor.raw_offsets, tensor.parts)
    section = PlanSection(
        dtypes=tables.dtypes,
        tree=tree,
        tensors=tables.tensors(),
        chunks=tables.chunks(),
        tensor_names=stored,
        value_names=[],
    )
    content = RootContent(save_id=save_id, parts=parts, values=[], world_size=world_size, user=encode_extras(extras))
    return Composition(content, encode_plan_section(section), tensors, planner_data)


def _with_actual_paths(planner_data: Any, items: Sequence[Sequence[WrittenItem]]) -> Any:
    """The planner's data with the paths of today's state where a cached plan remembered others."""
    changed: dict[str, DcpPath] = {}
    for written in reversed(items):  # the lowest rank has the last word, as in torch's planner
        if written:
            changed.update(written[0].part.paths)
    return {**planner_data, **changed} if changed and isinstance(planner_data, Mapping) else planner_data


def correct_metadata(metadata: Any, composition: Composition, storage_meta: Any) -> None:
    """Make the metadata that the save returns say what was stored; they may come from a cached plan."""
    torch = torch_module()
    for tensor in composition.tensors:
        entry = metadata.state_dict_metadata[tensor.fqn]
        if tensor.is_bytes:
            continue
        dtype = getattr(torch, tensor.described.properties.dtype)
        if (entry.properties.dtype, entry.properties.requires_grad) != (dtype, tensor.requires_grad):
            entry.properties = replace(entry.properties, dtype=dtype, requires_grad=tensor.requires_grad)
    metadata.planner_data = composition.planner_data
    metadata.version = checkpoint_module("filesystem").CURRENT_DCP_VERSION
    metadata.storage_data = None  # reading goes by the manifest
    metadata.storage_meta = storage_meta
