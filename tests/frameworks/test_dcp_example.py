"""The example of torch.distributed.checkpoint goes on where another number of ranks left off."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dcp_storage.py"


def run(directory: Path, world_size: int, *arguments: str) -> list[str]:
    """Run the example on some ranks, warnings being errors; what rank 0 printed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        together = {
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{world_size}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= together if world_size > 1 else {}
        command = [sys.executable, "-W", "error", str(EXAMPLE), *arguments]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe, text=True))
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    assert [errors for _, errors in outputs] == [""] * world_size
    assert all(printed == "" for printed, _ in outputs[1:])
    return outputs[0][0].splitlines()


def test_the_ranks_may_change(tmp_path: Path) -> None:
    first = run(tmp_path, 2, "--root", "parts", "--steps", "2")
    second = run(tmp_path, 1, "--root", "parts", "--steps", "3")
    assert [lines[0] for lines in (first, second)] == ["steps 0 to 2 on 2 ranks", "steps 2 to 3 on 1 ranks"]
    norms = [float(lines[1].split()[1]) for lines in (first, second)]
    assert 0 < abs(norms[0] - norms[1]) < 0.1 * norms[0]  # one more step, and not a new beginning
    assert sorted(path.parent.name for path in tmp_path.glob("parts/*/manifest.json")) == [
        f"step-{step:012d}" for step in (1, 2, 3)
    ]
    ranks = {path.name[:6] for path in tmp_path.glob("parts/step-000000000002/*/*.bin")}
    assert ranks == {"r00000", "r00001"}
