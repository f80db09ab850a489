"""A step of 10 ms with all that looks after it, and without: NaN guard, rank watch, signals, replica check.

On one process, or on the two that run.py starts it on. The loop does not clip: where it does, the guard has its norm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from timing import WAITING, Row, interleave, ratio_row
from torch import nn
from two_ranks import print_measured

from accel_trainer import Accelerator
from accel_trainer.runtime.own_watch import current_watch

NUM_UPDATES, BATCH_SIZE, WIDTH = 10, 64, 640


def _build(accelerator: Accelerator) -> Callable[[bool], None]:
    """Return a function that does some updates, guarded or not.

    Of one model: two lie elsewhere in memory, and 1 % is little.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    batches = [torch.randn(BATCH_SIZE, WIDTH) for _ in range(NUM_UPDATES)]
    guard, check, watch = accelerator.nonfinite_guard, optimizer._replica_check, current_watch()

    def run(is_guarded: bool) -> None:
        accelerator.nonfinite_guard = optimizer._guard = guard if is_guarded else None
        optimizer._replica_check = check if is_guarded else None
        if watch is not None:
            # Both threads wake up, and ask nothing.
            accelerator._stop_point._meeting.is_called = not is_guarded
            for name in ("_answer", "_look_at_progress"):
                vars(watch).pop(name, None)
                if not is_guarded:
                    setattr(watch, name, lambda *_: None)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch), batch))
                optimizer.step()
                optimizer.zero_grad()
            if is_guarded and accelerator.should_stop:
                raise AssertionError("nobody has asked for it")

    return run


def measure(rounds: int) -> list[Row]:
    """Compare the loop with and without, in turn. Collective on two processes."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    run = _build(accelerator)
    runs = {name: partial(run, name == "on") for name in ("on", "off")}
    with accelerator.preemptible():
        seconds = interleave(runs, WAITING * rounds, clock=time.process_time)
    number = accelerator.num_processes
    name = "guards, one process" if number == 1 else f"guards, {number} processes"
    return [ratio_row(name, "the same step without", seconds["on"], seconds["off"], 1.01 if number == 1 else 1.02)]


if __name__ == "__main__":
    print_measured(measure)
