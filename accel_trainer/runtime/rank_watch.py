"""Messages between the ranks of a job beside its collectives: that one has failed, and where each of them is.

Every rank has a thread that twice a second asks the job's key-value store whether anything has happened. Steps exchange
nothing for it, and do nothing but count. Three things happen through it:

- A rank that fails writes its error down before its process ends. The others, whose connections to it break then, raise
  a RemoteRankError that names it, its error and the line.
- A rank that has made no progress for long calls the roll: every thread answers with the collectives that its rank has
  begun and the stack of its loop. A warning names the ranks that the others wait for. Where they do not move within the
  limit of that section of the run, the threads end all processes.
- A rank that waits for one whose process ends in an error, and whose connections do not break, ends, too.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from zlib import crc32

import torch.distributed as dist

from accel_trainer import logging
from accel_trainer.config import HangConfig
from accel_trainer.errors import DesyncError, HangError, ProcessGroupError, RemoteRankError
from accel_trainer.runtime.progress import PROGRESS, FactBoard, Pace
from accel_trainer.runtime.slow_ranks import PhaseSampler
from accel_trainer.runtime.torch_names import BROKEN_TEXTS, CLOSED_TEXT, EXPIRED_TEXTS
from accel_trainer.runtime.torch_private import (
    begun_collectives,
    default_group,
    group_timeout,
    last_collective,
)
from accel_trainer.runtime.whereabouts import (
    ARRIVAL,
    COMPARISON,
    RankState,
    Whereabouts,
    describe_failure,
    describe_ranks,
    describe_thread,
    users_line,
    waits,
)

logger = logging.get_logger(__name__)

_POLL_SECONDS = 0.5
# With very many ranks they look more seldom: the store serves about 2,000 questions a second of all of them.
_POLL_SECONDS_PER_RANK = 0.001
_BEAT_SECONDS = 2.0
# A thread that has not answered after so many has no turn: its process is stopped or holds the interpreter's lock.
_POLLS_PER_ANSWER = 6
# The same of one that has not answered the last roll either: it had the time since, and an answer takes one poll.
_POLLS_PER_SECOND_ANSWER = 2
# Of a wait for a rank whose process ends in an error. Connections to it mostly break at once, and the rank then raises
# in its script, which can catch the error; after this time its process is ended.
_STUCK_SECONDS = 5.0
# For ranks that find the same at the same update.
_SOON_SECONDS = 1.0
_MAX_STACK = 4000  # characters that travel
_KEPT_CALLS = 64
_NO_MORE_CALLS = 1 << 40
_LEFT = "has left the job"
_CLOSED = (
    "No collective of the group works from here on, also where the error is caught: let the processes end, and resume "
    "from a checkpoint (--max_restarts starts them again)"
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The record of a rank that has failed, as it stands in the store."""

    rank: int
    how: str
    """What follows the rank's number: "failed", "is gone without a word", "has left the job"."""
    error: str = ""
    """Class and message, empty where it said nothing."""
    section: str = ""
    line: str = ""
    updates: int | None = None
    is_final: bool = True
    """Its process ends; else a caller may still catch the error."""
    begun: dict[str, int] = field(default_factory=dict)
    """Collectives that it had begun, by the name of their group."""

    def __str__(self) -> str:
        where = f" in {self.section}" if self.section else ""
        known = [] if self.updates is None else [f"update {self.updates}"]
        facts = ", ".join([*known, self.line] if self.line else known)
        said = f": {self.error}" if self.error else ""
        return f"rank {self.rank} {self.how}{where}{f' ({facts})' if facts else ''}{said}"


class CallRecord:
    """The library's collectives that this rank has called: number, digest over all, and the words of the last ones."""

    def __init__(self) -> None:
        self.number = self.digest = 0
        self.last: deque[str] = deque(maxlen=_KEPT_CALLS)

    def note(self, call: str) -> None:
        """Add a call."""
        self.number += 1
        self.digest = crc32(call.encode(), self.digest)
        self.last.append(call)


