"""The part of the Accelerator that saves and resumes training states."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_trainer import logging
from accel_trainer.accelerator.accumulation import OpenWindows
from accel_trainer.accelerator.lost_ranks import repeated_by_those_left
from accel_trainer.accelerator.options import set_options
from accel_trainer.accelerator.single_files import AcceleratorWeights
from accel_trainer.checkpoint.changed_run import UpdateBatch, UpdateBatchChange, describe_changes
from accel_trainer.checkpoint.checkpointer import SaveJob
from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.checkpoint.interop.foreign_states import is_accelerate_or_dcp_state, load_accelerate_or_dcp_state
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.object_store import is_uri, shown
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import CheckpointKind, Selection, Verify, check_verify
from accel_trainer.checkpoint.run_state import (
    MAIN_PROCESS_OF,
    TrainState,
    files_to_read,
    load_train_state,
    save_train_state,
)
from accel_trainer.checkpoint.store import PREFIX
from accel_trainer.data.loader import LoaderCheckpoint
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, DesyncError
from accel_trainer.runtime.preemption import StopPoint, run_until_stop, warn_of_new_beginning
from accel_trainer.runtime.process import find_attempt, read_environment
from accel_trainer.runtime.shared_errors import gather_calls, raise_together
from accel_trainer.runtime.whereabouts import section, users_line

logger = logging.get_logger(__name__)

SAVED_STATES = CheckpointKind(reads_without_manifest=is_accelerate_or_dcp_state)
"""The checkpoints of `save_state`, and the states of other libraries that `load_state` reads."""

_OPTIONS_KEY = "options"
"""Of a manifest's metadata: the options of the run that saved it."""
_BATCHES_KEY = "update_batches"
"""Of a manifest's metadata: the samples of an update from each loader; None where batches vary in size."""
_TOKENS_KEY = "tokens_seen"
"""Of a manifest's metadata: the tokens of all ranks until then, where meters have counted them."""
_FINITE_KEY = "finite_up_to"
"""Of a manifest's metadata, where all weights were looked at and are numbers: the largest that their dtypes have."""

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
"""Called with the models, without DDP's or a compiler's wrapper, their weights, and the directory to write into."""
LoadHook = Callable[[list[nn.Module], str], None]
"""Called with the models, without a wrapper, and the directory to read from."""


