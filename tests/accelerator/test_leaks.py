"""Runs that take long hold no more memory, files and threads at their end than soon after their begin."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from accel_trainer import Accelerator
from accel_trainer.plugins import ProjectConfiguration
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_trainer

preload("accel_trainer.accelerator")

NUM_STEPS = 400


def held() -> tuple[int, int, float]:
    """Return how many files and threads this process has, and MiB of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGESIZE") / 2**20


def loop(folder: str) -> list[Any]:
    """Train, gather and save; return what is held at a half and at the end."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with accelerator.preemptible():
        for step in range(1, NUM_STEPS + 1):
            accelerator.backward(model(torch.ones(4, 64)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather(torch.ones(4))
            assert not accelerator.should_stop
            if step % 50 == 0:
                accelerator.save_state(async_=step % 100 == 0)
            if step in (NUM_STEPS // 2, NUM_STEPS):
                accelerator.wait_for_checkpoint()
                seen.append(held())
                # The end of a rank closes connections of the other, which may not have counted them yet.
                accelerator.wait_for_everyone()
    return seen


class Look(TrainerCallback):
    """Looks at what is held after a save at a half, and at the end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (NUM_STEPS // 2, NUM_STEPS - 1):
            self.seen.append(held())


def train(folder: str) -> list[Any]:
    look = Look()
    build_trainer(
        folder, samples=8, max_steps=NUM_STEPS, save_strategy="steps", save_steps=50, save_total_limit=1,
        eval_strategy="steps", eval_steps=50, eval_samples=4, per_device_train_batch_size=2, logging_steps=10,
        options={"callbacks": [look]},
    ).train()  # fmt: skip
    return look.seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("job", "world_size"), [(loop, 2), (train, 1)])
def test_400_steps_with_saves_leave_nothing_open_and_memory_as_it_was(
    tmp_path: Path, job: Any, world_size: int
) -> None:
    for half, end in run_ranks(job, world_size, str(tmp_path), timeout=280):
        assert end[:2] == half[:2]
        assert end[2] - half[2] < 8
