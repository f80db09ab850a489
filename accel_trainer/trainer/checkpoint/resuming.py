"""A Trainer's resume, in the order in which it happens.

`_resuming` chooses a checkpoint and verifies it; the loader goes to the sample that is next; weights, optimizer and
schedule are loaded; random streams come last, and what a signal has cut is done. A rollback and the best model are
loaded the same way.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState
from transformers.utils import logging as transformers_logging

from accel_trainer import logging
from accel_trainer.checkpoint.changed_run import UpdateBatch
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.object_store import is_uri
from accel_trainer.checkpoint.reader import Selection
from accel_trainer.checkpoint.store import numbered_checkpoints, retire
from accel_trainer.checkpoint.weights.weight_files import users_class
from accel_trainer.data.loader import PreparedDataLoader, skip_first_batches
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.runtime.shared_errors import gather_calls, gather_or_raise, raise_together
from accel_trainer.runtime.torch_private import LOADER_AT_REST
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.local_replicas import OuterOptimizer, configured_outer, require_replicas
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.resumption import Resumption
from accel_trainer.trainer.checkpoint.saving import RunCheckpoints, SavingMethods, UpdateNote, _check_weights
from accel_trainer.trainer.checkpoint.upstream_files import (
    PREFIX,
    TRAINER_STATE_NAME,
    check_contents,
    check_named,
    files_to_read,
)
from accel_trainer.trainer.training_data import packs_rows

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)
# Users set the verbosity of its lines with `log_level` and with the switches of transformers.
upstream_logger = transformers_logging.get_logger("transformers.trainer")

_ROLLED_BACK = (
    "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos",
    "num_input_tokens_seen",
)  # fmt: skip
_WORDS = {"True": True, "true": True, "latest": True, "auto": True, "False": False, "false": False}
"""What `resume_from_checkpoint` may be that names no path: scripts hand on what stood on their command lines."""
_WEIGHTS = re.compile(
    r"(model|pytorch_model|trained_weights|averages)[^/]*|([^/]+/)?adapter_model[^/]*|pytorch_model_fsdp_0/.*"
)


class ResumingMethods(SavingMethods):
    """Resuming, for the Trainer to inherit."""

    @contextmanager
    def _resuming(self, given: Any) -> Iterator[str | None]:
        """Choose and verify a checkpoint for one train(), and return its path. Collective."""
        self.run_checkpoints = checkpoints = RunCheckpoints(
            self.accelerator.process,
            saves_within_updates=self.args.enable_jit_checkpoint
            or bool(self._signals_to_note())
            and self.args.gradient_accumulation_steps > 1,
            config=self.args.resolved.config,
        )
        given = None if self.accelerator.process.is_alone else _found(self, given)
        is_wanted: Callable[[Manifest], bool] | None = None
        if given is not True and checkpoints.attempt > 0:
            # The arguments are those of the first start: what this job has saved since is newer than what they name.
            found = find_own(checkpoints, Path(self.args.output_dir))
            logger.warning(
                "the workers were started again, %d time(s): training %s in %s", checkpoints.attempt,
                "begins anew, this job had saved no checkpoint" if found is None
                else "goes on from the newest checkpoint that this job has saved", self.args.output_dir,
            )  # fmt: skip
            given, is_wanted = found or given, partial(_has, "job", checkpoints.job)
        if given is not None and given is not False:
            select(self, given, is_wanted)
        is_over = False
        try:
            yield None if checkpoints.resumption is None else str(checkpoints.resumption.path)
            is_over = True
        finally:
            checkpoints.close(is_over=is_over)

    def begin_local_updates(self, checkpoint: str | None) -> None:
        """Let each rank update its own replica of the model from now on, if `local_steps` is set. Not collective."""
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

    @section("load")
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        directory, own = Path(resume_from_checkpoint), self.model if model is None else model
        with self.run_checkpoints.metrics.resuming("load"):
            if upstream_files.has_engine_state(resume_from_checkpoint):
                upstream_files.load_engine_state(self, resume_from_checkpoint)
            elif not upstream_files.load_weights(self, own, directory):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        _check_weights(self, own, f"load of {directory}", "load")

    @section("load")
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

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the lengths of the run; see upstream. Moves the loader to where a checkpoint was written."""
        values: Any = super().set_initial_training_values(args, dataloader)
        self.run_lengths = values
        resumption = self.run_checkpoints.resumption
        if resumption is not None:
            self._check_run(resumption, is_searched=True)  # an attempt may have a smaller batch
            self._steps_in_epoch = values[5]
            packs = packs_rows(self.args, self.train_dataset)
            values = resumption.take_position(self.args, dataloader, values, packs=packs)
            self.run_lengths = values
            resumption.warn_of_batch(self.args, self._update_batch(), values[6])
        return values

    def order_batch(self) -> tuple[int, int]:
        """Return the micro-batch and the accumulation with which the order of the samples is made: the run's first."""
        args, resumption = self.args, self.run_checkpoints.resumption
        saved = None if resumption is None or args.ignore_data_skip else resumption.order_batch
        return saved or self.given_batch or (args.per_device_train_batch_size, args.gradient_accumulation_steps)

    def _check_run(self, resumption: Resumption, *, is_searched: bool) -> None:
        """Refuse to go on as a run that means something else; see `Resumption.check_run`."""
        resumption.check_run(self.args, self._update_batch(), is_searched=is_searched)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an update over all ranks; see upstream, which counts a split batch once for each."""
        total: int = super().get_total_train_batch_size(args)
        accelerator = self.accelerator
        return total // accelerator.readers.world_size if accelerator.config.data.split_batches else total

    def _update_batch(self) -> UpdateBatch:
        """Return the samples of an update."""
        args, lost, readers = self.args, self.accelerator.lost_ranks, self.accelerator.readers.world_size
        # Updates of a job that goes on without ranks are those of all that it began with.
        num_shards = readers if lost is None else lost.num_shards
        num_samples, micro_batch = self.get_total_train_batch_size(args), self._train_batch_size
        if self.accelerator.config.data.split_batches:
            micro_batch //= num_shards
        else:
            num_samples = num_samples // readers * num_shards
        return UpdateBatch(num_samples, num_shards, micro_batch, args.gradient_accumulation_steps)

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

    @property
    def _loader_has_position(self) -> bool:
        """Whether the training loader begins where the checkpoint was written, by samples."""
        resumption = self.run_checkpoints.resumption
        return resumption is not None and resumption.epoch is not None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        resumption = self.run_checkpoints.resumption
        with self.run_checkpoints.metrics.resuming("load"):
            if checkpoint is None or resumption is None or resumption.restores_random_streams(self):
                super()._load_rng_state(checkpoint)

    def resume_running_loss(self) -> None:
        """Go on with the mean since the last log, where a checkpoint lies between two. Not collective."""
        # `train_loss` stays that of the updates since the resume, as with transformers.
        run, process = self.run_checkpoints, self.accelerator.process
        _begin_meters(self, {} if run.resumption is None else run.resumption.progress)
        saved = None if run.resumption is None else run.resumption.progress.get("running_loss")
        if saved is None:
            return
        by_rank = [math.nan if loss is None else loss for loss in saved["by_rank"]]
        mean = sum(by_rank) / len(by_rank)
        self._tr_loss += by_rank[process.rank] if len(by_rank) == process.world_size else mean
        self._total_loss_scalar, self._globalstep_last_logged = -mean, saved["since"]
        run.running_losses[self.state.global_step] = self._tr_loss.clone(), -mean, saved["since"]

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

    @section("load")
    def roll_back(self, found: str, trial: Any, num_read: int) -> None:
        """Load the newest checkpoint of this train(); the data goes on where it is, random streams too. Collective.

        Args:
            found: what is wrong with an update.
            num_read: the updates that data has been read for, this one among them.
        """
        self.finish_save()
        run, state, run_dir = self.run_checkpoints, self.state, Path(self._get_output_dir(trial=trial))
        path = find_own(run, run_dir) or (run.resumption and run.resumption.path)
        selection = _select(self, path, run_dir, partial(_has, "job", run.job)) if path else None
        self.accelerator.nonfinite_guard.begin_rollback(found, selection and selection.path)
        assert selection is not None
        checkpoint = str(selection.path)
        with loading_by_override(self):
            self._load_from_checkpoint(checkpoint)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        upstream_files.load_averages(self, checkpoint)
        saved = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        for name in _ROLLED_BACK:
            setattr(state, name, getattr(saved, name))
        start = torch.zeros_like(self._tr_loss), 0.0, saved.global_step  # of one that this train() began with
        losses = run.running_losses.get(saved.global_step, start)
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = losses[0].clone(), losses[1], losses[2]
        _begin_meters(self, Resumption(selection, None).progress)
        self.current_flos = 0.0
        run.num_taken_back += num_read - saved.global_step
        state.max_steps -= num_read - saved.global_step

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        verify_best(self, best)
        if not upstream_files.load_weights(self, self.model, best):
            super()._load_best_model()
        upstream_files.load_averages(self, best, into_model=True)  # with which it was the best


def _found(trainer: Trainer, given: Any) -> Any:
    """Return the path of a checkpoint that an address names, fetched; whatever else was given as it is. Collective."""
    config, checkpointer = trainer.args.resolved.config, trainer.run_checkpoints.checkpointer
    if config.checkpoint_uri is not None and trainer.hp_search_backend is not None:
        raise ConfigError(
            f"{trainer.args.resolved.describe('checkpoint_uri')} in a search: trials would send checkpoints of "
            "the same names to one address; search without it, and train with the best values"
        )
    directory = Path(trainer.args.output_dir)
    if is_uri(given):
        return str(checkpointer.fetch(given, directory))
    if not isinstance(given, str) or given not in _WORDS or os.path.exists(given):
        return given
    if given == "auto" and not checkpointer.has_any(directory):
        logger.info(
            "resume_from_checkpoint='auto': there is no checkpoint in %s, and the run begins",
            checkpointer.places(directory),
        )
        return None
    return _WORDS[given]


def _begin_meters(trainer: Trainer, progress: Mapping[str, Any]) -> None:
    """Have the meters go on where a checkpoint was written, or begin. Not collective."""
    if (meters := trainer.accelerator.meters) is not None:
        seconds = trainer.run_clock.work_seconds(trainer.run_checkpoints.metrics.stalled_seconds)
        meters.begin(progress.get("tokens_seen", 0), trainer.state.global_step, seconds)


def select(
    trainer: Trainer,
    given: bool | str | os.PathLike[str],
    is_wanted: Callable[[Manifest], bool] | None = None,
) -> None:
    """Choose the checkpoint to resume from, the newest good one of the run for True. Collective: rank 0 decides."""
    run, run_dir = trainer.run_checkpoints, Path(trainer.args.output_dir)
    selection = _select(trainer, given, run_dir, is_wanted)
    is_own = selection.path.absolute().parent == run_dir.absolute()
    note = UpdateNote.read(run_dir) if is_own else None
    noted_update = gather_or_raise(run.checkpointer.process, f"load of {selection.path}", None, note)[0]
    run.resumption = Resumption(selection, noted_update)
    run.num_taken_back = run.resumption.progress.get("taken_back", 0)
    if selection.stored is None and selection.path.is_dir():
        logger.warning(
            "%s was not written by accel_trainer: it has no %s, so that its contents cannot be verified",
            selection.path, MANIFEST_NAME,
        )  # fmt: skip


def _select(
    trainer: Trainer, given: bool | str | os.PathLike[str], run_dir: Path, is_wanted: Callable[[Manifest], bool] | None
) -> Selection:
    """Return the newest good checkpoint for True, else the one that was named, which has to be good. Collective.

    Of those in a store that are newer, one that `is_wanted`; None takes any.
    """
    checkpointer, verify = trainer.run_checkpoints.checkpointer, trainer.args.verify
    process, passed_over = checkpointer.process, list[str]()
    files = partial(files_to_read, process=process, is_sharded=trainer.is_sharded)
    if given is not True:
        selection = checkpointer.select_named(Path(str(given)), verify, files)
        with raise_together(process, f"load of {selection.path}"):
            check_named(selection.path, run_dir)
            check_contents(selection, process)
        return selection
    missing = ConfigError(
        f"No valid checkpoint found in output directory ({run_dir}): there is no {PREFIX}N in "
        f"{checkpointer.places(run_dir)}; train without resume_from_checkpoint first, or give "
        "resume_from_checkpoint='auto', which begins where there is none"
    )
    while True:
        selection = checkpointer.select_newest(run_dir, verify, files, missing, passed_over, is_wanted)
        try:
            # Files whose checksums fit may hold something else than a Trainer's state: then an older one is taken.
            with raise_together(process, f"load of {selection.path}"):
                check_contents(selection, process)
        except Exception as error:  # each rank has one, its own or a ProcessGroupError: all take part in the vote
            if not checkpointer.pass_over_together(selection, error):
                raise
            passed_over = selection.passed_over
        else:
            return selection


def _has(name: str, value: Any, manifest: Manifest) -> bool:
    """Whether the progress of a Trainer's checkpoint has a value."""
    progress = manifest.metadata.get("trainer", {})
    return isinstance(progress, dict) and progress.get(name) == value


