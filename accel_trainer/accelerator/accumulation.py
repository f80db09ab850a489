"""Accumulation windows: their micro-batches, the divisor of their losses, and the unit whose gradients they hold."""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer.accelerator.token_mean import TokenWindow
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import TrainUnit

__all__ = ["AccumulationWindow", "PreparedUnit"]


@dataclass(slots=True)
class AccumulationWindow:
    """The micro-batches of one optimizer step, counted as they come.

    The gradient of a window is the mean over its micro-batches. The divisor must be known at the first backward: it is
    `num_steps`, or the number of batches left of a loader that knows its length. The gradients of a window that ends
    earlier than that (a stream that runs dry) are multiplied by `correction` before they are used.
    """

    num_steps: int
    """Micro-batches of a full window."""
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader ends the window."""
    sync_each_batch: bool = False
    """Whether gradients are exchanged on every micro-batch: more communication, less memory when sharded."""
    held: int = 0
    """Micro-batches in the window so far, the current one included."""
    divisor: int = 1
    """Each loss of this window is divided by it."""
    is_last: bool = True
    """Whether the current micro-batch ends the window: the optimizer steps on it."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps={self.num_steps} must be 1 or more")

    def advance(self, remaining: int | None, ends_data: bool) -> None:
        """Begin a micro-batch.

        Args:
            remaining: batches the loader still has, the current one included; None when it is not known.
            ends_data: whether the current batch is the loader's last.
        """
        self.held = 1 if self.is_last else self.held + 1
        if self.num_steps == 1:
            self.divisor, self.is_last = 1, True
            return
        if self.held == 1:
            bounded = self.sync_with_dataloader and remaining is not None
            self.divisor = min(self.num_steps, remaining) if bounded and remaining else self.num_steps
        self.is_last = self.held >= self.num_steps or (self.sync_with_dataloader and ends_data)

    @property
    def is_open(self) -> bool:
        """Whether the window holds micro-batches and waits for more."""
        return self.held > 0 and not self.is_last

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the backward of the current micro-batch exchanges gradients over the ranks."""
        return self.is_last or self.sync_each_batch

    @property
    def correction(self) -> float:
        """Factor that makes the window's gradients the mean over the micro-batches that it held."""
        return self.divisor / self.held if self.is_last and self.held else 1.0


@dataclass(slots=True, eq=False)
class PreparedUnit:
    """A unit of the strategy, in its accumulation window."""

    unit: TrainUnit
    window: AccumulationWindow
    evaluation_only: bool = False
    """Whether the unit was prepared without an exchange of gradients."""
    took_backward: bool = False
    """Whether the current micro-batch has had its backward."""
    tokens: TokenWindow | None = None
    """Tokens that the window's losses were summed over; None before a loss has been weighed by tokens."""
    is_finished: bool = False
    """Whether the gradients are the mean over the window's micro-batches as they are, and nothing is left to scale.

    A field that whoever changes the window sets, and no property: every update asks for it.
    """

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

    def take_backward(self, in_window: bool) -> None:
        """Note a backward of the current micro-batch."""
        self.took_backward |= in_window
        if self.tokens is not None:
            self.tokens.take_backward()
            self.is_finished &= not self.tokens.is_open

    def drop_tokens(self) -> None:
        """Forget the tokens of gradients that one of the optimizers is about to drop.

        The other optimizers of the model may still step with theirs, which are scaled to the mean before.
        """
        if self.tokens is not None:
            if self.tokens.is_open and len(self.unit.optimizers) > 1:
                self.finish_window()
            self.tokens.drop()

    def finish_window(self) -> None:
        """Scale the gradients to the mean over the window's micro-batches; once, before they are used.

        Collective where losses were weighed by tokens.
        """
        if self.tokens is not None and self.tokens.is_open:
            self.unit.scale_gradients(self.tokens.close())
            self.is_finished = True
        elif not self.is_finished:
            factor = self.window.correction
            if factor != 1.0:
                self.unit.scale_gradients(factor)
                self.is_finished = True
