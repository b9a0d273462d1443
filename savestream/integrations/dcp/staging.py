"""The copy that ``async_save`` makes of a state: torch's own stager, which takes memory as it lies.

A conjugated or negated tensor is memory and a bit; torch's stager copies the memory and forgets the bit. So such a
tensor is made plain where the stager comes to it, whatever holds it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["stage_state"]


def stage_state(state: Any) -> Any:
    """A copy of a state in host memory, of which nothing changes with the original."""
    stager = _stager_class()()
    try:
        return stager.stage(state)
    finally:
        stager.close()


@functools.cache
def _stager_class() -> Any:
    module: Any = importlib.import_module("torch.distributed.checkpoint._state_dict_stager")

    class Stager(module.StateDictStager):  # type: ignore[misc]  # mypy does not know the base
        """torch's stager, for tensors of which torch shows something else than lies in memory, too."""

        def _offload_tensor(self, x: Any, memo: dict[Any, Any], non_blocking: bool = False) -> Any:
            if not (x.is_conj() or x.is_neg()):
                return super()._offload_tensor(x, memo, non_blocking=non_blocking)
            seen = (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
            if seen not in memo:  # another view of the same elements is tied to this one
                plain = x.resolve_conj().resolve_neg()
                self._keep_alive([x, plain], memo)  # their memory must not be given to others meanwhile
                memo[seen] = super()._offload_tensor(plain, memo, non_blocking=non_blocking)
            memo[id(x)] = memo[seen]
            return memo[seen]

    return Stager
