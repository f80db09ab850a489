"""Updates whose gradients are no numbers: found before a checkpoint holds them, the same on all ranks.

The norm of the gradients is the same on every rank, and one NaN or infinity on any of them makes it one: nothing more
has to be exchanged. The backward of a loss that is none begins with NaN, which all gradients of all ranks have then: a
look at a few of them is enough where nobody clips. On an accelerator the flag is looked at one update later: the host
runs at most one update ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_trainer import logging
from accel_trainer.config import MixedPrecision, RunConfig
from accel_trainer.errors import NonFiniteError
from accel_trainer.runtime.own_watch import end_with_exit_codes, tell_soon
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.whereabouts import waits_for_device

logger = logging.get_logger(__name__)

Action = Literal["raise", "skip_step", "rollback", "warn"]


class NonFiniteGuard:
    """The look at every update's gradient norm, and at the loss where it is no number. Every rank calls its methods.

    Attributes:
        update: number of the last update that was looked at.
        norm: of the gradients of the update under way, over all ranks, or the sum of some of them; None where nothing
            has computed it.
        loss: of this rank, the sum of those of the update under way; None without one.
        is_late: an engine steps by itself, leaves such updates out, and tells the norm only then.
        spreads: a loss that is none makes all gradients NaN, of all ranks.
        roll_back: called with what was found, on every rank, with the action "rollback".
        asked_by: the option that asks for a rollback, for its messages.
    """

    def __init__(
        self, action: Action, process: ProcessContext, *, is_late: bool, is_sharded: bool, max_rollbacks: int = 3
    ) -> None:
        self.update = 0
        self.norm: Tensor | float | None = None
        self.loss: Tensor | None = None
        self.is_late = is_late
        self.spreads = action != "warn" and process.is_distributed and not is_late
        self.roll_back: Callable[[str], None] | None = None
        self.rolls_back = action == "rollback"
        self.asked_by = "on_nonfinite"
        self._ordered: tuple[str, bool] | None = None
        self._leaves_out = action in ("skip_step", "rollback")
        self._max_rollbacks = max_rollbacks
        # The checkpoint that the run went back to last, and how often in a row.
        self._rollbacks: tuple[Path | None, int] = None, 0
        self._action = action
        self._process = process
        self._is_sharded = is_sharded
        self._is_sample = False  # whether the norm is a sum of a few gradients
        self._pending: tuple[int, Tensor, bool] | None = None

    @classmethod
    def of(
        cls, config: RunConfig, process: ProcessContext, *, is_late: bool, is_sharded: bool
    ) -> NonFiniteGuard | None:
        """Return the guard of a configuration; None under fp16."""
        # Its loss scale leaves such updates out, and meets some in a good run: it grows until gradients overflow.
        if config.mixed_precision is MixedPrecision.FP16:
            return None
        limit = config.max_rollbacks
        return cls(config.on_nonfinite.value, process, is_late=is_late, is_sharded=is_sharded, max_rollbacks=limit)

    @property
    def wants_sample(self) -> bool:
        """Whether a look at a few gradients is enough where the loop has computed no norm: with "raise"."""
        # A norm of 40 gradients (1 M elements) took 246 us of a step on one thread, the look at four of them 10-20 us.
        return self.spreads and self._action == "raise"

    @property
    def wants_norm(self) -> bool:
        """Whether the norm is to be computed for the guard alone, where the loop has not."""
        # The loss is enough on one process with "raise" and "warn". An update that is to be left out has to be found
        # before its step, wherever the NaN is; a warning may not spread it over gradients that do not have it. Its norm
        # of shards, a collective, is not worth it.
        is_warned = self._action == "warn" and self._process.is_distributed and not self._is_sharded
        return self._leaves_out or is_warned or self.spreads

    def spread(self, loss: Tensor, options: dict[str, Any]) -> None:
        """Let the backward of a loss that is none begin with NaN, unless `gradient` is given."""
        if loss.ndim == 0:
            # 1 for a number, and NaN for NaN and infinity, without a look at the value: the host waits for no device.
            options.setdefault("gradient", loss.detach() * 0 + 1)

    def take_sample(self, total: Tensor | None) -> None:
        """Take the sum of this rank's gradients of a few parameters for the norm."""
        self.norm, self._is_sample = total, True

    def add_loss(self, loss: Tensor, options: dict[str, Any] | None = None) -> None:
        """Take the loss of a micro-batch, if it is one number; before its backward with `options`, `spread` it."""
        if loss.ndim == 0:
            if self.spreads and options is not None:
                self.spread(loss, options)
            # CUDA graphs write the next micro-batch's loss into the same memory (torch.compile's reduce-overhead).
            loss = loss.detach() if loss.is_cpu else loss.detach().clone()
            self.loss = loss if self.loss is None else self.loss + loss

    def drop(self) -> None:
        """Forget the update under way: its gradients are dropped, or nobody looks at them."""
        self.norm = self.loss = None

    def leave_out(self, found: str, *, rolls_back: bool) -> None:
        """Have the step of the update under way left out, or the run go back, for a reason that a loop has found."""
        self._ordered = found, rolls_back

    def skips(self) -> bool:
        """Look at the update under way, before its step or, late, after it; return whether the step is to be left out.

        Raises:
            NonFiniteError: on every rank, with the action "raise": at the update, or on an accelerator at the next one.
        """
        self.update += 1
        return self._check() if self._ordered is None else self._obey(*self._ordered)

    def _check(self) -> bool:
        norm, loss, self.norm, self.loss = self.norm, self.loss, None, None
        is_local, self._is_sample = self._is_sample and self._is_sharded, False
        if norm is None and not self._process.is_distributed:
            norm = loss
        if norm is None:
            return False
        # "skip_step" waits for the device: it has to know before this step.
        if isinstance(norm, Tensor) and not norm.is_cpu and self._action != "skip_step":
            if self.look():
                return True  # this update's gradients are those of weights that are no more
            other = norm if loss is None else loss.to(norm.device, non_blocking=True)
            flags = torch.stack((norm.detach(), other.detach())).isfinite()
            # The copy, to pinned memory, waits for nobody: it is looked at once the device has the next update to do.
            self._pending = self.update, flags.to("cpu", non_blocking=True), is_local
            # In the stream of the norm: recorded in the current device's, the flags were read before they had arrived.
            self._event = torch.Event(norm.device)
            self._event.record(torch.accelerator.current_stream(norm.device))
            return False
        if isfinite(norm):
            return False
        self._act(self.update, loss is None or isfinite(loss), is_local=is_local)
        return self._leaves_out

    def _obey(self, found: str, rolls_back: bool) -> bool:
        self._ordered = None
        self.drop()
        if rolls_back:
            assert self.roll_back is not None
            self._pending = None  # of weights that are no more
            self.asked_by = "on_loss_spike"
            self.roll_back(found)
        return True

    @waits_for_device
    def look(self) -> bool:
        """Look at the last update, before a save or a log and at the end; return whether that led to a rollback."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        self._event.synchronize()
        has_norm, has_loss = pending[1].tolist()
        if not has_norm:
            self._act(pending[0], has_loss, is_local=pending[2])
        return self.rolls_back and not has_norm

    def begin_rollback(self, found: str, place: Path | None) -> None:
        """Log that the run goes back to the checkpoint at `place`; a NonFiniteError without one, or too often."""
        option, self.asked_by = self.asked_by, "on_nonfinite"
        if place is None:
            _raise(
                f"{found}; {option}='rollback' has no checkpoint of this run to go back to yet. Save one before, "
                "or look at that batch and the learning rate"
            )
        before = self._rollbacks[1] if self._rollbacks[0] == place else 0
        if before >= self._max_rollbacks:
            _raise(
                f"{found}; the run has gone back to {place} {before} time(s) already, and has come no further "
                f"(max_rollbacks={self._max_rollbacks}). Look at the data and the learning rate, and resume from an "
                "earlier checkpoint"
            )
        self._rollbacks = place, before + 1
        logger.warning(
            "%s; the run goes back to %s (%d of at most %d times), and on with the data behind that update",
            found, place, before + 1, self._max_rollbacks,
        )  # fmt: skip

    def _act(self, update: int, has_loss: bool, *, is_local: bool) -> None:
        """Raise or warn; `is_local` where another rank's shards may be numbers."""
        # Such a rank does not come to a collective.
        if is_local:
            losses = tell_soon(f"losses of update {update}", has_loss)
        else:
            losses = gather_or_raise(self._process, f"update {update}", None, has_loss)
        ranks = [str(rank) for rank, is_number in enumerate(losses) if is_number is False]
        where = f"the loss on rank {', '.join(ranks)} is, too" if ranks else "the loss is a number on all ranks"
        found = f"update {update}: the norm of the gradients is NaN or infinite, and {where}"
        if self._action == "raise":
            _raise(
                f"{found}; nothing of it was saved. Look at that batch and the learning rate, resume from the last "
                "checkpoint, or set on_nonfinite='skip_step' to leave such updates out"
            )
        if self.rolls_back:
            assert self.roll_back is not None
            self.roll_back(found)
            return
        is_left_out = self.is_late or self._action == "skip_step"
        done = "it is left out" if is_left_out else "the weights have it (on_nonfinite='warn')"
        logger.warning("%s; %s", found, done)


