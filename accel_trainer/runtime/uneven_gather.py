"""Gathering tensors whose shapes differ between ranks: in the first dimension, or in any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.collective_checks import UNEVEN_HINT, check_same_call, describe_rows, note_call
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rank_watch import names_failed_rank
from accel_trainer.runtime.tensor_trees import pad_to
from accel_trainer.runtime.transport import gather_tensor, map_tensors, tensors_of

__all__ = ["check_pad_value", "check_uneven_options", "gather_any_shapes", "gather_known_rows", "gather_unknown_rows"]


def check_uneven_options(pad_index: float | None, as_samples: bool) -> bool:
    """Return whether tensors were declared to differ between ranks in shape; refuse both ways to return them."""
    if pad_index is not None and as_samples:
        raise ConfigError(
            f"got pad_index={pad_index} and as_samples=True; give pad_index to fill tensors up to one shape, or "
            "as_samples to get a list of tensors in their own shapes"
        )
    return as_samples or pad_index is not None


@names_failed_rank
def gather_known_rows(data: Any, sizes: Sequence[int], process: ProcessContext, *, debug: bool = False) -> Any:
    """Concatenate tensors whose first dimension differs between ranks in a way that all ranks know beforehand.

    Collective: every rank calls it, with the same `sizes`. How many rows each tensor has for a sample is exchanged
    first: a rank that refused alone would leave the others waiting.

    Args:
        sizes: the first dimension on each rank. A tensor whose first dimension is a multiple of it has that many rows
            for each. A 0-d tensor counts as one row of its rank.
        debug: compare the other dimensions, the dtypes and the rows for each sample before any data moves.

    Raises:
        ConfigError: a tensor does not have the rows that `sizes` promises.
        ProcessGroupError: those of another rank do not, or have another number of rows for a sample; with `debug`, the
            ranks' tensors do not fit together in another way.
    """
    if len(sizes) != process.world_size:
        raise ConfigError(f"got {len(sizes)} sizes for {process.world_size} ranks; give one for each rank")
    checked = describe_rows(data, sizes[process.rank]) if debug else None
    note_call("gather", process, checked=checked, way_out=UNEVEN_HINT)
    _check_rows_for_each(tensors_of("gather_known_rows", data), sizes[process.rank], process)
    return map_tensors("gather_known_rows", lambda tensor: _gather_rows(tensor, sizes, process), data)


def _rows_for_each(tensor: Tensor, num_samples: int) -> int:
    """Return the rows of a tensor for each sample; 0 where that is no integer."""
    if tensor.ndim == 0:
        return 1
    if num_samples == 0:
        return int(tensor.shape[0] == 0)
    per_sample, remainder = divmod(tensor.shape[0], num_samples)
    return 0 if remainder else per_sample


def _check_rows_for_each(tensors: Sequence[Tensor], num_samples: int, process: ProcessContext) -> None:
    """Raise on every rank unless each tensor has as many rows for a sample on all of them. Collective."""
    if not process.is_distributed or not tensors:
        return
    own = [_rows_for_each(tensor, num_samples) for tensor in tensors]
    everyone = gather_tensor(torch.tensor(own), process).view(process.world_size, -1).tolist()
    for tensor, per_sample in zip(tensors, own, strict=True):
        if per_sample == 0:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be gathered: rank {process.rank} has {num_samples} "
                "rows in this step; give tensors with one row (or the same number of rows) for each sample of the batch"
            )
    for rank, other in enumerate(everyone):
        if other != own:
            leaf = next(index for index, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1])
            there = f"{other[leaf]} row(s)" if other[leaf] else "no whole number of rows"
            raise ProcessGroupError(
                f"tensor {leaf} cannot be gathered: it has {own[leaf]} row(s) for each sample of this step on rank "
                f"{process.rank}, and {there} on rank {rank}. Nothing was sent; give tensors with one row (or the same "
                "number of rows) for each sample of the batch"
            )


@names_failed_rank
def gather_any_shapes(data: Any, process: ProcessContext, *, pad_index: float | None) -> Any:
    """Concatenate tensors that may differ between ranks in the size of any dimension.

    Collective: every rank calls it, with tensors of the same dtypes and numbers of dimensions. All shapes are exchanged
    first, as one object. `pad_index` fills all dimensions but the first up to the largest size over the ranks; None
    fills nothing: a tensor becomes a list with each of its rows over all ranks, in the shape that it had.
    """
    tensors = tensors_of("gather", data)
    for tensor in tensors:
        check_pad_value(pad_index or 0, tensor.dtype)
    note_call("gather", process)
    own = [tuple(tensor.shape) or (1,) for tensor in tensors]
    shapes = iter(zip(*check_same_call("gather", describe_rows(tensors, None), process, value=own), strict=True))
    return map_tensors("gather", lambda tensor: _gather_shapes(tensor, next(shapes), process, pad_index), data)


@names_failed_rank
def gather_unknown_rows(data: Any, process: ProcessContext) -> Any:
    """Concatenate tensors that differ between ranks in their first dimension, by sizes that no rank knows beforehand.

    Collective: every rank calls it, with tensors of the same dtypes and other dimensions. All shapes are exchanged
    first, as one object.
    """
    tensors = tensors_of("gather", data)
    note_call("gather", process)
    own = [tuple(tensor.shape) or (1,) for tensor in tensors]
    tails = [f"has rows of {shape[1:]} and {tensor.dtype}" for tensor, shape in zip(tensors, own, strict=True)]
    shapes = iter(zip(*check_same_call("gather", tails, process, value=own, way_out=UNEVEN_HINT), strict=True))
    return map_tensors("gather", lambda tensor: _gather_shapes(tensor, next(shapes), process, 0), data)


def check_pad_value(pad_index: float, dtype: torch.dtype) -> None:
    """Refuse a value that an integer dtype cannot hold, before a rank that has to pad finds out alone."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return
    limits = torch.iinfo(dtype)
    if not limits.min <= pad_index <= limits.max:
        raise ConfigError(
            f"pad_index={pad_index} does not fit a tensor of {dtype}, which holds {limits.min} to {limits.max}; give "
            "another value, or gather a tensor of a wider dtype"
        )


def _gather_rows(tensor: Tensor, sizes: Sequence[int], process: ProcessContext) -> Any:
    if tensor.ndim == 0 or not process.is_distributed:
        return gather_tensor(tensor, process)
    per_row = _rows_for_each(tensor, sizes[process.rank])
    return _gather_shapes(tensor, [(size * per_row, *tensor.shape[1:]) for size in sizes], process, 0)


def _gather_shapes(
    tensor: Tensor, shapes: Sequence[tuple[int, ...]], process: ProcessContext, pad_index: float | None
) -> Any:
    """Gather a tensor that has `shapes[r]` on rank r."""
    if tensor.ndim == 0:
        tensor = tensor[None]
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    tensor = pad_to(tensor.detach(), largest, pad_index or 0)
    blocks = gather_tensor(tensor, process).unflatten(0, (len(shapes), largest[0]))
    if pad_index is None:
        return [row for block, shape in zip(blocks, shapes, strict=True) for row in block[tuple(map(slice, shape))]]
    return torch.cat([block[: shape[0]] for block, shape in zip(blocks, shapes, strict=True)])
