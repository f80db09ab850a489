"""Broadcast of rank 0's values, so that all ranks start from the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["broadcast_module_states", "broadcast_tensors"]

_BUCKET_BYTES = 64 * 2**20


def broadcast_module_states(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, in buckets of 64 MiB on `device`.

    Collective: every rank calls it with the same module. Without it, a model initialised from different seeds would be
    sharded into pieces of different models, and nothing would say so.
    """
    tensors = {id(t): t.detach() for t in [*module.parameters(), *module.buffers()]}
    broadcast_tensors(tensors.values(), device)


def broadcast_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values of these tensors, in buckets of 64 MiB on `device`. Collective."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        bucket.append(tensor)
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            _broadcast_bucket(bucket, device)
            bucket, size = [], 0
    _broadcast_bucket(bucket, device)


def _broadcast_bucket(bucket: list[torch.Tensor], device: torch.device) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in bucket:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows few types
        if dist.get_rank() == 0:
            continue
        offset = 0
        for tensor in tensors:
            received = flat[offset : offset + tensor.numel()].view_as(tensor).to(tensor.device)
            # from_pretrained maps weights from their file: writing equal values would give every rank a copy of the
            # full model in memory.
            if not torch.equal(tensor, received):
                tensor.copy_(received)
            offset += tensor.numel()
