"""Checks that all ranks call the same collective with fitting tensors, before any data moves; all ranks raise alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_trainer.errors import DistributedOperationException
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.tensor_trees import is_tensor
from accel_trainer.tree import leaves

__all__ = ["UNEVEN_HINT", "check_same_call", "describe_leaves", "describe_rows"]

UNEVEN_HINT = ", pass pad_index= or as_samples=True where they may differ,"


def check_same_call(
    name: str, entries: Sequence[str], process: ProcessContext, *, value: Any = None, way_out: str = ""
) -> list[Any]:
    """Raise on every rank unless all ranks call the same operation with the same entries.

    Collective: every rank calls it.

    Args:
        entries: a description of each leaf on this rank.
        way_out: a further remedy, for the message.

    Returns:
        The `value` of each rank, a picklable object that travels along.

    Raises:
        DistributedOperationException: the ranks differ; it names the two sides of the first difference.
    """
    if not process.is_distributed:
        return [value]
    everyone: list[Any] = [None] * process.world_size
    dist.all_gather_object(everyone, ([name, *entries], value), group=process.group)
    calls = [words for words, _ in everyone]
    for rank, words in enumerate(calls):
        for index, (first, other) in enumerate(zip_longest(calls[0], words, fillvalue="nothing")):
            if first != other:
                subject = f"leaf {index - 1} of {name}" if index else "the operation"
                raise DistributedOperationException(
                    f"the ranks do not agree on {subject}: rank 0 {first}, rank {rank} {other}. Nothing was sent; make "
                    f"the shapes equal (pad_across_processes does){way_out} or call the same collective on every rank"
                )
    return [given for _, given in everyone]


def describe_leaves(data: Any) -> list[str]:
    """Return, for each leaf, dtype and shape of a tensor in words, or the class of anything else."""
    return [_describe(leaf) for leaf in leaves(data, is_leaf=is_tensor)]


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"has {_dtype(leaf)} {tuple(leaf.shape) or (1,)}"
    return f"has a {type(leaf).__name__}"


def describe_rows(data: Any, num_samples: int | None) -> list[str]:
    """Return the same where the first dimension may differ: rows per sample, or any number where that is None."""
    return [_describe_rows(leaf, num_samples) for leaf in leaves(data, is_leaf=is_tensor)]


def _describe_rows(leaf: Any, num_samples: int | None) -> str:
    if not isinstance(leaf, Tensor):
        return _describe(leaf)
    if num_samples is None:
        return f"has {_dtype(leaf)} with {max(1, leaf.ndim)} dimension(s)"
    tail = tuple(leaf.shape[1:])
    rows = leaf.shape[0] if leaf.ndim else 1
    if leaf.ndim and num_samples and rows % num_samples == 0:
        return f"has {_dtype(leaf)} with {rows // num_samples} row(s) of {tail} for each sample"
    return f"has {_dtype(leaf)} with {rows} row(s) of {tail} for {num_samples} samples"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
