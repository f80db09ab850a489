"""Broadcast of rank 0's values: all ranks start from the same, and evaluate the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from accel_trainer.runtime.torch_private import non_persistent_buffers

# One collective for many small tensors; a copy of one bucket, and not of the model, is in memory at a time.
_BUCKET_BYTES = 64 * 2**20


def broadcast_module_states(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, in buckets of 64 MiB on `device`. Collective."""
    # Without it, a model initialised from different seeds would be other models on other ranks, and nothing would say
    # so. By id: a tied parameter is sent once.
    tensors = {id(t): t.detach() for t in [*module.parameters(), *module.buffers()]}
    broadcast_tensors(tensors.values(), device)


def broadcast_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values of these tensors, in buckets of 64 MiB on `device`. Collective."""
    for bucket in buckets_of(tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows few types
        if dist.get_rank() == 0:
            continue
        for tensor, received in zip(bucket, split_like(flat, bucket), strict=True):
            # from_pretrained maps weights from their file: writing equal values would give every rank a copy of the
            # full model in memory.
            if not torch.equal(tensor, received := received.to(tensor.device)):
                tensor.copy_(received)


@torch.no_grad()
def broadcast_buffers(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's saved buffers, which a checkpoint has. Collective."""
    broadcast_tensors(_saved_buffers(model), device)


def _saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        left_out = non_persistent_buffers(module)
        own = ((name, value) for name, value in module.named_buffers(recurse=False) if name not in left_out)
        found.update((id(value), value) for _, value in own if not isinstance(value, DTensor))
    return list(found.values())


def share_buffers_in_evaluation(called: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Have all ranks evaluate with rank 0's saved buffers, if a model has any, where the engine does not see to it.

    The first forward of `called`, which the loop calls, in evaluation mode after training is collective then.
    """
    # Statistics of a batch norm are each rank's own since its last forward of training, and rank 0's are saved. DDP
    # sends them before every forward; an evaluation without that would be of another model on each rank.
    if dist.get_world_size() == 1 or not _saved_buffers(model):
        return
    has_trained = False
    # The model holds the hook: a strong reference would make a circle, and its memory wait for the collector.
    owner = weakref.ref(model)

    def follow(module: nn.Module, args: Any) -> None:
        nonlocal has_trained
        inner = owner() or module
        if has_trained and not inner.training:
            broadcast_buffers(inner, device)
        has_trained = inner.training

    called.register_forward_pre_hook(follow)


def buckets_of(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that are not empty in buckets of one dtype, of about 64 MiB together; in one order per call."""
    held: dict[torch.dtype, list[torch.Tensor]] = {}
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        held.setdefault(tensor.dtype, []).append(tensor)
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield from held.values()
            held, size = {}, 0
    yield from held.values()


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the pieces of a flat tensor in the shapes of the tensors that it was put together of."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    yield from (piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True))
