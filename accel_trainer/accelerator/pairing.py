"""Pairs of optimizers and the models whose parameters they hold, checked before a model is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import Capabilities
from accel_trainer.strategies.ownership import check_disjoint, parameters_of

__all__ = ["Pairing", "pair"]


@dataclass(slots=True, eq=False)
class _Holder:
    """A model, prepared or about to be, with its parameters by the id of every tensor that stands for one."""

    model: nn.Module
    known: dict[int, nn.Parameter]
    prepared: PreparedUnit | None = None
    optimizers: list[Optimizer] = field(default_factory=list)


@dataclass(slots=True)
class Pairing:
    """The model of each new optimizer."""

    by_model: dict[int, list[Optimizer]]
    """Optimizers by the id of a model that is to be prepared."""
    to_bind: list[tuple[PreparedUnit, Optimizer]]
    """Optimizers of models that are prepared already."""


def pair(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    prepared: Iterable[PreparedUnit],
    capabilities: Capabilities,
) -> Pairing:
    """Find the models of each optimizer by its parameters.

    Args:
        models: those that are to be prepared.
        optimizers: new ones, in any order.
        prepared: the units that are prepared already and stay.

    Raises:
        ConfigError: an optimizer's parameters are of no model, or in another optimizer, their model was prepared for
            evaluation, or the strategy wants one optimizer for each model.
    """
    if not optimizers:
        return Pairing({id(model): [] for model in models}, [])
    new = [_Holder(model, {id(p): p for p in model.parameters()}) for model in models]
    old = [_Holder(each.unit.module, each.unit.known_parameters(), each, [*each.unit.optimizers]) for each in prepared]
    to_bind: list[tuple[PreparedUnit, Optimizer]] = []
    for optimizer in optimizers:
        for holder in _holders_of(optimizer, new + old):
            holder.optimizers.append(optimizer)
            if holder.prepared is not None:
                _require_training(holder.prepared, optimizer)
                to_bind.append((holder.prepared, optimizer))
    for holder in new + old:
        check_disjoint(holder.optimizers, holder.known)
    if not capabilities.joint_optimizers:
        _require_pairs(new + old)
    return Pairing({id(holder.model): holder.optimizers for holder in new}, to_bind)


def _holders_of(optimizer: Optimizer, holders: list[_Holder]) -> list[_Holder]:
    """Return the models of an optimizer's parameters, in the order of `holders`."""
    name, parameters = type(optimizer).__name__, parameters_of(optimizer)
    if not parameters and len(holders) == 1:
        return holders
    found: set[int] = set()
    others = 0
    for parameter in parameters:
        owner = next((index for index, holder in enumerate(holders) if id(parameter) in holder.known), None)
        others += owner is None
        found.update(() if owner is None else (owner,))
    if not found:
        raise ConfigError(
            f"{name} was prepared without its model; pass both to one prepare() call, or prepare the model first"
        )
    if others:
        known = ", ".join(type(holder.model).__name__ for holder in holders)
        raise ConfigError(
            f"{others} of {len(parameters)} parameters of {name} belong to no prepared model ({known} are); pass the "
            "model that they are of to the same prepare() call, or build the optimizer without them"
        )
    return [holders[index] for index in sorted(found)]


def _require_training(prepared: PreparedUnit, optimizer: Optimizer) -> None:
    """Refuse an optimizer for a model whose gradients would not be exchanged."""
    if prepared.evaluation_only:
        raise ConfigError(
            f"{type(optimizer).__name__} holds parameters of {type(prepared.unit.module).__name__}, which was prepared "
            "for evaluation; pass both to one prepare() call to train it"
        )


def _require_pairs(holders: list[_Holder]) -> None:
    """Refuse everything but one optimizer for each model."""
    taken: dict[Optimizer, _Holder] = {}
    for holder in holders:
        model = type(holder.model).__name__
        names = ", ".join(type(optimizer).__name__ for optimizer in holder.optimizers)
        if len(holder.optimizers) > 1:
            raise ConfigError(
                f"{model} has several optimizers ({names}), and this strategy's engine takes one for each model; use "
                "one optimizer with a parameter group for each part, or strategy 'ddp' or 'fsdp2'"
            )
        for optimizer in holder.optimizers:
            if optimizer in taken:
                raise ConfigError(
                    f"{names} holds parameters of {type(taken[optimizer].model).__name__} and {model}, and this "
                    "strategy's engine takes one optimizer for each model; build one for each, or use strategy 'ddp' "
                    "or 'fsdp2'"
                )
            taken[optimizer] = holder
