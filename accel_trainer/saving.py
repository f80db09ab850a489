"""The part of the Accelerator that writes and reads: weights, whole states, single objects."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.checkpoint.directory import open_checkpoint, publish_directory
from accel_trainer.checkpoint.state import TrainState, load_train_state, save_train_state
from accel_trainer.checkpoint.weights import save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError
from accel_trainer.runtime.collectives import broadcast_object_list
from accel_trainer.runtime.health import shared_fate
from accel_trainer.units import PreparedUnit, prepared_of

if TYPE_CHECKING:
    from accel_trainer.plugins import ProjectConfiguration
    from accel_trainer.runtime.process import ProcessContext

__all__ = ["AcceleratorSaving"]

logger = logging.get_logger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def numbered_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return the automatically named checkpoints in `directory` by number; other files are ignored."""
    if not directory.is_dir():
        return []
    matches = [(_NUMBERED.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


class AcceleratorSaving:
    """Saving and loading, for the Accelerator to inherit; reads what the Accelerator holds."""

    process: ProcessContext
    project_configuration: ProjectConfiguration
    scaler: torch.amp.GradScaler | None
    _prepared: list[PreparedUnit]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole state of a prepared model on rank 0, by the user's parameter names, and `{}` elsewhere.

        Collective: every rank calls it.
        """
        return prepared_of(self._prepared, model).unit.checkpoint_io().full_model_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights to `save_directory`. Collective: every rank calls it.

        Args:
            max_shard_size: larger models are written as several files with an index.
            safe_serialization: False writes `pytorch_model.bin` instead of safetensors, and removes those of an earlier
                save in the directory: readers would take them first.

        Raises:
            ConfigError: `save_directory` is a file.
            ProcessGroupError: rank 0 could not write.
        """
        directory = Path(save_directory)
        if directory.is_file():
            raise ConfigError(f"save_directory {str(directory.absolute())!r} is a file; give a directory")
        state = self.get_state_dict(model)
        with shared_fate(self.process, f"save_model to {directory}"):
            if self.process.is_main:
                save_weights(state, directory, max_shard_size, safe_serialization=safe_serialization)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` on rank 0 (on each node's first rank with `save_on_each_node`); a no-op elsewhere."""
        each_node = self.project_configuration.save_on_each_node
        if self.process.is_local_main if each_node else self.process.is_main:
            if safe_serialization:
                from safetensors.torch import save_file

                save_file(obj, f, metadata={"format": "pt"})
            else:
                torch.save(obj, f)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to what `save_state` and `load_state` handle, in the order of registration.

        Raises:
            ConfigError: an object has no `state_dict` and `load_state_dict`.
        """
        for item in objects:
            if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
                raise ConfigError(
                    f"{type(item).__name__} cannot be registered for checkpointing; give it state_dict() and "
                    "load_state_dict()"
                )
        self._custom_objects.extend(objects)

    def _train_state(self) -> TrainState:
        return TrainState(
            units=[prepared.unit.checkpoint_io() for prepared in self._prepared],
            has_optimizer=[bool(prepared.unit.optimizers) for prepared in self._prepared],
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            objects=self._custom_objects,
            scaler=self.scaler,
        )

    def _checkpoints_directory(self) -> Path:
        project = self.project_configuration.project_dir
        if project is None:
            raise ConfigError(
                "save_state() and load_state() were called without a directory; pass one, or give "
                "Accelerator(project_dir=...) with ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(project) / "checkpoints"

    def save_state(self, output_dir: str | Path | None = None) -> Path:
        """Save model, optimizer, scheduler, scaler, data position, random streams and registered objects.

        Collective: every rank calls it. The directory appears under its name once every rank's part is on disk; a
        failure on one rank is raised on all, and an older directory of that name stays.

        Args:
            output_dir: where to; without it, `project_dir/checkpoints/checkpoint_N` with automatic naming.

        Returns:
            The directory.
        """
        configuration = self.project_configuration
        if output_dir is not None:
            target = Path(output_dir)
        elif configuration.automatic_checkpoint_naming:
            directory = self._checkpoints_directory()
            existing = self._agreed_checkpoints(directory)
            number = max([configuration.iteration, *(known + 1 for known, _ in existing)])
            target = directory / f"checkpoint_{number}"
        else:
            raise ConfigError(
                "save_state() was called without a directory; pass output_dir, or turn on "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        with publish_directory(target, self.process) as staged:
            save_train_state(staged, self._train_state(), self.process)
        if output_dir is None:
            configuration.iteration = int(target.name.rpartition("_")[2]) + 1
            self._retire(target.parent, configuration.total_limit)
        return target

    def _retire(self, directory: Path, total_limit: int | None) -> None:
        """Remove the oldest automatically named checkpoints; after the new one is complete, never before."""
        if total_limit is not None and self.process.is_main:
            for _, path in numbered_checkpoints(directory)[:-total_limit]:
                shutil.rmtree(path)

    def _agreed_checkpoints(self, directory: Path) -> list[tuple[int, Path]]:
        """Return rank 0's list on every rank: on a network disk, ranks may see a new directory at different times."""
        found = numbered_checkpoints(directory) if self.process.is_main else []
        return list(broadcast_object_list([found], self.process)[0])

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Load what `save_state` saved, on any number of processes and any native strategy. Collective.

        Args:
            input_dir: where from; without it, the newest of `project_dir/checkpoints`.

        Raises:
            CheckpointNotFoundError: there is none.
            IncompatibleCheckpointError: it does not fit the model, the optimizer or the registered objects.
        """
        if input_dir is None:
            directory = self._checkpoints_directory()
            existing = self._agreed_checkpoints(directory)
            if not existing:
                raise CheckpointNotFoundError(
                    f"no checkpoint_N in {directory.absolute()}; save one with save_state() first"
                )
            source = existing[-1][1]
            self.project_configuration.iteration = existing[-1][0] + 1
        else:
            source = Path(input_dir)
        load_train_state(open_checkpoint(source, self.process), self._train_state(), self.process)
        logger.info("loaded %s", source)
