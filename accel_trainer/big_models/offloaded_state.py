"""The real weights of an offloaded model: in a state dict, by module, and from a folder back into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.big_models.alignment import align_module_device, has_offloaded_params, offload_hooks
from accel_trainer.big_models.module_tensors import Device, set_module_tensor_to_device
from accel_trainer.checkpoint.safetensors_file import LazyTensor, SafetensorsFile
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.checkpoint.weights.into_model import describe_names, place_of
from accel_trainer.checkpoint.weights.offloaded import load_offloaded_weight
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import with_index


def is_offloaded(model: nn.Module) -> bool:
    """Return whether weights of a model come to their device for each forward only."""
    return any(has_offloaded_params(module) for module in model.modules())


def lazy_state_dict(model: nn.Module) -> dict[str, Tensor | LazyTensor]:
    """Return the state dict of a model with its offloaded weights, which are read when they are called for."""
    offloaded: dict[str, Tensor | LazyTensor] = {}
    converted: dict[tuple[int, torch.dtype], LazyTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for hook in offload_hooks(module):
            for name, dtype, stored in hook.outlines():
                found: Tensor | LazyTensor = stored
                if stored.dtype != dtype:
                    later = LazyTensor(dtype, tuple(stored.shape), partial(stored.to, dtype))
                    found = converted.setdefault((stored.data_ptr(), dtype), later)  # names of tied weights share one
                offloaded[f"{path}.{name}" if path else name] = found
    state = {name: offloaded.get(name, tensor) for name, tensor in model.state_dict().items()}
    empty = [name for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{describe_names(empty)} of {type(model).__name__} have no values: they are on the meta device, and not "
            "offloaded; load them with load_checkpoint_and_dispatch()"
        )
    return state


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model in host memory, its offloaded weights included: mapped ones stay in their files.

    Raises:
        ConfigError: tensors have no values anywhere.
    """
    state = lazy_state_dict(model)
    return {name: (each if isinstance(each, Tensor) else each()).to("cpu") for name, each in state.items()}


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Fill in those entries of `state_dict` that are tensors of a module, and return it.

    Args:
        module_name: the name of one tensor of the module, with the path to it, such as `"layers.0.weight"`.
        device_to_put_offload: where offloaded tensors go; others stay where they are.
    """
    path = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, tensor in module.state_dict().items():
            full = f"{path}.{name}" if path else name
            if full in state_dict:
                state_dict[full] = tensor
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put the weights of an index, which have a file each in a folder, into a model on the host."""
    for name, entry in (index or {}).items():
        weight = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, Any]:
    """Return the tensors of one file, safetensors or torch's own; those of torch's own are on the host.

    Args:
        device_map: devices by the start of the names; what it does not name, or sends to `"disk"`, is on the host.

    Raises:
        CheckpointNotFoundError: there is no file.
        IncompatibleCheckpointError: it cannot be read, or is not in PyTorch's layout.
    """
    path = Path(checkpoint_file)
    if path.suffix != ".safetensors":
        found: dict[str, Any] = load_torch_file(path)
        return found
    file, places = SafetensorsFile(path), {"": "cpu", **(device_map or {})}
    found = {}
    for name in file:
        place = place_of(name, places)
        found[name] = file[name].to("cpu" if place == "disk" else with_index(place))
    return found
