"""States of Hugging Face accelerate's `save_state`, and directories of torch.distributed.checkpoint, loaded.

Pickles among them are read as tensors, numbers, strings, lists and dicts only; anything else in them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch

from accel_trainer import logging
from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.checkpoint.interop.dcp import METADATA_NAME, DcpDirectory
from accel_trainer.checkpoint.interop.export import find_weights
from accel_trainer.checkpoint.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.run_state import TrainState, read_on_main
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import set_rng_state
from accel_trainer.runtime.shared_errors import raise_together

logger = logging.get_logger(__name__)


def is_accelerate_or_dcp_state(directory: Path) -> bool:
    """Whether a directory holds a state that `save_state` of this library did not write, and `load_state` reads."""
    if (directory / MANIFEST_NAME).is_file():
        return False
    return (directory / METADATA_NAME).is_file() or any(directory.glob("random_states_*.pkl"))


def load_accelerate_or_dcp_state(directory: Path, state: TrainState, process: ProcessContext) -> str:
    """Load models, optimizers, schedules, loss scale, random streams and registered objects. Collective.

    Returns:
        A report of the restored and the missing, for the user to read.

    Raises:
        CheckpointNotFoundError: something that this run has is not there.
        IncompatibleCheckpointError: it does not fit, or holds what could run code; nothing was changed.
    """
    section = f"load of {directory}"
    has_all = not (directory / METADATA_NAME).is_file()
    # Everything is checked before the first object changes.
    loads: list[Callable[[], None]] = []
    for index, unit in enumerate(state.units):
        if state.has_weights[index]:
            weights = read_on_main(process, section, partial(find_weights, directory, index))
            loads.append(unit.plan_full_model_load(weights or {}))
        if state.has_optimizer[index]:
            with as_corrupt(directory):
                stored = read_on_main(process, section, partial(_optimizer, directory, index, unit.group_names()))
            loads.append(unit.plan_full_optimizer_load(stored or {}))
    with raise_together(process, section), as_corrupt(directory):
        small = _read_small(directory, state) if has_all else []
    for load in loads:
        load()
    if not has_all:
        return "a directory of torch.distributed.checkpoint: models and optimizers; all else is as it was"
    with raise_together(process, section):
        for item, saved in small:
            item.load_state_dict(saved)
        # Last, as in `load_train_state`.
        streams = _restore_streams(directory, process)
    saved_by = len(list(directory.glob("random_states_*.pkl")))
    stepped = f"; its schedules were stepped {saved_by} times an update" if saved_by > 1 and state.schedulers else ""
    return f"a state of Hugging Face accelerate; {streams}{stepped}; the position in the data is not in it"


def _suffix(index: int) -> str:
    return f"_{index}" if index else ""


def _required(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path.absolute()} is missing: this run has something that the state was saved without; prepare and "
            "register what the run that saved it had"
        )
    return path


def _load(path: Path, *, is_mapped: bool = False) -> Any:
    return load_torch_file(path, is_mapped=is_mapped, has_arrays=True)


def _optimizer(directory: Path, index: int, own: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Return an optimizer's state by parameter name."""
    shards = next((d for d in (directory / f"optimizer_{index}", directory) if (d / METADATA_NAME).is_file()), None)
    if shards is None:
        path = _required(directory, f"optimizer{_suffix(index)}.bin")
        return name_parameters(_load(path, is_mapped=is_zipfile(path)), own, directory)
    stored = DcpDirectory(shards)
    outer = {path[0] for path in stored.paths.values()}
    key = next((key for key in ("optimizer", "optim") if key in outer), None)
    if key is None:
        raise CheckpointNotFoundError(f"{shards.absolute()} holds no optimizer's state; load its weights alone")
    return name_parameters(stored.nested(key), own, directory)


def name_parameters(stored: Mapping[str, Any], own: Sequence[Sequence[str]], path: Path) -> Mapping[str, Any]:
    """Give an optimizer's state that numbers its parameters the names in the same places of its groups in this run."""
    groups = list(stored["param_groups"])
    keys = list(chain.from_iterable(group["params"] for group in groups))
    if not all(isinstance(key, int) for key in keys):
        return {"state": dict(stored.get("state", {})), "param_groups": groups}
    sizes, own_sizes = [len(group["params"]) for group in groups], list(map(len, own))
    if list(filter(None, sizes)) != list(filter(None, own_sizes)):  # DeepSpeed drops empty groups
        raise IncompatibleCheckpointError(
            f"the optimizer's state in {path.absolute()} was saved for parameter groups of {sizes} parameters, and "
            f"this optimizer has groups of {own_sizes}; build the model and the optimizer that were saved"
        )
    names = dict(zip(keys, chain.from_iterable(own), strict=True))
    return {
        "state": {names[int(key)]: entry for key, entry in stored.get("state", {}).items()},
        "param_groups": [{**group, "params": [names[key] for key in group["params"]]} for group in groups],
    }


def _read_small(directory: Path, state: TrainState) -> list[tuple[Any, Any]]:
    """Return schedulers, registered objects and the loss scale, each with its stored state."""
    small: list[tuple[Any, Any]] = [
        (scheduler, _load(_required(directory, f"scheduler{_suffix(index)}.bin")))
        for index, scheduler in enumerate(state.schedulers)
    ]
    # By number: as text, 10 would come before 9, and objects would load each other's state.
    saved = sorted(directory.glob("custom_checkpoint_*.pkl"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if len(saved) != len(state.objects):
        raise IncompatibleCheckpointError(
            f"{directory.absolute()} holds {len(saved)} registered object(s), and {len(state.objects)} are registered; "
            "register what the run that saved it had, in its order"
        )
    small += [(item, _load(path)) for item, path in zip(state.objects.values(), saved, strict=True)]
    if state.scaler is not None and (directory / "scaler.pt").is_file():
        small.append((state.scaler, _load(directory / "scaler.pt")))
    return small


def _restore_streams(directory: Path, process: ProcessContext) -> str:
    """Restore this rank's random streams where as many ranks saved them; return a report."""
    saved_by = len(list(directory.glob("random_states_*.pkl")))
    if saved_by != process.world_size:
        return f"saved by {saved_by} process(es) and loaded by {process.world_size}: random streams of this run"
    try:
        streams = _load(directory / f"random_states_{process.rank}.pkl")
        name, keys, *rest = streams["numpy_random_seed"]
        set_rng_state(
            {
                "python": streams["random_state"],
                "numpy": {"name": name, "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)), "rest": rest},
                "torch": streams["torch_manual_seed"],
            }
        )
    except (IncompatibleCheckpointError, KeyError, TypeError, ValueError) as error:
        logger.warning("random streams in %s cannot be read, and this run's go on: %s", directory, error)
        return "random streams of this run"
    return "random streams restored"
