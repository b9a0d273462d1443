"""Random generators of Python, numpy and PyTorch as plain states.

States from a file are checked here to the last number: numpy and PyTorch take positions beyond the end of their
buffers for granted, and would read memory that is not theirs.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from savestream.errors import UnsafeObjectError
from savestream.planners.object_forms import ObjectForm, ObjectUnavailableError, require_state

__all__ = [
    "GENERATOR_FORMS",
    "check_bit_generator_state",
    "check_python_state",
    "check_random_state",
    "check_torch_cpu_state",
    "numpy_state",
    "plain_state",
]

_LARGEST_POOL = 1024
_LARGEST_SEED_BITS = 1 << 16
_MERSENNE_WORDS = 624
_TORCH_CPU_STATE_BYTES = 5056


class _Number(msgspec.Struct, frozen=True):
    """An int from 0 to ``largest``."""

    largest: int


class _Words(msgspec.Struct, frozen=True):
    """A list of ``count`` unsigned ints of ``bits``."""

    count: int
    bits: int


_FLAG, _UINT32, _UINT128 = _Number(1), _Number(2**32 - 1), _Number(2**128 - 1)
_HALF_USED = {"has_uint32": _FLAG, "uinteger": _UINT32}
_PCG = {"state": {"state": _UINT128, "inc": _UINT128}, **_HALF_USED}
_LAYOUTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "PCG64": _PCG,
        "PCG64DXSM": _PCG,
        "MT19937": {"state": {"key": _Words(_MERSENNE_WORDS, 32), "pos": _Number(_MERSENNE_WORDS)}},
        "Philox": {
            "state": {"counter": _Words(4, 64), "key": _Words(2, 64)},
            "buffer": _Words(4, 64),
            "buffer_pos": _Number(4),
            **_HALF_USED,
        },
        "SFC64": {"state": {"state": _Words(4, 64)}, **_HALF_USED},
    }
)


def plain_state(state: Any) -> Any:
    """A state as numpy gives it, with its arrays as lists of ints."""
    if isinstance(state, Mapping):
        return {key: plain_state(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def numpy_state(state: Any) -> dict[str, Any]:
    """A checked plain state as numpy takes it."""

    def build(part: Any, layout: Any) -> Any:
        if isinstance(layout, Mapping):
            return {key: build(value, layout.get(key)) for key, value in part.items()}
        return np.array(part, f"u{layout.bits // 8}") if isinstance(layout, _Words) else part

    built: dict[str, Any] = build(state, _LAYOUTS[state["bit_generator"]])
    return built


def check_bit_generator_state(state: Any) -> None:
    """Raise ``ValueError`` unless ``state`` is a plain state of one of numpy's bit generators."""
    require_state(type(state) is dict and type(state.get("bit_generator")) is str, "no state of a bit generator")
    require_state(state["bit_generator"] in _LAYOUTS, "a bit generator that numpy does not have")
    own = {key: value for key, value in state.items() if key != "bit_generator"}
    _check(own, _LAYOUTS[state["bit_generator"]], state["bit_generator"])


def _check(part: Any, layout: Any, name: str) -> None:
    if isinstance(layout, Mapping):
        require_state(type(part) is dict and part.keys() == layout.keys(), f"{name} has other members")
        for key, inner in layout.items():
            _check(part[key], inner, f"{name}.{key}")
    elif isinstance(layout, _Words):
        require_state(type(part) is list and len(part) == layout.count, f"{name} is no list of {layout.count} words")
        require_state(all(_within(word, 2**layout.bits - 1) for word in part), f"{name} holds what is no word")
    else:
        require_state(_within(part, layout.largest), f"{name} is no int from 0 to {layout.largest}")


