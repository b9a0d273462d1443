"""Scenarios that several ranks play together; run as a script it plays them all in one start of the ranks.

``python dcp_ranks.py DIRECTORY SET`` imports PyTorch once, forks the ranks, and lets them play the scenarios of a set
one after the other. Each rank notes in ``DIRECTORY/rank-N.json`` what became of each: null, or the traceback.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from dcp_after_failure_scenarios import AFTER_FAILURE_SCENARIOS
from dcp_peer_scenarios import PEER_SCENARIOS
from dcp_rank_scenarios import OWN_SCENARIOS, SLOW_SCENARIOS
from dcp_rank_support import Ranks
from dcp_support import KINDS, quiet

__all__ = ["SCENARIOS", "WORLD_SIZES"]

SCENARIOS: dict[str, dict[str, tuple[str, Callable[[Ranks], None]]]] = {
    "all": {
        **{f"{kind}: {name}": (kind, play) for name, play in PEER_SCENARIOS.items() for kind in KINDS},
        **{f"savestream: {name}": ("savestream", play) for name, play in OWN_SCENARIOS.items()},
        **{f"savestream: {name}": ("savestream", play) for name, play in AFTER_FAILURE_SCENARIOS.items()},
    },
    "slow": {f"savestream: {name}": ("savestream", play) for name, play in SLOW_SCENARIOS.items()},
}
WORLD_SIZES = {"all": 4, "slow": 2}


def _be_rank(rank: int, directory: Path, chosen: str) -> None:
    warnings.simplefilter("error")
    quiet()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=WORLD_SIZES[chosen],
        timeout=datetime.timedelta(seconds=60),
    )
    outcomes: dict[str, str | None] = {}
    for number, (name, (kind, play)) in enumerate(SCENARIOS[chosen].items()):
        place = directory / f"{number:03d}"
        try:
            play(Ranks(rank, WORLD_SIZES[chosen], place, kind))
        except BaseException:
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = None
        (directory / f"rank-{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    directory, chosen = Path(sys.argv[1]), sys.argv[2]
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=_be_rank, args=(rank, directory, chosen)) for rank in range(WORLD_SIZES[chosen])]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
