"""Signals that ask a run to save and end: noted when they come, acted on where all ranks can.

A handler only sets a flag. A loop looks at it where it could stop, and the ranks agree on one such place by a
`Meeting`: no update costs a collective. A run that was ended is started again, and goes on from what it has saved.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from accel_trainer import logging
from accel_trainer.config.schema import PreemptionConfig
from accel_trainer.runtime.meeting import Meeting
from accel_trainer.runtime.process import ProcessContext, find_attempt, find_rank, read_environment
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.torch_private import is_worker_done

logger = logging.get_logger(__name__)

PREEMPTED_EXIT_CODE = 85
"""Of a process that was asked to end, has saved, and can go on from there: to be started again."""
# A job's signal often comes twice, from the scheduler and passed on by a launcher: within this time it is one.
_ONE_REQUEST_SECONDS = 3.0
_WORKER_SECONDS = 120
# After ctrl-C: a terminal sends it to all programs of a pipeline, and `tee` takes a moment to end.
_READERS_END_SECONDS = 0.2
_HEARD = b"\nSIGINT came: the run saves and ends where all ranks can next; again, 3 s later or more, it ends at once\n"


class PreemptedExit(SystemExit):
    """The end of a process that a signal has asked to stop, with exit code 85."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)


_listening: list[StopSignals] = []
"""Those that a loop of this process is in."""


@atexit.register
def _keep_exit_code() -> None:
    """Ignore signals that a loop has stopped for, until the process ends."""
    # Python gives handlers of its own back to the system when it ends, and torch's libraries take a while longer:
    # a signal that came then killed the rank with -15 in the place of 85. What is ignored stays ignored.
    for number in signal.valid_signals():
        stopped = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(stopped, StopSignals) and stopped._is_over:
            signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """End loaders' workers that are left."""
    # Python's own end would wait for them, and one may be stuck in a lock. multiprocessing, imported above, has put its
    # hook there before: atexit calls the last one first.
    for process in multiprocessing.active_children():
        with suppress(OSError), open(f"/proc/{process.pid}/comm") as file:
            if file.read().strip() == "pt_data_worker":
                # Of a worker that was killed torch's handler would raise, in whatever else runs at the end.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                process.kill()


