"""One epoch of training: windows of micro-batches, the update at the end of each, and what callbacks see of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.trainer.checkpoint.resuming import current_position
from accel_trainer.trainer.loss_normalization import settle_loss_scale
from accel_trainer.trainer.window import WindowReader

__all__ = ["EpochRun", "run_training_step"]

logger = logging.get_logger("transformers.trainer")

_STEPPED_BY_METRIC = (ReduceLROnPlateau, GreedyLR)


@dataclass(slots=True)
class EpochRun:
    """The state of one pass over the training data. Losses and callback order are upstream's."""

    trainer: Any
    model: nn.Module
    epoch: int
    steps_in_epoch: int
    trial: Any
    ignore_keys_for_eval: list[str] | None
    start_time: float
    step: int = -1
    """Index of the last micro-batch that was trained, in the epoch."""
    grad_norm: Tensor | float | None = None
    learning_rate: float | None = None
    is_resumed: bool = False
    """Whether the next window is the first one that a resumed run reads."""
    sync: bool | None = None
    """Whether the model was last told to exchange gradients; telling a sharded model walks through its modules."""

    def run(self, dataloader: DataLoader, trained: int, resume_from_checkpoint: str | None) -> None:
        """Train what is left of the epoch. Collective.

        Args:
            dataloader: its next pass begins after what was trained.
            trained: micro-batches of `steps_in_epoch` that the run which wrote the checkpoint has trained.
            resume_from_checkpoint: whose RNG state is restored once the first window has been read; None does not.
        """
        trainer = self.trainer
        self.step = trained - 1
        self.is_resumed = resume_from_checkpoint is not None
        if not trained and resume_from_checkpoint is not None:
            trainer._load_rng_state(resume_from_checkpoint)
            resume_from_checkpoint = None
        if hasattr(dataloader, "set_epoch"):
            dataloader.set_epoch(self.epoch)
        reader = WindowReader(dataloader, trainer.accelerator.process, trainer.accelerator.even_batches)
        trainer._reader = reader
        try:
            self._windows(reader, trained, resume_from_checkpoint)
        finally:
            trainer._reader = None
        reader.close()
        self._end()

    def _windows(self, reader: WindowReader, trained: int, restore_rng_from: str | None) -> None:
        """Train the updates of the epoch, until it ends or is told to."""
        accumulation = self.trainer.args.gradient_accumulation_steps
        steps = max(self.steps_in_epoch, 1)
        for begin in range(trained, steps, accumulation):
            if not self._window(reader, min(accumulation, steps - begin), restore_rng_from):
                break
            restore_rng_from = None
            control = self.trainer.control
            if control.should_epoch_stop or control.should_training_stop:
                break

    def _window(self, reader: WindowReader, num_batches: int, restore_rng_from: str | None) -> bool:
        """Train the micro-batches of one update; return whether there were any."""
        trainer = self.trainer
        trainer._position = current_position(trainer)
        with trainer._figures.resuming("data") if self.is_resumed else nullcontext():
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
            trainer._position = None
        return bool(batches)

    def _micro_batch(self, inputs: Any, num_items: Any, *, is_first: bool, is_last: bool) -> None:
        trainer, handler = self.trainer, self.trainer.callback_handler
        sync = is_last or trainer.accelerator.config.accumulation.sync_each_batch
        if sync != self.sync:
            trainer.accelerator.set_gradient_sync(self.model, sync)
            self.sync = sync
        trainer.accelerator.gradient_state._set_sync_gradients(is_last)
        if is_first:
            trainer.control = handler.on_step_begin(trainer.args, trainer.state, trainer.control)
        self._add_loss(trainer.training_step(self.model, inputs, num_items))
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(trainer._reader.without_stand_in(inputs))
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
        trainer._position = None
        if trainer._note is not None:
            trainer._note.write(trainer.state.global_step)
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

    def _end(self) -> None:
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


def run_training_step(trainer: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
    """Forward and backward of one micro-batch; return its detached loss. The body of `Trainer.training_step`."""
    args = trainer.args
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    inputs = trainer._prepare_inputs(inputs)
    settle_loss_scale(trainer, model, inputs, num_items_in_batch)
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    del inputs
    if args.torch_empty_cache_steps is not None and trainer.state.global_step % args.torch_empty_cache_steps == 0:
        _empty_cache(args.device)
    kwargs: dict[str, Any] = {}
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        kwargs["learning_rate"] = trainer._get_learning_rate()
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        is_scaled = by_items or trainer.compute_loss_func is not None
    if not is_scaled:
        loss = loss / trainer.current_gradient_accumulation_steps
    if trainer._reader is not None:
        weight = trainer._reader.weight(
            by_items=is_scaled and num_items_in_batch is not None, over_ranks=args.average_tokens_across_devices
        )
        loss = loss if weight == 1.0 else loss * weight
    fault_point("train.backward")
    # Not accelerator.backward(): it weighs by the batch that the loader gave last, and a window is read ahead.
    trainer.accelerator.unit_of(model).backward(loss, **kwargs)
    return loss.detach()


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()
