"""The part of the Trainer that saves checkpoints and resumes from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.utils import logging as transformers_logging

from accel_trainer import logging
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.best_model import verify_best
from accel_trainer.trainer.checkpoint.publishing import SaveSkippedError, save_checkpoint
from accel_trainer.trainer.checkpoint.run_checkpoints import RunCheckpoints

__all__ = ["CheckpointMethods"]

if TYPE_CHECKING:
    from transformers import Trainer as _Upstream
else:
    _Upstream = object

logger = logging.get_logger(__name__)
# Users set the verbosity of its lines with `log_level` and with the switches of transformers.
upstream_logger = transformers_logging.get_logger("transformers.trainer")


class CheckpointMethods(_Upstream):
    """Saving and resuming, for the Trainer to inherit. Methods from `set_initial_training_values` on are upstream's."""

    if TYPE_CHECKING:
        is_sharded: bool
        args: Any
        control: Any
        state: Any

    run_checkpoints: RunCheckpoints
    """Of the present train(), or of the last one."""

    @contextmanager
    def _resuming(self, given: Any) -> Iterator[str | None]:
        """Choose and verify a checkpoint for one train(), and return its path. Collective."""
        self.run_checkpoints = checkpoints = RunCheckpoints(self.accelerator.process)
        if given is not None and given is not False:
            checkpoints.select(given, Path(self.args.output_dir), is_sharded=self.is_sharded)
        is_over = False
        try:
            yield None if checkpoints.resumption is None else str(checkpoints.resumption.path)
            is_over = True
        finally:
            checkpoints.close(is_over=is_over)

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Figures of the last train(), as they are logged: of its last save, of its resume, and of what that lost.

        `ckpt/stall_s` (how long training stood still), `ckpt/duration_s` (until the commit), `ckpt/bytes` (on the rank
        that commits), `resume/select_s`, `resume/verify_s`, `resume/load_s`, `resume/data_s`, `lost_steps` (updates
        that an earlier run is known to have done already) and, at the end, `goodput` (share of the time in new ones).
        """
        return dict(self.run_checkpoints.metrics.values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; see upstream. The first log of training after a save or a resume has the figures of it, too.

        Callbacks and trackers see them; `state.log_history` does not keep them: it is saved, and that of a resumed run
        is that of an uninterrupted one.
        """
        metrics: dict[str, float] = {}
        if "loss" in logs:
            metrics = self.run_checkpoints.metrics.take()
        elif "train_runtime" in logs:
            metrics = self.run_checkpoints.metrics.finish(self.state.global_step)
        logs.update(metrics)
        super().log(logs, start_time)
        for name in metrics:
            self.state.log_history[-1].pop(name, None)

    @property
    def _loader_has_position(self) -> bool:
        """Whether the training loader begins where the checkpoint was written, by samples."""
        resumption = self.run_checkpoints.resumption
        return resumption is not None and resumption.epoch is not None

    # --- resuming --------------------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the lengths of the run; see upstream. Moves the loader to where a checkpoint was written.

        Raises:
            IncompatibleCheckpointError: the data is other than that of the checkpoint.
        """
        values: Any = super().set_initial_training_values(args, dataloader)
        if self.run_checkpoints.resumption is not None:
            self._steps_in_epoch = values[5]
            values = self.run_checkpoints.resumption.take_position(self.args, dataloader, values)
        return values

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        trained: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        resumption, step = self.run_checkpoints.resumption, self.state.global_step
        if resumption is None:
            return trained
        lost = resumption.lost_steps(step)
        if lost is not None:
            self.run_checkpoints.metrics.record("lost_steps", float(lost))
        if self.is_world_process_zero():
            upstream_logger.info(resumption.describe(self.args, step, self.accelerator.num_processes))
        if resumption.epoch is not None:
            return resumption.epoch, self._steps_in_epoch - resumption.steps_left
        if not self.args.ignore_data_skip:
            resumption.check_by_updates(self.state, trained[0] + trained[1] / self._steps_in_epoch)
        return trained

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self.run_checkpoints.metrics.resuming("load"):
            if self._restores_random_streams(checkpoint):
                super()._load_rng_state(checkpoint)

    def _restores_random_streams(self, checkpoint: str | None) -> bool:
        resumption = self.run_checkpoints.resumption
        if checkpoint is None or resumption is None:
            return True
        return resumption.restores_random_streams(self.accelerator.process, self.args.seed, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self.run_checkpoints.metrics.resuming("load"):
            self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self, resume_from_checkpoint: str, model: nn.Module | None) -> None:
        if upstream_files.has_engine_state(resume_from_checkpoint):
            upstream_files.load_engine_state(self, resume_from_checkpoint)
        elif self.is_sharded:
            upstream_files.load_model(self, self.model if model is None else model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        verify_best(self, best)
        if self.is_sharded:
            logger.info("loading the best model from %s", best)
            upstream_files.load_model(self, self.model, best)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with self.run_checkpoints.metrics.resuming("load"):
                self._load_training_state(checkpoint)

    def _load_training_state(self, checkpoint: str) -> None:
        if upstream_files.has_engine_state(checkpoint):
            upstream_files.load_engine_scheduler(self, checkpoint)
            return
        if not upstream_files.has_optimizer(checkpoint):
            logger.warning(
                "%s holds no optimizer and scheduler state (it was saved with save_only_model, perhaps): training "
                "goes on from its weights with a new optimizer and a new schedule",
                checkpoint,
            )
            return
        if os.path.isfile(os.path.join(checkpoint, upstream_files.PLAIN_OPTIMIZER_NAME)) and not self.is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        upstream_files.load_optimizer(self, Path(checkpoint))
        upstream_files.load_scheduler(self, Path(checkpoint))

    # --- saving ----------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except SaveSkippedError:
            # It comes last but for on_save, whose callbacks look for the checkpoint.
            self.control.should_save = False

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save_checkpoint(self, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it; see upstream. Collective."""
        if not self.is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        upstream_files.save_model(self, output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        upstream_files.save_optimizer(self, output_dir)
