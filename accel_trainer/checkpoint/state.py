"""A whole training state in a directory: safetensors and JSON, keyed by parameter names.

model_I.safetensors            weights of unit I, whole
optimizer_I.safetensors/.json  its optimizer's state, by parameter name
training.safetensors/.json     schedulers, loaders' positions, scaler, registered objects
random_R.safetensors/.json     random streams of rank R
manifest.json                  what was saved, by how many ranks, with which versions
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_trainer import logging
from accel_trainer.checkpoint.codec import decode, encode
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from accel_trainer.runtime.health import shared_fate
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import get_rng_state, set_rng_state

__all__ = ["FORMAT_VERSION", "TrainState", "load_train_state", "save_train_state"]

logger = logging.get_logger(__name__)

FORMAT_VERSION = 1


class Stateful(Protocol):
    """Anything with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings, lists, dicts and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state back."""


@dataclass
class TrainState:
    """Everything that a training run is made of."""

    units: Sequence[Any]
    """`strategies.api.CheckpointIO` of every unit."""
    has_optimizer: Sequence[bool]
    schedulers: Sequence[Stateful]
    loaders: Sequence[Stateful]
    objects: Sequence[Stateful]
    scaler: torch.amp.GradScaler | None


def _write(directory: Path, name: str, value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    data = encode(value, tensors)
    # safetensors refuses shared memory; a state that holds one tensor twice is written twice.
    distinct = {key: tensor.clone() for key, tensor in tensors.items()}
    save_file(distinct, directory / f"{name}.safetensors")
    (directory / f"{name}.json").write_text(json.dumps(data))


def _read(directory: Path, name: str) -> Any:
    for path in (directory / f"{name}.json", directory / f"{name}.safetensors"):
        if not path.is_file():
            raise CheckpointNotFoundError(f"{path.absolute()} is missing; the checkpoint is incomplete")
    return decode(json.loads((directory / f"{name}.json").read_text()), load_file(directory / f"{name}.safetensors"))


def save_train_state(directory: Path, state: TrainState, process: ProcessContext) -> None:
    """Write `state` into `directory`, which exists. Collective: every rank calls it."""
    for index, unit in enumerate(state.units):
        weights = unit.full_model_state()
        optimizer = unit.full_optimizer_state() if state.has_optimizer[index] else {}
        if process.is_main:
            save_file({k: v.contiguous().clone() for k, v in weights.items()}, directory / f"model_{index}.safetensors")
            _write(directory, f"optimizer_{index}", optimizer)
    _write(directory, f"random_{process.rank}", get_rng_state())
    if process.is_main:
        training = {
            "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
            "loaders": [loader.state_dict() for loader in state.loaders],
            "objects": [item.state_dict() for item in state.objects],
            "scaler": state.scaler.state_dict() if state.scaler is not None else None,
        }
        _write(directory, "training", training)
        manifest = {
            "format_version": FORMAT_VERSION,
            "world_size": process.world_size,
            "units": len(state.units),
            "torch": torch.__version__,
        }
        (directory / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _check_counts(directory: Path, training: dict[str, Any], state: TrainState) -> None:
    for kind, own in (("schedulers", state.schedulers), ("loaders", state.loaders), ("objects", state.objects)):
        if len(training[kind]) != len(own):
            raise IncompatibleCheckpointError(
                f"{directory.absolute()} holds {len(training[kind])} {kind} and this Accelerator has {len(own)}; "
                "prepare and register the same things in the same order before load_state()"
            )


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        raise CheckpointNotFoundError(f"no checkpoint in {directory.absolute()}: {path.name} is missing")
    manifest: dict[str, Any] = json.loads(path.read_text())
    if manifest.get("format_version") != FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has format version {manifest.get('format_version')} and this version reads "
            f"{FORMAT_VERSION}; install the version of accel_trainer that wrote it"
        )
    return manifest


def load_train_state(directory: Path, state: TrainState, process: ProcessContext) -> None:
    """Load what `save_train_state` wrote. Collective: every rank calls it, and every rank reads the small files.

    Raises:
        CheckpointNotFoundError: a file is missing.
        IncompatibleCheckpointError: it was saved from other objects.
    """
    with shared_fate(process, f"load of {directory}"):
        manifest = _read_manifest(directory)
        if manifest["units"] != len(state.units):
            raise IncompatibleCheckpointError(
                f"{directory.absolute()} holds {manifest['units']} model(s) and this Accelerator has "
                f"{len(state.units)}; prepare the same models in the same order before load_state()"
            )
        training = _read(directory, "training")
        _check_counts(directory, training, state)
        same_world = manifest["world_size"] == process.world_size
        random_state = _read(directory, f"random_{process.rank}") if same_world else None
    for index, unit in enumerate(state.units):
        weights = load_file(directory / f"model_{index}.safetensors") if process.is_main else {}
        unit.load_full_model_state(weights)
        if state.has_optimizer[index]:
            unit.load_full_optimizer_state(_read(directory, f"optimizer_{index}") if process.is_main else {})
    for kind, own in (("schedulers", state.schedulers), ("loaders", state.loaders), ("objects", state.objects)):
        for item, stored in zip(own, training[kind], strict=True):
            item.load_state_dict(stored)
    if state.scaler is not None and training["scaler"] is not None:
        state.scaler.load_state_dict(training["scaler"])
    if random_state is not None:
        set_rng_state(random_state)
    else:
        logger.info(
            "saved by %d process(es) and loaded by %d: random streams continue from this run's seed",
            manifest["world_size"],
            process.world_size,
        )
