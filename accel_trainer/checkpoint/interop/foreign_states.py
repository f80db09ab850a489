"""States that `load_state` reads of others: of Hugging Face accelerate's `save_state`, of torch.distributed.checkpoint.

The pickles among them may hold tensors, numbers, strings, lists and dicts only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
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
from accel_trainer.checkpoint.interop.huggingface import find_weights, suffix
from accel_trainer.checkpoint.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.run_state import TrainState, read_on_main
from accel_trainer.checkpoint.safetensors_file import RenamedTensors, TensorReader
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
    return _is_dcp(directory) or any(directory.glob("random_states_*.pkl"))


def load_accelerate_or_dcp_state(directory: Path, state: TrainState, process: ProcessContext) -> str:
    """Load models, optimizers, schedules, loss scale, random streams and registered objects. Collective.

    Returns:
        A report of the restored and the missing, for the user to read.

    Raises:
        CheckpointNotFoundError: something that this run has is not there.
        IncompatibleCheckpointError: it does not fit, or holds what could run code; nothing was changed.
    """
    section, has_all = f"load of {directory}", not _is_dcp(directory)
    # Everything is checked before the first object changes.
    loads = _plan_loads(directory, state, process, section)
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


def _is_dcp(directory: Path) -> bool:
    return (directory / METADATA_NAME).is_file()


def _plan_loads(directory: Path, state: TrainState, process: ProcessContext, section: str) -> list[Callable[[], None]]:
    """Return the loads of models and optimizers, all of which have been checked. Collective."""
    if _is_dcp(directory) and sum(state.has_weights) > 1:
        raise IncompatibleCheckpointError(
            f"{directory.absolute()} is a directory of torch.distributed.checkpoint, which holds one model, and "
            f"{sum(state.has_weights)} are prepared; take the others out in a hook of register_load_state_pre_hook(), "
            "or load the one by load_checkpoint_in_model()"
        )
    loads: list[Callable[[], None]] = []
    for index, unit in enumerate(state.units):
        if state.has_weights[index]:
            own = {name for name, _ in unit.model_tensors()}
            weights = read_on_main(process, section, partial(_unwrapped_weights, directory, index, own))
            loads.append(unit.plan_full_model_load(weights or {}))
        if numbers := state.optimizers[index]:
            read = partial(_optimizers, directory, numbers, unit.names_by_optimizer())
            with as_corrupt(directory):
                stored = read_on_main(process, section, read)
            loads.append(unit.plan_full_optimizer_load(stored or {}))
    return loads


def _required(directory: Path, name: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path.absolute()} is missing: this run has something that the state was saved without; prepare and "
            "register what the run that saved it had"
        )
    return path


_load = partial(load_torch_file, has_arrays=True)


def _unwrapped_weights(directory: Path, index: int, own: Set[str]) -> TensorReader:
    """Return a model's weights; accelerate saves them under the names that DDP's wrapper gives them."""
    stored = find_weights(directory, index)
    if not own.isdisjoint(stored) or not all(name.startswith("module.") for name in stored):
        return stored
    return RenamedTensors(stored, {name.removeprefix("module."): name for name in stored})


GroupNames = Sequence[Sequence[str | None]]
"""Names of the parameters in an optimizer's groups; None for those of other models."""


def _optimizers(directory: Path, numbers: Sequence[int], own: Sequence[GroupNames]) -> Mapping[str, Any]:
    """Return the state of a model's optimizers by parameter name; accelerate numbers them as they are prepared."""
    if _is_dcp(directory):
        return _optimizer(directory, 0, [*chain.from_iterable(own)])
    found = [_optimizer(directory, number, names) for number, names in zip(numbers, own, strict=True)]
    return {
        "state": dict(chain.from_iterable(each["state"].items() for each in found)),
        "param_groups": [*chain.from_iterable(each["param_groups"] for each in found)],
    }


def _optimizer(directory: Path, index: int, own: GroupNames) -> Mapping[str, Any]:
    """Return an optimizer's state by parameter name."""
    shards = next((d for d in (directory / f"optimizer_{index}", directory) if _is_dcp(d)), None)
    if shards is None:
        path = _required(directory, f"optimizer{suffix(index)}.bin")
        return name_parameters(_load(path, is_mapped=is_zipfile(path)), own, directory)
    stored = DcpDirectory(shards)
    outer = {path[0] for path in stored.paths.values()}
    key = next((key for key in ("optimizer", "optim") if key in outer), None)
    if key is None:
        raise CheckpointNotFoundError(f"{shards.absolute()} holds no optimizer's state; load its weights alone")
    return name_parameters(stored.nested(key), own, directory)


def name_parameters(stored: Mapping[str, Any], own: GroupNames, path: Path) -> Mapping[str, Any]:
    """Give an optimizer's state that numbers its parameters the names in the same places of its groups in this run.

    Those of other models are left out.
    """
    groups = list(stored["param_groups"])
    entries, keys = stored.get("state", {}), list(chain.from_iterable(group["params"] for group in groups))
    if not all(isinstance(key, int) for key in keys):
        return {"state": dict(entries), "param_groups": groups}
    _check_sizes([len(group["params"]) for group in groups], list(map(len, own)), path)
    names = {key: name for key, name in zip(keys, chain.from_iterable(own), strict=True) if name is not None}
    return {
        "state": {names[int(key)]: entry for key, entry in entries.items() if int(key) in names},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"] if key in names]} for group in groups
        ],
    }


def _check_sizes(sizes: list[int], own_sizes: list[int], path: Path) -> None:
    """Refuse an optimizer's state of other groups."""
    if list(filter(None, sizes)) != list(filter(None, own_sizes)):  # DeepSpeed drops empty groups
        raise IncompatibleCheckpointError(
            f"the optimizer's state in {path.absolute()} was saved for parameter groups of {sizes} parameters, and "
            f"this optimizer has groups of {own_sizes}; build the model and the optimizer that were saved"
        )


def _read_small(directory: Path, state: TrainState) -> list[tuple[Any, Any]]:
    """Return schedulers, registered objects and the loss scale, each with its stored state."""
    small: list[tuple[Any, Any]] = [
        (scheduler, _load(_required(directory, f"scheduler{suffix(index)}.bin")))
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
