"""PyTorch's modules, imported when they are asked for, and work handed to the engine from a thread without a loop."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from savestream.errors import UsageError
from savestream.pipeline.engine import Operation, current_engine

__all__ = ["checkpoint_module", "run_on_engine", "torch_module"]

Result = TypeVar("Result")


@functools.cache
def torch_module() -> Any:
    """``torch``."""
    return importlib.import_module("torch")


@functools.cache
def checkpoint_module(name: str = "") -> Any:
    """``torch.distributed.checkpoint``, or a module of it."""
    return importlib.import_module("torch.distributed.checkpoint" + (f".{name}" if name else ""))


def run_on_engine(function: Callable[[], Awaitable[Result]], name: str) -> Result:
    """Run ``function`` on the engine and block until it has ended; an interrupt cancels it and waits for its end."""
    engine = current_engine()
    if engine.is_current_thread:
        raise UsageError("torch.distributed.checkpoint blocks, so savestream's own engine thread cannot call it")
    operation: Operation[Result] = Operation(engine, name)
    try:  # an interrupt may come as soon as the work may have begun
        engine.start(operation, function)
        return operation.future.result()
    except BaseException:
        operation.abandon()  # without effect where this is the work's own error
        raise
