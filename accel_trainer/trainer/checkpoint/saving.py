"""A Trainer's save, from the notes of an update to the upload of the written files.

In the order in which it happens: `RunCheckpoints` notes positions and random streams, `_save_checkpoint` names the
directory and the room it needs, `_write` fills it, and the checkpointer commits it; `save_and_end` saves at a signal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from accel_trainer import logging
from accel_trainer.checkpoint.background import save_persistently
from accel_trainer.checkpoint.changed_run import RECORD_KEY
from accel_trainer.checkpoint.checkpointer import Checkpointer, CheckpointMetrics, SaveJob
from accel_trainer.checkpoint.disk import open_own, read_regular
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.weights.adapters import (
    ADAPTER_FILES,
    TRAINED_NAME,
    adapter_folders,
    saved_names,
    trained_beside,
)
from accel_trainer.checkpoint.weights.into_model import names_by_tensor
from accel_trainer.checkpoint.weights.offloaded import offloaded_tensors
from accel_trainer.config import NonFiniteAction, RunConfig
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.errors import AccelTrainerError, ConfigError
from accel_trainer.runtime.nonfinite import check_weights
from accel_trainer.runtime.preemption import PREEMPTED_EXIT_CODE, PreemptedExit, StopSignals
from accel_trainer.runtime.process import ProcessContext, find_attempt, read_environment
from accel_trainer.runtime.rng import KeptStreams, get_rng_state, set_rng_state
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.runtime.whereabouts import for_all, section
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.trainer.arguments.training_arguments import setting
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.resumption import generators_of
from accel_trainer.trainer.checkpoint.upstream_files import (
    PREFIX,
    TRAINER_CHECKPOINTS,
    TRAINER_STATE_NAME,
    pass_streams_name,
)
from accel_trainer.trainer.run_clock import RunObserver
from accel_trainer.trainer.signals import Decisions

if TYPE_CHECKING:
    from transformers import Trainer as _Upstream

    from accel_trainer import Trainer
    from accel_trainer.trainer.checkpoint.resumption import Resumption
else:
    _Upstream = object

logger = logging.get_logger(__name__)
_trains = itertools.count()

NOTE_NAME = "_last_update"
"""In a run's directory. Begins as `_lock` does: pushing the directory to a hub leaves such names out."""
RESERVED_NAMES = [
    "model*.safetensors*", "pytorch_model*", "optimizer*", "averages.*", "scheduler.pt", "scaler.pt", "rng_state*",
    "epoch_rng_state*", "outer_optimizer*", "global_step*", "latest", TRAINER_STATE_NAME,
]  # fmt: skip
"""Names under which a resume looks for something. Callbacks may put other files into a checkpoint that is complete."""


class SaveSkippedError(AccelTrainerError):
    """A checkpoint could not be written, and the run goes on without it."""


