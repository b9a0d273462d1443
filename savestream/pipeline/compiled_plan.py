"""A finished save plan made ready to run: chunk positions, and the plan-determined part of the manifest, encoded.

It holds no leaf and no value of the state, so a plan cache can keep it: an unchanged state reuses it verbatim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from savestream.arrays import dtype_from_name
from savestream.errors import PlanError
from savestream.pipeline.layout import FRAME_BYTES, Block, ChunkShape, Layout, plan_blocks, plan_layout
from savestream.pipeline.limits import MAXIMUM_TABLE_ROWS
from savestream.pipeline.manifest import PlanSection, encode_plan_section
from savestream.pipeline.rank_tables import SectionTables
from savestream.planners.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    PlannerData,
    TensorProperties,
    TensorStorageMetadata,
)
from savestream.planners.paths import part_text
from savestream.planners.plan import SavePlan, WriteItem
from savestream.planners.state_dict import structure_for_items
from savestream.planners.structure import LeafNode, MappingNode, StateTree

__all__ = ["CompiledPlan", "chunk_shape", "compile_plan", "plane_width"]

_OPAQUE_KINDS = {"bytes": 1, "pickle": 2, "stored-json": 3}


class CompiledPlan(msgspec.Struct):
    """Everything about a save that does not depend on the data.

    Attributes
    ----------
    chunk_items
        The items that write chunks, in the order of ``layout.raw_offsets``: arrays first, then opaque bytes.
    value_items
        The items whose values stand in the manifest, in its order.
    section
        The encoded ``dtypes``, ``tree``, ``tensors`` and ``chunks`` members of the root.
    """

    chunk_items: list[WriteItem]
    opaque_from: int
    value_items: list[WriteItem]
    layout: Layout
    section: bytes
    blocks_by_size: dict[int, list[Block]] = {}

    def blocks(self, block_bytes: int) -> list[Block]:
        """The layout's blocks of that size."""
        if block_bytes not in self.blocks_by_size:
            self.blocks_by_size[block_bytes] = plan_blocks(self.layout, block_bytes)
        return self.blocks_by_size[block_bytes]


def plane_width(dtype: str) -> int:
    """Bytes of the numbers that byte planes are taken of; 1 where planes make no sense."""
    resolved = dtype_from_name(dtype)
    if resolved.kind in "iufmMU" or (resolved.kind == "V" and resolved.names is None and resolved.itemsize == 2):
        width = 4 if resolved.kind == "U" else resolved.itemsize
    elif resolved.kind == "c":
        width = resolved.itemsize // 2
    else:
        width = 1
    return width if width in (2, 4, 8) else 1


def compile_plan(plan: SavePlan, metadata: Metadata) -> CompiledPlan:
    """Lay out a rank's finished plan and encode what it determines."""
    writers, aliases, opaque, values = _sort_items(plan.items)
    chunk_items = [*writers.values(), *opaque]
    shapes = _chunk_shapes(chunk_items)
    _check_sizes(chunk_items, shapes)
    layout = plan_layout(shapes)
    offsets = layout.raw_offsets.tolist()
    places = dict(zip(writers, offsets, strict=False))
    for key, primary in aliases.items():
        places[key] = places[primary]
    section = _section(metadata, places, opaque, offsets[len(writers) :], values)
    return CompiledPlan(chunk_items, len(writers), values, layout, encode_plan_section(section))


