"""When gradients are exchanged and what a loss is divided by. Pure: knows no engine and no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from accel_trainer.errors import ConfigError

__all__ = ["AccumulationWindow"]


@dataclass(slots=True)
class AccumulationWindow:
    """The micro-batches of one optimizer step, counted as they come.

    The gradient of a window is the mean over what it holds. The divisor must be known at the first backward: it is
    `num_steps`, or what is left of a loader that knows its length. A window that ends earlier than that (a stream that
    runs dry) is corrected by `correction` before the gradients are used.
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
    """What each loss of this window is divided by."""
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
        """What the window's gradients must be multiplied by to be the mean over what it held."""
        return self.divisor / self.held if self.is_last and self.held else 1.0
