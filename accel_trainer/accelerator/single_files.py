"""Objects in a file of their own, written once per job or node, and read as plain data.

Also a prepared model's or optimizer's state in the files of accelerate's functions for FSDP: one of full tensors, or a
directory of torch.distributed.checkpoint to which each rank writes its shards, as the plugin's `state_dict_type` says.
Any number of ranks reads both, with either type. `save_state` writes all of a run, with checksums.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from accel_trainer.checkpoint.interop.dcp import METADATA_NAME
from accel_trainer.checkpoint.interop.huggingface import export_weights, find_weights
from accel_trainer.checkpoint.run_state import read_on_main
from accel_trainer.checkpoint.torch_files import PLAIN_ARRAYS, load_torch_file
from accel_trainer.checkpoint.weights.adapters import is_peft_model
from accel_trainer.checkpoint.weights.weight_files import distinct
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.process import ProcessContext, current_process
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.api import CheckpointIO

if TYPE_CHECKING:
    from accel_trainer import Accelerator

logger = get_logger(__name__)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict for safetensors: contiguous, tied tensors once, by the first name; others are logged."""
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    kept = distinct(tensors)
    if removed := sorted(set(tensors) - set(kept)):
        logger.warning(
            f"Removed shared tensor {removed} while saving: a tensor is written once; tie them after loading"
        )
    return {
        name: value.contiguous() if isinstance(value, Tensor) else value
        for name, value in state_dict.items()
        if name not in removed
    }


def save(
    obj: Any,
    f: str | PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    process: ProcessContext | None = None,
) -> None:
    """Write an object on rank 0, or each node's first rank: a state dict as safetensors, others by torch's pickle."""
    process = process or current_process()
    if not (process.is_local_main if save_on_each_node else process.is_main):
        return
    if safe_serialization:
        save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})  # type: ignore[arg-type]
    else:
        torch.save(obj, f)


