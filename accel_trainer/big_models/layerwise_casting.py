"""Layers that keep their weights in a small dtype, and compute in a larger one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel_trainer.big_models.module_hooks import ModelHook, add_hook_to_module

__all__ = ["LAYERS_TO_CAST", "LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

LAYERS_TO_CAST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Casts a module's weights to one dtype for its forward, and to another one, which loses precision, afterwards."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep linear layers and convolutions in `storage_dtype`, such as `torch.float8_e4m3fn`, and compute in another.

    Args:
        skip_modules_pattern: regular expressions; modules whose names have a match stay as they are, and all inside.
        skip_modules_classes: likewise by class.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    waiting = [("", module)]
    while waiting:
        name, found = waiting.pop()
        if isinstance(found, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(found, LAYERS_TO_CAST):
            add_hook_to_module(found, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            waiting.extend((f"{name}.{child}" if name else child, inner) for child, inner in found.named_children())
