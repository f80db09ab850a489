"""`gather_for_metrics` on two CPU processes against the bare collective, inside of a pass over a prepared loader.

Run by run.py through the launcher.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from timing import Row, interleave, ratio_row
from torch.utils.data import DataLoader
from two_ranks import print_measured

from accel_trainer import Accelerator

STEPS, BATCH_SIZE, NUM_CLASSES = 100, 8, 1000

# Renamed in torch 2.13; the old name warns there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rows(rounds: int) -> list[Row]:
    """Compare STEPS gathers of logits and labels with as many bare all-gathers of both. Collective."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4 * BATCH_SIZE), BATCH_SIZE))
    logits, labels = torch.randn(BATCH_SIZE, NUM_CLASSES), torch.arange(BATCH_SIZE)
    size = accelerator.num_processes

    def bare() -> None:
        dist.barrier()
        for _ in range(STEPS):
            all_gather(logits.new_empty(size * BATCH_SIZE, NUM_CLASSES), logits)
            all_gather(labels.new_empty(size * BATCH_SIZE), labels)

    def ours() -> None:
        dist.barrier()
        for _ in range(STEPS):
            accelerator.gather_for_metrics((logits, labels))

    def padded() -> None:
        dist.barrier()
        for _ in range(STEPS):
            accelerator.gather_for_metrics((logits, labels), pad_index=-100)

    seconds: dict[str, list[float]] = {}
    for _ in loader:
        seconds = interleave({"bare": bare, "ours": ours, "padded": padded}, rounds)
        break
    against = "bare all_gather_into_tensor"
    return [
        ratio_row("gather_for_metrics, 2 processes", against, seconds["ours"], seconds["bare"], 1.15),
        ratio_row("the same with pad_index=", against, seconds["padded"], seconds["bare"], None),
    ]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
