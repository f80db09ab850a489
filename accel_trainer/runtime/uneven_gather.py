"""Gathering rows of which ranks hold unequally many: of one step, or of many; and tensors of unequal shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat, zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collective_checks import (
    UNEVEN_HINT,
    check_same_call,
    describe_leaves,
    describe_rows,
    note_call,
    rows_for_each,
)
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.own_watch import names_failed_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.tensor_trees import pad_to, send_to_device
from accel_trainer.runtime.transport import gather_agreed, gather_tensor, map_tensors, tensors_of
from accel_trainer.runtime.whereabouts import mark_collectives
from accel_trainer.tree import leaves, map_leaves

mark_collectives(__file__)


def check_uneven_options(pad_index: float | None, as_samples: bool) -> bool:
    """Return whether tensors were declared to differ between ranks in shape; refuse both ways to return them."""
    if pad_index is not None and as_samples:
        raise ConfigError(
            f"got pad_index={pad_index} and as_samples=True; give pad_index to fill tensors up to one shape, or "
            "as_samples to get a list of tensors in their own shapes"
        )
    return as_samples or pad_index is not None


@names_failed_rank
def gather_known_rows(
    data: Any,
    sizes: Sequence[int] | None,
    process: ProcessContext,
    *,
    debug: bool = False,
    beside: Sequence[str] = (),
    full: int | None = None,
) -> Any:
    """Concatenate tensors whose first dimension differs between ranks, if at all, in a way that all know beforehand.

    Collective: every rank calls it, with the same `sizes`. What is returned is exact, or an error on every rank.

    Args:
        sizes: the first dimension on each rank; None where all have the same. A tensor whose first dimension is a
            multiple of it has that many rows for each. A 0-d tensor counts as one row of its rank.
        debug: compare this call through the job's store, too, before the ranks meet in a collective.
        beside: descriptions of what the ranks have to have alike besides.
        full: rows of a tensor that may hold one value, repeated for each sample of a full batch. It counts once for
            each of the `sizes`, where the ranks' rows do not fit together otherwise.

    Raises:
        ConfigError: a tensor does not have the rows that `sizes` promises.
        ProcessGroupError: those of another rank do not, or differ in number, dtype, dimensions or rows for a sample.
    """
    if sizes is not None and len(sizes) != process.world_size:
        raise ConfigError(f"got {len(sizes)} sizes for {process.world_size} ranks; give one for each rank")
    tensors = tensors_of("gather", data)
    own = None if sizes is None else sizes[process.rank]
    note_call("gather", process, checked=_describe_known(tensors, own, beside) if debug else None, way_out=UNEVEN_HINT)
    if not process.is_distributed:
        return map_tensors("gather", lambda tensor: gather_tensor(tensor, process), data)
    counts = [_count_rows(each, own) for each in tensors]
    shapes = list(map(_known_shapes, tensors, counts, repeat(sizes)))
    filled = [] if 0 in counts else list(map(_fill_up, tensors, shapes, repeat(0)))
    gathered = gather_agreed(filled, (_facts(tensors, counts), *beside), process)
    if gathered is None or 0 in counts:
        if full is None or own is None:
            _raise_difference(tensors, counts, own, beside, process)
        # All ranks are here. One alone could not tell a repeated value from several equal rows of each of its samples.
        cut = map_tensors("gather", partial(_cut_repeated, full=full, num_samples=own), data)
        return gather_known_rows(cut, sizes, process, debug=debug, beside=beside)
    joined = map(_join_blocks, gathered, shapes)
    return map_tensors("gather", lambda _: next(joined), data)


def _cut_repeated(tensor: Tensor, full: int, num_samples: int) -> Tensor:
    """Return a tensor of `full` equal rows with one for each sample, any other as it is."""
    is_repeated = tensor.shape[:1] == (full,) and torch.equal(tensor, tensor[:1].expand_as(tensor))
    return tensor[:num_samples] if is_repeated else tensor


def _count_rows(tensor: Tensor, num_samples: int | None) -> int | None:
    """Return the rows of a tensor for each sample; None where all ranks have the same shape."""
    return None if num_samples is None or tensor.ndim == 0 else rows_for_each(tensor, num_samples)


def _facts(tensors: Sequence[Tensor], counts: Sequence[int | None]) -> tuple[Any, ...]:
    """Return the facts that ranks have to have alike, in less time than the words for it take."""
    return tuple(
        (each.dtype, each.device.type, each.shape if count is None else (count, each.shape[1:]))
        for each, count in zip(tensors, counts, strict=True)
    )


def _raise_difference(
    tensors: Sequence[Tensor],
    counts: Sequence[int | None],
    num_samples: int | None,
    beside: Sequence[str],
    process: ProcessContext,
) -> NoReturn:
    """Raise on every rank where tensors do not fit. Collective."""
    try:
        check_same_call("gather", _describe_known(tensors, num_samples, beside), process, way_out=UNEVEN_HINT)
    finally:
        # Behind the exchanges: a rank that refused its tensors alone would leave the others waiting.
        if 0 in counts:
            shape = tuple(tensors[counts.index(0)].shape)
            raise ConfigError(
                f"a tensor of shape {shape} cannot be gathered: rank {process.rank} has {num_samples} rows in this "
                "step; give tensors with one row (or the same number of rows) for each sample of the batch"
            )
    raise AssertionError("facts differ, and descriptions do not")


def _describe_known(tensors: Sequence[Tensor], num_samples: int | None, beside: Sequence[str]) -> list[str]:
    return [*(describe_leaves(tensors) if num_samples is None else describe_rows(tensors, num_samples)), *beside]


Shapes = Sequence[tuple[int, ...]]
"""Of one tensor, on each rank."""


def _known_shapes(tensor: Tensor, per_sample: int | None, sizes: Sequence[int] | None) -> Shapes | None:
    """Return a tensor's shapes on all ranks; None where they are alike."""
    return None if per_sample is None else [(size * per_sample, *tensor.shape[1:]) for size in sizes or ()]


