"""Optimizers of a unit: which parameters one may have, which kinds a strategy refuses, and a placeholder for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.errors import ConfigError


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer_belongs(optimizer: Optimizer, module: nn.Module, known: Mapping[int, nn.Parameter]) -> None:
    """Refuse an optimizer that has none of the `known` parameters of a module; it may have others, too."""
    parameters = parameters_of(optimizer)
    if parameters and not any(id(parameter) in known for parameter in parameters):
        raise ConfigError(
            f"{len(parameters)} of {len(parameters)} parameters of the optimizer do not belong to "
            f"{type(module).__name__}; build the optimizer from that model's parameters, and pass both to one "
            "prepare() call"
        )


def check_disjoint(optimizers: Iterable[Optimizer], known: Mapping[int, nn.Parameter]) -> None:
    """Refuse two optimizers that would both update a parameter, by what `TrainUnit.known_parameters` returns."""
    taken: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        own = {id(known.get(id(parameter), parameter)) for parameter in parameters_of(optimizer)}
        for other in dict.fromkeys(taken[key] for key in own if key in taken):
            shared = sum(taken.get(key) is other for key in own)
            raise ConfigError(
                f"{shared} parameter(s) are in two optimizers, {type(other).__name__} and {type(optimizer).__name__}, "
                "and would be updated by both; give each parameter to one of them"
            )
        taken.update(dict.fromkeys(own, optimizer))


def check_kind(optimizer: Optimizer, unsupported: Mapping[str, str], strategy: str) -> None:
    """Refuse an optimizer by the reasons in `unsupported`, by package or `package.Class` of its class or a base."""
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        reason = unsupported.get(package) or unsupported.get(f"{package}.{kind.__name__}")
        if reason is not None:
            raise ConfigError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot train with strategy {strategy!r}: "
                f"{reason}"
            )


def check_frozen(model: nn.Module, frozen: Sequence[nn.Parameter], why: str) -> None:
    """Refuse to train a parameter that was frozen when its model was prepared; `why` it would go wrong."""
    if unfrozen := {id(parameter) for parameter in frozen if parameter.requires_grad}:
        name = next((name for name, parameter in model.named_parameters() if id(parameter) in unfrozen), "a parameter")
        raise ConfigError(
            f"{name!r} of {type(model).__name__} was frozen when the model was prepared, and is trained now: {why}. "
            "Call free_memory(), and prepare the model again once it is unfrozen"
        )


class _OfReal:
    """An attribute of a placeholder's real optimizer; its own until there is one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    # Asked anew each time: an optimizer that loads a state has other groups afterwards.
    def __get__(self, placeholder: Any, owner: type | None = None) -> Any:
        if placeholder is None:
            return self
        own = vars(placeholder)
        return own[self._name] if placeholder.real is None else getattr(placeholder.real, self._name)

    def __set__(self, placeholder: Any, value: Any) -> None:
        if placeholder.real is None:
            vars(placeholder)[self._name] = value
        else:
            setattr(placeholder.real, self._name, value)


class OptimizerPlaceholder(Optimizer):
    """Holds parameters (`given`) and `numbers` for the engine's optimizer, which it shows once it is built (`real`)."""

    param_groups: Any = _OfReal()
    state: Any = _OfReal()

    def __init__(
        self, param_groups: Iterable[dict[str, Any]], given: Iterable[Any], numbers: Mapping[str, Any]
    ) -> None:
        self.real: Optimizer | None = None
        super().__init__(list(param_groups), {})
        self.given = list(given)
        self.numbers = dict(numbers)

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