class RankWatch:
    """The thread of this rank, and its page of the store. One at a time in a process; every rank has one.

    Attributes:
        pace: of this rank's loop.
        world_size: ranks of the job.
        timeout_seconds: of collectives.
        calls: collectives that the ranks compare.
        facts: of the training, that they compare.
        is_muted: whether broken connections are explained by someone else.
        is_guarded: whether errors are told where they leave a block of `failing_together`.
        runs_ahead: whether collectives run on a device, behind the host.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, hang: HangConfig, *, hosts_store: bool) -> None:
        """Begin to watch. The calling thread is the one whose position is told.

        `store` is a connection of its own to the job's, which goes with this process where it `hosts_store`.
        """
        # Counted in the store: one that joins the others later has begun fewer of them.
        self._prefix = f"accel_trainer/watch {store.add(f'accel_trainer/watches/{rank}', 1)}"
        self.pace = Pace(hang, time.monotonic())
        self.calls = CallRecord()
        self.facts = FactBoard(store, self._key("facts"), rank, world_size)
        self.is_muted = False
        self.is_guarded = False
        self.runs_ahead = False
        self._rank = rank
        self.world_size = world_size
        self._hosts_store = hosts_store
        self._store = store
        # Weak: a group that is held is not closed when it is left, and others may wait for its connections to end.
        self._group = weakref.ref(default_group())
        self.timeout_seconds = group_timeout().total_seconds()
        self._loop_thread = threading.get_ident()
        # A loader's worker that is forked has the hook for errors, too, and may not speak for its rank.
        self._process_id = os.getpid()
        # Around what the thread of the loop and that of the watch both say.
        self._lock = threading.Lock()
        self._poll_seconds = max(_POLL_SECONDS, _POLL_SECONDS_PER_RANK * world_size)
        self._own: tuple[int, _Failure, BaseException | None] | None = None
        """Number of this rank's record, what stands there, and the error that it is of."""
        self._num_exchanges = self._num_arrivals = 0
        self._written: list[str] = []
        """Keys of this rank's last exchange."""
        self._position: Whereabouts | None = None
        """Of the loop, while it is in here."""
        # Another rank's, kept for when the store has gone with that rank.
        self._found: _Failure | None = None
        self._num_answered = 0
        self._next_report_seconds = 0.0  # of being idle; 0 before the first report
        self._asked_seconds = 0.0  # that the last report has taken
        # Whether this rank's place has been written since its last progress, and when.
        self._is_heard, self._heard_at = False, 0.0
        self._sampler: PhaseSampler | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, Any]:
        """The options of `start_watch` for another group of the same ranks."""
        return {"hang": self.pace.hang, "hosts_store": self._hosts_store, "runs_ahead": self.runs_ahead}

    @property
    def is_own_process(self) -> bool:
        """Whether this is the rank's process, and none that was forked from it."""
        return os.getpid() == self._process_id

    @property
    def is_current(self) -> bool:
        """Whether the job that it watches is still that of the process."""
        return dist.is_initialized() and self._group() is default_group()

    @property
    def is_in_loop(self) -> bool:
        """Whether the calling thread is the one of the loop."""
        return threading.get_ident() == self._loop_thread

    def sample_phases(self) -> PhaseSampler:
        """Return the sampler of this rank's loop, which goes with the watch."""
        if self._sampler is None:
            self._sampler = PhaseSampler(self._loop_thread)
        return self._sampler

    def exchange(self, text: str, doing: str) -> list[str]:
        """Return the texts of all ranks. Every rank calls it as often as the others; through the store alone.

        The message of an error says what the ranks were `doing`.

        Raises:
            HangError: a rank does not come within the group's timeout.
            RemoteRankError: another rank has failed.
            DesyncError: a rank waits for this one in a collective of torch's own.
        """
        self._num_exchanges += 1
        keys = [self._key("exchange", self._num_exchanges, rank) for rank in range(self.world_size)]
        # Before this rank is counted: once all are, every text is there to be read.
        self._store.set(keys[self._rank], text)
        self._meet(doing, [keys[self._rank]])
        return [text.decode() for text in self._store.multi_get(keys)]

    def all_equal(self, value: int, doing: str, *, are_in_step: bool = False) -> bool:
        """Whether all ranks give the same value, in a few questions to the store; else as `exchange`.

        `are_in_step`: ranks that come have begun the same collectives; one with more of them is past this place.
        """
        self._num_exchanges += 1
        # Ranks of one value count themselves under one key: no rank reads what each of the others has written.
        key = self._key("exchange", self._num_exchanges, "of", value)
        self._store.add(key, 1)
        self._meet(doing, [key], begun_collectives() if are_in_step else None)
        return self._store.add(key, 0) == self.world_size

    def all_come(self, doing: str, *, may_be_alone: bool) -> bool:
        """Wait until every rank comes to this call; False on rank 0 where it `may_be_alone` and another is past it.

        In an order of its own: a rank that is past it may be in an exchange. Errors are those of `exchange`.
        """
        count = self._key("arrivals", self._num_arrivals)
        try:
            self._arrive(count, doing)
        except (DesyncError, RemoteRankError) as error:
            has_failed = isinstance(error, RemoteRankError) and error.failure.how != _LEFT
            if has_failed or not may_be_alone or self._store.add(count, 0) > 1:
                raise
            self._store.add(count, -1)  # the next call that all come to is counted there
            return False
        self._num_arrivals += 1
        return True

    @waits(ARRIVAL)
    def _arrive(self, count: str, doing: str) -> None:
        self._store.add(count, 1)
        self._wait_for_all(count, doing, begun_collectives(), ARRIVAL)

    def tell_soon(self, name: str, value: bool) -> list[bool | None]:
        """Return each rank's value under a name that is used once; None for those that give none within a second."""
        keys = [self._key(name, rank) for rank in range(self.world_size)]
        self._store.set(keys[self._rank], str(int(value)))
        deadline = time.monotonic() + _SOON_SECONDS
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [None if (said := self._read(key)) is None else said == "1" for key in keys]

    @waits(COMPARISON)
    def _meet(self, doing: str, written: list[str], begun: dict[str, int] | None = None) -> None:
        """Wait until every rank is in this exchange, and delete the keys that this one wrote for the one before."""
        count = self._key("exchange", self._num_exchanges)
        self._store.add(count, 1)
        self._wait_for_all(count, doing, begun, COMPARISON)
        for key in self._written:
            self._store.delete_key(key)  # all are here, and have read it
        self._written = [*written, count] if self._rank == 0 else written

    @waits(COMPARISON)
    def _wait_for_all(self, count: str, doing: str, begun: dict[str, int] | None, place: str) -> None:
        """Wait until as many as there are ranks are counted, each of which waits in `place`, as reports name it."""
        begin, waited = time.monotonic(), 0.0
        look = _STUCK_SECONDS if begun is None else _SOON_SECONDS
        before: list[RankState | None] = []
        while self._store.add(count, 0) < self.world_size:
            # Ever longer: ranks that come together go on at once, and a long wait does not load the store.
            time.sleep(min(0.05, waited / 10 + 0.0002))
            waited = time.monotonic() - begin
            raise_if_lost()
            if waited > self.timeout_seconds:
                raise HangError(self._report(self._call_roll(), is_final=True))
            if waited > look:
                look += _STUCK_SECONDS
                if (failure := self.find_failure()) is not None:
                    raise self._remote_error(failure, place, users_line())
                before = self._check_not_crossed(count, doing, before, begun, place)

    @waits(COMPARISON)
    def _check_not_crossed(
        self, count: str, doing: str, before: list[RankState | None], begun: dict[str, int] | None, own: str
    ) -> list[RankState | None]:
        """Raise where a rank that does not come stands in another collective, which waits for this one."""
        states = self._call_roll()
        for rank, state in enumerate(states):
            if state is None:
                continue
            # At the same place in two rolls: in one alone it may still be on its way here. A rank that waits for all to
            # come looks out for itself.
            is_elsewhere = state.operation not in ("", own, ARRIVAL) and state in before
            if begun is not None:
                is_past = any(state.begun.get(group, 0) > number for group, number in begun.items())
                # Slow ranks, that compile for one, are not elsewhere: they have begun no more than this one.
                is_elsewhere = is_past or own == ARRIVAL and is_elsewhere
            # The roll takes its time: a rank may have come meanwhile, and gone on since all had.
            if is_elsewhere and self._store.add(count, 0) < self.world_size:
                place = state.operation or state.section or "another call"
                raise DesyncError(
                    f"rank {self._rank} is about to call {doing}, {users_line()}, and rank {rank} waits for it in "
                    f"{place}, {state.line} (update {state.updates}). Call the same collectives, in the same "
                    "order, on every rank"
                )
        return states

    def close(self) -> None:
        """End the threads."""
        if self._sampler is not None:
            self._sampler.close()
        self._is_over.set()
        self._thread.join(_STUCK_SECONDS)  # it may wait for an answer of a machine that is gone

    # --- failures --------------------------------------------------------------------------------------------------

    def tell(self, error: BaseException, *, is_final: bool) -> None:
        """Write this rank's error down for the others, unless it has been; one that is not final can be withdrawn."""
        if self._own is not None and self._own[2] is error and self._own[1].is_final >= is_final:
            return
        where = describe_failure(error)
        text = _short(error)
        kind = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if isinstance(error, RemoteRankError) and error.failure is not None:
            # Of the rank that began it: those that wait for this one learn of that one.
            failure = replace(error.failure, is_final=is_final, begun=begun_collectives())
        else:
            place = where.section, where.line, PROGRESS.updates
            failure = _Failure(self._rank, "failed", kind, *place, is_final, begun_collectives())
        self._write(failure, error)

    def tell_end(self) -> None:
        """Write down that this rank leaves the job, for those that wait for it; wait for them with the store."""
        left = _Failure(self._rank, _LEFT, updates=PROGRESS.updates)
        self._write(left if self._own is None else replace(self._own[1], is_final=True), None)
        with suppress(RuntimeError):
            if self._store.add(self._key("left"), 1) < self.world_size and self._hosts_store:
                # The threads of the others would complain loudly of a store that is gone. They stop asking.
                self._store.add(self._key("calls"), _NO_MORE_CALLS)
                self._let_others_ask(lambda: self._store.add(self._key("left"), 0) == self.world_size)

    def withdraw(self) -> None:
        """Take this rank's error back: somebody has caught it, and the rank goes on."""
        if self._own is not None:
            with suppress(RuntimeError):
                self._store.set(self._key("failure", self._own[0]), "")
            self._own = None

    def _let_others_ask(self, is_done: Callable[[], bool]) -> None:
        # Each thread asks once in a poll, and some come late: then it has read what was written, and the store may go.
        deadline = time.monotonic() + 1.2 * self._poll_seconds
        while time.monotonic() < deadline and not is_done():
            time.sleep(self._poll_seconds / 20)

    def find_failure(self) -> _Failure | None:
        """Return the first record of another rank's failure; without one, of a rank that has left."""
        return min(self._failures(), key=lambda failure: failure.how == _LEFT, default=None)

    def _failures(self) -> Iterator[_Failure]:
        """Yield the records of other ranks' failures."""
        for number in range(1, self._store.add(self._key("failures"), 0) + 1):
            # Counted up before the record is set, which may be empty once it was withdrawn.
            text = self._read(self._key("failure", number))
            if text and (failure := _Failure(**json.loads(text))).rank != self._rank:
                yield failure

    def explain(self, error: BaseException) -> ProcessGroupError | None:
        """Return the error that names the rank whose fault a broken collective is; None where `error` is its own."""
        is_expired, is_broken = _classify(error)
        if not (is_expired or is_broken):
            return None
        where = describe_failure(error)
        doing = where.operation or where.section or "a collective"
        # Its frames have left the collective: a roll that another rank calls meanwhile is told of it all the same.
        self._position = replace(where, operation=doing)
        try:
            if (text := self._read(self._key("end"))) is not None:
                # Another rank has ended first. What a rank has told and got over is not the reason.
                self._end_hung(text, where)
            failure = self.find_failure()  # written before the rank's connections closed
            if failure is None and is_expired:
                report = self._report(self._call_roll(), is_final=True)
                waited = f"{self.timeout_seconds:g} s (timeout_seconds)"
                return HangError(f"{report}\nRank {self._rank} gives up after {waited}. {_CLOSED}")
            failure = failure or self._find_gone()
        except RuntimeError:  # the store has gone with a rank: what the thread has read before
            failure = self._found
            if failure is None:
                failure = _Failure(0, "is gone, or the launcher")
                doing += ", and the job's store cannot be reached"
        finally:
            self._position = None
        if failure is None:
            # All ranks have answered.
            return ProcessGroupError(
                "all ranks are alive, and their connections are closed: a collective has timed out, or was given up, "
                f"and its error was caught. {_CLOSED}. Rank {self._rank} stopped in {doing} ({where.line})"
            )
        return self._remote_error(failure, doing, where.line)

    def _remote_error(self, failure: _Failure, doing: str, line: str) -> RemoteRankError:
        return RemoteRankError(
            f"{failure}. Rank {self._rank} stopped with it, in {doing} (update {PROGRESS.updates}, {line})", failure
        )

    def _find_gone(self) -> _Failure | None:
        """Return a record of the first rank that does not answer any more."""
        for rank, state in enumerate(self._call_roll()):
            if state is None:
                heard = self._last_heard(rank)
                how = "is gone without a word (killed, or its machine is)"
                if heard is None:
                    return _Failure(rank, how)
                return _Failure(rank, f"{how}, last heard of", "", heard.section, heard.line, heard.updates)
        return None

    def _write(self, failure: _Failure, error: BaseException | None) -> None:
        with suppress(RuntimeError), self._lock:
            number = self._store.add(self._key("failures"), 1) if self._own is None else self._own[0]
            self._own = number, failure, error
            self._store.set(self._key("failure", number), json.dumps(asdict(failure)))
            if failure.is_final and failure.error:
                self._store.add(self._key("calls"), 1)  # the threads of the others look, and keep it
                if self._hosts_store:
                    self._let_others_ask(lambda: False)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._poll_seconds) and self.is_current:
                self._answer()
                if self.facts.pass_on():
                    self._store.add(self._key("calls"), 1)
                self._look_at_progress(time.monotonic())
        except (RuntimeError, ValueError):  # the store or the group is gone: whoever needs them says so
            return

    def _look_at_progress(self, now: float) -> None:
        pace = self.pace
        # What this thread has waited for answers counts: a rank that is stopped was ended at twice the limit of 5 s.
        longest = 2 * self._poll_seconds + min(self._asked_seconds, _POLLS_PER_ANSWER * self._poll_seconds)
        self._asked_seconds = 0.0
        if pace.look(now, tuple(begun_collectives().values()), longest):
            self._next_report_seconds, self._is_heard = 0.0, False
        if not self._is_heard and now >= self._heard_at + _BEAT_SECONDS:
            self._is_heard, self._heard_at = True, now
            self._store.set(self._key("heard", self._rank), self._state(with_stack=False))
        idle = pace.idle_seconds
        first = min(pace.first_report_seconds, self.timeout_seconds / 2)
        if idle >= (self._next_report_seconds or first):
            self._next_report_seconds = self._report_hang(idle)
            self._asked_seconds = time.monotonic() - now
        if idle >= _STUCK_SECONDS and not self.is_muted:
            self._leave_if_stuck(idle)

    def _answer(self) -> None:
        called = self._store.add(self._key("calls"), 0)
        if called >= _NO_MORE_CALLS:
            self._is_over.set()
        elif called > self._num_answered:
            state = self._state(with_stack=True)
            for number in range(self._num_answered + 1, called + 1):
                self._store.set(self._key("answer", number, self._rank), state)
            self._num_answered = called
            self._found = self.find_failure()
            self.facts.look()
            if (text := self._read(self._key("end"))) is not None:
                self._end_hung(text)

    def _state(self, *, with_stack: bool) -> str:
        where = self._position or describe_thread(self._loop_thread) or Whereabouts("", "", "its loop has ended", "")
        state = RankState(
            PROGRESS.updates,
            begun_collectives(),
            last_collective() if with_stack else "",
            *(where.section, where.operation, where.line, where.stack[-_MAX_STACK:] if with_stack else ""),
            limit_seconds=self.pace.limit_seconds(where),
            still_seconds=self.pace.still_seconds,
        )
        return json.dumps(asdict(state))

    def _report_hang(self, seconds: float) -> float:
        """Print where everyone is, on the first rank that comes, or end all; return at how many idle seconds next."""
        called = self._store.add(self._key("calls"), 0)
        mine = str(self._rank)
        # The ranks that wait find so at about the same time: one table is enough.
        if self._store.compare_set(self._key("reporter", called), "", mine).decode() != mine:
            return 2 * seconds
        answers = self._call_roll(before := self._silent_ranks())
        report = self._report(answers)
        if not report:
            return 2 * seconds
        limit = max(state.limit_seconds for state in answers if state is not None)
        # A rank may hold the interpreter's lock for once: only one that is silent for a second time is taken for hung.
        are_new = not self._note_silent(answers) <= before
        if seconds >= limit and not are_new and _are_still(answers, limit / 2) and not self.is_muted:
            if (failure := self._standing_failure(answers)) is not None:
                self._end_failed(failure, describe_thread(self._loop_thread), seconds)
            text = f"no progress for {seconds:.0f} s, the limit there is {limit:g} s"
            # In this order: the threads look for the end when they answer a call.
            self._store.set(self._key("end"), text)
            self._store.add(self._key("calls"), 1)
            self._end_hung(f"{text}. {report}")
        logger.warning("no progress for %.0f s. %s", seconds, report, main_process_only=False)
        return limit if seconds < limit else seconds + 1 if are_new else 2 * seconds

    def _silent_ranks(self) -> set[int]:
        """Return the ranks that have not answered the last roll of a report."""
        return set(json.loads(self._read(self._key("silent")) or "[]"))

    def _note_silent(self, answers: list[RankState | None]) -> set[int]:
        silent = {rank for rank, state in enumerate(answers) if state is None}
        self._store.set(self._key("silent"), json.dumps(sorted(silent)))
        return silent

    def _end_hung(self, text: str, where: Whereabouts | None = None) -> None:
        self._end(where or describe_thread(self._loop_thread), HangError, text, HangError.exit_code)

    def _end(self, where: Whereabouts | None, kind: type[Exception], text: str, code: int) -> None:
        """End this process, with the lines that an error of `kind` would print."""
        stack, error = where.stack if where is not None else "", f"{kind.__module__}.{kind.__name__}"
        said = f"rank {self._rank} is here:\n{stack}{error}: {text}. Rank {self._rank} ends with exit code {code}"
        logging.write_stderr(said)
        if self._hosts_store:
            self._let_others_ask(lambda: False)
        # Nothing else interrupts a collective, or any other call, in the thread of the loop.
        os._exit(code)

    def _leave_if_stuck(self, seconds: float) -> None:
        """End the process whose loop waits for a rank that has failed."""
        where = describe_thread(self._loop_thread)
        if where is None or not (where.operation or self.runs_ahead):
            return
        failure = self.find_failure()
        # A rank that has come to its end, or has caught its error, may be nobody's to wait for: the timeout tells.
        if failure is None or not failure.is_final or failure.how == _LEFT:
            return
        if not where.operation and not self._waits_on_device():
            return
        self._end_failed(failure, where, seconds)

    def _standing_failure(self, answers: list[RankState | None]) -> _Failure | None:
        """Return the failure of a rank, also this one, that has begun no collective since: all wait for that."""
        # It takes long to end, on a busy machine, or has caught its error and stands elsewhere.
        failure = self.find_failure() if self._own is None else self._own[1]
        if failure is None or failure.how == _LEFT:
            return None
        state = answers[failure.rank]
        return failure if state is None or state.begun == failure.begun else None

    def _end_failed(self, failure: _Failure, where: Whereabouts | None, seconds: float) -> None:
        """End this process for the failure of a rank."""
        # For ranks that wait for this one, and have no group with the one that failed.
        self._write(replace(failure, is_final=True, begun=begun_collectives()), None)
        doing = (where and where.operation) or "a collective of its device"
        done = "not ended" if failure.rank == self._rank else f"waited in {doing}"
        line = "" if where is None else f", {where.line}"
        waited = f"{done} for {seconds:.0f} s (update {PROGRESS.updates}{line})"
        self._end(where, RemoteRankError, f"{failure}. Rank {self._rank} has {waited}", 1)

    def _waits_on_device(self) -> bool:
        """Whether the device is in a collective that a failed rank has not begun, and the loop at one line for long."""
        # With nccl the host stands in no collective: it waits where it reads a value of its device, and no frame tells.
        # But nothing that the device was given behind such a collective is ever computed.
        if self.pace.still_seconds < _STUCK_SECONDS:
            return False
        begun = begun_collectives()
        ended = [failure for failure in self._failures() if failure.is_final]
        return any(number > failure.begun.get(group, number) for failure in ended for group, number in begun.items())

    # --- the roll --------------------------------------------------------------------------------------------------

    @waits(COMPARISON)  # of a loop that waits, which looks out now and then
    def _call_roll(self, silent: Set[int] = frozenset()) -> list[RankState | None]:
        """Return where every rank is; None for one that does not answer, as `silent` ones did not before.

        From any thread.
        """
        number = self._store.add(self._key("calls"), 1)
        keys = [self._key("answer", number, rank) for rank in range(self.world_size)]
        expected = [key for rank, key in enumerate(keys) if rank not in silent]
        begin = time.monotonic()
        while not self._store.check(keys):
            polls = (time.monotonic() - begin) / self._poll_seconds
            if polls > _POLLS_PER_ANSWER or polls > _POLLS_PER_SECOND_ANSWER and self._store.check(expected):
                break
            if threading.current_thread() is self._thread:
                # A whole roll of a killed rank takes 3 s, by which its survivors would end later.
                if self._is_over.is_set():
                    raise RuntimeError("the watch has ended, and its process waits for this thread")
                self._answer()  # other ranks may call at the same time
            time.sleep(self._poll_seconds / 10)
        return [self._read_state(key) for key in keys]

    def _last_heard(self, rank: int) -> RankState | None:
        return self._read_state(self._key("heard", rank))

    def _read_state(self, key: str) -> RankState | None:
        text = self._read(key)
        return None if text is None else RankState(**json.loads(text))

    def _read(self, key: str) -> str | None:
        # get() alone would wait for a key that is not there.
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _report(self, answers: list[RankState | None], *, is_final: bool = False) -> str:
        """Return who waits for whom; empty where nobody does, and all of them compute."""
        heard = [answer or self._last_heard(rank) for rank, answer in enumerate(answers)]
        failure = self.find_failure()
        return describe_ranks(answers, heard, f"\n  {failure}" if failure else "", is_final=is_final)

    def _key(self, *words: Any) -> str:
        return "/".join([self._prefix, *map(str, words)])


