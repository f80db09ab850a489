"""What an epoch's updates need not do: calls of upstream's loop that nobody overrides, and that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from accel_trainer.trainer.running_trainer import SteppingTrainer

__all__ = ["StepPlan"]

_IS_TRAINING = attrgetter("training")
# Where a module's train() does nothing for one that is in training mode already.
_PLAIN_TRAIN = ("torch.", "transformers.modeling_utils")


class StepPlan:
    """Facts of a Trainer and the model that it trains, found once for the updates of an epoch.

    In a step of 3 ms, train(), zero_grad() and the contexts that transformers 5.23 opens cost 0.3 ms, most of them for
    walking through the model's modules, which is in training mode already.
    """

    def __init__(self, trainer: SteppingTrainer, model: nn.Module) -> None:
        self.model = model
        accelerator = trainer.accelerator
        is_plain = accelerator.num_processes == 1 and not accelerator.strategy.capabilities.builds_engine
        # A script may call training_step() by itself, on a model that is not prepared: there is nothing to average.
        is_own = is_plain and not accelerator.is_prepared(model)
        self.backward: Callable[..., None] = Tensor.backward if is_own else accelerator.unit_of(model).backward
        own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self._optimizer: Any = trainer.optimizer if callable(getattr(own, "train", None)) else None
        modules = tuple(model.modules())
        trains_as_usual = all(type(module).train.__module__.startswith(_PLAIN_TRAIN) for module in modules)
        self._modules = modules if trains_as_usual else None
        self.has_loss_context = not _is_upstreams(trainer, "compute_loss_context_manager") or not isinstance(
            trainer.autocast_smart_context_manager(), nullcontext
        )
        self.counts_tokens_itself = _is_upstreams(trainer, "_track_num_input_tokens")
        self.clips_itself = _is_upstreams(trainer, "_clip_grad_norm")
        self._zeroes_itself = type(model).zero_grad is nn.Module.zero_grad
        self._listened: dict[str, bool] = {}
        self._callbacks: list[Any] = []

    def begin_training(self) -> None:
        """Put model and optimizer into training mode, as upstream does for every micro-batch."""
        if self._modules is None or not all(map(_IS_TRAINING, self._modules)):
            self.model.train()
        if self._optimizer is not None:
            self._optimizer.train()

    def zero_grad(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of the model, whose parameters the caller has at hand."""
        if not self._zeroes_itself:
            self.model.zero_grad()
            return
        for parameter in parameters:
            parameter.grad = None

    def is_heard(self, handler: CallbackHandler, event: str) -> bool:
        """Whether any callback does something at an event; those that transformers only passes on."""
        if type(handler) is not CallbackHandler:
            return True
        if self._callbacks != handler.callbacks:
            self._callbacks, self._listened = list(handler.callbacks), {}
        if event not in self._listened:
            silent = getattr(TrainerCallback, event)
            self._listened[event] = any(
                getattr(getattr(each, event, None), "__func__", None) is not silent for each in self._callbacks
            )
        return self._listened[event]


def _is_upstreams(trainer: SteppingTrainer, name: str) -> bool:
    return getattr(getattr(trainer, name), "__func__", None) is getattr(transformers.Trainer, name)
