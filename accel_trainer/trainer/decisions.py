"""Decisions that the ranks of a Trainer take together: by the flags of its control, and by metrics of an evaluation."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Iterable
from functools import reduce
from numbers import Real
from operator import or_
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

from accel_trainer import logging
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.collectives import all_gather_integers, gather_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import default_store, group_timeout
from accel_trainer.trainer.running_trainer import RunningTrainer

__all__ = ["Decisions", "Meeting", "flags_of", "share_metrics"]

logger = logging.get_logger(__name__)

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_ALL, _STOPS, _SAVE, _LOG = 0b11111, 0b00011, 0b00100, 0b10000
"""Flags as bits, the first one the lowest."""
_OF_TIME = re.compile(r".*_(runtime|(samples|steps)_per_second|model_preparation_time|mem_.*)")
"""Metrics of each rank's own clock and memory."""
_POLL_SECONDS = 0.05
_POLL_SECONDS_PER_RANK = 0.0005
"""With very many ranks they look more seldom: the store serves about 2,000 questions a second of all of them."""
_LEFT = "left"
_JOIN_SECONDS = 10.0
"""For a question on its way to a store whose machine is gone."""

_meetings = itertools.count()


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
    """

    def __init__(self, trainer: RunningTrainer) -> None:
        """Begin with the updates of a run on several ranks. Collective.

        Raises:
            ConfigError: ranks are to log, evaluate, save or stop at different updates.
        """
        self._process = trainer.accelerator.process
        _check_same_flow(trainer, self._process)
        callbacks = trainer.callback_handler.callbacks
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

    def end_micro_batch(self, control: TrainerControl) -> None:
        """Decide whether to stop in the middle of an update. Collective if a rank has a wish."""
        self._ends_epoch = False
        own = flags_of(control) & _STOPS if control.should_epoch_stop or control.should_training_stop else 0
        acted = 0
        if self._meets(own, 0):
            owns, wishes = self._exchange(own)
            acted = own if len(set(owns)) == 1 else 0
            self._due |= (_union(owns) | wishes) & ~acted
        else:
            self._wishes |= own
        if own != acted:
            _write(control, acted, _STOPS)

    def end_update(self, trainer: RunningTrainer) -> None:
        """Decide on the flags after `on_step_end`. Collective if a rank has a wish."""
        self._ends_epoch = False
        expected = TrainerControl()
        if self._flow is not None:
            self._flow.on_step_end(trainer.args, trainer.state, expected)
        self._decide(trainer.control, flags_of(expected), _ALL)

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
        """Act on `expected`, on what is due and, where the ranks meet, on what they have in common.

        Args:
            expected: flags that are set on every rank, unless a callback has cleared them.
            can: flags that have an effect at this boundary.
        """
        flags = flags_of(control)
        due, self._due = self._due & can, self._due & ~can
        own, expected = flags | due, expected | due
        acted = expected
        if self._meets(own, expected):
            owns, wishes = self._exchange(own)
            acted = (own if len(set(owns)) == 1 else expected) | wishes & can
            self._due |= (_union(owns) | wishes) & ~acted
        else:
            self._wishes |= own & ~expected
        if acted != flags:
            _write(control, acted, _ALL)

    def _exchange_now(self, control: TrainerControl, can: int) -> None:
        self._position += 1
        owns, wishes, is_called = self._gather(flags_of(control))
        if is_called:
            self._meeting.adjourn(self._position)
        else:
            self._meeting.passed = self._position
        pending = wishes | self._due
        self._due = pending & ~can
        _write(control, _union(owns) | pending & can, _ALL)

    def _meets(self, own: int, expected: int) -> bool:
        """Pass the next position, unless the ranks meet there."""
        self._position = position = self._position + 1
        meeting = self._meeting
        if own != expected:
            meeting.call(position)
        else:
            meeting.passed = position
            if not meeting.is_called:
                return False
        if meeting.is_at(position):
            return True
        meeting.passed = position
        return False

    def _exchange(self, own: int) -> tuple[list[int], int]:
        owns, wishes, _ = self._gather(own)
        self._meeting.adjourn(self._position)
        return owns, wishes

    def _gather(self, own: int) -> tuple[list[int], int, bool]:
        """Return the flags of each rank, the wishes of all, and whether they have been called. Collective."""
        mine = [own, self._wishes, int(self._meeting.is_called)]
        owns, wishes, called = zip(*all_gather_integers(mine, self._process)(), strict=True)
        self._wishes = 0
        return list(owns), _union(wishes), any(called)


class Meeting:
    """The position at which all ranks meet, once one of them has called for that.

    Ranks pass the same numbered positions, 1, 2, 3, ..., each at its own pace: they wait for each other in collectives
    between, or hardly ever where a device runs behind. A rank that calls a meeting may not wait for the others where it
    is: one of them may have passed there, and wait for this rank in a collective. So a thread of each rank looks into
    the job's key-value store, and answers a call with the next position that its rank has not passed; the ranks meet at
    the largest answer. A rank that has answered passes no position from its answer on before it knows all of them. It
    waits for threads alone, which wait for nobody, so that no meeting hangs; and since none has passed its own answer,
    all come to the largest.

    A loop does at each position::

        meeting.passed = position  # or meeting.call(position), to have a meeting here or as soon as all can be there
        if meeting.is_called and meeting.is_at(position):
            ...  # a collective: all ranks are here
            meeting.adjourn(position)

    Attributes:
        passed: the last position that this rank has passed; set by the loop, in this order.
        is_called: whether this rank knows of a call. At a position that was called by this rank it is true.
    """

    def __init__(self, process: ProcessContext) -> None:
        """Begin to answer calls. Every rank makes one, as the same one of its process."""
        self.passed = 0
        self.is_called = False
        self._process = process
        self._name = f"accel_trainer/meeting {next(_meetings)}"
        # A connection of its own: a rank that waits in the store, for the beginning of a group for instance, holds the
        # other one.
        self._store: dist.Store = default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._round = 0
        self._answer: int | None = None
        """Of this rank, to the call of this round."""
        self._place: int | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer_calls, name="rank-meeting", daemon=True)
        self._thread.start()

    def call(self, position: int) -> None:
        """Call a meeting at a position, which this rank has not passed, or at a later one. Returns at once."""
        with self._lock:
            if self._answer is None:
                self._give_answer(position)
                self._store.set(f"{self._name}/{self._round}/call", "")

    def is_at(self, position: int) -> bool:
        """Whether the ranks meet at a position, where this rank is; waits for the answers of the others.

        Raises:
            ProcessGroupError: a rank has left with an error, or does not answer.
        """
        with self._lock:  # the thread may be about to answer
            answer = self._answer
        if self._place is None and (answer is None or position < answer):
            return False
        if self._place is None:
            self._place = max(self._collect_answers())
        return position == self._place

    def adjourn(self, position: int) -> None:
        """End the meeting at a position, after a collective of all ranks there. The next call is another's."""
        with self._lock:
            self._store.delete_key(self._key(self._process.rank))
            if self._process.is_main:
                self._store.delete_key(f"{self._name}/{self._round}/call")
            self.passed = position
            self._round += 1
            self._answer, self._place, self.is_called = None, None, False

    def close(self, *, is_failed: bool) -> None:
        """Answer no more calls.

        Args:
            is_failed: this rank leaves before the others do, who would otherwise wait for its answer.
        """
        self._is_over.set()
        self._thread.join(_JOIN_SECONDS)
        if is_failed and self._answer is None:
            try:
                self._store.set(self._key(self._process.rank), _LEFT)
            except RuntimeError:  # the store is gone, and with it those that ask
                return

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._round}/{rank}"

    def _answer_calls(self) -> None:
        interval_seconds = max(_POLL_SECONDS, _POLL_SECONDS_PER_RANK * self._process.world_size)
        try:
            while not self._is_over.wait(interval_seconds):
                number = self._round
                if not self.is_called and self._store.check([f"{self._name}/{number}/call"]):
                    with self._lock:
                        if number == self._round and self._answer is None:
                            # Said before `passed` is read: a loop that has set it since then will see the call.
                            self.is_called = True
                            self._give_answer(self.passed + 1)
        except RuntimeError:  # the store is gone: whoever needs it says so
            return

    def _give_answer(self, position: int) -> None:
        self.is_called = True
        self._answer = position
        self._store.set(self._key(self._process.rank), str(position))

    def _collect_answers(self) -> list[int]:
        keys = [self._key(rank) for rank in range(self._process.world_size)]
        timeout = group_timeout()
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            raise ProcessGroupError(
                f"not every rank answered within {timeout.total_seconds():g} s when rank {self._process.rank} had "
                "something to decide with them; one hangs or is gone. Look into the output of the others"
            ) from error
        answers = [self._store.get(key).decode() for key in keys]
        if _LEFT in answers:
            raise ProcessGroupError(
                f"rank {answers.index(_LEFT)} left the training with an error, and rank {self._process.rank} had "
                "something to decide with it; see the output of that rank"
            )
        return [int(answer) for answer in answers]


def flags_of(control: TrainerControl) -> int:
    """Return the flags of a control as bits."""
    return (
        bool(control.should_training_stop)
        | bool(control.should_epoch_stop) << 1
        | bool(control.should_save) << 2
        | bool(control.should_evaluate) << 3
        | bool(control.should_log) << 4
    )


def _write(control: TrainerControl, flags: int, which: int) -> None:
    for bit, name in enumerate(_FLAGS):
        if which >> bit & 1:
            setattr(control, name, bool(flags >> bit & 1))


def _union(flags: Iterable[int]) -> int:
    return reduce(or_, flags, 0)


def _check_same_flow(trainer: RunningTrainer, process: ProcessContext) -> None:
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
    for name in own.keys() - first.keys():
        del metrics[name]
    metrics.update(first)


def _is_close(value: Any, other: Any) -> bool:
    both_nan = value != value and other != other
    return both_nan or math.isclose(value, other, rel_tol=1e-6)  # processors may round differently