def _check_sizes(items: Sequence[WriteItem], shapes: Sequence[ChunkShape]) -> None:
    """Refuse what a manifest could not list before a table is made for it."""
    if sum([shape.nbytes for shape in shapes]) // FRAME_BYTES + len(shapes) <= MAXIMUM_TABLE_ROWS:
        return
    frames = 0
    for item, shape in zip(items, shapes, strict=True):
        frames += -(-shape.nbytes // FRAME_BYTES)
        if frames > MAXIMUM_TABLE_ROWS:
            raise PlanError(
                f"{item.index.fqn}: with this leaf of {shape.nbytes} bytes the state has more than "
                f"{MAXIMUM_TABLE_ROWS} frames of {FRAME_BYTES} bytes, which one rank's index cannot list; split it"
            )


_Key = str | tuple[str, tuple[int, ...]]


def _key(fqn: str, offsets: tuple[int, ...]) -> _Key:
    """Names a chunk; the first of an array, mostly its only one, by the array's name alone, which costs no tuple."""
    return (fqn, offsets) if any(offsets) else fqn


def _sort_items(
    items: Sequence[WriteItem],
) -> tuple[dict[_Key, WriteItem], dict[_Key, _Key], list[WriteItem], list[WriteItem]]:
    """Items that write array chunks, aliases of those, opaque bytes, inline values."""
    arrays: dict[_Key, WriteItem] = {}
    opaque: list[WriteItem] = []
    values: list[WriteItem] = []
    for item in items:
        if item.tensor_data is not None:
            offsets = item.tensor_data.chunk.offsets
            if arrays.setdefault(_key(item.index.fqn, offsets), item) is not item:
                raise PlanError(f"{item.index.fqn}: two items of the plan write the chunk at {offsets}")
        elif item.bytes_io_data is not None and item.bytes_io_data.encoding == "json":
            values.append(item)
        else:
            opaque.append(item)
    aliases = _aliases(arrays)
    writers = {key: item for key, item in arrays.items() if key not in aliases} if aliases else arrays
    return writers, aliases, opaque, values


def _aliases(arrays: dict[_Key, WriteItem]) -> dict[_Key, _Key]:
    """Chunks that share another's memory, where the final plan still stores both alike."""
    aliases: dict[_Key, _Key] = {}
    for key, item in arrays.items():
        if item.alias_of is None or item.tensor_data is None:
            continue
        offset = item.alias_of.offset
        primary = _key(item.alias_of.fqn, offset if offset is not None else item.tensor_data.chunk.offsets)
        other = arrays.get(primary)
        if other is None or other.tensor_data is None or other.alias_of is not None or primary == key:
            continue
        same_box = other.tensor_data.chunk.sizes == item.tensor_data.chunk.sizes
        if same_box and other.tensor_data.properties.dtype == item.tensor_data.properties.dtype:
            aliases[key] = primary
    return aliases


def _chunk_shapes(items: Sequence[WriteItem]) -> list[ChunkShape]:
    known: dict[int, ChunkShape] = {}  # arrays of equal description share their item's data
    shapes = []
    for item in items:
        data = item.tensor_data
        if data is None:
            shapes.append(ChunkShape(item.chunk_nbytes, 1, 1, 1))
            continue
        shape = known.get(id(data))
        if shape is None:
            shape = known[id(data)] = chunk_shape(data.chunk.sizes, data.properties.dtype)
        shapes.append(shape)
    return shapes


def chunk_shape(sizes: tuple[int, ...], dtype: str) -> ChunkShape:
    """A chunk of an array as the layout sees it."""
    itemsize = dtype_from_name(dtype).itemsize
    row = math.prod(sizes[1:]) * itemsize
    return ChunkShape(math.prod(sizes) * itemsize, max(itemsize, 1), max(row, 1), plane_width(dtype))


def _section(
    metadata: Metadata,
    places: dict[_Key, int],
    opaque: Sequence[WriteItem],
    opaque_offsets: Sequence[int],
    values: Sequence[WriteItem],
) -> PlanSection:
    names: list[str] = []
    tables = SectionTables()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            names.append(fqn)
            tables.add(0, entry, [_place_of(places, fqn, chunk) for chunk in entry.chunks])
    for item, offset in zip(opaque, opaque_offsets, strict=True):
        assert item.bytes_io_data is not None  # noqa: S101 - sorted so above
        size = (item.bytes_io_data.nbytes,)
        names.append(item.index.fqn)
        described = TensorStorageMetadata(TensorProperties("uint8"), size, (ChunkStorageMetadata((0,), size),))
        tables.add(_OPAQUE_KINDS[item.bytes_io_data.encoding], described, [offset])
    value_names = [item.index.fqn for item in values]
    _check_values(metadata, [*value_names, *(item.index.fqn for item in opaque)])
    data = metadata.planner_data
    tree = data.tree if isinstance(data, PlannerData) and data.tree is not None else MappingNode("dict", (), ())
    tree, stored = _with_stored_names(structure_for_items(tree, [*names, *value_names]))
    names, value_names = ([stored.get(name, name) for name in part] for part in (names, value_names))
    return PlanSection(
        dtypes=tables.dtypes,
        tree=tree,
        tensors=tables.tensors(),
        chunks=tables.chunks(),
        tensor_names=names,
        value_names=value_names,
    )


def _with_stored_names(tree: StateTree) -> tuple[StateTree, dict[str, str]]:
    """The tree with each leaf named by its path, as the format asks, and the names that this changes.

    They differ only where a state was not flattened: its str keys are the planner's names as they stand.
    """
    if not isinstance(tree, MappingNode):
        return tree, {}
    changed = {
        child.fqn: text
        for key, child in zip(tree.keys, tree.children, strict=True)
        if type(child) is LeafNode and child.fqn == key and (text := part_text(key)) != key
    }
    if not changed:
        return tree, {}
    children = [
        LeafNode(changed.get(child.fqn, child.fqn)) if type(child) is LeafNode else child for child in tree.children
    ]
    return msgspec.structs.replace(tree, children=tuple(children)), changed


def _place_of(places: dict[_Key, int], fqn: str, chunk: ChunkStorageMetadata) -> int:
    try:
        return places[_key(fqn, chunk.offsets)]
    except KeyError:
        raise PlanError(
            f"{fqn}: the metadata has a chunk at {chunk.offsets} that no item of the finished plan writes; leave items "
            "out in create_local_plan, before the metadata is made"
        ) from None


def _check_values(metadata: Metadata, written: Sequence[str]) -> None:
    wanted = {name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)}
    lost = sorted(wanted - set(written))
    if lost:
        raise PlanError(
            f"{lost[0]}: the metadata has a value that no item of the finished plan writes; leave items out in "
            "create_local_plan, before the metadata is made"
        )
