"""What one Accelerator has prepared, and another is given: a second cell of a notebook, or a teacher's Accelerator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def prepare_twice(strategy: str) -> dict[str, Any]:
    """Train with the second of two Accelerators, on what the first has prepared."""
    first = Accelerator(cpu=True, strategy=strategy)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.arange(6 * first.num_processes + 1.0)[:, None], batch_size=2)
    prepared = first.prepare(model, optimizer, scheduler, loader)

    second = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = second.prepare(*prepared)
    assert loader is prepared[-1]
    steps, rows = [], []
    for batch in loader:
        rows += second.gather_for_metrics(batch).flatten().tolist()
        with second.accumulate(model):
            second.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps.append(scheduler.last_epoch)
    assert not first.gradient_state.in_dataloader
    assert not second.gradient_state.in_dataloader
    return {"steps": steps, "rows": rows}


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_what_one_has_prepared_follows_the_other(strategy: str, ranks: int):
    for result in run_ranks(prepare_twice, ranks, strategy):
        assert result["steps"] == [0, 1, 1, 2]
        assert result["rows"] == [float(number) for number in range(6 * ranks + 1)]


def test_a_loader_that_was_prepared_otherwise_is_refused():
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(4.0)))
    second = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    with pytest.raises(
        ConfigError, match="was prepared with even_batches=False, and is to be prepared with even_batch"
    ):
        second.prepare(loader)


def test_objects_survive_free_memory():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.free_memory()
    model, again = accelerator.prepare(model, optimizer)
    assert again.prepared[0] is accelerator._prepared.units[0]
    assert again.optimizer is optimizer.optimizer


def test_a_copy_of_what_holds_an_accelerator_holds_the_same():
    holder = {"accelerator": Accelerator(cpu=True), "steps": [1]}
    assert copy.deepcopy(holder)["accelerator"] is holder["accelerator"]