def check_weights(
    named: Iterable[tuple[str, Tensor]],
    section: str,
    process: ProcessContext | None,
    *,
    is_forced: bool,
    doing: Literal["save", "load"] = "save",
) -> bool:
    """Refuse to save, or to go on from, weights that are NaN or infinite; False on every rank if `is_forced`.

    `process`: of ranks that hold different shards, which all call this; None where this rank holds all.
    """
    bad = _nonfinite_names(named)
    found = [bad] if process is None else gather_or_raise(process, section, None, bad)
    every = sorted({name for rank in found for name in rank})
    if not every:
        return True
    text = f"{section}: {len(every)} of the model's weights hold NaN or infinity, {every[0]!r} for one"
    is_save = doing == "save"
    done, instead = ("saved", "nothing is saved") if is_save else ("loaded", "no update would mend them")
    if is_forced:
        logger.warning("%s; they are %s (on_nonfinite='warn')", text, done)
        return False
    _raise(f"{text}; {instead}. Go on from an earlier checkpoint, or {doing} them as they are with on_nonfinite='warn'")


def _nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    names, values, sums = [], [], []
    for name, whole in named:
        value = whole.to_local() if isinstance(whole, DTensor) else whole
        if value.is_floating_point() and value.numel() and not value.is_meta:
            names.append(name)
            # One pass without a mask: NaN and infinity spread to the sum. One wait for the device for all of them.
            values.append(value.detach())
            sums.append(values[-1].sum(dtype=torch.float32))
    flags = torch.stack([each.to(sums[0].device) for each in sums]).isfinite().tolist() if sums else []
    suspects = [(name, value) for name, value, is_number in zip(names, values, flags, strict=True) if not is_number]
    # Large numbers can make a sum infinite, too.
    return [name for name, value in suspects if not _widened(value).isfinite().all()]


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.itemsize == 1 else value  # torch 2.13 has no isfinite of float8


def _raise(text: str) -> NoReturn:
    # A scheduler that knows the code need not requeue the job.
    end_with_exit_codes()
    raise NonFiniteError(text)
