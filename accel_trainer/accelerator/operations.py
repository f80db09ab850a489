"""Collectives as plain functions, for code without an Accelerator: they run over the job that this process is in."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.process import current_process
from accel_trainer.runtime.rng import check_rng_types, synchronize_rng

__all__ = [
    "GatheredParameters",
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


def GatheredParameters(  # the name that users of DeepSpeed know
    params: Iterable[Tensor] | Tensor, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which parameters that ZeRO-3 has partitioned are full; an empty one for all others.

    Collective for partitioned parameters: every rank enters it with the same ones.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes in the block hold for all; None where nothing is changed.
        fwd_module: a module that uses the parameters without holding them; see `deepspeed.zero.GatheredParameters`.
        enabled: false leaves the parameters as they are.

    Raises:
        ConfigError: parameters are FSDP2's, which `parameter.full_tensor()` gathers.
    """
    given = [params] if isinstance(params, Tensor) else list(params)
    if enabled and any(hasattr(parameter, "full_tensor") for parameter in given):
        raise ConfigError(
            "GatheredParameters() was given parameters that FSDP2 has sharded, and puts together those of DeepSpeed; "
            "use parameter.full_tensor(), or accelerator.get_state_dict(model)"
        )
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in given):
        return nullcontext()
    # The library that has partitioned them is imported: no engine is imported here.
    context: AbstractContextManager[Any] = sys.modules["deepspeed"].zero.GatheredParameters(
        given, modifier_rank=modifier_rank, fwd_module=fwd_module
    )
    return context
