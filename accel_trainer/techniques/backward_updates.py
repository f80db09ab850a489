"""Updates in the backward: each parameter as soon as its gradient is there, which is freed at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.errors import ConfigError

_KNOWN = ("accel_trainer", "torch", "torchao", "transformers")
"""Packages whose optimizers keep all that they count with each parameter, but LBFGS."""
_BASES = (*Optimizer.__mro__,)


class BackwardUpdates:
    """Steps the optimizers of a model in its backward, for one parameter after the other.

    An optimizer stays one object, with its groups, its state and its schedule; for a parameter, its `step` is called
    with this one in its groups. Gradients that no hook sees in the backward are left for the loop's own `step`.
    """

    def __init__(self, samples: Sequence[Tensor]) -> None:
        """Take a few parameters whose gradients `take_sample` adds up."""
        self._samples: Collection[Tensor] = set(samples)
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._updated: set[Tensor] = set()
        """Parameters that were updated since the last `step`."""
        self._sum: Tensor | None = None

    def watch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Update those of `parameters` in the backward that the optimizer trains; others, and frozen ones, as ever."""
        _check_kind(optimizer)
        wanted = {parameter for parameter in parameters if parameter.requires_grad}
        for place, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in wanted and parameter not in self._handles:
                    hook = partial(self._update, optimizer, place)
                    self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def _update(self, optimizer: Optimizer, place: int, parameter: Tensor) -> None:
        if parameter in self._updated:
            raise ConfigError(
                f"a second gradient came for a parameter of shape {tuple(parameter.shape)}, which is updated: with "
                "optimizer_in_backward each optimizer.step() has one backward() before it, in which activations are "
                "recomputed with use_reentrant=False; add the losses, or leave the option out"
            )
        self._updated.add(parameter)
        if parameter in self._samples and parameter.grad is not None:
            total = local_tensor(parameter.grad).sum()
            self._sum = total if self._sum is None else self._sum + total.to(self._sum.device)
        # The group is found by its place: a state that was loaded has made others.
        groups, group = optimizer.param_groups, optimizer.param_groups[place]
        others = group["params"]
        optimizer.param_groups, group["params"] = [group], [parameter]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, group["params"] = groups, others
        parameter.grad = None

    def take_sample(self) -> Tensor | None:
        """Return the sum of this rank's gradients of some parameters in a backward, NaN or infinite if one is."""
        total, self._sum = self._sum, None
        return total

    def end_update(self) -> None:
        """Let the next backward update all parameters again."""
        self._updated.clear()
        self._sum = None

    def remove(self) -> None:
        """Leave all updates to the optimizers' own `step`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _check_kind(optimizer: Optimizer) -> None:
    """Refuse an optimizer that may count its steps, or compare parameters, in a call for all of them."""
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__ if kind not in _BASES}
    if isinstance(optimizer, torch.optim.LBFGS) or packages.isdisjoint(_KNOWN):
        kind = type(optimizer)
        raise ConfigError(
            f"{kind.__module__}.{kind.__name__} cannot be called for one parameter at a time, as optimizer_in_backward "
            "does: it may count its steps, or compute with all parameters; use AdamW or another optimizer of torch"
        )
