"""Objects that an Accelerator has prepared: which of them belong together, and how the user's own lead to them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.accelerator.accelerated_scheduler import AcceleratedScheduler
from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE

__all__ = ["Prepared"]


class Prepared:
    """Units of an Accelerator with the optimizers that step them, their schedulers, and the data loaders.

    Every object is in its list once. A wrapped optimizer is known to the schedulers of the optimizer that it wraps,
    whichever of the two is prepared first.
    """

    def __init__(self) -> None:
        self.units: list[PreparedUnit] = []
        self.current: list[PreparedUnit] = []
        """Units of the micro-batch whose `accumulate()` is entered; empty outside of one."""
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[PreparedDataLoader] = []

    @property
    def models(self) -> list[nn.Module]:
        """Models that the user calls, one of each unit."""
        return [prepared.unit.model for prepared in self.units]

    def find(self, item: Any) -> PreparedUnit | None:
        """Return the unit of a model or optimizer: the wrapped object and the user's own both lead there.

        So does the wrapped object compiled: `torch.compile(prepared)`.
        """
        for prepared in self.units:
            unit = prepared.unit
            if item is unit.model or item is unit.module:
                return prepared
            for optimizer in unit.optimizers:
                if item is optimizer:
                    return prepared
        compiled = getattr(item, ORIGINAL_MODULE, None)
        return next((prepared for prepared in self.units if prepared.unit.model is compiled), None)

    def get(self, item: Any) -> PreparedUnit:
        """Return the unit of a model or optimizer.

        Raises:
            ConfigError: it was not prepared by this Accelerator.
        """
        found = self.find(item.optimizer if isinstance(item, AcceleratedOptimizer) else item)
        if found is None:
            raise ConfigError(
                f"{type(item).__name__} was not prepared by this Accelerator; pass it to prepare() and use its result"
            )
        return found

    def units_of(self, optimizer: Optimizer) -> list[PreparedUnit]:
        """Return the units that an optimizer is bound to; one that holds parameters of several models has several."""
        return [known for known in self.units if any(own is optimizer for own in known.unit.optimizers)]

    def drop(self, units: list[PreparedUnit]) -> None:
        """Take out units whose models are to be prepared anew."""
        self.units[:] = [known for known in self.units if known not in units]

    def add_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Return the wrapper of an optimizer that is bound to units, one for every call."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        wrapped = AcceleratedOptimizer(optimizer, self.units_of(optimizer))
        self.optimizers.append(wrapped)
        for scheduler in self.schedulers:
            scheduler.follow(wrapped)
        return wrapped

    def add_scheduler(self, scheduler: AcceleratedScheduler) -> AcceleratedScheduler:
        """Add a wrapped scheduler, and return it."""
        for optimizer in self.optimizers:
            scheduler.follow(optimizer)
        self.schedulers.append(scheduler)
        return scheduler

    def add_data_loader(self, loader: PreparedDataLoader) -> PreparedDataLoader:
        """Add a loader that is not there yet, and return it."""
        if not any(loader is known for known in self.dataloaders):
            self.dataloaders.append(loader)
        return loader

    def clear(self) -> None:
        """Let go of everything. Every rank calls it: an engine is taken off its model together."""
        for prepared in self.units:
            prepared.unit.release()
        for held in (self.units, self.optimizers, self.schedulers, self.dataloaders):
            held.clear()
        # A new list: the one in use may be `units` itself, whose micro-batch is entered and left later.
        self.current = []
