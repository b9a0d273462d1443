"""Containers that JAX knows as pytree nodes: modules, states, dataclasses with static fields, classes of one's own."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from jax import tree_util
from jax.experimental import sparse
from jax_support import assert_same_leaf, assert_same_tree, bits, run_python

import savestream
from savestream import LoadMismatchError, LoadOptions, PlanError, RecordedDataclass, UnsafeObjectError


def twice(value: Any) -> Any:
    return 2 * value


@struct.dataclass
class FlaxRecord:
    weights: jax.Array
    inner: Any = None
    function: Callable[[Any], Any] = struct.field(pytree_node=False, default=twice)


@functools.partial(tree_util.register_dataclass, data_fields=("weights", "count"), meta_fields=("name",))
@dataclasses.dataclass
class Registered:
    weights: Any
    count: Any
    name: str


@functools.partial(tree_util.register_dataclass, data_fields=("weights", "bias"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class WithoutStatic:
    weights: Any
    bias: Any


@tree_util.register_pytree_node_class
class Positional:
    def __init__(self, first: Any, second: Any, note: str) -> None:
        self.first, self.second, self.note = first, second, note

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.first, self.second), self.note

    @classmethod
    def tree_unflatten(cls, note: str, children: Any) -> Positional:
        return cls(*children, note)


@tree_util.register_pytree_node_class
class MakesChildrenAnew:
    """Its children are other objects whenever JAX looks into it."""

    def __init__(self, layers: list[Any], sizes: list[int]) -> None:
        self.layers, self.sizes = layers, sizes

    def tree_flatten(self) -> tuple[Any, Any]:
        return (tuple(self.layers), {"sizes": list(self.sizes)}, np.array(self.sizes)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> MakesChildrenAnew:
        layers, sizes, _ = children
        return cls(list(layers), sizes["sizes"])


class Keyed:
    """Its keys are what it is told they are."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs


tree_util.register_pytree_with_keys(
    Keyed,
    lambda node: (node.pairs, tuple(key for key, _ in node.pairs)),
    lambda keys, children: Keyed(list(zip(keys, children, strict=True))),
    lambda node: ([child for _, child in node.pairs], tuple(key for key, _ in node.pairs)),
)


@tree_util.register_static
class Setting:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@tree_util.register_static
class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Unregistered:
    weights: Any
    name: str


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.width = 3


