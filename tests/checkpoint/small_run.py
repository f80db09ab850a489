"""A run small enough for its checkpoint to lie in the repository: what the fixtures of each format were saved from.

`python -m tests.checkpoint.small_run DIRECTORY` saves one with the format of the day.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class SmallRun:
    """Two layers with AdamW, a schedule, a loader and a registered object."""

    def __init__(self, strategy: str | None = None, seed: int = 0) -> None:
        self.accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(rows), batch_size=4 // self.accelerator.num_processes)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self) -> list[float]:
        """Train an epoch of two updates; return their losses."""
        losses = []
        for (rows,) in self.loader:
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.counter.count += 1
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses


if __name__ == "__main__":
    run = SmallRun()
    run.train()
    run.accelerator.save_state(sys.argv[1])
    print(run.train())
