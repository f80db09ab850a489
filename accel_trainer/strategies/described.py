"""A stand-in for an optimizer that an engine builds itself, from its own configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from accel_trainer.errors import ConfigError

__all__ = ["DescribedOptimizer"]


class DescribedOptimizer(Optimizer):
    """Holds the parameters for an optimizer to come; once there, it shows the groups and the state of the real one.

    Attributes:
        numbers: what the user gave for it, by name: it fills what the engine's configuration leaves open.
        given: the parameters or groups as they were given.
        real: the engine's optimizer; None before layout.
    """

    def __init__(
        self, param_groups: Iterable[dict[str, Any]], given: Iterable[Any], numbers: Mapping[str, Any]
    ) -> None:
        super().__init__(list(param_groups), {})
        self.given = list(given)
        self.numbers = dict(numbers)
        self.real: Optimizer | None = None

    def adopt(self, real: Optimizer) -> None:
        """Show the groups and the state of the engine's optimizer from now on."""
        self.real = real
        self.param_groups = real.param_groups
        self.state = real.state
        self.defaults = real.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse: the engine steps.

        Raises:
            ConfigError: always; what `prepare` returned steps through the engine.
        """
        raise ConfigError(
            "step() was called on the stand-in for the engine's optimizer; call it on the optimizer that prepare() "
            "returned"
        )
