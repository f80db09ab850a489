"""Activation checkpointing in place: a block's forward is recomputed in the backward, its names and class stay."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_trainer import logging

__all__ = ["CheckpointedForward", "apply_activation_checkpointing"]

logger = logging.get_logger(__name__)


class CheckpointedForward:
    """A module's forward whose activations are recomputed in the backward.

    Random state is preserved, so that dropout draws the same mask twice. Lives in the module's `forward` attribute, as
    `precision.AutocastForward` does, so parameter names carry no prefix and the module pickles. A forward that somebody
    has put on the instance before is the one that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def _forward(self) -> Callable[..., Any]:
        return self.inner or functools.partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, keeping only its inputs for the backward."""
        if not torch.is_grad_enabled():
            return self._forward()(*args, **kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self._forward(), *args, use_reentrant=False, **kwargs)


def _is_cache(value: Any) -> bool:
    """Whether `value` holds the keys and values of earlier tokens: a block that runs twice would add its own twice."""
    is_cache = callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))
    if is_cache:
        logger.warning_once("activation checkpointing leaves caches of keys and values out of the forward in training")
    return is_cache


def apply_activation_checkpointing(blocks: list[nn.Module]) -> None:
    """Recompute the activations of each block in the backward; a block that already does so is left alone."""
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CheckpointedForward):
            block.forward = CheckpointedForward(block)
