"""Whether compressing makes this save faster, decided from what the save itself measures.

The model. Each of L lanes (workers) encodes a block and then writes it; lanes overlap, and share C cores. A raw byte
costs a lane

- raw: ``W`` seconds, the time of writing a byte while every lane writes;
- compressed: ``max(e + r * w, e * L / C)`` seconds, with ``e`` the codec's time, ``r`` stored bytes for a raw byte, and
  ``w`` the time of writing a byte while lanes also encode. The second term is L encoders queueing for C cores.

``w`` lies below ``W`` where lanes contend for bandwidth, and equals it where the storage is slow to answer; which of
the two cannot be known beforehand. So compression starts only where it wins with ``w = W``, and stays while what it
then measures still wins. In between, rare probes renew what ages: a compressed block among raw ones renews ``e`` and
``r``; a round of raw blocks among compressed ones renews ``W``, unless compressing wins even with ``W = w``.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from savestream.pipeline.options import Compression

__all__ = ["CompressionChooser"]

_State: TypeAlias = Literal["probing", "raw", "compressing"]

# Weight of the newest measurement. Blocks are large, so the codec's collapse (tenfold, beside a busy Python thread)
# must show at once; single writes vary several times over.
_ENCODE_WEIGHT = 0.5
_WRITE_WEIGHT = 0.25

# The first encode of a save runs on cold memory, so the better of two counts.
_FIRST_ENCODES = 2

# Compression must promise this share of raw cost to start. Between this and 1 nothing changes.
_STARTING_SHARE = 0.95

# Stored bytes for a raw byte above which there is nothing to win: the encoder's own bound.
_WORTHLESS_RATIO = 0.97

# Probes are this many times their own cost apart.
_PROBE_SPACING = 25


class _Average:
    """Exponentially weighted average; None before the first measurement."""

    def __init__(self, weight: float, value: float | None = None) -> None:
        self._weight = weight
        self.value = value

    def add(self, measured: float) -> None:
        old = measured if self.value is None else self.value
        self.value = old + self._weight * (measured - old)


class CompressionChooser:
    """Decides for every block of one save whether to compress it. Thread-safe; no method blocks.

    Parameters
    ----------
    mode
        ``"none"``: never. ``"zstd"``: always. ``"auto"``: where it does not slow the save.
    lanes
        Workers that encode and write at once.
    cores
        Processor cores that they share; by default those that this process may use.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        mode: Compression,
        *,
        lanes: int,
        cores: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mode = mode
        self._lanes = lanes
        self._cores = _usable_cores() if cores is None else cores
        self._clock = clock
        self._lock = threading.Lock()
        self._state: _State = "probing"
        self._encode_seconds = _Average(_ENCODE_WEIGHT)  # e
        self._ratio = _Average(_ENCODE_WEIGHT)  # r
        self._raw_write_seconds = _Average(_WRITE_WEIGHT)  # W
        self._mixed_write_seconds = _Average(_WRITE_WEIGHT)  # w
        self._block_bytes = _Average(_ENCODE_WEIGHT)
        self._encodes = 0
        self._probed_at = 0.0
        self._raw_round: list[float] | None = None  # seconds per byte of the writes since it began; None outside one
        self._blocks = 0
        self._compressed_blocks = 0
        self._switches = 0

    def choose(self) -> bool:
        """Whether the next block shall be compressed."""
        with self._lock:
            compress = self._mode == "zstd" or (self._mode == "auto" and self._choose_automatically())
            self._blocks += 1
            self._compressed_blocks += compress
            return compress

    def record_encode(self, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        """A block that was to be compressed has been encoded, whatever became of its frames."""
        if raw_bytes <= 0:
            return
        with self._lock:
            self._encodes += 1
            measured = seconds / raw_bytes
            if self._encodes <= _FIRST_ENCODES:
                known = self._encode_seconds.value
                self._encode_seconds.value = measured if known is None else min(known, measured)
            else:
                self._encode_seconds.add(measured)
            self._ratio.add(stored_bytes / raw_bytes)
            self._block_bytes.add(raw_bytes)
            self._decide()

    def record_write(self, stored_bytes: int, seconds: float) -> None:
        """A worker has written bytes of raw or compressed blocks, and waited ``seconds`` for it."""
        if stored_bytes <= 0:
            return
        with self._lock:
            self._add_write(seconds / stored_bytes)
            self._decide()

    def explain(self) -> str:
        """The choice so far and its reason, with the figures measured."""
        with self._lock:
            if self._mode != "auto":
                return "zstd, as asked for" if self._mode == "zstd" else "none, as asked for"
            counts = f"{self._compressed_blocks} of {self._blocks} blocks compressed, {self._switches} switches"
            encode, ratio, raw, compressed = self._costs()
            if self._state == "probing" or not encode:
                return f"auto: raw, as too few blocks were measured to choose ({counts})"
            choice = "zstd" if self._state == "compressing" else "raw"
            return (
                f"auto: {choice}, as a GB takes a worker {raw * 1e9:.3g} s raw "
                f"and {compressed * 1e9:.3g} s compressed (codec {1e-9 / encode:.3g} GB/s to {ratio:.1%}; "
                f"{self._lanes} workers on {self._cores} cores; {counts})"
            )

    def _choose_automatically(self) -> bool:
        if self._state == "probing":
            # Raw and compressed in turn. Until the probes report, the rest goes out raw: that costs no processor time.
            return self._blocks % 2 == 1 and self._compressed_blocks < _FIRST_ENCODES
        if self._raw_round is not None:
            return False
        if self._state == "raw":
            return self._probe_is_due()
        if not self._probe_is_due() or self._wins_even_if_raw_writes_are_as_fast():
            return True
        self._raw_round = []
        return False

    def _add_write(self, seconds_per_byte: float) -> None:
        if self._state != "compressing":
            self._raw_write_seconds.add(seconds_per_byte)
            return
        if self._raw_round is None:
            self._mixed_write_seconds.add(seconds_per_byte)
            return
        # The writes before the round drain first; a whole set of raw ones then replaces W, which may be long outdated.
        self._raw_round.append(seconds_per_byte)
        if len(self._raw_round) == 2 * self._lanes:
            self._raw_write_seconds.value = statistics.median(self._raw_round[self._lanes :])
            self._raw_round = None
            self._probed_at = self._clock()

    def _costs(self) -> tuple[float, float, float, float]:
        """``e``, ``r``, and what a raw byte costs a worker raw and compressed; all 0 while anything is unmeasured."""
        encode, ratio, raw = self._encode_seconds.value, self._ratio.value, self._raw_write_seconds.value
        if encode is None or ratio is None or raw is None:
            return 0.0, 0.0, 0.0, 0.0
        mixed = self._mixed_write_seconds.value
        if self._state != "compressing" or mixed is None:
            return encode, ratio, raw, self._compressed_cost(encode, ratio, raw)
        # Writing with every lane cannot be faster than writing with some: storage has slowed since W was measured.
        return encode, ratio, max(raw, mixed), self._compressed_cost(encode, ratio, mixed)

    def _compressed_cost(self, encode: float, ratio: float, write: float) -> float:
        return max(encode + ratio * write, encode * self._lanes / self._cores)

    def _wins_even_if_raw_writes_are_as_fast(self) -> bool:
        compressed, mixed = self._costs()[3], self._mixed_write_seconds.value
        return mixed is not None and compressed < _STARTING_SHARE * mixed

    def _decide(self) -> None:
        _, ratio, raw, compressed = self._costs()
        if self._encodes < _FIRST_ENCODES or not raw:
            return
        worthwhile = ratio < _WORTHLESS_RATIO
        if self._state == "compressing":
            if not worthwhile or compressed > raw:
                self._switch_to("raw")
        elif worthwhile and compressed < _STARTING_SHARE * raw:
            self._switch_to("compressing")
        elif self._state == "probing":
            self._switch_to("raw")

    def _switch_to(self, state: _State) -> None:
        self._switches += self._state != "probing"
        self._state = state
        self._raw_round = None
        self._mixed_write_seconds = _Average(_WRITE_WEIGHT, self._raw_write_seconds.value)
        self._probed_at = self._clock()

    def _probe_is_due(self) -> bool:
        """Keep probes a small share of the save's time, however bad they turn out."""
        _, _, _, compressed = self._costs()
        # A raw round takes each worker about three blocks: its next two, and what was under way.
        probe_seconds = compressed if self._state == "raw" else 3 * (self._mixed_write_seconds.value or 0.0)
        now = self._clock()
        if now < self._probed_at + _PROBE_SPACING * probe_seconds * (self._block_bytes.value or 0.0):
            return False
        self._probed_at = now
        return True


def _usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
