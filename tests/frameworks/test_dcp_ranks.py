"""Several ranks save and load through torch.distributed.checkpoint, and beside it through torch's own storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dcp_ranks import SCENARIOS, WORLD_SIZES

SCRIPT = Path(__file__).parent / "dcp_ranks.py"

Outcomes = list[dict[str, str | None]]


def play(directory: Path, chosen: str) -> Outcomes:
    """What became of each scenario of a set, by rank. One start of the ranks plays them all."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(SCRIPT), str(directory), chosen]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    text = (directory / "output").read_text(errors="replace")[-4000:]
    print(f"exit status of the ranks: {status}\n{text}")
    return [_read(directory / f"rank-{rank}.json") for rank in range(WORLD_SIZES[chosen])]


def _read(path: Path) -> dict[str, str | None]:
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return play(tmp_path_factory.mktemp("ranks"), "all")


def check(outcomes: Outcomes, name: str) -> None:
    problems = [
        f"rank {rank}: {found.get(name, 'it did not get that far')}"
        for rank, found in enumerate(outcomes)
        if found.get(name, "") is not None
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", SCENARIOS["all"])
def test_scenario(outcomes: Outcomes, name: str) -> None:
    check(outcomes, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS["slow"])
def test_slow_scenario(tmp_path: Path, name: str) -> None:
    check(play(tmp_path, "slow"), name)