def find_own(run: RunCheckpoints, run_dir: Path) -> Path | bool | None:
    """Return the newest checkpoint of this train(), True where it is the newest of all, or None. Collective.

    Where rank 0's disk has none, as of a machine that took another's place, it is the newest of the store.
    """
    process = run.checkpointer.process
    is_own = partial(_has, "job", run.job)

    def find() -> Path | bool | str | None:
        if not process.is_main:
            return None
        for index, (_, path) in enumerate(reversed(numbered_checkpoints(run_dir, PREFIX))):
            with suppress(CheckpointNotFoundError, IncompatibleCheckpointError):
                if is_own(Manifest.read(path)):
                    return index == 0 or path
        return run.checkpointer.find_stored(is_own)

    found = gather_calls(process, f"selection of a checkpoint in {run_dir}", find)[0]
    return run.checkpointer.fetch(found, run_dir) if isinstance(found, str) else found


@contextmanager
def loading_by_override(trainer: Trainer) -> Iterator[None]:
    """Context in which a library's own `_load_from_checkpoint` finds a sharded model to be as any other."""
    # That of sentence-transformers builds another model of the model's class from the checkpoint, and hands its state
    # to `load_state_dict`. Both are the user's here, and the state is loaded into the shards. Nothing without an
    # override.
    model = trainer.model
    is_own = type(trainer)._load_from_checkpoint is ResumingMethods._load_from_checkpoint
    if is_own or not trainer.is_sharded or not trainer.accelerator.is_prepared(model):
        yield
        return
    model.load_state_dict = trainer.accelerator.unit_of(model).checkpoint_io().load_full_model_state
    try:
        with users_class(model), trainer.args.whole_models():
            yield
    finally:
        del model.load_state_dict


