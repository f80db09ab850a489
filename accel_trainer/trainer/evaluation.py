"""Evaluation and prediction: one pass, linear in the samples, every sample exactly once on any number of ranks.

Each rank keeps what it predicted, and the ranks exchange it at the end (after every batch with `batch_eval_metrics` or
`eval_do_concat_batches=False`). transformers 5.23 gathers and re-concatenates everything at every step, in
quadratic time (EvalLoopContainer.add, trainer_pt_utils.py:376).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from transformers.utils import logging

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.trainer.running_trainer import EvaluatingTrainer
from accel_trainer.tree import leaves, map_leaves

__all__ = ["PAD_INDEX", "concat_steps", "gather_steps", "run_evaluation", "to_numpy", "trim_rows"]

# Upstream's name: users set the verbosity of these lines through transformers' own switch.
logger = logging.get_logger("transformers.trainer")


@dataclass(slots=True)
class _Results:
    """Results of one kind (losses, predictions, labels, inputs) on this rank, one entry for each step."""

    steps: list[Any] = field(default_factory=list)
    num_offloaded: int = 0

    def add(self, step: Any) -> None:
        """Keep a step's result; None means that there is none of this kind."""
        if step is not None:
            self.steps.append(step)

    def offload(self) -> None:
        """Move the steps that came since the last call to the CPU."""
        for index in range(self.num_offloaded, len(self.steps)):
            self.steps[index] = map_leaves(
                lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf,
                self.steps[index],
                is_leaf=lambda node: isinstance(node, Tensor),
            )
        self.num_offloaded = len(self.steps)


@dataclass(slots=True)
class _MeanLoss:
    """Weighted mean of batch losses. Values stay on the device until the end: a step waits for nothing."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | float] = field(default_factory=list)

    def add(self, loss: Tensor, weight: Tensor | float) -> None:
        """Count a batch's mean loss `weight` times."""
        self.losses.append(loss.detach() if loss.ndim == 0 else loss.detach().float().mean())
        self.weights.append(weight)

    def value(self, accelerator: Any, skip_non_finite: bool) -> float | None:
        """Return the mean over all ranks, of finite losses alone if asked, or None without a loss. Collective."""
        losses, weights = _to_vector(self.losses), _to_vector(self.weights)
        # A batch of padding rows, or without labels, has weight 0 and may have the loss 0/0.
        used = weights > 0
        finite = used & losses.isfinite()
        sums = torch.stack(
            [
                torch.tensor(float(len(self.losses)), dtype=torch.float64),
                (losses * weights)[finite].sum(),
                weights[finite].sum(),
                (losses * weights)[used & ~finite].sum(),
            ]
        )
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(accelerator.device), "sum").cpu()
        count, finite_sum, finite_weight, rest = sums.tolist()
        if not count:
            return None
        total = finite_sum if skip_non_finite and finite_weight else finite_sum + rest
        return total / finite_weight if finite_weight else math.nan


def _to_vector(values: Sequence[Tensor | float]) -> Tensor:
    """Return scalars as one fp64 vector on the CPU, with one copy from the device."""
    vector = torch.tensor([0.0 if isinstance(value, Tensor) else value for value in values], dtype=torch.float64)
    on_device = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    if on_device:
        vector[on_device] = torch.stack([values[index] for index in on_device]).cpu().double()  # type: ignore[misc]
    return vector


def _log_start(trainer: EvaluatingTrainer, dataloader: DataLoader, description: str) -> None:
    logger.info(f"\n***** Running {description} *****")
    if has_length(dataloader):
        logger.info(f"  Num examples = {trainer.num_examples(dataloader)}")
    else:
        logger.info("  Num examples: Unknown")
    logger.info(f"  Batch size = {trainer.args.eval_batch_size}")


