"""Find out whether a model's loss is a sum over items divided by `num_items_in_batch`, or a mean of its own.

transformers 5.23 (trainer.py:521) takes `**kwargs` of the model's forward for a promise to divide. Many models have the
`**kwargs` and return the mean over their batch (BERT's classifier, for one): their loss and gradients then come out
multiplied by the number of processes and of accumulated micro-batches. Asking the model once tells the two apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_trainer import logging
from accel_trainer.runtime import collectives
from accel_trainer.trainer.running_trainer import SteppingTrainer

__all__ = ["LossNormalization"]

logger = logging.get_logger(__name__)

_UNKNOWN, _OWN_MEAN, _BY_ITEMS = 0, 1, 2


class LossNormalization:
    """The answer of one Trainer's model, which is asked at the first micro-batch with labels."""

    def __init__(self) -> None:
        self.is_known = False

    def ask(self, trainer: SteppingTrainer, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> None:
        """Set `trainer.model_accepts_loss_kwargs` to false if the loss does not depend on `num_items`.

        Collective where the answer changes a number, with several processes or several micro-batches per update: two
        forwards without gradients, in evaluation mode so that no random number is drawn and no statistic updated.
        """
        args = trainer.args
        makes_no_difference = args.world_size == 1 and args.gradient_accumulation_steps == 1
        if makes_no_difference or num_items is None or not trainer.model_accepts_loss_kwargs:
            self.is_known = True
            return
        answer = torch.tensor(_compare_losses(trainer, model, inputs, num_items), device=args.device)
        found = collectives.reduce(answer, trainer.accelerator.process, "max").item()
        self.is_known = found != _UNKNOWN
        if found == _OWN_MEAN:
            trainer.model_accepts_loss_kwargs = False
            logger.info(
                "%s takes keyword arguments and does not divide its loss by num_items_in_batch: its losses are "
                "averaged over micro-batches and processes",
                type(trainer.accelerator.unwrap_model(model)).__name__,
            )


def _compare_losses(trainer: SteppingTrainer, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> int:
    was_training = model.training
    model.eval()
    try:
        # Not compiled: a graph for evaluation mode would cost minutes for two calls.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), trainer.compute_loss_context_manager():
            first, second = (
                float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=items))
                for items in (num_items, num_items * 2)
            )
    finally:
        model.train(was_training)
    if first == 0.0 or first != first:
        return _UNKNOWN  # no label in this batch
    # An auxiliary loss that is not divided makes the ratio something between 1/2 and 1.
    return _BY_ITEMS if abs(second - first) > 1e-4 * abs(first) else _OWN_MEAN
