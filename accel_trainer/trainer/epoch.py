"""One epoch of training: windows of micro-batches, the update at the end of each, and what callbacks see of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.utils import logging

from accel_trainer.trainer.running_trainer import SteppingTrainer
from accel_trainer.trainer.window import WindowReader

__all__ = ["EpochRun"]

logger = logging.get_logger("transformers.trainer")

_STEPPED_BY_METRIC = (ReduceLROnPlateau, GreedyLR)


@dataclass(slots=True)
class EpochRun:
    """The state of one pass over the training data. Losses and callback order are upstream's."""

    trainer: SteppingTrainer
    reader: WindowReader
    model: nn.Module
    epoch: int
    steps_in_epoch: int
    trial: Any
    ignore_keys_for_eval: list[str] | None
    start_time: float
    step: int
    """Index in the epoch of the last micro-batch that was trained; -1 before the first."""
    is_resumed: bool
    """Whether the next window is the first one that a resumed run reads."""
    grad_norm: Tensor | float | None = None
    learning_rate: float | None = None
    sync: bool | None = None
    """Whether the model was last told to exchange gradients; telling a sharded model walks through its modules."""

    def train(self, restore_rng_from: str | None) -> None:
        """Train the updates of the epoch that are left, until it ends or a callback stops it. Collective.

        Args:
            restore_rng_from: checkpoint whose RNG state is restored once the first window has been read.
        """
        accumulation = self.trainer.args.gradient_accumulation_steps
        steps = max(self.steps_in_epoch, 1)
        for begin in range(self.step + 1, steps, accumulation):
            if not self._window(min(accumulation, steps - begin), restore_rng_from):
                break
            restore_rng_from = None
            control = self.trainer.control
            if control.should_epoch_stop or control.should_training_stop:
                break

    def _window(self, num_batches: int, restore_rng_from: str | None) -> bool:
        """Train the micro-batches of one update; return whether there were any."""
        trainer, reader, checkpoints = self.trainer, self.reader, self.trainer.run_checkpoints
        checkpoints.begin_update(trainer.callback_handler.train_dataloader)
        with checkpoints.metrics.resuming("data") if self.is_resumed else nullcontext():
            batches, num_items = trainer.get_batch_samples(reader, num_batches, trainer.args.device)
        self.is_resumed = False
        reader.begin(batches)
        # Divides the loss of a model that does not normalise by `num_items` itself; the last window may be short.
        trainer.current_gradient_accumulation_steps = len(batches)
        if restore_rng_from is not None:
            # After the read: drawing the order of the data has used up random numbers in the interrupted run, too.
            trainer._load_rng_state(restore_rng_from)
        for index, inputs in enumerate(batches):
            self.step += 1
            reader.begin_batch(index)
            self._micro_batch(inputs, num_items, is_first=index == 0, is_last=index == len(batches) - 1)
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        reader.forget()
        if not batches:
            checkpoints.cancel_update()
        return bool(batches)

    def _micro_batch(self, inputs: Any, num_items: Any, *, is_first: bool, is_last: bool) -> None:
        trainer, handler = self.trainer, self.trainer.callback_handler
        sync = is_last or trainer.accelerator.config.accumulation.sync_each_batch
        if sync != self.sync:
            trainer.accelerator.set_gradient_sync(self.model, sync)
            self.sync = sync
        trainer.accelerator.gradient_state.sync_gradients = is_last
        if is_first:
            trainer.control = handler.on_step_begin(trainer.args, trainer.state, trainer.control)
        self._add_loss(trainer.training_step(self.model, inputs, num_items))
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(self.reader.without_stand_in(inputs))
        if is_last:
            self._update()
        else:
            trainer.control = handler.on_substep_end(trainer.args, trainer.state, trainer.control)

    def _add_loss(self, loss: Tensor) -> None:
        """Add to the running loss; a NaN or infinite one counts as the mean since the last log. Waits for no device."""
        trainer = self.trainer
        if trainer._tr_loss.device != loss.device:
            raise ValueError(
                f"Calculated loss must be on the original device: {trainer._tr_loss.device} but device in use is "
                f"{loss.device}"
            )
        if trainer.args.logging_nan_inf_filter:
            mean = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
            loss = torch.where(loss.isfinite(), loss, mean)
        trainer._tr_loss += loss

    def _update(self) -> None:
        trainer, args, handler = self.trainer, self.trainer.args, self.trainer.callback_handler
        grad_norm = trainer._clip_grad_norm(self.model) if args.max_grad_norm > 0 else None
        self.grad_norm = trainer._get_grad_norm(self.model, grad_norm=grad_norm)
        trainer.control = handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        trainer.optimizer.step()
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()
        scheduler = trainer.lr_scheduler
        if not trainer.accelerator.optimizer_step_was_skipped and not isinstance(scheduler, _STEPPED_BY_METRIC):
            scheduler.step()
        self.model.zero_grad()
        trainer.state.global_step += 1
        trainer.run_checkpoints.end_update(trainer.state.global_step)
        trainer.state.epoch = self.epoch + (self.step + 1) / self.steps_in_epoch
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        self._log_save_evaluate()

    def _log_save_evaluate(self) -> None:
        trainer = self.trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.grad_norm,
            self.model,
            self.trial,
            self.epoch,
            self.ignore_keys_for_eval,
            self.start_time,
            learning_rate=self.learning_rate,
        )

    def end(self) -> None:
        """Call back at the end of the epoch, then log, save and evaluate where that is due. Collective."""
        trainer = self.trainer
        if self.step < 0:
            logger.warning(
                "There seems not to be a single sample in your epoch_iterator, stopping training at step"
                f" {trainer.state.global_step}! This is expected if you're using an IterableDataset and set"
                f" num_steps ({trainer.state.max_steps}) higher than the number of available samples."
            )
            trainer.control.should_training_stop = True
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self._log_save_evaluate()
