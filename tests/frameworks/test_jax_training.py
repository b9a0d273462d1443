"""Training with flax, optax and nnx: a resumed run is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax_support import assert_same_tree, mesh, run_python
from jax_support import sharding as named_sharding

import savestream
from savestream import LoadMismatchError, LoadOptions, PlanError, RecordedDataclass

STEPS = 7


class Perceptron(linen.Module):
    width: int = 8

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return linen.Dense(1)(linen.tanh(linen.Dense(self.width)(inputs)))


def decays(params: Any) -> Any:
    """Weight decay for matrices only."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@functools.cache
def optimizer() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(schedule, mask=decays),
        optax.masked(optax.trace(0.9), decays),
    )
    return optax.MultiSteps(chain, every_k_schedule=2)


MODEL = Perceptron()
APPLY = MODEL.apply  # one object: what is static in a state decides whether a step is compiled again


def new_state(seed: int) -> TrainState:
    params = MODEL.init(jax.random.key(seed), jnp.ones((1, 4)))
    return TrainState.create(apply_fn=APPLY, params=params, tx=optimizer())


@jax.jit
def train(state: TrainState, seed: jax.Array) -> TrainState:
    inputs = jax.random.normal(jax.random.key(seed), (16, 4))

    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, inputs) - inputs.sum(1, keepdims=True)) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def run(state: TrainState, first: int, last: int) -> TrainState:
    for step in range(first, last):
        state = train(state, jnp.uint32(step))
    return state


async def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = run(new_state(0), 0, STEPS)
    for stop in (1, 2, 5):  # in the middle of accumulating gradients, and between
        await savestream.save(run(new_state(0), 0, stop), tmp_path / f"{stop}")
        target = new_state(1)
        resumed = await savestream.load(tmp_path / f"{stop}", target)
        assert (type(resumed), resumed.tx, resumed.apply_fn) == (TrainState, target.tx, target.apply_fn)
        assert_same_tree(run(resumed, stop, STEPS), uninterrupted)


async def test_a_state_described_by_its_shapes_is_a_target(tmp_path: Path) -> None:
    saved = run(new_state(0), 0, 3)
    await savestream.save({"train": saved}, tmp_path / "c")
    described = jax.eval_shape(functools.partial(new_state, 0))
    found = await savestream.load(tmp_path / "c", {"train": described})
    assert_same_tree(found["train"], saved)


async def test_a_state_moves_onto_a_mesh_and_off_it(tmp_path: Path) -> None:
    saved = run(new_state(0), 0, 3)
    await savestream.save(saved, tmp_path / "one")

    def place(leaf: jax.Array) -> jax.Array:
        rows = leaf.ndim == 2 and leaf.shape[0] % 4 == 0
        spec = jax.sharding.PartitionSpec("a") if rows else jax.sharding.PartitionSpec()
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh(4, 2), spec))

    on_mesh = jax.tree.map(place, run(new_state(1), 0, 1))
    spread = await savestream.load(tmp_path / "one", on_mesh)
    assert_same_tree(spread, jax.tree.map(place, saved))
    await savestream.save(spread, tmp_path / "mesh")
    assert_same_tree(await savestream.load(tmp_path / "mesh", run(new_state(2), 0, 1)), saved)


async def test_training_goes_on_while_the_state_is_written(tmp_path: Path) -> None:
    step = jax.jit(train.__wrapped__, donate_argnums=0)
    state, expected = step(new_state(0), jnp.uint32(0)), []
    for number in range(1, 6):
        handle = await savestream.start_save(state, tmp_path / f"{number}")
        expected.append(jax.tree.map(np.array, state.params))
        await handle.staged()
        state = step(state, jnp.uint32(number))  # donates what was saved
        await handle
    for number, params in enumerate(expected, 1):
        found = await savestream.load(tmp_path / f"{number}")
        assert_same_tree(found.params, params)


async def test_without_a_target_and_with_classes(tmp_path: Path) -> None:
    saved = run(new_state(0), 0, 2)
    await savestream.save(saved, tmp_path / "c")
    found = await savestream.load(tmp_path / "c")
    assert (type(found), list(found)) == (RecordedDataclass, ["step", "params", "opt_state"])
    assert_same_tree(found.params, jax.tree.map(np.array, saved.params))
    kinds = [type(saved.opt_state), optax.EmptyState, optax.MaskedNode, optax.MaskedState, optax.TraceState]
    known = await savestream.load(tmp_path / "c", options=LoadOptions(types=kinds), framework="jax")
    assert type(known.opt_state) is type(saved.opt_state)
    assert known.opt_state.inner_opt_state[0] == optax.EmptyState()
    assert_same_tree(known.opt_state.inner_opt_state[2], saved.opt_state.inner_opt_state[2])
    with pytest.raises(PlanError, match="TrainState, whose fields are not the recorded ones"):
        await savestream.load(tmp_path / "c", options=LoadOptions(types=[TrainState]))


async def test_only_the_parameters(tmp_path: Path) -> None:
    saved = run(new_state(0), 0, 2)
    await savestream.save(saved, tmp_path / "c")
    target = new_state(1)
    found = await savestream.load(tmp_path / "c", target, keys=["params"])
    assert_same_tree(found.params, saved.params)
    assert_same_tree(found.opt_state, target.opt_state)