class SavingMethods(_Upstream):
    """Saving, for the Trainer to inherit."""

    if TYPE_CHECKING:
        is_sharded: bool
        args: Any
        control: Any
        state: Any
        _tr_loss: Tensor

    run_checkpoints: RunCheckpoints
    """Of the present train(), or of the last one."""
    run_report: RunObserver
    run_lengths: tuple[Any, ...]
    """Of it, as `set_initial_training_values` returns them."""

    stop_signals = StopSignals(())
    """Signals that end the present train() with a checkpoint."""
    decisions: Decisions | None = None
    ends_evaluations = False
    given_batch: tuple[int, int] | None = None
    """Micro-batch and accumulation of the arguments, where an elastic job with fewer ranks trains with others."""
    local_replicas: LocalReplicas | None = None
    """Of the present train(), where `local_steps` lets each rank update its own."""

    def mean_of_replicas(self) -> AbstractContextManager[None]:
        """Context in which the model is the mean of all replicas, where each rank has updated its own. Collective."""
        return nullcontext() if self.local_replicas is None else self.local_replicas.as_mean()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averages of its weights, where `ema_decay` keeps some.

        Every rank enters it: `evaluate` and `predict` do, and a callback may, to call `save_model` in it. It is of use
        in `train()`, at whose end the averages become the model's weights.
        """
        accelerator, model = self.accelerator, self.model
        return accelerator.unit_of(model).averaged_weights() if accelerator.is_prepared(model) else nullcontext()

    @section("save")
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Contents and order are those of upstream's own. Where on_save_error="warn" goes on without: SaveSkippedError.
        args, state, run = self.args, self.state, self.run_checkpoints
        self.finish_save()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        target = run_dir / f"{PREFIX}{state.global_step}"
        limit = args.save_total_limit

        def survivors() -> list[Path]:
            # Also one that is in the store alone: the run goes on on another machine.
            best = {Path(state.best_model_checkpoint or target).name, f"{PREFIX}{state.best_global_step}"}
            return [target, *(run_dir / name for name in best)]

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
            # Not the last one of a run that a signal ends: nothing is left to be done meanwhile.
            in_background=self.accelerator.config.save_async and not self.is_preempted,
            ends_run=self.is_preempted,
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
        run.num_saved_logs = len(state.log_history)
        losses = self._tr_loss.clone(), self._total_loss_scalar, self._globalstep_last_logged
        run.running_losses[state.global_step] = losses
        if job.in_background:
            run.in_flight = BackgroundSave(target, state.global_step, best)
        else:
            self._end_save(target, state.global_step)

    def _end_save(self, target: Path, step: int) -> None:
        """Note and push the committed checkpoint of an update. Collective."""
        self.run_checkpoints.note_saved(target.parent, step)
        if self.args.push_to_hub:
            push = partial(_push, self, target)
            save_persistently(push, self.accelerator.process, self.args.save_policy, f"push of {target}")

    def finish_save(self, *, waits: bool = True) -> None:
        """End the background save in flight: note it, push it and call back. Collective.

        Args:
            waits: otherwise nothing is done until every rank has ended it.

        Raises:
            ProcessGroupError: another rank has failed to write; there, its error.
        """
        run, state = self.run_checkpoints, self.state
        save, background = run.in_flight, run.checkpointer.background
        if save is None or background is None:
            return
        try:
            if waits:
                begin = time.perf_counter()
                background.wait()
                run.metrics.stalled_seconds += time.perf_counter() - begin
            elif not background.poll():
                return
        finally:
            if not background.in_flight:
                run.in_flight = None
                if not background.is_committed and state.best_model_checkpoint == str(save.target):
                    state.best_model_checkpoint = save.best_before
        if background.is_committed:
            self._end_save(save.target, save.step)
            is_due = self.control.should_save  # of the update that has just ended
            with setting(state, global_step=save.step):  # callbacks find the checkpoint by it
                self._call_back()
            if self.decisions is not None:
                self.decisions.end_save(self.control)
            self.control.should_save = is_due

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        upstream_files.save_optimizer(self, output_dir)

    @section("save")
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it; see upstream. Collective."""
        _check_weights(self, self.model, f"save_model to {output_dir or self.args.output_dir}", "save")
        # The thread that uploads reads the files that are written here.
        self._finish_current_push()
        if self.local_replicas is not None and self.local_replicas.is_apart:
            logger.warning_once(
                "save_model is called between two exchanges of local_steps: these are rank 0's weights; checkpoints, "
                "and the model after train(), have the mean of all replicas"
            )
        if not self.is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        is_overridden = type(self)._save is not SavingMethods._save
        upstream_files.save_model(self, output_dir or self.args.output_dir, is_overridden=is_overridden)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @for_all
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        is_for_this_node = self.args.save_on_each_node and self.args.should_save
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False) if is_for_this_node else None
        if self.args.should_save and not upstream_files.is_of_transformers(self.model):
            state = self.model.state_dict() if state_dict is None else state_dict
            state_dict = upstream_files.storable({**state, **offloaded_tensors(self.model)})
        with upstream_files.saving_on_this_rank(model), upstream_files.without_secrets(self.args):
            super()._save(output_dir, state_dict)

    def save_and_call_back(self, model: nn.Module, trial: Any) -> bool:
        """Save a checkpoint, and call back once it is committed; return whether it was begun. Collective."""
        try:
            self._save_checkpoint(model, trial)
        except SaveSkippedError:
            self.control.should_save = False  # and no on_save, whose callbacks look for the checkpoint
            return False
        if self.run_checkpoints.in_flight is None:
            self._call_back()
        self.control.should_save = False
        return True

    def _call_back(self) -> None:
        with raise_together(self.accelerator.process, "on_save"):
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Metrics of the last train(), as callbacks get them: of its last save, its resume, and the updates it lost.

        `ckpt/stall_s` (how long training stood still), `ckpt/duration_s` (until the commit), `ckpt/bytes` (on the rank
        that commits), `resume/select_s`, `resume/verify_s`, `resume/load_s`, `resume/data_s`, `lost_steps` (updates
        that an earlier run is known to have done already) and, at the end, `goodput` (share of the time in new ones).
        """
        return dict(self.run_checkpoints.metrics.values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; see upstream. Callbacks get the metrics of a save or a resume, too, with the first loss after it."""
        # Neither `state.log_history` nor what train() returns has them: both are compared with those of another run
        # (upstream's check_trainer_state_are_the_same), and checkpoints hold the history.
        metrics: dict[str, float] = {}
        if "loss" in logs or "train_runtime" in logs:  # upstream adds one to others, where it counts tokens
            metrics = self.run_checkpoints.metrics.take()
        place, shown = len(self.state.log_history), logs | metrics
        super().log(shown, start_time)
        for name in metrics:
            self.state.log_history[place].pop(name, None)
        logs.update((name, value) for name, value in shown.items() if name not in metrics)  # the epoch, of upstream

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

    def end_decisions(self, *, is_failed: bool) -> None:
        """End the common decisions of a run's ranks; `is_failed` where the others may still wait for this one."""
        decisions, self.decisions = self.decisions, None
        if decisions is not None:
            decisions.close(is_failed=is_failed)

    def is_preempted_in_evaluation(self, loader: DataLoader) -> bool:
        """Whether a signal ends the evaluation after this batch. Collective if one has come."""
        if self.decisions is not None:
            rows = getattr(loader, "rows", None)
            if rows is None or len(rows.rows) != self.accelerator.readers.world_size:
                return False  # ranks may differ in how many batches they have
            self.decisions.end_evaluation_batch()
        return self.is_preempted

    def save_and_end(self, model: nn.Module, trial: Any) -> NoReturn:
        """Save where training stands, unless it is saved or there is no time, and end with code 85. Collective."""
        run, step, signals = self.run_checkpoints, self.state.global_step, self.stop_signals
        grace = self.args.resolved.config.preemption.grace_seconds
        last = run.metrics.save_seconds
        self.finish_save()
        # What has been logged since, or is still to be evaluated, at the end of an epoch, that save does not hold.
        is_same = run.num_saved_logs == len(self.state.log_history) and not self.control.should_evaluate
        if no_time := signals.find_no_time(grace, last, self.accelerator.process):
            done = f"no checkpoint is saved: {no_time}"
        elif run.last_saved == step and is_same:
            done = f"checkpoint-{step} has been saved before"
        else:
            done = f"checkpoint-{step} " + ("is saved" if self.save_and_call_back(model, trial) else "was not written")
        logger.warning(
            "%s came: training ends after update %d, and %s. The process ends with exit code %d; start it again with "
            "resume_from_checkpoint=True", signals.name, step, done, PREEMPTED_EXIT_CODE,
        )  # fmt: skip
        run.checkpointer.finish_uploads()  # one that nodes have left out, too: the disks may go with the machines
        raise PreemptedExit


