"""Weights of any checkpoint as files that `from_pretrained` reads, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.format.safetensors_file import TensorReader
from accel_trainer.checkpoint.interop.dcp import METADATA_NAME, DcpDirectory
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.checkpoint.weights.reading import WeightFiles, find_weight_file
from accel_trainer.checkpoint.weights.writing import save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["ALONE", "export_weights", "find_weights", "read_tied"]

_SHARDED_NAMES = ("pytorch_model_fsdp_{}", "model_{}", "model")
"""Directories of shards below a checkpoint of Hugging Face accelerate or a Trainer."""
_WEIGHTS = ("model", "pytorch_model")
"""Prefixes of weight files there."""
ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
"""The process that converts a checkpoint."""


def find_weights(source: Path, unit: int = 0, verify: str = "full") -> TensorReader:
    """Return the weights in a checkpoint of any kind by parameter name; none is read before it is asked for.

    Args:
        source: what `save_state` wrote; a directory of torch.distributed.checkpoint, or one that holds such shards of a
            model; or weights in one or several files.
        unit: which model, where there are several.
        verify: how files are compared with the checksums in their checkpoint: "full", "size" or "off".

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: they are of a kind that cannot be read, or hold what could run code.
        CorruptCheckpointError: a file was changed.
    """
    if not source.exists():
        raise CheckpointNotFoundError(f"{source.absolute()} does not exist; give a checkpoint, or a file of weights")
    is_ours = (source / MANIFEST_NAME).is_file()
    if is_ours and any((source / name).is_file() for name in ("unit_0.json", "model_0.safetensors")):
        return _state_weights(source, unit, verify)
    if is_ours and verify != "off":
        stored = open_checkpoint(source, ALONE, verify)
        stored.check(name for name in stored.manifest.files if name.startswith(_WEIGHTS))
    if source.is_file():
        return WeightFiles(source)
    return _folder_weights(source, unit)


def _folder_weights(source: Path, unit: int) -> TensorReader:
    """Return a model's weights in a directory of weight files, or of torch.distributed.checkpoint, or around one."""
    if (source / METADATA_NAME).is_file():
        return _dcp_weights(source)
    try:
        file = find_weight_file(source, unit)
    except CheckpointNotFoundError:
        folders = (source / name.format(unit) for name in _SHARDED_NAMES)
        found = next((path for path in folders if (path / METADATA_NAME).is_file()), None)
        if found is None:
            raise
        return _dcp_weights(found)
    return WeightFiles(file)


def read_tied(source: Path, unit: int = 0) -> dict[str, str]:
    """Return the names of tied parameters that a checkpoint of this library leaves out, each with one that it has."""
    if not (source / MANIFEST_NAME).is_file():
        return {}
    stored = open_checkpoint(source, ALONE, "size")
    outline = f"unit_{unit}.json"
    tied = stored.json(outline)["tied"] if outline in stored else stored.manifest.metadata.get("tied", {})
    return {str(alias): str(name) for alias, name in tied.items()}


def _state_weights(source: Path, unit: int, verify: str) -> TensorReader:
    """Return a model's weights in a state of `save_state`: one file in format 1, shards since."""
    stored = open_checkpoint(source, ALONE, verify)
    if f"model_{unit}.safetensors" in stored:
        return stored.tensors(f"model_{unit}.safetensors")
    if f"unit_{unit}.json" not in stored:
        raise ConfigError(f"{source.absolute()} has no model {unit}; it holds {stored.manifest.metadata.get('units')}")
    shards = StoredShards(stored, f"unit_{unit}.model")
    if not len(shards):
        raise IncompatibleCheckpointError(
            f"{source.absolute()} holds no weights of model {unit}: a hook of its run saved them, where it says"
        )
    return shards


def _dcp_weights(directory: Path) -> TensorReader:
    """Return a model's tensors: those below "model", "state_dict" or "module" where there is such a key, else all."""
    stored = DcpDirectory(directory)
    paths = {name: stored.paths.get(name, (name,)) for name in stored}
    outer = {str(path[0]) for path in paths.values() if len(path) > 1}
    root = next((key for key in ("model", "state_dict", "module") if key in outer), None)
    if root is None and outer & {"optimizer", "optim", "state", "param_groups"}:
        raise CheckpointNotFoundError(f"{directory} holds an optimizer's state and no weights; give the model's")
    stored.tensors = {
        name.removeprefix(f"{root}.") if root else name: stored.tensors[name]
        for name, path in paths.items()
        if root in (None, path[0])
    }
    if not stored.tensors:
        raise CheckpointNotFoundError(f"{directory} holds no tensors; give a directory with the weights of a model")
    return stored


def export_weights(
    source: Path,
    target: Path,
    *,
    unit: int = 0,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    verify: str = "full",
) -> list[str]:
    """Write the weights of a checkpoint to `target`, and return the names of the files. See `find_weights`.

    One tensor is in memory at a time (of torch's own files, one shard).

    Raises:
        ConfigError: `target` is a file, or the checkpoint itself.
        DiskFullError: there is no room.
    """
    if target.is_file() or target.absolute() == source.absolute():
        raise ConfigError(f"{target.absolute()} is {'a file' if target.is_file() else 'the checkpoint'}; give another")
    weights = find_weights(source, unit, verify)
    lazy = {name: weights.lazy(name) for name in weights}
    return save_weights(lazy, target, max_shard_size, safe_serialization=safe_serialization)
