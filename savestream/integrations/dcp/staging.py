"""The copy that ``async_save`` makes of a state: torch's own stager, which takes memory as it lies.

A conjugated or negated tensor is memory and a bit; torch's stager copies the memory and forgets the bit. So such
tensors are made plain before.
"""

from __future__ import annotations

import copy
from typing import Any

from savestream.integrations.dcp.frameworks import checkpoint_module, torch_module

__all__ = ["stage_state"]


def stage_state(state: Any) -> Any:
    """A copy of a state in host memory, of which nothing changes with the original."""
    staging = checkpoint_module("staging")
    stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    try:
        return stager.stage(_plain(state))
    finally:
        stager.close()


def _plain(state: Any) -> Any:
    """The state itself, or a copy of what leads to conjugated and negated tensors."""
    if isinstance(state, torch_module().Tensor):
        return state.resolve_conj().resolve_neg() if state.is_conj() or state.is_neg() else state
    if not isinstance(state, dict | list | tuple):
        return state
    items = list(state.items()) if isinstance(state, dict) else list(enumerate(state))
    changed = {key: plain for key, value in items if (plain := _plain(value)) is not value}
    if not changed:
        return state
    if isinstance(state, tuple):
        return tuple([changed.get(position, value) for position, value in items])
    duplicate = copy.copy(state)
    for key, value in changed.items():
        duplicate[key] = value
    return duplicate