def _classify(error: BaseException) -> tuple[bool, bool]:
    """Return whether a collective has timed out, and whether one has broken."""
    text, is_distributed = _text(error), isinstance(error, dist.DistError)
    # With gloo's path of source before it, but for what its own timeout closed.
    if not is_distributed and not (isinstance(error, RuntimeError) and ("gloo" in text or text == CLOSED_TEXT)):
        return False, False
    is_expired = any(words in text for words in EXPIRED_TEXTS)
    return is_expired, is_distributed or any(words in text for words in BROKEN_TEXTS)


def is_broken(error: BaseException) -> bool:
    """Whether an error is that of a collective whose connections have broken."""
    return _classify(error)[1]


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # of the error's own class, and no reason to tell of another error
        return "<exception str() failed>"  # as its traceback has it


def _short(error: BaseException) -> str:
    text = _text(error)
    return text if len(text) <= 600 else f"{text[:600]}..."


def _are_still(answers: list[RankState | None], seconds: float) -> bool:
    # A rank that computes, and is in no operation of all ranks, may be slow: it must not have moved for so long.
    return all(state.operation or state.still_seconds >= seconds for state in answers if state is not None)


_is_outlived: Callable[[BaseException], bool] = lambda error: False  # noqa: E731  until somebody says otherwise


