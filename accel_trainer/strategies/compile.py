"""torch.compile in place: names in the state dict and the user's class stay what they are."""

from __future__ import annotations

from typing import Any

from torch import nn

from accel_trainer.config import CompileConfig

__all__ = ["apply_compile", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's ModuleLists whose class occurs more than once: its transformer blocks."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1:
            blocks.extend(module)
    return blocks


def apply_compile(model: nn.Module, config: CompileConfig) -> None:
    """Compile `model`, or only its repeated blocks with `regional`, which starts faster. No-op when backend is "no"."""
    if config.backend == "no":
        return
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": config.fullgraph, "dynamic": config.dynamic}
    if config.mode != "default":
        options["mode"] = config.mode
    blocks = repeated_blocks(model) if config.regional else []
    for target in blocks or [model]:
        target.compile(**options)
