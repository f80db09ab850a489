"""Gathered outputs with every sample exactly once: what the loader's plan says is padding is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, cat

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import gather, gather_known_rows, gather_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.uneven_gather import check_uneven_options, gather_unknown_rows
from accel_trainer.tree import leaves, map_leaves

__all__ = ["drop_padding", "keep_valid", "trim_gathered"]


def drop_padding(data: Any, rows: BatchRows, shard: int) -> Any:
    """Keep the valid rows of this shard's batch, or of anything that has one row (or k rows) for each of its samples.

    Tensors without a row for each sample, 0-d ones for instance, are kept whole.
    """
    if rows.rows[shard] == rows.sizes[shard]:
        return data
    return map_leaves(lambda leaf: _keep_own(leaf, rows, shard), data, is_leaf=_is_column)


def keep_valid(data: Any, rows: BatchRows) -> Any:
    """Keep exactly the valid rows of what was gathered from every shard, in the order of the shards.

    That order is the order of the samples. A leaf that has no row for each sample but one block for each shard (a loss
    per rank) keeps the blocks of the shards that had a sample.
    """
    if not rows.padded:
        return data
    return map_leaves(lambda leaf: _keep(leaf, rows.rows, rows.sizes), data, is_leaf=_is_column)


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
) -> Any:
    """Gather from every rank the rows that are no padding, in the order of the samples.

    Collective: every rank calls it, once for each step.

    Args:
        data: tensors of equal shapes but for their first dimension, arrays, lists of other values or tuples of strings
            with one entry for each sample, or nestings of them. `pad_index` or `as_samples` let other dimensions of
            tensors differ between ranks.
        rows: what the loader says of its present batch; None gathers everything.
        use_objects: take `data` as picklable objects: a list with one entry for each sample gives one list over all
            ranks, a mapping of such lists one mapping for each rank.
        debug: compare shapes over the ranks before any data moves.
        pad_index: fill other dimensions than the first with this value, up to the largest size over the ranks. One
            exchange of shapes more.
        as_samples: return a list in the place of each tensor: its rows over all ranks, each in the shape it had. One
            exchange of shapes more.
        has_items: each step of a rank is one item of the dataset (`batch_size=None`), which may hold any number of
            rows. One exchange of shapes more.

    Raises:
        ConfigError: `pad_index` or `as_samples` is given with the other one or with `use_objects`, or a tensor has not
            the rows of an uneven step.
        ProcessGroupError: with `debug`, the ranks' tensors do not fit together.
    """
    is_ragged = check_uneven_options(pad_index, as_samples)
    if is_ragged and use_objects:
        raise ConfigError(
            f"use_gather_object=True sends objects as they are, and pad_index={pad_index}, as_samples={as_samples} are "
            "for tensors; leave one of them out"
        )
    if rows is not None and len(rows.rows) != process.world_size:
        rows = None  # the sampler shards by rank itself: nobody can say what is padding
    if use_objects:
        if rows is not None:
            data = _keep_own(data, rows, process.rank)
        return gather_object(data, process)
    own = None if rows is None else rows.sizes[process.rank]

    def is_column(node: Any) -> bool:
        return _is_column(node) or _is_texts(node, own)

    if not process.is_distributed:
        return map_leaves(lambda leaf: _alone(leaf, process, as_samples), data, is_leaf=is_column)
    ragged: dict[str, Any] = {"pad_index": pad_index, "as_samples": as_samples}
    columns = list(leaves(data, is_leaf=is_column))
    tensors = [column for column in columns if isinstance(column, Tensor)]
    if has_items and rows is not None and max(rows.sizes) == 1:
        # A rank that was lent another's item has no rows of its own.
        own_tensors = tensors if rows.rows[process.rank] else [_without_rows(tensor) for tensor in tensors]
        gathered = (
            gather_unknown_rows(own_tensors, process) if not is_ragged else gather(own_tensors, process, **ragged)
        )
    else:
        if is_ragged:
            gathered = gather(tensors, process, **ragged)
        elif rows is None or rows.is_even:
            gathered = gather(tensors, process, debug=debug)
        else:
            gathered = gather_known_rows(tensors, rows.sizes, process, debug=debug)
        gathered = gathered if rows is None else [_keep(column, rows.rows, rows.sizes) for column in gathered]
    merged = iter(_merge_columns(columns, iter(gathered), rows, process, as_samples=as_samples))
    return map_leaves(lambda _: next(merged), data, is_leaf=is_column)


def _without_rows(tensor: Tensor) -> Tensor:
    return (tensor if tensor.ndim else tensor[None])[:0]


def _alone(leaf: Any, process: ProcessContext, as_samples: bool) -> Any:
    if isinstance(leaf, Tensor):
        return gather(leaf, process, as_samples=as_samples)
    if _is_array(leaf):
        return list(leaf) if as_samples else leaf
    if isinstance(leaf, tuple):
        return list(leaf)
    return leaf if leaf is None or isinstance(leaf, list) else [leaf]


def _merge_columns(
    columns: list[Any],
    gathered: Iterator[Any],
    rows: BatchRows | None,
    process: ProcessContext,
    *,
    as_samples: bool,
) -> list[Any]:
    """Return every column over all ranks. The tensors among them have been gathered, and are in `gathered`."""
    others = [column for column in columns if not isinstance(column, Tensor) and column is not None]
    if rows is not None:
        others = [_keep_own(column, rows, process.rank) for column in others]
    by_rank = gather_object([others], process) if others else []
    results: list[Any] = []
    position = 0
    for column in columns:
        if isinstance(column, Tensor):
            results.append(next(gathered))
        elif column is None:
            results.append(None)
        else:
            parts = [rank[position] for rank in by_rank]
            results.append(_join(parts, as_samples))
            position += 1
    return results


def _join(parts: list[Any], as_samples: bool) -> Any:
    """Join what the ranks have of a column that is no tensor; what is no column is one entry for each rank."""
    if all(map(_is_array, parts)):
        return [row for part in parts for row in part] if as_samples else np.concatenate(parts)
    is_column = all(isinstance(part, (list, tuple)) for part in parts)
    return [entry for part in parts for entry in part] if is_column else parts


def _is_column(node: Any) -> bool:
    """A tensor, an array, or a list without tensors: one value for each sample."""
    return (
        isinstance(node, Tensor)
        or _is_array(node)
        or (type(node) is list and not any(isinstance(leaf, Tensor) for leaf in leaves(node)))
    )


def _is_array(node: Any) -> bool:
    return isinstance(node, np.ndarray) and node.ndim > 0


def _is_texts(node: Any, num_samples: int | None) -> bool:
    """A tuple of strings, one for each sample, as `zip(*samples)` makes it; others are structures."""
    return type(node) is tuple and len(node) == num_samples and all(isinstance(entry, (str, bytes)) for entry in node)


def _keep_own(data: Any, rows: BatchRows, shard: int) -> Any:
    """Of one shard's own column, or of a mapping of columns, keep the valid rows."""
    if isinstance(data, Mapping):
        return drop_padding(data, rows, shard)
    return _keep(data, rows.rows[shard : shard + 1], rows.sizes[shard : shard + 1])


def _keep(column: Any, rows: Sequence[int], sizes: Sequence[int]) -> Any:
    """Of a column that is one block for each shard, keep the valid rows of each block."""
    if not isinstance(column, (Tensor, np.ndarray, list, tuple)) or rows == sizes:
        return column
    length = len(column) if not isinstance(column, (Tensor, np.ndarray)) or column.ndim else 0
    total = sum(sizes)
    if length and length % total == 0:
        per_row = length // total
    elif length and length % len(sizes) == 0:
        # One block for each shard that has nothing to do with its samples: whole blocks stay or go.
        per_row = length // len(sizes)
        rows, sizes = [min(1, count) for count in rows], [1] * len(sizes)
    else:
        return column
    parts: list[Any] = []
    begin = 0
    for valid, size in zip(rows, sizes, strict=True):
        if valid:
            parts.append(column[begin * per_row : (begin + valid) * per_row])
        begin += size
    if isinstance(column, (Tensor, np.ndarray)):
        join: Any = cat if isinstance(column, Tensor) else np.concatenate
        return column[:0] if not parts else parts[0] if len(parts) == 1 else join(parts)
    return type(column)(entry for part in parts for entry in part)
