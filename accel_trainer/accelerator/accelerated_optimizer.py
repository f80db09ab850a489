"""The optimizer that a training loop holds: a real torch Optimizer that steps when its accumulation window ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.replica_check import UPDATES_PER_CHECK, ReplicaCheck
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.tensor_trees import send_to_device
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import TrainUnit
from accel_trainer.strategies.gradients import choose_samples, sample_sum

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def describe_models(prepared: Sequence[PreparedUnit]) -> str:
    """Return the class names of the units' models."""
    return " and ".join(type(each.unit.module).__name__ for each in prepared)


def move_to_device(state: Any, device: str | torch.device) -> Any:
    """Return the tensors of a state, in lists, tuples and dicts, on `device`; other values as they are."""
    return send_to_device(state, device)


def updates_in_backward(optimizer: Any) -> bool:
    """Whether an optimizer updates each parameter as soon as its gradient is there, as LOMO does."""
    return callable(getattr(optimizer, "fused_backward", None))


class AcceleratedOptimizer(Optimizer):
    """Wraps the user's optimizer; `step` and `zero_grad` may be called on every micro-batch.

    Inside `accumulate()` they act on the last micro-batch of the window only. State, groups and hooks are those of the
    wrapped optimizer, found under `.optimizer`. It may hold parameters of several models, whose windows are one then.
    On one process it may also hold those of no prepared model, and then steps whenever it is asked to.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        optimizer: Optimizer,
        prepared: Sequence[PreparedUnit],
        guard: NonFiniteGuard | None = None,
        replica_check: ReplicaCheck | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: the wrapped optimizer holds the groups and the state.
        self.optimizer = optimizer
        self.prepared = tuple(prepared)
        self._step_was_skipped = False
        self._has_updated = updates_in_backward(optimizer)
        self._guard = guard
        self._replica_check = replica_check

    @property
    def state(self) -> Any:
        """State by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with their options."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of new groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @cached_property  # whose value an update reads without a call
    def samples(self) -> dict[Tensor, str]:
        """A few of the parameters, the same on all ranks, with their names in the models; one of no model has none."""
        models = [prepared.unit.module for prepared in self.prepared]
        names = {id(value): name for model in models for name, value in model.named_parameters()}
        return {value: names.get(id(value), "") for value in choose_samples(self._parameters())}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the parameters as they were, because its gradients were no numbers."""
        return self._step_was_skipped

    @property
    def ends_window(self) -> bool:
        """Whether `step` acts now: the current micro-batch is the last of its accumulation window."""
        for prepared in self.prepared:  # noqa: SIM110 - a generator costs more, and every step asks several times
            if not prepared.window.is_last:
                return False
        return True

    @property
    def has_stepped(self) -> bool:
        """Whether the step of this micro-batch has changed the parameters."""
        return not self._step_was_skipped and self.ends_window

    @section("optimizer step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters at the end of an accumulation window; do nothing before it. See the unit's `step`.

        Returns:
            Value of the first call of `closure`, as of torch's own optimizers; None without one.

        Raises:
            ConfigError: it holds parameters of several models, and only some of their windows end.
        """
        if not self.ends_window:
            if len(self.prepared) > 1:
                self._require_one_window()
            return None
        PROGRESS.updates += 1
        if self._has_updated:
            return None
        if not self.prepared:
            return self.optimizer.step(closure)
        for prepared in self.prepared:
            if not prepared.corrected:
                prepared.finish_window()
        if self._replica_check is not None and PROGRESS.updates % UPDATES_PER_CHECK == 0:
            self._replica_check.note_update(self)
        # One step, whichever of the units it is asked of.
        unit = self.prepared[0].unit
        if closure is None:
            return self._step_unit(unit)
        returned: list[Any] = []

        def recorded() -> Any:
            returned.append(closure())
            return returned[-1]

        if self._guard is not None:
            self._guard.drop()
        self._step_was_skipped = not unit.step(recorded, optimizer=self.optimizer).applied
        return returned[0] if returned else None

    def _step_unit(self, unit: TrainUnit) -> None:
        guard = self._guard
        is_late = guard is not None and guard.is_late
        if guard is not None and not is_late and self._is_left_out(guard, unit):
            self._step_was_skipped = True
            return
        outcome = unit.step(optimizer=self.optimizer)
        self._step_was_skipped = not outcome.applied
        if guard is not None and is_late:
            guard.norm = outcome.grad_norm if outcome.applied else float("inf")
            guard.skips()

    def _is_left_out(self, guard: NonFiniteGuard, unit: TrainUnit) -> bool:
        """Return whether an update is left out because its gradients are no numbers."""
        if unit.local_replicas is not None and unit.local_replicas.is_apart:
            guard.drop()  # ranks have norms of their own: one alone would call the others, who do not come
            return False
        if guard.norm is None:
            self._take_norm(guard, unit)
        return guard.skips()

    def _take_norm(self, guard: NonFiniteGuard, unit: TrainUnit) -> None:
        """Compute the guard's sum of a few gradients, or their norm, where the loop has computed no norm."""
        if guard.wants_sample and self.samples:
            guard.take_sample(sample_sum(self.samples))
            return
        if guard.wants_norm:
            guard.norm = unit.clip_grad_norm(self._parameters(), float("inf"))

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _require_one_window(self) -> None:
        if any(prepared.window.is_last for prepared in self.prepared):
            raise ConfigError(
                f"{type(self.optimizer).__name__} steps {describe_models(self.prepared)} together, and the "
                "accumulation window of some ends here while that of others goes on; pass all of them to accumulate(), "
                "or each to set_gradient_sync()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients before a window's first backward or after its last; keep them in between."""
        for prepared in self.prepared:
            if prepared.window.num_steps > 1 and not prepared.may_drop_gradients:
                return
        if not self.prepared:
            return self.optimizer.zero_grad(set_to_none)
        if self._guard is not None:
            self._guard.drop()
        for prepared in self.prepared:
            if prepared.tokens is not None:
                prepared.drop_tokens()
        self.prepared[0].unit.zero_grad(set_to_none, optimizer=self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the prepared models.

        Raises:
            ConfigError: the optimizer is an engine's, which has laid out its parameters.
        """
        if any(prepared.unit.fixes_parameters for prepared in self.prepared):
            raise ConfigError(
                f"{type(self.optimizer).__name__} is in an engine, which trains the parameters that it was built with; "
                "call free_memory(), and prepare the model with an optimizer of all groups"
            )
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Put a schedule-free optimizer into training mode; nothing for others."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Put a schedule-free optimizer into evaluation mode; nothing for others."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[attr-defined]

    def register_step_pre_hook(self, hook: Any) -> torch.utils.hooks.RemovableHandle:
        """Register a hook on the wrapped optimizer's step."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> torch.utils.hooks.RemovableHandle:
        """Register a hook on the wrapped optimizer's step."""
        return self.optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    # torch's Optimizer would keep its own three attributes and lose the wrapped optimizer.
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
