"""Checkpoints for others, and weights of others, among them directories of torch.distributed.checkpoint.

Written: weights that `from_pretrained` reads, one tensor at a time, and states from which transformers' own Trainer
resumes under FSDP, in the files that Hugging Face accelerate's loaders of FSDP states read:

    pytorch_model_fsdp.bin, optimizer.bin        for its FULL_STATE_DICT
    pytorch_model_fsdp_0/, optimizer_0/          for its SHARDED_STATE_DICT: directories of torch.distributed.checkpoint
    scheduler.pt, trainer_state.json, ...        of a Trainer's checkpoint, as they are
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from accel_trainer.checkpoint.disk import explain_full_disk, fsync_path
from accel_trainer.checkpoint.interop.dcp import METADATA_NAME, DcpDirectory
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.checkpoint.run_state import OWN_STATE, decode
from accel_trainer.checkpoint.safetensors_file import LazyTensor, RenamedTensors, TensorReader
from accel_trainer.checkpoint.shards import stored_tensors
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, find_weight_file, make_tensors, save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.model_wrappers import uncompiled_name
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.tree import map_leaves

# Directories of shards below a checkpoint of Hugging Face accelerate or a Trainer.
_SHARDED_NAMES = ("pytorch_model_fsdp_{}", "model_{}", "model")
# Prefixes of weight files there.
_WEIGHTS = ("model", "pytorch_model")
ALONE = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
"""The process that converts a checkpoint."""


def find_weights(source: Path, unit: int = 0, verify: str = "full") -> TensorReader:
    """Return the weights in a checkpoint of any kind by parameter name; none is read before it is asked for.

    The names are those in the user's own module, also where layers of it were compiled.

    Args:
        source: what `save_state` wrote; a directory of torch.distributed.checkpoint, or one that holds such shards of a
            model; or weights in one or several files.
        unit: which model, where there are several.

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: they are of a kind that cannot be read, or hold what could run code.
        CorruptCheckpointError: a file was changed.
    """
    if not source.exists():
        raise CheckpointNotFoundError(f"{source.absolute()} does not exist; give a checkpoint, or a file of weights")
    is_ours = (source / MANIFEST_NAME).is_file()
    if is_ours and (source / "unit_0.json").is_file():
        return _state_weights(source, unit, verify)  # under the module's own names
    if is_ours and verify != "off":
        stored = open_checkpoint(source, ALONE, verify)
        stored.check(name for name in stored.manifest.files if name.startswith(_WEIGHTS))
    found = WeightFiles(source) if source.is_file() else _folder_weights(source, unit)
    names = {uncompiled_name(name): name for name in found}
    return found if names.keys() == found.keys() else RenamedTensors(found, names)


def _folder_weights(source: Path, unit: int) -> TensorReader:
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
    stored = open_checkpoint(source, ALONE, verify)
    if f"unit_{unit}.json" not in stored:
        raise ConfigError(f"{source.absolute()} has no model {unit}; it holds {stored.manifest.metadata.get('units')}")
    shards = stored_tensors(stored, f"unit_{unit}.model")
    if not len(shards):
        raise IncompatibleCheckpointError(
            f"{source.absolute()} holds no weights of model {unit}: a hook of its run saved them, where it says"
        )
    return shards


_OF_MODELS = ("model", "state_dict", "module")
_OF_OPTIMIZERS = {"optimizer", "optim", "state", "param_groups"}


def _without_optimizers(directory: Path, paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of tensors that lie below no key; those below an optimizer's are left out."""
    outer = {path[0] for path in paths.values() if len(path) > 1 and not str(path[0]).endswith("_extra_state")}
    if unknown := sorted(map(str, outer - _OF_OPTIMIZERS)):
        raise IncompatibleCheckpointError(
            f"{directory} holds tensors below {unknown}, of which none says that a model's are there; save the "
            "model's state dict alone, or below 'model'"
        )
    own = {name: path for name, path in paths.items() if path[0] not in outer}
    if outer and not own:
        raise CheckpointNotFoundError(f"{directory} holds an optimizer's state and no weights; give the model's")
    return own


