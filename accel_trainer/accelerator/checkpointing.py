"""The part of the Accelerator that saves and resumes whole runs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from accel_trainer import logging
from accel_trainer.accelerator.open_windows import OpenWindows
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.checkpoint.checkpointer import LoadHook, SaveHook, add_hook
from accel_trainer.checkpoint.commit.disk import explain_full_disk
from accel_trainer.checkpoint.commit.publication import Publication
from accel_trainer.checkpoint.commit.retention import next_number, numbered_checkpoints, retire
from accel_trainer.checkpoint.commit.retry import save_persistently
from accel_trainer.checkpoint.interop.accelerate_state import is_accelerate_or_dcp_state, load_accelerate_or_dcp_state
from accel_trainer.checkpoint.reader import check_verify
from accel_trainer.checkpoint.selection import Selection, select_named, select_newest
from accel_trainer.checkpoint.train_state import TrainState, files_to_read, load_train_state, save_train_state
from accel_trainer.data.loader import SavedPosition
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.shared_errors import gather_or_raise

__all__ = ["AcceleratorCheckpointing"]

logger = logging.get_logger(__name__)


class AcceleratorCheckpointing(AcceleratorSettings):
    """Saving and resuming of whole runs."""

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Add objects to what `save_state` and `load_state` handle; each is found again by its name.

        Args:
            objects: named after their class: `EMA`, `EMA_1`. An object that is registered already is left alone.
            named: under names of your own, which stay when a class is renamed or the order changes.

        Raises:
            ConfigError: an object has no `state_dict` and `load_state_dict`, or its name is taken.
        """
        for name, item in [*((None, item) for item in objects), *named.items()]:
            self._checkpoints.add(name, item)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called by `save_state`, on every rank.

        What it writes to `output_dir`, a temporary directory, becomes part of the checkpoint. Of a model whose entry it
        takes out of `weights` on rank 0, `save_state` leaves the weights to it.

        Returns:
            A handle with `remove()`.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have `hook(models, input_dir)` called by `load_state`, on every rank, once the files are verified.

        Of a model that it takes out of `models`, `load_state` leaves the weights to it.

        Returns:
            A handle with `remove()`.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def checkpoint_metrics(self) -> dict[str, float]:
        """Figures of the last save and the last load, to be logged.

        `ckpt/stall_s` (how long the run stood still), `ckpt/duration_s` (until the commit), `ckpt/bytes` (on the rank
        that commits), `resume/select_s`, `resume/verify_s`, `resume/load_s`.
        """
        return dict(self._checkpoints.metrics)

    def _train_state(self) -> TrainState:
        if self._loss_scale is not None:
            self._loss_scale.flush()
        return TrainState(
            units=[prepared.unit.checkpoint_io() for prepared in self._prepared.units],
            has_optimizer=[bool(prepared.unit.optimizers) for prepared in self._prepared.units],
            has_weights=[True] * len(self._prepared.units),
            schedulers=self._prepared.schedulers,
            loaders=[SavedPosition(loader) for loader in self._prepared.dataloaders],
            objects=self._checkpoints.objects,
            scaler=self.scaler,
            windows=OpenWindows(
                self._prepared.units, self.process, is_sharded=self.strategy.capabilities.shards_parameters
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

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, *, async_: bool = False
    ) -> Path | None:
        """Save model, optimizer, scheduler, scaler, data position, random streams and registered objects.

        Collective: every rank calls it. The directory appears under its name once every rank's part is on the disk; a
        failure on one rank is raised on all, and an older directory of that name stays. A background save that is still
        in flight is waited for. ProjectConfiguration says what else may be done about a disk that is full, with
        `on_save_error`, and about a background save that takes long, with `max_wait_s`.

        Args:
            output_dir: where to; without it, `project_dir/checkpoints/checkpoint_N` with automatic naming.
            safe_serialization: states are always written as safetensors and JSON; False is refused.
            async_: return once everything is copied to host memory, and write in the background. What goes wrong there
                is raised on all ranks by the next `backward`, `save_state`, `load_state` or `wait_for_checkpoint`.

        Returns:
            The directory; None where nothing is saved and `on_save_error` is "warn".

        Raises:
            ConfigError: there is no place to save to, or it holds something else than a checkpoint.
            CheckpointLockedError: another run saves there.
            DiskFullError: there is no room; nothing was written.
            SaveTimeoutError: the background save before this one has not ended in time.
            ProcessGroupError: another rank failed.
        """
        if not safe_serialization:
            raise ConfigError(
                "save_state(safe_serialization=False) is not offered: states hold no pickle; save_model() takes it"
            )
        begin = time.perf_counter()
        configuration = self.project_configuration
        policy = configuration.save_policy
        if not self._checkpoints.wait_for_turn(policy):
            return None
        attempt = partial(self._publish_state, output_dir, async_)
        outcome = save_persistently(attempt, self.process, policy, f"save to {output_dir or configuration.project_dir}")
        if outcome is None:
            return None
        target, publication = outcome
        step = publication.step

        def on_commit() -> None:
            limit = configuration.total_limit
            if output_dir is None and limit is not None and publication.commits:
                retire(target.parent, limit, step=step)
            metrics = self._checkpoints.metrics
            metrics |= {"ckpt/duration_s": time.perf_counter() - begin, "ckpt/bytes": float(publication.num_bytes)}
            size, seconds = publication.num_bytes / 2**20, metrics["ckpt/duration_s"]
            logger.info("saved %s: %.1f MiB in %.2f s", target, size, seconds)

        if self._checkpoints.background is not None and async_:
            self._checkpoints.background.start(publication, on_commit, policy)
        else:
            on_commit()
        if output_dir is None and step is not None:
            configuration.iteration = step + 1
        self._checkpoints.metrics["ckpt/stall_s"] = time.perf_counter() - begin
        return target

    def _publish_state(self, output_dir: str | Path | None, async_: bool) -> tuple[Path, Publication]:
        """Write the state and commit it, or stage copies of it. Collective; where it fails, all ranks raise."""
        target, step = self._save_target(output_dir)
        background = self._checkpoints.start_background(self.process) if async_ else None
        publication = Publication(
            target,
            self.process,
            step=step,
            each_node=self.project_configuration.save_on_each_node,
            need_bytes=self._state_bytes(),
            memory=background.memory if background is not None else None,
            is_locked=output_dir is None,
        )
        with publication as staged, explain_full_disk(staged.path):
            state = self._train_state()
            self._run_save_hooks(state, staged.path)
            save_train_state(staged, state, self.process)
        if background is not None:
            publication.agree()
        else:
            publication.commit()
        return target, publication

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save is complete, and raise what went wrong. Collective.

        Raises:
            ProcessGroupError: it failed on another rank.
        """
        self._checkpoints.wait()

    def _save_target(self, output_dir: str | Path | None) -> tuple[Path, int | None]:
        """Return where to save, and the checkpoint's number: rank 0 decides. Collective."""
        if output_dir is not None:
            digits = Path(output_dir).name.rpartition("_")[2].rpartition("-")[2]
            return Path(output_dir), int(digits) if digits.isdecimal() else None
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "save_state() was called without a directory; pass output_dir, or turn on "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        directory = self._checkpoints_directory()
        number, error = 0, None
        each_node = self.project_configuration.save_on_each_node
        try:
            if self.process.is_local_main if each_node else self.process.is_main:
                self._checkpoints.own(directory, self)
                number = max(self.project_configuration.iteration, next_number(directory))
        except Exception as raised:
            error = raised
        number = max(gather_or_raise(self.process, f"save to {directory}", error, number))
        return directory / f"checkpoint_{number}", number

    def _state_bytes(self) -> int:
        """About how many bytes this rank writes of the models and their optimizers."""
        return sum(prepared.unit.local_bytes(in_window=prepared.window.is_open) for prepared in self._prepared.units)

    def _run_save_hooks(self, state: TrainState, directory: Path) -> None:
        if not self._checkpoints.save_hooks:
            return
        models = [prepared.unit.model for prepared in self._prepared.units]
        weights = [prepared.unit.module.state_dict() for prepared in self._prepared.units]
        left, error = list(weights), None
        try:
            for hook in list(self._checkpoints.save_hooks.values()):
                hook(models, left, str(directory))
        except Exception as raised:
            error = raised
        kept = [any(own is item for item in left) for own in weights]
        # Scripts take entries out on the main process only.
        state.has_weights = gather_or_raise(self.process, "save_state's hooks", error, kept)[0]

    # --- resuming --------------------------------------------------------------------------------------------------

    def load_state(self, input_dir: str | Path | None = None, verify: str = "full") -> None:
        """Load what `save_state` saved, on any number of processes and any native strategy. Collective.

        Every file that is read is compared with its checksum before anything is changed. States of Hugging Face
        accelerate and directories of torch.distributed.checkpoint, which have none, are read as well.

        Args:
            input_dir: where from; a bad one is an error. Without it, the newest good one of `project_dir/checkpoints`:
                those that are incomplete or corrupt are renamed to `_bad-...` with a warning.
            verify: "full" compares contents, "size" lengths, "off" nothing.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: it was changed after the save, or none of several is good.
            IncompatibleCheckpointError: it does not fit the model, the optimizer or the registered objects.
            ProcessGroupError: another rank failed.
        """
        self.wait_for_checkpoint()
        mode = check_verify(verify)

        def files(manifest: Any) -> Any:
            return files_to_read(manifest, self._train_state(), self.process)

        if self._loaded_foreign(input_dir):
            return
        if input_dir is None:
            selection = select_newest(self._checkpoints_directory(), self.process, mode, files)
            self.project_configuration.iteration = int(selection.stored.path.name.rpartition("_")[2]) + 1
        else:
            selection = select_named(Path(input_dir), self.process, mode, files)
        begin = time.perf_counter()
        state = self._train_state()
        self._run_load_hooks(state, selection.stored.path)
        outcome = load_train_state(selection.stored, state, self.process)
        self._checkpoints.metrics |= {**selection.seconds, "resume/load_s": time.perf_counter() - begin}
        logger.info("%s", _describe_resume(selection, outcome, self._checkpoints.metrics))

    def _loaded_foreign(self, input_dir: str | Path | None) -> bool:
        """Load a state that Hugging Face accelerate or torch has written, if it is one, the newest one by default."""
        found = [Path(input_dir)] if input_dir is not None else []
        if input_dir is None and self.project_configuration.project_dir is not None:
            found = [path for _, path in numbered_checkpoints(self._checkpoints_directory())]
        path = found[-1] if found and is_accelerate_or_dcp_state(found[-1]) else None
        chosen: Path | None = gather_or_raise(self.process, "load_state", None, path)[0]  # rank 0 decides for all
        if chosen is None:
            return False
        begin = time.perf_counter()
        state = self._train_state()
        self._run_load_hooks(state, chosen)
        outcome = load_accelerate_or_dcp_state(chosen, state, self.process)
        self._checkpoints.metrics |= {"resume/load_s": time.perf_counter() - begin}
        logger.info("loaded %s: %s", chosen, outcome)
        return True

    def _run_load_hooks(self, state: TrainState, directory: Path) -> None:
        if not self._checkpoints.load_hooks:
            return
        models = [prepared.unit.model for prepared in self._prepared.units]
        left, error = list(models), None
        try:
            for hook in list(self._checkpoints.load_hooks.values()):
                hook(left, str(directory))
        except Exception as raised:
            error = raised
        kept = [any(own is item for item in left) for own in models]
        state.has_weights = gather_or_raise(self.process, "load_state's hooks", error, kept)[0]


def _describe_resume(selection: Selection, outcome: str, metrics: dict[str, float]) -> str:
    """One line: from which checkpoint, why not from a newer one, what is exact and what is not, how long it took."""
    stored = selection.stored
    newer = f"; passed over: {' | '.join(selection.passed_over)}" if selection.passed_over else ""
    seconds = ", ".join(f"{name} {metrics[f'resume/{name}_s']:.2f} s" for name in ("select", "verify", "load"))
    verified = {"full": "contents verified", "size": "lengths verified", "off": "not verified"}[stored.verify]
    return f"resumed from {stored.path} ({verified}; {outcome}; {seconds}){newer}"
