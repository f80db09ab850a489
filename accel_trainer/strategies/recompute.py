"""Activation checkpointing in place: a block's forward is recomputed in the backward, its names and class stay."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CheckpointedForward", "apply_activation_checkpointing"]


class CheckpointedForward:
    """A module's forward whose activations are recomputed in the backward.

    Random state is preserved, so that dropout draws the same mask twice. Lives in the module's `forward` attribute, as
    `precision.AutocastForward` does, so parameter names carry no prefix and the module pickles.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class's forward, keeping only its inputs for the backward."""
        return checkpoint(type(self.module).forward, self.module, *args, use_reentrant=False, **kwargs)


def apply_activation_checkpointing(blocks: list[nn.Module]) -> None:
    """Recompute the activations of each block in the backward; a block that already does so is left alone."""
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CheckpointedForward):
            block.forward = CheckpointedForward(block)