async def test_strictness(tmp_path: Path) -> None:
    await savestream.save(new_state(0), tmp_path / "c")
    model = Perceptron(width=9)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    wider = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())
    with pytest.raises(LoadMismatchError) as caught:
        await savestream.load(tmp_path / "c", wider)
    assert any(text.startswith("params.params.Dense_0.kernel (") for text in caught.value.shape_mismatches)
    plain = TrainState.create(apply_fn=len, params=new_state(0).params, tx=optax.sgd(0.1))
    with pytest.raises(LoadMismatchError, match="opt_state"):
        await savestream.load(tmp_path / "c", plain)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new_state(0).params)
    with pytest.raises(LoadMismatchError, match=r"Dense_0\.kernel \(checkpoint float32, target bfloat16\)"):
        await savestream.load(tmp_path / "c", new_state(0).replace(params=half))


async def test_numbers_of_a_new_state_and_arrays_of_a_trained_one(tmp_path: Path) -> None:
    new, trained = new_state(0), run(new_state(1), 0, 3)
    assert (type(new.step), trained.step.weak_type) == (int, True)
    await savestream.save(new, tmp_path / "new")
    await savestream.save(trained, tmp_path / "trained")
    again = await savestream.load(tmp_path / "trained", new_state(2))
    assert (type(again.step), again.step) == (int, 3)
    assert_same_tree(run(again, 3, 4), run(trained, 3, 4))
    back = await savestream.load(tmp_path / "new", jax.tree.map(lambda leaf: leaf, trained))
    assert (back.step.weak_type, back.step.dtype, int(back.step)) == (True, jnp.int32, 0)
    assert_same_tree(run(back, 0, 2), run(new_state(0), 0, 2))


async def test_plans_are_reused_while_training(tmp_path: Path) -> None:
    cache = savestream.PlanCache()
    state, cached = new_state(0), []
    for number in range(3):
        state = run(state, number, number + 1)
        info = await savestream.save(state, tmp_path / f"{number}", plan_cache=cache)
        cached.append(info.statistics.plan_cached)
    assert cached == [False, True, True]


# --- nnx ---


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(inputs)))))


@nnx.jit
def train_network(model: Network, optimizer: nnx.Optimizer, inputs: jax.Array) -> jax.Array:
    def loss(network: Network) -> jax.Array:
        return jnp.mean((network(inputs) - inputs.sum(1, keepdims=True)) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def new_network(seed: int) -> tuple[Network, nnx.Optimizer]:
    model = Network(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def batch(step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + step), (16, 4))


async def test_a_resumed_network_draws_the_same_random_numbers(tmp_path: Path) -> None:
    model, optimizer = new_network(0)
    for step in range(3):
        train_network(model, optimizer, batch(step))
    await savestream.save({"model": nnx.state(model), "optimizer": nnx.state(optimizer)}, tmp_path / "c")
    expected = [float(train_network(model, optimizer, batch(step))) for step in range(3, 6)]

    resumed, resumed_optimizer = new_network(1)
    target = {"model": nnx.state(resumed), "optimizer": nnx.state(resumed_optimizer)}
    found = await savestream.load(tmp_path / "c", target)
    nnx.update(resumed, found["model"])
    nnx.update(resumed_optimizer, found["optimizer"])
    assert [float(train_network(resumed, resumed_optimizer, batch(step))) for step in range(3, 6)] == expected
    assert_same_tree(nnx.state(resumed), nnx.state(model))


async def test_a_split_network_is_merged_from_what_was_loaded(tmp_path: Path) -> None:
    model, _ = new_network(0)
    definition, params, others = nnx.split(model, nnx.Param, ...)
    await savestream.save({"params": params, "others": others}, tmp_path / "c")
    described = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    definition, params_target, others_target = nnx.split(described, nnx.Param, ...)
    found = await savestream.load(tmp_path / "c", {"params": params_target, "others": others_target})
    merged = nnx.merge(definition, found["params"], found["others"])
    merged.eval()
    model.eval()
    assert np.array_equal(merged(batch(0)), model(batch(0)))
    assert_same_tree(nnx.state(merged), nnx.state(model))


async def test_sharded_variables_stay_sharded(tmp_path: Path) -> None:
    model, _ = new_network(0)
    model.first.kernel[...] = jax.device_put(model.first.kernel[...], named_sharding("blocks"))
    state = nnx.state(model, nnx.Param)
    await savestream.save(state, tmp_path / "c")
    other = nnx.state(new_network(1)[0], nnx.Param)
    other["first"]["kernel"][...] = jax.device_put(other["first"]["kernel"][...], named_sharding("blocks"))
    assert_same_tree(await savestream.load(tmp_path / "c", other), state)


async def test_the_parameters_are_read_without_jax(tmp_path: Path) -> None:
    saved = run(new_state(0), 0, 2)
    await savestream.save(saved, tmp_path / "c")
    code = """
        import asyncio, sys
        import savestream
        found = asyncio.run(savestream.load(sys.argv[1], keys=["params"]))
        assert not {"jax", "flax", "optax"} & set(sys.modules)
        dense = found["params"]["params"]["Dense_0"]
        print(dense["kernel"].dtype, dense["kernel"].shape, dense["kernel"].tobytes().hex(), sorted(found))
    """
    kernel = np.array(saved.params["params"]["Dense_0"]["kernel"])
    expected = f"{kernel.dtype} {kernel.shape} {kernel.tobytes().hex()} ['params']"
    assert run_python(code, str(tmp_path / "c")) == expected
