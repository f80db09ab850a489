"""The units that an Accelerator has prepared, and how the user's objects lead to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import AccumulationWindow
from accel_trainer.accelerator.token_mean import TokenWindow
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import TrainUnit

__all__ = ["PreparedUnit", "find_prepared", "prepared_of"]


@dataclass(slots=True, eq=False)
class PreparedUnit:
    """A unit with the accumulation window that it is in."""

    unit: TrainUnit
    window: AccumulationWindow
    evaluation_only: bool = False
    """Whether the unit was laid out without what exchanges gradients."""
    took_backward: bool = False
    """Whether the current micro-batch has had its backward."""
    tokens: TokenWindow | None = None
    """What the window's losses were summed over, once a loss has been weighed by tokens."""
    corrected: bool = False
    """Whether this window's gradients have been brought to the mean over what it held."""

    @property
    def may_drop_gradients(self) -> bool:
        """Whether zeroing gradients now loses none that the window still needs.

        Loops zero either before the forward or after the step: on the first micro-batch before its backward, or on the
        last one after it.
        """
        window = self.window
        if window.num_steps == 1 or window.held == 0:
            return True
        return window.is_last if self.took_backward else window.held == 1

    def drop_tokens(self) -> None:
        """Forget the tokens of gradients that one of the optimizers is about to drop.

        The other optimizers of the model may still step with theirs, which are brought to the mean before.
        """
        if self.tokens is not None:
            if self.tokens.is_open and len(self.unit.optimizers) > 1:
                self.finish_window()
            self.tokens.drop()

    def finish_window(self) -> None:
        """Bring the gradients to the mean over what the window held; once, before they are used.

        Collective where losses were weighed by tokens.
        """
        if self.tokens is not None and self.tokens.is_open:
            self.unit.scale_gradients(self.tokens.close())
            self.corrected = True
        if not self.corrected and self.window.held != self.window.divisor:
            factor = self.window.correction
            if factor != 1.0:
                self.unit.scale_gradients(factor)
                self.corrected = True


def find_prepared(units: Sequence[PreparedUnit], item: Any) -> PreparedUnit | None:
    """Return what was prepared from a model or optimizer: the wrapped object and the user's own both lead there.

    So does the wrapped object compiled: `torch.compile(prepared)`.
    """
    for prepared in units:
        unit = prepared.unit
        if item is unit.model or item is unit.module:
            return prepared
        for optimizer in unit.optimizers:
            if item is optimizer:
                return prepared
    compiled = getattr(item, "_orig_mod", None)
    return next((prepared for prepared in units if prepared.unit.model is compiled), None)


def prepared_of(units: Sequence[PreparedUnit], item: Any) -> PreparedUnit:
    """Return what was prepared from a model or optimizer.

    Raises:
        ConfigError: it was not prepared by this Accelerator.
    """
    # An AcceleratedOptimizer stands for the optimizer that it wraps.
    wrapped = item.optimizer if isinstance(item, Optimizer) and hasattr(item, "optimizer") else item
    found = find_prepared(units, wrapped)
    if found is None:
        raise ConfigError(
            f"{type(item).__name__} was not prepared by this Accelerator; pass it to prepare() and use its result"
        )
    return found