def _need_bytes(trainer: Trainer) -> int:
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


def _write(trainer: Trainer, target: Path, staged: StagedDirectory) -> None:
    """Write the files of the checkpoint `target`. Collective."""
    args, process = trainer.args, trainer.accelerator.process
    directory = os.fspath(staged)
    trainer.run_checkpoints.staged = staged
    with trainer.mean_of_replicas():
        # Together: the optimizer's state is gathered next.
        with raise_together(process, f"save of {target}"), upstream_files.weights_in_background(staged):
            trainer.save_model(directory, _internal_call=True)
        with raise_together(process, f"save of {target}"):
            upstream_files.save_trained_beside(trainer, staged)
        with raise_together(process, f"save of {target}"):
            upstream_files.save_averages(trainer, staged)
    state = trainer.state
    if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) and state.best_global_step:
        _name_best(trainer, target)
    if not args.save_only_model:
        trainer._save_optimizer_and_scheduler(directory)
        trainer._save_scaler(directory)
        with trainer.run_checkpoints.streams_of_position():
            trainer._save_rng_state(directory)
        if (streams := trainer.run_checkpoints.pass_streams) is not None:
            staged.write_torch(pass_streams_name(process.rank), streams.state_dict(), is_private=True)
    if args.should_save:
        _save_state(trainer, os.path.join(directory, TRAINER_STATE_NAME))
    # Of the model's own adapters alone: scripts of old have callbacks that save them to another folder once more.
    folders = adapter_folders(trainer.model).values()
    places = [Path(folder, name).as_posix() for folder in folders for name in ADAPTER_FILES]
    names = names_by_tensor(dict(trainer.model.named_parameters(remove_duplicate=False))).values()
    staged.metadata |= {
        "trainer": _describe_progress(trainer),
        "reserved_names": [*RESERVED_NAMES, TRAINED_NAME, *places],
        RECORD_KEY: trainer.run_report.to_plain(),
        # Files of weights hold tied parameters under the first of their names.
        "tied": {name: first for first, *tied in names for name in tied},
    }


