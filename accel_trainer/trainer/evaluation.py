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

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from transformers.utils import logging

from accel_trainer.trainer.predictions import gather_steps, to_numpy, trim_rows
from accel_trainer.trainer.running_trainer import EvaluatingTrainer
from accel_trainer.tree import map_leaves

__all__ = ["run_evaluation"]

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
