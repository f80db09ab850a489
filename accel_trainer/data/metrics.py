"""Gathered outputs with every sample exactly once: without the rows that the loader's plan calls padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from torch import Tensor, atleast_1d, cat

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import gather, gather_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.uneven_gather import check_uneven_options, gather_known_rows, gather_unknown_rows
from accel_trainer.tree import leaves, map_leaves


def keep_one_for_each(data: Any, num_samples: int, full: int, seen: set[int]) -> Any:
    """Return `data` with values that were repeated for a `full` batch's samples cut to the `num_samples` of this one.

    They are not several rows of each sample where tensors of full steps had one for each: `seen`, which is added to.
    """
    if num_samples == full:
        seen.update(leaf.shape[0] for leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.ndim)
        return data
    per_sample = full // num_samples if num_samples and full % num_samples == 0 else None
    if full not in seen or (per_sample is not None and per_sample * full in seen):
        return data

    def cut(leaf: Any) -> Any:
        return leaf[:num_samples] if isinstance(leaf, Tensor) and leaf.shape[:1] == (full,) else leaf

    return map_leaves(cut, data)


def trim_gathered(
    data: Any,
    rows: BatchRows | None,
    process: ProcessContext,
    *,
    use_objects: bool = False,
    debug: bool = False,
    pad_index: float | None = None,
    as_samples: bool = False,
    has_items: bool = False,
    full: int | None = None,
) -> Any:
    """Gather from every rank the rows that are no padding, in the order of the samples.

    Collective: every rank calls it, once for each step.

    Args:
        data: tensors of equal shapes but for their first dimension, arrays, lists of other values or tuples of strings
            with one entry (or the same number of entries, in any order) for each sample, or nestings of them.
            `pad_index` or `as_samples` let all dimensions of tensors differ between ranks.
        rows: those of the loader's present batch; None gathers everything.
        use_objects: take `data` as picklable objects: a list with one entry for each sample gives one list over all
            ranks, a mapping of such lists one mapping for each rank.
        debug, pad_index, as_samples: as `gather` takes them.
        has_items: each step of a rank is one item of the dataset (`batch_size=None`), which may hold any number of
            rows. One exchange of shapes more.
        full: rows of a tensor that may hold one value, repeated for each sample of a full batch of a rank.

    Raises:
        ConfigError: `pad_index` or `as_samples` is given with the other one or with `use_objects`, a tensor has not the
            rows of an uneven step, or in a step that was filled up something has other than one row for each sample.
        ProcessGroupError: the ranks' tensors do not fit together.
    """
    if check_uneven_options(pad_index, as_samples) and use_objects:
        raise ConfigError(
            f"use_gather_object=True sends objects as they are, and pad_index={pad_index}, as_samples={as_samples} are "
            "for tensors; leave one of them out"
        )
    if rows is not None and len(rows.rows) != process.world_size:
        rows = None  # the sampler shards by rank itself: which rows are padding is not known
    if use_objects:
        return _gather_objects(data, rows, process)
    own_size = None if rows is None else rows.sizes[process.rank]

    def is_column(node: Any) -> bool:
        # A tuple of strings, one for each sample, is what `zip(*samples)` makes; other tuples are structures.
        is_tuple = type(node) is tuple and len(node) == own_size
        return _is_column(node) or (is_tuple and all(isinstance(entry, (str, bytes)) for entry in node))

    if not process.is_distributed:
        return map_leaves(lambda leaf: _alone(leaf, rows, process, as_samples), data, is_leaf=is_column)
    columns = list(leaves(data, is_leaf=is_column))
    tensors = [column for column in columns if isinstance(column, Tensor)]
    num_others = sum(column is not None for column in columns) - len(tensors)
    gathered = _gather_tensors(
        tensors,
        rows,
        process,
        debug=debug,
        beside=[f"has {num_others} value(s) that are no tensors"] if num_others else [],
        has_items=has_items,
        full=full,
        pad_index=pad_index,
        as_samples=as_samples,
    )
    merged = iter(_merge_columns(columns, gathered, rows, process, as_samples))
    return map_leaves(lambda _: next(merged), data, is_leaf=is_column)


def _gather_objects(data: Any, rows: BatchRows | None, process: ProcessContext) -> list[Any]:
    by_rank = gather_object([data], process)
    if rows is not None:
        by_rank = _counted([_keep_own(item, rows, rank) for rank, item in enumerate(by_rank)], rows)
    if all(type(item) in (list, tuple) for item in by_rank):
        return list(chain.from_iterable(by_rank))
    return by_rank


def _gather_tensors(
    tensors: list[Tensor],
    rows: BatchRows | None,
    process: ProcessContext,
    *,
    debug: bool,
    beside: Sequence[str],
    has_items: bool,
    full: int | None,
    **uneven: Any,
) -> Any:
    """Gather the valid rows of tensors that have one (or k) for each sample of a rank's batch. Collective."""
    is_uneven = check_uneven_options(**uneven)
    if rows is not None and (is_uneven or (has_items and max(rows.sizes) == 1)):
        # Nobody knows another rank's rows, so each drops its own padding: all of a batch that was lent to it.
        own = _keep_alike(list(map(atleast_1d, tensors)), rows, process)
        return gather(own, process, **uneven) if is_uneven else gather_unknown_rows(own, process)
    if is_uneven:
        return gather(tensors, process, **uneven)
    sizes = None if rows is None or rows.is_even else rows.sizes
    gathered = gather_known_rows(tensors, sizes, process, debug=debug, beside=beside, full=full)
    return gathered if rows is None else [_keep(column, rows.rows, rows.sizes) for column in gathered]


