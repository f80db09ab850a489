"""Gradients of parameters that are left whole beside sharded ones: averaged over the ranks like the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_trainer.runtime.torch_private import foreach_copy_, queue_callback

__all__ = ["WholeGradients"]


class WholeGradients:
    """Averages the gradients of whole parameters over all ranks at the end of each backward that exchanges gradients.

    Whoever calls backward, and through whichever model the loss came. Every rank's backward must reach some of the
    parameters, or none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.sync = True
        """Whether the next backward exchanges gradients."""
        self._parameters = parameters
        self._watched: set[int] = set()
        self._is_queued = False

    def watch(self, module: nn.Module, args: Any) -> None:
        """Follow the parameters that take a gradient now: one may be unfrozen late. A forward pre-hook."""
        if len(self._watched) == len(self._parameters):
            return
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self.sync and not self._is_queued:
            self._is_queued = True
            # In one place and in one order: gradients may become ready in another order on another rank.
            queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for gradients in by_kind.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            parts = flat.split([gradient.numel() for gradient in gradients])
            foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