_is_lost: Callable[[], bool] = lambda: False  # noqa: E731


def leave_losses_to(is_outlived: Callable[[BaseException], bool], is_lost: Callable[[], bool]) -> None:
    """Leave errors as they are of which `is_outlived` says that the job goes on without the rank that is lost.

    `is_lost` says whether one is lost, for those that wait in the store, where no connection breaks.
    """
    global _is_outlived, _is_lost
    _is_outlived, _is_lost = is_outlived, is_lost


_has_left: Callable[[], bool] = lambda: False  # noqa: E731


@contextmanager
def left_with(has_left: Callable[[], bool]) -> Iterator[None]:
    """Have waits in the store end in the block, as a collective does, once `has_left` says that a rank has left it."""
    global _has_left
    outer = _has_left
    _has_left = lambda: outer() or has_left()  # noqa: E731
    try:
        yield
    finally:
        _has_left = outer


def raise_if_lost() -> None:
    """Raise, as a collective does, where a rank is lost without which the job goes on, or has left the group."""
    if _is_lost() or _has_left():
        raise dist.DistNetworkError(f"{BROKEN_TEXTS[0]}: a rank is lost")


def is_outlived(error: BaseException) -> bool:
    """Return whether the job goes on without the rank whose loss is the reason of an error."""
    return _is_outlived(error)
