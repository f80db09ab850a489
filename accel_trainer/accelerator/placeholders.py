"""Stand-ins for what an engine's configuration describes, among the objects that are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DummyOptim, DummyScheduler
from accel_trainer.strategies.api import Strategy
from accel_trainer.strategies.optimizer_placeholder import DescribedOptimizer

__all__ = ["NO_HINTS", "JobHints", "is_optimizer", "real_optimizer", "schedules_of", "stand_ins"]


@dataclass(frozen=True, slots=True)
class JobHints:
    """What the objects beside a model tell about its job."""

    rows: int | None = None
    """Of one batch on one rank."""
    schedules: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Numbers for a described schedule, by the id of the optimizer that is scheduled."""


NO_HINTS = JobHints()


def is_optimizer(item: Any) -> bool:
    """Whether an object is an optimizer, or stands for one."""
    return isinstance(item, Optimizer | DummyOptim)


def schedules_of(objects: Iterable[Any]) -> list[DummyScheduler]:
    """Return the stand-ins for schedules."""
    return [item for item in objects if isinstance(item, DummyScheduler)]


def stand_ins(objects: Iterable[Any], strategy: Strategy) -> dict[int, DescribedOptimizer]:
    """Return, by the id of each DummyOptim, the optimizer that takes its place.

    Raises:
        ConfigError: the strategy has no configuration of its own that could describe one.
    """
    dummies = [item for item in objects if isinstance(item, DummyOptim | DummyScheduler)]
    if dummies and not strategy.capabilities.describes_optimizers:
        raise ConfigError(
            f"{type(dummies[0]).__name__} stands for what a DeepSpeed configuration describes, and this run uses "
            f"strategy {strategy.name!r}; pass a torch optimizer and scheduler, or use strategy 'deepspeed'"
        )
    return {
        id(item): DescribedOptimizer(item.param_groups, item.params, item.numbers)
        for item in dummies
        if isinstance(item, DummyOptim)
    }


def real_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the groups, and steps: the engine's, for a stand-in."""
    real = optimizer.real if isinstance(optimizer, DescribedOptimizer) else None
    return optimizer if real is None else real
