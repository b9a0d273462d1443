"""The awaitable API: every function hands its work to the engine and awaits it from the caller's loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from savestream.arrays import HostArray, framework_adapter
from savestream.errors import PlanError
from savestream.events import Observer
from savestream.pipeline.arguments import check_flag, check_keys, check_kind, check_metrics, check_observer, check_step
from savestream.pipeline.commit import CheckpointEntry, delete_checkpoint, find_checkpoints, head_root
from savestream.pipeline.coordination import Coordinator, choose_coordinator
from savestream.pipeline.engine import call, current_engine, require_asyncio
from savestream.pipeline.handle import SaveHandle
from savestream.pipeline.inspection import CheckpointManifest, inspect_checkpoint
from savestream.pipeline.iteration import Runner, iterate_arrays
from savestream.pipeline.load_task import LoadRequest, LoadTask
from savestream.pipeline.options import LoadOptions, SaveOptions
from savestream.pipeline.save_request import CheckpointInfo, SaveRequest
from savestream.pipeline.save_task import SaveTask
from savestream.pipeline.verification import VerifyReport, verify_checkpoint
from savestream.planners.base import LoadPlanner, SavePlanner
from savestream.planners.cache import PlanCache
from savestream.planners.default import DefaultLoadPlanner
from savestream.storage_backends import Location, Place, resolve_location, with_typed_errors

__all__ = [
    "Keys",
    "delete",
    "exists",
    "iter_arrays",
    "list_checkpoints",
    "load",
    "read_manifest",
    "save",
    "start_save",
    "verify",
]

Keys: TypeAlias = str | Sequence[str | tuple[object, ...]]

Result = TypeVar("Result")


async def save(
    state: Any,  # any supported tree
    dest: Place,
    *,
    options: SaveOptions | None = None,
    planner: SavePlanner | None = None,
    plan_cache: PlanCache | None = None,
    coordinator: Coordinator | None = None,
    metadata: object = None,
    overwrite: bool = False,
    observer: Observer | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> CheckpointInfo:
    """Save a state; on return it is durable and visible.

    Parameters
    ----------
    state
        Nested containers of arrays and Python values. It must not change until the call returns; for that, see
        :func:`start_save`.
    dest
        The checkpoint's place: a path, a ``file://`` or ``memory://`` URL, or ``(backend, path)``.
    options
        Compression, memory, threads, limits.
    planner
        Decides what is written under which name; default :class:`~savestream.DefaultSavePlanner`.
    plan_cache
        Keeps plans between saves, so that an unchanged state is not planned again.
    coordinator
        How ranks agree; default: this process alone.
    metadata, step, metrics
        Plain data of the caller's that the manifest carries.
    overwrite
        Replace a committed checkpoint at ``dest``; the old one stays loadable until the new one is durable.
    observer
        Called with events while the save runs, on savestream's threads.

    Returns
    -------
    CheckpointInfo
        Where it is, and statistics that say what limited the save.

    Raises
    ------
    CheckpointExistsError
        ``dest`` holds a checkpoint and ``overwrite`` is False; checked before anything is staged.
    PlanError, UnsafeObjectError
        The state cannot be saved; nothing was written.
    StorageError
        Storage failed; ``errno`` is kept, and what was written is removed.
    SaveTimeoutError
        ``SaveOptions(timeout_seconds=)`` is over.

    Notes
    -----
    Cancelling the call cancels the save: it removes what it wrote, and only then is the cancellation delivered. Once
    the commit has been sent it can no longer be cancelled.
    """
    request = _save_request(
        state, dest, options, planner, plan_cache, coordinator, metadata, overwrite, observer, step, metrics
    )
    return await call(SaveTask(request, "stream").run, "save")


async def start_save(
    state: Any,  # any supported tree
    dest: Place,
    *,
    stage: Literal["eager", "lazy"] = "eager",
    options: SaveOptions | None = None,
    planner: SavePlanner | None = None,
    plan_cache: PlanCache | None = None,
    coordinator: Coordinator | None = None,
    metadata: object = None,
    overwrite: bool = False,
    observer: Observer | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> SaveHandle:
    """Start a save that goes on in the background; returns when the state may be mutated.

    Takes what :func:`save` takes.

    Parameters
    ----------
    stage
        ``"eager"``: return when everything is copied. ``"lazy"``: return when the save is planned and Python values are
        captured; arrays must stay as they are until ``await handle.staged()``.

    Returns
    -------
    SaveHandle
        ``await handle`` is the durable result, or raises the background error.

    Notes
    -----
    The stall is one copy of the state into staging memory where ``SaveOptions(memory_budget_bytes=)`` holds it all;
    otherwise the state is staged as fast as it can be written. Errors found before the state is staged are raised here,
    later ones by the handle. Cancelling this call cancels the save.
    """
    if stage not in ("eager", "lazy"):
        raise PlanError(f"stage={stage!r}: use 'eager' or 'lazy'")
    request = _save_request(
        state, dest, options, planner, plan_cache, coordinator, metadata, overwrite, observer, step, metrics
    )
    require_asyncio()
    task = SaveTask(request, stage)
    handle = SaveHandle(task, current_engine().submit(task.run, "save"))
    del state, request
    await handle._reach(task.milestone)
    return handle


def _locate(place: Place) -> Location:
    return with_typed_errors(resolve_location(place))


def _save_request(
    state: object,
    dest: Place,
    options: SaveOptions | None,
    planner: SavePlanner | None,
    plan_cache: PlanCache | None,
    coordinator: Coordinator | None,
    metadata: object,
    overwrite: bool,
    observer: Observer | None,
    step: int | None,
    metrics: Mapping[str, float] | None,
) -> SaveRequest:
    checks: list[tuple[str, object, type]] = [
        ("options", options, SaveOptions),
        ("planner", planner, SavePlanner),
        ("plan_cache", plan_cache, PlanCache),
        ("coordinator", coordinator, Coordinator),
    ]
    for name, value, kind in checks:
        check_kind(name, value, kind)
    check_flag("overwrite", overwrite)
    check_observer(observer)
    return SaveRequest(
        state=state,
        location=_locate(dest),
        options=SaveOptions() if options is None else options,
        planner=planner,
        plan_cache=plan_cache,
        coordinator=choose_coordinator(coordinator),
        metadata=metadata,
        metrics=check_metrics(metrics),
        step=check_step(step),
        overwrite=overwrite,
        observer=observer,
    )


async def load(
    src: Place,
    target: Any = None,  # any supported tree
    *,
    keys: Keys | None = None,
    strict: bool = True,
    cast: bool = False,
    framework: str = "numpy",
    options: LoadOptions | None = None,
    planner: LoadPlanner | None = None,
    coordinator: Coordinator | None = None,
    observer: Observer | None = None,
) -> Any:
    """Load a checkpoint.

    Parameters
    ----------
    src
        The checkpoint's place, as for :func:`save`.
    target
        A tree to fill: arrays are filled in place and keep their identity, other leaves are replaced. What cannot be
        filled in place (JAX arrays, tensors on the meta device) is replaced by a new array of the same kind. Python
        numbers and arrays of no dimension take each other's place, as the target has it, where no bit is lost. Nodes
        that are registered with JAX keep their class and static data, which is not saved. Without a target, a new tree
        with the saved structure is made.
    keys
        Load only these: a key, or a list of keys. A key selects itself and all beneath it: ``"params"`` selects
        ``params.w`` but not ``params2``. Parts are joined by dots; dots inside a part are escaped (``a\\.b``), list
        positions and int keys are ``[3]`` and ``[int:3]``. A tuple is one key as its raw parts: ``("params", "a.b")``.
        Without a target, a part of a list comes back as a dict from position to element.
    strict
        With False, keys that only one side has are allowed; shapes must agree all the same.
    cast
        Allow another dtype in the target; values are converted as ``numpy.ndarray.astype`` does.
    framework
        What arrays become without a target: ``"numpy"``, ``"torch"`` or ``"jax"``; it must have been imported. Arrays
        of a dtype that the framework lacks stay numpy's.

    Returns
    -------
    object
        The tree: the target itself (rebuilt where it holds tuples), or a new one.

    Raises
    ------
    CheckpointNotFoundError
        Nothing is committed at ``src``.
    LoadMismatchError
        Checkpoint and target differ; lists everything, and nothing was touched.
    CorruptCheckpointError
        Data or manifest are damaged. A target that was being filled has undefined content.
    UnsafeObjectError
        The checkpoint holds pickled objects and ``LoadOptions(allow_pickle=True)`` is not given.

    Notes
    -----
    A target's memory is written from other threads until the load ends. Do not read or resize it meanwhile, and free no
    storage of it (``untyped_storage().resize_``): that can end the process.

    A target must lie in memory that can be written. PyTorch forgets that an array was read-only: a tensor made by
    ``torch.from_numpy`` over a read-only map of a file (``numpy.memmap(mode="r")``) cannot be told from others, and
    writing to it ends the process; map the file with mode ``"c"`` instead. The array itself is refused by name.

    New arrays lie in memory of savestream's own, aligned so that storage reads straight into it. They are freed as any
    other, but PyTorch cannot resize the storage of a tensor made so (``framework="torch"``, or a target on the meta
    device); ``clone()`` it where that is needed, as FSDP does between steps.
    """
    request = _load_request(src, target, keys, strict, cast, framework, options, planner, coordinator, observer)
    return await call(LoadTask(request).run, "load")


def _load_request(
    src: Place,
    target: object,
    keys: Keys | None,
    strict: bool,
    cast: bool,
    framework: str,
    options: LoadOptions | None,
    planner: LoadPlanner | None,
    coordinator: Coordinator | None,
    observer: Observer | None,
) -> LoadRequest:
    checks: list[tuple[str, object, type]] = [
        ("options", options, LoadOptions),
        ("planner", planner, LoadPlanner),
        ("coordinator", coordinator, Coordinator),
    ]
    for name, value, kind in checks:
        check_kind(name, value, kind)
    check_flag("strict", strict)
    check_flag("cast", cast)
    check_observer(observer)
    choose_coordinator(coordinator)
    framework_adapter(framework)
    if framework != "numpy" and target is not None:
        raise PlanError(f"framework={framework!r}: the arrays of a target stay what they are; pass one of the two")
    chosen = LoadOptions() if options is None else options
    if planner is not None:
        _check_load_planner(planner, target, keys, strict, cast, chosen)
    return LoadRequest(
        location=resolve_location(src),
        target=target,
        keys=check_keys(keys),
        strict=strict,
        cast=cast,
        options=chosen,
        framework=framework,
        planner=planner,
        observer=observer,
    )


def _check_load_planner(
    planner: LoadPlanner, target: object, keys: object, strict: bool, cast: bool, options: LoadOptions
) -> None:
    """What a planner decides cannot be asked for beside it."""
    name = type(planner).__qualname__
    beside = {
        "keys": keys is not None,
        "strict": not strict,
        "cast": cast,
        "LoadOptions.types": bool(options.types),
        "LoadOptions.allow_pickle": options.allow_pickle and not getattr(planner, "allow_pickle", True),
    }
    given = [argument for argument, is_given in beside.items() if is_given]
    if given:
        raise PlanError(
            f"{', '.join(given)}: with planner= the planner decides; pass them to the {name} instead "
            "(strict=False is allow_partial_load=True there)"
        )
    if target is None and isinstance(planner, DefaultLoadPlanner) and not planner.makes_its_own_state:
        raise PlanError(f"planner={name} fills a target; pass one, or use an EmptyStateDictLoadPlanner")


async def read_manifest(src: Place) -> CheckpointManifest:
    """What a checkpoint holds, without reading array data: names, shapes, dtypes, values, sizes, step, metadata."""
    location = _locate(src)
    return await call(lambda: inspect_checkpoint(location), "read_manifest")


async def exists(src: Place) -> bool:
    """Whether a checkpoint is committed at ``src``."""
    location = _locate(src)
    return await call(lambda: head_root(location), "exists") is not None


async def list_checkpoints(root: Place) -> list[CheckpointEntry]:
    """The committed checkpoints directly beneath ``root``, by step number, then by name; the newest step is last."""
    location = _locate(root)
    return await call(lambda: find_checkpoints(location), "list_checkpoints")


async def delete(src: Place) -> None:
    """Delete a checkpoint: it stops existing first, then its data goes. Nothing that is not its own is removed.

    Raises
    ------
    CheckpointNotFoundError
        Nothing is committed there.
    UnsupportedFormatError
        A newer savestream wrote it; it is left alone.
    """
    location = _locate(src)
    await call(lambda: delete_checkpoint(location), "delete")


async def verify(src: Place, *, options: LoadOptions | None = None, observer: Observer | None = None) -> VerifyReport:
    """Read a whole checkpoint and check every digest.

    Raises
    ------
    CorruptCheckpointError
        Something is damaged; ``problems`` lists every damaged range with the keys it affects.
    """
    check_kind("options", options, LoadOptions)
    check_observer(observer)
    location = _locate(src)
    return await call(lambda: verify_checkpoint(location, options or LoadOptions(), observer), "verify")


def iter_arrays(
    src: Place, *, keys: Keys | None = None, options: LoadOptions | None = None
) -> AsyncIterator[tuple[str, HostArray]]:
    """Iterate over ``(key, array)`` in stored order with little memory: for checkpoints larger than RAM.

    At most 64 MiB of small arrays, or one large array, are held at once.
    """
    check_kind("options", options, LoadOptions)
    location = _locate(src)
    return iterate_arrays(location, check_keys(keys), options or LoadOptions(), _EngineRunner())


class _EngineRunner(Runner):
    async def __call__(self, step: Callable[[], Awaitable[Result]]) -> Result:
        return await call(step, "iter_arrays")
