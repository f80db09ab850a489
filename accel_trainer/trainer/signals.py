"""Decisions that the ranks of a Trainer take together: by the flags of its control, and by metrics of an evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import reduce
from numbers import Real
from operator import or_
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import all_gather_integers, gather_object
from accel_trainer.runtime.meeting import Meeting
from accel_trainer.runtime.preemption import StopSignals
from accel_trainer.runtime.process import ProcessContext

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_ALL, _STOPS, _SAVE, _LOG = 0b11111, 0b00011, 0b00100, 0b10000
"""Flags as bits, the first one the lowest."""
_OF_TIME = re.compile(r".*_(runtime|(samples|steps)_per_second|model_preparation_time|mem_.*)")
"""Metrics of each rank's own clock and memory."""


class Decisions:
    """Flags of the control that callbacks of one rank have set, and that all ranks act on at one boundary.

    Each flag begins something collective, or ends it. At a boundary (the end of a micro-batch, of an update, of a log,
    of an evaluation, of a save, of an epoch) each rank compares its flags with those that transformers' own callback
    sets on every rank. Where nothing else is set, nothing is exchanged, and the boundary costs a comparison. A rank
    whose flags are others calls a `Meeting`. What the ranks do then:

    - Where all of them have set the same flags at the same boundary, they act there, as one process does.
    - What only some have set, all act on at the next boundary, but for those of micro-batches. With gloo that is the
      one after the flag was set. Hosts of devices that run behind them may be some updates apart: then it is the first
      boundary that none has passed, the same one on all ranks in any case.
    - What all are to do by their arguments, and some have cleared, is done.

    After an evaluation or a save, and at the end of an epoch, the ranks have waited for each other anyway: there they
    exchange their flags, and act on what any has set at once.

    A signal to save and end is one more wish, of which all ranks know as soon as they have met: also between the
    batches of an evaluation.

    Attributes:
        is_preempted: whether the ranks have agreed to save and end here.
    """

    is_preempted = False

    def __init__(self, trainer: Trainer, signals: StopSignals) -> None:
        """Begin with the updates of a run on several ranks. Collective.

        Raises:
            ConfigError: ranks are to log, evaluate, save or stop at different updates.
        """
        self._process = trainer.accelerator.process
        self._signals = signals
        _check_same_flow(trainer, self._process)
        callbacks = trainer.callback_handler.callbacks
        # What it sets, every rank sets, without a message. Not a subclass of it, which may go by the rank.
        self._flow = next((DefaultFlowCallback() for each in callbacks if type(each) is DefaultFlowCallback), None)
        self._meeting = Meeting(self._process)
        self._position = 0
        self._wishes = 0
        """Flags that this rank set, and the others may not know of."""
        self._due = 0
        """Flags that all ranks know of, to be acted on at the next boundary that can."""
        self._ends_epoch = False

    def close(self, *, is_failed: bool) -> None:
        """End with the run; `is_failed` when an error ends it."""
        self._meeting.close(is_failed=is_failed)

    def meet_anew(self) -> None:
        """Go on with the ranks that are left; this rank's wish stays. Every one of them calls it."""
        self._meeting.close(is_failed=False)
        # From 0 on all ranks: one that has joined has passed no position of the meeting before.
        self._meeting, self._position = Meeting(self._process), 0
        if self._wishes:
            self._meeting.call(1)

    def end_micro_batch(self, control: TrainerControl) -> None:
        """Decide whether to stop in the middle of an update. Collective if a rank has a wish."""
        self._ends_epoch = False
        own = flags_of(control) & _STOPS
        acted = self._meet(own)
        if own != acted:
            _write(control, acted, _STOPS)

    def end_update(self, trainer: Trainer) -> None:
        """Decide on the flags after `on_step_end`. Collective if a rank has a wish."""
        self._ends_epoch = False
        expected = TrainerControl()
        if self._flow is not None:
            self._flow.on_step_end(trainer.args, trainer.state, expected)
        self._decide(trainer.control, flags_of(expected), _ALL)

    def end_evaluation_batch(self) -> None:
        """Decide whether to end in the middle of an evaluation. Collective if a rank is to end, or has a wish."""
        self._meet(0)

    def end_log(self, control: TrainerControl, before: int) -> None:
        """Decide on the flags after `on_log`. Collective if a rank has a wish, and at the end of an epoch.

        Args:
            before: the flags that led to the log, on all ranks; see `flags_of`.
        """
        # An override of log() may leave it set on ranks that write nothing.
        control.should_log = False
        if self._ends_epoch:
            self._exchange_now(control, _ALL & ~_LOG)
        else:
            self._decide(control, before & ~_LOG, _ALL & ~_LOG)

    def end_evaluation(self, control: TrainerControl) -> None:
        """Decide on the flags after `on_evaluate`. Collective."""
        self._exchange_now(control, _STOPS | _SAVE)

    def end_save(self, control: TrainerControl) -> None:
        """Decide on the flags after `on_save`. Collective."""
        self._exchange_now(control, _STOPS)

    def end_epoch(self, control: TrainerControl) -> None:
        """Decide on the flags after `on_epoch_end`. Collective."""
        self._ends_epoch = True
        self._exchange_now(control, _ALL)

    def _decide(self, control: TrainerControl, expected: int, can: int) -> None:
        """Act on flags that every rank sets unless a callback clears them, on due ones, and on those they share."""
        flags = flags_of(control)
        due, self._due = self._due & can, self._due & ~can
        acted = self._meet(flags | due, expected | due, can)
        if acted != flags:
            _write(control, acted, _ALL)

    def _meet(self, own: int, expected: int = 0, can: int = 0) -> int:
        """Return the flags that all ranks act on at this boundary; the others become due later."""
        self._position += 1
        calls = own != expected or self._signals.is_requested and not self.is_preempted
        if not self._meeting.meets(self._position, calls=calls):
            self._wishes |= own & ~expected
            return expected
        owns, wishes, _ = self._gather(own)
        self._meeting.adjourn(self._position)
        acted = (own if len(set(owns)) == 1 else expected) | wishes & can
        self._due |= (_union(owns) | wishes) & ~acted
        return acted

    def _exchange_now(self, control: TrainerControl, can: int) -> None:
        self._position += 1
        owns, wishes, is_called = self._gather(flags_of(control))
        # All ranks come here without a call. One that was made meanwhile has this for its meeting: nobody would come to
        # another one.
        if is_called:
            self._meeting.adjourn(self._position)
        else:
            self._meeting.passed = self._position
        pending = wishes | self._due
        self._due = pending & ~can
        _write(control, _union(owns) | pending & can, _ALL)

    def _gather(self, own: int) -> tuple[list[int], int, bool]:
        """Return the flags of each rank, the wishes of all, and whether they have been called. Collective."""
        mine = [own, self._wishes, int(self._meeting.is_called), int(self._signals.is_requested)]
        owns, wishes, called, signalled = zip(*all_gather_integers(mine, self._process)(), strict=True)
        self._wishes = 0
        self.is_preempted |= any(signalled)
        return list(owns), _union(wishes), any(called)


