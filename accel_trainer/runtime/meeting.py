"""Meetings of the ranks that any of them can call, without a collective where nobody does."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rank_loss import ask_seconds
from accel_trainer.runtime.rank_watch import raise_if_lost
from accel_trainer.runtime.torch_private import group_timeout, second_store
from accel_trainer.runtime.whereabouts import waits

_POLL_SECONDS = 0.05  # with very many ranks they look more seldom
_LEFT = "left"
# For a question on its way to a store whose machine is gone.
_JOIN_SECONDS = 10.0


class Meeting:
    """The position at which all ranks meet, once one of them has called for that.

    Ranks pass the same numbered positions, 1, 2, 3, ..., each at its own pace. A thread of each rank looks into the
    job's key-value store, and answers a call with the next position that its rank has not passed; the ranks meet at the
    largest answer.

    A loop does at each position::

        if meeting.meets(position, calls=...):
            ...  # a collective: all ranks are here
            meeting.adjourn(position)

    Attributes:
        passed: the last position that this rank has passed.
        is_called: whether this rank knows of a call. At a position that was called by this rank it is true.
    """

    def __init__(self, process: ProcessContext, passed: int = 0) -> None:
        """Begin to answer calls. Every rank makes one, as the same one of its process, behind position `passed`."""
        self.passed = passed
        self.is_called = False
        self._process = process
        store = second_store()
        # The other ranks of a `fake` group are not there: this one meets alone.
        self._ranks = [process.rank] if store is None else list(range(process.world_size))
        self._store = dist.HashStore() if store is None else store
        # Counted in the store: one that joins the others later has been at fewer of them.
        self._name = f"accel_trainer/meeting {self._store.add(f'accel_trainer/meetings/{process.rank}', 1)}"
        self._round = 0
        self._answer: int | None = None
        """Of this rank, to the call of this round."""
        self._place: int | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer_calls, name="rank-meeting", daemon=True)
        self._thread.start()

    def meets(self, position: int, *, calls: bool) -> bool:
        """Pass the next position, unless the ranks meet there; see `is_at` for the errors.

        Args:
            calls: this rank wants a meeting, here or as soon as all can be there.
        """
        if calls:
            self.call(position)
        else:
            self.passed = position  # before `is_called` is read: the thread reads them in the other order
        if self.is_called and self.is_at(position):
            return True
        self.passed = position
        return False

    def call(self, position: int) -> None:
        """Call a meeting at a position, which this rank has not passed, or at a later one. Returns at once."""
        # Not waiting for the others here: one of them may have passed, and wait for this rank in a collective.
        with self._lock:
            if self._answer is None:
                self._give_answer(position)
                self._store.set(f"{self._name}/{self._round}/call", "")

    def is_at(self, position: int) -> bool:
        """Whether the ranks meet at this one's position, once all answer; a ProcessGroupError where one is gone."""
        with self._lock:  # the thread may be about to answer
            answer = self._answer
        if self._place is None:
            if answer is None or position < answer:
                return False
            # From its own answer on a rank passes no position before it knows all answers, so that all come to the
            # largest. It waits for threads alone, which wait for nobody: no meeting hangs.
            self._place = max(self._collect_answers())
        return position == self._place

    def adjourn(self, position: int) -> None:
        """End the meeting at a position, after a collective of all ranks there. The next call is another's."""
        # All ranks are behind a collective, and have read the answers of this round.
        with self._lock:
            self._store.delete_key(self._key(self._process.rank))
            if self._process.is_main:
                self._store.delete_key(f"{self._name}/{self._round}/call")
            self.passed = position
            self._round += 1
            self._answer, self._place, self.is_called = None, None, False

    def close(self, *, is_failed: bool) -> None:
        """Answer no more calls; with `is_failed`, tell the others not to wait for this rank."""
        self._is_over.set()
        self._thread.join(_JOIN_SECONDS)
        # Behind the thread, which may have been about to give the answer.
        if self._answer is None:
            try:
                self._store.set(self._key(self._process.rank), _LEFT if is_failed else str(self.passed + 1))
            except RuntimeError:  # the store is gone, and with it those that ask
                return

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._round}/{rank}"

    def _answer_calls(self) -> None:
        interval_seconds = max(_POLL_SECONDS, ask_seconds(self._process.world_size))
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

    @waits("a meeting")
    def _collect_answers(self) -> list[int]:
        keys = [self._key(rank) for rank in self._ranks]
        timeout_seconds = group_timeout().total_seconds()
        begin = time.monotonic()
        while not self._store.check(keys):
            raise_if_lost()
            if (waited_seconds := time.monotonic() - begin) > timeout_seconds:
                raise ProcessGroupError(
                    f"not every rank answered within {timeout_seconds:g} s when rank {self._process.rank} had "
                    "something to decide with them; one hangs or is gone. Look into the output of the others"
                )
            time.sleep(ask_seconds(self._process.world_size, waited_seconds))
        answers = [self._store.get(key).decode() for key in keys]
        if _LEFT in answers:
            raise ProcessGroupError(
                f"rank {answers.index(_LEFT)} left the training with an error, and rank {self._process.rank} had "
                "something to decide with it; see the output of that rank"
            )
        return [int(answer) for answer in answers]
