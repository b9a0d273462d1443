"""Interleaved rounds, and what is concluded from them."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

__all__ = ["Goal", "Ratio", "Samples", "Turn", "judge", "judge_ratio", "paired_ratio", "run_rounds"]

Samples = dict[str, list[float]]

_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one system does in a round; returns its samples by name."""

    name: str
    run: Callable[[], Mapping[str, float]]


def run_rounds(turns: Sequence[Turn], rounds: int, *, warm_up: Sequence[Turn]) -> Samples:
    """Run every turn once a round, each round starting with another one, so that drift meets all alike.

    ``warm_up`` runs once before, unrecorded: what happens only the first time in a process is nobody's figure.
    """
    for turn in warm_up:
        _say(f"warming up: {turn.name}")
        turn.run()
    samples: Samples = {}
    for number in range(rounds):
        first = number % len(turns)
        for turn in [*turns[first:], *turns[:first]]:
            started = time.perf_counter()
            for name, value in turn.run().items():
                samples.setdefault(name, []).append(value)
            _say(f"round {number + 1} of {rounds}: {turn.name} ({time.perf_counter() - started:.1f} s)")
    return samples


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of a quotient taken within each round, with a 95% bootstrap interval of that median."""

    label: str
    numerator: str
    denominator: str
    value: float
    low: float
    high: float


def paired_ratio(samples: Samples, numerator: str, denominator: str, label: str = "") -> Ratio | None:
    """None where one of the two was not measured."""
    if numerator not in samples or denominator not in samples:
        return None
    quotients = np.asarray(samples[numerator]) / np.asarray(samples[denominator])
    drawn = np.random.default_rng(0).choice(quotients, (_RESAMPLES, quotients.size))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Ratio(
        label=label or f"{numerator} / {denominator}",
        numerator=numerator,
        denominator=denominator,
        value=statistics.median(quotients.tolist()),
        low=float(low),
        high=float(high),
    )


@dataclasses.dataclass(frozen=True)
class Goal:
    """A promise and whether this run kept it. ``clear`` says that the whole interval lies on the same side."""

    text: str
    value: float
    low: float
    high: float
    limit: float
    unit: str
    holds: bool
    clear: bool


def judge(
    text: str,
    value: float,
    low: float,
    high: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "x",
) -> Goal:
    """Compare a value and its interval with one limit."""
    if at_least is not None:
        limit, holds, ends = at_least, value >= at_least, {low >= at_least, high >= at_least}
    elif at_most is not None:
        limit, holds, ends = at_most, value <= at_most, {low <= at_most, high <= at_most}
    else:
        raise ValueError("a goal needs a limit")
    return Goal(text, value, low, high, limit, unit, holds, len(ends) == 1)


def judge_ratio(text: str, ratio: Ratio, *, at_least: float | None = None, at_most: float | None = None) -> Goal:
    """Compare a ratio with one limit."""
    return judge(text, ratio.value, ratio.low, ratio.high, at_least=at_least, at_most=at_most)
