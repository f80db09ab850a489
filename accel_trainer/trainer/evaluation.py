"""Evaluation and prediction: one pass, linear in the samples, every sample exactly once on any number of ranks.

Each rank keeps what it predicted, and the ranks exchange it at the end (after every batch with `batch_eval_metrics` or
`eval_do_concat_batches=False`). transformers 5.23 gathers and re-concatenates everything at every step, in
quadratic time (EvalLoopContainer.add, trainer_pt_utils.py:376).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from transformers.utils import logging

from accel_trainer.config import LossImplementation
from accel_trainer.runtime.collectives import gather_object
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.runtime.tensor_trees import is_tensor, send_to_device
from accel_trainer.runtime.uneven_gather import Column, gather_steps
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.compile import reuses_outputs
from accel_trainer.techniques.chunked_loss import find_chunked_loss
from accel_trainer.trainer.arguments.training_arguments import setting
from accel_trainer.trainer.loss import counts_by_rows
from accel_trainer.tree import map_leaves

if TYPE_CHECKING:
    from accel_trainer import Trainer

# Upstream's name: users set the verbosity of these lines through transformers' own switch.
logger = logging.get_logger("transformers.trainer")


class EvaluationPreempted(BaseException):
    """A signal ends the run in the middle of an evaluation, on all ranks after the same batch."""

    # No Exception: an evaluate() of the user's that catches those must not go on where the other ranks end.


@dataclass(slots=True)
class _Results:
    """Results of one kind (losses, predictions, labels, inputs) on this rank, one entry for each step."""

    lists_are_columns: bool = True
    """Whether a list has one entry for each sample; else one of tensors is a structure of several results."""
    steps: list[Any] = field(default_factory=list)
    num_offloaded: int = 0
    num_lent: int = 0
    """Steps since the last one with a result of this rank, of which it has no samples."""

    def add(self, step: Any) -> None:
        """Keep a step's result; None means that there is none of this kind."""
        if step is not None:
            kept = _mark_columns(step, self.lists_are_columns)
            # The rows of ranks are put in order by the numbers of their steps.
            self.steps += [*(_without_rows(kept) for _ in range(self.num_lent)), kept]
            self.num_lent = 0

    def offload(self) -> None:
        """Move the steps that came since the last call to the CPU."""
        self.steps[self.num_offloaded :] = send_to_device(self.steps[self.num_offloaded :], "cpu")
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
        # A batch without labels has weight 0 and may have the loss 0/0.
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


_Batch = tuple[Any, int | None, bool]
"""The inputs, this rank's samples in them, and whether it is the last step.

None samples: not known. 0: the batch was lent to a rank that has none, so that it takes part in collective forwards.
"""


def _batches(dataloader: Any, rank: int, num_ranks: int) -> Iterator[_Batch]:
    """Yield this rank's batches. No row of a batch with samples is padding: the loader fills nothing up."""
    if not hasattr(dataloader, "without_filling"):
        # Not prepared by the Accelerator: every row counts, on every rank.
        iterator = iter(dataloader)
        upcoming = next(iterator, None)
        while upcoming is not None:
            current, upcoming = upcoming, next(iterator, None)
            yield current, find_batch_size(current), upcoming is None
        return
    with dataloader.without_filling():
        for inputs in dataloader:
            plan, samples = dataloader.rows, None
            if plan is not None:
                # A sampler of one's own may know its rank: the plan is then this rank's alone.
                samples = plan.rows[rank] if len(plan.rows) == num_ranks else plan.num_samples
            if samples is None or (samples and dataloader.yields_items):
                samples = find_batch_size(inputs)
            yield inputs, samples, plan is not None and plan.is_last


