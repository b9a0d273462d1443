"""Save in the background of an ordinary loop, then load. Writes to ``checkpoints/`` in the current directory."""

import numpy as np

from savestream import blocking

state = {"weights": np.zeros((512, 512), np.float32), "step": 0}
saving = None
for step in range(1, 4):
    state["weights"] += 1  # your training step
    state["step"] = step
    if saving is not None:
        saving.result()  # one save at a time; an error of the background work is raised here
    saving = blocking.start_save(state, f"checkpoints/step-{step:012d}")
saving.result()  # durable and visible

restored = blocking.load("checkpoints/step-000000000003")
assert restored["step"] == 3
