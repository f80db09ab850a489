"""Updates whose gradients are no numbers: found before a checkpoint holds them, the same on all ranks.

The norm of the gradients is the same on every rank, and one NaN or infinity on any of them makes it one: nothing more
has to be exchanged. On an accelerator its flag is looked at one update later: the host runs at most one update ahead.
"""

from __future__ import annotations

import sys
from math import isfinite
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor

from accel_trainer import logging
from accel_trainer.accelerator import Accelerator
from accel_trainer.errors import ConfigError, NonFiniteError, did_you_mean
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise

__all__ = ["NonFiniteAction", "NonFiniteGuard", "check_action", "make_guard"]

logger = logging.get_logger(__name__)

NonFiniteAction = Literal["raise", "skip_step", "warn"]


def check_action(action: str) -> None:
    """Refuse an unknown action.

    Raises:
        ConfigError: it is none.
    """
    known = get_args(NonFiniteAction)
    if action not in known:
        raise ConfigError(
            f"on_nonfinite={action!r}; expected one of {', '.join(known)}{did_you_mean(str(action), known)}"
        )


def make_guard(action: NonFiniteAction, accelerator: Accelerator) -> NonFiniteGuard | None:
    """Return the guard of a run; None under fp16, whose loss scale skips such updates, and under an engine of its own.

    An engine knows the norm of the gradients only after its step.

    Raises:
        ConfigError: updates are to be left out, and an engine steps by itself.
    """
    if accelerator.strategy.capabilities.builds_engine:
        if action == "skip_step":
            raise ConfigError(
                "on_nonfinite='skip_step' was given with an engine that steps by itself, before the norm of its "
                "gradients is known; use 'warn', and the engine's own checks, or another strategy"
            )
        return None
    return None if accelerator.scaler is not None else NonFiniteGuard(action, accelerator.process)


class NonFiniteGuard:
    """The look at every update's gradient norm, and at the loss where it is no number. Every rank calls its methods."""

    def __init__(self, action: NonFiniteAction, process: ProcessContext) -> None:
        self._action = action
        self._process = process
        self._pending: tuple[int, Tensor] | None = None

    def skips(self, update: int, norm: Tensor | float | None, loss: Tensor) -> bool:
        """Take the gradient norm and the loss of an update, before its step; return whether the step is to be left out.

        Args:
            update: its number.
            norm: over all ranks; None where an engine does not tell.
            loss: of this rank, of all micro-batches of the update.

        Raises:
            NonFiniteError: on every rank, with the action "raise": at the update, or on an accelerator at the next one.
        """
        if isinstance(norm, Tensor) and norm.device.type != "cpu" and self._action != "skip_step":
            self.look()
            flags = torch.stack((norm.detach().isfinite(), loss.detach().isfinite()))
            # The copy, to pinned memory, waits for nobody: it is looked at once the device has the next update to do.
            self._pending = update, flags.to("cpu", non_blocking=True)
            self._event = torch.Event(norm.device.type)
            self._event.record()
            return False
        if norm is None or isfinite(norm):
            return False
        self._act(update, isfinite(loss))
        return self._action == "skip_step"

    def look(self) -> None:
        """Look at the last update, if that has not been done: before a save, a log, and at the end. See `skips`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._event.synchronize()
            has_norm, has_loss = pending[1].tolist()
            if not has_norm:
                self._act(pending[0], has_loss)

    def _act(self, update: int, has_loss: bool) -> None:
        losses = gather_or_raise(self._process, f"update {update}", None, has_loss)
        ranks = [str(rank) for rank, is_number in enumerate(losses) if not is_number]
        where = f"the loss on rank {', '.join(ranks)} is, too" if ranks else "the loss is a number on all ranks"
        found = f"update {update}: the norm of the gradients is NaN or infinite, and {where}"
        if self._action == "raise":
            _end_with_exit_code()
            raise NonFiniteError(
                f"{found}; nothing of it was saved. Look at that batch and the learning rate, resume from the last "
                "checkpoint, or set on_nonfinite='skip_step' to leave such updates out"
            )
        done = "it is left out" if self._action == "skip_step" else "the weights have it (on_nonfinite='warn')"
        logger.warning("%s; %s", found, done)


def _end_with_exit_code() -> None:
    """Have a NonFiniteError that nobody catches end the process with its own code: a scheduler need not requeue it."""
    if getattr(sys.excepthook, "ends_with_exit_code", False):
        return
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if isinstance(error, NonFiniteError):
            raise SystemExit(error.exit_code)

    report.ends_with_exit_code = True  # type: ignore[attr-defined]
    sys.excepthook = report
