"""`gather_for_metrics` on two CPU processes against the bare collective, inside of a pass over a prepared loader.

Run by run.py through the launcher.
"""

from __future__ import annotations

from collections.abc import Callable

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

    def all_gather_bare(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            all_gather(tensor.new_empty(size * BATCH_SIZE, *tensor.shape[1:]), tensor)

    def repeat(gather: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            for _ in range(STEPS):
                gather()

        return run

    sides = {
        "bare": lambda: all_gather_bare(logits, labels),
        "ours": lambda: accelerator.gather_for_metrics((logits, labels)),
        "unchecked": lambda: accelerator.gather((logits, labels)),
        "padded": lambda: accelerator.gather_for_metrics((logits, labels), pad_index=-100),
        "bare small": lambda: all_gather_bare(labels, labels),
        "small": lambda: accelerator.gather_for_metrics((labels, labels)),
    }
    seconds: dict[str, list[float]] = {}
    for _ in loader:
        seconds = interleave({name: repeat(side) for name, side in sides.items()}, rounds)
        break
    against = "bare all_gather_into_tensor"
    return [
        ratio_row("gather_for_metrics, 2 processes", against, seconds["ours"], seconds["bare"], 1.15),
        ratio_row("the same", "gather, which compares no shapes", seconds["ours"], seconds["unchecked"], None),
        ratio_row("two integers a sample", against, seconds["small"], seconds["bare small"], 1.0),
        ratio_row("the same with pad_index=", against, seconds["padded"], seconds["bare"], None),
    ]


if __name__ == "__main__":
    print_measured(rows)
    dist.destroy_process_group()
