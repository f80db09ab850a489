"""What is set on a Trainer's arguments after it was built: it holds for the next train(), or is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from transformers import enable_full_determinism, set_seed
from transformers.trainer_pt_utils import LabelSmoother

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.trainer.arguments.training_arguments import MIRRORED_FIELDS, TrainingArguments
from accel_trainer.trainer.inputs import ShiftingLabelSmoother
from accel_trainer.trainer.preparation import create_optimizer
from accel_trainer.trainer.running_trainer import PreparingTrainer

__all__ = ["TakenArguments"]

logger = logging.get_logger(__name__)

_FIXED = sorted(MIRRORED_FIELDS - {"data_seed"})
_OF_OPTIMIZER = (
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "optim_target_modules",
)  # fmt: skip


class TakenArguments:
    """The arguments that a Trainer has made something of, as they were then; it reads all others when it uses them.

    transformers 5.23 takes these where a Trainer is built, and the optimizer's at the first train(): whatever is set
    later has no effect there, but for the seed and the optimizer of a Trainer with `model_init`.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._values: dict[str, Any] = {}
        self._owns_optimizer = False
        for name in (*_FIXED, "data_seed", "label_smoothing_factor", "neftune_noise_alpha", "seed", "train_batch_size"):
            self._find_change(args, name)

    def begin(self, trainer: PreparingTrainer) -> None:
        """Begin a train() with the arguments' present values.

        Raises:
            ConfigError: one was set that the configuration was resolved from, or a batch size is out of range.
        """
        args = trainer.args
        args.check_batch_sizes()
        for name in _FIXED:
            before = self._values[name]
            if self._find_change(args, name):
                raise ConfigError(
                    f"args.{name} was set to {getattr(args, name)!r} after the Trainer had been built with {before!r}, "
                    "which it is prepared for; make new arguments and a new Trainer"
                )
        if self._find_change(args, "train_batch_size"):
            trainer._train_batch_size = args.train_batch_size
        if self._find_change(args, "seed"):
            (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if self._find_change(args, "label_smoothing_factor"):
            trainer.label_smoother = _build_smoother(trainer, args.label_smoothing_factor)
        if self._find_change(args, "neftune_noise_alpha"):
            trainer.neftune_noise_alpha = args.neftune_noise_alpha
        if self._find_change(args, "data_seed"):
            trainer.accelerator.dataloader_config.data_seed = args.data_seed
        trainer.accelerator.renew_shuffle_seed()

    def renew_optimizer(self, trainer: PreparingTrainer, max_steps: int) -> None:
        """Build the optimizer anew if its options were set to others since it was built; its state stays.

        An optimizer that the user has given keeps the options that it has.
        """
        changed = self._find_changes(trainer.args, _OF_OPTIMIZER)
        before = trainer.optimizer
        if before is None:
            self._owns_optimizer = True  # it is about to be built
        if before is None or not changed or not self._owns_optimizer:
            return
        trainer.optimizer = None
        if trainer.accelerator.strategy.capabilities.builds_engine:
            return  # the next engine takes the state of the last one
        optimizer = create_optimizer(trainer, max_steps)
        if type(optimizer) is type(before):
            optimizer.state.update(before.state)
        logger.info("%s of the arguments changed: the optimizer goes on with them", ", ".join(changed))

    def _find_changes(self, args: TrainingArguments, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._find_change(args, name)]

    def _find_change(self, args: TrainingArguments, name: str) -> bool:
        """Return whether a value is another one than at the last call; take it."""
        value = getattr(args, name)
        is_changed = name in self._values and self._values[name] != value
        self._values[name] = copy.copy(value)
        return is_changed


def _build_smoother(trainer: PreparingTrainer, factor: float) -> LabelSmoother | None:
    config = getattr(trainer.model, "config", None)
    if not factor or getattr(config, "problem_type", None) == "multi_label_classification":
        return None
    return (ShiftingLabelSmoother if trainer._loss_shifts_labels else LabelSmoother)(epsilon=factor)
