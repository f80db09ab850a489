"""Parameters and buffers of a module by name: listed, moved to a device, exchanged, and tied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.checkpoint.weights.into_model import as_dtype, names_by_tensor, place_of
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.memory import clear_device_cache
from accel_trainer.runtime.process import with_index
from accel_trainer.runtime.torch_private import non_persistent_buffers, parameter_like, tensor_registry

logger = logging.get_logger(__name__)

Device = int | str | torch.device
TiedTensors = dict[int, dict[Any, Tensor]]
"""By the address of a tied tensor's values, its copy on each device that has one."""


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module and then its buffers, by name; a tied one once, or by each of its names."""
    yield from module.named_parameters("", recurse, remove_duplicate)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        buffers = module.named_buffers("", recurse, remove_duplicate)
        yield from ((name, buffer) for name, buffer in buffers if name not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are in no state dict, full ones with `fqns`, else the last word of each."""
    owners = module.named_modules() if recurse else [("", module)]
    return {
        f"{owner}.{name}" if fqns and owner else name
        for owner, inner in owners
        for name in non_persistent_buffers(inner)
    }


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and bytes of a tensor's storage: equal for tensors that share it, and for all on meta."""
    storage = tensor.untyped_storage()
    return tensor.device, 0 if tensor.is_meta else storage.data_ptr(), storage.nbytes()


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one; a type without an index is its device 0."""
    first, second = torch.device(first_device), torch.device(second_device)
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def find_registry(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dict in which the tensor `name` stands, and its key there; a ConfigError where there is none."""
    owner, _, leaf = name.rpartition(".")
    try:
        registry = tensor_registry(module.get_submodule(owner), leaf)
    except AttributeError:
        registry = None
    if registry is None:
        raise ConfigError(
            f"{type(module).__name__} has no parameter or buffer {name!r}; expected one of those that "
            "named_module_tensors(module, recurse=True) yields"
        )
    return registry, leaf


def with_data(old: Tensor | None, data: Tensor) -> Tensor:
    """Return `data` as `old` is: a parameter of its class with its attributes, or a plain tensor for a buffer."""
    if not isinstance(old, nn.Parameter):
        return data
    if type(old) is not nn.Parameter and nn.Parameter in type(old).__mro__:
        return parameter_like(old, data)
    made = nn.Parameter(data, requires_grad=old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer on a device, as a new tensor in the place of the old one.

    Args:
        tensor_name: with the path to it, such as `"layers.0.weight"`.
        value: what it holds from now on; needed where it has no memory yet.
        dtype: of floating-point values; None is that of the old tensor.
        fp16_statistics: the attribute `SCB` of an int8 weight of bitsandbytes.
        tied_params_map: tied tensors that already are on a device, by the address of their values: read and added to.
        clear_cache: return unused memory of an accelerator to it afterwards.

    Raises:
        ConfigError: there is no such tensor, it has no values, those that are given have another shape, or torch has no
            such dtype.
    """
    registry, leaf = find_registry(module, tensor_name)
    old: Tensor | None = registry[leaf]
    target = with_index(device)
    non_blocking = non_blocking and target.type != "cpu"  # nobody would know when the values are there
    copies = _copies_of((value, old), tied_params_map or {})
    for shared in copies:
        if device in shared:
            registry[leaf] = shared[device]
            return
    source = _values_for(tensor_name, value, old, target)
    wanted = _wanted_dtype(source, old, dtype)
    if value is None and target == source.device and wanted == source.dtype:
        return
    with torch.no_grad():
        made = with_data(old, source.detach().to(target, wanted, non_blocking=non_blocking))
    if fp16_statistics is not None:
        made.SCB = fp16_statistics.to(target, non_blocking=non_blocking)  # type: ignore[attr-defined]
    registry[leaf] = made
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    if copies:
        copies[-1].setdefault(device, made)


def _copies_of(values: Iterable[Any], tied: TiedTensors) -> list[dict[Any, Tensor]]:
    """Return the copies, by device, of those of some values that are tied tensors."""
    addresses = [each.data_ptr() for each in values if isinstance(each, Tensor)]
    return [tied[address] for address in addresses if address in tied]


def _values_for(name: str, value: Any, old: Tensor | None, target: torch.device) -> Tensor:
    source = old if value is None else value
    if source is None or source.device.type == "meta" and target.type != "meta":
        raise ConfigError(f"{name!r} is on the meta device and has no values to put on {target}; give them as `value`")
    if not isinstance(source, Tensor):
        source = torch.tensor(source)
    if old is not None and source.shape != old.shape:
        raise ConfigError(
            f"value for {name!r} has shape {tuple(source.shape)}, and the module's tensor {tuple(old.shape)}; "
            "give the weights of a model of this configuration"
        )
    return source


def _wanted_dtype(source: Tensor, old: Tensor | None, dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return source.dtype if old is None else old.dtype
    return as_dtype(dtype) if source.is_floating_point() or source.is_complex() else source.dtype


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, sorted."""
    groups = names_by_tensor(dict(model.named_parameters(remove_duplicate=False)))
    return [sorted(group) for group in groups.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Let the names of each group have one parameter again: the first that has memory. Groups without one stay."""
    for group in tied_params:
        found = (model.get_parameter(name) for name in group)
        shared = next((parameter for parameter in found if not parameter.is_meta), None)
        if shared is not None:
            for name in group:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, shared)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a transformers model says that weights are tied; False for others."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(text, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:  # type: ignore[operator]
        return True
    is_pair = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(is_pair) or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of tied parameters that a map sends to different devices; a ConfigError where it leaves one out."""
    for group in tied_params:
        devices = {name: place_of(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            logger.warning(
                "tied parameters are sent to different devices: %s; each device gets a copy, and they are no longer "
                "tied. Give them one device, or use device_map='auto'",
                devices,
            )
