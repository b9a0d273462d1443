"""What the tests of imports run in processes of their own."""

from __future__ import annotations

import json
import sys


def import_without_torch(source: str, dest: str) -> None:
    """Convert, and say which frameworks that took."""
    from savestream import blocking

    blocking.import_dcp(source, dest)
    loaded = blocking.load(dest)
    shapes = {key: list(value.shape) for key, value in loaded["layouts"].items()}
    frameworks = sorted({"torch", "jax", "safetensors"} & {name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"frameworks": frameworks, "shapes": shapes}))


def save_shards(rank: str, store: str, directory: str) -> None:
    """One of two ranks: save sharded, replicated and uneven tensors."""
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.to(torch.bfloat16), mesh, [Shard(1)]),
        "replicated": distribute_tensor(rows[:2].clone(), mesh, [Replicate()]),
        "one row": distribute_tensor(rows[:1].clone(), mesh, [Shard(0)]),
        "plain": rows[:, 0].clone(),
        "step": 5,
    }
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
