"""Planners of your own: export half-precision weights under other names, and load them back into the full model.

The save planner leaves the optimizer out, renames ``model.*`` to ``ema.*`` and stores 16-bit floats; the load planner
undoes the renaming, and ``cast=True`` the rounding's dtype. Writes to ``checkpoints/`` in the current directory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
from msgspec.structs import replace

import savestream
from savestream.planners import Metadata, SavePlan, TensorProperties, TensorWriteData, WriteItem


class HalfPrecisionPlanner(savestream.DefaultSavePlanner):
    """Saves what lies beneath ``model``, as ``ema``, with every float32 rounded to ``dtype``."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self.half = TensorProperties(dtype)
        self.original_names: dict[str, str] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[self.change(item) for item in plan.items if item.index.fqn.startswith("model.")])

    def change(self, item: WriteItem) -> WriteItem:
        name = item.index.fqn.replace("model.", "ema.", 1)
        self.original_names[name] = item.index.fqn
        data = item.tensor_data
        if data is not None and data.properties.dtype == "float32":
            data = TensorWriteData(data.chunk, self.half, data.size)
        alias = item.alias_of and replace(item.alias_of, fqn=item.alias_of.fqn.replace("model.", "ema.", 1))
        return replace(item, index=replace(item.index, fqn=name), tensor_data=data, alias_of=alias)

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = replace(write_item.index, fqn=self.original_names[write_item.index.fqn])
        found = super().resolve_data(replace(write_item, index=index))
        if write_item.tensor_data is None or write_item.tensor_data.properties != self.half:
            return found
        return found.astype(getattr(ml_dtypes, self.half.dtype, self.half.dtype))


class RenamingLoadPlanner(savestream.DefaultLoadPlanner):
    """Fills ``model`` from what was saved as ``ema``."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"ema": state_dict["model"]}, metadata, is_coordinator)

    def finish_load(self) -> Any:
        return {"model": super().finish_load()["ema"]}


async def main() -> None:
    weights = np.linspace(0, 1, 1 << 16, dtype=np.float32)
    state = {"model": {"w": weights, "layers": 12}, "optimizer": {"m": np.zeros_like(weights)}}
    await savestream.save(state, "checkpoints/step-000000000100", planner=HalfPrecisionPlanner())

    exported = await savestream.load("checkpoints/step-000000000100")
    assert list(exported) == ["ema"]
    assert exported["ema"]["w"].dtype == ml_dtypes.bfloat16

    model: dict[str, Any] = {"w": np.zeros_like(weights), "layers": 0}
    planner = RenamingLoadPlanner(cast=True)
    await savestream.load("checkpoints/step-000000000100", {"model": model}, planner=planner)
    assert np.allclose(model["w"], weights, atol=0.01)
    assert model["layers"] == 12


if __name__ == "__main__":
    asyncio.run(main())
