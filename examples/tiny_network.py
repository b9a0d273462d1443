"""A small real network in plain numpy: a three-layer perceptron that learns to read drawn digits, trained with Adam.

Everything that training depends on is in the state, so that the same state always goes on in the same way, bit for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IMAGE_PIXELS", "State", "accuracy", "draw_digits", "initial_state", "train_step"]

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
State = dict[str, Any]

IMAGE_SIDE = 28
IMAGE_PIXELS = IMAGE_SIDE * IMAGE_SIDE
BATCH_IMAGES = 64
LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-8

# The digits 0 to 9, five rows of three pixels each.
GLYPHS = np.array(
    [
        [int(pixel) for pixel in glyph]
        for glyph in (
            "111101101101111",
            "010110010010111",
            "111001111100111",
            "111001111001111",
            "101101111001001",
            "111100111001111",
            "111100111101111",
            "111001010010010",
            "111101111101111",
            "111101111001111",
        )
    ],
    np.float32,
).reshape(10, 5, 3)


def draw_digits(rng: np.random.Generator, count: int) -> tuple[Floats, Labels]:
    """Draw ``count`` digits at random places, of random brightness, under noise.

    Returns
    -------
    images : float32 array of shape (count, 784)
    labels : int64 array of shape (count,)
    """
    labels = rng.integers(0, 10, count)
    images = rng.standard_normal((count, IMAGE_SIDE, IMAGE_SIDE), np.float32) * np.float32(0.3)
    large = GLYPHS.repeat(4, axis=1).repeat(4, axis=2)  # 20 by 12 pixels
    tops = rng.integers(2, 7, count)
    lefts = rng.integers(5, 12, count)
    strengths = rng.uniform(0.6, 1.2, count).astype(np.float32)
    for image, label, top, left, strength in zip(images, labels, tops, lefts, strengths, strict=True):
        image[top : top + 20, left : left + 12] += strength * large[label]
    return images.reshape(count, IMAGE_PIXELS), labels


def initial_state(seed: int, hidden_units: int) -> State:
    """The state of a training run before its first step: network, optimiser, random numbers, history."""
    rng = np.random.default_rng(seed)
    sizes = [IMAGE_PIXELS, hidden_units, hidden_units, 10]
    model: dict[str, Floats] = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        scale = np.float32(np.sqrt(2.0 / inputs))
        model[f"layer{layer}.weight"] = rng.standard_normal((inputs, outputs), np.float32) * scale
        model[f"layer{layer}.bias"] = np.zeros(outputs, np.float32)
    return {
        "model": model,
        "adam": {
            "m": {name: np.zeros_like(array) for name, array in model.items()},
            "v": {name: np.zeros_like(array) for name, array in model.items()},
            "t": 0,
        },
        "step": 0,
        "rng": rng.bit_generator.state,
        "loss_history": [],
    }


def train_step(state: State) -> float:
    """Draw a batch, take one Adam step in place and return the batch's loss."""
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    images, labels = draw_digits(rng, BATCH_IMAGES)
    loss, gradients = _loss_and_gradients(state["model"], images, labels)
    _adam(state["model"], state["adam"], gradients)
    state["rng"] = rng.bit_generator.state
    state["step"] += 1
    state["loss_history"].append(loss)
    return loss


def accuracy(state: State, count: int = 500) -> float:
    """The share of digits, drawn from a seed that training never uses, that the network reads correctly."""
    images, labels = draw_digits(np.random.default_rng(987_654_321), count)
    scores = _forward(state["model"], images)[-1]
    return float(np.mean(scores.argmax(axis=1) == labels))


def _forward(model: dict[str, Floats], images: Floats) -> list[Floats]:
    """The input, the activations of both hidden layers and the scores."""
    activations = [images]
    for layer in range(3):
        output = activations[-1] @ model[f"layer{layer}.weight"] + model[f"layer{layer}.bias"]
        activations.append(np.maximum(output, 0) if layer < 2 else output)
    return activations


def _loss_and_gradients(model: dict[str, Floats], images: Floats, labels: Labels) -> tuple[float, dict[str, Floats]]:
    activations = _forward(model, images)
    scores = activations[-1] - activations[-1].max(axis=1, keepdims=True)
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(probabilities[rows, labels] + np.float32(1e-12)).mean())

    probabilities[rows, labels] -= 1
    flow: Floats = probabilities / np.float32(len(labels))
    gradients: dict[str, Floats] = {}
    for layer in (2, 1, 0):
        gradients[f"layer{layer}.weight"] = activations[layer].T @ flow
        gradients[f"layer{layer}.bias"] = flow.sum(axis=0)
        if layer:
            flow = (flow @ model[f"layer{layer}.weight"].T) * (activations[layer] > 0)
    return loss, gradients


def _adam(model: dict[str, Floats], adam: dict[str, Any], gradients: dict[str, Floats]) -> None:
    adam["t"] += 1
    step_size = np.float32(LEARNING_RATE * np.sqrt(1 - BETA_2 ** adam["t"]) / (1 - BETA_1 ** adam["t"]))
    for name, gradient in gradients.items():
        first, second = adam["m"][name], adam["v"][name]
        first *= np.float32(BETA_1)
        first += np.float32(1 - BETA_1) * gradient
        second *= np.float32(BETA_2)
        second += np.float32(1 - BETA_2) * np.square(gradient)
        model[name] -= step_size * first / (np.sqrt(second) + np.float32(EPSILON))
