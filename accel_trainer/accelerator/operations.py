"""Collectives as plain functions, for code without an Accelerator: they speak for the job that this process is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from accel_trainer.runtime import collectives
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.process import current_process
from accel_trainer.runtime.rng import check_rng_types, synchronize_rng

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "synchronize_rng_states",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in a structure of the same shape. Collective."""
    return collectives.gather(tensor, current_process())


def gather_object(item: Any) -> list[Any]:
    """Collect any picklable object from all ranks; lists are joined, others become one entry each. Collective."""
    return collectives.gather_object(item, current_process())


def reduce(tensor: Any, reduction: ReduceOp | str = ReduceOp.SUM, scale: float = 1.0) -> Any:
    """Combine the tensors of all ranks: "sum", "mean", "min", "max", "prod" or "none". Collective."""
    return collectives.reduce(tensor, current_process(), reduction=reduction, scale=scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one rank on every rank. Collective."""
    return collectives.broadcast(tensor, current_process(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the entries of a list by those of one rank, in place, and return the list. Collective."""
    return collectives.broadcast_object_list(object_list, current_process(), from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad the tensors of all ranks to the largest size along `dim`. Collective."""
    return collectives.pad_across_processes(
        tensor, current_process(), dim=dim, pad_index=pad_index, pad_first=pad_first
    )


def synchronize_rng_states(rng_types: Sequence[str]) -> None:
    """Set random streams of this process to those of rank 0: "torch" (the CPU's), or a kind of device. Collective.

    Raises:
        ConfigError: a stream is none that the ranks have.
    """
    process = current_process()
    names = check_rng_types(rng_types, process.device)
    if process.is_distributed:
        synchronize_rng(names, process)


def wait_for_everyone() -> None:
    """Wait until every rank is here. Collective; returns at once on one process."""
    if current_process().is_distributed:
        dist.barrier()
