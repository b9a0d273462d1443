"""savestream: an async checkpoint pipeline for training state."""

from savestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CoordinationError,
    CorruptCheckpointError,
    LoadMismatchError,
    PlanError,
    SavestreamError,
    SaveTimeoutError,
    StorageError,
    UnsafeObjectError,
    UnsupportedFormatError,
    UsageError,
)
from savestream.events import (
    BlockProcessed,
    Event,
    LoadFinished,
    LoadStarted,
    Observer,
    OperationFailed,
    RangeRead,
    SaveCommitted,
    SavePlanned,
    SaveStaged,
    StageStatistics,
    Statistics,
)
from savestream.pipeline.buffers import StagingPool
from savestream.pipeline.commit import CheckpointEntry
from savestream.pipeline.coordination import Coordinator
from savestream.pipeline.engine import submit
from savestream.pipeline.handle import SaveHandle
from savestream.pipeline.inspection import CheckpointManifest
from savestream.pipeline.options import LoadOptions, SaveOptions
from savestream.pipeline.save_request import CheckpointInfo, Progress
from savestream.pipeline.session import (
    delete,
    exists,
    iter_arrays,
    list_checkpoints,
    load,
    read_manifest,
    save,
    start_save,
    verify,
)
from savestream.pipeline.verification import VerifyReport
from savestream.planners import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    LoadPlanner,
    PlanCache,
    RecordedDataclass,
    RecordedEnum,
    RecordedObject,
    RecordedTuple,
    SavePlanner,
    ShardedArray,
)
from savestream.rng_state import capture_rng_state, restore_rng_state
from savestream.storage_backends import register_backend
from savestream.version import __version__

__all__ = [
    "BlockProcessed",
    "CheckpointEntry",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManifest",
    "CheckpointNotFoundError",
    "CoordinationError",
    "Coordinator",
    "CorruptCheckpointError",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "Event",
    "LoadFinished",
    "LoadMismatchError",
    "LoadOptions",
    "LoadPlanner",
    "LoadStarted",
    "Observer",
    "OperationFailed",
    "PlanCache",
    "PlanError",
    "Progress",
    "RangeRead",
    "RecordedDataclass",
    "RecordedEnum",
    "RecordedObject",
    "RecordedTuple",
    "SaveCommitted",
    "SaveHandle",
    "SaveOptions",
    "SavePlanned",
    "SavePlanner",
    "SaveStaged",
    "SaveTimeoutError",
    "SavestreamError",
    "ShardedArray",
    "StageStatistics",
    "StagingPool",
    "Statistics",
    "StorageError",
    "UnsafeObjectError",
    "UnsupportedFormatError",
    "UsageError",
    "VerifyReport",
    "__version__",
    "capture_rng_state",
    "delete",
    "exists",
    "iter_arrays",
    "list_checkpoints",
    "load",
    "read_manifest",
    "register_backend",
    "restore_rng_state",
    "save",
    "start_save",
    "submit",
    "verify",
]
