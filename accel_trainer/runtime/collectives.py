"""Collectives over nested structures of tensors: gather, reduce, broadcast, pad.

Every collective here takes any nesting of dicts, lists, tuples, namedtuples, dataclasses and mapping classes, returns
the same nesting, and gives the same shapes on one process as on many. Tensors may be non-contiguous and of any dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.errors import CannotPadNestedTensorWarning, ConfigError, did_you_mean
from accel_trainer.runtime.collective_checks import UNEVEN_HINT, describe_leaves, describe_rows, note_call
from accel_trainer.runtime.own_watch import names_failed_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.transport import (
    SENDABLE_DTYPES,
    all_gather,
    as_sendable_dtype,
    backend_takes_cpu,
    gather_tensors,
    map_tensors,
    tensors_of,
    to_sendable,
)
from accel_trainer.runtime.uneven_gather import check_pad_value, check_uneven_options, gather_any_shapes
from accel_trainer.runtime.whereabouts import mark_collectives

mark_collectives(__file__)


class ReduceOp(StrEnum):
    """How values of several ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    """The sum divided by the number of ranks. Integers and booleans give torch's default float dtype."""
    MIN = "min"
    MAX = "max"
    PROD = "prod"
    NONE = "none"
    """No reduction and no communication: each rank keeps its own value."""


@names_failed_rank
def gather(
    data: Any, process: ProcessContext, *, debug: bool = False, pad_index: float | None = None, as_samples: bool = False
) -> Any:
    """Concatenate each tensor over the ranks, along dimension 0, in the order of the ranks.

    Collective: every rank calls it, with tensors of the same shapes and dtypes; a 0-d one counts as one of shape (1,).
    Where shapes may differ between ranks, `pad_index` or `as_samples` says so, and shapes are exchanged first.

    Args:
        debug: compare shapes and dtypes over the ranks before any data moves.
        pad_index: fill other dimensions than the first with this value, up to the largest size over the ranks.
        as_samples: return a list in the place of each tensor: its rows over all ranks, each in the shape it had.

    Returns:
        The same nesting; shape (world_size * n, ...) for a tensor of shape (n, ...).

    Raises:
        ConfigError: a leaf is no tensor (`gather_object` takes anything), or `pad_index` meets `as_samples`.
        ProcessGroupError: with `debug`, the ranks do not have the same shapes; with `pad_index` or `as_samples`, not
            the same dtypes and numbers of dimensions.
    """
    if check_uneven_options(pad_index, as_samples):
        return gather_any_shapes(data, process, pad_index=pad_index)
    note_call("gather", process, data, checked=describe_leaves(data) if debug else None, way_out=UNEVEN_HINT)
    gathered = iter(gather_tensors(tensors_of("gather", data), process))
    return map_tensors("gather", lambda _: next(gathered), data)


@names_failed_rank
def gather_object(data: Any, process: ProcessContext) -> list[Any]:
    """Collect picklable objects of all ranks into one list, in the order of the ranks. Collective: every rank calls it.

    Where every rank gave a list (or a tuple), return their concatenation; otherwise one entry for each rank, so that a
    dict stays a dict. The same on one process as on many.
    """
    objects = [data]
    if process.is_distributed:
        note_call("gather_object", process)
        objects = [None] * process.world_size
        dist.all_gather_object(objects, data, group=process.group)
    if all(type(item) in (list, tuple) for item in objects):
        return [entry for item in objects for entry in item]
    return objects


@names_failed_rank
def reduce(
    data: Any,
    process: ProcessContext,
    reduction: ReduceOp | str = ReduceOp.SUM,
    *,
    scale: float = 1.0,
    debug: bool = False,
) -> Any:
    """Reduce each tensor over the ranks; every rank gets the result.

    Collective unless `reduction` is "none": every rank calls it, with tensors of the same shapes and dtypes.

    Args:
        reduction: sum, mean, min, max, prod or none. The sum of booleans counts them (int64); the mean of integers and
            of booleans is a float of torch's default dtype; otherwise the dtype stays.
        scale: multiplied into the result.

    Raises:
        ConfigError: `reduction` is none of these, or a leaf is no tensor.
        ProcessGroupError: with `debug`, the ranks do not have the same shapes.
    """
    try:
        op = ReduceOp(reduction)
    except ValueError:
        known = [member.value for member in ReduceOp]
        raise ConfigError(
            f"unknown reduction {reduction!r}, expected one of {', '.join(known)}{did_you_mean(str(reduction), known)}"
        ) from None
    # "none" does not communicate: ranks need not call it equally often.
    if op is not ReduceOp.NONE:
        note_call(f"reduce({op.value})", process, data, checked=describe_leaves(data) if debug else None)

    def apply(tensor: Tensor) -> Tensor:
        reduced = tensor if op is ReduceOp.NONE else _reduce_tensor(tensor, process, op)
        return reduced if scale == 1.0 else reduced * scale

    return map_tensors("reduce", apply, data)


@names_failed_rank
def broadcast(data: Any, process: ProcessContext, from_process: int = 0, *, debug: bool = False) -> Any:
    """Return the tensors of one rank on every rank; `data` stays as it is.

    Collective: every rank calls it, with tensors of the same shapes and dtypes; only those of `from_process` count.

    Raises:
        ConfigError: a leaf is no tensor; `broadcast_object_list` takes anything.
        ProcessGroupError: with `debug`, the ranks do not have the same shapes.
    """
    note_call("broadcast", process, data, checked=describe_leaves(data) if debug else None)

    def apply(tensor: Tensor) -> Tensor:
        if not process.is_distributed:
            return tensor
        # A copy: the collective writes into what it is given, and `data` stays as it is.
        wire = to_sendable(tensor, process).clone(memory_format=torch.contiguous_format)
        dist.broadcast(as_sendable_dtype(wire), group=process.group, group_src=from_process)
        return wire.to(tensor.device)

    return map_tensors("broadcast", apply, data)


