"""How the losses of an update's micro-batches make one mean: what each is divided by, and how that is found out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accel_trainer import logging
from accel_trainer.runtime import collectives
from accel_trainer.trainer.running_trainer import SteppingTrainer

__all__ = ["LossKind", "LossNormalization", "count_labels", "counting_locally", "counts_by_rows"]

logger = logging.get_logger(__name__)


class LossKind(IntEnum):
    """What `compute_loss` returns for a micro-batch. Where ranks find different kinds, the highest holds for all."""

    ROW_MEAN = 0
    """A mean of the user's own: micro-batches count by their rows."""
    MODEL_MEAN = 1
    """The mean over the labels of a micro-batch, which the model takes or is made to: they count by their labels."""
    BY_ITEMS = 2
    """A sum, divided by `num_items_in_batch`: micro-batches and ranks are added up."""


class LossNormalization:
    """The kind of a Trainer's losses, found from the first micro-batch that is trained.

    transformers 5.23 (trainer.py:521) takes `**kwargs` of the model's forward for a promise to divide by
    `num_items_in_batch`, and `compute_loss_func` for another. Many models have the `**kwargs` and return the mean over
    their batch (T5, BERT's classifier): their loss and gradients then come out multiplied by the number of processes
    and of accumulated micro-batches. So the first loss is followed to where it came from. Nothing is called for that.
    """

    def __init__(self) -> None:
        self.kind: LossKind | None = None
        """None until it is known; it never is where it makes no difference."""
        self.is_wanted = False
        """Whether the kind changes a number, and is not known yet."""
        self.is_multiplied = False
        """Whether upstream multiplies a mean by the number of processes, as it does for any `compute_loss_func`."""
        self.has_terms = False
        """Whether the model adds means to what it divides by the items, as the term that balances a mixture's experts.

        Divided by the items of the update, each micro-batch of each process would add that term in full.
        """
        self._took_items = False

    def begin(self, trainer: SteppingTrainer) -> None:
        """Begin a train(): its model may be another one than the last one's."""
        if self._took_items:
            trainer.model_accepts_loss_kwargs = True
        self.kind, self.is_wanted, self.is_multiplied = None, False, False
        self.has_terms, self._took_items = False, False

    def begin_epoch(self, trainer: SteppingTrainer) -> None:
        """Find whether it matters: an update of one micro-batch on one process takes its loss as it is."""
        args = trainer.args
        self.is_wanted = self.kind is None and (args.world_size > 1 or args.gradient_accumulation_steps > 1)

    def first_loss(self, trainer: SteppingTrainer, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Return `compute_loss` of the first micro-batch, and find its kind on the way. Collective.

        A model that does not divide is given no `num_items_in_batch` in later updates.
        """
        trace, accepted = _Trace(num_items), trainer.model_accepts_loss_kwargs
        is_multiplied = num_items is not None and trainer.args.average_tokens_across_devices
        compute_loss_func: Any = trainer.compute_loss_func
        label_smoother: Any = trainer.label_smoother

        is_stated = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
        own_items = None if is_stated else _own_items(trainer, inputs)

        def begin_model(*_: Any) -> None:
            trace.begin_call()

        def end_model(_model: nn.Module, _inputs: Any, outputs: Any) -> Any:
            outputs, is_mean = self._take_outputs(trace, outputs, num_items, own_items)
            if is_mean:
                # Before compute_loss goes on: upstream multiplies the loss by the number of processes otherwise.
                trainer.model_accepts_loss_kwargs = False
            return outputs

        def compute(*args: Any, **kwargs: Any) -> Any:
            trace.begin_call()
            loss = compute_loss_func(*args, **kwargs)
            self.is_multiplied = is_multiplied and not trace.is_divided(loss)
            return loss

        def smooth(*args: Any, **kwargs: Any) -> Any:
            trace.begin_call()
            loss = label_smoother(*args, **kwargs)
            trace.take_mean(loss)
            return loss

        hooks = [model.register_forward_pre_hook(begin_model), model.register_forward_hook(end_model)]
        trainer.compute_loss_func = compute if compute_loss_func is not None else None
        trainer.label_smoother = smooth if label_smoother is not None else None
        try:
            # Not compiled: nothing can be followed through a compiled graph.
            with torch.compiler.set_stance("force_eager"), trace:
                loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        finally:
            trainer.compute_loss_func, trainer.label_smoother = compute_loss_func, label_smoother
            for hook in hooks:
                hook.remove()
        kind, bare = trace.kind_of(loss), trainer.accelerator.unwrap_model(model)
        if kind is LossKind.MODEL_MEAN and counts_by_rows(bare):
            kind = LossKind.ROW_MEAN
        self._set(trainer, kind, accepted, type(bare).__name__)
        return loss

    def _take_outputs(self, trace: _Trace, outputs: Any, num_items: Any, own_items: Any) -> tuple[Any, bool]:
        """Return a model's outputs, and whether their loss is a mean: one by items that has terms is made to be one."""
        loss = _loss_of(outputs)
        if loss is None:
            return outputs, False
        terms = trace.terms_of(loss)
        if terms is None or own_items is None:
            return outputs, trace.take_mean(loss)
        self.has_terms = True
        loss = (loss - terms) * (num_items / own_items) + terms
        trace.mark_mean(loss)
        if isinstance(outputs, dict):
            outputs["loss"] = loss
            return outputs, True
        return (loss, *outputs[1:]), True

    def loss_with_terms(self, trainer: SteppingTrainer, model: nn.Module, inputs: Any) -> Tensor:
        """Return `compute_loss` of a micro-batch that is divided by its own labels; it counts by them in the update."""
        with counting_locally(trainer.args):
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=_own_items(trainer, inputs))
        return loss

    def _set(self, trainer: SteppingTrainer, kind: LossKind, accepted: bool, model_name: str) -> None:
        self.has_terms &= kind is LossKind.MODEL_MEAN
        answer = torch.tensor([kind, not self.is_multiplied, self.has_terms], device=trainer.args.device)
        kind_on_all, not_multiplied, has_terms = collectives.reduce(answer, trainer.accelerator.process, "max").tolist()
        self.kind, self.is_wanted = LossKind(kind_on_all), False
        self.is_multiplied, self.has_terms = not not_multiplied, bool(has_terms)
        trainer.model_accepts_loss_kwargs = accepted and (self.kind is LossKind.BY_ITEMS or self.has_terms)
        self._took_items = accepted and not trainer.model_accepts_loss_kwargs
        if self.has_terms:
            logger.info(
                "the loss of %s has terms that are not divided by num_items_in_batch: each micro-batch is divided by "
                "its own labels, and counts by them", model_name,
            )  # fmt: skip
        elif self._took_items or self.is_multiplied:
            logger.info(
                "the loss of %s does not depend on num_items_in_batch: its losses are averaged over micro-batches and "
                "processes by their %s",
                model_name, "labels" if self.kind is LossKind.MODEL_MEAN else "rows",
            )  # fmt: skip