def _name_best(trainer: Trainer, target: Path) -> None:
    """Note the best checkpoint where it is there: that which is being written, or one of this run."""
    state, run = trainer.state, trainer.run_checkpoints
    best = target.with_name(f"{PREFIX}{state.best_global_step}")
    # One that neither this run has saved, nor that which it goes on from, is another's.
    goes_on = run.resumption is not None and run.resumption.path.parent.resolve() == target.parent.resolve()
    is_own = goes_on or state.best_global_step in run.running_losses
    if best == target or (is_own and best.is_dir()):
        state.best_model_checkpoint = str(best)


@for_all
def _save_state(trainer: Trainer, path: str) -> None:
    state = trainer.state
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, content = type(callback).__name__, callback.state()
            if isinstance(state.stateful_callbacks[name], list):
                state.stateful_callbacks[name].append(content)
            else:
                state.stateful_callbacks[name] = content
    state.save_to_json(path)


def _describe_progress(trainer: Trainer) -> dict[str, Any]:
    """Return the progress of a run, as plain JSON, for the manifest of the checkpoint that it writes. Collective."""
    meters = trainer.accelerator.meters
    position = trainer.run_checkpoints.position(trainer.callback_handler.train_dataloader)
    if position is not None:
        position["is_complete"] |= trainer.control.should_epoch_stop
        try:
            json.dumps(position)
        except TypeError:  # the dataset's own state: it is read again up to the sample instead
            position["dataset_state"] = None
    batch = trainer._update_batch()
    return {
        "global_step": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "readers": batch.num_readers,
        "update_batch": batch.num_samples,
        "micro_batch": batch.micro_batch,
        "accumulation_steps": batch.accumulation_steps,
        "order_batch": trainer.order_batch(),
        "taken_back": trainer.run_checkpoints.num_taken_back,
        "running_loss": _describe_running_loss(trainer),
        "tokens_seen": 0 if meters is None else meters.count_tokens(trainer.get_tp_size()),
        "has_training_state": not trainer.args.save_only_model,
        "position": position,
        "job": trainer.run_checkpoints.job,
        # Where a signal ends the run: the evaluation of this update, and a save after it.
        "pending": {"evaluate": True, "save": trainer.control.should_save} if trainer.control.should_evaluate else None,
    }


def _describe_running_loss(trainer: Trainer) -> dict[str, Any] | None:
    """Return the ranks' losses since the last log, and when that was; None where it was now. Collective."""
    since = trainer._globalstep_last_logged
    if trainer.run_checkpoints.is_in_update or since == trainer.state.global_step:
        return None
    by_rank = trainer.accelerator.gather(trainer._tr_loss).tolist()
    return {"since": since, "by_rank": [loss if math.isfinite(loss) else None for loss in by_rank]}  # JSON has no NaN


def _push(trainer: Trainer, target: Path) -> None:
    """Have a committed checkpoint uploaded, in the background; the main process copies it first. Collective."""
    with raise_together(trainer.accelerator.process, f"push of {target}"):
        # The directory is uploaded with all its files, and the lock is not for others.
        trainer.run_checkpoints.checkpointer.release_directory()
        if trainer.args.hub_always_push:
            # Upstream copies the next weights over those that its thread reads; without the option it skips a push.
            trainer._finish_current_push()
        trainer._push_from_checkpoint(str(target))
        # Upstream sets it on the rank that pushes, and there with the first push only.
        for job in getattr(getattr(trainer, "push_in_progress", None), "jobs", ()):
            job.add_done_callback(_note_failed_push)


def _note_failed_push(job: Future[Any]) -> None:
    """Say why a push did not arrive: upstream waits for its thread and never asks."""
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.warning(
            "a push to the hub failed (%s: %s); its files are on this disk only, until the next push or "
            "trainer.push_to_hub()", type(error).__name__, error,
        )  # fmt: skip


