"""torch.compile in place: names in the state dict and the user's class do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_trainer.config import CompileConfig
from accel_trainer.runtime.torch_private import compile_call

__all__ = ["apply_compile", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's ModuleLists whose class occurs more than once: its transformer blocks."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            blocks.extend(module)
    return blocks


def apply_compile(model: nn.Module, config: CompileConfig, backend_options: Mapping[str, Any] | None = None) -> None:
    """Compile `model`, or only its repeated blocks with `regional`, which starts faster. No-op when backend is "no".

    Args:
        backend_options: the argument `options` of torch.compile; None for the backend's defaults.
    """
    if config.backend == "no":
        return
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": config.fullgraph, "dynamic": config.dynamic}
    if config.mode != "default":
        options["mode"] = config.mode
    if backend_options:
        options["options"] = dict(backend_options)
    blocks = repeated_blocks(model) if config.regional else []
    for target in blocks or [model]:
        if type(target).forward.__module__.startswith("torch.nn."):
            # Dynamo looks into no frame of torch.nn: nn.Sequential(...).compile() compiles nothing, without a word.
            # The inner lambda is a frame that it looks into.
            compile_call(target, lambda call: torch.compile(lambda *args, **kw: call(*args, **kw), **options))
        else:
            target.compile(**options)
