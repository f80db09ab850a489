"""Evaluation and prediction: one pass, linear in the samples, every sample exactly once on any number of ranks.

Each rank keeps what it predicted, and the ranks exchange it at the end (after every batch with `batch_eval_metrics` or
`eval_do_concat_batches=False`). transformers 5.23 gathers and re-concatenates everything at every step, in
quadratic time (EvalLoopContainer.add, trainer_pt_utils.py:376).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_pt_utils import find_batch_size, nested_detach
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from transformers.utils import logging

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import gather, gather_object
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.compile import reuses_outputs
from accel_trainer.trainer.loss_normalization import counting_locally, counts_by_rows
from accel_trainer.trainer.running_trainer import EvaluatingTrainer
from accel_trainer.tree import leaves, map_leaves

__all__ = ["PAD_INDEX", "EvaluationPreempted", "concat_steps", "gather_steps", "run_evaluation", "to_numpy"]

# Upstream's name: users set the verbosity of these lines through transformers' own switch.
logger = logging.get_logger("transformers.trainer")


class EvaluationPreempted(BaseException):
    """A signal ends the run in the middle of an evaluation, on all ranks after the same batch."""


@dataclass(slots=True)
class _Results:
    """Results of one kind (losses, predictions, labels, inputs) on this rank, one entry for each step."""

    lists_are_columns: bool = True
    """Whether a list has one entry for each sample; else one of tensors is a structure of several results."""
    steps: list[Any] = field(default_factory=list)
    num_offloaded: int = 0

    def add(self, step: Any) -> None:
        """Keep a step's result; None means that there is none of this kind."""
        if step is not None:
            self.steps.append(step if isinstance(step, Tensor) else _mark_columns(step, self.lists_are_columns))

    def offload(self) -> None:
        """Move the steps that came since the last call to the CPU."""
        for index in range(self.num_offloaded, len(self.steps)):
            self.steps[index] = _to_cpu(self.steps[index])
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


def _log_start(trainer: EvaluatingTrainer, dataloader: DataLoader, description: str) -> None:
    logger.info(f"\n***** Running {description} *****")
    if has_length(dataloader):
        logger.info(f"  Num examples = {trainer.num_examples(dataloader)}")
    else:
        logger.info("  Num examples: Unknown")
    logger.info(f"  Batch size = {trainer.args.eval_batch_size}")


_Batch = tuple[Any, int | None, bool]
"""The inputs, this rank's samples in them, and whether it is the last step.

None samples: not known. 0: the batch was lent to a rank that has none, so that it takes part in collective forwards.
"""


def _batches(dataloader: Any, rank: int, num_ranks: int) -> Iterator[_Batch]:
    """Yield this rank's batches. No row of a batch with samples is padding: the loader fills nothing up."""
    if not hasattr(dataloader, "without_filling"):
        yield from _unplanned_batches(dataloader)
        return
    plan, samples, is_last = None, None, False
    with dataloader.without_filling():
        for inputs in dataloader:
            if plan is None or plan is not dataloader.rows:  # nearly all steps share one plan
                plan = dataloader.rows
                is_last = plan is not None and plan.is_last
                samples = None
                if plan is not None:
                    # A sampler of one's own may know its rank: the plan is then this rank's alone.
                    samples = plan.rows[rank] if len(plan.rows) == num_ranks else plan.num_samples
            if samples is None or (samples and dataloader.yields_items):
                yield inputs, find_batch_size(inputs), is_last
            else:
                yield inputs, samples, is_last


def _unplanned_batches(dataloader: DataLoader) -> Iterator[_Batch]:
    """Yield the batches of a loader that the Accelerator did not prepare: every row counts, on every rank."""
    iterator = iter(dataloader)
    upcoming = next(iterator, None)
    while upcoming is not None:
        current, upcoming = upcoming, next(iterator, None)
        yield current, find_batch_size(current), upcoming is None


def _only(values: Any) -> Any:
    """Return the one entry of a tuple that has one; of a tensor, that would be a row."""
    return values[0] if isinstance(values, (tuple, list)) and len(values) == 1 else values


