"""Collectives as plain functions, for code without an Accelerator: they speak for the job that this process is in."""

from __future__ import annotations

from typing import Any

from accel_trainer.runtime import collectives
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.process import current_process

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
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