def _keep_alike(tensors: list[Tensor], rows: BatchRows, process: ProcessContext) -> list[Tensor]:
    """Keep this rank's valid rows; raise on every rank if one cannot. Collective in a step that was filled up."""
    kept, refused = tensors, None
    try:
        kept = [_keep_own(tensor, rows, process.rank) for tensor in tensors]
    except ConfigError as error:
        refused = str(error)
    if _is_filled_up(rows.rows, rows.sizes):
        refused = next(filter(None, gather_object([refused], process)), None)
    if refused is not None:
        raise ConfigError(refused)
    return kept


def _alone(leaf: Any, rows: BatchRows | None, process: ProcessContext, as_samples: bool) -> Any:
    if rows is not None:  # of a job that began with more ranks, whose last step was filled up
        leaf = _keep_own(leaf, rows, 0)
    if isinstance(leaf, Tensor):
        return gather(leaf, process, as_samples=as_samples)
    if isinstance(leaf, tuple) or (as_samples and _is_array(leaf)):
        return list(leaf)
    return leaf if leaf is None or isinstance(leaf, list) or _is_array(leaf) else [leaf]


def _merge_columns(
    columns: list[Any], gathered: list[Any], rows: BatchRows | None, process: ProcessContext, as_samples: bool
) -> list[Any]:
    """Return every column over all ranks: the gathered tensors, and the others, which travel as objects. Collective."""
    others = [column for column in columns if not isinstance(column, Tensor) and column is not None]
    by_rank = gather_object([others], process) if others else []
    if rows is not None:
        # After they were exchanged: what cannot be kept is then an error on every rank.
        by_rank = [[_keep_own(column, rows, rank) for column in own] for rank, own in enumerate(by_rank)]
    joined = (_join(_counted(pieces, rows), as_samples) for pieces in zip(*by_rank, strict=True))
    tensors = iter(gathered)
    return [
        None if column is None else next(tensors) if isinstance(column, Tensor) else next(joined) for column in columns
    ]


def _counted(pieces: Sequence[Any], rows: BatchRows | None) -> list[Any]:
    """Leave out what ranks without a valid row have computed on a batch that was lent to them, a mean for one."""
    if rows is None or all(_is_array(piece) or isinstance(piece, (list, tuple, Mapping)) for piece in pieces):
        return list(pieces)
    return [piece for piece, count in zip(pieces, rows.rows, strict=True) if count]


def _join(pieces: Sequence[Any], as_samples: bool) -> Any:
    """Concatenate the ranks' arrays, lists or tuples; of anything else, return one entry for each rank."""
    if all(map(_is_array, pieces)):
        return [row for piece in pieces for row in piece] if as_samples else np.concatenate(pieces)
    is_column = all(isinstance(piece, (list, tuple)) for piece in pieces)
    return [entry for piece in pieces for entry in piece] if is_column else list(pieces)


def _is_column(node: Any) -> bool:
    """A tensor, an array, or a list without tensors: one value for each sample."""
    return (
        isinstance(node, Tensor)
        or _is_array(node)
        or (type(node) is list and not any(isinstance(leaf, Tensor) for leaf in leaves(node)))
    )


def _is_array(node: Any) -> bool:
    return isinstance(node, np.ndarray) and node.ndim > 0


def _keep_own(data: Any, rows: BatchRows, shard: int) -> Any:
    """Keep the valid rows of one shard's own column, or of a mapping of columns."""
    if isinstance(data, Mapping):
        return map_leaves(lambda leaf: _keep_own(leaf, rows, shard), data, is_leaf=_is_column)
    return _keep(data, rows.rows[shard : shard + 1], rows.sizes[shard : shard + 1])


def _keep(column: Any, rows: Sequence[int], sizes: Sequence[int]) -> Any:
    """Keep the valid rows of each block of a column that is one block for each shard."""
    is_array, is_list = isinstance(column, (Tensor, np.ndarray)), isinstance(column, (list, tuple))
    if rows == sizes or not (is_array or is_list):
        return column
    slices = _valid_slices(len(column) if is_list or column.ndim else 0, rows, sizes)
    if slices is None:
        return column
    pieces = [column[piece] for piece in slices]
    if is_list:
        return type(column)(chain.from_iterable(pieces))
    join: Any = cat if isinstance(column, Tensor) else np.concatenate
    return pieces[0] if len(pieces) == 1 else join(pieces or [column[:0]])


def _valid_slices(length: int, rows: Sequence[int], sizes: Sequence[int]) -> list[slice] | None:
    """Return the valid rows of each shard; None where the length is no multiple of samples or of shards."""
    num_samples, num_shards = sum(sizes), len(sizes)
    if length not in (0, num_samples, num_shards) and _is_filled_up(rows, sizes):
        # Of several rows for each sample, nobody knows in which order they are: by sample, or all first ones first.
        raise ConfigError(
            f"{length} rows come from batches of {', '.join(map(str, sizes))} samples, of which {sum(rows)} count and "
            "even_batches=True has repeated the others: which rows are theirs is known where there is one for each "
            "sample. Leave even_batches off, its default, or gather something with one row for each sample"
        )
    if length and length % num_samples == 0:
        per_row = length // num_samples
    elif length and length % num_shards == 0:
        # One block for each shard that has nothing to do with its samples: a block stays or goes.
        per_row = length // num_shards
        rows, sizes = [min(1, count) for count in rows], [1] * num_shards
    else:
        return None
    begins = accumulate(sizes, initial=0)
    spans = zip(begins, rows, strict=False)  # one more begin than rows
    return [slice(begin * per_row, (begin + valid) * per_row) for begin, valid in spans if valid]


def _is_filled_up(rows: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a shard's batch holds samples that count and others that do not."""
    return any(0 < valid < size for valid, size in zip(rows, sizes, strict=True))