def flags_of(control: TrainerControl) -> int:
    """Return the flags of a control as bits."""
    return sum(bool(getattr(control, name)) << bit for bit, name in enumerate(_FLAGS))


def _write(control: TrainerControl, flags: int, which: int) -> None:
    for bit, name in enumerate(_FLAGS):
        if which >> bit & 1:
            setattr(control, name, bool(flags >> bit & 1))


def _union(flags: Iterable[int]) -> int:
    return reduce(or_, flags, 0)


def _check_same_flow(trainer: Trainer, process: ProcessContext) -> None:
    """Refuse arguments that make ranks log, evaluate, save or stop at different updates. Collective."""
    args, state = trainer.args, trainer.state
    own = {name: getattr(state, name) for name in ("max_steps", "logging_steps", "eval_steps", "save_steps")}
    for name in ("logging_strategy", "logging_first_step", "eval_strategy", "eval_delay", "save_strategy"):
        own[name] = getattr(getattr(args, name), "value", getattr(args, name))
    first, *others = gather_object(own, process)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise ConfigError(
                    f"{name} is {value} on rank 0 and {other[name]} on rank {rank}, and ranks that log, evaluate, save "
                    "or stop at different updates wait for each other for ever; give it one value on all ranks (a "
                    "callback may act on one rank, by `state.is_world_process_zero`)"
                )


def share_metrics(metrics: dict[str, Any], process: ProcessContext) -> None:
    """Set the numbers among an evaluation's metrics to those of rank 0, by which all ranks decide. Collective.

    A difference is named in a warning, the first one of a process; not that a rank has no such number, since some
    functions compute on one rank only.
    """
    if not process.is_distributed:
        return
    own = {name: value for name, value in metrics.items() if isinstance(value, Real)}
    first, *others = gather_object(own, process)
    for rank, other in enumerate(others, start=1):
        for name, value in other.items():
            if not (_OF_TIME.fullmatch(name) or name in first and _is_close(first[name], value)):
                logger.warning_once(
                    "metrics of an evaluation differ between the ranks: %s is %s on rank 0 and %s on rank %d. The best "
                    "model, early stopping and schedules go by rank 0, on all ranks; let compute_metrics() return the "
                    "same everywhere (seed what it draws)",
                    name,
                    first.get(name, "absent"),
                    value,
                    rank,
                )
    # What rank 0 lacks goes, too: a rank would choose its best model by a metric that no other one has.
    for name in own.keys() - first.keys():
        del metrics[name]
    metrics.update(first)


def _is_close(value: Any, other: Any) -> bool:
    both_nan = value != value and other != other
    return both_nan or math.isclose(value, other, rel_tol=1e-6)  # processors may round differently