@contextmanager
def _local_counts(args: Any) -> Iterator[None]:
    """Have each rank count and normalise its own batch: no collective, and no factor for the number of ranks."""
    average = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = average


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch of the loader, and its rows that are no padding."""

    inputs: Any
    rows: int | None
    """Valid rows, the first ones; None when the number of rows is not known."""
    is_last: bool

    def drop_filler(self, data: Any) -> Any:
        """Return data of this batch, without its rows where all of them are padding."""
        size = find_batch_size(self.inputs) if self.rows == 0 else None
        return data if size is None else trim_rows(data, size, 0)


def _batches(dataloader: DataLoader, rank: int) -> Iterator[_Batch]:
    """Yield the batches of this rank without the rows that are padding, by the loader's plan.

    A batch of padding only keeps its rows, of which 0 are valid: a sharded model's forward is collective, so that every
    rank runs one at every step.
    """
    if not hasattr(dataloader, "rows"):
        yield from _unplanned_batches(dataloader)
        return
    for inputs in dataloader:
        size, plan = find_batch_size(inputs), dataloader.rows
        if plan is None or size is None:
            yield _Batch(inputs, size, plan is not None and plan.is_last)
            continue
        valid = min(plan.rows[rank], size)
        yield _Batch(trim_rows(inputs, size, valid) if valid else inputs, valid, plan.is_last)


def _unplanned_batches(dataloader: DataLoader) -> Iterator[_Batch]:
    """Yield the batches of a loader that the Accelerator did not prepare: every row counts, on every rank."""
    iterator = iter(dataloader)
    upcoming = next(iterator, None)
    while upcoming is not None:
        current, upcoming = upcoming, next(iterator, None)
        yield _Batch(current, find_batch_size(current), upcoming is None)


class _Pass:
    """One pass over an evaluation set."""

    def __init__(self, trainer: EvaluatingTrainer, description: str) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.keeps_predictions = not self.args.batch_eval_metrics or description == "Prediction"
        self.wants_losses = "loss" in self.args.include_for_metrics
        self.wants_inputs = "inputs" in self.args.include_for_metrics
        self.losses, self.predictions, self.labels, self.inputs = _Results(), _Results(), _Results(), _Results()
        self.mean_loss = _MeanLoss()
        self.num_rows = 0
        self.metrics: dict[str, Any] | None = None

    def step(self, model: nn.Module, batch: _Batch, loss_only: bool, ignore_keys: list[str] | None) -> None:
        """Predict one batch and keep the results of its valid rows. Collective with `batch_eval_metrics`."""
        trainer, args = self.trainer, self.args
        weight = self._weight(batch)
        loss, logits, labels = trainer.prediction_step(model, batch.inputs, loss_only, ignore_keys=ignore_keys)
        rows = batch.rows if batch.rows is not None else find_batch_size(logits) or 1
        logits, labels = batch.drop_filler(logits), batch.drop_filler(labels)
        self.num_rows += rows
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        losses = None
        if loss is not None:
            self.mean_loss.add(loss, weight)
            losses = loss.detach().mean().expand(rows) if self.wants_losses else None
        if args.batch_eval_metrics:
            self._batch_metrics(batch, losses, logits, labels)
        if self.keeps_predictions:
            self.losses.add(losses)
            self.predictions.add(logits)
            self.labels.add(labels)
            if self.wants_inputs:
                name = getattr(trainer.model, "main_input_name", "input_ids")
                self.inputs.add(batch.drop_filler(trainer._prepare_input(batch.inputs[name])))

    def _weight(self, batch: _Batch) -> Tensor | float:
        """Return the label tokens of the batch if its loss is a mean over them, else its rows; 0 for one of padding."""
        if batch.rows == 0:
            return 0.0
        rows = float(batch.rows if batch.rows is not None else 1)
        if self.args.eval_loss_weighting == "batch":
            return rows
        labels = batch.inputs.get("labels") if isinstance(batch.inputs, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return rows
        if self.trainer._loss_shifts_labels:
            labels = batch.inputs.get("shift_labels", labels[..., 1:])
        return labels.ne(-100).sum()

    def _batch_metrics(self, batch: _Batch, losses: Any, logits: Any, labels: Any) -> None:
        """Hand the global batch to `compute_metrics`. Collective."""
        trainer, device = self.trainer, self.args.device
        if trainer.compute_metrics is None or logits is None or labels is None:
            return
        extra: dict[str, Any] = {"losses": None, "inputs": None}
        if self.wants_losses and losses is not None:
            extra["losses"] = gather_steps([losses], trainer.accelerator, device)
        if self.wants_inputs:
            inputs = trainer._prepare_inputs(batch.drop_filler(batch.inputs))
            extra["inputs"] = gather_steps([inputs], trainer.accelerator, device)
        self.metrics = trainer.compute_metrics(
            EvalPrediction(
                predictions=gather_steps([logits], trainer.accelerator, device),
                label_ids=gather_steps([labels], trainer.accelerator, device),
                **extra,
            ),
            compute_result=batch.is_last,
        )

    def offload(self) -> None:
        """Move this rank's results to the CPU."""
        for results in (self.losses, self.predictions, self.labels, self.inputs):
            results.offload()

    def collect(self, results: _Results) -> Any:
        """Return all ranks' results of one kind in sample order as numpy arrays, or None. Collective."""
        accelerator = self.trainer.accelerator
        num_steps = len(results.steps)
        if accelerator.num_processes > 1:
            num_steps = max(accelerator.gather_object([num_steps]))
        if not num_steps:
            return None
        if self.args.eval_do_concat_batches:
            return to_numpy(gather_steps(results.steps, accelerator))
        return [to_numpy(gather_steps(results.steps[index : index + 1], accelerator)) for index in range(num_steps)]

    def count_rows(self) -> int:
        """Return the number of samples over all ranks. Collective."""
        accelerator = self.trainer.accelerator
        return sum(accelerator.gather_object([self.num_rows])) if accelerator.num_processes > 1 else self.num_rows