def _within(value: Any, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


def check_python_state(state: Any) -> None:
    """Raise unless ``random.setstate`` takes ``state`` as ``random.getstate`` returned it."""
    require_state(type(state) is tuple and len(state) == 3 and state[0] == 3, "no state of Python's random, version 3")
    words, gauss = state[1:]
    require_state(type(words) is tuple and len(words) == _MERSENNE_WORDS + 1, "a state of another length")
    require_state(all(_within(word, 2**32 - 1) for word in words), "a state of other things than words")
    require_state(words[-1] <= _MERSENNE_WORDS, "a position beyond the end")
    require_state(gauss is None or type(gauss) is float, "gauss_next is no float")


def check_random_state(state: Any) -> None:
    """Raise unless ``state`` is a plain state of numpy's legacy RandomState."""
    require_state(type(state) is dict, "no state of a RandomState")
    own = dict(state)
    has_gauss, gauss = own.pop("has_gauss", None), own.pop("gauss", None)
    require_state(_within(has_gauss, 1) and type(gauss) is float, "has_gauss or gauss is absent or wrong")
    check_bit_generator_state(own)


def check_torch_cpu_state(state: bytes) -> None:
    """Raise unless ``state`` is one of PyTorch's generator for the CPU.

    PyTorch takes any position within its buffer, however many numbers are said to be left from there.
    """
    require_state(len(state) == _TORCH_CPU_STATE_BYTES, f"a state of {len(state)} bytes")
    left, seeded, following = struct.unpack_from("=iiQ", state, 8)
    require_state(seeded == 1, "a generator that was never seeded")
    require_state(1 <= left <= _MERSENNE_WORDS and left + following <= _MERSENNE_WORDS + 1, "a position beyond the end")


class _PythonRandom(ObjectForm):
    name = "random.Random"
    module = "random"
    keeps_identity = True

    def matches(self, value: Any) -> bool:
        return type(value) is random.Random and vars(value).keys() <= {"gauss_next"}

    def state(self, value: Any) -> object:
        return value.getstate()

    def check(self, state: Any) -> None:
        check_python_state(state)

    def make(self, state: Any) -> object:
        made = random.Random()
        made.setstate(state)
        return made

    def adopt(self, target: Any, saved: Any) -> None:
        target.setstate(saved.getstate())


def _numpy_random() -> Any:
    """numpy's random module, which ``import numpy`` alone does not load."""
    return np.random


def _bit_generator_name(value: object) -> str | None:
    """The name of one of numpy's own bit generators."""
    kind = type(value)
    name = kind.__name__
    return name if name in _LAYOUTS and kind is getattr(_numpy_random(), name) else None


def _seed_sequence_state(seed: Any) -> dict[str, Any] | None:
    """What a seed sequence is made of; None for none."""
    if seed is None:
        return None
    if type(seed) is not _numpy_random().SeedSequence:
        raise UnsafeObjectError(f"its seed sequence, a {type(seed).__qualname__}, has no safe encoding")
    entropy = plain_state(seed.entropy)
    state = {
        "entropy": [plain_state(word) for word in entropy] if isinstance(entropy, list | tuple) else entropy,
        "spawn_key": [int(part) for part in seed.spawn_key],
        "pool_size": int(seed.pool_size),
        "n_children_spawned": int(seed.n_children_spawned),
    }
    try:
        _check_seed_sequence(state)
    except (TypeError, ValueError) as error:
        raise UnsafeObjectError(f"its seed sequence has no safe encoding: {error}") from error
    return state


def _check_seed_sequence(state: Any) -> None:
    wanted = {"entropy", "spawn_key", "pool_size", "n_children_spawned"}
    require_state(type(state) is dict and state.keys() == wanted, "a seed sequence has other members")
    entropy, spawn_key = state["entropy"], state["spawn_key"]
    for words in ([entropy] if type(entropy) is int else entropy, spawn_key):
        require_state(type(words) is list, "a seed that is neither an int nor a list of ints")
        require_state(all(type(word) is int and word >= 0 for word in words), "a seed of other things than ints")
        require_state(sum(word.bit_length() + 32 for word in words) <= _LARGEST_SEED_BITS, "a seed that is too long")
    pool = state["pool_size"]
    require_state(_within(pool, _LARGEST_POOL) and pool >= 4, f"a pool beyond 4 to {_LARGEST_POOL} words")
    require_state(_within(state["n_children_spawned"], 2**32 - 1), "no number of children")


def _make_seed_sequence(state: Any) -> Any:
    if state is None:
        return None
    return _numpy_random().SeedSequence(**{**state, "spawn_key": tuple(state["spawn_key"])})


class _SeedSequence(ObjectForm):
    name = "numpy.random.SeedSequence"
    module = "numpy.random"

    def matches(self, value: Any) -> bool:
        return type(value) is _numpy_random().SeedSequence

    def state(self, value: Any) -> object:
        return _seed_sequence_state(value)

    def check(self, state: Any) -> None:
        _check_seed_sequence(state)

    def make(self, state: Any) -> object:
        made: object = _make_seed_sequence(state)
        return made


class _BitGenerator(ObjectForm):
    """numpy's bit generators, with the seed sequence from which they spawn others."""

    name = "numpy.random.BitGenerator"
    module = "numpy.random"
    keeps_identity = True

    def matches(self, value: Any) -> bool:
        return _bit_generator_name(value) is not None

    def state(self, value: Any) -> object:
        return {"state": plain_state(value.state), "seed_sequence": _seed_sequence_state(value.seed_seq)}

    def check(self, state: Any) -> None:
        require_state(type(state) is dict and state.keys() == {"state", "seed_sequence"}, "other members")
        check_bit_generator_state(state["state"])
        if state["seed_sequence"] is not None:
            _check_seed_sequence(state["seed_sequence"])

    def make(self, state: Any) -> object:
        made = getattr(_numpy_random(), state["state"]["bit_generator"])()
        made.__setstate__((numpy_state(state["state"]), _make_seed_sequence(state["seed_sequence"])))
        generator: object = made
        return generator

    def difference(self, target: Any, saved: Any) -> str | None:
        if type(target) is type(saved):
            return None
        return f"the checkpoint has a {type(saved).__name__}, the target a {type(target).__name__}"

    def adopt(self, target: Any, saved: Any) -> None:
        target.__setstate__((saved.state, saved.seed_seq))


class _Generator(_BitGenerator):
    """numpy's Generator: its bit generator is all that it holds."""

    name = "numpy.random.Generator"

    def matches(self, value: Any) -> bool:
        return type(value) is _numpy_random().Generator and _bit_generator_name(value.bit_generator) is not None

    def state(self, value: Any) -> object:
        return super().state(value.bit_generator)

    def make(self, state: Any) -> object:
        generator: object = _numpy_random().Generator(super().make(state))
        return generator

    def difference(self, target: Any, saved: Any) -> str | None:
        return super().difference(target.bit_generator, saved.bit_generator)

    def adopt(self, target: Any, saved: Any) -> None:
        super().adopt(target.bit_generator, saved.bit_generator)


class _RandomState(ObjectForm):
    """numpy's legacy RandomState."""

    name = "numpy.random.RandomState"
    module = "numpy.random"
    keeps_identity = True

    def matches(self, value: Any) -> bool:
        kind = _numpy_random().RandomState
        return type(value) is kind and _bit_generator_name(value._bit_generator) is not None

    def state(self, value: Any) -> object:
        return plain_state(value.get_state(legacy=False))

    def check(self, state: Any) -> None:
        check_random_state(state)

    def make(self, state: Any) -> object:
        made = _numpy_random().RandomState(getattr(_numpy_random(), state["bit_generator"])())
        made.set_state(numpy_state(state))
        generator: object = made
        return generator

    def difference(self, target: Any, saved: Any) -> str | None:
        names = [generator.get_state(legacy=False)["bit_generator"] for generator in (saved, target)]
        return None if names[0] == names[1] else f"the checkpoint has a {names[0]}, the target a {names[1]}"

    def adopt(self, target: Any, saved: Any) -> None:
        target.set_state(saved.get_state(legacy=False))


class _TorchGenerator(ObjectForm):
    name = "torch.Generator"
    module = "torch"
    keeps_identity = True

    def matches(self, value: Any) -> bool:
        return type(value) is getattr(sys.modules.get("torch"), "Generator", None)

    def state(self, value: Any) -> object:
        return {"device": str(value.device), "state": value.get_state().numpy().tobytes()}

    def check(self, state: Any) -> None:
        require_state(type(state) is dict and state.keys() == {"device", "state"}, "other members")
        device, content = state["device"], state["state"]
        require_state(type(device) is str and device.isascii() and len(device) < 32, "no device")
        require_state(type(content) is bytes, "a state that is no bytes")
        if device == "cpu":
            check_torch_cpu_state(content)

    def make(self, state: Any) -> object:
        torch = self.loaded()
        try:
            made: Any = torch.Generator(state["device"])
        except (RuntimeError, AssertionError) as error:
            raise ObjectUnavailableError(f"no generator for the device {state['device']}") from error
        try:
            made.set_state(torch.frombuffer(bytearray(state["state"]), dtype=torch.uint8))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        generator: object = made
        return generator

    def difference(self, target: Any, saved: Any) -> str | None:
        if target.device.type == saved.device.type:
            return None
        return f"the checkpoint has a generator for {saved.device}, the target one for {target.device}"

    def adopt(self, target: Any, saved: Any) -> None:
        target.set_state(saved.get_state())


GENERATOR_FORMS: tuple[ObjectForm, ...] = (
    *(_PythonRandom(), _SeedSequence(), _BitGenerator(), _Generator(), _RandomState(), _TorchGenerator()),
)