class RegisteredState:
    """Objects and hooks of the user that take part in `save_state` and `load_state`."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()

    def add(self, name: str | None, item: Any) -> None:
        """Register an object, once; its class names it where the user does not."""
        if any(known is item for known in self.objects.values()):
            return
        if name is not None and name in self.objects:
            raise ConfigError(f"an object is registered for checkpointing as {name!r} already; choose another name")
        stem, count = name or type(item).__name__, 0
        while (name or stem) in self.objects:
            count += 1
            name = f"{stem}_{count}"
        self.objects[name or stem] = item


def _take_word(given: str | Path | None, missing_ok: bool) -> tuple[str | Path | None, bool]:
    """Return the directory to load from, None for the newest, and whether there may be none."""
    if given in ("latest", "auto") and not Path(given).exists():
        return None, missing_ok or given == "auto"
    return given, missing_ok


def _holds_only(own: Any, known: Mapping[str, Any] | None) -> bool:
    """Whether the values in a dict are still those that are `known`; true of what is none."""
    return known is None or all(name in known and value is known[name] for name, value in own.items())


def _add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class AcceleratorCheckpointing(AcceleratorWeights):
    """Saving and resuming of training states."""

    _registered: RegisteredState
    _stop_point: StopPoint | None = None
    _has_own_states = False
    """Whether this run has saved or loaded one of the states in its project's directory."""
    _has_looked_for_states = False

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Have `save_state` and `load_state` handle objects of your own; each is found again by its name.

        Args:
            objects: named after their class: `EMA`, `EMA_1`. An object that is registered already is left alone.
            named: under names of your own, which stay when a class is renamed or the order changes.

        Raises:
            ConfigError: an object has no `state_dict` and `load_state_dict`, or its name is taken.
        """
        places = [f"Item at index {index}" for index in range(len(objects))] + [f"Item {name!r}" for name in named]
        items = [*objects, *named.values()]
        wrong = [
            f"{place} ({type(item).__name__})"
            for place, item in zip(places, items, strict=True)
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
        ]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)} cannot be registered for checkpointing; give it state_dict() and load_state_dict()"
            )
        for name, item in zip([*[None] * len(objects), *named], items, strict=True):
            self._registered.add(name, item)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called by `save_state`, on every rank.

        Files that it writes to `output_dir`, a temporary directory, become part of the checkpoint. Of a model whose
        entry it takes out of `weights` on rank 0, `save_state` leaves the weights to it.
        """
        return _add_hook(self._registered.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have `hook(models, input_dir)` called on every rank once files are verified; it keeps models it takes out."""
        return _add_hook(self._registered.load_hooks, hook)

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Metrics of the last save and load: `ckpt/stall_s`, `ckpt/duration_s`, `ckpt/bytes`, `resume/load_s`, ..."""
        return dict(self._checkpointer.metrics.values)

    def _train_state(self) -> TrainState:
        if self._loss_scale is not None:
            self._loss_scale.flush()
        numbers = {id(wrapped.optimizer): number for number, wrapped in enumerate(self._prepared.optimizers)}
        return TrainState(
            units=[prepared.unit.checkpoint_io() for prepared in self._prepared.units],
            optimizers=[[numbers[id(each)] for each in prepared.unit.optimizers] for prepared in self._prepared.units],
            has_weights=[True] * len(self._prepared.units),
            schedulers=self._prepared.schedulers,
            loaders=[LoaderCheckpoint(loader) for loader in self._prepared.dataloaders],
            objects={
                **self._registered.objects,
                **{f"optimizer_without_model_{i}": each for i, each in enumerate(self._prepared.alone)},
            },
            scaler=self.scaler,
            readers=self.readers,
            windows=OpenWindows(
                self._prepared.units,
                self.process,
                self.readers,
                is_sharded=self.strategy.capabilities.shards_parameters,
            ),
        )

    def _checkpoints_directory(self) -> Path:
        project = self.project_configuration.project_dir
        if project is None:
            raise ConfigError(
                "save_state() and load_state() were called without a directory; pass one, or give "
                "Accelerator(project_dir=...) with ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(project) / "checkpoints"

    # --- saving ----------------------------------------------------------------------------------------------------

    def _warn_of_fewer_processes(self) -> None:
        first, left = self.config.launch.num_processes, self.process.world_size
        if first not in (None, left) and not self.config.accumulation.keep_global_batch:
            logger.warning(
                "%d of %d processes are left, and updates have fewer samples unless the loop makes up for it: "
                "accumulation.keep_global_batch=true takes more micro-batches for each", left, first,
            )  # fmt: skip

    @repeated_by_those_left
    @section("save")
    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, *, async_: bool | None = None
    ) -> Path | None:
        """Save model, optimizer, scheduler, scaler, data position, random streams and registered objects.

        Collective: every rank calls it; under DDP the main process may alone, at the end of an update, and finds that
        once another rank waits for it elsewhere. Other ranks' random streams are then not saved: a run that goes on
        makes new ones for all of the main process's. It is written at once, also with `async_`. The directory appears
        under its name once every rank's files are on the disk; a failure on one rank is raised on all, and an older
        directory of that name stays. A background save that is still in flight is waited for. ProjectConfiguration has
        other answers to a disk that is full, `on_save_error`, and to a background save that takes long, `max_wait_s`.

        Args:
            output_dir: where to; without it, `project_dir/checkpoints/checkpoint_N` with automatic naming.
            safe_serialization: states are always written as safetensors and JSON; False is said so in the log.
            async_: return once everything is copied to host memory, and write in the background; None does as the
                option `save_async` says. An error there is raised on all ranks by the next `backward`, `save_state`,
                `load_state` or `wait_for_checkpoint`.

        Returns:
            The directory; None where nothing is saved: a disk fails and `on_save_error` is "warn", or `should_stop` has
            become true, and the last save took longer than what is left of `preemption.grace_seconds`.

        Raises:
            ConfigError: there is no place to save to, or it holds something else than a checkpoint.
            CheckpointLockedError: another run saves there.
            DiskFullError: there is no room; nothing was written.
            SaveTimeoutError: the background save before this one has not ended in time.
            NonFiniteError: weights are NaN or infinite, and `on_nonfinite` is not "warn".
            ProcessGroupError: another rank failed.
        """
        if not safe_serialization:
            logger.warning_once(
                "save_state(safe_serialization=False): the state is written as safetensors and JSON, which load_state "
                "reads; save_model(safe_serialization=False) writes torch's own files"
            )
        configuration = self.project_configuration
        if output_dir is not None:
            if self.config.checkpoint_uri is not None:
                logger.warning_once(
                    "checkpoint_uri is set, and save_state(directory) copies nothing there: numbered checkpoints are "
                    "copied, those of ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            target = Path(output_dir).expanduser()
            digits = target.name.rpartition("_")[2].rpartition("-")[2]
            directory, name, number = target.parent, target.name, int(digits) if digits.isdecimal() else None
        elif not configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "save_state() was called without a directory; pass output_dir, or turn on "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        else:
            directory, name, number = self._checkpoints_directory(), None, configuration.iteration
        section = f"save to {output_dir or configuration.project_dir}"
        with self._saving_alone_if_not_all_come():
            return self._save_to(directory, name, number, section, in_background=async_)

    def _save_to(
        self, directory: Path, name: str | None, number: int | None, section: str, *, in_background: bool | None
    ) -> Path | None:
        """Save as the Checkpointer's process. Collective among its ranks."""
        configuration, is_alone = self.project_configuration, self._checkpointer.alone is not None
        if not is_alone and self._has_no_time(section):
            return None
        if not self._has_looked_for_states:
            warn_of_new_beginning()
        are_finite = self._check_weights(self._prepared.units, section)
        if not is_alone:
            self.check_replicas(section)
        saved = self._checkpointer.save(
            SaveJob(
                section=section,
                directory=directory,
                name=name,
                number=number,
                write=partial(self._write_state, are_finite=are_finite),
                need_bytes=sum(each.unit.local_bytes(in_window=each.window.is_open) for each in self._prepared.units),
                policy=configuration.save_policy,
                each_node=configuration.save_on_each_node,
                keep=configuration.total_limit,
                in_background=not is_alone and (self.config.save_async if in_background is None else in_background),
                ends_run=self._stop_point is not None and self._stop_point.has_stopped,
            )
        )
        if saved is not None and name is None:
            configuration.iteration = 1 + int(saved.name.removeprefix(PREFIX))
            self._has_own_states = True
        return saved

    def _saving_alone_if_not_all_come(self) -> AbstractContextManager[None]:
        """Return a context for the save; refuse one that some ranks do not come to, unless the main process has all."""
        if self._all_come("save_state", has_all=self._has_whole_state()):
            return nullcontext()
        logger.warning_once(
            "save_state() is called on the main process alone, %s: the state has its random streams, and none of the "
            "other ranks', for which a run that goes on makes new ones. Every rank may call it", users_line(),
        )  # fmt: skip
        return self._checkpointer.saving_alone()

    def _has_whole_state(self) -> bool:
        """Whether all is here that a run goes on with, but for other ranks' random streams."""
        prepared = self._prepared
        is_shared = any(
            each.window.is_open or each.unit.local_replicas is not None and each.unit.local_replicas.is_apart
            for each in prepared.units
        )
        return (
            not is_shared
            and not any(loader.gathers_state for loader in prepared.dataloaders)
            # Its outcome is one of all ranks.
            and self._checkpointer.background is None
            # It counts as a collective, and where a rank is lost this one would be ahead of the others.
            and self.lost_ranks is None
        )

    def _has_no_time(self, section: str) -> bool:
        """Whether the machine goes before a save at a stop would be complete, which is said then. Collective."""
        if self._stop_point is None or not self._stop_point.has_stopped:
            return False
        self.wait_for_checkpoint()  # its time passes anyway
        no_time = self._stop_point.find_no_time(self._checkpointer.metrics.save_seconds)
        if no_time:
            logger.warning("%s is left out: %s. The next run goes on from the last state", section, no_time)
        return bool(no_time)

    def _write_state(self, staged: StagedDirectory, *, are_finite: bool) -> None:
        """Run the user's hooks and write the state. Collective."""
        state, hooks = self._train_state(), self._registered.save_hooks
        if hooks:
            models = [prepared.unit.module for prepared in self._prepared.units]
            weights = [prepared.unit.module.state_dict() for prepared in self._prepared.units]
            calls = [partial(hook, models) for hook in hooks.values()]
            state.has_weights = self._left_by_hooks(calls, weights, staged.path, "save_state's hooks")
        save_train_state(staged, state, self._saving_process)
        self._note_ranks(staged)
        if staged.commits:
            staged.metadata[_OPTIONS_KEY] = self._options_in_words()
            staged.metadata[_BATCHES_KEY] = self._update_batches()
            # Of replicas that differ another rank may read the mean, which can be infinite where none of them is.
            is_mean = any(prepared.unit.local_replicas is not None for prepared in self._prepared.units)
            if are_finite and all(state.has_weights) and not is_mean:
                staged.metadata[_FINITE_KEY] = max(self._largest_numbers(), default=0.0)

    def _note_ranks(self, staged: StagedDirectory) -> None:
        """Note who saves, and the tokens of all ranks. Collective among those that save."""
        if self._checkpointer.alone is not None:
            staged.metadata[MAIN_PROCESS_OF] = self.process.world_size
        elif self.meters is not None:
            copies = self.process.world_size // self.readers.world_size
            staged.metadata[_TOKENS_KEY] = self.meters.count_tokens(copies)

    def _largest_numbers(self) -> set[float]:
        """Return the largest numbers of the weights' dtypes."""
        parameters = [each for prepared in self._prepared.units for each in prepared.unit.module.parameters()]
        return {torch.finfo(dtype).max for dtype in {each.dtype for each in parameters} if dtype.is_floating_point}

    def _are_known_finite(self, selection: Selection, verify: Verify) -> bool:
        """Whether loaded weights are those that the save has looked at: verified, and in dtypes that hold them."""
        # To look at them again takes a fourth more of the processor's time (1.28 for 100 million parameters, AdamW).
        if selection.stored is None or verify != "full" or self._registered.load_hooks:
            return False
        known = selection.stored.manifest.metadata.get(_FINITE_KEY)
        return isinstance(known, float) and known <= min(self._largest_numbers(), default=0.0)

    def _options_in_words(self) -> dict[str, str]:
        """Return the options in force by dotted path, secrets masked."""
        return {option.name: option.value for option in set_options(self.resolved)}

    def _update_batches(self) -> list[UpdateBatch | None]:
        """Return the samples of an update from each loader; None where batches vary in size."""
        num_readers, num_steps = self.readers.world_size, self.config.accumulation.num_steps
        if self.lost_ranks is not None and self.lost_ranks.left is not None:  # which leave updates as they were
            num_readers, num_steps = self.lost_ranks.num_shards, self.lost_ranks.left.rounds_per_update
        sizes = [loader.total_batch_size for loader in self._prepared.dataloaders]
        return [
            None if size is None else UpdateBatch(size * num_steps, num_readers, size // num_readers, num_steps)
            for size in sizes
        ]

    def _compare_runs(self, path: Path, manifest: Manifest) -> list[str]:
        """Return how this run differs from the one that saved a state, a line for each warning; or refuse that."""
        name = "batch_size / ranks" if self.config.data.split_batches else "batch_size"
        pairs = zip(manifest.metadata.get(_BATCHES_KEY, ()), self._update_batches(), strict=False)
        lines = []
        for index, (saved, now) in enumerate(pairs):
            if saved is None or now is None:
                continue
            before, loader = UpdateBatch(*saved), f" from loader {index}"
            change = UpdateBatchChange.find(path, before, now, micro_batch_name=name, loader=loader)
            if change is not None:
                change.check(self.resolved, auto_refuses=False)
                lines.append(f"{change.found}; set {change.settings} for updates of as many samples")
        options = manifest.metadata.get(_OPTIONS_KEY, {})
        # A loader goes on in the order of its saved position.
        changes = describe_changes(path, manifest, options, self._options_in_words(), without_effect=["data.data_seed"])
        return lines if changes is None else [*lines, changes]

    def _left_by_hooks(
        self, hooks: Iterable[Callable[[list[Any], str], None]], entries: Sequence[Any], directory: Path, section: str
    ) -> list[bool]:
        """Call hooks with a list of an entry for each model; return which ones they leave in it. Collective."""

        def call_hooks() -> list[bool]:
            left, before = list(entries), [dict(each) if isinstance(each, dict) else None for each in entries]
            for hook in hooks:
                hook(left, str(directory))
            is_left = [any(own is item for item in left) for own in entries]
            as_they_were = [own for own, known in zip(entries, before, strict=True) if _holds_only(own, known)]
            if not all(any(item is own for own in as_they_were) for item in left):
                raise ConfigError(
                    f"one of {section} changes an entry of its list, or puts another in its place, which has no "
                    "effect; take the model's entry out, and have the hook write or load the weights"
                )
            return is_left

        # Rank 0's answer counts: scripts take entries out on the main process only.
        return gather_calls(self._saving_process, section, call_hooks)[0]

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save is complete; raise its error, a ProcessGroupError on other ranks. Collective."""
        self._checkpointer.wait()

    # --- ending at a signal ----------------------------------------------------------------------------------------

    @contextmanager
    def preemptible(self) -> Iterator[None]:
        """Context of a loop that a signal may end; every rank enters it.

        Within it SIGTERM, SIGUSR1 and SIGINT (`preemption.signals`) have `should_stop` become true. Where it did, the
        end of the block waits for a background save and ends the process with exit code 85, which schedulers take for
        a request to start it again. A second signal of the same name, 3 s later or more, acts as ever.

        Raises:
            PreemptedExit: a SystemExit, at the end of the block.
        """
        with run_until_stop(self.config.preemption, self.process, self.wait_for_checkpoint) as self._stop_point:
            try:
                yield
            finally:
                self._stop_point = None

    @property
    def should_stop(self) -> bool:
        """Whether to save and leave the loop, for a signal to any rank: the same on all, and true from then on.

        Every rank asks equally often, where the loop can be left: after an update as a rule. Nothing is exchanged but
        for the one time when the ranks stop, and so nothing waits.

        Raises:
            ConfigError: it is asked outside of `preemptible()`.
        """
        if self._stop_point is None:
            raise ConfigError(
                "should_stop was asked outside of preemptible(), where signals end the process as ever; put the loop "
                "into `with accelerator.preemptible():`"
            )
        return self._stop_point.is_reached()

    def check_replicas(self, section: str) -> None:
        """Raise a DesyncError on every rank where updates, learning rates or replicas' weights differ. Collective."""
        check, scaler = self._prepared.replica_check, self.scaler
        if check is None:
            return
        try:
            check.compare(self._prepared.optimizers, None if scaler is None else scaler.get_scale(), section)
        except DesyncError:
            self._check_weights(self._prepared.units, section)
            raise

    # --- resuming --------------------------------------------------------------------------------------------------

    @section("load")
    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        verify: str = "full",
        map_location: Any = None,
        strict: bool = True,
        missing_ok: bool = False,
    ) -> Path | None:
        """Load a saved state, on any number of processes and with any native strategy. Collective.

        In a process that `on_rank_loss="replace"` has started in the place of a lost rank it joins the others between
        two updates, and takes the state from one of them, not from `input_dir`; the next pass goes on where theirs are.

        Every file that is read is compared with its checksum before anything is changed. States of Hugging Face
        accelerate and directories of torch.distributed.checkpoint, which have none, are read as well.

        Args:
            input_dir: where from; a bad one is an error. An address of an object store is fetched to
                `project_dir/checkpoints` first. Without it, or with "latest", the newest good one of
                `project_dir/checkpoints` and of `checkpoint_uri`: those that are incomplete or corrupt are renamed to
                `_bad-...` with a warning. "auto" is "latest" with `missing_ok`.
            load_kwargs: options of torch.load, which reads nothing here: the log says that they are without effect.
            verify: "full" compares contents, "size" lengths, "off" nothing.
            map_location: without effect: tensors are read into those of this run, wherever they are.
            strict: always; weights that a state has too few or too many of are read by `load_checkpoint_in_model`.
            missing_ok: do nothing where no state has been saved yet, so that one line serves a run that begins, one
                whose workers were started again, and one that goes on after a signal.

        Returns:
            The directory that was loaded; None where there was none.

        Raises:
            ConfigError: `strict` is false, or `verify` is unknown.
            CheckpointNotFoundError: there is none, and `missing_ok` is false.
            CorruptCheckpointError: it was changed after the save, or none of several is good.
            IncompatibleCheckpointError: it does not fit the model, the optimizer or the registered objects, or updates
                have other samples than then and `on_changed_run` is "refuse"; nothing was changed.
            NonFiniteError: weights are NaN or infinite, and `on_nonfinite` is not "warn"; the model has them.
            ProcessGroupError: another rank failed.
        """
        if not strict:
            raise ConfigError(
                "load_state(strict=False) would leave a part of the run as it was; load what fits of the weights with "
                "load_checkpoint_in_model(model, directory, strict=False), and do not call it a resumed run"
            )
        if load_kwargs:
            logger.warning_once(
                "load_state(load_kwargs=%s) is without effect: torch.load does not read it", load_kwargs
            )
        self.wait_for_checkpoint()
        mode, self._has_looked_for_states = check_verify(verify), True
        input_dir, missing_ok = _take_word(input_dir, missing_ok)
        has_joined = self.lost_ranks is not None and self.lost_ranks.join()
        if has_joined or missing_ok and not self._has_state(input_dir):
            return None

        metrics = self._checkpointer.metrics
        if is_uri(input_dir):
            input_dir = self._checkpointer.fetch(str(input_dir), self._checkpoints_directory())
        if input_dir is not None:
            selection = self._checkpointer.select_named(Path(input_dir).expanduser(), mode, self._files_to_read)
            with metrics.resuming("load"):
                outcome = self._load_selected(selection)
        else:
            selection, outcome = self._load_newest(mode)
            self.project_configuration.iteration = 1 + int(selection.path.name.removeprefix(PREFIX))
            self._has_own_states = True
        if not self._are_known_finite(selection, mode):
            self._check_weights(self._prepared.units, f"load of {selection.path}", "load")
        self._pass_start.has_loaded_state = True
        self._warn_of_fewer_processes()
        phases = ("select", "verify", "load")
        seconds = ", ".join(f"{phase} {metrics.values[f'resume/{phase}_s']:.2f} s" for phase in phases)
        logger.info("%s", selection.describe("resumed", [selection.verified, outcome, seconds]))
        return selection.path

    def _has_state(self, input_dir: str | Path | None) -> bool:
        """Whether a state has been saved, good or bad by now; that there is none is said. Collective."""
        checkpointer = self._checkpointer
        if is_uri(input_dir):
            places, found = shown(str(input_dir)), checkpointer.has_any_at(str(input_dir))
        elif input_dir is None:
            directory = self._checkpoints_directory()
            places, found = checkpointer.places(directory), checkpointer.has_any(directory)
        else:
            path = Path(input_dir).expanduser()
            places, found = str(path), checkpointer.has_any(path.parent, path.name)
        if not found:
            attempt = find_attempt(read_environment())[0]
            begun = f"the workers were started again, {attempt} time(s): " if attempt else ""
            logger.info("%sno state has been saved to %s yet, and the run begins", begun, places)
        return found

    def _take_rollbacks(self) -> None:
        """Have the guard call this Accelerator, which is freed at once where nobody else holds it."""
        own, guard = weakref.WeakMethod(self._roll_back), self.nonfinite_guard
        if guard is not None and guard.rolls_back:
            guard.roll_back = lambda found: method(found) if (method := own()) else None

    @section("load")
    def _roll_back(self, found: str) -> None:
        """Load the newest checkpoint of this run; loaders and random streams stay where they are. Collective."""
        guard = self.nonfinite_guard
        assert guard is not None
        self.wait_for_checkpoint()
        if not self._has_own_states:
            guard.begin_rollback(found, None)

        selection, _ = self._load_newest("full", keeps_place=True, from_store=False)
        guard.begin_rollback(found, selection.path)

    def _files_to_read(self, manifest: Manifest) -> Iterable[str]:
        return files_to_read(manifest, self._train_state(), self.process)

    def _load_newest(
        self, verify: Verify, *, keeps_place: bool = False, from_store: bool = True
    ) -> tuple[Selection, str]:
        """Load the newest checkpoint that is good; return it and how exact the run goes on. Collective."""
        is_wanted = None if from_store else lambda manifest: False
        directory = self._checkpoints_directory()
        missing = CheckpointNotFoundError(
            f"no {PREFIX}N in {self._checkpointer.places(directory.absolute())}; save one with save_state() first, or "
            "load_state('auto'), which does nothing where there is none"
        )
        passed_over: list[str] = []
        while True:
            selection = self._checkpointer.select_newest(
                directory, verify, self._files_to_read, missing, passed_over, is_wanted
            )
            try:
                with self._checkpointer.metrics.resuming("load"):
                    return selection, self._load_selected(selection, keeps_place=keeps_place)
            except Exception as error:  # each rank has one, and all take part in what follows
                # Whatever was loaded of it by now, the next one replaces.
                if not self._checkpointer.pass_over_together(selection, error):
                    raise
                passed_over = selection.passed_over

    def _load_selected(self, selection: Selection, *, keeps_place: bool = False) -> str:
        """Run the user's hooks and load the state; return how exact the run goes on. Collective."""
        changes: list[str] = []
        if selection.stored is not None and not keeps_place:
            with raise_together(self.process, f"load of {selection.path}"), as_corrupt(selection.path / MANIFEST_NAME):
                changes = self._compare_runs(selection.path, selection.stored.manifest)
        state, hooks = self._train_state(), self._registered.load_hooks
        state.keeps_place = keeps_place
        if hooks:
            models = [prepared.unit.module for prepared in self._prepared.units]
            state.has_weights = self._left_by_hooks(hooks.values(), models, selection.path, "load_state's hooks")
        if selection.stored is None:
            return load_accelerate_or_dcp_state(selection.path, state, self.process)
        outcome = load_train_state(selection.stored, state, self.process)
        if self.meters is not None:
            self.meters.begin(selection.stored.manifest.metadata.get(_TOKENS_KEY, 0))
        for line in changes:
            logger.warning("%s", line)
        return outcome
