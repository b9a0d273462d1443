"""Random generators as values: they go on where they stood, and hostile states reach no generator."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from savestream.errors import CorruptCheckpointError, UnsafeObjectError
from savestream.planners.rebuilding import merge_value
from savestream.planners.recorded import RecordedObject
from savestream.planners.values import decode_value, decode_value_bytes, encode_value, encode_value_bytes

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def python_random() -> random.Random:
    generator = random.Random(3)
    generator.gauss(0, 1)  # leaves half of a pair behind
    return generator


def used(kind: Any, **arguments: Any) -> np.random.Generator:
    """A generator in the middle of its sequence, with half of a 64-bit word left."""
    generator = np.random.Generator(kind(**arguments))
    generator.normal(size=7)
    generator.integers(0, 2**31, 3, np.uint32)
    generator.spawn(2)
    return generator


def legacy(bit_generator: Any = None) -> np.random.RandomState:
    state = np.random.RandomState(5 if bit_generator is None else bit_generator)
    state.normal(size=3)
    return state


GENERATORS: dict[str, Callable[[], Any]] = {
    "random": python_random,
    **{kind.__name__: lambda kind=kind: used(kind, seed=11) for kind in BIT_GENERATORS},
    "default": lambda: np.random.default_rng(),
    "words": lambda: np.random.default_rng([1, 2**70, 3]),
    "array": lambda: np.random.default_rng(np.array([1, 2], np.uint32)),
    "sequence": lambda: np.random.default_rng(np.random.SeedSequence(5, spawn_key=(1, 2), pool_size=8)),
    "unseeded": lambda: np.random.Generator(np.random.Philox(key=5)),
    "legacy": legacy,
    "legacy philox": lambda: legacy(np.random.Philox(3)),
}


def draw(generator: Any) -> list[Any]:
    """The next numbers of every sort."""
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.gauss(0, 1), generator.getrandbits(77)]
    if isinstance(generator, np.random.RandomState):
        return [generator.normal(size=5).tolist(), generator.randint(0, 9, 5).tolist(), generator.bytes(9)]
    drawn = [generator.integers(0, 2**31, 5, np.uint32).tolist(), generator.normal(size=700).tolist()]
    if generator.bit_generator.seed_seq is not None:
        drawn += [child.integers(2**60) for child in generator.spawn(2)]
    return drawn


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_a_generator_goes_on_where_it_stood(make: Callable[[], Any]) -> None:
    generator = make()
    data = encode_value_bytes(generator, "key")
    again = decode_value_bytes(data, key="key")
    assert type(again) is type(generator)
    assert encode_value_bytes(again, "key") == data
    assert draw(again) == draw(generator)


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_a_target_keeps_its_identity_and_takes_the_state(make: Callable[[], Any]) -> None:
    generator = make()
    data = encode_value_bytes({"rng": [generator]}, "key")
    expected = draw(copy.deepcopy(generator))
    if isinstance(generator, np.random.RandomState):
        generator.normal(size=3)
    else:
        draw(generator)
    merged = merge_value({"rng": [generator]}, decode_value_bytes(data))
    assert merged["rng"][0] is generator
    assert draw(generator) == expected


@pytest.mark.parametrize("kind", BIT_GENERATORS)
def test_bit_generators_alone(kind: Any) -> None:
    generator = kind(3)
    again = decode_value_bytes(encode_value_bytes(generator, "key"))
    assert type(again) is kind
    assert again.random_raw(50).tolist() == generator.random_raw(50).tolist()
    target = kind(4)
    assert merge_value(target, again) is target
    assert target.random_raw(3).tolist() == again.random_raw(3).tolist()


def test_seed_sequences() -> None:
    sequence = np.random.SeedSequence([1, 2], spawn_key=(7,), pool_size=6)
    sequence.spawn(3)
    again = decode_value_bytes(encode_value_bytes(sequence, "key"))
    assert again.generate_state(9).tolist() == sequence.generate_state(9).tolist()
    assert again.spawn(1)[0].spawn_key == sequence.spawn(1)[0].spawn_key == (7, 3)


def test_classes_of_scalars() -> None:
    import ml_dtypes

    for kind in (np.float32, np.bool_, np.complex128, np.datetime64, np.str_, ml_dtypes.bfloat16, ml_dtypes.int4):
        assert decode_value_bytes(encode_value_bytes({"dtype": kind}, "key")) == {"dtype": kind}


class Derived(random.Random):
    pass


class OwnSeeds(np.random.bit_generator.ISpawnableSeedSequence):
    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.arange(n_words, dtype=dtype)

    def spawn(self, n_children: int) -> Any:
        return [OwnSeeds() for _ in range(n_children)]


def with_attribute() -> random.Random:
    generator = random.Random(1)
    generator.note = "x"  # type: ignore[attr-defined]
    return generator


@pytest.mark.parametrize(
    "value",
    [
        Derived(1),
        with_attribute(),
        random.SystemRandom(),
        np.random.Generator(np.random.PCG64(OwnSeeds())),
        np.random.SeedSequence(["0x12", 4]),
        np.random.SeedSequence(5, pool_size=4096),
        np.random.SeedSequence(2**70_000),
        type("Custom", (np.random.PCG64,), {})(3),
        np.random.Generator(type("Custom", (np.random.PCG64,), {})(3)),
        np.floating,
        np.object_,
        np.longlong if np.longlong is not np.int64 else np.intc,
        {np.random.default_rng(1): 2},
        RecordedObject("torch.device", "../x"),
        RecordedObject("random.Random", (3, (), None)),
        RecordedObject("numpy.scalar_type", "object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_lose_something_is_refused_by_key(value: object) -> None:
    with pytest.raises(UnsafeObjectError, match="the_key"):
        encode_value([value], "the_key")


def encoded(generator: Any) -> dict[str, Any]:
    node = encode_value(generator, "key")
    assert isinstance(node, dict)
    return node


def changed(generator: Any, path: list[Any], value: Any) -> dict[str, Any]:
    """The encoded form with one member replaced."""
    node = encoded(generator)
    inner = node
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return node


STATE = ["$object", 1, "state"]
SEEDS = ["$object", 1, "seed_sequence"]
PYTHON = ["$object", 1, "$tuple"]
DAMAGED = {
    "mersenne position": changed(np.random.MT19937(1), [*STATE, "state", "pos"], 625),
    "mersenne negative position": changed(np.random.MT19937(1), [*STATE, "state", "pos"], -1),
    "mersenne position of another type": changed(np.random.MT19937(1), [*STATE, "state", "pos"], True),
    "mersenne words": changed(np.random.MT19937(1), [*STATE, "state", "key"], [0] * 623),
    "mersenne large word": changed(np.random.MT19937(1), [*STATE, "state", "key"], [2**32] + [0] * 623),
    "mersenne float": changed(np.random.MT19937(1), [*STATE, "state", "key"], [0.5] + [0] * 623),
    "philox position": changed(np.random.Philox(1), [*STATE, "buffer_pos"], -5),
    "philox position beyond": changed(np.random.Philox(1), [*STATE, "buffer_pos"], 5),
    "philox counter": changed(np.random.Philox(1), [*STATE, "state", "counter"], [1, 2, 3]),
    "sfc words": changed(np.random.SFC64(1), [*STATE, "state", "state"], [1, 2, 3, "4"]),
    "pcg large": changed(np.random.PCG64(1), [*STATE, "state", "inc"], {"$int": hex(2**128)}),
    "pcg flag": changed(np.random.PCG64(1), [*STATE, "has_uint32"], 2),
    "other bit generator": changed(np.random.PCG64(1), [*STATE, "bit_generator"], "MT19937"),
    "no bit generator": changed(np.random.PCG64(1), [*STATE, "bit_generator"], "os.system"),
    "bit generator of another type": changed(np.random.PCG64(1), [*STATE, "bit_generator"], ["PCG64"]),
    "more members": changed(np.random.PCG64(1), [*STATE, "more"], 1),
    "members of another type": changed(np.random.PCG64(1), STATE, [1]),
    "pool": changed(np.random.PCG64(1), [*SEEDS, "pool_size"], 2**40),
    "pool of another type": changed(np.random.PCG64(1), [*SEEDS, "pool_size"], 4.0),
    "entropy": changed(np.random.PCG64(1), [*SEEDS, "entropy"], "0x12"),
    "negative entropy": changed(np.random.PCG64(1), [*SEEDS, "entropy"], [-1]),
    "long entropy": changed(np.random.PCG64(1), [*SEEDS, "entropy"], {"$int": "0x" + "f" * 100_000}),
    "many seeds": changed(np.random.PCG64(1), [*SEEDS, "spawn_key"], [0] * 100_000),
    "children": changed(np.random.PCG64(1), [*SEEDS, "n_children_spawned"], -1),
    "generator": changed(np.random.default_rng(1), [*STATE, "uinteger"], 2**32),
    "legacy gauss": changed(legacy(), ["$object", 1, "gauss"], "x"),
    "legacy flag": changed(legacy(), ["$object", 1, "has_gauss"], 3),
    "legacy without": {"$object": ["numpy.random.RandomState", {}]},
    "python version": changed(python_random(), [*PYTHON, 0], 2),
    "python words": changed(python_random(), [*PYTHON, 1], {"$tuple": [0] * 624}),
    "python position": changed(python_random(), [*PYTHON, 1, "$tuple", 624], 625),
    "python negative word": changed(python_random(), [*PYTHON, 1, "$tuple", 5], -1),
    "python gauss": changed(python_random(), [*PYTHON, 2], "0.5"),
    "no pair": {"$object": ["random.Random"]},
    "no name": {"$object": [1, 2]},
    "no list": {"$object": "random.Random"},
    "scalar type": {"$object": ["numpy.scalar_type", "O"]},
    "scalar type alias": {"$object": ["numpy.scalar_type", "<f4"]},
    "scalar type record": {"$object": ["numpy.scalar_type", '{"fields":[],"itemsize":0}']},
    "torch without torch": {"$object": ["torch.device", "a b"]},
    "torch state without torch": {"$object": ["torch.Generator", {"device": "cpu", "state": {"$bytes": "AAAA"}}]},
    "torch size": {"$object": ["torch.Size", [1]]},
    "metadata": {"$state_dict": [[]]},
}


@pytest.mark.parametrize("node", DAMAGED.values(), ids=DAMAGED)
def test_hostile_states_are_refused_by_key(node: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="the_key"):
        decode_value([node], key="the_key")


def test_unknown_types_stay_what_they_are() -> None:
    found = decode_value({"$object": ["os.system", "true"]}, key="key")
    assert found == RecordedObject("os.system", "true")
    assert encode_value(found, "key") == {"$object": ["os.system", "true"]}
    assert {found: 1}[RecordedObject("os.system", "true")] == 1


def test_a_saved_generator_of_another_kind_is_no_state_for_the_target() -> None:
    from savestream.planners.framework_values import adoption_problem

    rng, other = np.random.default_rng(1), np.random.Generator(np.random.Philox(1))
    assert "Philox" in (adoption_problem(rng, other) or "")
    assert "None" in (adoption_problem(rng, None) or "")
    assert "RandomState" in (adoption_problem(rng, legacy()) or "")
    assert "MT19937" in (adoption_problem(legacy(), legacy(np.random.Philox(3))) or "")
    assert "torch.Generator" in (adoption_problem(rng, RecordedObject("torch.Generator", {})) or "")
    assert adoption_problem(rng, np.random.default_rng(2)) is None
    assert adoption_problem(None, rng) is adoption_problem(3, rng) is None
