"""Which optimizer may have which parameters, and which kinds of optimizers cannot have a strategy's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.errors import ConfigError

__all__ = ["check_disjoint", "check_frozen", "check_kind", "check_optimizer_belongs", "parameters_of"]

_REQUIRES_GRAD = attrgetter("requires_grad")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer_belongs(optimizer: Optimizer, module: nn.Module, known: Mapping[int, nn.Parameter]) -> None:
    """Refuse an optimizer that has no parameter of a module. One of several models has other parameters, too.

    Args:
        known: the module's parameters, by the id of every tensor that stands for one.
    """
    parameters = parameters_of(optimizer)
    if parameters and not any(id(parameter) in known for parameter in parameters):
        raise ConfigError(
            f"{len(parameters)} of {len(parameters)} parameters of the optimizer do not belong to "
            f"{type(module).__name__}; build the optimizer from that model's parameters, and pass both to one "
            "prepare() call"
        )


def check_disjoint(optimizers: Iterable[Optimizer], known: Mapping[int, nn.Parameter]) -> None:
    """Refuse two optimizers that would both update a parameter.

    Args:
        known: parameters, by the id of every tensor that stands for one.
    """
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
    """Refuse an optimizer whose update is not defined on the parameters that a strategy makes.

    Args:
        unsupported: the reason and the way out, by a package or `package.Class` of the optimizer or of a base of it.
    """
    for kind in type(optimizer).__mro__:
        package = kind.__module__.partition(".")[0]
        reason = unsupported.get(package) or unsupported.get(f"{package}.{kind.__name__}")
        if reason is not None:
            raise ConfigError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot train with strategy {strategy!r}: "
                f"{reason}"
            )


def check_frozen(model: nn.Module, frozen: Sequence[nn.Parameter], why: str) -> None:
    """Raise ConfigError where a parameter that was frozen when a model was prepared is trained now.

    Args:
        why: it would not be as on one process.
    """
    if any(map(_REQUIRES_GRAD, frozen)):
        unfrozen = {id(parameter) for parameter in frozen if parameter.requires_grad}
        name = next((name for name, parameter in model.named_parameters() if id(parameter) in unfrozen), "a parameter")
        raise ConfigError(
            f"{name!r} of {type(model).__name__} was frozen when the model was prepared, and is trained now: {why}. "
            "Call free_memory(), and prepare the model again once it is unfrozen"
        )
