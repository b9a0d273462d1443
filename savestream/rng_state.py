"""The process's own random generators, captured as plain values and set again.

What is captured is a dict without arrays: it can stand anywhere in a state, comes back the same with and without a
target, and needs no framework to be read. Generators that a program made itself are values of their own, and need none
of this: put them into the state.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from savestream.arrays.dtypes import PRNG_KEY_WORDS
from savestream.errors import PlanError, UsageError
from savestream.planners.containers import category_of, contents, put_contents
from savestream.planners.paths import Index
from savestream.planners.random_generators import (
    check_python_state,
    check_random_state,
    check_torch_cpu_state,
    numpy_state,
    plain_state,
)

__all__ = ["capture_rng_state", "restore_rng_state"]

_MEMBERS = {"python", "numpy", "torch", "jax"}
_KEY_MEMBERS = {"jax_key", "shape", "words"}
_CUDA_STATE_BYTES = 16


def capture_rng_state(*, jax: Any = None) -> dict[str, Any]:
    """The states of the global random generators of this process.

    Parameters
    ----------
    jax
        JAX has no global generator: its keys are the program's. Keys given here, typed or raw ones in any nesting of
        dicts, lists, tuples and dataclasses, are captured too, and :func:`restore_rng_state` hands them back.

    Returns
    -------
    dict
        Plain values: ``"python"`` (the module random), ``"numpy"`` (its legacy functions such as
        ``numpy.random.rand``), ``"torch"`` where it is imported, with the states of the CUDA devices where CUDA is
        initialised, and ``"jax"`` where keys were given.

    Raises
    ------
    PlanError
        A leaf of ``jax`` is no key, or cannot be read in this process.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": plain_state(np.random.get_state(legacy=False)),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        state["torch"] = {
            "cpu": torch.get_rng_state().numpy().tobytes(),
            "cuda": [device.cpu().numpy().tobytes() for device in cuda],
        }
    if jax is not None:
        state["jax"] = _map_leaves(jax, _captured_key, lambda _: False)
    return state


def restore_rng_state(state: Mapping[str, Any], *, ignore_missing: bool = False) -> Any:
    """Set the global random generators to captured states; nothing is set unless all of them can be.

    Parameters
    ----------
    state
        What :func:`capture_rng_state` returned, before or after a save and a load. Members may be left out; their
        generators stay as they are.
    ignore_missing
        Leave out the states of frameworks that are not imported in this process and of CUDA devices that it does not
        have, instead of refusing them.

    Returns
    -------
    object
        The JAX keys that were captured, in the containers that ``state`` has; None where there are none. They are new
        arrays on the default device.

    Raises
    ------
    PlanError
        ``state`` is no captured state, or numpy's legacy functions use another bit generator now.
    UsageError
        It holds states of a framework that is not imported, or of more or fewer CUDA devices than there are.
    """
    if not isinstance(state, Mapping) or not state.keys() <= _MEMBERS:
        raise PlanError("this is no state from capture_rng_state(): it is no dict, or has other members")
    settings: list[Callable[[], object]] = []
    if "python" in state:
        settings.append(_python_setting(state["python"]))
    if "numpy" in state:
        settings.append(_numpy_setting(state["numpy"]))
    if "torch" in state and _has("torch", ignore_missing):
        settings += _torch_settings(state["torch"], ignore_missing)
    keys = None
    if "jax" in state and _has("jax", ignore_missing):
        keys = _map_leaves(state["jax"], _restored_key, _is_captured_key)
    for setting in settings:
        setting()
    return keys


def _has(framework: str, ignore_missing: bool) -> bool:
    present = sys.modules.get(framework) is not None
    if not present and not ignore_missing:
        raise UsageError(
            f"the state holds random states of {framework}, which is not imported; import {framework} first, or leave "
            "them out with ignore_missing=True"
        )
    return present


def _checked(check: Callable[[Any], None], state: Any, whose: str) -> Any:
    try:
        check(state)
    except (ValueError, TypeError, LookupError) as error:
        raise PlanError(f"this is no random state of {whose}: {error}") from error
    return state


def _python_setting(state: Any) -> Callable[[], object]:
    return functools.partial(random.setstate, _checked(check_python_state, state, "Python's"))


def _numpy_setting(state: Any) -> Callable[[], object]:
    checked = _checked(check_random_state, plain_state(state), "numpy's")
    current = np.random.get_state(legacy=False)["bit_generator"]
    if checked["bit_generator"] != current:
        raise PlanError(
            f"the state is one of {checked['bit_generator']}, but numpy's legacy functions use {current}; call "
            "numpy.random.set_bit_generator first"
        )
    return functools.partial(np.random.set_state, numpy_state(checked))


