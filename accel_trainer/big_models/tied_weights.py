"""Parameters that stand under several names of a model: found, compared with a device map, and tied again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from accel_trainer import logging
from accel_trainer.errors import ConfigError

__all__ = [
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "find_tied_parameters",
    "retie_parameters",
]

logger = logging.get_logger(__name__)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


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
    """Warn of tied parameters whose names a device map sends to different devices.

    Raises:
        ConfigError: the map says nothing about one of them.
    """
    for group in tied_params:
        devices = {name: _device_of(name, device_map) for name in group}
        if len({str(device) for device in devices.values()}) > 1:
            logger.warning(
                "tied parameters are sent to different devices: %s; each device gets a copy, and they are no longer "
                "tied. Give them one device, or use device_map='auto'",
                devices,
            )


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    path = name
    while path and path not in device_map:
        path = path.rpartition(".")[0]
    if path not in device_map:
        raise ConfigError(f"device_map says nothing about {name!r}; add its module, or an entry '' for all the rest")
    return device_map[path]