class _Pass:
    """One pass over an evaluation set."""

    def __init__(self, trainer: Trainer, description: str) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.keeps_predictions = not self.args.batch_eval_metrics or description == "Prediction"
        self.wants_losses = "loss" in self.args.include_for_metrics
        self.wants_inputs = "inputs" in self.args.include_for_metrics
        # What a collator makes a list of has one entry for each sample; a model's list is a structure, unless said.
        self.losses, self.labels, self.inputs = _Results(), _Results(), _Results()
        self.predictions = _Results(lists_are_columns=self.args.eval_use_gather_object)
        self._kinds = self.losses, self.predictions, self.labels, self.inputs
        self.mean_loss = _MeanLoss()
        self.num_samples = 0
        self.metrics: dict[str, Any] | None = None

    def step(self, model: nn.Module, batch: _Batch, loss_only: bool, ignore_keys: list[str] | None) -> None:
        """Predict one batch and keep the results, unless it was lent. Collective with `batch_eval_metrics`."""
        inputs, samples, is_last = batch
        targets = self._targets(inputs)
        loss, logits, labels = self._predict(model, inputs, loss_only, ignore_keys)
        if samples is None:
            samples = find_batch_size(logits) or 1
        self.num_samples += samples
        if samples:
            logits = self._preprocess(logits, labels)
        if samples and loss is not None:
            self.mean_loss.add(loss, self._weight(inputs, targets, samples))
        losses = loss.detach().mean().expand(samples) if self.wants_losses and loss is not None else None
        if self.args.batch_eval_metrics:
            self._batch_metrics(inputs if samples else None, losses, logits, labels, is_last)
        if not samples:
            self._note_lent()
        elif self.keeps_predictions:
            self._keep(inputs, losses, logits, labels)

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None) -> Any:
        """Return loss, logits and labels of one batch, in memory that the next batch leaves alone."""
        config = self.trainer.accelerator.config
        chunked = None if config.loss is LossImplementation.PLAIN else find_chunked_loss(model)
        if loss_only and config.parallel.sequence_size > 1 and isinstance(inputs, dict):
            inputs = {**inputs, "skip_logits": True}  # as upstream asks of models with liger's kernels
        # The model that makes the loss may be inside of one that knows no such argument.
        with nullcontext() if chunked is None else setting(chunked, skips_logits=loss_only):
            loss, logits, labels = self.trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        if reuses_outputs(config.compile):
            # torch.compile's CUDA graphs write the next batch's results into the same memory.
            loss, logits = map_leaves(lambda leaf: leaf.clone() if is_tensor(leaf) else leaf, (loss, logits))
        return loss, logits, labels

    def _note_lent(self) -> None:
        for results in self._kinds:
            results.num_lent += 1

    def _preprocess(self, logits: Any, labels: Any) -> Any:
        preprocess = self.trainer.preprocess_logits_for_metrics
        return logits if logits is None or preprocess is None else preprocess(logits, labels)

    def _keep(self, inputs: Any, losses: Any, logits: Any, labels: Any) -> None:
        """Keep the results of one batch until the ranks exchange them."""
        self.losses.add(losses)
        self.predictions.add(logits)
        self.labels.add(labels)
        if self.wants_inputs:
            name = getattr(self.trainer.model, "main_input_name", "input_ids")
            self.inputs.add(self.trainer._prepare_input(inputs[name]))

    def _targets(self, inputs: Any) -> Any:
        """Return the labels over which the loss of a batch is a mean, where the batch has them by name."""
        if not isinstance(inputs, Mapping):
            return None
        names = ("shift_labels", "labels", *self.trainer.label_names)
        return next((inputs[name] for name in names if inputs.get(name) is not None), None)

    def _weight(self, inputs: Any, targets: Any, samples: int) -> Tensor | float:
        """Return how often the mean loss of a batch counts: by its label tokens, else by rows, else by samples."""
        if self.args.eval_loss_weighting == "batch" or not isinstance(targets, Tensor) or not targets.ndim:
            return float(samples)
        if counts_by_rows(self.trainer.model):
            return float(len(targets))
        if targets.is_floating_point():
            return float(targets.numel())
        shifts = self.trainer._loss_shifts_labels and "shift_labels" not in inputs
        return (targets[..., 1:] if shifts else targets).ne(-100).sum()

    def _batch_metrics(self, inputs: Any, losses: Any, logits: Any, labels: Any, is_last: bool) -> None:
        """Hand the global batch to `compute_metrics`. Collective; `inputs` is None where this rank's batch was lent."""
        trainer = self.trainer
        if trainer.compute_metrics is None or logits is None or labels is None:
            return

        def gather(step: Any, *, lists_are_columns: bool = True) -> Any:
            own = [] if inputs is None else [_mark_columns(step, lists_are_columns)]
            return gather_steps(own, trainer.accelerator.readers, self.args.device)

        extra: dict[str, Any] = {"losses": None, "inputs": None}
        if losses is not None:
            extra["losses"] = gather(losses)
        if self.wants_inputs:
            extra["inputs"] = gather(None if inputs is None else trainer._prepare_inputs(inputs))
        self.metrics = trainer.compute_metrics(
            EvalPrediction(
                predictions=gather(logits, lists_are_columns=self.args.eval_use_gather_object),
                label_ids=gather(labels),
                **extra,
            ),
            compute_result=is_last,
        )

    def offload(self) -> None:
        """Move this rank's results to the CPU."""
        for results in self._kinds:
            results.offload()

    def collect(self, results: _Results) -> Any:
        """Return all ranks' results of one kind in sample order as numpy arrays, or None. Collective."""
        readers = self.trainer.accelerator.readers
        # The most of any rank: one with fewer batches takes part in the exchange of each all the same.
        num_steps = max(gather_object([len(results.steps)], readers))
        if not num_steps:
            return None
        if self.args.eval_do_concat_batches:
            return to_numpy(gather_steps(results.steps, readers))
        return [to_numpy(gather_steps(results.steps[index : index + 1], readers)) for index in range(num_steps)]