def _dcp_weights(directory: Path) -> TensorReader:
    """Return a model's tensors: those below the outermost key "model", "state_dict" or "module", else all.

    Without such a key, an optimizer's state beside them is left out.
    """
    stored = DcpDirectory(directory)
    paths = {name: stored.paths.get(name, (name,)) for name in stored}
    # An application's state as torch's tutorials save it has the model's one key further in.
    roots = {path[: n + 1] for path in paths.values() for n, key in enumerate(path[:-1]) if key in _OF_MODELS}
    root = min(roots, key=lambda each: (len(each), _OF_MODELS.index(each[-1])), default=())
    if not root:
        paths = _without_optimizers(directory, paths)
    prefix = ".".join(map(str, (*root, "")))
    stored.tensors = {
        name.removeprefix(prefix): stored.tensors[name] for name, path in paths.items() if path[: len(root)] == root
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
        ConfigError: `target` is a file, or the checkpoint itself, or lies in it.
    """
    if target.is_file() or target.absolute() == source.absolute():
        raise ConfigError(f"{target.absolute()} is {'a file' if target.is_file() else 'the checkpoint'}; give another")
    _refuse_inside(source, target)
    weights = find_weights(source, unit, verify)
    lazy = {name: weights.lazy(name) for name in weights}
    return save_weights(lazy, target, max_shard_size, safe_serialization=safe_serialization)


def _refuse_inside(source: Path, target: Path) -> None:
    if (source / MANIFEST_NAME).is_file() and target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(
            f"{target.absolute()} lies in {source.absolute()}, which would no longer be what its {MANIFEST_NAME} "
            "says; give a directory outside of it"
        )


# Files of a Trainer's checkpoint that are not copied: the written ones replace them.
_REPLACED = ("model*.safetensors*", "pytorch_model*", "optimizer*", MANIFEST_NAME, MARKER_NAME)

Optimizer = Mapping[str, Any]
"""`{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}]}`, its tensors lazy or mapped."""


def export_hf_fsdp(source: Path, target: Path, *, is_sharded: bool, unit: int = 0, verify: str = "full") -> list[str]:
    """Write a checkpoint for transformers' own Trainer under FSDP to a new directory, and return the files' names.

    Of a state of `save_state`, weights and optimizer alone: that Trainer has no form for the rest.

    Args:
        is_sharded: for `SHARDED_STATE_DICT`; one tensor is in memory at a time. Else for `FULL_STATE_DICT`, of whose
            files each is built in memory, as its reader does too.
        unit: which model, where there are several.

    Raises:
        ConfigError: `target` is there already, and no empty directory, or lies in the checkpoint.
        IncompatibleCheckpointError: parameters of the optimizer have no names, or others than the weights have.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target.absolute()} is there already; give a new directory, or an empty one")
    _refuse_inside(source, target)
    if (source / MANIFEST_NAME).is_file():
        _verify(source, unit, verify)
    weights, optimizer = _tied_weights(source, unit), _find_optimizer(source, unit)
    _check_names(source, weights, optimizer)
    # Under another name until it is whole: upstream loads what it finds, with no marker to tell.
    incomplete = target.with_name(f".{target.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        with explain_full_disk(incomplete):
            if (source / "trainer_state.json").is_file():
                _copy_trainer_files(source, incomplete)
            (_write_sharded if is_sharded else _write_full)(incomplete, unit, weights, optimizer)
            for path in (*incomplete.rglob("*"), incomplete):
                fsync_path(path)
        os.replace(incomplete, target)
        fsync_path(target.parent)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())


def _verify(source: Path, unit: int, verify: str) -> None:
    stored = open_checkpoint(source, ALONE, verify)
    own = [name for name in stored.manifest.files if name.startswith(f"unit_{unit}.")]
    stored.check(own or stored.manifest.files)  # of a Trainer's checkpoint, all


def _tied_weights(source: Path, unit: int) -> dict[str, LazyTensor]:
    """Return the weights of a checkpoint under all their names."""
    found = find_weights(source, unit, "off")
    weights = {name: found.lazy(name) for name in found}
    for alias, name in read_tied(source, unit).items():
        shared = weights.get(name, weights.get(alias))
        if shared is not None:
            # One object for both: torch.save writes a storage once, and its reader ties them again.
            weights[name] = weights[alias] = shared
    return weights


def _copy_trainer_files(source: Path, target: Path) -> None:
    """Copy the files of a Trainer's checkpoint beside weights and optimizer."""
    for path in source.iterdir():
        is_kept = not any(fnmatch(path.name, name) for name in _REPLACED)
        if is_kept and path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target / path.name)


