"""Lightning Fabric beside ours: a native step, and a process that takes one. Run by run.py, with Fabric on its path."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import native_step
from lightning_fabric import Fabric
from startup import process
from timing import SHORT, Row, interleave, ratio_row
from torch import nn

_ONE_STEP = """
import torch
from {module} import {name}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
owner = {name}({options})
model, optimizer = owner.{method}(model, optimizer)
owner.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
"""


def _loop() -> Callable[[], None]:
    fabric = Fabric(accelerator="cpu", devices=1)
    given_model, given_optimizer, given_loader, schedule = native_step.parts()
    model, optimizer = fabric.setup(given_model, given_optimizer)
    loader = fabric.setup_dataloaders(given_loader)

    def epoch() -> None:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return epoch


def _seconds_of_children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def rows(rounds: int) -> list[Row]:
    """Compare epochs of the tiny MLP, and whole processes, in processor time."""
    steps = interleave({**native_step.loops(), "fabric": _loop()}, SHORT * rounds, clock=time.process_time)
    ours = _ONE_STEP.format(module="accel_trainer", name="Accelerator", options="cpu=True", method="prepare")
    theirs = _ONE_STEP.format(module="lightning_fabric", name="Fabric", options="accelerator='cpu'", method="setup")
    programs = {"ours": process(sys.executable, "-c", ours), "fabric": process(sys.executable, "-c", theirs)}
    starts = interleave(programs, rounds, clock=_seconds_of_children)
    return [
        ratio_row("native step (tiny MLP)", "Fabric", steps["ours"], steps["fabric"], None),
        ratio_row("Fabric's native step", "plain PyTorch loop", steps["fabric"], steps["plain"], None),
        ratio_row("a process that takes one step", "Fabric", starts["ours"], starts["fabric"], None),
    ]


if __name__ == "__main__":
    print(json.dumps([row.to_dict() for row in rows(int(sys.argv[1]))]))
