"""The part of the Trainer that saves checkpoints and resumes from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging as transformers_logging

from accel_trainer import logging
from accel_trainer.checkpoint.changed_run import UpdateBatch
from accel_trainer.checkpoint.checkpointer import SaveJob
from accel_trainer.checkpoint.commit.retry import save_persistently
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.weights.adapters import (
    ADAPTER_FILES,
    TRAINED_NAME,
    adapter_folders,
    has_adapters,
    saved_names,
    trained_beside,
)
from accel_trainer.checkpoint.weights.writing import users_class
from accel_trainer.config import NonFiniteAction
from accel_trainer.data.loader import PreparedDataLoader, skip_first_batches
from accel_trainer.errors import AccelTrainerError, ConfigError, IncompatibleCheckpointError
from accel_trainer.report.recorded_run import RECORD_KEY
from accel_trainer.runtime.nonfinite import check_weights
from accel_trainer.runtime.preemption import PREEMPTED_EXIT_CODE, PreemptedExit, StopSignals
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.local_replicas import (
    LocalReplicas,
    OuterOptimizer,
    configured_outer,
    require_replicas,
)
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.best_model import verify_best
from accel_trainer.trainer.checkpoint.resuming import (
    PREFIX,
    TRAINER_STATE_NAME,
    Resumption,
    pass_streams_name,
    rest_of_pass,
)
from accel_trainer.trainer.checkpoint.run_checkpoints import RunCheckpoints
from accel_trainer.trainer.decisions import Decisions
from accel_trainer.trainer.run_record import RunRecord
from accel_trainer.trainer.run_setup import RunLengths
from accel_trainer.trainer.running_trainer import CheckpointingTrainer

__all__ = ["CheckpointMethods", "begin_pass", "loading_by_override"]

if TYPE_CHECKING:
    from transformers import Trainer as _Upstream
else:
    _Upstream = object

logger = logging.get_logger(__name__)
# Users set the verbosity of its lines with `log_level` and with the switches of transformers.
upstream_logger = transformers_logging.get_logger("transformers.trainer")

RESERVED_NAMES = [
    "model*.safetensors*", "pytorch_model*", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*",
    "epoch_rng_state*", "outer_optimizer*", "global_step*", "latest", TRAINER_STATE_NAME,
]  # fmt: skip
"""Names under which a resume looks for something. Callbacks may put other files into a checkpoint that is complete."""


_ROLLED_BACK = (
    "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos",
    "num_input_tokens_seen",
)  # fmt: skip


class SaveSkippedError(AccelTrainerError):
    """A checkpoint could not be written, and the run goes on without it."""


class CheckpointMethods(_Upstream):
    """Saving and resuming, for the Trainer to inherit. Methods from `set_initial_training_values` on are upstream's."""

    if TYPE_CHECKING:
        is_sharded: bool
        args: Any
        control: Any
        state: Any
        _tr_loss: Tensor

    run_checkpoints: RunCheckpoints
    """Of the present train(), or of the last one."""
    run_record: RunRecord
    """Of the same."""

    stop_signals = StopSignals(())
    """Signals that end the present train() with a checkpoint."""
    decisions: Decisions | None = None
    ends_evaluations = False
    given_batch: tuple[int, int] | None = None
    """Micro-batch and accumulation of the arguments, where an elastic job with fewer ranks trains with others."""
    local_replicas: LocalReplicas | None = None
    """Of the present train(), where `local_steps` lets each rank update its own."""

    # --- updates of each rank's own --------------------------------------------------------------------------------

    def begin_local_updates(self, checkpoint: str | None) -> None:
        """Let each rank update its own replica of the model from now on, if `local_steps` is set. Not collective.

        Raises:
            ConfigError: the strategy keeps no replicas, or the optimizer has other weights in evaluations.
            IncompatibleCheckpointError: the run that saved `checkpoint` had another outer optimizer.
        """
        accelerator, config = self.accelerator, self.accelerator.config
        if config.local_steps is None or accelerator.num_processes == 1:
            return
        if callable(getattr(self.optimizer.optimizer, "eval", None)):
            raise ConfigError(
                f"{accelerator.resolved.describe('local_steps')} was asked for with "
                f"{type(self.optimizer.optimizer).__name__}, which puts other weights into the model for an "
                "evaluation: that of the mean of all replicas would not be theirs; use another optimizer"
            )
        unit, is_scaled = accelerator.unit_of(self.model), accelerator.scaler is not None
        replicas = require_replicas(unit.local_replicas, unit.module, accelerator.strategy.name, is_scaled)
        build = configured_outer(config.outer_optimizer)
        outer = None if build is None else OuterOptimizer(unit.module, build)
        if checkpoint is not None:
            upstream_files.load_outer_optimizer(outer, replicas, Path(checkpoint))
        replicas.begin(outer, max(config.local_steps_after - self.state.global_step, 0))
        self.local_replicas = replicas

    def end_local_updates(self, *, is_failed: bool) -> None:
        """Make the replicas alike, if each rank has updated its own. Collective, unless this rank has failed."""
        replicas, self.local_replicas = self.local_replicas, None
        if replicas is not None:
            replicas.abandon() if is_failed else replicas.finish()

    def mean_of_replicas(self) -> AbstractContextManager[None]:
        """Context in which the model is the mean of all replicas, where each rank has updated its own. Collective."""
        return nullcontext() if self.local_replicas is None else self.local_replicas.as_mean()

    # --- ending at a signal ----------------------------------------------------------------------------------------

    def _signals_to_note(self) -> tuple[str, ...]:
        """Return the names of the signals that the run saves and ends at; none where it saves nothing."""
        saves = self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint
        return self.args.resolved.config.preemption.signals if saves else ()

    @property
    def is_preempted(self) -> bool:
        """Whether the ranks have agreed to save and end here, for a signal to one of them."""
        if self.decisions is None:
            return self.stop_signals.is_requested and self.accelerator.num_processes == 1
        return self.decisions.is_preempted

    def begin_decisions(self) -> None:
        """Begin the decisions that the ranks of a run take together, unless they have begun. Collective."""
        if self.decisions is None and self.accelerator.num_processes > 1:
            self.decisions = Decisions(self, self.stop_signals)

    def is_preempted_in_evaluation(self, loader: DataLoader) -> bool:
        """Whether a signal ends the evaluation after this batch. Collective if one has come."""
        if self.decisions is not None:
            rows = getattr(loader, "rows", None)
            if rows is None or len(rows.rows) != self.accelerator.readers.world_size:
                return False  # ranks may differ in how many batches they have
            self.decisions.end_evaluation_batch()
        return self.is_preempted

    def save_and_end(self, model: nn.Module, trial: Any) -> NoReturn:
        """Save where training stands, unless that has been done or there is no time, and end with code 85. Collective.

        Raises:
            PreemptedExit: always.
        """
        step, signals = self.state.global_step, self.stop_signals
        grace = self.args.resolved.config.preemption.grace_seconds
        last = self.run_checkpoints.metrics.save_seconds
        if no_time := signals.find_no_time(grace, last, self.accelerator.process):
            done = f"no checkpoint is saved: {no_time}"
        elif self.run_checkpoints.last_saved == step:
            done = f"checkpoint-{step} has been saved before"
        else:
            done = f"checkpoint-{step} " + ("is saved" if self.save_and_call_back(model, trial) else "was not written")
        logger.warning(
            "%s came: training ends after update %d, and %s. The process ends with exit code %d; start it again with "
            "resume_from_checkpoint=True", signals.name, step, done, PREEMPTED_EXIT_CODE,
        )  # fmt: skip
        raise PreemptedExit

    def save_and_call_back(self, model: nn.Module, trial: Any) -> bool:
        """Save a checkpoint, and call back; return whether it was written. Collective."""
        try:
            self._save_checkpoint(model, trial)
        except SaveSkippedError:
            self.control.should_save = False  # and no on_save, whose callbacks look for the checkpoint
            return False
        with raise_together(self.accelerator.process, "on_save"):
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return True

    def _finish_boundary(
        self, model: nn.Module, trial: Any, ignore_keys: Any, start_time: float, *, saves: bool
    ) -> None:
        """Do the evaluation, and the save after it, that a signal to the run that this one resumes has cut. Collective.

        Args:
            saves: the random streams and the loader are where a checkpoint has to have them.
        """
        resumption = self.run_checkpoints.resumption
        if resumption is None or not resumption.takes_pending(self.control):
            return
        if self.decisions is None:  # nothing is left to be trained
            self.begin_decisions()
            self._load_rng_state(str(resumption.path))
        self.control.should_save &= saves
        self._maybe_log_save_evaluate(
            self._tr_loss, None, model, trial, self.state.epoch or 0.0, ignore_keys, start_time
        )
        if self.is_preempted:
            self.save_and_end(model, trial)

    @contextmanager
    def _resuming(self, given: Any) -> Iterator[str | None]:
        """Choose and verify a checkpoint for one train(), and return its path. Collective."""
        self.run_checkpoints = checkpoints = RunCheckpoints(
            self.accelerator.process,
            saves_within_updates=self.args.enable_jit_checkpoint
            or bool(self._signals_to_note())
            and self.args.gradient_accumulation_steps > 1,
        )
        if given in ("True", "true", "False", "false") and not os.path.exists(given):
            given = given.lower() == "true"  # scripts hand on what stood on their command lines
        if given is not True:
            given = checkpoints.find_own(Path(self.args.output_dir)) or given
        if given is not None and given is not False:
            checkpoints.select(given, Path(self.args.output_dir), is_sharded=self.is_sharded, verify=self.args.verify)
        is_over = False
        try:
            yield None if checkpoints.resumption is None else str(checkpoints.resumption.path)
            is_over = True
        finally:
            checkpoints.close(is_over=is_over)

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Metrics of the last train(), as they are logged: of its last save, of its resume, and of the updates it lost.

        `ckpt/stall_s` (how long training stood still), `ckpt/duration_s` (until the commit), `ckpt/bytes` (on the rank
        that commits), `resume/select_s`, `resume/verify_s`, `resume/load_s`, `resume/data_s`, `lost_steps` (updates
        that an earlier run is known to have done already) and, at the end, `goodput` (share of the time in new ones).
        """
        return dict(self.run_checkpoints.metrics.values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; see upstream. The first log of training after a save or a resume has its metrics, too.

        Callbacks and trackers see them. `state.log_history` keeps those of the last log, which has all of them; it
        leaves out the others: checkpoints hold it, and that of a resumed run is that of an uninterrupted one.
        """
        metrics: dict[str, float] = {}
        is_last = "train_runtime" in logs  # upstream adds one to others, where it counts tokens
        if "loss" in logs:
            metrics = self.run_checkpoints.metrics.take()
            self.run_record.add_point(self)
        elif is_last:
            metrics = self.run_checkpoints.metrics.finish(self.state.global_step)
        logs.update(metrics)
        place = len(self.state.log_history)
        super().log(logs, start_time)
        if not is_last:
            for name in metrics:
                self.state.log_history[place].pop(name, None)

    @property
    def _loader_has_position(self) -> bool:
        """Whether the training loader begins where the checkpoint was written, by samples."""
        resumption = self.run_checkpoints.resumption
        return resumption is not None and resumption.epoch is not None

    # --- resuming --------------------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the lengths of the run; see upstream. Moves the loader to where a checkpoint was written.

        Raises:
            IncompatibleCheckpointError: the data is other than that of the checkpoint, or updates have other samples.
        """
        values: Any = super().set_initial_training_values(args, dataloader)
        self.run_record.lengths = RunLengths(*values)
        resumption = self.run_checkpoints.resumption
        if resumption is not None:
            self._check_run(resumption, self._train_batch_size, is_searched=True)  # an attempt may have a smaller batch
            self._steps_in_epoch = values[5]
            values = resumption.take_position(self.args, dataloader, values)
            self.run_record.lengths = RunLengths(*values)
            resumption.warn_of_batch(self.args, self._update_batch(self._train_batch_size), values[6])
        return values

    def order_batch(self) -> tuple[int, int]:
        """Return the micro-batch and the accumulation with which the order of the samples is made: the run's first."""
        args, resumption = self.args, self.run_checkpoints.resumption
        saved = None if resumption is None or args.ignore_data_skip else resumption.order_batch
        return saved or self.given_batch or (args.per_device_train_batch_size, args.gradient_accumulation_steps)

    def _check_run(self, resumption: Resumption, micro_batch: int, *, is_searched: bool) -> None:
        """Refuse to go on as a run that means something else; see `Resumption.check_run`."""
        action = self.accelerator.config.on_changed_run
        resumption.check_run(self.args, self._update_batch(micro_batch), action, is_searched=is_searched)

    def _update_batch(self, micro_batch: int) -> UpdateBatch:
        """Return the samples of an update with so many in a micro-batch."""
        args, own = self.args, self._train_batch_size
        num_samples = self.get_total_train_batch_size(args) // own * micro_batch
        return UpdateBatch(
            num_samples, self.accelerator.readers.world_size, micro_batch, args.gradient_accumulation_steps
        )

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
        self.state.train_batch_size = self._train_batch_size  # the one in force, for a later search to begin with
        self.state.max_steps -= self.run_checkpoints.num_taken_back  # their data has been read
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

    def roll_back(self, found: str, trial: Any, num_read: int) -> None:
        """Load the newest checkpoint of this train(); the data goes on where it is, random streams too. Collective.

        Args:
            found: what is wrong with an update.
            num_read: the updates that data has been read for, this one among them.

        Raises:
            NonFiniteError: there is no checkpoint yet, or the run has gone back to it too often.
        """
        run, state, run_dir = self.run_checkpoints, self.state, Path(self._get_output_dir(trial=trial))
        path = run.select_own(run_dir, is_sharded=self.is_sharded, verify=self.args.verify)
        self.accelerator.nonfinite_guard.begin_rollback(found, path)
        checkpoint = str(path)
        with loading_by_override(self):
            self._load_from_checkpoint(checkpoint)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        saved = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        for name in _ROLLED_BACK:
            setattr(state, name, getattr(saved, name))
        start = torch.zeros_like(self._tr_loss), 0.0, saved.global_step  # of one that this train() began with
        losses = run.running_losses.get(saved.global_step, start)
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = losses[0].clone(), losses[1], losses[2]
        self.current_flos = 0.0
        run.num_taken_back += num_read - saved.global_step
        state.max_steps -= num_read - saved.global_step

    def _load_rng_state(self, checkpoint: str | None) -> None:
        resumption, process = self.run_checkpoints.resumption, self.accelerator.process
        with self.run_checkpoints.metrics.resuming("load"):
            if (
                checkpoint is None
                or resumption is None
                or resumption.restores_random_streams(
                    process, self.accelerator.readers, self.args.seed, self.state.global_step
                )
            ):
                super()._load_rng_state(checkpoint)

    def resume_running_loss(self) -> None:
        """Go on with the mean since the last log, where a checkpoint lies between two. Not collective.

        `train_loss` stays that of the updates since the resume, as with transformers.
        """
        run, process = self.run_checkpoints, self.accelerator.process
        saved = None if run.resumption is None else run.resumption.progress.get("running_loss")
        if saved is None:
            return
        by_rank = [math.nan if loss is None else loss for loss in saved["by_rank"]]
        mean = sum(by_rank) / len(by_rank)
        self._tr_loss += by_rank[process.rank] if len(by_rank) == process.world_size else mean
        self._total_loss_scalar, self._globalstep_last_logged = -mean, saved["since"]
        run.running_losses[self.state.global_step] = self._tr_loss.clone(), -mean, saved["since"]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory, own = Path(resume_from_checkpoint), self.model if model is None else model
        with self.run_checkpoints.metrics.resuming("load"):
            if upstream_files.has_engine_state(resume_from_checkpoint):
                upstream_files.load_engine_state(self, resume_from_checkpoint)
            elif _holds_adapters(self, directory):
                upstream_files.load_adapters(self, directory)
            elif self.is_sharded:
                upstream_files.load_model(self, own, directory)
            elif not upstream_files.load_as_held(self, own, directory):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        _check_weights(self, own, f"load of {directory}", "load")

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        verify_best(self, best)
        if _holds_adapters(self, best):
            logger.info("loading the best adapters from %s", best)
            upstream_files.load_adapters(self, best)
        elif self.is_sharded:
            logger.info("loading the best model from %s", best)
            upstream_files.load_model(self, self.model, best)
        elif not upstream_files.load_as_held(self, self.model, best):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self.run_checkpoints.metrics.resuming("load"):
            if upstream_files.has_engine_state(checkpoint):
                upstream_files.load_engine_scheduler(self, checkpoint)
            elif not upstream_files.has_optimizer(checkpoint):
                logger.warning(
                    "%s holds no optimizer and scheduler state (it was saved with save_only_model, perhaps): training "
                    "goes on from its weights with a new optimizer and a new schedule",
                    checkpoint,
                )
            elif Path(checkpoint, upstream_files.PLAIN_OPTIMIZER_NAME).is_file() and not self.is_sharded:
                try:
                    super()._load_optimizer_and_scheduler(checkpoint)
                except ValueError as error:
                    sizes = [len(group["params"]) for group in self.optimizer.param_groups]
                    raise IncompatibleCheckpointError(
                        f"the state of optimizer and schedule in {checkpoint} does not fit this run's, whose parameter "
                        f"groups have {sizes} parameters: {error}. Build the model and the optimizer that were saved, "
                        "or begin a new training from the checkpoint's weights: pass the directory as the model"
                    ) from error
            else:
                upstream_files.load_optimizer(self, Path(checkpoint))
                upstream_files.load_scheduler(self, Path(checkpoint))

    # --- saving ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Contents and order are those of upstream's own. Where on_save_error="warn" goes on without: SaveSkippedError.
        args, state, run = self.args, self.state, self.run_checkpoints
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        target = run_dir / f"{PREFIX}{state.global_step}"
        limit = args.save_total_limit

        def survivors() -> list[Path]:
            best = state.best_model_checkpoint
            return [target, run_dir / Path(best).name] if best else [target]

        job = SaveJob(
            section=f"save of {target}",
            directory=run_dir,
            name=None,
            number=state.global_step,
            write=partial(_write, self, target),
            need_bytes=_need_bytes(self),
            policy=args.save_policy,
            each_node=args.save_on_each_node,
            # Of an earlier run in this folder, or with files that callbacks put there: upstream writes over it.
            replaces=True,
            keep=limit if limit is not None and limit > 0 else None,
            protected=survivors,
        )
        self.accelerator.check_replicas(job.section)
        best, is_saved = state.best_model_checkpoint, False
        try:
            is_saved = run.checkpointer.save(job) is not None
        finally:
            if not is_saved:
                state.best_model_checkpoint = best
        if not is_saved:
            raise SaveSkippedError(f"{target} was not written")
        run.note_saved(run_dir, state.global_step)
        losses = self._tr_loss.clone(), self._total_loss_scalar, self._globalstep_last_logged
        run.running_losses[state.global_step] = losses
        if args.push_to_hub:
            push = partial(_push, self, target)
            save_persistently(push, self.accelerator.process, args.save_policy, f"push of {target}")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it; see upstream. Collective."""
        _check_weights(self, self.model, f"save_model to {output_dir or self.args.output_dir}", "save")
        if self.local_replicas is not None and self.local_replicas.is_apart:
            logger.warning_once(
                "save_model is called between two exchanges of local_steps: these are rank 0's weights; checkpoints, "
                "and the model after train(), have the mean of all replicas"
            )
        if not self.is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        upstream_files.save_model(self, output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        is_for_this_node = self.args.save_on_each_node and self.args.should_save
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False) if is_for_this_node else None
        if self.args.should_save and not upstream_files.is_of_transformers(self.model):
            state_dict = upstream_files.storable(self.model.state_dict() if state_dict is None else state_dict)
        with upstream_files.saving_on_this_rank(model), upstream_files.without_secrets(self.args):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        upstream_files.save_optimizer(self, output_dir)


def _holds_adapters(trainer: CheckpointingTrainer, checkpoint: Path) -> bool:
    """Whether the model has adapters, and a checkpoint holds some."""
    return bool(adapter_folders(trainer.model)) and has_adapters(checkpoint)


@contextmanager
def loading_by_override(trainer: CheckpointMethods) -> Iterator[None]:
    """Context in which a library's own `_load_from_checkpoint` finds a sharded model to be as any other.

    That of sentence-transformers builds another model of the model's class from the checkpoint, and hands its state to
    `load_state_dict`. Both are the user's here, and the state is loaded into the shards. Nothing without an override.
    """
    model = trainer.model
    is_own = type(trainer)._load_from_checkpoint is CheckpointMethods._load_from_checkpoint
    if is_own or not trainer.is_sharded or not trainer.accelerator.is_prepared(model):
        yield
        return
    model.load_state_dict = trainer.accelerator.unit_of(model).checkpoint_io().load_full_model_state
    try:
        with users_class(model), trainer.args.whole_models():
            yield
    finally:
        del model.load_state_dict


def begin_pass(
    trainer: CheckpointMethods, loader: Any, num_trained: int, checkpoint: str | None
) -> tuple[Any, str | None]:
    """Return the rest of a pass over the training loader, and where random streams are still to be restored from.

    Before the first window is read, as a rule: collators and datasets draw, and a pass that begins within an epoch
    does not. A stream without a position is read up to there first, and those draws are of batches left out.

    Args:
        num_trained: micro-batches of the epoch that are trained already.
        checkpoint: of the resume that this pass goes on from; None in later ones.
    """
    is_left_out, run = num_trained > 0 and not trainer._loader_has_position, trainer.run_checkpoints
    if checkpoint is not None and run.resumption is not None:
        run.resumption.restore_pass_streams(trainer.accelerator.process, loader, is_within_pass=is_left_out)
    if is_left_out and not isinstance(loader, PreparedDataLoader):
        run.note_pass(loader)
        return rest_of_pass(loader, num_trained, partial(trainer._load_rng_state, checkpoint)), None
    if is_left_out:
        loader = skip_first_batches(loader, num_trained)
    if checkpoint is not None and not (is_left_out and isinstance(loader.dataset, IterableDataset)):
        trainer._load_rng_state(checkpoint)
        checkpoint = None
    run.note_pass(loader)
    return loader, checkpoint


def _push(trainer: CheckpointingTrainer, target: Path) -> None:
    """Have a committed checkpoint uploaded, in the background; the main process copies it first. Collective."""
    with raise_together(trainer.accelerator.process, f"push of {target}"):
        # The directory is uploaded with all its files, and the lock is not for others.
        trainer.run_checkpoints.checkpointer.release_directory()
        trainer._push_from_checkpoint(str(target))


def _write(trainer: CheckpointingTrainer, target: Path, staged: StagedDirectory) -> None:
    """Write the files of the checkpoint `target`. Collective."""
    args, process = trainer.args, trainer.accelerator.process
    directory = os.fspath(staged)
    trainer.run_checkpoints.staged = staged
    with trainer.mean_of_replicas():
        with raise_together(process, f"save of {target}"):  # the optimizer's state is gathered next
            trainer.save_model(directory, _internal_call=True)
        with raise_together(process, f"save of {target}"):
            upstream_files.save_trained_beside(trainer, staged)
    _name_best(trainer, target)
    if not args.save_only_model:
        trainer._save_optimizer_and_scheduler(directory)
        trainer._save_scaler(directory)
        with trainer.run_checkpoints.streams_of_position():
            trainer._save_rng_state(directory)
        if (streams := trainer.run_checkpoints.pass_streams) is not None:
            with staged.open(pass_streams_name(process.rank)) as file:
                torch.save(streams.state_dict(), file)
    if args.should_save:
        _save_state(trainer, os.path.join(directory, TRAINER_STATE_NAME))
    staged.metadata |= {"trainer": _describe_progress(trainer), "reserved_names": _reserved_names(trainer.model)}
    staged.metadata[RECORD_KEY] = trainer.run_record.to_plain(trainer)
    staged.metadata["tied"] = _tied_names(trainer.model)


def _reserved_names(model: nn.Module) -> list[str]:
    # Of the model's own adapters alone: scripts of old have callbacks that save them to another folder once more.
    places = [Path(folder, name).as_posix() for folder in adapter_folders(model).values() for name in ADAPTER_FILES]
    return [*RESERVED_NAMES, TRAINED_NAME, *places]


def _need_bytes(trainer: CheckpointingTrainer) -> int:
    """About how many bytes this rank needs: for its state, or for full weights, twice where it gathers them."""
    model, io = trainer.model, trainer.accelerator.unit_of(trainer.model).checkpoint_io()
    weights = 0
    if trainer.args.should_save:
        state = model.state_dict(keep_vars=True)
        if adapter_folders(model):
            names = saved_names(model, io.lazy_model_state())
            state = {name: state[name] for name in [*names, *trained_beside(model, names)]}
        held = {id(value): value for value in state.values()}
        weights = sum(value.numel() * value.element_size() for value in held.values() if isinstance(value, Tensor))
    own = 0 if trainer.args.save_only_model else io.local_bytes(weights=not adapter_folders(model))
    if trainer.local_replicas is not None and trainer.local_replicas.is_apart:
        return weights + (0 if trainer.args.save_only_model else io.local_bytes())
    return max(weights * (2 if trainer.is_sharded else 1), own)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that tied parameters have beside their first one: files of weights hold one of them."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: kept for name, parameter in named if (kept := first.setdefault(id(parameter), name)) != name}


def _name_best(trainer: CheckpointingTrainer, target: Path) -> None:
    """Name the best checkpoint in the state, if it is there: this one is about to be."""
    state = trainer.state
    strategies = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
    if trainer.args.save_strategy in strategies and state.best_global_step:
        best = target.with_name(f"{PREFIX}{state.best_global_step}")
        if best == target or best.is_dir():
            state.best_model_checkpoint = str(best)


def _save_state(trainer: CheckpointingTrainer, path: str) -> None:
    state = trainer.state
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, content = type(callback).__name__, callback.state()
            if isinstance(state.stateful_callbacks[name], list):
                state.stateful_callbacks[name].append(content)
            else:
                state.stateful_callbacks[name] = content
    state.save_to_json(path)


def _describe_progress(trainer: CheckpointingTrainer) -> dict[str, Any]:
    """Return the progress of a run, as plain JSON, for the manifest of the checkpoint that it writes. Collective."""
    position = trainer.run_checkpoints.position(trainer.callback_handler.train_dataloader)
    if position is not None:
        try:
            json.dumps(position)
        except TypeError:  # the dataset's own state: it is read again up to the sample instead
            position["dataset_state"] = None
    return {
        "global_step": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "readers": trainer.accelerator.readers.world_size,
        "update_batch": trainer.get_total_train_batch_size(trainer.args),
        "micro_batch": trainer._train_batch_size,
        "accumulation_steps": trainer.args.gradient_accumulation_steps,
        "order_batch": trainer.order_batch(),
        "taken_back": trainer.run_checkpoints.num_taken_back,
        "running_loss": _describe_running_loss(trainer),
        "has_training_state": not trainer.args.save_only_model,
        "position": position,
        "job": trainer.run_checkpoints.job,
        # Where a signal ends the run: the evaluation of this update, and a save after it.
        "pending": {"evaluate": True, "save": trainer.control.should_save} if trainer.control.should_evaluate else None,
    }


def _describe_running_loss(trainer: CheckpointingTrainer) -> dict[str, Any] | None:
    """Return the ranks' losses since the last log, and when that was; None where it was now. Collective."""
    since = trainer._globalstep_last_logged
    if trainer.run_checkpoints.is_in_update or since == trainer.state.global_step:
        return None
    by_rank = trainer.accelerator.gather(trainer._tr_loss).tolist()
    return {"since": since, "by_rank": [loss if math.isfinite(loss) else None for loss in by_rank]}  # JSON has no NaN


def _check_weights(trainer: CheckpointMethods, model: nn.Module, section: str, doing: Literal["save", "load"]) -> None:
    """Refuse to save, or to go on from, weights that are no numbers. Collective where ranks hold shards."""
    # Replicas are the same on every rank, and some scripts save on the main process alone.
    process = trainer.accelerator.process if trainer.is_sharded else None
    is_forced = trainer.accelerator.config.on_nonfinite is NonFiniteAction.WARN
    check_weights(model.named_parameters(), section, process, is_forced=is_forced, doing=doing)
