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
from accel_trainer.checkpoint.commit.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.commit.rename import sweep
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.best_model import verify_best
from accel_trainer.trainer.checkpoint.publishing import SaveSkippedError, save_checkpoint
from accel_trainer.trainer.checkpoint.resuming import Resumption, select_checkpoint
from accel_trainer.trainer.checkpoint.run_metrics import RunFigures, UpdateNote

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
        _figures: RunFigures
        is_sharded: bool
        args: Any
        control: Any
        state: Any

    _resumption: Resumption | None = None
    """Where the present train() goes on from."""
    _lock: DirectoryLock | None = None
    _staged: StagedDirectory | None = None
    """The directory that a save is writing."""
    _position: dict[str, Any] | None = None
    """While an update is under way: where the data stood before its batches were read."""
    _note: UpdateNote | None = None
    """Where rank 0 notes the updates after the first checkpoint."""

    @contextmanager
    def _resuming(self, given: Any) -> Iterator[str | None]:
        """Choose and verify a checkpoint for one train(), and return its path. Collective."""
        self._figures = RunFigures()
        self._position = None
        if given is not None and given is not False:
            self._resumption = select_checkpoint(given, self, self._figures)
        is_over = False
        try:
            yield None if self._resumption is None else str(self._resumption.path)
            is_over = True
        finally:
            self._end_note(is_over)
            self._resumption = None
            self._disown()

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Figures of the last train(), as they are logged: of its last save, of its resume, and of what that lost.

        `ckpt/stall_s` (how long training stood still), `ckpt/duration_s` (until the commit), `ckpt/bytes` (on the rank
        that commits), `resume/select_s`, `resume/verify_s`, `resume/load_s`, `resume/data_s`, `lost_steps` (updates
        that an earlier run is known to have done already) and, at the end, `goodput` (share of the time in new ones).
        """
        return dict(self._figures.values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; see upstream. The first log of training after a save or a resume has the figures of it, too.

        Callbacks and trackers see them; `state.log_history` does not keep them: it is saved, and that of a resumed run
        is that of an uninterrupted one.
        """
        figures: dict[str, float] = {}
        if "loss" in logs:
            figures = self._figures.take()
        elif "train_runtime" in logs:
            figures = self._figures.finish(self.state.global_step)
        logs.update(figures)
        super().log(logs, start_time)
        for name in figures:
            self.state.log_history[-1].pop(name, None)

    def _note_saved(self, run_dir: Path) -> None:
        """Take note of updates from the first checkpoint on."""
        if self._note is not None and self._note.path.parent != run_dir:
            self._end_note(is_over=True)  # of an earlier trial
        if self._note is not None:
            self._note.saved = self.state.global_step
        elif self.is_world_process_zero():
            self._note = UpdateNote.begin(run_dir, self.state.global_step)

    def _end_note(self, is_over: bool) -> None:
        note, self._note = self._note, None
        if note is not None:
            note.close(is_over=is_over)
        resumption = self._resumption
        if is_over and resumption is not None and resumption.noted_update is not None and self.is_world_process_zero():
            UpdateNote.remove(resumption.path.parent)

    @property
    def _loader_has_position(self) -> bool:
        """Whether the training loader begins where the checkpoint was written, by samples."""
        return self._resumption is not None and self._resumption.epoch is not None

    def _own(self, directory: Path) -> None:
        """Lock a run's directory until train() ends, and remove what dead runs left in it."""
        if self._lock is not None and self._lock.path.parent == directory.absolute():
            return
        self._disown()
        self._lock = DirectoryLock.take(directory / LOCK_NAME)
        sweep(directory)

    def _disown(self) -> None:
        """Give the lock back, if this rank has it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- resuming --------------------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the lengths of the run; see upstream. Moves the loader to where a checkpoint was written.

        Raises:
            IncompatibleCheckpointError: the data is other than that of the checkpoint.
        """
        values: Any = super().set_initial_training_values(args, dataloader)
        if self._resumption is not None:
            self._steps_in_epoch = values[5]
            values = self._resumption.take_position(self, dataloader, values)
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
        if self._resumption is None:
            return trained
        lost = self._resumption.lost_steps(self.state.global_step)
        if lost is not None:
            self._figures.add_loss(lost)
        if self.is_world_process_zero():
            upstream_logger.info(self._resumption.describe(self))
        if self._resumption.epoch is None:
            self._resumption.check_by_updates(self, trained[0] + trained[1] / self._steps_in_epoch)
            return trained
        return self._resumption.epoch, self._steps_in_epoch - self._resumption.steps_left

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._figures.resuming("load"):
            if checkpoint is None or self._resumption is None or self._resumption.restores_random_streams(self):
                super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._figures.resuming("load"):
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
            with self._figures.resuming("load"):
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
