"""Planners: what is saved and loaded, as values; no I/O."""

from savestream.planners.alignment import Alignment, align_state_dict
from savestream.planners.base import LoadPlanner, SavePlanner
from savestream.planners.cache import PlanCache, fingerprint
from savestream.planners.dedup import dedup_save_plans
from savestream.planners.default import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from savestream.planners.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    PlannerData,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from savestream.planners.paths import Index, parse_fqn, path_to_fqn, select_names
from savestream.planners.plan import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from savestream.planners.recorded import RecordedDataclass, RecordedEnum, RecordedObject, RecordedTuple
from savestream.planners.sharding import CheckpointableTensor, ShardedArray
from savestream.planners.state_dict import flatten_state_dict, structure_for_items, unflatten_state_dict
from savestream.planners.structure import LeafNode, MappingNode, RecordNode, SequenceNode, StateTree
from savestream.planners.validation import check_global_plan, validate_global_plan
from savestream.planners.values import decode_value, encode_value

__all__ = [
    "Alignment",
    "BytesIOWriteData",
    "BytesStorageMetadata",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "Index",
    "LeafNode",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "MappingNode",
    "Metadata",
    "MetadataIndex",
    "PlanCache",
    "PlannerData",
    "ReadItem",
    "RecordNode",
    "RecordedDataclass",
    "RecordedEnum",
    "RecordedObject",
    "RecordedTuple",
    "SavePlan",
    "SavePlanner",
    "SequenceNode",
    "ShardedArray",
    "StateTree",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "align_state_dict",
    "check_global_plan",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "decode_value",
    "dedup_save_plans",
    "encode_value",
    "fingerprint",
    "flatten_state_dict",
    "parse_fqn",
    "path_to_fqn",
    "select_names",
    "structure_for_items",
    "unflatten_state_dict",
    "validate_global_plan",
]
