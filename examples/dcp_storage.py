"""Train a sharded model with torch.distributed.checkpoint, stored by savestream.

    torchrun --nproc-per-node 2 examples/dcp_storage.py --root checkpoints --steps 4
    python examples/dcp_storage.py --root checkpoints --steps 8

The second call goes on from the newest checkpoint, on another number of ranks. torch plans and coordinates as ever; the
checkpoints are ordinary ones, which savestream reads without PyTorch.
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from savestream import blocking
from savestream.integrations.torch import StorageReader, StorageWriter


class Training(dcp.stateful.Stateful):
    """A model, its optimizer and the step, as torch's checkpoints take them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0

    def train_step(self) -> None:
        batch = torch.linspace(-1, 1, 64).reshape(8, 8) * (self.step + 1)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    training = Training()
    committed = blocking.list_checkpoints(arguments.root)
    dist.barrier()  # all ranks have looked before one of them saves
    if committed:
        dcp.load({"training": training}, storage_reader=StorageReader(committed[-1].location))
    first, saving, writer = training.step, None, StorageWriter()
    group = dist.new_group()  # of their own: what background saves exchange must not mix with what the training does
    while training.step < arguments.steps:
        training.train_step()
        if saving is not None:
            saving.result()  # one save at a time; an error of the last one is raised here
        place = f"{arguments.root}/step-{training.step:012d}"
        state = {"training": training}
        saving = dcp.async_save(state, storage_writer=writer, checkpoint_id=place, process_group=group)
    if saving is not None:
        saving.result()
    dist.barrier()
    if dist.get_rank() == 0:
        weights = blocking.load(place, keys="training.model")["training"]["model"]
        print(f"steps {first} to {training.step} on {dist.get_world_size()} ranks")
        print("norm", np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in weights.values())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
