"""fp16's loss scale: one for all units and optimizers that a loss may reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from accel_trainer.runtime.torch_private import check_scaler, scaler_states, scales_itself
from accel_trainer.strategies.gradients import scale_gradients
from accel_trainer.strategies.optimizers import parameters_of


class _BlockingReads(TorchFunctionMode):
    """Context in which copies to the host are complete when they are returned."""

    # A GradScaler asks for copies of the scale and of overflows that do not block, and computes with them at once
    # (torch 2.11 to 2.13). Where gradients are on the host, the scale has not arrived yet, and an overflow that is
    # found there is overwritten by the 0 that comes late. Shards that are offloaded are on the host.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and kwargs.get("non_blocking"):
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(target, str | torch.device) and torch.device(target).type == "cpu":
                kwargs = {**kwargs, "non_blocking": False}
        return func(*args, **kwargs)


def _reading(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """Return the context in which a GradScaler deals with an optimizer's gradients."""
    is_on_host = any(parameter.device.type == "cpu" for parameter in parameters_of(optimizer))
    return _BlockingReads() if is_on_host else nullcontext()


class _Unit(Protocol):
    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that the unit has now."""


class LossScale:
    """A GradScaler with the state of the optimizers that share it.

    A window's gradients are unscaled once for each optimizer. The scale is updated when all optimizers of the units
    that one of them belongs to have stepped; at the latest when the next loss is scaled. Gradients of other optimizers
    that still carry the old scale are multiplied to carry the new one.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        check_scaler(scaler)
        self.scaler = scaler
        # A list: unscaling shards is collective, so every rank has to go through them in one order.
        self._references: list[ref[_Unit]] = []
        self._unscaled: set[Optimizer] = set()
        self._done: set[Optimizer] = set()
        """Stepped, or their gradients dropped, since the scale was updated; unscaled all of them."""

    def serve(self, unit: _Unit) -> None:
        """Scale the losses of a unit, too, as long as it lives."""
        self._references.append(ref(unit))

    @property
    def _units(self) -> list[_Unit]:
        return [unit for reference in self._references if (unit := reference()) is not None]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled."""
        if self._done:
            self._update()
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Take the scale out of the gradients of an optimizer, once per step."""
        if optimizer not in self._unscaled:
            with _reading(optimizer):
                self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def unscale_holders(self, parameters: Iterable[Tensor]) -> None:
        """Unscale the gradients of every optimizer that holds one of the parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers():
            if any(id(parameter) in wanted for parameter in parameters_of(optimizer)):
                self.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless its gradients overflowed; return whether it stepped. Waits once for the device."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        state = scaler_states(self.scaler)[id(optimizer)]
        if scales_itself(optimizer) or state["stage"] is OptState.STEPPED:
            # The kernel leaves the parameters as they are after an overflow; a second step is refused.
            with _reading(optimizer):
                self.scaler.step(optimizer)
            applied = not _has_overflow(state)
        else:
            # As scaler.step does, but that it asks the device, and does not say what the answer was.
            self.unscale(optimizer)
            applied = not _has_overflow(state)
            if applied:
                optimizer.step()
            state["stage"] = OptState.STEPPED
        self._unscaled.add(optimizer)
        self._finish(optimizer)
        return applied

    def drop(self, optimizer: Optimizer) -> None:
        """Note that the gradients of an optimizer are dropped: instead of a step, or after it."""
        if optimizer in self._unscaled and optimizer not in self._done:
            self._finish(optimizer)

    def flush(self) -> None:
        """Update the scale for the optimizers that have stepped, without waiting for those that have not."""
        if self._done:
            self._update()

    def _optimizers(self) -> list[Optimizer]:
        return list(dict.fromkeys(optimizer for unit in self._units for optimizer in unit.optimizers))

    def _finish(self, optimizer: Optimizer) -> None:
        self._done.add(optimizer)
        siblings = {
            other for unit in self._units if not self._done.isdisjoint(unit.optimizers) for other in unit.optimizers
        }
        if siblings <= self._done:
            self._update()

    def _update(self) -> None:
        """Update the scale after overflows or their absence, and rescale the other optimizers' gradients."""
        others = [optimizer for optimizer in self._optimizers() if optimizer not in self._done]
        # update() forgets which optimizers are unscaled already, and would count their overflows twice.
        states = scaler_states(self.scaler)
        kept = {id(optimizer): states.pop(id(optimizer)) for optimizer in others if optimizer in self._unscaled}
        before = self.scaler.get_scale() if others else 1.0  # reading it waits for the device
        self.scaler.update()
        states = scaler_states(self.scaler)
        states.update(kept)
        self._unscaled -= self._done
        self._done = set()
        if others and (factor := self.scaler.get_scale() / before) != 1.0:
            for optimizer in others:
                if optimizer not in self._unscaled:
                    scale_gradients(parameters_of(optimizer), factor)


def _has_overflow(state: Mapping[str, Any]) -> bool:
    """Ask the device whether a step's gradients overflowed, on whichever of the devices they are on."""
    found = list(state["found_inf_per_device"].values())
    return bool(sum(each.to(found[0].device, non_blocking=not found[0].is_cpu) for each in found))