def _find_optimizer(source: Path, unit: int) -> Optimizer | None:
    """Return the optimizer's state by parameter name; None where weights alone were saved."""
    if (source / MANIFEST_NAME).is_file():
        stored = open_checkpoint(source, ALONE, "off")
        # Of `save_state`, or of a Trainer's checkpoint under DeepSpeed.
        prefix = next((name for name in (f"unit_{unit}", "optimizer") if f"{name}.json" in stored), None)
        if prefix is not None:
            outline = stored.json(f"{prefix}.json")["optimizer"]
            shards = stored_tensors(stored, f"{prefix}.optimizer")
            lazy: Any = {name: shards.lazy(name) for name in shards}
            return None if outline is None else decode(outline, lazy)
    if (source / f"optimizer_{unit}" / METADATA_NAME).is_file():
        stored_by_dcp = DcpDirectory(source / f"optimizer_{unit}")
        return {"state": {}, "param_groups": [], **stored_by_dcp.nested("optimizer", stored_by_dcp.lazy)}
    found = next((path for path in (source / "optimizer.bin", source / "optimizer.pt") if path.is_file()), None)
    if found is None:
        return None
    state: dict[str, Any] = load_torch_file(found, is_mapped=True)
    return state


def _check_names(source: Path, weights: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    groups = [] if optimizer is None else optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if any(not isinstance(name, str) for name in names):
        raise IncompatibleCheckpointError(
            f"{source.absolute()}: its optimizer numbers its parameters, as on one process and with DDP, where "
            "transformers' Trainer resumes from it as it is; under FSDP it wants their names, which a save under FSDP "
            "writes"
        )
    strange = [name for name in names if name not in weights]
    if strange:
        raise IncompatibleCheckpointError(
            f"{source.absolute()}: {len(strange)} parameter(s) of the optimizer are not among the weights (first: "
            f"{strange[0]!r}); were the weights written under other names than the model's own?"
        )
    if any(OWN_STATE in group for group in groups):
        raise IncompatibleCheckpointError(
            f"{source.absolute()}: its optimizer keeps a state that belongs to no parameter, which the "
            "files of transformers' Trainer have no place for; resume with this library, or export the weights alone"
        )


def suffix(index: int) -> str:
    """Return the end of a file's name for the object of this number, in the files of accelerate."""
    return f"_{index}" if index else ""


def _write_full(target: Path, unit: int, weights: Mapping[str, LazyTensor], optimizer: Optimizer | None) -> None:
    torch.save(make_tensors(weights), target / f"pytorch_model_fsdp{suffix(unit)}.bin")
    if optimizer is not None:
        full = map_leaves(lambda leaf: leaf() if isinstance(leaf, LazyTensor) else leaf, dict(optimizer))
        torch.save(full, target / f"optimizer{suffix(unit)}.bin")


def _write_sharded(target: Path, unit: int, weights: Mapping[str, LazyTensor], optimizer: Optimizer | None) -> None:
    _save_dcp({"model": dict(weights)}, target / f"pytorch_model_fsdp_{unit}")
    if optimizer is not None:
        _save_dcp({"optimizer": dict(optimizer)}, target / f"optimizer_{unit}")


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Plans a save with tensors on the meta device, and reads the real one when its turn to be written has come."""

    def __init__(self) -> None:
        super().__init__()
        self._lazy: dict[int, LazyTensor] = {}

    def without_memory(self, leaf: Any) -> Any:
        """Return the meta tensor that stands for a lazy tensor in the state."""
        if not isinstance(leaf, LazyTensor):
            return leaf
        stands_for = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        self._lazy[id(stands_for)] = leaf
        return stands_for

    def lookup_object(self, index: Any) -> Any:
        """Return the object under a flat name."""
        found = super().lookup_object(index)
        return self._lazy[id(found)]() if id(found) in self._lazy else found


def _save_dcp(state: dict[str, Any], directory: Path) -> None:
    planner = _LazyPlanner()
    without_memory = map_leaves(planner.without_memory, state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")  # as no_dist says
        try:
            dcp.save(without_memory, storage_writer=dcp.FileSystemWriter(directory), planner=planner, no_dist=True)
        except dcp.CheckpointException as error:  # which is no Exception, and holds those of all ranks
            raise next(iter(error.failures.values()))[0] from error
