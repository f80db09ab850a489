"""Schedules that step once for each process in an update, as scripts for accelerate size theirs."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from accel_trainer import Accelerator
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from tests.loops import take_update
from tests.ranks import run_ranks

UPDATES = 6
RATE = 0.5


def falling(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def build(**options: Any) -> tuple[Accelerator, list[tuple[nn.Module, Any, Any]]]:
    """Return an Accelerator, and models with schedules that are sized in the batches of one process."""
    accelerator = Accelerator(cpu=True, config={"scheduler_steps": "per_process"}, **options)
    steps = UPDATES * accelerator.num_processes
    prepared = []
    for make in (
        lambda optimizer: LambdaLR(optimizer, functools.partial(falling, num_training_steps=steps)),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps),
        lambda optimizer: OneCycleLR(optimizer, RATE, total_steps=steps - accelerator.num_processes + 1),
    ):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        prepared.append(accelerator.prepare(model, optimizer, make(optimizer)))
    return accelerator, prepared


def train(accelerator: Accelerator, prepared: Any, updates: int) -> list[list[float]]:
    """Return the rates of each schedule after each update."""
    rates = []
    for _ in range(updates):
        for model, optimizer, scheduler in prepared:
            take_update(model(torch.ones(1, 1)).sum(), optimizer, accelerator)
            scheduler.step()
        rates.append([optimizer.param_groups[0]["lr"] for _, optimizer, _ in prepared])
    return rates


def train_and_save(directory: Path) -> tuple[list[list[float]], list[list[float]]]:
    accelerator, prepared = build()
    begun = train(accelerator, prepared, 2)
    accelerator.save_state(directory)
    return begun, train(accelerator, prepared, UPDATES - 2)


def resume(directory: Path) -> list[list[float]]:
    accelerator, prepared = build()
    accelerator.load_state(directory)
    return [[scheduler.get_last_lr()[0] for *_, scheduler in prepared], *train(accelerator, prepared, UPDATES - 2)]


@pytest.mark.multirank
def test_a_schedule_of_batches_ends_with_the_run_and_goes_on_on_other_numbers_of_processes(tmp_path: Path) -> None:
    begun, rest = run_ranks(train_and_save, 2, tmp_path)[0]
    rates = begun + rest
    assert [each[0] for each in rates] == pytest.approx([RATE * (1 - n / UPDATES) for n in range(1, UPDATES + 1)])
    cosine = [RATE * (1 + math.cos(math.pi * n / UPDATES)) / 2 for n in range(1, UPDATES + 1)]
    assert [each[1] for each in rates] == pytest.approx(cosine, abs=1e-12)
    assert resume(tmp_path) == [pytest.approx(each, abs=1e-12) for each in [begun[-1], *rest]]
    # Of as many processes, to the bit.
    assert run_ranks(resume, 2, tmp_path)[0] == [begun[-1], *rest]


def scheduler_of(make: Any, steps: int) -> AcceleratedScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=RATE)
    return AcceleratedScheduler(make(optimizer), (), steps_per_update=steps)


def warmed_up(optimizer: Any) -> LRScheduler:
    return SequentialLR(optimizer, [LambdaLR(optimizer, lambda step: step), StepLR(optimizer, 2)], [3])


@pytest.mark.parametrize(
    ("make", "steps", "match"),
    [
        (warmed_up, 2, "SequentialLR was saved after 2 of its steps in each update, and this run takes 3"),
        (lambda optimizer: LambdaLR(optimizer, lambda step: step), 1, "has 1 steps, which are no whole updates of 2"),
    ],
)
def test_a_state_that_cannot_go_on_is_refused(make: Any, steps: int, match: str) -> None:
    saved = scheduler_of(make, steps)
    saved.optimizer.step()
    saved.step()
    state = {**saved.state_dict(), "steps_per_update": 2}
    with pytest.raises(IncompatibleCheckpointError, match=match):
        scheduler_of(make, 3).check_state(state)
    scheduler_of(make, 2).load_state_dict(state)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_scheduler_with_optimizer=False whenever the loop steps it; leave one"):
        Accelerator(cpu=True, config={"scheduler_steps": "per_process"}, step_scheduler_with_optimizer=False)
    accelerator = Accelerator(cpu=True, config={"scheduler_steps": "per_process"}, split_batches=True)
    assert accelerator.prepare(warmed_up(torch.optim.SGD([nn.Parameter(torch.ones(1))]))).steps_per_update == 1


def test_a_schedule_that_ends_at_a_part_of_its_steps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for steps, length in ((10, 30), (30, 30), (10, 40)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=RATE)
        made = LambdaLR(optimizer, functools.partial(falling, num_training_steps=length))
        scheduler = AcceleratedScheduler(made, ())
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        scheduler.warn_of_rest(3)
    (message,) = caplog.messages
    assert "a schedule of 30 steps ends after 10, the updates of this run on 3 processes" in message
    assert "scheduler_steps=per_process" in message
