"""The scheduler that a training loop holds: a real torch LRScheduler that steps once per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler(LRScheduler):
    """Wraps the user's scheduler; `step` may be called on every micro-batch.

    One scheduler step is one optimizer step, whatever the number of processes: a schedule is sized in updates. A step
    that fp16 overflow skipped does not count.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, scheduler: LRScheduler, optimizers: Sequence[AcceleratedOptimizer], step_with_optimizer: bool = True
    ) -> None:
        # LRScheduler.__init__ is not called: it would step, and patch the optimizer a second time.
        self.scheduler = scheduler
        self.optimizers = tuple(optimizers)
        self.step_with_optimizer = step_with_optimizer

    def follow(self, optimizer: AcceleratedOptimizer) -> None:
        """Step with `optimizer` from now on if it wraps the scheduled one, which may be prepared after its schedule."""
        scheduled = self.scheduler.optimizer
        scheduled = scheduled.optimizer if isinstance(scheduled, AcceleratedOptimizer) else scheduled
        if optimizer.optimizer is scheduled and optimizer not in self.optimizers:
            self.optimizers += (optimizer,)

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """The optimizer whose learning rates are scheduled."""
        return self.scheduler.optimizer

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """How many times the schedule has stepped."""
        return self.scheduler.last_epoch

    @property
    def base_lrs(self) -> Any:  # type: ignore[override]
        """Initial learning rates."""
        return self.scheduler.base_lrs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if the optimizer has just stepped; always with `step_scheduler_with_optimizer=False`."""
        if self.step_with_optimizer:
            for optimizer in self.optimizers:
                if optimizer.step_was_skipped or not optimizer.ends_window:
                    return
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rates of the last step, one per group."""
        return self.scheduler.get_last_lr()  # type: ignore[return-value]

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the learning rates of the current step, one per group."""
        return self.scheduler.get_lr()  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)