def _fill_up(tensor: Tensor, shapes: Shapes | None, fill: float) -> Tensor:
    """Return a tensor filled up to the largest of its shapes."""
    return tensor if shapes is None else pad_to(tensor.detach(), tuple(map(max, zip(*shapes, strict=True))), fill)


def _blocks(gathered: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return each rank's rows of a gathered tensor that was filled up along dim 0."""
    blocks = gathered.unflatten(0, (len(shapes), max(shape[0] for shape in shapes)))
    return [block[: shape[0]] for block, shape in zip(blocks, shapes, strict=True)]


def _join_blocks(gathered: Tensor, shapes: Shapes | None) -> Tensor:
    return gathered if shapes is None else torch.cat(_blocks(gathered, shapes))


@names_failed_rank
def gather_any_shapes(data: Any, process: ProcessContext, *, pad_index: float | None) -> Any:
    """Concatenate tensors that may differ between ranks in the size of any dimension.

    Collective: every rank calls it, with tensors of the same dtypes and numbers of dimensions. All shapes are exchanged
    first, as one object. `pad_index` fills all dimensions but the first up to the largest size over the ranks; None
    fills nothing: a tensor becomes a list with each of its rows over all ranks, in the shape that it had.
    """
    for tensor in tensors_of("gather", data):
        if tensor.dtype is not torch.bool:  # a mask may be of one shape beside what is filled with -100
            check_pad_value(pad_index or 0, tensor.dtype)
    return _gather_exchanged(data, describe_rows(tensors_of("gather", data), None), process, pad_index)


@names_failed_rank
def gather_unknown_rows(data: Any, process: ProcessContext) -> Any:
    """Concatenate tensors that differ in their first dimension alone, unknown beforehand; as `gather_any_shapes`."""
    tails = [f"has rows of {tuple(tensor.shape[1:])} and {tensor.dtype}" for tensor in tensors_of("gather", data)]
    return _gather_exchanged(data, tails, process, 0, way_out=UNEVEN_HINT)


def _gather_exchanged(
    data: Any, words: Sequence[str], process: ProcessContext, pad_index: float | None, way_out: str = ""
) -> Any:
    note_call("gather", process)
    own = [tuple(tensor.shape) or (1,) for tensor in tensors_of("gather", data)]
    shapes = iter(zip(*check_same_call("gather", words, process, value=own, way_out=way_out), strict=True))
    return map_tensors("gather", lambda tensor: _gather_shapes(tensor, next(shapes), process, pad_index), data)


def check_pad_value(pad_index: float, dtype: torch.dtype) -> None:
    """Refuse a value that a dtype cannot hold."""
    # On every rank before the exchange: one that has to pad would find out alone.
    if dtype.is_complex or (dtype.is_floating_point and not math.isfinite(pad_index)):
        return
    if dtype is torch.bool:
        fits, held = pad_index in (0, 1), "0 and 1"
    else:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        is_whole = dtype.is_floating_point or float(pad_index).is_integer()
        fits, held = is_whole and limits.min <= pad_index <= limits.max, f"{limits.min} to {limits.max}"
    if not fits:
        raise ConfigError(
            f"pad_index={pad_index} does not fit a tensor of {dtype}, which holds {held}; give another value, or "
            "gather a tensor of a wider dtype"
        )


def _gather_shapes(tensor: Tensor, shapes: Shapes, process: ProcessContext, pad_index: float | None) -> Any:
    if len({shape[1:] for shape in shapes}) > 1:  # known to every rank
        check_pad_value(pad_index or 0, tensor.dtype)
    blocks = _gather_blocks(tensor if tensor.ndim else tensor[None], shapes, process, pad_index or 0)
    if pad_index is None:
        tails = [tuple(map(slice, shape[1:])) for shape in shapes]
        return [row[tail] for block, tail in zip(blocks, tails, strict=True) for row in block]
    return torch.cat(blocks)


def _gather_blocks(tensor: Tensor, shapes: Shapes, process: ProcessContext, fill: float) -> list[Tensor]:
    """Return each rank's rows of a tensor that has `shapes[r]` on rank r, filled up to the largest of them."""
    return _blocks(gather_tensor(_fill_up(tensor, shapes, fill), process), shapes)


# --- the rows of many steps -------------------------------------------------------------------------------------------

PAD_INDEX = -100
"""Padding of predictions and labels of different lengths; the value that losses ignore."""

# Rows of many steps are sent in pieces of about this size: the device never holds all predictions of all ranks.
_PIECE_BYTES = 64 * 2**20


class Column(list[Any]):
    """A list with one entry for each sample, joined end to end with those of other steps: dicts of boxes, strings."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's part of a gather, without the data."""

    structure: Any
    """Of a step, with None for its leaves."""
    dtypes: list[torch.dtype | None]
    """Of each leaf; None for a column."""
    shapes: list[list[tuple[int, ...]]]
    """Of each leaf that is no column, one for each step."""
    num_dims: list[int]
    """Of each leaf; 0 for a column."""
    misfit: str | None


@names_failed_rank
def gather_steps(steps: Sequence[Any], process: ProcessContext, device: torch.device | str = "cpu") -> Any:
    """Return the rows of every rank in sample order: step by step, and within a step rank by rank.

    Collective; every rank gets the result. A rank may come with fewer steps than others, or with none.

    Args:
        steps: this rank's structures of tensors and columns, one for each step, already without padding. A scalar is
            one row. Dimensions after the first that differ are filled up with -100; booleans and bytes with 0.
        device: where tensors with rows are built; those in columns come on the CPU.

    Raises:
        ConfigError: a leaf is neither, tensors differ in their number of dimensions, or steps in their tensors: a list
            of tensors is meant as a column, perhaps.
    """
    fault_point("eval.gather")
    note_call("gather", process)
    own, everyone = _exchange_offers(steps, process)
    offers = [offer for offer in everyone if offer is not None]
    if not offers:
        return None
    gathered: list[Any] = []
    for index, dtype in enumerate(offers[0].dtypes):
        values = own[index] if own else ()
        if dtype is None:
            columns = [send_to_device(list(column), "cpu") for column in values]
            by_step = zip_longest(*check_same_call("gather", (), process, value=columns), fillvalue=())
            gathered.append([entry for step in by_step for entry in chain.from_iterable(step)])
        else:
            shapes = [[] if offer is None else offer.shapes[index] for offer in everyone]
            gathered.append(_gather_leaf(values, shapes, dtype, process, device))
    iterator = iter(gathered)
    return map_leaves(lambda _: next(iterator), offers[0].structure)


def _exchange_offers(steps: Sequence[Any], process: ProcessContext) -> tuple[list[Any], list[Any]]:
    """Return this rank's leaves, each over all steps, and each rank's offer: None without steps. Collective."""
    by_step = [[_as_leaf(leaf) for leaf in leaves(step, is_leaf=_is_leaf)] for step in steps]
    misfit = _find_misfit(steps, by_step) if process.is_distributed or len(steps) > 1 else None
    own = list(zip(*by_step, strict=True)) if misfit is None else []
    everyone = check_same_call("gather", (), process, value=_describe(steps, own, misfit) if steps else None)
    offers = [offer for offer in everyone if offer is not None]
    # Behind the exchange, of which a misfit is a part: all ranks refuse alike, and none waits for one that has raised.
    _refuse(offer.misfit for offer in offers)
    _refuse([_compare([offer.num_dims for offer in offers])])
    return own, everyone


def _is_leaf(node: Any) -> bool:
    return isinstance(node, (Tensor, Column))


def _as_leaf(leaf: Any) -> Tensor | Column:
    """Return a leaf as a column, or as a tensor with a row dimension: a model's scalar output is one row."""
    if isinstance(leaf, Tensor):
        return leaf.reshape(1) if leaf.ndim == 0 else leaf
    if isinstance(leaf, Column):
        return leaf
    raise ConfigError(
        f"the model returned a {type(leaf).__name__} among its predictions, and only tensors, and lists with one entry "
        "for each sample, can be gathered; name its key in ignore_keys, or in config.keys_to_ignore_at_inference"
    )


def _describe(steps: Sequence[Any], own: Sequence[Sequence[Any]], misfit: str | None) -> _Offer:
    structure = map_leaves(lambda leaf: None, steps[0], is_leaf=_is_leaf)
    dtypes = [values[0].dtype if isinstance(values[0], Tensor) else None for values in own]
    shapes = [[tuple(value.shape) for value in values if isinstance(value, Tensor)] for values in own]
    num_dims = [len(of_leaf[0]) if of_leaf else 0 for of_leaf in shapes]
    return _Offer(structure, dtypes, shapes, num_dims, misfit)


def _gather_leaf(
    steps: Sequence[Tensor],
    by_rank: Sequence[Sequence[tuple[int, ...]]],
    dtype: torch.dtype,
    process: ProcessContext,
    device: torch.device | str,
) -> Tensor:
    """Return the rows of one tensor, which has the shapes `by_rank[r]` in the steps of rank r. Collective."""
    tail = tuple(map(max, zip(*(shape[1:] for shapes in by_rank for shape in shapes), strict=True)))
    # -100 is no value of theirs.
    fill = 0 if dtype in (torch.bool, torch.uint8) else PAD_INDEX
    if not process.is_distributed:
        return _join(steps, tail, fill, device)
    own = _join(steps, tail, fill, "cpu") if steps else torch.empty((0, *tail), dtype=dtype)
    positions = _positions([[shape[0] for shape in shapes] for shapes in by_rank])
    longest = max(map(len, positions))
    result = torch.empty((sum(map(len, positions)), *tail), dtype=dtype, device=device)
    piece = max(1, _PIECE_BYTES // max(1, math.prod(tail) * result.element_size()))
    for start in range(0, longest, piece):
        targets = [rows[start : start + piece] for rows in positions]
        shapes = [(len(rows), *tail) for rows in targets]
        sent = own[start : start + piece].to(process.device)
        for rows, block in zip(targets, _gather_blocks(sent, shapes, process, fill), strict=True):
            result[torch.from_numpy(rows).to(result.device)] = block.to(result.device)
    return result


def _join(steps: Sequence[Tensor], tail: tuple[int, ...], fill: float, device: torch.device | str) -> Tensor:
    """Concatenate steps along dim 0, filling the others up to `tail`. One pass: each element is copied once."""
    if all(step.shape[1:] == tail for step in steps):
        return torch.cat([step.to(device) for step in steps]) if len(steps) > 1 else steps[0].to(device)
    joined = torch.full((sum(map(len, steps)), *tail), fill, dtype=steps[0].dtype, device=device)
    for step, rows in zip(steps, joined.split([len(step) for step in steps]), strict=True):
        rows[tuple(map(slice, step.shape))] = step
    return joined


def _positions(rows_by_rank: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the position of each row in the joined result, for each rank."""
    steps = [np.repeat(np.arange(len(rows)), np.asarray(rows, dtype=np.int64)) for rows in rows_by_rank]
    order = np.argsort(np.concatenate(steps), kind="stable")  # within a step, the ranks stay in their order
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    return np.split(positions, np.cumsum([len(each) for each in steps])[:-1])


_NO_STRUCTURE = (
    "predictions hold {}. Each step has to give the same tensors, in a list, too, with one row for each sample; set "
    "eval_use_gather_object=True if the list has one entry for each sample"
)


def _find_misfit(steps: Sequence[Any], by_step: Sequence[Sequence[Tensor | Column]]) -> str | None:
    """Return why steps with these leaves cannot be joined, or None."""
    unequal = next(filter(None, map(_unequal_rows, steps)), None)
    if unequal is not None:
        return _NO_STRUCTURE.format(f"a list of tensors with {', '.join(map(str, unequal))} rows in one step")
    return _compare([[leaf.ndim if isinstance(leaf, Tensor) else 0 for leaf in step] for step in by_step])


def _unequal_rows(node: Any) -> tuple[int, ...] | None:
    """Return the rows of the tensors in a list that is a structure, where they differ: it may be meant as a column."""
    if isinstance(node, Mapping):
        node = tuple(node.values())
    if not isinstance(node, (list, tuple)) or isinstance(node, Column):
        return None
    rows = tuple(len(entry) for entry in node if isinstance(entry, Tensor) and entry.ndim)
    if type(node) is list and len(set(rows)) > 1:
        return rows
    return next(filter(None, map(_unequal_rows, node)), None)


def _compare(num_dims: Sequence[Sequence[int]]) -> str | None:
    """Return how steps, or ranks, differ in their leaves, of which each has these numbers of dimensions; or None."""
    counts = sorted(set(map(len, num_dims)))
    if len(counts) > 1:
        return _NO_STRUCTURE.format(f"{', '.join(map(str, counts))} tensors in different steps")
    different = next((sorted(set(column)) for column in zip(*num_dims, strict=True) if len(set(column)) > 1), None)
    if different is None:
        return None
    return (
        f"predictions have {different} dimensions in different batches, and they are joined along the first; return "
        "the same number for each from the model or preprocess_logits_for_metrics"
    )


def _refuse(misfits: Iterable[str | None]) -> None:
    misfit = next(filter(None, misfits), None)
    if misfit is not None:
        raise ConfigError(misfit)
