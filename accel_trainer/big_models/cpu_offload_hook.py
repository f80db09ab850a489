"""A whole model on the host until its forward, and until another model needs the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_trainer.big_models.module_hooks import ModelHook, remove_hook_from_module
from accel_trainer.big_models.module_tensors import Device
from accel_trainer.runtime.memory import clear_device_cache
from accel_trainer.runtime.process import with_index
from accel_trainer.runtime.tensor_trees import send_to_device

__all__ = ["CpuOffload", "UserCpuOffloadHook"]


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward; it stays on the device then, until `init_hook` is called again."""

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        """Describe the hook.

        Args:
            execution_device: where the model computes; None is the accelerator, or the host where there is none.
            prev_module_hook: of the model that leaves the device before this one comes.
        """
        if execution_device is None:
            execution_device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.execution_device = with_index(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the previous model out, and this one and its inputs in."""
        previous = self.prev_module_hook
        if previous is not None and _device_of(previous.model) != torch.device("cpu"):
            previous.offload()
            clear_device_cache()
        if _device_of(module) == self.execution_device:
            return args, kwargs
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


class UserCpuOffloadHook:
    """A model with its `CpuOffload` hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)
