"""The awaitable functions that convert from and to other libraries' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from savestream.errors import PlanError
from savestream.events import Observer
from savestream.interchange.conversion import Conversion, ConversionInfo
from savestream.interchange.dcp_reader import read_dcp
from savestream.interchange.foreign import ForeignFiles, ForeignState, OnUnsupported, local_path, require_source
from savestream.interchange.safetensors_export import Export
from savestream.interchange.safetensors_header import is_text
from savestream.interchange.safetensors_reader import read_safetensors
from savestream.interchange.torch_reader import read_torch
from savestream.pipeline.arguments import check_flag, check_keys, check_kind, check_observer
from savestream.pipeline.engine import call
from savestream.pipeline.options import SaveOptions
from savestream.pipeline.session import Keys
from savestream.storage_backends import Place, resolve_location, with_typed_errors

__all__ = ["export_safetensors", "import_dcp", "import_safetensors", "import_torch"]

LocalPath = str | os.PathLike[str]

DEFAULT_SHARD_BYTES = 5_000_000_000


async def import_dcp(
    src: LocalPath,
    dest: Place,
    *,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    verify: bool = True,
    observer: Observer | None = None,
    on_unsupported: OnUnsupported = "raise",
) -> ConversionInfo:
    """Convert a checkpoint of ``torch.distributed.checkpoint``. PyTorch is not needed, and nothing in it is run.

    Parameters
    ----------
    src
        The directory that holds its ``.metadata``.
    dest
        The new checkpoint's place, as for :func:`~savestream.save`.
    options
        Compression, memory, threads, limits.
    overwrite
        Replace a committed checkpoint at ``dest``.
    verify
        Compare every element of every leaf with the source before the new checkpoint becomes visible.
    observer
        Called with the events of a save.
    on_unsupported
        What becomes of keys whose objects could only be rebuilt by running code, or that have no counterpart:
        ``"raise"`` refuses the conversion before anything is written, ``"skip"`` leaves them out and names them in the
        result.

    Returns
    -------
    ConversionInfo
        Where the checkpoint is, statistics, and the keys that were skipped.

    Raises
    ------
    CheckpointNotFoundError
        There is no such checkpoint at ``src``.
    CorruptCheckpointError
        The source is damaged or contradicts itself, or the result differs from it; nothing became visible.
    UnsafeObjectError
        A key cannot be converted without running code.
    CheckpointExistsError, PlanError, StorageError, SaveTimeoutError
        As for :func:`~savestream.save`.
    """
    read = _reader(src, on_unsupported, read_dcp)
    return await _convert("import_dcp", read, dest, options, overwrite, verify, observer)


async def import_safetensors(
    src: LocalPath,
    dest: Place,
    *,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    verify: bool = True,
    observer: Observer | None = None,
    on_unsupported: OnUnsupported = "raise",
) -> ConversionInfo:
    """Convert safetensors files to one checkpoint: a flat dict of arrays by tensor name.

    Takes what :func:`import_dcp` takes, but for

    Parameters
    ----------
    src
        A safetensors file, the index of a sharded model (``*.index.json``), or a directory that holds either.
        Without an index all safetensors files of the directory are taken.

    Notes
    -----
    The files' ``__metadata__`` becomes the checkpoint's metadata; where files differ, a value is a dict by file.
    """
    read = _reader(src, on_unsupported, read_safetensors)
    return await _convert("import_safetensors", read, dest, options, overwrite, verify, observer)


async def import_torch(
    src: LocalPath,
    dest: Place,
    *,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    verify: bool = True,
    observer: Observer | None = None,
    on_unsupported: OnUnsupported = "raise",
) -> ConversionInfo:
    """Convert a file that ``torch.save`` wrote. PyTorch is not needed, and nothing in it is run.

    Takes what :func:`import_dcp` takes, but for

    Parameters
    ----------
    src
        The file. Its tensors are read range by range, unless the file is of the format before PyTorch 1.6: such files
        are loaded whole, with ``torch.load(weights_only=True)``.

    Raises
    ------
    UsageError
        The file is of the format before PyTorch 1.6, and PyTorch is not imported.
    """
    read = _reader(src, on_unsupported, read_torch)
    return await _convert("import_torch", read, dest, options, overwrite, verify, observer)


async def export_safetensors(
    src: Place,
    dest: LocalPath,
    *,
    keys: Keys | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the arrays of a checkpoint as safetensors files.

    Parameters
    ----------
    src
        The checkpoint's place, as for :func:`~savestream.load`.
    dest
        A local path: of the file, if it ends with ``.safetensors``; otherwise of a directory, in which the file is
        called ``model.safetensors``.
    keys
        Export only these, as for :func:`~savestream.load`.
    max_shard_bytes
        Where the arrays are more than this, they are split: ``model-00001-of-00003.safetensors`` and so on, with an
        index ``model.safetensors.index.json``. An array is never split.
    metadata
        The files' ``__metadata__``; default: the checkpoint's metadata, if it maps texts to texts.
    overwrite
        Replace files of an earlier export.

    Returns
    -------
    list of Path
        The files, an index last. They appear when all are complete, the index after the files that it names.

    Raises
    ------
    UnsafeObjectError
        A key holds no array, or one of a dtype that the format lacks; nothing was written.
    PlanError
        Two keys would have the same name, or an argument is wrong.
    CheckpointExistsError
        A file is there and ``overwrite`` is False.
    CheckpointNotFoundError, LoadMismatchError, CorruptCheckpointError, StorageError
        As for :func:`~savestream.load`.

    Notes
    -----
    A tensor's name joins the parts of its key by dots, without escapes: ``model.layers.0.weight``.
    """
    check_flag("overwrite", overwrite)
    export = Export(
        location=with_typed_errors(resolve_location(src)),
        dest=_export_path(dest),
        keys=check_keys(keys),
        maximum_bytes=_shard_bytes(max_shard_bytes),
        texts=_texts(metadata),
        overwrite=overwrite,
    )
    return await call(export.run, "export_safetensors")