def begin_pass(trainer: Trainer, loader: Any, num_trained: int, checkpoint: str | None) -> tuple[Any, str | None]:
    """Return the rest of a pass over the training loader, and where random streams are still to be restored from.

    Args:
        num_trained: micro-batches of the epoch that are trained already.
        checkpoint: of the resume that this pass goes on from; None in later ones.
    """
    # Streams are restored before the first window is read, as a rule: collators and datasets draw, and a pass that
    # begins within an epoch does not. A stream without a position is read up to there first: batches left out.
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


def rest_of_pass(loader: Any, num_batches: int, reached: Callable[[], None]) -> Iterable[Any]:
    """Return a pass over a loader of the user's own without its first batches, in the order of the full pass.

    A map-style dataset is not read to get there; anything else is. Before the first batch that is left is drawn,
    `reached` is called.
    """
    is_torchs = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    if not is_torchs or isinstance(loader.dataset, IterableDataset):
        return _Rest(loader, num_batches, reached)
    rest, name = copy.copy(loader), "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(rest).update({name: _Rest(getattr(loader, name), num_batches, reached), **LOADER_AT_REST})
    return rest


@dataclass(frozen=True, slots=True)
class _Rest:
    """The entries of an iterable after the first ones."""

    entries: Iterable[Any]
    num_before: int
    reached: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        entries = iter(self.entries)
        deque(islice(entries, self.num_before), maxlen=0)
        self.reached()
        yield from entries


