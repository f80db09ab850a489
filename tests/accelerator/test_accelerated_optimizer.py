"""The optimizer and the scheduler that a loop holds: when they step, and what they return."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import Accelerator
from accel_trainer.optimizer import move_to_device


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


def test_a_prepared_optimizer_and_schedule_show_and_change_what_they_wrap():
    model, optimizer = build()
    other = nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, other, prepared, schedule = Accelerator(cpu=True).prepare(model, other, optimizer, scheduler)
    assert (prepared.defaults, schedule.optimizer, schedule.base_lrs) == (optimizer.defaults, optimizer, [0.1])
    assert repr(prepared) == f"AcceleratedOptimizer({optimizer!r})"

    prepared.add_param_group({"params": other.parameters(), "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    prepared.param_groups, prepared.state, prepared.defaults = (
        prepared.param_groups[:1],
        {},
        {
            **prepared.defaults,
            "lr": 1.0,
        },
    )
    assert (len(optimizer.param_groups), optimizer.state, optimizer.defaults["lr"]) == (1, {}, 1.0)

    calls: list[str] = []
    prepared.register_step_pre_hook(lambda *_: calls.append("before"))
    prepared.register_step_post_hook(lambda *_: calls.append("after"))
    model(torch.ones(1, 2)).sum().backward()
    prepared.step()
    schedule.step()
    assert calls == ["before", "after"]
    assert schedule.get_last_lr() == [0.05]


def test_a_prepared_optimizer_is_pickled_with_its_state():
    model, _ = build()
    model, prepared = Accelerator(cpu=True).prepare(model, torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    prepared.step()
    loaded = pickle.loads(pickle.dumps(prepared))
    for name, value in prepared.state_dict()["state"][0].items():
        assert torch.equal(loaded.state_dict()["state"][0][name], value)


def test_the_tensors_of_a_state_are_moved_and_nothing_else():
    moved = move_to_device({"step": 1, "momenta": [torch.ones(2), (torch.ones(1),)]}, "meta")
    assert moved["step"] == 1
    assert (moved["momenta"][0].device.type, moved["momenta"][1][0].device.type) == ("meta", "meta")
