"""Predictions of all ranks in the order of the samples, without padding, in time linear in their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.tree import leaves, map_leaves

__all__ = ["PAD_INDEX", "Gatherer", "concat_steps", "to_numpy", "trim_rows"]

PAD_INDEX = -100
"""Padding of predictions and labels of different lengths; the value that losses ignore."""

# Rows are exchanged in pieces of about this size, so that the device never holds all predictions of all ranks.
_PIECE_BYTES = 64 * 2**20


class Communicator(Protocol):
    """Members of an Accelerator that gather."""

    @property
    def num_processes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def gather(self, tensor: Any) -> Any: ...

    def gather_object(self, data: Any) -> Any: ...


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
    fill = False if spec.dtype is torch.bool else PAD_INDEX
    if spec.dtype is torch.uint8:
        fill = 0
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


class Gatherer:
    """Joins the steps of all ranks in sample order: step by step, and within a step rank by rank."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def gather(self, steps: Sequence[Any], device: torch.device | str = "cpu") -> Any:
        """Return the rows of every rank, on every rank. Collective; a rank may come with fewer steps, or none.

        Args:
            steps: this rank's structures of tensors, one for each step, already without padding.
            device: where the result is built.
        """
        fault_point("eval.gather")
        if self.communicator.num_processes == 1:
            return concat_steps(steps, device)
        columns = _columns(steps)
        specs = [_spec_of(column) for column in columns]
        structure = map_leaves(lambda leaf: None, steps[0], is_leaf=_is_tensor) if steps else None
        offers = self.communicator.gather_object([(bool(steps), structure, specs)])
        structure = next((offer[1] for offer in offers if offer[0]), None)
        width = max(len(offer[2]) for offer in offers)
        gathered = [self._gather_leaf(columns, specs, offers, index, device) for index in range(width)]
        return _rebuild(structure, gathered)

    def _gather_leaf(
        self, columns: list[list[Tensor]], specs: list[_LeafSpec], offers: Sequence[Any], index: int, device: Any
    ) -> Tensor:
        by_rank = [offer[2][index] if offer[0] else None for offer in offers]
        dtype = next(spec for spec in by_rank if spec is not None).dtype
        known = [spec if spec is not None else _LeafSpec(dtype, ()) for spec in by_rank]
        merged = _merge(known)
        own = _join(columns[index], specs[index], "cpu") if columns else _new_full(0, merged, "cpu")
        places = _destinations([spec.rows for spec in known])
        result = _new_full(sum(merged.rows), merged, device)
        row_bytes = max(1, int(np.prod(merged.tail)) * result.element_size())
        piece = max(1, _PIECE_BYTES // row_bytes)
        for start in range(0, max(merged.rows), piece):
            stop = min(start + piece, max(merged.rows))
            self._exchange(own, start, stop, merged, places, result)
        return result

    def _exchange(
        self, own: Tensor, start: int, stop: int, merged: _LeafSpec, places: list[np.ndarray], result: Tensor
    ) -> None:
        """Gather rows `start:stop` of each rank, and copy them to their positions in the result."""
        sent = _new_full(stop - start, merged, self.communicator.device)
        _write(sent, 0, own[start:stop])
        received = self.communicator.gather(sent).view(len(places), stop - start, *merged.tail)
        for rank, positions in enumerate(places):
            wanted = torch.from_numpy(positions[start:stop]).to(result.device)
            if len(wanted):
                result[wanted] = received[rank, : len(wanted)].to(result.device)


def _destinations(rows_by_rank: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the position of each row in the joined result, for each rank."""
    num_steps = max(len(rows) for rows in rows_by_rank)
    table = np.zeros((num_steps, len(rows_by_rank)), dtype=np.int64)
    for rank, rows in enumerate(rows_by_rank):
        table[: len(rows), rank] = rows
    starts = np.concatenate([[0], np.cumsum(table.reshape(-1))[:-1]]).reshape(table.shape)
    return [
        np.concatenate(
            [np.arange(first, first + count) for first, count in zip(starts[:, r], table[:, r], strict=True)]
        )
        for r in range(len(rows_by_rank))
    ]