def numbers(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def network(seed: int) -> Network:
    return Network(nnx.Rngs(seed))


def perceptron(seed: int) -> equinox.Module:
    return equinox.nn.MLP(2, 2, 4, 2, key=jax.random.key(seed))


STATES: dict[str, Callable[[int], Any]] = {
    "FrozenDict": lambda seed: FrozenDict({"a": {"w": numbers(seed, 2)}, "b": FrozenDict({1: numbers(seed), 2: seed})}),
    "flax dataclass": lambda seed: FlaxRecord(numbers(seed, 3), {"deep": FlaxRecord(numbers(seed + 1, 2))}),
    "registered dataclass": lambda seed: Registered(numbers(seed, 2), seed, "static"),
    "frozen registered dataclass": lambda seed: WithoutStatic(numbers(seed, 2), [numbers(seed), None]),
    "by position": lambda seed: Positional(numbers(seed, 2), {"n": seed, "w": numbers(seed)}, "note"),
    "children made anew": lambda seed: MakesChildrenAnew([numbers(seed, 2), numbers(seed)], [seed, 2]),
    "Partial": lambda seed: tree_util.Partial(twice, numbers(seed, 2), scale=numbers(seed)),
    "sparse array": lambda seed: sparse.BCOO((numbers(seed, 2), jnp.array([[0], [2]])), shape=(4,)),
    "equinox module": lambda seed: equinox.nn.Linear(2, 3, key=jax.random.key(seed)),
    "equinox arrays": lambda seed: equinox.filter(perceptron(seed), equinox.is_array),
    "nnx state": lambda seed: nnx.split(network(seed))[1],
    "nnx split states": lambda seed: nnx.split(network(seed), nnx.Param, nnx.RngState, ...)[1:],
    "nnx module": network,
    "nnx pure dict": lambda seed: nnx.to_pure_dict(nnx.state(network(seed))),
    "mixture": lambda seed: {
        "list": [FrozenDict({"w": numbers(seed)}), None, Pair(FlaxRecord(numbers(seed)), ())],
        "ordered": collections.OrderedDict(z=Positional(numbers(seed), seed, "x"), a=Registered(seed, seed, "y")),
        "plain": FrozenDict({"lr": 0.1 * seed, "tuple": (seed, "text", None)}),
        "empty": [FrozenDict({}), Setting("fast"), FlaxRecord(None)],
        "unregistered": Unregistered(FrozenDict({"w": numbers(seed)}), "kept"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
async def test_a_target_takes_over_the_saved_leaves(name: str, tmp_path: Path) -> None:
    state, target = STATES[name](1), STATES[name](2)
    await savestream.save({"state": state}, tmp_path / "inside")
    await savestream.save(state, tmp_path / "root")
    found = await savestream.load(tmp_path / "inside", {"state": STATES[name](3)})
    assert_same_tree(found["state"], state)
    assert_same_tree(await savestream.load(tmp_path / "root", target), state)


@pytest.mark.parametrize("name", STATES)
async def test_without_a_target_every_array_is_there(name: str, tmp_path: Path) -> None:
    state = STATES[name](1)
    await savestream.save({"state": state}, tmp_path / "c")
    found = await savestream.load(tmp_path / "c")

    def arrays(tree: Any) -> list[Any]:
        if isinstance(tree, dict):
            return [array for child in tree.values() for array in arrays(child)]
        if isinstance(tree, list | tuple):
            return [array for child in tree for array in arrays(child)]
        return [tree] if isinstance(tree, np.ndarray) else []

    expected = [leaf for leaf in tree_util.tree_leaves(state) if isinstance(leaf, jax.Array | np.ndarray)]
    if name == "mixture":
        expected += tree_util.tree_leaves(state["unregistered"].weights)
    assert sorted(map(content, arrays(found))) == sorted(map(content, expected))


def content(array: Any) -> bytes:
    if isinstance(array, np.ndarray) and array.dtype.names:
        return bits(array["key_data"])
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return bits(jax.random.key_data(array) if is_key else array)


async def test_what_the_nodes_are_recorded_as(tmp_path: Path) -> None:
    state = {
        "mapping": FrozenDict({"b": {"w": jnp.ones(1)}, "a": 3}),
        "record": FlaxRecord(jnp.zeros(2), 5),
        "sequence": Positional(jnp.ones(3), "text", "note"),
        "variable": nnx.Param(jnp.ones(2)),
        "plain": [FrozenDict({"x": 1}), FlaxRecord(1, 2), Positional(1, 2, "note"), FrozenDict({}), Setting("a")],
        "mode": Mode.TEST,
    }
    await savestream.save(state, tmp_path / "c")
    found = await savestream.load(tmp_path / "c", options=LoadOptions(types=[Mode]))
    here = __name__
    assert type(found["mapping"]) is dict
    assert found["mapping"]["a"] == 3
    assert list(found["record"]) == ["weights", "inner"]
    assert (type(found["record"]), found["record"].type_name) == (RecordedDataclass, f"{here}:FlaxRecord")
    assert type(found["sequence"]) is tuple
    assert found["sequence"][1] == "text"
    assert found["variable"].type_name == "flax.nnx.variablelib:Param"
    assert list(found["variable"]) == ["value"]
    assert found["plain"][0] == {"x": 1}
    assert found["plain"][1] == {"weights": 1, "inner": 2}
    assert found["plain"][2:] == [(1, 2), {}, ()]
    assert found["mode"] is Mode.TEST
    manifest = await savestream.read_manifest(tmp_path / "c")
    assert {"mapping.b.w", "record.weights", "sequence[0]", "variable.value"} <= set(
        manifest.contents.state_dict_metadata
    )


async def test_static_data_is_the_targets(tmp_path: Path) -> None:
    state = FlaxRecord(jnp.ones(2), Registered(jnp.ones(1), 3, "saved"), len)
    await savestream.save(state, tmp_path / "c")
    target = FlaxRecord(jnp.zeros(2), Registered(jnp.zeros(1), 0, "own"), abs)
    found = await savestream.load(tmp_path / "c", target)
    assert (found.function, found.inner.name, found.inner.count) == (abs, "own", 3)
    assert type(found.inner) is Registered
    assert_same_leaf(found.weights, state.weights)
    assert not target.weights.any()  # what is immutable was made anew


async def test_a_dynamic_function_is_refused_by_name(tmp_path: Path) -> None:
    model = perceptron(0)
    with pytest.raises(UnsafeObjectError, match=r"model\.activation: "):
        await savestream.save({"model": model}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


async def test_classes_of_the_callers(tmp_path: Path) -> None:
    state = {"a": WithoutStatic(jnp.ones(2), jnp.zeros(1)), "b": FlaxRecord(jnp.ones(1), None)}
    await savestream.save(state, tmp_path / "c")
    found = await savestream.load(tmp_path / "c", options=LoadOptions(types=[WithoutStatic]), framework="jax")
    assert_same_tree(found["a"], state["a"])
    assert type(found["b"]) is RecordedDataclass
    with pytest.raises(PlanError, match="FlaxRecord, whose fields are not the recorded ones"):
        await savestream.load(tmp_path / "c", options=LoadOptions(types=[FlaxRecord]))


async def test_a_recorded_node_is_saved_again_as_what_it_was(tmp_path: Path) -> None:
    state = {"r": FlaxRecord(jnp.ones(2), {"x": 1}), "v": nnx.Param(jnp.zeros(1))}
    await savestream.save(state, tmp_path / "a")
    await savestream.save(await savestream.load(tmp_path / "a"), tmp_path / "b")
    target = {"r": FlaxRecord(jnp.zeros(2), {"x": 0}), "v": nnx.Param(jnp.ones(1))}
    assert_same_tree(await savestream.load(tmp_path / "b", target), state)


async def test_nodes_and_plain_containers_take_each_others_place(tmp_path: Path) -> None:
    plain = {"a": {"w": jnp.ones(2)}, "n": 1}
    await savestream.save(plain, tmp_path / "plain")
    frozen = FrozenDict({"a": {"w": jnp.zeros(2)}, "n": 0})
    found = await savestream.load(tmp_path / "plain", frozen)
    assert_same_tree(found, FrozenDict(plain))
    await savestream.save(found, tmp_path / "frozen")
    target = {"a": {"w": jnp.zeros(2)}, "n": 0}
    assert await savestream.load(tmp_path / "frozen", target) is target
    assert_same_tree(target, plain)


async def test_a_target_of_another_shape_is_listed(tmp_path: Path) -> None:
    await savestream.save({"m": FlaxRecord(jnp.ones(2), FrozenDict({"a": jnp.ones(1), "b": 2}))}, tmp_path / "c")
    target = {"m": FlaxRecord(jnp.ones(3), FrozenDict({"b": 0, "c": jnp.ones(1)}))}
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(tmp_path / "c", target)
    assert list(caught.value.missing) == ["m.inner.c"]
    assert list(caught.value.unexpected) == ["m.inner.a"]
    assert list(caught.value.shape_mismatches) == ["m.weights (checkpoint (2,), target (3,))"]
    fitting = {"m": FlaxRecord(jnp.zeros(2), FrozenDict({"b": 0, "c": jnp.zeros(1)}))}
    found = await savestream.load(tmp_path / "c", fitting, strict=False)
    expected = FlaxRecord(jnp.ones(2), FrozenDict({"b": 2, "c": jnp.zeros(1)}))
    assert_same_tree(found["m"], expected)


async def test_plain_nodes_of_another_length_are_listed(tmp_path: Path) -> None:
    def node(*values: Any) -> Keyed:
        return Keyed([(tree_util.SequenceKey(number), value) for number, value in enumerate(values)])

    await savestream.save({"n": node(1, 2, 3)}, tmp_path / "c")
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(tmp_path / "c", {"n": node(0, 0)})
    assert list(caught.value.unexpected) == ["n[2]"]
    found = await savestream.load(tmp_path / "c", {"n": node(0, 0, 0)})
    assert [value for _, value in found["n"].pairs] == [1, 2, 3]


async def test_another_sort_of_container_is_refused(tmp_path: Path) -> None:
    await savestream.save({"m": FlaxRecord(jnp.ones(2))}, tmp_path / "c")
    for other in (FrozenDict({"weights": jnp.ones(2)}), Positional(jnp.ones(2), None, "")):
        with pytest.raises(LoadMismatchError, match="m: the checkpoint has a dataclass, the target a"):
            await savestream.load(tmp_path / "c", {"m": other})


async def test_only_a_part_of_a_node(tmp_path: Path) -> None:
    state = FlaxRecord(jnp.ones(2), FrozenDict({"a": jnp.ones(1), "b": jnp.ones(3)}))
    await savestream.save({"m": state, "n": jnp.ones(1)}, tmp_path / "c")
    target = {"m": FlaxRecord(jnp.zeros(2), FrozenDict({"a": jnp.zeros(1), "b": jnp.zeros(3)})), "n": jnp.zeros(1)}
    found = await savestream.load(tmp_path / "c", target, keys=["m.inner.a"])
    assert_same_tree(found["m"], FlaxRecord(jnp.zeros(2), FrozenDict({"a": jnp.ones(1), "b": jnp.zeros(3)})))
    without = await savestream.load(tmp_path / "c", keys=["m.inner.a"])
    assert bits(without["m"]["inner"]["a"]) == bits(np.ones(1, np.float32))


async def test_numpy_arrays_in_nodes_are_filled_in_place(tmp_path: Path) -> None:
    await savestream.save({"m": FlaxRecord(np.ones(2), FrozenDict({"a": np.ones(1)}))}, tmp_path / "c")
    weights, inner = np.zeros(2), np.zeros(1)
    target = {"m": FlaxRecord(weights, FrozenDict({"a": inner}))}
    node = target["m"]
    found = await savestream.load(tmp_path / "c", target)
    assert found["m"] is node
    assert (weights == 1).all()
    assert (inner == 1).all()


# --- what cannot be named ---
# Parameters of tests are made of numpy arrays: an array of JAX's would start its threads while tests are collected, and
# JAX warns of every fork from then on.


def dict_keys(*keys: Any) -> list[tuple[Any, Any]]:
    return [(tree_util.DictKey(key), np.full(1, number)) for number, key in enumerate(keys)]


def names(*keys: str) -> list[tuple[Any, Any]]:
    return [(tree_util.GetAttrKey(key), np.full(1, number)) for number, key in enumerate(keys)]


@pytest.mark.parametrize("pairs", [dict_keys("a", "a"), dict_keys(1, True), names("w", "w"), names("w", "b", "w")])
@pytest.mark.parametrize("plain", [False, True])
async def test_keys_that_collide_are_refused_by_name(pairs: Any, plain: bool, tmp_path: Path) -> None:
    node = Keyed([(key, 1) for key, _ in pairs] if plain else pairs)
    with pytest.raises(PlanError, match=rf"a\.node: {__name__}\.Keyed has two children under the key"):
        await savestream.save({"a": {"node": node}}, tmp_path / "c")
    with pytest.raises(PlanError, match=r"the state: .*two children under the key"):
        await savestream.save(node, tmp_path / "c")
    assert not list(tmp_path.iterdir())


async def test_keys_that_have_no_text_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsafeObjectError, match=r"node: a dict key of class builtins\.object"):
        await savestream.save({"node": Keyed(dict_keys(object()))}, tmp_path / "c")
    with pytest.raises(PlanError, match=r"node: .*has a key that cannot be one of a dict"):
        await savestream.save({"node": Keyed(dict_keys([1]))}, tmp_path / "c")


async def test_typed_and_mixed_keys(tmp_path: Path) -> None:
    mixed = Keyed([*dict_keys("a"), *names("b")])
    state = {"typed": Keyed(dict_keys(1, "1", (2, "x"), None)), "mixed": mixed}
    await savestream.save(state, tmp_path / "c")
    found = await savestream.load(tmp_path / "c")
    assert list(found["typed"]) == [1, "1", (2, "x"), None]
    assert type(found["mixed"]) is tuple
    target = {"typed": Keyed(dict_keys(1, "1", (2, "x"), None)), "mixed": Keyed([*dict_keys("a"), *names("b")])}
    loaded = await savestream.load(tmp_path / "c", target)
    assert [bits(array) for _, array in loaded["typed"].pairs] == [bits(array) for _, array in state["typed"].pairs]


async def test_a_node_that_contains_itself_is_refused(tmp_path: Path) -> None:
    node = Positional(jnp.ones(1), None, "")
    node.second = node
    with pytest.raises(PlanError, match="contains itself"):
        await savestream.save({"node": node}, tmp_path / "c")
    plain = Positional(1, None, "")
    plain.second = [plain]
    with pytest.raises(PlanError, match="contains itself"):
        await savestream.save({"node": plain}, tmp_path / "c")


async def test_a_class_that_jax_cannot_look_into_is_named(tmp_path: Path) -> None:
    broken = Positional(jnp.ones(1), None, "")
    del broken.second
    with pytest.raises(PlanError, match=r"layers\[0\]\.node: JAX cannot look into .*Positional: .*second"):
        await savestream.save({"layers": [{"node": broken}]}, tmp_path / "c")


async def test_nodes_cannot_be_dict_keys(tmp_path: Path) -> None:
    with pytest.raises(UnsafeObjectError, match="cannot be stored safely"):
        await savestream.save({"d": {Setting("a"): 1}}, tmp_path / "c")


# --- plans ---


async def test_plans_are_reused_for_the_same_nodes_only(tmp_path: Path) -> None:
    cache = savestream.PlanCache(max_entries=20)
    states: list[Any] = [
        {"m": FlaxRecord(jnp.ones(2), FrozenDict({"a": jnp.ones(1)}))},
        {"m": FlaxRecord(jnp.zeros(2), FrozenDict({"a": jnp.zeros(1)}), len)},  # static data does not count
        {"m": FlaxRecord(jnp.ones(2), Keyed(dict_keys("a")))},
        {"m": FlaxRecord(jnp.ones(2), Keyed(names("a")))},
        {"m": Keyed(names("weights", "inner"))},
        {"m": Keyed([*names("x"), *dict_keys("y")])},
        {"m": [jnp.ones(1), jnp.ones(1)]},
        {"m": FlaxRecord(jnp.ones(2), FrozenDict({"b": jnp.ones(1)}))},
    ]
    cached = []
    for number, state in enumerate(states * 2):
        info = await savestream.save(state, tmp_path / f"{number}", plan_cache=cache)
        cached.append(info.statistics.plan_cached)
        found = await savestream.load(tmp_path / f"{number}", state)
        assert [bits(leaf) for leaf in tree_util.tree_leaves(found)] == [
            bits(leaf) for leaf in tree_util.tree_leaves(state)
        ]
    assert cached == [False, True] + [False] * 6 + [True] * 8


# --- without JAX ---


async def test_a_process_without_jax_reads_it_all(tmp_path: Path) -> None:
    state = {
        "net": nnx.state(network(0)),
        "record": FlaxRecord(jnp.arange(3), FrozenDict({"b": jnp.ones((2, 2), jnp.bfloat16), "n": 7})),
        "tuple": Positional(jax.random.key(3), None, "note"),
    }
    await savestream.save(state, tmp_path / "c")
    code = """
        import asyncio, sys
        import savestream
        found = asyncio.run(savestream.load(sys.argv[1]))
        loaded = asyncio.run(savestream.load(sys.argv[1], {"record": found["record"]}, keys=["record"]))
        assert "jax" not in sys.modules and "flax" not in sys.modules
        record, (key, nothing) = found["record"], found["tuple"]
        print(type(record).__name__, record.type_name.rpartition(":")[2], record["weights"].tolist())
        print(record["inner"]["b"].dtype, record["inner"]["b"].tolist(), record["inner"]["n"])
        print(key["key_data"].tolist(), nothing, found["net"]["layers"][1]["kernel"]["value"].tobytes().hex())
    """
    expected = [
        "RecordedDataclass FlaxRecord [0, 1, 2]",
        "bfloat16 [[1.0, 1.0], [1.0, 1.0]] 7",
        f"{jax.random.key_data(jax.random.key(3)).tolist()} None "
        + np.asarray(state["net"]["layers"][1]["kernel"][...]).tobytes().hex(),
    ]
    assert run_python(code, str(tmp_path / "c")).splitlines() == expected


def test_registered_dataclasses_are_as_ever_where_jax_is_not_imported(tmp_path: Path) -> None:
    code = """
        import asyncio, dataclasses, sys
        import numpy as np
        import savestream

        @dataclasses.dataclass
        class Record:
            weights: object
            note: str

        record = Record(np.ones(2), "kept")
        asyncio.run(savestream.save({"r": record}, sys.argv[1]))
        found = asyncio.run(savestream.load(sys.argv[1], options=savestream.LoadOptions(types=[Record])))
        assert "jax" not in sys.modules
        print(found["r"].note, found["r"].weights.tolist())
    """
    assert run_python(code, str(tmp_path / "c")) == "kept [1.0, 1.0]"
