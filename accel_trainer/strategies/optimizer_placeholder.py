"""A placeholder for the optimizer that an engine builds itself, from its own configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from accel_trainer.errors import ConfigError

__all__ = ["OptimizerPlaceholder"]


class OptimizerPlaceholder(Optimizer):
    """Holds the parameters for the engine's optimizer; once that is built, it shows its groups and state.

    Attributes:
        numbers: hyperparameters by name, for those that the engine's configuration leaves open.
        given: the parameters or groups as they were given.
        real: the engine's optimizer; None before the model is prepared.
    """

    def __init__(
        self, param_groups: Iterable[dict[str, Any]], given: Iterable[Any], numbers: Mapping[str, Any]
    ) -> None:
        self.real: Optimizer | None = None
        super().__init__(list(param_groups), {})
        self.given = list(given)
        self.numbers = dict(numbers)

    # Asked anew each time: an optimizer that loads a state has other groups afterwards.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the engine's optimizer, once it is built."""
        return self._groups if self.real is None else self.real.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        if self.real is None:
            self._groups = param_groups
        else:
            self.real.param_groups = param_groups

    @property
    def state(self) -> Any:
        """State of the engine's optimizer, once it is built."""
        return self._state if self.real is None else self.real.state

    @state.setter
    def state(self, state: Any) -> None:
        if self.real is None:
            self._state = state
        else:
            self.real.state = state

    def adopt(self, real: Optimizer) -> None:
        """Show the groups and the state of the engine's optimizer from now on."""
        self.real = real
        self.defaults = real.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse: the optimizer that `prepare` returned steps through the engine."""
        raise ConfigError(
            "step() was called on the placeholder for the engine's optimizer; call it on the optimizer that prepare() "
            "returned"
        )