def _leave_readers_that_ended(seconds: float) -> None:
    """Have output that nobody reads any more go nowhere."""
    # Of `... 2>&1 | tee log` ctrl-C ends `tee` as well, and a closed terminal takes the output of its windows along: a
    # progress bar of the last update then raised BrokenPipeError, which ended the run before its save.
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)  # errors alone
    for descriptor, _ in outputs.poll(1000 * seconds):
        with suppress(OSError):  # too many open files
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class StopSignals:
    """Signals that are noted while the context is entered. One of the same name, 3 s later or more, acts as ever.

    Signals that the script handles itself are left to it, and off the main thread nothing is noted: Python runs
    handlers there alone. In a notebook or a shell of Python SIGINT stays an interrupt.

    Attributes:
        is_requested: whether a signal has come.
        is_answered: whether the loop has stopped for it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.is_requested = False
        # In a notebook or a shell of Python ctrl-C interrupts a cell, and ends no run.
        is_interactive = hasattr(sys, "ps1")
        self._numbers = [signal.Signals[name] for name in names if name != "SIGINT" or not is_interactive]
        self._before: dict[signal.Signals, Any] = {}
        self.is_answered = False
        self._is_over, self._over_seconds = False, 0.0
        self._came: signal.Signals | None = None
        self._seconds = 0.0

    def __enter__(self) -> StopSignals:
        # Python runs handlers in the main thread alone, and signal.signal() raises in others.
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                handler = signal.getsignal(number)
                # Of a loop that has ended by PreemptedExit, which the script has caught: it is no handler of its own.
                earlier = getattr(handler, "__self__", None)
                if isinstance(earlier, StopSignals) and earlier._is_over:
                    handler = earlier._before[number]
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, self._note)
                    self._before[number] = handler
                else:
                    logger.info("%s has a handler of the script's own, which it keeps", number.name)
        _listening.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _listening.remove(self)
        if isinstance(error, PreemptedExit) and not hasattr(sys, "ps1"):
            # The process ends, having saved: the signal that is still on its way to this rank may not change its code.
            self._is_over, self._over_seconds = True, time.monotonic()
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else the script has set one meanwhile, or ignores it
                signal.signal(number, handler)
        self._before.clear()
        if self._came is not None and error is None and not self.is_answered:
            os.kill(os.getpid(), self._came)  # after the last place to stop: it acts as ever

    @property
    def name(self) -> str:
        """Name of the signal that has come."""
        return "a signal to another rank" if self._came is None else self._came.name

    @property
    def seconds_since(self) -> float:
        """Time since it came; 0 where none has."""
        return time.monotonic() - self._seconds if self.is_requested else 0.0

    def find_no_time(self, grace_seconds: float | None, save_seconds: float, process: ProcessContext) -> str:
        """Return why no save, of as long as the last, fits before the machine goes; empty where one does. Collective.

        It goes `grace_seconds` after the signal; None is never.
        """
        if grace_seconds is None:
            return ""
        # Of one mind: the ranks got the signal at different times, and some of them perhaps none.
        passed = max(gather_or_raise(process, "end", None, self.seconds_since))
        if passed + save_seconds < grace_seconds:
            return ""
        return f"the last one took {save_seconds:.1f} s, and {passed:.1f} s of {grace_seconds:g} are over"

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now, came = time.monotonic(), signal.Signals(number)
        if not self.is_requested:
            self._came, self._seconds, self.is_requested = came, now, True
            _leave_readers_that_ended(_READERS_END_SECONDS if came is signal.SIGINT else 0.0)
            if came is signal.SIGINT and find_rank() == 0:
                with suppress(OSError):  # its reader may have ended with the same ctrl-C
                    os.write(2, _HEARD)  # print() may be what it has interrupted
            return
        # A second one of that name acts as ever; any does in a script that has caught the end, and lives on.
        before = self._over_seconds if self._is_over else self._seconds
        if (self._is_over or came == self._came) and now - before >= _ONE_REQUEST_SECONDS:
            # Sent again, and not called: the handler before may be SIG_DFL, which is no function.
            signal.signal(number, self._before[came])
            os.kill(os.getpid(), number)


class StopPoint:
    """The place of a loop at which all ranks stop, once a signal has come to any of them."""

    def __init__(self, signals: StopSignals, process: ProcessContext, grace_seconds: float | None) -> None:
        """Begin to look. Every rank makes one, as the same one of its process."""
        self._signals, self._process, self._grace_seconds = signals, process, grace_seconds
        self._meeting = Meeting(process) if process.is_distributed else None
        self._position = 0
        self.has_stopped = False

    def is_reached(self) -> bool:
        """Whether to stop here; from then on always. Every rank asks equally often: collective once one is to stop."""
        if self.has_stopped:
            return True
        self._position += 1
        stops = self._signals.is_requested
        if self._meeting is not None:  # never adjourned: there is one, at the end
            stops = self._meeting.meets(self._position, calls=stops)
        self.has_stopped = self._signals.is_answered = stops
        return stops

    def meet_anew(self, *, counts_on: bool) -> None:
        """Look with the ranks of the present group. Every one of them calls it; they do not communicate.

        Args:
            counts_on: none has joined, and some may be one place behind; else all are at the same one.
        """
        if self._meeting is not None:
            self._meeting.close(is_failed=False)
        self._position *= counts_on
        self._meeting = Meeting(self._process, self._position) if self._process.is_distributed else None

    def find_no_time(self, save_seconds: float) -> str:
        """Return why a save at the stop comes too late; empty before it. See `StopSignals`; collective after it."""
        if not self.has_stopped:
            return ""
        return self._signals.find_no_time(self._grace_seconds, save_seconds, self._process)

    def close(self, *, is_failed: bool) -> None:
        """Look no more; `is_failed` when an error ends the loop."""
        if self._meeting is not None:
            self._meeting.close(is_failed=is_failed)


@contextmanager
def run_until_stop(
    config: PreemptionConfig, process: ProcessContext, finish: Callable[[], None]
) -> Iterator[StopPoint]:
    """Context of a loop that a signal may end, with the place where it looks; every rank enters it.

    Args:
        finish: called after a loop that has stopped, before the process ends.

    Raises:
        PreemptedExit: at the end of a block that has stopped.
    """
    with StopSignals(config.signals) as signals:
        point, is_failed = StopPoint(signals, process, config.grace_seconds), True
        try:
            yield point
            is_failed = False
        finally:
            point.close(is_failed=is_failed)
        if point.has_stopped:
            finish()
            logger.warning("%s came: the process ends with exit code %d", signals.name, PREEMPTED_EXIT_CODE)
            raise PreemptedExit


def warn_of_new_beginning() -> None:
    """Warn a loop that has not looked for a saved state, where the launcher has started the workers again."""
    if find_attempt(read_environment())[0]:
        logger.warning_once(
            "the workers were started again, and this loop has begun anew without the states that were saved before: "
            "call load_state(missing_ok=True) after prepare(), and it goes on from the newest"
        )


def outlive_signals() -> None:
    """Have a forked loader's worker outlive signals to its whole job: the rank still wants its batches."""
    # Of a rank that listens to signals as the worker is forked; one that is spawned keeps torch's handler.
    if sys.platform == "win32" or not _listening:
        return
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    # torch's own handler ends a worker at any SIGTERM. Once the rank has let go of the worker, it is the rank's;
    # before, the worker ends at a second one, or 120 s later.
    def end_later(number: int, frame: FrameType | None) -> None:
        if is_worker_done(frame):
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_WORKER_SECONDS)

    signal.signal(signal.SIGTERM, end_later)
