"""A native step on a tiny model, where every microsecond of ours shows: loader, accumulate, backward, clip, step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import SHORT, Row, interleave, ratio_row
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator

NUM_SAMPLES, BATCH_SIZE = 6400, 16


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 32), torch.randn(NUM_SAMPLES, 1))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, DataLoader(data, batch_size=BATCH_SIZE, shuffle=True), schedule


def loops() -> dict[str, Callable[[], None]]:
    """Return an epoch of the documents' loop, and of the same loop in plain PyTorch; one process, one thread."""
    torch.set_num_threads(1)
    loss_function = nn.functional.mse_loss
    model, optimizer, loader, schedule = parts()

    def plain() -> None:
        for x, y in loader:
            loss = loss_function(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    our_model, our_optimizer, our_loader, our_schedule = accelerator.prepare(*parts())

    def ours() -> None:
        for x, y in our_loader:
            with accelerator.accumulate(our_model):
                loss = loss_function(our_model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(our_model.parameters(), 1.0)
                our_optimizer.step()
                our_schedule.step()
                our_optimizer.zero_grad()

    return {"plain": plain, "ours": ours}


def measure(rounds: int) -> list[Row]:
    """Compare both."""
    steps = interleave(loops(), SHORT * rounds)
    return [ratio_row("native step (tiny MLP)", "plain PyTorch loop", steps["ours"], steps["plain"], 1.05)]
