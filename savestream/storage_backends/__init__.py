"""Places that keep objects: files, memory, and wrappers for tests; backends know nothing of checkpoints."""

from savestream.storage_backends.base import Capabilities, ObjectInfo, ObjectReader, ObjectWriter, StorageBackend
from savestream.storage_backends.faults import Fault, FaultyBackend, Gate
from savestream.storage_backends.file import FileBackend
from savestream.storage_backends.memory import MemoryBackend
from savestream.storage_backends.registry import (
    BackendFactory,
    Location,
    Place,
    register_backend,
    resolve_location,
)
from savestream.storage_backends.shaping import LatencyBackend, ThrottledBackend, TraceRecord, TracingBackend
from savestream.storage_backends.typed_errors import TypedErrorsBackend, with_typed_errors
from savestream.storage_backends.wrappers import Operation, OperationKind, WrapperBackend

__all__ = [
    "BackendFactory",
    "Capabilities",
    "Fault",
    "FaultyBackend",
    "FileBackend",
    "Gate",
    "LatencyBackend",
    "Location",
    "MemoryBackend",
    "ObjectInfo",
    "ObjectReader",
    "ObjectWriter",
    "Operation",
    "OperationKind",
    "Place",
    "StorageBackend",
    "ThrottledBackend",
    "TraceRecord",
    "TracingBackend",
    "TypedErrorsBackend",
    "WrapperBackend",
    "register_backend",
    "resolve_location",
    "with_typed_errors",
]