def _ignored_keys(trainer: EvaluatingTrainer, ignore_keys: list[str] | None) -> Collection[str] | None:
    """Return the outputs that are no predictions; None where a step of the user's own decides."""
    if getattr(trainer.prediction_step, "__func__", None) is not transformers.Trainer.prediction_step:
        return None
    if ignore_keys is not None:
        return ignore_keys
    config = getattr(trainer.model, "config", None)
    return () if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


class _Pass:
    """One pass over an evaluation set."""

    def __init__(self, trainer: EvaluatingTrainer, description: str, ignore_keys: list[str] | None) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.keeps_predictions = not self.args.batch_eval_metrics or description == "Prediction"
        self.wants_losses = "loss" in self.args.include_for_metrics
        self.wants_inputs = "inputs" in self.args.include_for_metrics
        # What a collator makes a list of has one entry for each sample; a model's list is a structure, unless said.
        self.losses, self.labels, self.inputs = _Results(), _Results(), _Results()
        self.predictions = _Results(lists_are_columns=self.args.eval_use_gather_object)
        self.ignored = _ignored_keys(trainer, ignore_keys)
        self.counts_by_rows = counts_by_rows(trainer.model)
        self.reuses_outputs = reuses_outputs(trainer.accelerator.config.compile)
        self.mean_loss = _MeanLoss()
        self.num_samples = 0
        self.metrics: dict[str, Any] | None = None

    def step(self, model: nn.Module, batch: _Batch, loss_only: bool, ignore_keys: list[str] | None) -> None:
        """Predict one batch and keep the results, unless it was lent. Collective with `batch_eval_metrics`."""
        trainer, args = self.trainer, self.args
        inputs, samples, is_last = batch
        targets, num_items = self._targets(inputs), None
        if self.ignored is None:
            loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        else:
            loss, logits, labels, num_items = self._predict(model, inputs, loss_only)
        if self.reuses_outputs:
            loss, logits = map_leaves(_copied, (loss, logits), is_leaf=_is_tensor)
        if samples is None:
            samples = find_batch_size(logits) or 1
        self.num_samples += samples
        if samples and logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        losses = None
        if samples and loss is not None:
            self.mean_loss.add(loss, self._weight(inputs, targets, num_items, samples))
        if loss is not None and self.wants_losses:
            losses = loss.detach().mean().expand(samples)
        if args.batch_eval_metrics:
            self._batch_metrics(inputs if samples else None, losses, logits, labels, is_last)
        if samples and self.keeps_predictions:
            self.losses.add(losses)
            self.predictions.add(logits)
            self.labels.add(labels)
            if self.wants_inputs:
                name = getattr(trainer.model, "main_input_name", "input_ids")
                self.inputs.add(trainer._prepare_input(inputs[name]))

    def _targets(self, inputs: Any) -> Any:
        """Return the labels over which the loss of a batch is a mean, where the batch has them by name."""
        if not isinstance(inputs, Mapping):
            return None
        names = ("shift_labels", "labels", *self.trainer.label_names)
        return next((target for target in map(inputs.get, names) if target is not None), None)

    def _weight(self, inputs: Any, targets: Any, num_items: Any, samples: int) -> Tensor | float:
        """Return how often the mean loss of a batch counts: by its label tokens, else by rows, else by samples.

        Args:
            num_items: what the loss was divided by, where the Trainer has counted it.
        """
        if self.args.eval_loss_weighting == "batch" or not isinstance(targets, Tensor) or not targets.ndim:
            return float(samples)
        if self.counts_by_rows:
            return float(len(targets))
        if targets.is_floating_point():
            return float(targets.numel())
        if num_items is not None:
            return num_items
        shifts = self.trainer._loss_shifts_labels and "shift_labels" not in inputs
        return (targets[..., 1:] if shifts else targets).ne(-100).sum()

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[Any, Any, Any, Any]:
        """Return loss, logits, labels as `transformers.Trainer.prediction_step` does, and the batch's number of items.

        Shorter than that by a tenth of a tiny model's forward: what holds for all batches is asked once (transformers
        5.23 reads settings of SageMaker in each step), and the items are counted once.
        """
        trainer, names = self.trainer, self.trainer.label_names
        inputs = trainer._prepare_inputs(inputs)
        targets = tuple(map(inputs.get, names))
        has_loss, num_items, loss = all(target is not None for target in targets), None, None
        if not names:  # models that compare what they are given, as CLIP does
            asked = inputs.get("return_loss")
            has_loss = bool(trainer.can_return_loss if asked is None else asked)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            if has_loss:
                num_items = trainer._get_num_items_in_batch([inputs], self.args.device)
                if loss_only and (self.args.use_liger_kernel or trainer.accelerator.config.parallel.sequence_size > 1):
                    inputs = {**inputs, "skip_logits": True}
                loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
                loss = loss.detach().mean() if loss.ndim else loss.detach()
            else:
                outputs = model(**inputs)
        if loss_only:
            return loss, None, None, num_items
        if isinstance(outputs, dict):
            dropped = {*(self.ignored or ()), *(["loss"] if has_loss else ())}
            logits = tuple(value for key, value in outputs.items() if key not in dropped)
        else:
            logits = outputs[1:] if has_loss else outputs
        logits, labels = nested_detach(logits), nested_detach(targets) if has_loss else None
        return loss, _only(logits), _only(labels), num_items

    def _batch_metrics(self, inputs: Any, losses: Any, logits: Any, labels: Any, is_last: bool) -> None:
        """Hand the global batch to `compute_metrics`. Collective; `inputs` is None where this rank's batch was lent."""
        trainer = self.trainer
        if trainer.compute_metrics is None or logits is None or labels is None:
            return

        def gather(step: Any, *, lists_are_columns: bool = True) -> Any:
            own = [] if inputs is None else [_mark_columns(step, lists_are_columns)]
            return gather_steps(own, trainer.accelerator, self.args.device)

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
        for results in (self.losses, self.predictions, self.labels, self.inputs):
            results.offload()

    def collect(self, results: _Results) -> Any:
        """Return all ranks' results of one kind in sample order as numpy arrays, or None. Collective."""
        accelerator = self.trainer.accelerator
        num_steps = max(gather_object([len(results.steps)], accelerator.readers))
        if not num_steps:
            return None
        if self.args.eval_do_concat_batches:
            return to_numpy(gather_steps(results.steps, accelerator))
        return [to_numpy(gather_steps(results.steps[index : index + 1], accelerator)) for index in range(num_steps)]

    def count_samples(self) -> int:
        """Return the number of samples over all ranks. Collective."""
        return sum(gather_object([self.num_samples], self.trainer.accelerator.readers))