@contextmanager
def keeping_best(trainer: Trainer, run_dir: Path) -> Iterator[None]:
    """Name rank 0's best checkpoint on all ranks and, with `save_total_limit=1`, keep it alone. Collective.

    One of another run, whose directory it is in, leaves both directories as they are.
    """
    # Upstream does so without verification: it would remove the last good checkpoint beside a best one that
    # is corrupt, and also directories that are no complete checkpoint of this Trainer.
    args, state, run = trainer.args, trainer.state, trainer.run_checkpoints
    best = state.best_model_checkpoint
    is_here = best is not None and Path(best).parent.resolve() == run_dir.resolve()
    step = None if run.resumption is None else state.best_global_step
    # Each rank has looked for its directory by itself, and loading it is collective.
    best, is_here, step = gather_or_raise(run.checkpointer.process, "end of training", None, (best, is_here, step))[0]
    if best is None and args.load_best_model_at_end and step:
        best = _fetch_best(run, run_dir, step)
        is_here = best is not None
    state.best_model_checkpoint = best
    if args.load_best_model_at_end and best is None:
        logger.warning(
            "load_best_model_at_end=True, and there is no checkpoint of the best model (its update was %s): the model "
            "is that of the last update",
            state.best_global_step,
        )
    limit = args.save_total_limit
    if limit == 1 and best is not None and is_here:
        run.checkpointer.finish_uploads()  # of some that are to go
        _retire_others(trainer, Path(best))
    args.save_total_limit = None if limit == 1 else limit
    try:
        yield
    finally:
        args.save_total_limit = limit