def count_labels(batch: Any, shifts: bool) -> Tensor | None:
    """Return the number of labels of a batch that its loss counts (scalar, int64); None where that is unknown.

    Args:
        shifts: the model predicts the next token, so that a row's first label is never a target.
    """
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if shifts and isinstance(labels, Tensor):
            labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


def _own_items(trainer: SteppingTrainer, inputs: Any) -> Tensor | None:
    """Return what the loss of a micro-batch by itself is divided by; 1 without labels, whose sum is 0."""
    count = count_labels(inputs, trainer._loss_shifts_labels)
    return None if count is None else count.clamp(min=1)


@contextmanager
def counting_locally(args: Any) -> Iterator[None]:
    """Have each rank count and normalise its own batch: no collective, and no factor for the number of ranks."""
    average = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = average


def counts_by_rows(model: Any) -> bool:
    """Whether the model's loss is one of alignments: that of a row counts once, however many labels the row has."""
    loss_type = getattr(model, "loss_type", None)
    return isinstance(loss_type, str) and any(name in loss_type for name in ("CTC", "RNNT", "TDT"))


def _loss_of(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, where there is one."""
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


_ITEMS, _MODEL_MEAN = 1, 2
_ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_COPIES = frozenset({"clone", "detach", "float", "to"})
"""A wrapper's outputs are copies: DDP clones them, ZeRO detaches them in a function that makes their gradient."""
_AS_NUMBER = frozenset({"item", "tolist", "numpy", "__int__", "__float__", "__index__", "__array__"})


class _Trace(TorchFunctionMode):
    """While it is entered, follows which tensors are computed from `num_items`, and which from a model's own mean."""

    def __init__(self, num_items: Any) -> None:
        super().__init__()
        self._num_read = self._read_before_call = 0
        """How often `num_items` was read as a Python number, whose way cannot be followed."""
        self._marked: dict[int, tuple[Tensor, int]] = {}  # with the tensors: an id is free once its object is gone
        self._terms: dict[int, Tensor] = {}
        """By the id of a sum: what was added to a loss by items without being divided by them."""
        self._mark(num_items, _ITEMS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        marks = self._marks_of(args) | (self._marks_of(kwargs) if kwargs else 0)
        if marks:
            if marks & _ITEMS and getattr(func, "__name__", "") in _AS_NUMBER:
                self._num_read += 1
            if marks & _ITEMS:
                self._follow_terms(func, args, result)
            # Some methods change the first argument and return nothing, __setitem__ for one.
            self._mark(args[0] if result is None and args else result, marks)
        return result

    def _follow_terms(self, func: Any, args: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or result.numel() != 1:
            return
        name = getattr(func, "__name__", "")
        num_operands = 2 if name in _ADDITIONS else int(name in _COPIES)
        terms = [self._terms.get(id(each)) if self._marks_of(each) else each for each in args[:num_operands]]
        found = [term for term in terms if isinstance(term, Tensor) and term.is_floating_point()]
        # Of a sum that is changed in another way, by a product for one, nothing is known any more.
        self._terms.pop(id(result), None)
        if found:
            self._terms[id(result)] = sum(found[1:], start=found[0])

    def begin_call(self) -> None:
        """Begin a call that returns a loss: of the model, or of a loss function."""
        self._read_before_call = self._num_read

    def is_divided(self, loss: Any) -> bool:
        """Whether the last such call computed its loss from `num_items`, as far as can be told."""
        return self._num_read > self._read_before_call or bool(self._marks_of(loss) & _ITEMS)

    def terms_of(self, loss: Tensor) -> Tensor | None:
        """Return what a loss by items has beside what is divided by them, if that is known."""
        return self._terms.get(id(loss))

    def mark_mean(self, loss: Tensor) -> None:
        """Follow a loss as a model's own mean, whatever it was computed from."""
        self._mark(loss, _MODEL_MEAN)

    def take_mean(self, loss: Any) -> bool:
        """Follow the loss that a model or label smoothing has returned; return whether it is a mean of its own."""
        is_mean = not self.is_divided(loss)
        self._mark(loss, _MODEL_MEAN if is_mean else _ITEMS)
        return is_mean

    def kind_of(self, loss: Any) -> LossKind:
        """Return the kind of a loss that `compute_loss` has returned."""
        marks = self._marks_of(loss)
        if marks & _ITEMS:
            return LossKind.BY_ITEMS
        if marks & _MODEL_MEAN:
            return LossKind.MODEL_MEAN
        return LossKind.BY_ITEMS if self._num_read else LossKind.ROW_MEAN

    def _mark(self, data: Any, marks: int) -> None:
        if isinstance(data, Tensor):
            self._marked[id(data)] = (data, marks)
        elif isinstance(data, (list, tuple)):
            for item in data:
                self._mark(item, marks)

    def _marks_of(self, data: Any) -> int:
        if isinstance(data, Tensor):
            known = self._marked.get(id(data))
            return known[1] if known is not None else 0
        if isinstance(data, dict):
            data = data.values()
        elif not isinstance(data, (list, tuple)):
            return 0
        found = 0
        for item in data:
            found |= self._marks_of(item)
        return found
