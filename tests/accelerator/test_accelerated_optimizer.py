"""The optimizer and the scheduler that a loop holds: when they step, and what they return."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import Accelerator


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("order", ["together", "scheduler first", "scheduler last", "on the wrapper"])
def test_a_schedule_steps_once_per_update_in_whatever_order_things_were_prepared(order: str):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = build()
    if order == "on the wrapper":
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if order == "scheduler first":
        scheduler = accelerator.prepare(scheduler)
    if order == "together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    elif order != "on the wrapper":
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduler)
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_step_with_a_closure_returns_its_loss_as_torchs_own_does(kind: type[torch.optim.Optimizer]):
    found = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        if is_prepared:
            model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            return loss

        found.append([optimizer.step(closure).item() for _ in range(3)])
    assert found[0] == found[1]
