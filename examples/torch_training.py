"""Train a PyTorch model, save all of it in the background, and go on later as if nothing had happened.

    python examples/torch_training.py --root checkpoints --steps 20
    python examples/torch_training.py --root checkpoints --steps 40

The second call resumes from the newest checkpoint and ends with exactly the weights that 40 steps in one go give:
model, optimizer, learning rate schedule, gradient scaler and every random generator come back bit for bit.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional

import savestream
from savestream import blocking


class Training:
    """Everything that a training run consists of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=10)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=5)
        self.data = torch.Generator().manual_seed(1)  # draws the batches
        self.step = 0

    def train_step(self) -> float:
        batch = torch.randn(32, 16, generator=self.data)
        labels = batch[:, :4].argmax(dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(self.model(batch).float(), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": self.data,
            "rng": savestream.capture_rng_state(),
            "step": self.step,
        }

    def resume(self, place: str) -> None:
        state = blocking.load(place, framework="torch")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.data = state["data"]
        self.step = state["step"]
        savestream.restore_rng_state(state["rng"])

    def digest(self) -> str:
        weights = [tensor.detach().reshape(-1) for tensor in self.model.state_dict().values()]
        return hashlib.sha256(torch.cat(weights).numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    training = Training()
    committed = blocking.list_checkpoints(arguments.root)
    if committed:
        training.resume(committed[-1].location)
        print(f"resumed at step {training.step}")
    saving, plans = None, savestream.PlanCache()
    while training.step < arguments.steps:
        loss = training.train_step()
        if training.step % arguments.save_every == 0 or training.step == arguments.steps:
            if saving is not None:
                saving.result()  # one save at a time; an error of the last one is raised here
            place = f"{arguments.root}/step-{training.step:012d}"
            # Returns when everything is copied; training goes on while it is being written.
            saving = blocking.start_save(training.state(), place, step=training.step, plan_cache=plans)
            print(f"step {training.step}: loss {loss:.4f}")
    if saving is not None:
        saving.result()
    print(f"weights {training.digest()}, loss scale {training.scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
