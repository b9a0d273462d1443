"""The automatic choice, on simulated workers, cores and storage: no clock but the simulation's."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savestream.pipeline.compression_choice import CompressionChooser

BLOCK_BYTES = 16 * 1024 * 1024
GIGABYTE = 1e9


@dataclass
class Simulation:
    """Workers that each encode (perhaps) and then write one block after the other.

    ``bandwidth`` (bytes/s) is shared by the writes under way, ``write_seconds_per_byte`` is not; likewise encoders
    share the cores. An operation's speed is settled when it starts, by what is then under way.
    """

    bandwidth: float = 1e12
    latency_seconds_per_byte: float = 0.0
    codec_bytes_per_second: Callable[[int], float] = lambda block: 2e9
    ratio: Callable[[int], float] = lambda block: 0.8
    lanes: int = 3
    cores: int = 2
    blocks: int = 200
    now: float = 0.0
    choices: list[bool] = field(default_factory=list)
    encoding: int = 0
    writing: int = 0

    def chooser(self, mode: str = "auto") -> CompressionChooser:
        return CompressionChooser(mode, lanes=self.lanes, cores=self.cores, clock=lambda: self.now)

    def run(self, chooser: CompressionChooser) -> float:
        """Seconds until the last block is written."""
        events: list[tuple[float, int, str, int, float, float]] = []
        for lane in range(self.lanes):
            self._start(events, lane, chooser)
        while events:
            self.now, lane, kind, block, stored, seconds = heapq.heappop(events)
            if kind == "encode":
                self.encoding -= 1
                chooser.record_encode(BLOCK_BYTES, int(stored), seconds)
                self._write(events, lane, block, stored)
            else:
                self.writing -= 1
                chooser.record_write(int(stored), seconds)
                self._start(events, lane, chooser)
        return self.now

    def _start(self, events: list, lane: int, chooser: CompressionChooser) -> None:
        block = len(self.choices)
        if block == self.blocks:
            return
        self.choices.append(chooser.choose())
        if not self.choices[-1]:
            self._write(events, lane, block, BLOCK_BYTES)
            return
        self.encoding += 1
        seconds = BLOCK_BYTES / self.codec_bytes_per_second(block) * max(1.0, self.encoding / self.cores)
        heapq.heappush(events, (self.now + seconds, lane, "encode", block, BLOCK_BYTES * self.ratio(block), seconds))

    def _write(self, events: list, lane: int, block: int, stored: float) -> None:
        self.writing += 1
        seconds = stored * (self.writing / self.bandwidth + self.latency_seconds_per_byte)
        heapq.heappush(events, (self.now + seconds, lane, "write", block, stored, seconds))

    @property
    def compressed_share(self) -> float:
        return sum(self.choices) / len(self.choices)


def test_none_and_zstd_do_as_told() -> None:
    never, always = (CompressionChooser(mode, lanes=3) for mode in ("none", "zstd"))
    for chooser in (never, always):
        chooser.record_encode(BLOCK_BYTES, BLOCK_BYTES, 100.0)
        chooser.record_write(BLOCK_BYTES, 100.0)
    assert not any(never.choose() for _ in range(10))
    assert all(always.choose() for _ in range(10))
    assert (never.explain(), always.explain()) == ("none, as asked for", "zstd, as asked for")


def test_fast_disk_stays_raw() -> None:
    simulation = Simulation(bandwidth=2e9)
    chooser = simulation.chooser()
    seconds = simulation.run(chooser)
    assert simulation.compressed_share < 0.05
    assert seconds < 1.04 * Simulation(bandwidth=2e9).run(simulation.chooser("none"))
    assert chooser.explain().startswith("auto: raw, as a GB takes a worker 1.5")
    assert "to 80.0%; 3 workers on 2 cores" in chooser.explain()


@pytest.mark.parametrize(
    "storage", [{"bandwidth": 0.2e9}, {"latency_seconds_per_byte": 20 / GIGABYTE}], ids=["bandwidth", "latency"]
)
def test_slow_storage_compresses_from_the_first_measurements_on(storage: dict[str, float]) -> None:
    simulation = Simulation(**storage)
    chooser = simulation.chooser()
    seconds = simulation.run(chooser)
    assert simulation.compressed_share > 0.95
    assert all(simulation.choices[10:])
    assert seconds < 1.03 * Simulation(**storage).run(simulation.chooser("zstd"))
    assert chooser.explain().startswith("auto: zstd, as ")


def test_incompressible_data_stays_raw_however_slow_the_storage() -> None:
    simulation = Simulation(bandwidth=0.05e9, ratio=lambda block: 1.0)
    chooser = simulation.chooser()
    simulation.run(chooser)
    assert simulation.compressed_share < 0.05
    assert chooser.explain().startswith("auto: raw, as ")


def test_codec_that_collapses_in_mid_save_is_dropped_within_a_few_blocks() -> None:
    def busy_from_block_100(block: int) -> float:
        return 2e9 if block < 100 else 0.05e9

    simulation = Simulation(bandwidth=0.5e9, codec_bytes_per_second=busy_from_block_100)
    chooser = simulation.chooser()
    simulation.run(chooser)
    assert sum(simulation.choices[10:100]) == 90
    assert sum(simulation.choices[100:]) <= 8
    assert chooser.explain().startswith("auto: raw, as ")


def test_codec_that_recovers_is_taken_up_again() -> None:
    def busy_between(block: int) -> float:
        return 0.05e9 if 100 <= block < 200 else 2e9

    simulation = Simulation(bandwidth=0.3e9, codec_bytes_per_second=busy_between, blocks=1000)
    simulation.run(simulation.chooser())
    assert sum(simulation.choices[110:200]) <= 5
    assert all(simulation.choices[-100:])


def test_storage_that_speeds_up_ends_compression() -> None:
    simulation = Simulation(bandwidth=0.3e9, blocks=1000)
    chooser = simulation.chooser()
    original = simulation._write

    def write(events: list, lane: int, block: int, stored: float) -> None:
        simulation.bandwidth = 0.3e9 if block < 300 else 8e9
        original(events, lane, block, stored)

    simulation._write = write
    simulation.run(chooser)
    assert all(simulation.choices[10:290])
    assert sum(simulation.choices[-200:]) < 10


def test_one_slow_write_changes_nothing() -> None:
    simulation = Simulation(bandwidth=0.5e9)
    chooser = simulation.chooser()
    original = simulation._write

    def write(events: list, lane: int, block: int, stored: float) -> None:
        simulation.latency_seconds_per_byte = 60 / GIGABYTE if block == 100 else 0.0
        original(events, lane, block, stored)

    simulation._write = write
    simulation.run(chooser)
    assert all(simulation.choices[10:])


def test_few_blocks_stay_raw_and_the_explanation_says_why() -> None:
    chooser = CompressionChooser("auto", lanes=3, cores=2, clock=lambda: 0.0)
    assert [chooser.choose() for _ in range(8)] == [False, True, False, True, False, False, False, False]
    assert chooser.explain() == (
        "auto: raw, as too few blocks were measured to choose (2 of 8 blocks compressed, 0 switches)"
    )


def test_empty_blocks_and_writes_are_no_measurements() -> None:
    chooser = CompressionChooser("auto", lanes=1, cores=1, clock=lambda: 0.0)
    chooser.record_encode(0, 0, 0.0)
    chooser.record_write(0, 1.0)
    assert "too few blocks" in chooser.explain()


@settings(max_examples=150, deadline=None)
@given(
    bandwidth=st.floats(0.02e9, 10e9),
    latency=st.floats(0, 20 / GIGABYTE),
    codec=st.floats(0.05e9, 5e9),
    ratio=st.floats(0.01, 1.0),
    lanes=st.integers(1, 8),
    cores=st.integers(1, 8),
)
def test_auto_is_hardly_slower_than_raw(
    bandwidth: float, latency: float, codec: float, ratio: float, lanes: int, cores: int
) -> None:
    def simulate(mode: str) -> float:
        simulation = Simulation(
            bandwidth=bandwidth,
            latency_seconds_per_byte=latency,
            codec_bytes_per_second=lambda block: codec,
            ratio=lambda block: ratio,
            lanes=lanes,
            cores=cores,
            blocks=400,
        )
        return simulation.run(simulation.chooser(mode))

    # The two probes that every save starts with are charged apart: on a fast disk a slow codec makes them felt.
    probes_seconds = 2 * BLOCK_BYTES / codec * max(1.0, 2 / cores)
    assert simulate("auto") <= 1.06 * simulate("none") + probes_seconds


def test_many_threads_lose_no_block() -> None:
    chooser = CompressionChooser("auto", lanes=4, cores=4)
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        for _ in range(500):
            if chooser.choose():
                chooser.record_encode(1000, 500, 1e-6)
            chooser.record_write(1000, 1e-4)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "of 2000 blocks compressed" in chooser.explain()