def _fetch_best(run: RunCheckpoints, run_dir: Path, step: int) -> str | None:
    """Copy the best checkpoint from the store, of a run that has lost its disk; None where it has none. Collective."""
    find, process = partial(run.checkpointer.find_stored, partial(_has, "global_step", step)), run.checkpointer.process
    found = gather_calls(process, "end of training", find if process.is_main else lambda: None)[0]
    return None if found is None else str(run.checkpointer.fetch(found, run_dir))


def _retire_others(trainer: Trainer, best: Path) -> None:
    flaw: str | None = None
    try:
        stored = trainer.run_checkpoints.checkpointer.open_named(best)
        flaw = None if stored is None else stored.find_flaw_together()
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        flaw = str(error)
    if flaw is not None:
        logger.warning("the best checkpoint is not good, and the others stay. %s", flaw)
    elif trainer.args.should_save:
        retire(best.parent, 1, [best], prefix=PREFIX)


def verify_best(trainer: Trainer, best: Path) -> None:
    """Verify the weights of the best checkpoint before they are loaded. Collective; one without manifest passes."""
    try:
        stored = trainer.run_checkpoints.checkpointer.open_named(best, trainer.args.verify)
        if stored is not None:
            stored.verify_together(name for name in stored.manifest.files if _WEIGHTS.fullmatch(name))
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        raise type(error)(
            f"{error}. It holds the best model, which load_best_model_at_end=True would load now; the model has the "
            "weights of the last update, which save_model() writes"
        ) from error
