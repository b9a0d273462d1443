"""The body of one racing process: it lives over all rounds, so that both start each round at the same moment."""

from __future__ import annotations

import numpy as np

from savestream import SaveOptions, blocking
from savestream.errors import CheckpointExistsError


def racing_state(writer: int, number: int) -> dict[str, object]:
    """Every byte tells who wrote it in which round."""
    leaves = {f"leaf{leaf}": np.full((64, 100 + leaf), writer * 100_000 + number * 100 + leaf) for leaf in range(6)}
    return {**leaves, "writer": writer, "round": number}


def race(writer, root, rounds, barrier, results, overwrite):
    """Save a different tree than the other process to the same place, round after round."""
    options = SaveOptions(compression="none" if writer else "zstd")
    for number in range(rounds):
        barrier.wait(60)
        try:
            info = blocking.save(
                racing_state(writer, number), f"{root}/round{number}", options=options, step=number, overwrite=overwrite
            )
        except CheckpointExistsError as error:
            results.put((number, writer, None, str(error)))
        except Exception as error:
            results.put((number, writer, None, repr(error)))
        else:
            results.put((number, writer, info.save_id, "saved"))
