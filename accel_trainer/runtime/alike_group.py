"""A process group of ranks that are not there, and would have what this one has.

What is prepared in it - data in shards, a model in DDP, schedules by numbers of ranks - is what it would be in a job of
so many ranks, and no other process is waited for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_trainer.runtime.torch_private import completed_work

_NAME = "alike"
_ProcessGroup: Any = dist.ProcessGroup
"""Without the overloads of torch's stubs: of each the one that functions of `dist` and DDP call is here."""


class _AlikeGroup(_ProcessGroup):
    """Rank 0 of the group: it gathers its own as often as there are ranks, and sums to so many times that."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._num_ranks = size

    def getBackendName(self) -> str:
        return _NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._num_ranks)
        return completed_work(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=False):  # a rank that gathers nothing gives no outputs
            for part in parts:
                part.copy_(own)
        return completed_work(outputs)

    gather = allgather

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        output.view(self._num_ranks, -1).copy_(own.reshape(1, -1).expand(self._num_ranks, -1))
        return completed_work(output)

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        for part, parts in zip(outputs, inputs, strict=True):
            part.copy_(parts[0])
        return completed_work(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return completed_work(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return completed_work([])


def join_alike_group(world_size: int, timeout_seconds: float) -> None:
    """Join a job as rank 0 of so many that are not there. Not collective."""
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, lambda store, rank, size, timeout: _AlikeGroup(size), devices=["cpu"])
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=0, world_size=world_size, timeout=timeout)
