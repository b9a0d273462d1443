"""What an export writes: which tensor under which name, in which file, at which byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from savestream.arrays import dtype_itemsize
from savestream.errors import LoadMismatchError, PlanError, UnsafeObjectError
from savestream.interchange.safetensors_header import (
    MAXIMUM_HEADER_BYTES,
    METADATA_KEY,
    SafetensorsEntry,
    encode_header,
    entry_bytes,
    export_dtype,
    export_shape,
    is_text,
)
from savestream.planners.metadata import Metadata, TensorStorageMetadata
from savestream.planners.paths import Index, select_names

__all__ = ["ExportFile", "ExportTensor", "plan_export"]

_LISTED = 20


class ExportTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint and its name in the file."""

    key: str
    name: str
    entry: TensorStorageMetadata
    nbytes: int

    @property
    def itemsize(self) -> int:
        return dtype_itemsize(self.entry.properties.dtype)


class ExportFile(msgspec.Struct, frozen=True):
    """One file: the header as bytes, and where each tensor begins after it."""

    header: bytes
    tensors: tuple[ExportTensor, ...]
    starts: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        return self.starts[-1] + self.tensors[-1].nbytes if self.tensors else 0


def plan_export(
    metadata: Metadata,
    keys: Sequence[str | tuple[object, ...]] | None,
    paths: Mapping[str, tuple[object, ...]],
    texts: Mapping[str, str] | None,
    maximum_bytes: int,
    source: str,
) -> list[ExportFile]:
    """The files of an export, at least one; tensors of a file are sorted so that each is aligned to its elements.

    Raises
    ------
    LoadMismatchError
        ``keys`` asks for what the checkpoint lacks.
    UnsafeObjectError
        A key holds no array, or one of a dtype that the format lacks; all are named.
    PlanError
        Two keys have the same name in the format, or a name or the metadata is too long for a header.
    """
    selected = _selected(metadata, keys, source)
    tensors = [_tensor(key, metadata, paths[key]) for key in selected if _problem(key, metadata) is None]
    problems = [f"{key} ({problem})" for key in selected if (problem := _problem(key, metadata)) is not None]
    if problems:
        more = f", ... and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise UnsafeObjectError(
            f"{source}: {len(problems)} key(s) cannot be in safetensors files: {', '.join(problems[:_LISTED])}{more}. "
            "Choose the others with keys=, or convert these; nothing was written"
        )
    _refuse_equal_names(tensors)
    left = MAXIMUM_HEADER_BYTES - len(encode_header([], texts))
    if left < 0:
        raise PlanError(
            f"the metadata takes more than the {MAXIMUM_HEADER_BYTES} bytes that the header of a safetensors file may "
            "have; nothing was written. Choose less with metadata="
        )
    return [_file(group, texts) for group in _groups(tensors, maximum_bytes, left)] or [_file([], texts)]


def _selected(metadata: Metadata, keys: Sequence[str | tuple[object, ...]] | None, source: str) -> list[str]:
    names = list(metadata.state_dict_metadata)
    if keys is None:
        return names
    selected, unmatched = select_names(names, keys)
    if unmatched:
        raise LoadMismatchError(missing=[str(key) for key in unmatched], source=source)
    return list(selected)


def _problem(key: str, metadata: Metadata) -> str | None:
    """Why a key cannot be exported."""
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return "no array"
    dtype = entry.properties.dtype
    return None if export_dtype(dtype) else f"dtype {dtype[:60]}"


def _tensor(key: str, metadata: Metadata, path: tuple[object, ...]) -> ExportTensor:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)  # noqa: S101 - others are problems
    nbytes = math.prod(entry.size) * dtype_itemsize(entry.properties.dtype)
    return ExportTensor(key, _name(key, path), entry, nbytes)


def _name(key: str, path: tuple[object, ...]) -> str:
    """The parts of a path as they are, joined by dots: how state dicts name their tensors."""
    if not path or not all(type(part) in (str, int, Index) for part in path):
        raise PlanError(f"{key!r}: only dicts with str or int keys, and sequences, have names in safetensors files")
    name = ".".join(str(part.position if isinstance(part, Index) else part) for part in path)
    if name == METADATA_KEY or not is_text(name):
        raise PlanError(f"{key!r}: no tensor can have the name {name!r} in safetensors files")
    return name


def _refuse_equal_names(tensors: Iterable[ExportTensor]) -> None:
    seen: dict[str, str] = {}
    for tensor in tensors:
        other = seen.setdefault(tensor.name, tensor.key)
        if other != tensor.key:
            raise PlanError(
                f"{other!r} and {tensor.key!r} would both be {tensor.name!r} in safetensors files; choose with keys="
            )


def _groups(
    tensors: Iterable[ExportTensor], maximum_bytes: int, header_bytes_left: int
) -> Iterator[list[ExportTensor]]:
    """Tensors in their order, as many to a file as fit; a larger one has its own."""
    group: list[ExportTensor] = []
    used = header_used = 0
    for tensor in tensors:
        described = _described_bytes(tensor)
        if described > header_bytes_left:
            raise PlanError(
                f"{tensor.key[:200]!r}: its name and the metadata take more than the {MAXIMUM_HEADER_BYTES} bytes that "
                "the header of a safetensors file may have; nothing was written"
            )
        if group and (used + tensor.nbytes > maximum_bytes or header_used + described > header_bytes_left):
            yield group
            group, used, header_used = [], 0, 0
        group.append(tensor)
        used += tensor.nbytes
        header_used += described
    if group:
        yield group


def _described_bytes(tensor: ExportTensor) -> int:
    dtype = tensor.entry.properties.dtype
    return entry_bytes(tensor.name, export_dtype(dtype) or "", export_shape(dtype, tuple(tensor.entry.size)))


def _file(tensors: Iterable[ExportTensor], texts: Mapping[str, str] | None) -> ExportFile:
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    starts: list[int] = []
    entries: list[SafetensorsEntry] = []
    end = 0
    for tensor in ordered:
        dtype = tensor.entry.properties.dtype
        shape = export_shape(dtype, tuple(tensor.entry.size))
        starts.append(end)
        entries.append(SafetensorsEntry(tensor.name, export_dtype(dtype) or "", shape, end, end + tensor.nbytes))
        end += tensor.nbytes
    return ExportFile(encode_header(entries, texts), tuple(ordered), tuple(starts))
