"""Save in the background of an asyncio program, then load. Writes to ``checkpoints/`` in the current directory."""

import asyncio

import numpy as np

import savestream


async def main() -> None:
    state = {"weights": np.ones((512, 512), np.float32), "step": 100}
    handle = await savestream.start_save(state, "checkpoints/step-000000000100")
    state["weights"] += 1  # everything is staged: the state may change while it is being written
    await handle  # durable and visible; an error of the background work is raised here

    restored = await savestream.load("checkpoints/step-000000000100")
    assert (restored["weights"] == 1).all()


asyncio.run(main())