def _check_weights(trainer: Trainer, model: nn.Module, section: str, doing: Literal["save", "load"]) -> None:
    """Refuse to save, or to go on from, weights that are no numbers. Collective where ranks hold shards."""
    # Replicas are the same on every rank, and some scripts save on the main process alone.
    process = trainer.accelerator.process if trainer.is_sharded else None
    is_forced = trainer.accelerator.config.on_nonfinite is NonFiniteAction.WARN
    check_weights(model.named_parameters(), section, process, is_forced=is_forced, doing=doing)


@dataclass(frozen=True, slots=True)
class BackgroundSave:
    """A save that a thread is writing."""

    target: Path
    step: int
    best_before: str | None
    """The best model's checkpoint, should this one not be written."""


class RunMetrics(CheckpointMetrics):
    """The metrics of one train(), each to be logged once when it is new; see `SavingMethods.checkpoint_metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at: int | None = None
        """The update after which this train() goes on; None until it does."""
        self._unlogged: list[str] = []
        self._begin = time.perf_counter()

    def record(self, name: str, value: float) -> None:
        """Set a metric, to be logged next."""
        super().record(name, value)
        self._unlogged.append(name)

    def take(self) -> dict[str, float]:
        """Return the metrics that are not logged yet, rounded as transformers rounds its times."""
        unlogged, self._unlogged = self._unlogged, []
        return {name: round(self.values[name], 4) for name in dict.fromkeys(unlogged)}

    def finish(self, last_update: int) -> None:
        """Have all metrics logged once more, with the share of the time that went into updates nobody had done before.

        None of a run that neither saved nor resumed. It ends with `last_update`.
        """
        if self.values:
            wall = max(time.perf_counter() - self._begin, 1e-9)
            num_updates = last_update - (last_update if self.begun_at is None else self.begun_at)
            again = min(self.values.get("lost_steps", 0.0) / max(num_updates, 1), 1.0)
            self.values["goodput"] = max(wall - self.stalled_seconds, 0.0) * (1.0 - again) / wall
            self._unlogged = list(self.values)


class RunCheckpoints:
    """State of a Trainer's saves and of its resume, from the beginning of one train() to its end."""

    def __init__(
        self, process: ProcessContext, *, saves_within_updates: bool = False, config: RunConfig | None = None
    ) -> None:
        self.metrics = RunMetrics()
        store, pace = (None, None) if config is None else (config.checkpoint_uri, config.checkpoint_mib_per_second)
        self.checkpointer = Checkpointer(process, TRAINER_CHECKPOINTS, self.metrics, store, pace)
        self.resumption: Resumption | None = None
        """The checkpoint that this train() goes on from."""
        self.in_flight: BackgroundSave | None = None
        self.staged: StagedDirectory | None = None
        """The directory of the last save. Files that this package writes to it are hashed on their way."""
        self.gathers_later = True
        """Whether the thread of a background save may gather weights: until one is stored otherwise than it is held."""
        self.pass_streams: PassStreams | None = None
        """Of the pass over the training data that began last, where its order depends on them."""
        self._position: Callable[[], dict[str, Any]] | None = None
        # Then the random streams are remembered before each update, too: 15 us.
        self._saves_within_updates = saves_within_updates
        self.attempt, job = find_attempt(read_environment())
        self.job = f"{job}#{next(_trains)}"
        """Name of this train() of this job, the same where the launcher has started the workers again."""
        self._streams: dict[str, Any] | None = None
        self._note: UpdateNote | None = None
        self.last_saved: int | None = None
        """The last update of which this train() has saved a checkpoint."""
        self.num_saved_logs = 0
        """Entries of the log that the last save holds."""
        self.num_taken_back = 0
        """Updates that were read, and that a rollback has taken back, since the beginning of the run."""
        self.is_in_update = False
        """Whether micro-batches of an update have been read that is not done: who resumes begins it again."""
        self.running_losses: dict[int, tuple[Tensor, float, int]] = {}
        """By update that was saved: the loss since the last log, the sum of those logged, and the last that was."""

    def note_pass(self, loader: Any) -> None:
        """Remember the streams and counts that fix the order of a pass over the training data, before it begins."""
        self.pass_streams = None if isinstance(loader, PreparedDataLoader) else PassStreams(loader)

    def begin_update(self, loader: Any) -> None:
        """Remember the position of the training loader, before the batches of an update are read."""
        self.is_in_update = True
        self._position = loader.noted_state_dict() if isinstance(loader, PreparedDataLoader) else None
        if self._saves_within_updates:
            self._streams = get_rng_state()

    def end_update(self, step: int | None) -> None:
        """Forget that position, and note the update; None where there were no batches for one."""
        self.is_in_update = False
        self._position = self._streams = None
        if self._note is not None and step is not None:
            self._note.write(step)

    def position(self, loader: Any) -> dict[str, Any] | None:
        """Return the loader's position after the last update that is complete; None of one not made by us."""
        if self._position is not None:
            return self._position()
        return loader.state_dict() if isinstance(loader, PreparedDataLoader) else None

    @contextmanager
    def streams_of_position(self) -> Iterator[None]:
        """Context in which the random streams are where they were at `position`: before the next batch is read."""
        if self._streams is None:
            if self._position is not None:
                logger.warning(
                    "a checkpoint is saved while an update is under way, and a run that resumes from it does that "
                    "update again: what it draws for dropout and data is other than now. Save at the end of an update "
                    "(control.should_save), or set enable_jit_checkpoint=True, which remembers the streams before each"
                )
            yield
            return
        with KeptStreams():
            set_rng_state(self._streams)
            yield

    def note_saved(self, run_dir: Path, step: int) -> None:
        """Take note of updates from the first checkpoint on; on rank 0, elsewhere nothing."""
        self.last_saved = step
        if self._note is not None and self._note.directory != run_dir:
            self._note.close(is_over=True)  # of an earlier trial
            self._note = None
        if self._note is not None:
            self._note.saved = step
        elif self.checkpointer.process.is_main:
            with suppress(OSError, ConfigError):
                self._note = UpdateNote(run_dir, step)

    def close(self, *, is_over: bool) -> None:
        """End the note and release the run's directory; if `is_over`, nothing of the run is left to be done again."""
        resumption, self.resumption = self.resumption, None
        if self._note is not None:
            self._note.close(is_over=is_over)
            self._note = None
        was_noted = resumption is not None and resumption.noted_update is not None
        if is_over and resumption is not None and was_noted and self.checkpointer.process.is_main:
            UpdateNote.remove(resumption.path.parent)
        self.checkpointer.close(is_failed=not is_over)