@section("evaluation")
def run_evaluation(
    trainer: Trainer,
    model: nn.Module,
    dataloader: DataLoader,
    description: str,
    prediction_loss_only: bool | None,
    ignore_keys: list[str] | None,
    metric_key_prefix: str,
) -> EvalLoopOutput:
    """Evaluate or predict: rows in the samples' order, the loss their exact weighted mean. Collective."""
    args = trainer.args
    loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    logger.info(f"\n***** Running {description} *****")
    num_examples = f" = {trainer.num_examples(dataloader)}" if has_length(dataloader) else ": Unknown"
    logger.info(f"  Num examples{num_examples}")
    logger.info(f"  Batch size = {args.eval_batch_size}")
    model.eval()
    # Schedule-free optimizers evaluate with other weights than those at which they take gradients.
    if callable(getattr(trainer.optimizer, "eval", None)):
        trainer.optimizer.eval()
    trainer.callback_handler.eval_dataloader = dataloader
    evaluation, handler = _Pass(trainer, description), trainer.callback_handler
    # Each rank normalises its own batch: no collective, and no factor for the number of ranks.
    with setting(args, average_tokens_across_devices=False):
        readers = trainer.accelerator.readers
        for step, batch in enumerate(_batches(dataloader, readers.rank, readers.world_size), start=1):
            evaluation.step(model, batch, loss_only, ignore_keys)
            trainer.control = handler.on_prediction_step(args, trainer.state, trainer.control)
            if trainer.ends_evaluations and trainer.is_preempted_in_evaluation(dataloader):
                raise EvaluationPreempted
            if args.eval_accumulation_steps is not None and step % args.eval_accumulation_steps == 0:
                evaluation.offload()
    # As upstream (5.23, trainer.py:3048): `use_gather_object` of the arguments is for the first evaluation alone.
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    return _finish(trainer, evaluation, metric_key_prefix)


def _finish(trainer: Trainer, evaluation: _Pass, prefix: str) -> EvalLoopOutput:
    args = trainer.args
    predictions, labels = evaluation.collect(evaluation.predictions), evaluation.collect(evaluation.labels)
    metrics = evaluation.metrics
    has_metrics = trainer.compute_metrics is not None and predictions is not None and labels is not None
    if has_metrics and not args.batch_eval_metrics:
        extra = {
            "losses": evaluation.collect(evaluation.losses) if evaluation.wants_losses else None,
            "inputs": evaluation.collect(evaluation.inputs) if evaluation.wants_inputs else None,
        }
        with raise_together(trainer.accelerator.process, "compute_metrics()"):
            metrics = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **extra))
    loss = evaluation.mean_loss.value(trainer.accelerator, bool(args.logging_nan_inf_filter))
    results = {} if loss is None else {f"{prefix}_loss": loss}
    for key, value in denumpify_detensorize(dict(metrics or {})).items():
        results[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = value
    num_samples = sum(gather_object([evaluation.num_samples], trainer.accelerator.readers))
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=results, num_samples=num_samples)


def to_numpy(data: Any) -> Any:
    """Return `data` with tensors as numpy arrays; bfloat16, which numpy lacks, becomes float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()

    return map_leaves(convert, data, is_leaf=is_tensor)


def _mark_columns(step: Any, lists_are_columns: bool) -> Any:
    """Return a step's results with its lists as columns. Without `lists_are_columns`, one of tensors is a structure."""

    def mark(node: Any) -> Any:
        is_column = type(node) is list and (lists_are_columns or not _holds_tensors(node))
        return Column(node) if is_column else node

    return map_leaves(mark, step, is_leaf=lambda node: isinstance(node, Tensor) or type(node) is list)


def _without_rows(step: Any) -> Any:
    """Return results like those of a step, of no rows, which say nothing about the sizes of other dimensions."""

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.new_empty((0,) * max(1, leaf.ndim))
        return Column() if isinstance(leaf, Column) else leaf

    return map_leaves(empty, step, is_leaf=lambda node: isinstance(node, (Tensor, Column)))


def _holds_tensors(node: Any) -> bool:
    """Whether nested lists and tuples end in tensors."""
    return isinstance(node, Tensor) or (
        isinstance(node, (list, tuple)) and bool(node) and all(map(_holds_tensors, node))
    )
