"""torch.compile in place: names in the state dict and the user's class do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel_trainer.config import CompileConfig
from accel_trainer.runtime.torch_private import compile_call

# Modes in which inductor replays CUDA graphs, whose outputs lie in memory that the next replay writes to.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a ModuleList of several modules of one class, as transformer blocks are."""
    return isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or holds at any depth, a ModuleList of several modules of one class."""
    return any(is_repeated_blocks(inner) for inner in module.modules())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's ModuleLists of several modules of one class: its transformer blocks."""
    return [block for module in model.modules() if is_repeated_blocks(module) for block in module.children()]


def apply_compile(model: nn.Module, config: CompileConfig, backend_options: Mapping[str, Any] | None = None) -> None:
    """Compile `model`, or with `regional` its repeated blocks, which starts faster; a no-op with the backend "no"."""
    if config.backend == "no":
        return
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": config.fullgraph, "dynamic": config.dynamic}
    if config.mode != "default":
        options["mode"] = config.mode
    if backend_options:
        options["options"] = dict(backend_options)
    _compile_in_place(repeated_blocks(model) if config.regional else [], model, options)


def reuses_outputs(config: CompileConfig) -> bool:
    """Whether a compiled model overwrites its last outputs, as CUDA graphs do: whoever keeps outputs keeps copies."""
    return config.backend != "no" and config.mode in _WITH_GRAPHS


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a model's repeated blocks one by one, in place, and return it; a model without such blocks as a whole.

    Blocks of one class share their compiled code, so that this starts faster than compiling the model
    (https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Names in the state dict do not change.

    Args:
        **compile_kwargs: arguments of `torch.compile`.
    """
    _compile_in_place(repeated_blocks(module), module, compile_kwargs)
    return module


def _compile_in_place(blocks: list[nn.Module], model: nn.Module, options: Mapping[str, Any]) -> None:
    for target in blocks or [model]:
        if type(target).forward.__module__.startswith("torch.nn."):
            # Dynamo looks into no frame of torch.nn: nn.Sequential(...).compile() compiles nothing, without a word.
            # The inner lambda is a frame that it looks into.
            compile_call(target, lambda call: torch.compile(lambda *args, **kw: call(*args, **kw), **options))
        else:
            target.compile(**options)