class PassStreams:
    """The random streams that a pass over a loader of the user's own takes its order from, as the pass began."""

    # A loader that the Accelerator has prepared needs none: seed and epoch are its order.

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._begun = {"streams": get_rng_state(), "generators": _states_of(loader)}

    def state_dict(self) -> dict[str, Any]:
        """Return them as plain values and tensors, with those of the loader's generators as they are now."""
        return {**self._begun, "generators_since": _states_of(self._loader)}


def _states_of(loader: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators_of(loader)]


class UpdateNote:
    """The number of a run's last update, in a file for the run that resumes; written in place, and never synced."""

    # It survives the process, and not the machine. It serves a metric only: where it cannot be written, there is none.

    def __init__(self, directory: Path, saved: int) -> None:
        """Begin to take note in a run's directory, at an update that was just saved; OSError where that cannot be."""
        self.directory = directory
        self.saved = saved
        """The last update of which there is a checkpoint."""
        # Kept open: on a network disk an open and a close would cost every update a round trip or two.
        self._descriptor = open_own(directory / NOTE_NAME)
        if re.fullmatch(rb"(\d{20}\n)?", os.pread(self._descriptor, 22, 0)) is None:
            os.close(self._descriptor)
            raise FileExistsError(f"{directory / NOTE_NAME} is no note of an update")
        self.write(saved)

    @staticmethod
    def read(directory: Path) -> int | None:
        """Return the last update that a run has noted there; None where there is no note, or none that can be read."""
        try:
            return int(read_regular(directory / NOTE_NAME, 21))
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the note of a run that has come to its end."""
        with suppress(OSError):
            (directory / NOTE_NAME).unlink()

    def write(self, update: int) -> None:
        """Note an update that is complete."""
        self._update = update
        with suppress(OSError):
            os.pwrite(self._descriptor, b"%020d\n" % update, 0)

    def close(self, *, is_over: bool) -> None:
        """Leave the note to the run that resumes, if it has an update to do again."""
        os.close(self._descriptor)
        if is_over or self._update <= self.saved:
            self.remove(self.directory)