def run_evaluation(
    trainer: EvaluatingTrainer,
    model: nn.Module,
    dataloader: DataLoader,
    description: str,
    prediction_loss_only: bool | None,
    ignore_keys: list[str] | None,
    metric_key_prefix: str,
) -> EvalLoopOutput:
    """Evaluate or predict with `trainer`; the body of `Trainer.evaluation_loop`. Collective.

    Returns:
        Predictions and labels in the order of the samples, one row for each; the loss is the exact weighted mean.
    """
    args = trainer.args
    loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    _log_start(trainer, dataloader, description)
    model.eval()
    if callable(getattr(trainer.optimizer, "eval", None)):
        trainer.optimizer.eval()
    trainer.callback_handler.eval_dataloader = dataloader
    evaluation = _Pass(trainer, description)
    with _local_counts(args):
        for step, batch in enumerate(_batches(dataloader, trainer.accelerator.process_index), start=1):
            evaluation.step(model, batch, loss_only, ignore_keys)
            trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
            if args.eval_accumulation_steps is not None and step % args.eval_accumulation_steps == 0:
                evaluation.offload()
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    return _finish(trainer, evaluation, metric_key_prefix)


def _finish(trainer: EvaluatingTrainer, evaluation: _Pass, prefix: str) -> EvalLoopOutput:
    args = trainer.args
    predictions, labels = evaluation.collect(evaluation.predictions), evaluation.collect(evaluation.labels)
    metrics = evaluation.metrics
    has_metrics = trainer.compute_metrics is not None and predictions is not None and labels is not None
    if has_metrics and not args.batch_eval_metrics:
        extra = {
            "losses": evaluation.collect(evaluation.losses) if evaluation.wants_losses else None,
            "inputs": evaluation.collect(evaluation.inputs) if evaluation.wants_inputs else None,
        }
        metrics = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **extra))
    loss = evaluation.mean_loss.value(trainer.accelerator, args.logging_nan_inf_filter)
    results = {} if loss is None else {f"{prefix}_loss": loss}
    for key, value in denumpify_detensorize(dict(metrics or {})).items():
        results[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = value
    return EvalLoopOutput(
        predictions=predictions, label_ids=labels, metrics=results, num_samples=evaluation.count_rows()
    )


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
