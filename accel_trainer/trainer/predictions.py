"""Predictions of all ranks in the order of the samples, without padding, in time linear in their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.tree import leaves, map_leaves

__all__ = ["PAD_INDEX", "concat_steps", "gather_steps", "to_numpy", "trim_rows"]

PAD_INDEX = -100
"""Padding of predictions and labels of different lengths; the value that losses ignore."""

# Rows are exchanged in pieces of about this size, so that the device never holds all predictions of all ranks.
_PIECE_BYTES = 64 * 2**20


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def trim_rows(data: Any, size: int, keep: int) -> Any:
    """Return `data` with tensors of `size` rows trimmed to the first `keep`; other leaves stay as they are."""
    if keep == size:
        return data

    def trim(leaf: Any) -> Any:
        return leaf[:keep] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size else leaf

    return map_leaves(trim, data, is_leaf=_is_tensor)


def to_numpy(data: Any) -> Any:
    """Return `data` with tensors as numpy arrays; bfloat16, which numpy lacks, becomes float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()

    return map_leaves(convert, data, is_leaf=_is_tensor)


@dataclass(frozen=True, slots=True)
class _LeafSpec:
    """One tensor of a prediction, over all steps of one rank."""

    dtype: torch.dtype
    tail: tuple[int, ...]
    """Sizes after dim 0, the largest of any step."""
    rows: tuple[int, ...] = field(default=())
    """Rows of each step."""


def _spec_of(steps: Sequence[Tensor]) -> _LeafSpec:
    ndim = max(step.ndim for step in steps)
    if any(step.ndim != ndim for step in steps):
        raise ConfigError(
            f"predictions have {sorted({step.ndim for step in steps})} dimensions in different batches, and they are "
            "joined along the first; return the same number for each from the model or preprocess_logits_for_metrics"
        )
    tail = tuple(max(step.shape[dim] for step in steps) for dim in range(1, ndim))
    return _LeafSpec(steps[0].dtype, tail, tuple(step.shape[0] for step in steps))


def _merge(specs: Sequence[_LeafSpec]) -> _LeafSpec:
    """Return the spec of the joined rows of all ranks; its `rows` has the sum over steps of each rank."""
    ndim = max(len(spec.tail) for spec in specs)
    tail = tuple(max(spec.tail[dim] for spec in specs if len(spec.tail) > dim) for dim in range(ndim))
    return _LeafSpec(specs[0].dtype, tail, tuple(sum(spec.rows) for spec in specs))


def _new_full(rows: int, spec: _LeafSpec, device: torch.device | str) -> Tensor:
    fill = {torch.bool: False, torch.uint8: 0}.get(spec.dtype, PAD_INDEX)
    return torch.full((rows, *spec.tail), fill, dtype=spec.dtype, device=device)


def _write(target: Tensor, start: int, rows: Tensor) -> None:
    """Copy `rows` into `target` from row `start` on; the rest of the other dimensions is left as it is."""
    corner = (slice(start, start + rows.shape[0]), *(slice(0, size) for size in rows.shape[1:]))
    target[corner] = rows


def _join(steps: Sequence[Tensor], spec: _LeafSpec, device: torch.device | str) -> Tensor:
    """Concatenate steps along dim 0, padding the others. One pass: each element is copied once."""
    if all(tuple(step.shape[1:]) == spec.tail for step in steps):
        return torch.cat([step.to(device) for step in steps]) if len(steps) > 1 else steps[0].to(device)
    joined = _new_full(sum(spec.rows), spec, device)
    start = 0
    for step in steps:
        _write(joined, start, step)
        start += step.shape[0]
    return joined


def _rows_of(leaf: Any) -> Tensor:
    """Return a leaf as a tensor with a row dimension: a model's scalar output is one row."""
    if not isinstance(leaf, Tensor):
        raise ConfigError(
            f"the model returned a {type(leaf).__name__} among its predictions, and only tensors can be gathered; "
            "name its key in ignore_keys, or in config.keys_to_ignore_at_inference"
        )
    return leaf.reshape(1) if leaf.ndim == 0 else leaf


