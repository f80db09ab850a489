"""Find out whether a model's loss is a sum over items divided by `num_items_in_batch`, or a mean of its own.

Upstream takes a `**kwargs` in the model's forward for a promise to divide by `num_items_in_batch`. Many models have the
`**kwargs` and return the mean over their batch (BERT's classifier, for one): their loss and gradients then come out
multiplied by the number of processes and of accumulated micro-batches. Asking the model once tells the two apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.runtime import collectives

__all__ = ["settle_loss_scale"]

logger = logging.get_logger(__name__)

_UNKNOWN, _OWN_MEAN, _BY_ITEMS = 0, 1, 2


def settle_loss_scale(trainer: Any, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> None:
    """Set `trainer.model_accepts_loss_kwargs` to false if the loss does not depend on `num_items`.

    Collective when it asks: two forwards without gradients, in evaluation mode so that no random number is drawn and no
    statistic updated. Asks at the first micro-batch only, and only where the answer changes a number: with several
    processes or several micro-batches per update.
    """
    if trainer._loss_scale_is_settled:
        return
    args = trainer.args
    makes_no_difference = args.world_size == 1 and args.gradient_accumulation_steps == 1
    if makes_no_difference or num_items is None or not trainer.model_accepts_loss_kwargs:
        trainer._loss_scale_is_settled = True
        return
    answer = collectives.reduce(
        torch.tensor(_ask(trainer, model, inputs, num_items), device=args.device), trainer.accelerator.process, "max"
    ).item()
    trainer._loss_scale_is_settled = answer != _UNKNOWN
    if answer == _OWN_MEAN:
        trainer.model_accepts_loss_kwargs = False
        logger.info(
            "%s takes keyword arguments and does not divide its loss by num_items_in_batch: its losses are averaged "
            "over micro-batches and processes",
            type(trainer.accelerator.unwrap_model(model)).__name__,
        )


def _ask(trainer: Any, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> int:
    was_training = model.training
    model.eval()
    try:
        # Not compiled: a graph for evaluation mode would cost minutes for two calls.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), trainer.compute_loss_context_manager():
            losses = [
                trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
                for items in (num_items, num_items * 2)
            ]
    finally:
        model.train(was_training)
    first, second = (float(loss.detach()) if isinstance(loss, Tensor) else float(loss) for loss in losses)
    if first == 0.0 or first != first:
        return _UNKNOWN  # no label in this batch
    # An auxiliary loss that is not divided makes the ratio something between 1/2 and 1.
    return _BY_ITEMS if abs(second - first) > 1e-4 * abs(first) else _OWN_MEAN