def _torch_settings(state: Any, ignore_missing: bool) -> list[Callable[[], object]]:
    torch = sys.modules["torch"]
    if not isinstance(state, Mapping) or state.keys() != {"cpu", "cuda"} or not isinstance(state["cuda"], list | tuple):
        raise PlanError("this is no random state of torch's: it has other members than cpu and cuda")
    cpu = _checked(check_torch_cpu_state, _state_bytes(state["cpu"]), "torch's")
    devices = [_checked(_check_cuda_state, _state_bytes(device), "torch's for CUDA") for device in state["cuda"]]
    present = torch.cuda.device_count() if devices and torch.cuda.is_available() else 0
    if len(devices) != present and not ignore_missing:
        raise UsageError(
            f"the state holds states of {len(devices)} CUDA devices, this process has {present}; set those that both "
            "have with ignore_missing=True"
        )
    settings: list[Callable[[], object]] = [functools.partial(torch.set_rng_state, _byte_tensor(torch, cpu))]
    for device, content in enumerate(devices[:present]):
        settings.append(functools.partial(torch.cuda.set_rng_state, _byte_tensor(torch, content), device))
    return settings


def _byte_tensor(torch: Any, content: bytes) -> Any:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _state_bytes(state: Any) -> bytes:
    """A state of torch's: as it was captured, or as an array of any framework."""
    if isinstance(state, bytes):
        return state
    array = np.asarray(state)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise PlanError(f"a random state of torch's is a row of bytes, not {array.dtype} of shape {array.shape}")
    return array.tobytes()


def _check_cuda_state(content: bytes) -> None:
    if len(content) != _CUDA_STATE_BYTES:
        raise ValueError(f"{len(content)} bytes instead of {_CUDA_STATE_BYTES}")
    if struct.unpack("=qq", content)[1] % 4:
        raise ValueError("its offset is no multiple of 4")


# --- JAX's keys -------------------------------------------------------------------------------------------


def _map_leaves(tree: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """A tree with its leaves changed; None stays, as JAX sees it."""
    category = None if is_leaf(tree) else category_of(tree)
    if category is None:
        return None if tree is None else change(tree)
    parts, children = contents(tree, category, "jax")
    places = [part.position if isinstance(part, Index) else part for part in parts]
    changed = [_map_leaves(child, change, is_leaf) for child in children]
    return put_contents(copy.copy(tree), category, dict(zip(places, changed, strict=True)))


def _captured_key(key: Any) -> dict[str, Any]:
    """A key as plain values: its implementation, or which sort of raw key it is, and its words."""
    jax = sys.modules.get("jax")
    implementation = "numpy"
    if jax is not None and isinstance(key, jax.Array):
        implementation = "raw"
        if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(key))
            if implementation not in PRNG_KEY_WORDS:
                raise PlanError(f"a key of the implementation {implementation} cannot be captured; pass its key_data()")
            key = jax.random.key_data(key)
    elif not isinstance(key, np.ndarray):
        raise PlanError(f"jax: a {type(key).__qualname__} is no key; pass keys of jax.random in plain containers")
    try:
        words = np.asarray(key)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"jax: a key cannot be read in this process: {error}") from error
    if words.dtype != np.uint32:
        raise PlanError(f"jax: an array of {words.dtype} is no key; raw keys are of uint32")
    return {"jax_key": implementation, "shape": words.shape, "words": words.astype("<u4").tobytes()}


def _is_captured_key(tree: Any) -> bool:
    return type(tree) is dict and tree.keys() == _KEY_MEMBERS and type(tree["jax_key"]) is str


def _restored_key(captured: Any) -> Any:
    if not _is_captured_key(captured):
        raise PlanError(f"jax: a {type(captured).__qualname__} is no key that was captured")
    implementation, shape, content = captured["jax_key"], captured["shape"], captured["words"]
    sizes = PRNG_KEY_WORDS.get(implementation)
    valid = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape) and type(content) is bytes
    if not valid or len(content) != 4 * math.prod(shape) or (sizes is not None and shape[-1:] != (sizes,)):
        raise PlanError("jax: shape and words of a captured key do not belong together")
    words = np.frombuffer(content, "<u4").reshape(shape).astype(np.uint32)
    if implementation == "numpy":
        return words
    jax = sys.modules["jax"]
    array = jax.numpy.asarray(words)
    if implementation == "raw":
        return array
    if sizes is None:
        raise PlanError(f"jax: a key of the unknown implementation {implementation!r}")
    return jax.random.wrap_key_data(array, impl=implementation)
