"""DDP in the Trainer, where a layer gets no gradient in some updates: LayerDrop, experts without tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.trainer import Trainer, TrainingArguments
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "transformers.trainer")
STEPS = 4


class Skipping(nn.Module):
    """Two layers, the second of which is left out where `skips` says so."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.rank, self.calls = rank, 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        hidden = self.first(x)
        if not skips(self.rank, self.calls):
            hidden = hidden + self.second(hidden)
        self.calls += 1
        return {"loss": (hidden**2).mean()}


def skips(rank: int, call: int) -> bool:
    """Every parameter is used in the first update; then rank 1 leaves the layer out, at last both do."""
    return call > 0 and (rank == 1 or call == STEPS - 1)


def weights(model: Any) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def train(folder: Path) -> list[list[float]]:
    """Train on this rank; the Trainer decides whether DDP looks for unused parameters."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        optim="adamw_torch",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = Skipping(arguments.process_index)
    Trainer(model, arguments, train_dataset=[{"x": torch.ones(2)}] * (2 * STEPS)).train()
    return weights(model)


def train_alone() -> list[list[float]]:
    """Plain PyTorch: the mean of the two ranks' losses."""
    model = Skipping(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(STEPS):
        loss = torch.zeros(())
        for rank in range(2):
            model.rank, model.calls = rank, step
            loss = loss + model(torch.ones(1, 2))["loss"] / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


@pytest.mark.multirank
def test_a_layer_that_later_updates_leave_out_neither_hangs_nor_gets_a_gradient(tmp_path: Path):
    """A first backward that uses every parameter says nothing about the next one: DDP goes on looking."""
    expected = train_alone()
    for found in run_ranks(train, 2, tmp_path):
        assert found == [pytest.approx(values, abs=1e-6) for values in expected]
