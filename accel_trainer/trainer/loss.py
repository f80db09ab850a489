"""The mean over an update of the losses of its micro-batches: the divisor of each, and how it is found out."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import unwrap_peft_model

from accel_trainer import logging
from accel_trainer.config import LossImplementation
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.techniques.chunked_loss import find_chunked_loss
from accel_trainer.trainer.arguments.training_arguments import setting
from accel_trainer.tree import map_leaves

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_CAUSAL_MODELS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


class LossKind(IntEnum):
    """What `compute_loss` returns for a micro-batch. Where ranks find different kinds, the highest holds for all."""

    ROW_MEAN = 0
    """A mean of the user's own: micro-batches count by their rows."""
    MODEL_MEAN = 1
    """The mean over the labels of a micro-batch, which the model takes or is made to: they count by their labels."""
    BY_ITEMS = 2
    """A sum, divided by `num_items_in_batch`: micro-batches and ranks are added up."""


class LossNormalization:
    """The kind of a Trainer's losses, found once in a train(), from a micro-batch.

    transformers 5.23 (trainer.py:521) takes `**kwargs` of the model's forward for a promise to divide by
    `num_items_in_batch`, and `compute_loss_func` for another. Many models have the `**kwargs` and return the mean over
    their batch (T5, BERT's classifier): their loss and gradients then come out multiplied by the number of processes
    and of accumulated micro-batches. So they are asked: see `_FirstBatch`.
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

    def begin(self, trainer: Trainer) -> None:
        """Begin a train(): its model may be another one than the last one's."""
        if self._took_items:
            trainer.model_accepts_loss_kwargs = True
        self.kind, self.is_wanted, self.is_multiplied = None, False, False
        self.has_terms, self._took_items = False, False

    def begin_epoch(self, trainer: Trainer) -> None:
        """Find whether it matters: an update of one micro-batch on one process takes its loss as it is."""
        args = trainer.args
        has_several = args.world_size > 1 or args.gradient_accumulation_steps > 1
        self.is_wanted = self.kind is None and has_several and not trainer.divides_as_upstream

    def compute(self, trainer: Trainer, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Return `compute_loss` of a micro-batch. Collective while the kind is wanted."""
        if self.is_wanted:
            return self._first_loss(trainer, model, inputs, num_items)
        over_ranks = trainer.args.average_tokens_across_devices
        if self.has_terms:
            # Divided by its own labels, and not multiplied: it counts by them in the update.
            num_items, over_ranks = _own_items(trainer, inputs), False
        with setting(trainer.args, average_tokens_across_devices=over_ranks):
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        return loss

    def weigh(self, trainer: Trainer, loss: Tensor, *, has_items: bool) -> Tensor:
        """Return the loss of a micro-batch, as its part of the mean over the update."""
        reader, kind = trainer._reader, self.kind
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # transformers 5.17 has no such attribute
        if trainer.divides_as_upstream or reader is None:  # outside of train(), a script takes steps by itself
            return _divided_as_upstream(trainer, loss, is_scaled, has_items=has_items)
        if kind is None:
            return loss  # the update has one micro-batch, on one process
        if is_scaled is not None:
            kind = LossKind.BY_ITEMS if is_scaled else LossKind.ROW_MEAN
        elif self.is_multiplied:
            loss = loss / trainer.accelerator.readers.world_size
        over_ranks = trainer.args.average_tokens_across_devices
        shifts_labels = trainer._loss_shifts_labels
        return reader.weigh(loss, kind, has_items=has_items, over_ranks=over_ranks, shifts_labels=shifts_labels)

    def _first_loss(self, trainer: Trainer, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        accepted = trainer.model_accepts_loss_kwargs
        first = _FirstBatch(trainer, model, inputs, num_items)
        # Not compiled: the first graph would be one for forwards without gradients.
        with torch.compiler.set_stance("force_eager"):
            loss = first.compute_loss(model, inputs, num_items)
            kind = first.kind_of(loss)
        bare = trainer.accelerator.unwrap_model(model)
        if kind is LossKind.MODEL_MEAN and counts_by_rows(bare):
            kind = LossKind.ROW_MEAN
        trainer.model_accepts_loss_kwargs = accepted
        self._agree(trainer, kind, first, type(bare).__name__)
        if self.is_wanted and not first._is_labelled:  # nothing to weigh it by yet, and a mean over no labels is NaN
            loss = loss.masked_fill(loss.isnan(), 0.0)
        return loss

    def _agree(self, trainer: Trainer, kind: LossKind | None, first: _FirstBatch, model_name: str) -> None:
        """Take the highest kind that a rank has found; ask again at the next micro-batch where none has. Collective."""
        has_terms = first.has_terms and kind in (None, LossKind.MODEL_MEAN)
        own = [-1 if kind is None else kind, not first.is_multiplied, has_terms]
        answer = torch.tensor(own, device=trainer.args.device)
        found, not_multiplied, terms = collectives.reduce(answer, trainer.accelerator.process, "max").tolist()
        if found < 0:
            return
        self.kind, self.is_wanted = LossKind(found), False
        self.is_multiplied, self.has_terms = not not_multiplied, bool(terms)
        accepted = trainer.model_accepts_loss_kwargs
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


class _FirstBatch:
    """A micro-batch for which everyone that returns a loss is asked again with twice the items.

    A loss that stays is a mean of its own, and one that halves is divided by the items. Where it does neither, it has
    terms that are not: L(n) = S/n + T, so T = 2 L(2n) - L(n). The model is asked before its forward, label smoothing
    and `compute_loss_func` with the same outputs. An override of `compute_loss` is called again only where its loss is
    not the one that one of them has returned: many of them count what they see.

    A loss of 0, or one that is no number, tells nothing, nor does the term of a batch without labels: the next
    micro-batch is asked. Until then losses are taken as transformers takes them.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, inputs: Any, num_items: Any) -> None:
        self._trainer, self._num_items = trainer, num_items
        self._inputs = _copied(inputs)  # overrides take labels out of theirs, or change them in place
        # The bare one where it can be: a wrapper would send buffers around, and ranks need not ask alike.
        self._model = model if trainer.is_sharded else trainer.accelerator.unwrap_model(model)
        self._streams = KeptStreams()
        self._is_scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        """The user's word on it; transformers 5.17 has no such attribute."""
        count = count_labels(inputs, trainer._loss_shifts_labels)
        self._is_labelled = count is None or bool(count)
        self._own_items = None if self._is_scaled is not None else _own_items(trainer, inputs)
        self._loss: Tensor | None = None
        """The last one that the model, label smoothing or the loss function has returned."""
        self._kind: LossKind | None = None
        """Of that loss; None where it does not tell."""
        self._is_asking = False
        self.has_terms = False
        self.is_multiplied = False
        """Whether a mean of `compute_loss_func` has been multiplied by the number of processes."""

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: Any, *, factor: float | None = None) -> Tensor:
        """Return the Trainer's `compute_loss`; `factor` multiplies the losses of the model and of loss functions."""
        trainer, changed = self._trainer, {}
        for name, mean in (("compute_loss_func", LossKind.ROW_MEAN), ("label_smoother", LossKind.MODEL_MEAN)):
            if (function := getattr(trainer, name)) is not None:
                changed[name] = partial(self._ask, function, mean, factor)
        if factor is None:
            hooks = [
                # First: a hook of FSDP2's has gathered weights, which the end of another forward shards again.
                model.register_forward_pre_hook(self._ask_model, with_kwargs=True, prepend=True),
                model.register_forward_hook(self._note_model),
            ]
        else:
            hooks = [model.register_forward_hook(partial(_multiply_loss, factor))]
        try:
            with setting(trainer, **changed):
                loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        finally:
            for hook in hooks:
                hook.remove()
        return loss

    def _ask_model(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Ask the model, and have it divide by the labels of its own batch where its loss has terms."""
        if self._is_asking:
            return None
        self._loss, self._kind = None, LossKind.MODEL_MEAN
        num_items = kwargs.get("num_items_in_batch")
        if num_items is None:
            return None
        self._is_asking, losses = True, []
        for factor in (1, 2):
            with _leaving_no_trace(self._model):
                losses.append(_loss_of(self._model(*args, **kwargs | {"num_items_in_batch": factor * num_items})))
        self._is_asking = False
        once, twice = losses
        if once is None or twice is None:
            return None
        self._kind = _kind_of(once, twice, LossKind.MODEL_MEAN)
        if self._kind is LossKind.MODEL_MEAN and not self._is_labelled:
            self._kind = None
        terms = (2 * twice - once).abs().item()
        # Halving is exact in any floating-point format. Where kernels round differently from call to call, a loss that
        # has no such terms seems to have some: divided by its own labels, and counted by them, it gives the same mean.
        if self._kind is LossKind.BY_ITEMS and self._own_items is not None and terms > 1e-5 * once.abs().item():
            self.has_terms, self._kind = True, LossKind.MODEL_MEAN
            kwargs = kwargs | {"num_items_in_batch": self._own_items}
        if self._kind is LossKind.MODEL_MEAN:
            # Before compute_loss goes on: upstream multiplies the loss by the number of processes otherwise.
            self._trainer.model_accepts_loss_kwargs = False
        return args, kwargs

    def _note_model(self, _model: nn.Module, _args: Any, outputs: Any) -> None:
        self._loss = _loss_of(outputs)

    def _ask(
        self, function: Callable[..., Tensor], mean: LossKind, factor: float | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call label smoothing or the user's function, and ask it unless there is a factor."""
        loss = function(*args, **kwargs)
        if factor is not None:
            return loss * factor
        self._loss, self._kind = loss, mean
        num_items = kwargs.get("num_items_in_batch")
        if num_items is not None:
            with _leaving_no_trace():
                twice = function(*args, **kwargs | {"num_items_in_batch": 2 * num_items})
            self._kind = _kind_of(loss, twice, mean)
            if mean is LossKind.ROW_MEAN and self._kind is not LossKind.BY_ITEMS:
                self.is_multiplied = bool(self._trainer.args.average_tokens_across_devices)
        return loss

    def kind_of(self, loss: Tensor) -> LossKind | None:
        """Return the kind of the loss that `compute_loss` has returned. Collective where forwards are."""
        if loss is self._loss:
            return self._kind
        if self._is_scaled is not None:
            return LossKind.BY_ITEMS if self._is_scaled else LossKind.ROW_MEAN
        # An override has made one of its own, or around that. All ranks call it equally often, whatever they find: its
        # forwards may be collective.
        mean: LossKind | None = LossKind.ROW_MEAN
        if self._loss is not None:
            doubled = self._again(self._num_items, factor=2.0)
            mean = mean if _kind_of(loss, doubled, LossKind.ROW_MEAN) is mean else self._kind
        twice = loss if self._num_items is None else self._again(2 * self._num_items, factor=1.0)
        return _kind_of(loss, twice, mean)

    def _again(self, num_items: Any, *, factor: float) -> Tensor:
        try:
            return self._recomputed(num_items, factor)
        except RuntimeError:
            if self._trainer.is_sharded:
                raise
            # Of an override that takes gradients itself. Not at once: the graph is as large as that which waits.
            return self._recomputed(num_items, factor, with_gradients=True)

    def _recomputed(self, num_items: Any, factor: float, *, with_gradients: bool = False) -> Tensor:
        with _leaving_no_trace(self._model), torch.set_grad_enabled(with_gradients):
            self._streams.put_back()
            return self.compute_loss(self._model, _copied(self._inputs), num_items, factor=factor)


def _divided_as_upstream(trainer: Trainer, loss: Tensor, is_scaled: bool | None, *, has_items: bool) -> Tensor:
    """Return the loss of a micro-batch by the rules of transformers 5.23 (trainer.py:2102)."""
    if is_scaled is None:
        is_scaled = trainer.model_accepts_loss_kwargs and has_items or trainer.compute_loss_func is not None
    loss = loss if is_scaled else loss / trainer.current_gradient_accumulation_steps
    if trainer._reader is None:
        return loss
    # Only where `even_batches` is off: a rank without samples counts none.
    return trainer._reader.weigh(loss, LossKind.BY_ITEMS, has_items=False, over_ranks=False, shifts_labels=False)


@contextmanager
def smoothing_chunks(trainer: Trainer, model: nn.Module) -> Iterator[None]:
    """Context in which a loss that is made in chunks smooths labels itself: upstream's smoother wants logits."""
    is_plain = trainer.accelerator.config.loss is LossImplementation.PLAIN
    chunked = None if is_plain else find_chunked_loss(model)
    if chunked is None:
        yield
        return
    epsilon = 0.0 if trainer.label_smoother is None else trainer.label_smoother.epsilon
    with setting(chunked, label_smoothing=epsilon), setting(trainer, label_smoother=None):
        yield


_SAME = 1e-3
"""Above the rounding of a loss that is computed twice, and below the halving of one part in hundreds of its terms."""


def _kind_of(once: Tensor, twice: Tensor, mean: LossKind | None) -> LossKind | None:
    """Return the kind of a loss by its value for n and 2n items; `mean` where it stays, None where it tells nothing."""
    one, two = once.detach().float().mean().item(), twice.detach().float().mean().item()
    if not math.isfinite(one) or one == 0:
        return None
    return mean if math.isclose(one, two, rel_tol=_SAME) else LossKind.BY_ITEMS


def _loss_of(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, where there is one."""
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _multiply_loss(factor: float, _model: nn.Module, _args: Any, outputs: Any) -> Any:
    """Return a model's outputs with another loss, if they have one."""
    loss = _loss_of(outputs)
    if loss is None:
        return outputs
    if isinstance(outputs, dict):
        outputs["loss"] = loss * factor
        return outputs
    return (loss * factor, *outputs[1:])


def _copied(inputs: Any) -> Any:
    """Return a batch of copies, also of one that has no mapping for it."""
    return copy.copy(map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs))


@contextmanager
def _leaving_no_trace(model: nn.Module | None = None) -> Iterator[None]:
    """Context of a forward after which gradients, random streams and buffers are as before."""
    own = [] if model is None else [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    with torch.no_grad(), KeptStreams():
        try:
            # The forward gets copies: to change those that a graph has saved would fail its backward.
            for module, buffers in own:
                for name, buffer in buffers.items():
                    setattr(module, name, buffer.clone())
            yield
        finally:
            for module, buffers in own:
                for name, buffer in buffers.items():
                    setattr(module, name, buffer)
            # Autocast keeps its copies of the weights, which have no gradients here, to the end of its context.
            torch.clear_autocast_cache()


def count_labels(batch: Any, shifts: bool) -> Tensor | None:
    """Return the labels (scalar, int64) that a batch's loss counts, no first ones if it `shifts`; None if unknown."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if shifts and isinstance(labels, Tensor):
            labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


def count_items(trainer: Trainer, batches: list[Any], device: Any) -> Tensor | None:
    """Return the labels (scalar, int64) of an update, of all ranks or of this one; None where they are unknown.

    Collective with `average_tokens_across_devices`.
    """
    args, reader, readers = trainer.args, trainer._reader, trainer.accelerator.readers
    if reader is not None:
        batches = [reader.without_filler(batch) for batch in batches]
    counts: list[Any] = [count_labels(batch, trainer._loss_shifts_labels) for batch in batches]
    if not counts or any(count is None for count in counts):
        return None
    # An integer, where transformers 5.23 (trainer.py:2355) makes a float: FSDP2 and DeepSpeed cast those of a model's
    # inputs, and bf16 cannot tell 4,097 from 4,096.
    num_items: Tensor = reduce(operator.add, counts).to(device)
    if args.average_tokens_across_devices:
        return collectives.reduce(num_items, readers) if readers.world_size > 1 else num_items
    # A rank without samples: its loss weighs nothing, and would be divided by 0.
    return num_items if reader is None else num_items.clamp(min=1)


def _own_items(trainer: Trainer, inputs: Any) -> Tensor | None:
    """Return the divisor of the loss of a micro-batch by itself; 1 without labels, whose sum is 0."""
    count = count_labels(inputs, trainer._loss_shifts_labels)
    return None if count is None else count.clamp(min=1)


def counts_by_rows(model: Any) -> bool:
    """Whether the model's loss is one of alignments: that of a row counts once, however many labels the row has."""
    loss_type = getattr(model, "loss_type", None)
    return isinstance(loss_type, str) and any(name in loss_type for name in ("CTC", "RNNT", "TDT"))


def prepare_labels(trainer: Trainer) -> None:
    """Find which labels the model's loss counts, and smooth them so. Once, where a Trainer is built.

    Raises:
        ConfigError: `compute_loss_func` wants whole logits, of which the `loss` that was asked for makes none.
    """
    resolved = trainer.accelerator.resolved
    if not trainer.divides_as_upstream:
        if _predicts_first_label(trainer.model):
            trainer._loss_shifts_labels = False
        elif predicts_next_token(trainer.model):
            trainer._loss_shifts_labels = True
    if trainer.compute_loss_func is not None and resolved.config.loss is not LossImplementation.PLAIN:
        raise ConfigError(
            f"compute_loss_func was given, which makes a loss of whole logits, and {resolved.describe('loss')} "
            "makes none; leave one of them out"
        )
    if trainer.label_smoother is not None:
        factor = trainer.args.label_smoothing_factor
        trainer.label_smoother = build_smoother(trainer.model, factor, shifts=trainer._loss_shifts_labels)


class ShiftingLabelSmoother(LabelSmoother):
    """Label smoothing for a model that predicts the next token, with or without virtual tokens before its inputs.

    transformers 5.23 (trainer.py:2186) asks for the model's class name in each step; FSDP2 puts a prefix before it.
    """

    def __call__(self, model_output: Any, labels: Any, shift_labels: bool = True, **kwargs: Any) -> Any:
        """Return the smoothed loss; labels are shifted, whatever the caller says."""
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if num_virtual_tokens := logits.shape[-2] - labels.shape[-1]:
            labels = nn.functional.pad(labels, (num_virtual_tokens, 0), value=self.ignore_index)
        return super().__call__(model_output, labels, shift_labels=True, **kwargs)


def build_smoother(model: Any, factor: float, *, shifts: bool) -> LabelSmoother | None:
    """Return the label smoothing of a model that `shifts` or not; None where none is asked for, or fits the loss."""
    problem_type = getattr(getattr(model, "config", None), "problem_type", None)
    if not factor or problem_type == "multi_label_classification":
        return None
    return (ShiftingLabelSmoother if shifts or predicts_next_token(model) else LabelSmoother)(epsilon=factor)


def predicts_next_token(model: Any) -> bool:
    """Whether the model's loss is that of causal models, in which a row's first label is no target."""
    # transformers 5.23 (trainer.py:543) asks the model's `loss_type`, which is None for GPT-2 and others that fall back
    # to the causal loss: it then counts one target too many in each row, and scales loss and gradients by it.
    if not isinstance(model, nn.Module):
        return False
    base = unwrap_peft_model(model)
    class_name = type(base).__name__.removeprefix("FSDP")  # which torch's fully_shard puts before it
    return class_name in _CAUSAL_MODELS and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


def _predicts_first_label(model: Any) -> bool:
    """Whether PEFT puts virtual tokens before a causal model's inputs: a row's first label is then a target, too."""
    # transformers 5.23 counts one target too few in each row: with 12 labels in a row it logs a loss 12/11 of the true
    # one, and scales the gradients by as much.
    config: Any = getattr(model, "active_peft_config", None)
    # Prefixes are keys and values of earlier tokens: the labels stay as they are.
    return bool(getattr(config, "is_prompt_learning", False)) and config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE")