def _export_path(dest: LocalPath) -> str:
    try:
        path = os.fspath(dest)
    except TypeError:
        path = ""
    if not isinstance(path, str) or not path or "\0" in path or "://" in path:
        raise PlanError(f"dest={dest!r}: safetensors files are written to a local path")
    return os.path.abspath(path)


def _shard_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PlanError(f"max_shard_bytes={value!r}: must be a positive number of bytes")
    return value


def _texts(metadata: object) -> Mapping[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping) or not all(is_text(text) for pair in metadata.items() for text in pair):
        raise PlanError(f"metadata={metadata!r}: safetensors files hold texts by text, in UTF-8")
    return metadata


def _reader(
    src: LocalPath,
    on_unsupported: OnUnsupported,
    read: Callable[[str, ForeignFiles, OnUnsupported], ForeignState],
) -> Callable[[ForeignFiles], ForeignState]:
    if on_unsupported not in ("raise", "skip"):
        raise PlanError(f"on_unsupported={on_unsupported!r}: use 'raise' or 'skip'")
    path = local_path(src)
    return lambda files: read(require_source(path), files, on_unsupported)


async def _convert(
    operation: str,
    read: Callable[[ForeignFiles], ForeignState],
    dest: Place,
    options: SaveOptions | None,
    overwrite: bool,
    verify: bool,
    observer: Observer | None,
) -> ConversionInfo:
    check_kind("options", options, SaveOptions)
    check_flag("overwrite", overwrite)
    check_flag("verify", verify)
    check_observer(observer)
    conversion = Conversion(
        operation=operation,
        read=read,
        location=with_typed_errors(resolve_location(dest)),
        options=SaveOptions() if options is None else options,
        overwrite=overwrite,
        verify=verify,
        observer=observer,
    )
    return await call(conversion.run, operation)
