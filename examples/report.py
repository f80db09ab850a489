"""What every example prints at its end: how the model was laid out, how fast it trained, and what it learnt."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from accel_trainer import Accelerator


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a whole model, also of one that DeepSpeed builds in pieces."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def describe_layout(accelerator: Accelerator, model: nn.Module, num_parameters: int) -> list[tuple[str, str]]:
    """Return the rows that say how the model lies on the ranks. Collective.

    Args:
        model: after `prepare` or after training.
        num_parameters: of the whole model, counted before it was laid out.
    """
    own = sum(_own_part(p).numel() for p in model.parameters())
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


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds: FSDP and ZeRO-3 leave it a part of every parameter, others the whole of it."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return getattr(parameter, "to_local", lambda: parameter)()


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}\n{'-' * len(title)}")
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    print(flush=True)