def _columns(steps: Sequence[Any]) -> list[list[Tensor]]:
    """Return the tensors of all steps, for each leaf of the structure."""
    if all(isinstance(step, Tensor) for step in steps):
        return [[_rows_of(step) for step in steps]] if steps else []
    rows = [[_rows_of(leaf) for leaf in leaves(step, is_leaf=_is_tensor)] for step in steps]
    return [list(column) for column in zip(*rows, strict=True)]


def _rebuild(structure: Any, values: Sequence[Any]) -> Any:
    iterator = iter(values)
    return map_leaves(lambda leaf: next(iterator), structure, is_leaf=_is_tensor)


def concat_steps(steps: Sequence[Any], device: torch.device | str = "cpu") -> Any:
    """Join this rank's steps: tensors with the rows of all steps, padded with -100 where sizes differ."""
    columns = _columns(steps)
    return _rebuild(steps[0], [_join(column, _spec_of(column), device) for column in columns])


def gather_steps(steps: Sequence[Any], accelerator: Accelerator, device: torch.device | str = "cpu") -> Any:
    """Return the rows of every rank in sample order: step by step, and within a step rank by rank.

    Collective; every rank gets the result. A rank may come with fewer steps than others, or with none.

    Args:
        steps: this rank's structures of tensors, one for each step, already without padding.
        device: where the result is built.
    """
    fault_point("eval.gather")
    if accelerator.num_processes == 1:
        return concat_steps(steps, device)
    columns = _columns(steps)
    own_specs = [_spec_of(column) for column in columns]
    structure = map_leaves(lambda leaf: None, steps[0], is_leaf=_is_tensor) if steps else None
    offers = accelerator.gather_object([(bool(steps), structure, own_specs)])
    _, structure, known = next((offer for offer in offers if offer[0]), offers[0])
    gathered = []
    for index, example in enumerate(known):
        by_rank = [specs[index] if has_steps else _LeafSpec(example.dtype, ()) for has_steps, _, specs in offers]
        merged = _merge(by_rank)
        own = _join(columns[index], own_specs[index], "cpu") if columns else _new_full(0, merged, "cpu")
        gathered.append(_gather_rows(own, by_rank, merged, accelerator, device))
    return _rebuild(structure, gathered)


def _gather_rows(
    own: Tensor, by_rank: Sequence[_LeafSpec], merged: _LeafSpec, accelerator: Accelerator, device: torch.device | str
) -> Tensor:
    """Return one leaf's rows of every rank. Collective."""
    positions = _positions([spec.rows for spec in by_rank])
    result = _new_full(sum(merged.rows), merged, device)
    piece = max(1, _PIECE_BYTES // max(1, math.prod(merged.tail) * result.element_size()))
    for start in range(0, max(merged.rows), piece):
        stop = min(start + piece, max(merged.rows))
        sent = _new_full(stop - start, merged, accelerator.device)
        _write(sent, 0, own[start:stop])
        received = accelerator.gather(sent).view(len(positions), stop - start, *merged.tail)
        for rows, of_rank in zip(received, positions, strict=True):
            wanted = torch.from_numpy(of_rank[start:stop]).to(result.device)
            if len(wanted):
                result[wanted] = rows[: len(wanted)].to(result.device)
    return result


def _positions(rows_by_rank: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the position of each row in the joined result, for each rank."""
    table = np.zeros((max(map(len, rows_by_rank)), len(rows_by_rank)), dtype=np.int64)
    for rank, rows in enumerate(rows_by_rank):
        table[: len(rows), rank] = rows
    starts = (table.cumsum() - table.ravel()).reshape(table.shape)
    return [
        np.concatenate([first + np.arange(count) for first, count in zip(starts[:, rank], table[:, rank], strict=True)])
        for rank in range(len(rows_by_rank))
    ]
