"""The part of the Accelerator that writes weights and single objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.checkpoint.weights.writing import save_weights
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.shared_errors import raise_together

__all__ = ["AcceleratorSaving"]


class AcceleratorSaving(AcceleratorSettings):
    """Saving of weights and of single objects."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole state of a prepared model on rank 0, by the user's parameter names, and `{}` elsewhere.

        Collective: every rank calls it.
        """
        return self._prepared.get(model).unit.checkpoint_io().full_model_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights to `save_directory`. Collective: every rank calls it.

        One parameter is whole at a time: sharded models are written without any process holding them.

        Args:
            max_shard_size: larger models are written as several files with an index.
            safe_serialization: False writes `pytorch_model.bin` instead of safetensors, and removes those of an earlier
                save in the directory: readers would take them first.

        Raises:
            ConfigError: `save_directory` is a file.
            DiskFullError: there is no room.
            ProcessGroupError: rank 0 could not write.
        """
        directory = Path(save_directory)
        if directory.is_file():
            raise ConfigError(f"save_directory {str(directory.absolute())!r} is a file; give a directory")
        state = self._prepared.get(model).unit.checkpoint_io().lazy_model_state()
        # Errors of the writing are raised after the last tensor has been gathered: the ranks stay in step.
        with raise_together(self.process, f"save_model to {directory}"):
            save_weights(
                state, directory, max_shard_size, safe_serialization=safe_serialization, writes=self.process.is_main
            )

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` on rank 0 (on each node's first rank with `save_on_each_node`); a no-op elsewhere."""
        each_node = self.project_configuration.save_on_each_node
        if self.process.is_local_main if each_node else self.process.is_main:
            if safe_serialization:
                from safetensors.torch import save_file

                save_file(obj, f, metadata={"format": "pt"})
            else:
                torch.save(obj, f)
