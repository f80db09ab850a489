"""Weights of any checkpoint as files that `from_pretrained` reads, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.format.safetensors_file import LazyTensor
from accel_trainer.checkpoint.interop.dcp import METADATA_NAME, DcpDirectory
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.checkpoint.weights.reading import WeightFiles
from accel_trainer.checkpoint.weights.writing import save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["ALONE", "LazyRead", "export_weights", "find_weights", "lazy_tensors", "read_tied"]

_SHARDED_NAMES = ("pytorch_model_fsdp_{}", "model_{}", "model")
"""Directories of shards below a checkpoint of Hugging Face accelerate or a Trainer."""
_WEIGHTS = ("model", "pytorch_model")
"""What files of weights begin with there."""
ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
"""The process that converts a checkpoint."""


class LazyRead:
    """A stored tensor that is read when it is called."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        self.dtype, self.shape = dtype, shape
        self._read = read

    def __call__(self) -> Tensor:
        """Return the tensor."""
        return self._read()

    def numpy(self) -> Any:
        """Return it as an array."""
        return self._read().numpy()


def find_weights(source: Path, unit: int = 0, verify: str = "full") -> Mapping[str, LazyTensor]:
    """Return the weights in a checkpoint of any kind by parameter name; none is read before it is called.

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
    if (source / MANIFEST_NAME).is_file() and _has_units(source):
        return _of_state(source, unit, verify)
    if (source / MANIFEST_NAME).is_file():
        stored = open_checkpoint(source, ALONE, verify)
        stored.check(name for name in stored.manifest.files if name.startswith(_WEIGHTS))
    shards = [source, *(source / name.format(unit) for name in _SHARDED_NAMES)]
    found = next((path for path in shards if (path / METADATA_NAME).is_file()), None)
    if found is not None and not (found != source and any(source.glob("model*.safetensors"))):
        return _of_dcp(found)
    files = WeightFiles(source)
    lazy: dict[str, LazyTensor] = {}
    for name in files.by_file():
        lazy[name] = LazyRead(files.dtype(name), files.shape(name), partial(files.__getitem__, name))
    return lazy


def read_tied(source: Path, unit: int = 0) -> dict[str, str]:
    """Return the names of tied parameters that a checkpoint of this library leaves out, each with one that it has."""
    if not (source / MANIFEST_NAME).is_file():
        return {}
    stored = open_checkpoint(source, ALONE, "size")
    outline = f"unit_{unit}.json"
    tied = stored.json(outline)["tied"] if outline in stored else stored.manifest.metadata.get("tied", {})
    return {str(alias): str(name) for alias, name in tied.items()}


def _has_units(source: Path) -> bool:
    return (source / "model_0.safetensors").is_file() or (source / "unit_0.json").is_file()


def _of_state(source: Path, unit: int, verify: str) -> Mapping[str, LazyTensor]:
    stored = open_checkpoint(source, ALONE, verify)
    if f"model_{unit}.safetensors" in stored:
        tensors = stored.tensors(f"model_{unit}.safetensors")
        return {
            name: LazyRead(t.dtype, tuple(t.shape), partial(tensors.__getitem__, name)) for name, t in tensors.items()
        }
    prefix = f"unit_{unit}"
    if f"{prefix}.json" not in stored:
        raise ConfigError(f"{source.absolute()} has no model {unit}; it holds {stored.manifest.metadata.get('units')}")
    parts = StoredShards(stored, f"{prefix}.model")
    if not len(parts):
        raise IncompatibleCheckpointError(
            f"{source.absolute()} holds no weights of model {unit}: a hook of its run saved them, where it says"
        )

    return lazy_tensors(parts)


def lazy_tensors(parts: StoredShards) -> dict[str, LazyRead]:
    """Return what puts each tensor together from its parts when it is called."""

    def read(name: str) -> Tensor:
        whole = torch.empty(parts.shape(name), dtype=parts.dtype(name))
        parts.read(name, whole)
        return whole

    return {name: LazyRead(parts.dtype(name), parts.shape(name), partial(read, name)) for name in parts}


def _of_dcp(directory: Path) -> Mapping[str, LazyTensor]:
    """Return the tensors of a model: those below `model` where the state had such a key, else all."""
    stored = DcpDirectory(directory)
    paths = {name: stored.paths.get(name, (name,)) for name in stored.tensors}
    outer = {str(path[0]) for path in paths.values() if len(path) > 1}
    inner = next((key for key in ("model", "state_dict", "module") if key in outer), None)
    chosen = {
        name: name.removeprefix(f"{inner}.") if inner else name
        for name, path in paths.items()
        if inner is None or path[0] == inner
    }
    if inner is None and outer & {"optimizer", "optim", "state", "param_groups"}:
        raise CheckpointNotFoundError(f"{directory} holds an optimizer's state and no weights; give the model's")
    lazy = {}
    for name, own in chosen.items():
        entry = stored.tensors[name]
        lazy[own] = LazyRead(entry.dtype, entry.shape, partial(stored.read, name))
    if not lazy:
        raise CheckpointNotFoundError(f"{directory} holds no tensors; give a directory with the weights of a model")
    return lazy


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
    return save_weights(weights, target, max_shard_size, safe_serialization=safe_serialization)