def _hears_steps(callback: TrainerCallback) -> bool:
    """Whether a callback does something at each step of an evaluation: the progress bar does, most do not."""
    return getattr(callback.on_prediction_step, "__func__", None) is not TrainerCallback.on_prediction_step


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
    evaluation, handler = _Pass(trainer, description, ignore_keys), trainer.callback_handler
    hears_steps = any(map(_hears_steps, handler.callbacks))
    with counting_locally(args):
        readers = trainer.accelerator.readers
        for step, batch in enumerate(_batches(dataloader, readers.rank, readers.world_size), start=1):
            evaluation.step(model, batch, loss_only, ignore_keys)
            if hears_steps:
                trainer.control = handler.on_prediction_step(args, trainer.state, trainer.control)
            if trainer.ends_evaluations and trainer.is_preempted_in_evaluation(dataloader):
                raise EvaluationPreempted
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
        with raise_together(trainer.accelerator.process, "compute_metrics()"):
            metrics = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels, **extra))
    loss = evaluation.mean_loss.value(trainer.accelerator, args.logging_nan_inf_filter)
    results = {} if loss is None else {f"{prefix}_loss": loss}
    for key, value in denumpify_detensorize(dict(metrics or {})).items():
        results[key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"] = value
    return EvalLoopOutput(
        predictions=predictions, label_ids=labels, metrics=results, num_samples=evaluation.count_samples()
    )


PAD_INDEX = -100
"""Padding of predictions and labels of different lengths; the value that losses ignore."""

# Rows are exchanged in pieces of about this size, so that the device never holds all predictions of all ranks.
_PIECE_BYTES = 64 * 2**20


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _to_cpu(data: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, data, is_leaf=_is_tensor)


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
    tail = tuple(max(step.shape[dim] for step in steps) for dim in range(1, steps[0].ndim))
    return _LeafSpec(steps[0].dtype, tail, tuple(step.shape[0] for step in steps))


def _merge(specs: Sequence[_LeafSpec]) -> _LeafSpec:
    """Return the spec of the joined rows of all ranks; its `rows` has the sum over steps of each rank."""
    known = [spec.tail for spec in specs if spec.rows]
    tail = tuple(map(max, zip(*known, strict=True)))
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


class _Column(list[Any]):
    """A list with one entry for each sample, joined end to end with those of other steps: dicts of boxes, strings."""


def _mark_columns(step: Any, lists_are_columns: bool) -> Any:
    """Return a step's results with its lists as columns. Without `lists_are_columns`, one of tensors is a structure."""

    def mark(node: Any) -> Any:
        is_column = type(node) is list and (lists_are_columns or not _holds_tensors(node))
        return _Column(node) if is_column else node

    return map_leaves(mark, step, is_leaf=lambda node: isinstance(node, Tensor) or type(node) is list)


def _holds_tensors(node: Any) -> bool:
    """Whether nested lists and tuples end in tensors."""
    return isinstance(node, Tensor) or (
        isinstance(node, (list, tuple)) and bool(node) and all(map(_holds_tensors, node))
    )


def _is_leaf(node: Any) -> bool:
    return isinstance(node, (Tensor, _Column))


def _as_leaf(leaf: Any) -> Tensor | _Column:
    """Return a leaf as a column, or as a tensor with a row dimension: a model's scalar output is one row."""
    if isinstance(leaf, Tensor):
        return leaf.reshape(1) if leaf.ndim == 0 else leaf
    if isinstance(leaf, _Column):
        return leaf
    raise ConfigError(
        f"the model returned a {type(leaf).__name__} among its predictions, and only tensors, and lists with one entry "
        "for each sample, can be gathered; name its key in ignore_keys, or in config.keys_to_ignore_at_inference"
    )


def _leaves(step: Any) -> list[Tensor | _Column]:
    if isinstance(step, Tensor):
        return [_as_leaf(step)]
    return [_as_leaf(leaf) for leaf in leaves(step, is_leaf=_is_leaf)]


def _rebuild(structure: Any, values: Sequence[Any]) -> Any:
    iterator = iter(values)
    return map_leaves(lambda leaf: next(iterator), structure, is_leaf=_is_leaf)


def _unequal_rows(node: Any) -> tuple[int, ...] | None:
    """Return the rows of the tensors in a list that is a structure, where they differ: it may be meant as a column."""
    if isinstance(node, Mapping):
        node = tuple(node.values())
    if not isinstance(node, (list, tuple)) or isinstance(node, _Column):
        return None
    rows = tuple(len(entry) for entry in node if isinstance(entry, Tensor) and entry.ndim)
    if type(node) is list and len(set(rows)) > 1:
        return rows
    return next(filter(None, map(_unequal_rows, node)), None)


def _find_misfit(steps: Sequence[Any], by_step: Sequence[Sequence[Tensor | _Column]]) -> str | None:
    """Return why steps with these leaves cannot be joined, or None."""
    unequal = next(filter(None, map(_unequal_rows, steps)), None)
    if unequal is not None:
        return _NO_STRUCTURE.format(f"a list of tensors with {', '.join(map(str, unequal))} rows in one step")
    return _compare([[leaf.ndim if isinstance(leaf, Tensor) else 0 for leaf in step] for step in by_step])


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


_NO_STRUCTURE = (
    "predictions hold {}. Each step has to give the same tensors, in a list, too, with one row for each sample; set "
    "eval_use_gather_object=True if the list has one entry for each sample"
)


def _refuse(misfits: Iterable[str | None]) -> None:
    misfit = next(filter(None, misfits), None)
    if misfit is not None:
        raise ConfigError(misfit)


def concat_steps(steps: Sequence[Any], device: torch.device | str = "cpu") -> Any:
    """Join this rank's steps: tensors with the rows of all steps, padded with -100 where sizes differ; columns.

    Raises:
        ConfigError: steps do not fit together; see `gather_steps`.
    """
    by_step = list(map(_leaves, steps))
    if len(steps) > 1:
        _refuse([_find_misfit(steps, by_step)])
    joined = [
        list(chain.from_iterable(values)) if isinstance(values[0], _Column) else _join(values, _spec_of(values), device)
        for values in zip(*by_step, strict=True)
    ]
    return _rebuild(steps[0], joined)


def gather_steps(steps: Sequence[Any], accelerator: Accelerator, device: torch.device | str = "cpu") -> Any:
    """Return the rows of every rank in sample order: step by step, and within a step rank by rank.

    Collective; every rank gets the result. A rank may come with fewer steps than others, or with none.

    Args:
        steps: this rank's structures of tensors and columns, one for each step, already without padding.
        device: where tensors with rows are built; those in columns come on the CPU.

    Raises:
        ConfigError: a leaf is neither, tensors differ in their number of dimensions, or steps in their tensors: a list
            of tensors is meant as a column, perhaps.
    """
    fault_point("eval.gather")
    readers = accelerator.readers
    if not readers.is_distributed:
        return concat_steps(steps, device)
    by_step = list(map(_leaves, steps))
    misfit = _find_misfit(steps, by_step)
    own = list(zip(*by_step, strict=True)) if misfit is None else []
    own_specs = [None if isinstance(values[0], _Column) else _spec_of(values) for values in own]
    structure = map_leaves(lambda leaf: None, steps[0], is_leaf=_is_leaf) if steps else None
    offers = gather_object([(bool(steps), structure, own_specs, misfit)], readers)
    _refuse(offer[3] for offer in offers)
    _refuse([_compare([[len(spec.tail) + 1 if spec else 0 for spec in offer[2]] for offer in offers if offer[0]])])
    _, structure, known, _ = next((offer for offer in offers if offer[0]), offers[0])
    gathered: list[Any] = []
    for index, example in enumerate(known):
        values = own[index] if own else []
        if example is None:
            gathered.append(_gather_columns(values, readers))
        else:
            by_rank = [specs[index] if has_steps else _LeafSpec(example.dtype, ()) for has_steps, _, specs, _ in offers]
            gathered.append(_gather_rows(values, by_rank, readers, device))
    return _rebuild(structure, gathered)


def _gather_columns(own: Sequence[_Column], readers: ProcessContext) -> list[Any]:
    """Return one column's entries of every rank. Collective."""
    by_rank = gather_object([_to_cpu(list(own))], readers)
    return [entry for step in zip_longest(*by_rank, fillvalue=()) for column in step for entry in column]


def _gather_rows(
    steps: Sequence[Tensor], by_rank: Sequence[_LeafSpec], readers: ProcessContext, device: torch.device | str
) -> Tensor:
    """Return one tensor's rows of every rank. Collective."""
    merged = _merge(by_rank)
    own = _join(steps, by_rank[readers.rank], "cpu") if steps else _new_full(0, merged, "cpu")
    positions = _positions([spec.rows for spec in by_rank])
    result = _new_full(sum(merged.rows), merged, device)
    piece = max(1, _PIECE_BYTES // max(1, math.prod(merged.tail) * result.element_size()))
    for start in range(0, max(merged.rows), piece):
        stop = min(start + piece, max(merged.rows))
        sent = _new_full(stop - start, merged, readers.device)
        _write(sent, 0, own[start:stop])
        received = gather(sent, readers).view(len(positions), stop - start, *merged.tail)
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