def load(f: str | PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Return the plain data, tensors and arrays of a file of torch; `weights_only=False` trusts any classes."""
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(PLAIN_ARRAYS):
        return torch.load(f, map_location=map_location, **kwargs)


# --- the state of a model or an optimizer -----------------------------------------------------------------------------


class LoadedKeys(NamedTuple):
    """Names in which a load differs from the model, as of `load_state_dict`: none, for others are an error."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a prepared model's weights: `pytorch_model_fsdp.bin`, or shards in `pytorch_model_fsdp_0/`. Collective.

    Args:
        fsdp_plugin: `accelerator.state.fsdp_plugin`, or another whose `state_dict_type` is meant.
        model_index: which of several models; the number in the names of the files.
        adapter_only: of a `peft.PeftModel`, the parameters that are trained.
        use_dcp: files of each rank's own are not offered.

    Raises:
        ConfigError: the model was not prepared, or `use_dcp` is false.
    """
    unit, directory = accelerator.unit_of(model), Path(output_dir)
    in_shards, process = _in_shards(fsdp_plugin, use_dcp), accelerator.process
    is_partial = adapter_only and is_peft_model(unit.module)
    own: Mapping[str, Any] = {}
    full: dict[str, Tensor] | None = None
    if in_shards or is_partial:
        own = get_model_state_dict(unit.module, options=StateDictOptions(ignore_frozen_params=is_partial))
    if not in_shards:
        lazy = unit.checkpoint_io().lazy_model_state()
        gathered = ((name, tensor()) for name, tensor in lazy.items() if not is_partial or name in own)
        full = {name: tensor.cpu() for name, tensor in gathered if process.is_main}
    _write_full(process, directory / _file("pytorch_model_fsdp", model_index), full)
    if in_shards:
        dcp.save({"model": own}, storage_writer=dcp.FileSystemWriter(directory / f"pytorch_model_fsdp_{model_index}"))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> LoadedKeys:
    """Load the files of `save_fsdp_model`, or of accelerate's, into a prepared model. Collective. Arguments as there.

    Raises:
        IncompatibleCheckpointError: they are of another model; nothing was changed.
    """
    in_shards, io = _in_shards(fsdp_plugin, use_dcp), accelerator.unit_of(model).checkpoint_io()
    directory, is_partial = Path(input_dir), adapter_only and is_peft_model(model)

    def find() -> Mapping[str, Any]:
        found = find_weights(_find(directory, "pytorch_model_fsdp", model_index, in_shards))
        unknown = sorted(set(found) - set(io.lazy_model_state())) if is_partial else ()
        if unknown:
            raise IncompatibleCheckpointError(
                f"{directory.absolute()} holds {unknown[0]!r} and {len(unknown) - 1} other tensor(s) that "
                f"{type(model).__name__} has not; add the adapters that were saved before you load them"
            )
        return found

    weights = read_on_main(accelerator.process, f"load of {directory}", find)
    io.load_full_model_state(weights or {}, strict=not is_partial)
    return LoadedKeys()


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write optimizers' state: `optimizer.bin`, or shards in `optimizer_0/`; as `save_fsdp_model`. Collective."""
    in_shards, directory = _in_shards(fsdp_plugin, use_dcp), Path(output_dir)
    io = _optimizer_io(accelerator, optimizer, model)
    state = None if in_shards else io.full_optimizer_state()
    _write_full(accelerator.process, directory / _file("optimizer", optimizer_index), state)
    if in_shards:
        io.save_sharded_optimizer(directory / f"optimizer_{optimizer_index}")


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load the files of `save_fsdp_optimizer`, or of accelerate's; `adapter_only` is not used. Collective."""
    in_shards, directory = _in_shards(fsdp_plugin, use_dcp), Path(input_dir)
    io, section = _optimizer_io(accelerator, optimizer, model), f"load of {directory}"
    find = partial(_find, directory, "optimizer", optimizer_index, in_shards)
    with raise_together(accelerator.process, section):
        found = find()
    if found.is_dir():
        return io.load_sharded_optimizer(found)
    state = read_on_main(accelerator.process, section, partial(load_torch_file, found, is_mapped=True))
    io.load_full_optimizer_state(state or {})


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write a directory of shards as files for `from_pretrained`, on rank 0, as `merge-weights` does. Collective."""
    process = current_process()
    with raise_together(process, f"merge of {checkpoint_dir}"):
        if process.is_main:
            export_weights(Path(checkpoint_dir), Path(output_path), safe_serialization=safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(checkpoint_dir)


def _write_full(process: ProcessContext, file: Path, state: Mapping[str, Any] | None) -> None:
    """Make the directory of a file, and write an object without shards to it on rank 0. Collective."""
    with raise_together(process, f"save to {file.parent}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if process.is_main and state is not None:
            torch.save(state, file)


def _optimizer_io(accelerator: Accelerator, optimizer: Optimizer, model: nn.Module) -> CheckpointIO:
    unit = accelerator.unit_of(model)
    if accelerator.unit_of(optimizer) is not unit:
        raise ConfigError(
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} holds no parameters of "
            f"{type(unit.module).__name__}; pass the model that it steps"
        )
    return unit.checkpoint_io()


def _in_shards(fsdp_plugin: Any, use_dcp: bool) -> bool:
    """Return whether a plugin, ours or a description, asks for shards."""
    kind = getattr(fsdp_plugin, "state_dict_type", None)
    in_shards = str(getattr(kind, "name", kind)).upper().startswith("SHARDED")
    if in_shards and not use_dcp:
        raise ConfigError(
            "use_dcp=False would have each rank write a file that only as many ranks read; leave it out, and shards "
            "are written to a directory of torch.distributed.checkpoint, or take the state_dict_type FULL_STATE_DICT"
        )
    return in_shards


def _file(stem: str, index: int) -> str:
    return f"{stem}_{index}.bin" if index else f"{stem}.bin"


def _find(directory: Path, stem: str, index: int, in_shards: bool) -> Path:
    """Return the file or the directory of shards, whichever is there; of both, the one that is asked for."""
    full, shards = directory / _file(stem, index), directory / f"{stem}_{index}"
    shards = directory if directory.name == shards.name else shards
    present = [path for path in (shards, full) if path.is_file() or (path / METADATA_NAME).is_file()]
    if not present:
        raise CheckpointNotFoundError(
            f"neither {full.name} nor {shards.name}/ is in {directory.absolute()}; give a directory that was saved to"
        )
    return present[0 if in_shards else -1]
