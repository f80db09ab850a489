"""The scheduler that a training loop holds: a real torch LRScheduler that steps with its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.accelerator.shared_state import Forwarded
from accel_trainer.errors import IncompatibleCheckpointError

__all__ = ["AcceleratedScheduler"]

logger = logging.get_logger(__name__)

_STEPS = "steps_per_update"  # key of the state


class AcceleratedScheduler(LRScheduler):
    """Wraps the user's scheduler; `step` may be called on every micro-batch.

    One scheduler step is one optimizer step, whatever the number of processes: a schedule is sized in updates. A step
    that fp16 overflow skipped does not count.

    Attributes:
        steps_per_update: steps of the schedule in one optimizer step; more than one where `scheduler_steps` says so,
            for schedules that are sized in the batches of one process. A step that is told something, a metric or an
            epoch, is taken once.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        steps_per_update: int = 1,
    ) -> None:
        # LRScheduler.__init__ is not called: it would step, and patch the optimizer a second time.
        self.scheduler = scheduler
        self.optimizers = tuple(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self.steps_per_update = steps_per_update

    def follow(self, optimizer: AcceleratedOptimizer) -> None:
        """Step with `optimizer` from now on if it wraps the scheduled one, which may be prepared after its schedule."""
        scheduled = self.scheduler.optimizer
        scheduled = scheduled.optimizer if isinstance(scheduled, AcceleratedOptimizer) else scheduled
        if optimizer.optimizer is scheduled and optimizer not in self.optimizers:
            self.optimizers += (optimizer,)

    optimizer = Forwarded[Optimizer]("scheduler.optimizer")
    last_epoch = Forwarded[int]("scheduler.last_epoch")
    """How many times the schedule has stepped."""
    base_lrs = Forwarded[Any]("scheduler.base_lrs")
    """Initial learning rates."""
    get_last_lr = Forwarded[Any]("scheduler.get_last_lr")
    """Returns the learning rates of the last step, one per group."""
    get_lr = Forwarded[Any]("scheduler.get_lr")
    """Returns the learning rates of the current step, one per group."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule if the optimizer has just stepped; always with `step_scheduler_with_optimizer=False`."""
        if self.step_with_optimizer:
            for optimizer in self.optimizers:
                if not optimizer.has_stepped:
                    return
        self.scheduler.step(*args, **kwargs)
        # One that refuses to be stepped beyond its end: the last batches of an epoch may not reach all processes.
        bound = getattr(self.scheduler, "total_steps", None)
        for _ in range(0 if args or kwargs else self.steps_per_update - 1):
            if bound is None or self.scheduler.last_epoch < bound:
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state, and how often it steps for each update."""
        return {**self.scheduler.state_dict(), _STEPS: self.steps_per_update}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that was saved with other steps in an update, and cannot go on with those of this run."""
        saved = state_dict.get(_STEPS, self.steps_per_update)
        if saved == self.steps_per_update or _holds_length(state_dict) == {True}:
            return
        if type(self.scheduler) is not LambdaLR or _holds_length(state_dict) != {False}:
            raise IncompatibleCheckpointError(
                f"the state of {type(self.scheduler).__name__} was saved after {saved} of its steps in each update, "
                f"and this run takes {self.steps_per_update}; one part of its length is in the state, another in "
                f"functions of this run. Go on with {saved} processes, or with one LambdaLR in its place"
            )
        if state_dict["last_epoch"] % saved:
            raise IncompatibleCheckpointError(
                f"the state of {type(self.scheduler).__name__} has {state_dict['last_epoch']} steps, which are no "
                f"whole updates of {saved}, and this run takes {self.steps_per_update} in each. Go on with {saved} "
                "processes"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state, after the optimizer's.

        A state saved with other steps in an update, by another number of processes for instance, goes on after as many
        updates: at their place in the functions of a LambdaLR, which come from this run; by the steps of the saved run,
        where the state brings its length along.
        """
        self.check_state(state_dict)
        state = dict(state_dict)
        saved, own = state.pop(_STEPS, self.steps_per_update), self.steps_per_update
        if saved == own or _holds_length(state) == {True}:
            self.steps_per_update = saved
            self.scheduler.load_state_dict(state)
            return
        position = state["last_epoch"] // saved * own
        self.scheduler.load_state_dict({**state, "last_epoch": position, "_step_count": position + 1})
        # Of the new place: the optimizer has the rates of the saved one, whose number of steps may be rounded.
        functions: Any = self.scheduler.lr_lambdas  # type: ignore[attr-defined]
        rates = [rate * function(position) for rate, function in zip(self.base_lrs, functions, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def warn_of_rest(self, num_processes: int) -> None:
        """Warn of a schedule that ends where one sized in the batches of one process would: at a part of its steps."""
        functions = getattr(self.scheduler, "lr_lambdas", None) or [None]
        by_function = getattr(functions[0], "keywords", {}).get("num_training_steps")  # as transformers builds them
        length = by_function or getattr(self.scheduler, "total_steps", None) or getattr(self.scheduler, "T_max", None)
        if self.steps_per_update > 1 or num_processes == 1 or not isinstance(length, int):
            return
        # An epoch's last update may lack batches of some processes.
        if 0 <= self.last_epoch * num_processes - length <= max(num_processes, length // 50):
            logger.warning(
                f"a schedule of {length} steps ends after {self.last_epoch}, the updates of this run on "
                f"{num_processes} processes: it seems to count a step for each process, as accelerate does. Size it in "
                "updates (len(loader) after prepare()), or set scheduler_steps=per_process (--scheduler_steps, "
                "ACCEL_TRAINER_SCHEDULER_STEPS, or the file)"
            )


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule of the engine's configuration, which `prepare` returns for a `DummyScheduler` without a callable."""


def _holds_length(state: Mapping[str, Any]) -> set[bool]:
    """Whether a schedule's state brings its length along, for each schedule that it is made of."""
    # The functions of a LambdaLR stay outside of it, but for the attributes of callable objects.
    if nested := state.get("_schedulers"):
        return set().union(*map(_holds_length, nested))
    return {bool(each) for each in state["lr_lambdas"]} if "lr_lambdas" in state else {True}