@names_failed_rank
def broadcast_object_list(objects: list[Any], process: ProcessContext, from_process: int = 0) -> list[Any]:
    """Replace a list's entries by those of one rank, in place, and return it. Collective: lists of the same length."""
    if process.is_distributed and not process.is_alone:  # one that is alone has what others would send
        note_call("broadcast_object_list", process)
        dist.broadcast_object_list(objects, group=process.group, group_src=from_process)
    return objects


def broadcast_object(value: Any, process: ProcessContext, from_process: int = 0) -> Any:
    """Return one rank's picklable object on every rank. Collective: every rank calls it."""
    return broadcast_object_list([value], process, from_process)[0]


@names_failed_rank
def barrier(process: ProcessContext) -> None:
    """Wait until every rank is here. Collective; returns at once on one process."""
    if process.is_distributed:
        note_call("wait_for_everyone", process)
        dist.barrier()


@names_failed_rank
def scatter_objects(objects: Sequence[Any] | None, process: ProcessContext, from_process: int = 0) -> Any:
    """Return this rank's entry of `objects`, which counts on `from_process` only. Collective."""
    if not process.is_distributed:
        assert objects is not None
        return objects[0]
    mine: list[Any] = [None]
    given = None if objects is None else list(objects)
    dist.scatter_object_list(mine, given, group=process.group, group_src=from_process)
    return mine[0]


def all_gather_integers(values: Sequence[int], process: ProcessContext) -> Callable[[], list[list[int]]]:
    """Begin to gather as many integers of all ranks; return a function that waits for them. Collective."""
    if not process.is_distributed:
        return lambda: [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=None if backend_takes_cpu() else process.device)
    everyone = mine.new_empty((process.world_size * len(values),))
    work = all_gather(everyone, mine, group=process.group, async_op=True)

    @names_failed_rank
    def wait() -> list[list[int]]:
        work.wait()
        return everyone.view(process.world_size, -1).tolist()

    return wait


@names_failed_rank
def pad_across_processes(
    data: Any,
    process: ProcessContext,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    debug: bool = False,
) -> Any:
    """Pad one dimension of each tensor to its largest size over the ranks, so that the tensors can be gathered.

    Collective: every rank calls it. One exchange of sizes for the whole nesting.

    Args:
        dim: the dimension to pad; a tensor that does not have it is left alone, and nested tensors with a warning.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.
        debug: compare the number of tensors, their dtypes and dimensions over the ranks before any data moves.

    Raises:
        ConfigError: a leaf is no tensor, or its dtype cannot hold `pad_index`.
        ProcessGroupError: with `debug`, the ranks do not have tensors of the same kinds.
    """
    tensors = tensors_of("pad_across_processes", data)
    if any(tensor.is_nested for tensor in tensors):
        warnings.warn(
            "pad_across_processes got a nested tensor, which it leaves as it is; pad it with to_padded_tensor() first",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return data
    if not process.is_distributed:
        return data
    # Before the exchange, on every rank: those that have to pad would find out alone, and leave the others waiting.
    for tensor in tensors:
        check_pad_value(pad_index, tensor.dtype)
    note_call("pad_across_processes", process, checked=describe_rows(tensors, None) if debug else None)
    if not tensors:
        return data
    sizes = torch.tensor([tensor.shape[dim] if _has_dim(tensor, dim) else 0 for tensor in tensors])
    largest = to_sendable(sizes, process).clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=process.group)
    targets = iter(largest.tolist())
    return map_tensors("pad_across_processes", lambda t: _pad(t, dim, next(targets), pad_index, pad_first), data)


# A mean is a sum here: torch's AVG is for nccl alone, and integers have a mean that is none.
_TORCH_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PROD: dist.ReduceOp.PRODUCT,
}


def _reduce_tensor(tensor: Tensor, process: ProcessContext, op: ReduceOp) -> Tensor:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    is_counted = tensor.dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.MEAN)
    dtype = torch.int64 if is_counted else tensor.dtype
    reduced = tensor.detach()
    if process.is_distributed:
        # As bytes, which carry other dtypes elsewhere, values cannot be added up: a wider dtype carries them.
        carried = dtype
        if not (tensor.is_complex() or dtype in SENDABLE_DTYPES - {torch.bool}):
            carried = torch.float32 if is_float else torch.int64
        if op is ReduceOp.MEAN:  # whose sum may be more than the dtype holds
            carried = {torch.float16: torch.float32}.get(dtype, carried) if is_float else torch.int64
        wire = to_sendable(reduced.to(carried), process).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(wire, op=_TORCH_OPS[op], group=process.group)
        reduced = wire.to(tensor.device)
    if op is ReduceOp.MEAN:
        mean = reduced / process.world_size
        return mean.to(dtype) if is_float else mean
    return reduced.to(dtype)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _pad(tensor: Tensor, dim: int, target: int, pad_index: float, pad_first: bool) -> Tensor:
    if not _has_dim(tensor, dim) or tensor.shape[dim] == target:
        return tensor
    shape = list(tensor.shape)
    size, shape[dim] = shape[dim], target
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, target - size if pad_first else 0, size).copy_(tensor)
    return padded
