"""Several ranks save and load through torch.distributed.checkpoint, and beside it through torch's own storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dcp_ranks import SCENARIOS, WORLD_SIZE

SCRIPT = Path(__file__).parent / "dcp_ranks.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What became of each scenario, by rank. One start of the ranks plays them all."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), str(directory)]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = None
    found = [_read(directory / f"rank-{rank}.json") for rank in range(WORLD_SIZE)]
    text = (directory / "output").read_text(errors="replace")[-4000:]
    print(f"exit status of the ranks: {status}\n{text}")
    return found


def _read(path: Path) -> dict[str, str | None]:
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcomes: list[dict[str, str | None]], name: str) -> None:
    problems = [
        f"rank {rank}: {found.get(name, 'it did not get that far')}"
        for rank, found in enumerate(outcomes)
        if found.get(name, "") is not None
    ]
    assert not problems, "\n".join(problems)
