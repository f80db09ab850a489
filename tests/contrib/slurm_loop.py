"""A loop that SLURM's tests run: it trains until a signal asks it to save, and ends at once where it has a state."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from accel_trainer import Accelerator

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
folder = Path(sys.argv[1], os.environ.get("SLURM_ARRAY_TASK_ID", "state"))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
resumed = accelerator.load_state(folder, missing_ok=True) is not None
begun = schedule.last_epoch
last = begun + 1 if resumed or "--short" in sys.argv else 10**9
with accelerator.preemptible():
    for step in range(begun, last):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        if step == begun:
            accelerator.print(f"update {step} on {accelerator.num_processes} ranks", flush=True)
        if accelerator.should_stop or step + 1 == last:
            accelerator.save_state(folder)
            accelerator.print(f"saved after update {step}", flush=True)
            break
