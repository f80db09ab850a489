"""What every example prints at its end: how the model was laid out, how fast it trained, and what it learnt."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from accel_trainer import Accelerator

__all__ = ["describe_layout", "print_table"]


def describe_layout(accelerator: Accelerator, model: nn.Module, num_parameters: int) -> list[tuple[str, str]]:
    """Return the rows that say how the model lies on the ranks. Collective.

    Args:
        model: after `prepare` or after training.
        num_parameters: of the whole model, counted before it was laid out.
    """
    # FSDP leaves each rank a part of every parameter, as a DTensor; other strategies leave the whole of it.
    own = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    per_rank = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
    terms = " + ".join(f"{count:,}" for count in per_rank)
    total = f" = {sum(per_rank):,}" if len(per_rank) > 1 else ""
    return [
        ("strategy", f"{accelerator.strategy.name} ({accelerator.distributed_type.value})"),
        ("precision", "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision),
        ("ranks", f"{accelerator.num_processes} x {accelerator.device.type}"),
        ("parameters of the model", f"{num_parameters:,}"),
        ("parameters per rank", terms + total),
    ]


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}\n{'-' * len(title)}")
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print(flush=True)
