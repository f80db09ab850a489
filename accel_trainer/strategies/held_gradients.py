"""Gradients of an accumulation window that is still open, in and out of a module: for a save within the window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.placement import local_box, local_tensor, wrap_local_like
from accel_trainer.strategies.api import HeldGradients

__all__ = ["held_by_rank", "held_over_ranks", "put_gradients"]


def held_by_rank(module: nn.Module) -> HeldGradients:
    """Return this rank's own gradients, which have not been exchanged yet."""
    gradients = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    return HeldGradients(gradients, is_mean=False)


def held_over_ranks(module: nn.Module) -> HeldGradients | None:
    """Return the mean over ranks of the gradients of a module that FSDP2 shards; None where it keeps them to itself.

    Within a window FSDP2 holds them whole on every rank, in the parameters that it gathers for a forward. Under mixed
    precision they are elsewhere. Collective: every rank calls it, and gets the part of each that it has of the
    parameter; one gradient more than the window holds is whole at a time.
    """
    from torch.distributed.fsdp import FSDPModule  # here: other strategies have no need of it

    sharded = {name: p for name, p in module.named_parameters() if p.requires_grad}
    local: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        part.unshard()
        layer: nn.Module = part  # type: ignore[assignment]  # the mixin does not say that it is one
        gathered = [(f"{prefix}.{name}" if prefix else name, p) for name, p in layer.named_parameters()]
        own = [(name, p) for name, p in gathered if name in sharded and not isinstance(p, DTensor)]
        is_mixed = any(p.dtype != sharded[name].dtype for name, p in own)
        local.update((name, p.grad.detach()) for name, p in own if p.grad is not None)
        part.reshard()
        if is_mixed:
            return None
    return HeldGradients(_mean_over_ranks(sharded, local), is_mean=True)


def _mean_over_ranks(sharded: Mapping[str, nn.Parameter], local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average gradients over ranks, those that have been exchanged within the window included."""
    names = list(sharded)
    first = next(iter(sharded.values()))
    mesh = next((p.device_mesh for p in sharded.values() if isinstance(p, DTensor)), None)
    is_held = torch.tensor([n in local or sharded[n].grad is not None for n in names], dtype=torch.int32)
    is_held = is_held.to(first.device)
    dist.all_reduce(is_held, op=dist.ReduceOp.MAX)
    means: dict[str, Tensor] = {}
    for name, is_wanted in zip(names, is_held.tolist(), strict=True):
        if not is_wanted:
            continue
        parameter = sharded[name]
        mean = local[name].clone() if name in local else torch.zeros(parameter.shape, dtype=parameter.dtype)
        mean = mean.to(parameter.device)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if isinstance(parameter, DTensor):
            part = mean[local_box(parameter).within(Box.full(mean.shape))].clone()
            if parameter.grad is not None:
                part += local_tensor(parameter.grad)
            means[name] = wrap_local_like(parameter, part)
        else:
            everywhere = [] if mesh is None else [Replicate()] * mesh.ndim
            means[name] = mean if mesh is None else DTensor.from_local(mean, mesh, everywhere, run_check=False)
    return means


def put_gradients(module: nn.Module, gradients: Mapping[str, Callable[[Box], Tensor]]) -> None:
    """Give parameters these gradients; each rank asks for its part of sharded ones. Ranks do not communicate."""
    for name, parameter in module.named_parameters():
        if name not in gradients:
            parameter.grad = None
            continue
        own = torch.empty_like(local_tensor(parameter))
        parameter.grad = wrap_local_like(parameter, own.copy_(gradients[name](local_box(parameter))))
