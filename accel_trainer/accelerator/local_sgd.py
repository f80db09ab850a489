"""Local SGD: every rank updates its own replica, and the weights are averaged every few updates."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.local_replicas import OuterOptimizer, configured_outer, require_replicas

__all__ = ["LocalSGD"]


class LocalSGD:
    """Context in which ranks exchange no gradients, and the mean of their weights every `local_sgd_steps` updates.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Leaving the block makes all replicas alike: weights and the states of their optimizers become the mean over the
    ranks, buffers rank 0's. An error leaves the replicas as they are, and ranks do not wait for each other.

    `save_state` in the block writes every rank's replica. On as many ranks, `load_state` before or in a new block goes
    on as if nothing had happened, also within a round; elsewhere it loads the mean of the replicas.

    With an `outer_optimizer` the exchange is DiLoCo's: what the replicas have changed on average is its gradient.

    What is not given is that of the configuration: `local_steps`, `outer_optimizer`, `local_steps_after`. On one
    process, and with `enabled=False`, it does nothing.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int | None = None,
        enabled: bool = True,
        outer_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        begin_after: int | None = None,
    ) -> None:
        """Check that replicas of `model`, which is prepared, can be updated apart.

        Args:
            local_sgd_steps: updates between two exchanges; micro-batches of an accumulation window are one update.
            outer_optimizer: builds the outer optimizer over copies of the weights, for instance
                `lambda weights: SGD(weights, lr=0.7, momentum=0.9, nesterov=True)`. `load_state` reads it where it
                comes after this object was made.
            begin_after: updates of this block that exchange gradients first: post-local SGD.

        Raises:
            ConfigError: the strategy keeps no replicas, the precision is fp16, or `local_sgd_steps` is less than 1.
        """
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        """Updates in this block."""
        config = accelerator.config
        local_sgd_steps = config.local_steps if local_sgd_steps is None else local_sgd_steps
        self._outer = None
        if (build := outer_optimizer or configured_outer(config.outer_optimizer)) is not None:
            self._outer = _outer_of(accelerator, accelerator.unit_of(model).module, build)
        if not self.enabled:
            return
        if not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(f"LocalSGD(local_sgd_steps={local_sgd_steps!r}) is no number of updates; give 1 or more")
        self.local_sgd_steps = local_sgd_steps
        self._begin_after = config.local_steps_after if begin_after is None else begin_after
        self._window = accelerator._prepared.get(model).window
        unit, is_scaled = accelerator.unit_of(model), accelerator.scaler is not None
        self._replicas = require_replicas(unit.local_replicas, unit.module, accelerator.strategy.name, is_scaled)

    def __enter__(self) -> LocalSGD:
        """Let every rank update its own replica. Ranks do not communicate."""
        if self.enabled:
            self._replicas.begin(self._outer, max(self._begin_after - self.num_steps, 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        """Make the replicas alike. Collective, unless an error is raised."""
        if self.enabled:
            self._replicas.finish() if kind is None else self._replicas.abandon()

    def step(self) -> None:
        """Count an update, after `optimizer.step()`; average weights after `local_sgd_steps`. Collective then."""
        if not self.enabled:
            self.num_steps += 1
        elif self._window.is_last:
            self.num_steps += 1
            self._replicas.end_update(self.local_sgd_steps)


def _outer_of(accelerator: Accelerator, module: nn.Module, build: Any) -> OuterOptimizer:
    """Return the outer optimizer of an earlier block of this model, whose momentum goes on, or register a new one."""
    registered = accelerator._registered.objects.values()
    known = (each for each in registered if isinstance(each, OuterOptimizer) and each.is_of(module))
    outer = next(known, None) or OuterOptimizer(module, build)
    accelerator.register_for_checkpointing(outer)
    return outer
