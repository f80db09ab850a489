"""A job goes on without the ranks that it has lost: how those that are left learn of it, agree, and meet again.

A process that the launcher starts in the place of a lost one joins them between two updates.

The launcher, which sees its workers end, writes the numbers of those that were killed to the job's store. On every
other rank a thread reads them and closes the connections of the process group, so that the collective which waits for a
lost rank raises, wherever the connections lead. Nothing else is interrupted: those that are left meet at the collective
in which the rank was lost. For one that returns nothing is interrupted at all: ranks come to a boundary between two
updates that they have agreed on. Ranks are named here by the numbers that the launcher gave them; one that returns has
a number of its own.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accel_trainer.config.dialects.environment import RETURNS_VARIABLE
from accel_trainer.errors import RankLostError
from accel_trainer.logging import write_stderr
from accel_trainer.runtime.own_watch import leave_watch
from accel_trainer.runtime.torch_private import (
    completed_work,
    count_groups_anew,
    group_timeout,
    joined_groups,
    share_store,
)
from accel_trainer.runtime.whereabouts import describe_thread, position_of, waits

PREFIX = "accel_trainer/rank_loss"
"""Of the keys below in the job's store: of the store itself, whatever prefixes the ranks' own keys have."""
_POLL_SECONDS = 0.1
_SILENCE = timedelta(days=20)
"""For which a rank waits for a word of the launcher at once: torch polls in milliseconds that fit 32 bits."""
_NEVER = -1
"""The boundary of a replica that does not join."""
_WORD_SECONDS = 2.0
"""For the launcher, to say that a rank is gone whose connections have broken. It looks every 0.1 s by default."""
_ASLEEP_SECONDS = 2.0
"""Of a rank in a collective whose connections are closed, until it ends itself: those that can fail fail at once."""
_CONNECT_SECONDS, _CONNECT_ATTEMPTS = 2.0, 4
"""For ranks that begin to connect together, and twice as long each time that they could not.

It takes hundredths of a second, and a tenth on a busy machine: the first bound is what a loss meanwhile costs.
"""
_GLOO_FACTOR = 5
"""How many times its timeout gloo waits for a peer to connect (Pair::waitUntil, gloo/transport/tcp/pair.h of 2026)."""

_Connections = dict[int, tuple[Any, Any]]
_connections: _Connections = {}
"""File descriptors of the process group's connections, with the addresses of both ends."""
_before: _Connections | None = None
"""The others, while the process group connects."""
_kept_open: list[socket.socket] = []
"""Those that a loss has ended, for others that still write: copies."""


def ask_seconds(num_ranks: int, waited_seconds: float = math.inf) -> float:
    """Return how long each of so many ranks waits between looks into the job's store for what the others say.

    Less for one that has just come: most come together, and what they wait for one another a return costs them all.
    """
    # The store serves 15,000 questions a second: those that come put 5,000, and those that wait 2,000.
    longest = max(0.002, num_ranks / 2000)
    return max(min(waited_seconds / 10, longest), num_ranks / 5000)


def _open_socket(number: int) -> socket.socket:
    """Return a copy of a connection by its descriptor; an OSError where that is of something else."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # each look at the connections would leave twice as many descriptors of files
        raise


def _sockets() -> _Connections:
    """Return this process's connections; empty where the system does not list them."""
    found: _Connections = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return found
    for number in numbers:
        with suppress(OSError), _open_socket(number) as copy:
            found[number] = copy.getsockname(), copy.getpeername()
    return found


@contextmanager
def noting_connections(*, adds: bool = False, opened: Iterable[int] = ()) -> Iterator[None]:
    """Note the connections that the process group opens in the block, or others of the job beside it (`adds`).

    `opened`: descriptors of those that it was given, and that count as opened there.
    """
    global _connections, _before
    _connections, _before = _connections if adds else {}, _sockets()
    for number in opened:
        _before.pop(number, None)
    try:
        yield
        _connections = _connections | _opened_since(_before)
    finally:
        _before = None


def _opened_since(before: _Connections) -> _Connections:
    return {number: ends for number, ends in _sockets().items() if before.get(number) != ends}


def has_connections() -> bool:
    """Whether the connections of the process group are known: on Linux, and of a group that was made here."""
    return bool(_connections) or dist.get_world_size() == 1


def close_connections() -> None:
    """Close the process group's connections, so that its collectives, and its connecting, raise if they have begun."""
    # ProcessGroupGloo.abort() of torch 2.13 lets a collective that has begun wait on. A descriptor that gloo has closed
    # may be somebody else's by now: the addresses tell. Only reading ends here: gloo then fails all that waits for a
    # message, and closes. But it forgets (torch 2.13) those that wait for one which it cannot write any more: another
    # rank that had closed before let this one wait to its timeout, so none is closed before all have met.
    present, before = _sockets(), _before
    connecting = {} if before is None else _opened_since(before)  # in no collective yet, and others wait for it
    for number, ends in (_connections | connecting).items():
        if present.get(number) == ends:
            with suppress(OSError):
                copy = _open_socket(number)
                if number in connecting:
                    copy.shutdown(socket.SHUT_RDWR)
                    copy.close()
                else:
                    copy.shutdown(socket.SHUT_RD)
                    _kept_open.append(copy)


class _RollCall:
    """Connections of some ranks, all with the first of them, over which each waits until all have come.

    Beside the group's: gloo wakes a thread on each side for each message, which was 0.8 ms in a step of 30 ms. They are
    among those that a loss closes. Collective over these ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float, connect_seconds: float) -> None:
        with noting_connections(adds=True):
            if rank == 0:
                name = secrets.token_bytes(16)  # that no other process of the machine knows
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(b"\0" + name)
                    server.listen(size)
                    server.settimeout(connect_seconds)
                    store.set("roll call", name.hex())
                    self._ends = [server.accept()[0] for _ in range(1, size)]
            else:
                self._ends = [socket.socket(socket.AF_UNIX)]
                store.wait(["roll call"], timedelta(seconds=connect_seconds))
                self._ends[0].connect(b"\0" + bytes.fromhex(store.get("roll call").decode()))
        for end in self._ends:
            end.settimeout(timeout_seconds)

    def close(self) -> None:
        for end in self._ends:
            end.close()

    @waits("a roll call")
    def wait_for_all(self) -> None:
        """Return once all of them have called it; raises DistNetworkError where a connection breaks."""
        is_hub = len(self._ends) > 1  # which speaks for the others; of two, neither waits to be answered
        try:
            if not is_hub:
                self._speak()
            if not all(end.recv(1) for end in self._ends):
                raise ConnectionResetError("Connection closed by peer")
            if is_hub:
                self._speak()
        except TimeoutError as error:
            raise dist.DistNetworkError("Timed out waiting in a roll call") from error
        except OSError as error:
            raise dist.DistNetworkError(f"in a roll call: {error}") from error

    def _speak(self) -> None:
        for end in self._ends:
            end.send(b".")


class _Sleeper:
    """The thread that has made it, in the eyes of another: whether it sleeps until other ranks send something."""

    def __init__(self) -> None:
        self._thread, self._task = threading.get_ident(), threading.get_native_id()
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0

    def seconds(self) -> float:
        """Return for how long it has done nothing else, as far as the calls of this function have seen."""
        place = describe_thread(self._thread)
        if place is None or not place.operation:
            self._seen = ()
            return 0.0
        with open(f"/proc/self/task/{self._task}/status") as file:
            seen = position_of(self._thread), *(line for line in file if line.startswith(("State:\tS", "voluntary")))
        if seen != self._seen or len(seen) < 3:  # else it has slept since, and was not woken in between
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since


class LossNotice:
    """The launcher's side: which ranks could go on, the word that some are lost, and those started in their place.

    Attributes:
        lost: numbers of the lost ones.
    """

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self.lost: list[int] = []
        self._num_first = self._num_started = world_size
        self._numbers: dict[int, int] = {}
        """Of the processes started in the place of a rank, by that rank."""
        self._replicas: dict[int, int] = {}
        """Of the replicas started in the place of one, by that one's: a replica has as many numbers as ranks."""

    @property
    def _replica_size(self) -> int:
        return int(self._store.get("replica_size")) if self._store.check(["replica_size"]) else 1

    @property
    def num_replaced(self) -> int:
        """Replicas, of one rank under DDP, that were started in the place of others by now."""
        return (self._num_started - self._num_first) // self._replica_size

    def is_member(self, rank: int) -> bool:
        """Whether the process of a rank is with the others: it was from the beginning, or has joined them."""
        number = self._numbers.get(rank)
        return number is None or self._store.check([f"admission/{number // self._replica_size}"])

    def forget(self, rank: int) -> bool:
        """Have the others wait no more for a process that has ended; return False where it had joined them."""
        number = self._numbers.get(rank)
        if number is None:
            return False
        return self._store.compare_set(f"fate/{number // self._replica_size}", "", "gone") != b"joined"

    def going_on(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks, the ones that run, whose replicas have all of theirs."""
        size = self._replica_size
        num_running = Counter(rank // size for rank in ranks)
        return [rank for rank in ranks if num_running[rank // size] == size]

    def _find_reason(self, question: str, ranks: Sequence[int]) -> str | None:
        """Return what the first of these ranks has said against it, "" where all say yes; None before all have."""
        keys = [f"{question}/{self._numbers.get(rank, rank)}" for rank in ranks]
        if not self._store.check(keys):
            return None
        reasons = [text.decode() for text in self._store.multi_get(keys)]
        return next((reason for reason in reasons if reason != "yes"), "")

    def why_not(self, ranks: Sequence[int]) -> str:
        """Return why these ranks cannot go on by themselves; empty where they can."""
        reason = self._find_reason("able", ranks)
        return "its model was not prepared yet" if reason is None else reason

    def why_not_replaced(self, ranks: Sequence[int]) -> str:
        """Return why these ranks would take in no other; empty where they would."""
        reason = self._find_reason("takes", ranks)
        return "the loop has not called load_state()" if reason is None else reason

    def is_lost(self, rank: int) -> bool:
        """Whether the process of a rank goes with its replica, of which one has been lost."""
        size = self._replica_size
        return self._numbers.get(rank, rank) // size in {number // size for number in self.lost}

    def tell(self, rank: int) -> None:
        """Say that the process of a rank is lost; nothing where its replica is lost already."""
        if not self.is_lost(rank):
            self.lost.append(self._numbers.get(rank, rank))
            self._store.set("lost", json.dumps(self.lost))
            self._say()

    def awaits(self, rank: int) -> bool:
        """Whether others of a rank's replica have been started anew, and it has not."""
        size = self._replica_size
        return self._numbers.get(rank, rank) // size != self._replicas.get(rank // size, rank // size)

    def replace(self, rank: int) -> dict[str, str]:
        """Announce a process in the place of a rank that is lost; return the variables that it is to be given."""
        size = self._replica_size
        if not self.awaits(rank):
            self._replicas[rank // size] = self._num_started // size
            self._num_started += size
            self._store.set("started", str(self._num_started))
            self._say()
        number = self._numbers[rank] = self._replicas[rank // size] * size + rank % size
        return {RETURNS_VARIABLE: f"{number}/{self._num_first}/{size}"}

    def _say(self) -> None:
        """Have every rank look: each waits for a key of its own, which it can also set itself."""
        count = self._store.add("count", 1)
        for number in range(self._num_started):
            self._store.set(f"word/{count}/{number}", "")

    def is_taken(self) -> bool:
        """Whether the others have gone on since the last loss of one of them."""
        return not self.lost or self._store.check([f"taken/{len(self.lost)}"])


class Survivors:
    """The ranks that are left of a job, as one of them knows them.

    Args:
        store: a connection to the job's store, of its own.
        rank: this rank's number by the launcher.
        world_size: how many the launcher has started at first.
        replica_size: of how many ranks a replica is, where that is known already.

    Attributes:
        is_alone: whether this process was started in the place of a lost one, and has not joined the others yet.
        members: of the present process group, in its order.
        lost: all that the launcher has named so far.
        returning: those that wait to join, as far as this rank knows.
        replica_size: ranks of a replica, one after the other; it goes, and returns, with all of them.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, replica_size: int = 1) -> None:
        self._base = store
        self._store = dist.PrefixStore(PREFIX, store)
        self._spare: tuple[dist.Store, list[int]] | None = None
        """A connection to the store, and its descriptor, for the next group."""
        self._left_groups: list[dist.ProcessGroup] = []
        """Those that this rank was in, until a thread ends them."""
        self._tidying: threading.Thread | None = None
        self._connect_to_store()
        self.rank = rank
        self._num_first = world_size
        self.is_alone = rank >= world_size
        self.members = [rank] if self.is_alone else list(range(world_size))
        self.lost: frozenset[int] = frozenset()
        self.returning: frozenset[int] = frozenset()
        self._settled: set[int] = {rank}
        """Those that have joined, or do not wait any more; and this one."""
        self._lock = threading.Lock()
        self._num_meetings = self._num_met_without = 0
        self.replica_size = replica_size
        self._has_roll_calls = False
        self._roll_call: _RollCall | None = None
        self.users = weakref.WeakSet[Any]()
        """Those in this process that begin updates again."""
        self._said: dict[str, str] = {}
        self._is_over = threading.Event()
        self._sleeper = _Sleeper()
        self._num_words = 0
        """Of the launcher, that this rank has read."""
        listening: dist.Store = dist.PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._listen, args=(listening,), name="rank-loss", daemon=True)
        self._thread.start()

    def announce(self, reason: str, question: str = "able") -> None:
        """Tell the launcher whether this rank could go on without others: `reason` is empty, or says why not.

        `question` of "takes": whether it would take in one that is started in the place of a lost one.
        """
        said = reason or "yes"
        if said != self._said.get(question):
            self._said[question] = said
            self._store.set(f"{question}/{self.rank}", said)

    def take_replicas(self, size: int) -> None:
        """Let so many ranks, one after the other, hold a replica between them: it goes with each of them."""
        if size != self.replica_size:
            self.replica_size = size
            self._store.set("replica_size", str(size))

    def prepare_to_wait(self) -> None:
        """Connect for `wait_for_all`, now and whenever the members are others. Collective, before ranks are lost."""
        self._has_roll_calls = True
        if self._roll_call is None and not self.is_alone:
            seconds = group_timeout().total_seconds()
            self._roll_call = self._connect_for_roll_call(self._store, seconds, seconds)

    def _connect_for_roll_call(self, store: dist.Store, timeout_seconds: float, connect_seconds: float) -> _RollCall:
        together, size = self.members, self.replica_size
        if len(together) <= 2 * size:  # a loss leaves one replica, whose ranks need nobody else's word
            together = [rank for rank in together if rank // size == self.rank // size]
        own_store = dist.PrefixStore(f"replica {together[0] // size}", store)
        rank = together.index(self.rank)
        return _RollCall(own_store, rank, len(together), timeout_seconds, connect_seconds)

    def wait_for_all(self) -> None:
        """Wait until all that a loss may leave have come here. Collective over them.

        Raises:
            DistNetworkError: a connection has broken.
        """
        assert self._roll_call is not None
        self._roll_call.wait_for_all()

    @property
    def staying(self) -> list[int]:
        """Those of the members that go on, as far as this rank knows: of whose replica no rank is lost."""
        return self._without(self.lost)

    def _without(self, lost: frozenset[int]) -> list[int]:
        gone = {rank // self.replica_size for rank in lost}
        return [rank for rank in self.members if rank // self.replica_size not in gone]

    def _stay_without(self, lost: frozenset[int]) -> list[int]:
        """Return those that go on; end this process, without a word to them, where it is none of them.

        Raises:
            RankLostError: there are none.
        """
        left = self._without(lost)
        if not left:
            raise RankLostError("every replica (dp_replicate_size) has lost a rank")
        if self.rank not in left:
            self.is_alone = True
            leave_watch()
            write_stderr(f"rank {self.rank} ends: another rank of its replica (dp_replicate_size) is lost")
            raise SystemExit(0)
        return left

    def close(self) -> None:
        """End the thread, and have the launcher end the others with a rank that is lost from here on."""
        self._is_over.set()
        with suppress(RuntimeError):  # the launcher is gone
            if not self.is_alone:
                self.announce("the run has come to its end")
                self._store.set("ended", str(self.rank))
            self._store.set(f"word/{self._num_words + 1}/{self.rank}", "")
        self._thread.join(_WORD_SECONDS)
        if self._tidying is not None:
            self._tidying.join(_WORD_SECONDS)
        self._left_groups.clear()  # of a meeting that failed: their threads would outlive the interpreter
        if self._roll_call is not None:
            self._roll_call.close()

    def _listen(self, store: dist.Store) -> None:
        num_started = self._num_first
        try:
            while not self._is_over.is_set():
                count = store.add("count", 0)
                is_new, self._num_words = count != self._num_words, count
                if is_new:
                    num_started = int(store.get("started")) if store.check(["started"]) else num_started
                    self.lost = frozenset(json.loads(store.get("lost")) if store.check(["lost"]) else ())
                if self.has_lost():
                    self._end_collectives(is_new)
                pending = {*range(self._num_first, num_started)} - self._settled - self.returning
                for number in pending:
                    self._look_at(number, store)
                # Polls, ten a second, were 1 ms of processor time a second on each rank, and most runs lose nobody.
                if pending or self.has_lost():
                    self._is_over.wait(_POLL_SECONDS)
                else:
                    store.wait([f"word/{self._num_words + 1}/{self.rank}"], _SILENCE)
        except RuntimeError:  # the launcher is gone
            return

    def _end_collectives(self, is_new: bool) -> None:
        """Have the collectives of this rank raise, and end the rank where torch does not let one end."""
        # One may be a member only since it is lost: those that connect to it would wait.
        if is_new or _before is not None:
            close_connections()
            return
        if self._sleeper.seconds() < _ASLEEP_SECONDS:
            return
        # gloo forgets a message of which a part was left to be written when its connection broke: Pair::signalException
        # of torch 2.13 tells none of `tx_` with an unbound buffer, and who waits for it waits to the group's timeout.
        write_stderr(
            f"rank {self.rank} ends itself: a rank is lost, and torch does not end the collective that this one waits "
            "in. The others go on without it"
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def _look_at(self, number: int, store: dist.Store) -> None:
        """Note one that waits to join, and say so: from then on this rank asks at each boundary."""
        with self._lock:
            if store.check([f"fate/{number // self.replica_size}"]):
                self._settled.add(number)
            elif store.check([f"ready/{number}"]):
                self.returning |= {number}
                store.set(f"seen/{number}/{self.rank}", "")

    def has_lost(self) -> bool:
        """Whether a rank of the present group is known to be lost."""
        return not self.lost.isdisjoint(self.members)

    def knows_loss(self) -> bool:
        """Whether a rank of the present group is lost, as the launcher says within 2 s of its end."""
        deadline = time.monotonic() + _WORD_SECONDS
        while not self.has_lost():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS / 10)
        return True

    # --- meetings -------------------------------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, Any], timeout_seconds: float) -> list[dict[str, Any]]:
        """Wait until all ranks that are left have come, and return their answers, in the order of `members`.

        Every rank that is left calls it. They agree on who they are, also where more are lost meanwhile.

        Raises:
            RankLostError: one of them does not come within `timeout_seconds`.
        """
        begin = time.monotonic()
        self._num_meetings += 1
        while True:
            lost = self.lost
            left = self._stay_without(lost)
            meeting = f"meeting {self._num_meetings}/{len(lost)}"
            keys = [f"{meeting}/facts/{rank}" for rank in left]
            self._store.set(f"{meeting}/facts/{self.rank}", json.dumps(facts))
            while not (are_here := self._store.check(keys)) and self.lost == lost:
                if (waited_seconds := time.monotonic() - begin) > timeout_seconds:
                    raise RankLostError(f"{self._missing(left, keys)} did not come within {timeout_seconds:g} s")
                if self._store.check(["ended"]):
                    raise RankLostError(f"rank {self._store.get('ended').decode()} has ended, and does not go on")
                time.sleep(ask_seconds(len(left), waited_seconds))
            # One that is lost now may have come before, and some may have gone on: the first to see either decides.
            has_met = are_here and self.lost == lost
            verdict = self._store.compare_set(f"{meeting}/verdict", "", "met" if has_met else "void").decode()
            if verdict == "met":
                self.members, self._num_met_without = left, len(lost)
                return [json.loads(text) for text in self._store.multi_get(keys)]
            time.sleep(ask_seconds(len(left)))  # this rank may hear later of the loss that another has seen

    def _missing(self, left: Sequence[int], keys: Sequence[str]) -> str:
        absent = [str(rank) for rank, key in zip(left, keys, strict=True) if not self._store.check([key])]
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"

    def form_group(self, timeout_seconds: float) -> tuple[int, int]:
        """Join the group of `members`, in the place of the present one; return this rank's number in it, and its size.

        Collective over `members`. Where some are lost meanwhile, it is the group of the others.

        Raises:
            RankLostError: they cannot connect.
        """
        num_failed = 0
        # One that connects waits for the others' addresses to the limit, whoever is lost: all begin together. A loss
        # may have been known before that rank was a member: the thread has looked already, and waits for another word.
        self.agree({}, timeout_seconds)
        while True:
            before = self.members
            problem = self._connect(timeout_seconds, _CONNECT_SECONDS * 2**num_failed + len(before) / 10)
            problems = [each["problem"] for each in self.agree({"problem": problem}, timeout_seconds)]
            if before != self.members:
                continue
            if any(problems):
                # The thread of one may have closed its new connections, for a loss that these members are without.
                if (num_failed := num_failed + 1) < _CONNECT_ATTEMPTS:
                    continue
                raise RankLostError(f"the ranks that were left could not connect: {next(filter(None, problems))}")
            if self.has_lost():  # since they agreed: the thread may have closed the old connections
                close_connections()
            self._store.set(f"taken/{self._num_met_without}", "")
            return before.index(self.rank), len(before)

    def tidy_up(self) -> None:
        """Behind a meeting, end the groups that this rank has left, and connect to the store for the next one.

        By a thread: a group takes some 25 ms to end, and torch asks a resolver about a connection, which may take 5 s.
        Not before this rank opens no more connections of the present group, which are noted.
        """
        groups, self._left_groups = self._left_groups, []
        self._tidying = threading.Thread(target=self._tidy, args=(groups,), name="rank-loss-tidy", daemon=True)
        self._tidying.start()

    def _tidy(self, groups: list[dist.ProcessGroup]) -> None:
        groups.clear()
        if self._spare is None:
            self._connect_to_store()

    def _connect_to_store(self) -> None:
        before = _sockets()
        with suppress(RuntimeError):  # the launcher is gone: whoever takes it connects again
            spare, port = self._base.clone(), self._base.port  # type: ignore[attr-defined]
            opened = [number for number, ends in _opened_since(before).items() if ends[1][1:2] == (port,)]
            self._spare = spare, opened

    def _connect(self, timeout_seconds: float, connect_seconds: float) -> str:
        """Connect to the other members; return why that is not possible within `connect_seconds`, or empty."""
        if dist.is_initialized():
            self._left_groups += joined_groups()
            dist.destroy_process_group()
        while _kept_open:  # all have met
            _kept_open.pop().close()
        count_groups_anew()
        size = len(self.members)
        # One that is lost meanwhile, or has closed its connections, never answers.
        bound = timedelta(seconds=connect_seconds / _GLOO_FACTOR)
        if self._tidying is not None:
            self._tidying.join()
        (base, opened), self._spare = self._spare or (None, []), None
        try:
            with noting_connections(opened=opened):
                name, rank = f"{PREFIX}/group {self._num_meetings}", self.members.index(self.rank)
                store = dist.PrefixStore(name, base or self._base.clone())  # type: ignore[attr-defined]
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=bound)
            share_store(dist.PrefixStore(name, self._base))
            if self._roll_call is not None:
                self._roll_call.close()
            if self._has_roll_calls:
                self._roll_call = self._connect_for_roll_call(store, timeout_seconds, connect_seconds)
        except (RuntimeError, OSError) as error:
            return str(error)
        return ""

    # --- ranks that return ----------------------------------------------------------------------------------------

    def _numbers_of(self, replica: int) -> range:
        return range(replica * self.replica_size, (replica + 1) * self.replica_size)

    def find_due(self, num_updates: int) -> int | None:
        """Return the replica that joins at this boundary, after so many updates of all; None for none.

        A replica is the number of its first rank over its size: of one rank under DDP. Asked at every boundary by a
        rank that knows of one. The first that finds all of it known to all chooses the next boundary: no rank can be
        past that one, since the exchange of the update before it needs this rank.
        """
        for replica in sorted({number // self.replica_size for number in self.returning}):
            boundary = self._choose_boundary(replica, num_updates + 1)
            if boundary == _NEVER:
                self._note_settled(self._numbers_of(replica))
            elif boundary is not None and num_updates >= boundary:
                return replica
        return None

    def _choose_boundary(self, replica: int, next_one: int) -> int | None:
        """Return the boundary at which a replica joins, chosen once for all; None where it is not known to all yet."""
        key = f"boundary/{replica}"
        if not self._store.check([key]):
            numbers = self._numbers_of(replica)
            is_known = self._store.check([f"seen/{number}/{rank}" for number in numbers for rank in self.members])
            if not (is_known or self._store.check([f"fate/{replica}"])):
                return None
            self._store.compare_set(key, "", str(next_one if is_known else _NEVER))  # one of it has ended
        return int(self._store.get(key))

    def _note_settled(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self._settled.update(numbers)
            self.returning = self.returning.difference(self._settled)

    def settle(self, replica: int, refused: str = "") -> None:
        """Let the ranks of one that returns be the last members, unless one has ended, or it is refused.

        Every member calls it.
        """
        numbers = self._numbers_of(replica)
        self._note_settled(numbers)
        if refused:
            self._store.set(f"refused/{replica}", refused)
        # The launcher says so of one that has ended: whoever is the first decides.
        fate = "refused" if refused else "joined"
        if self._store.compare_set(f"fate/{replica}", "", fate) != b"joined":
            return
        self.members = [*self.members, *numbers]
        facts = {"members": self.members, "meetings": self._num_meetings, "returning": sorted(self.returning)}
        self._store.set(f"admission/{replica}", json.dumps(facts))  # the same from all of them

    def wait_for_admission(self) -> str:
        """Wait until the others take this process in, and be a member then; return why they do not, or empty."""
        self.announce("")
        self.announce("", "takes")
        self._store.set(f"ready/{self.rank}", "")
        keys = {key: f"{key}/{self.rank // self.replica_size}" for key in ("admission", "refused", "fate")}
        begin = time.monotonic()
        while not self._store.check([keys["admission"]]):
            if self._store.check([keys["refused"]]):
                return self._store.get(keys["refused"]).decode()
            if self._store.check([keys["fate"]]) and self._store.get(keys["fate"]) == b"gone":
                return "another process of its replica has ended"
            if self._store.check(["ended"]):
                return "the run has come to its end"
            time.sleep(ask_seconds(1, time.monotonic() - begin))
        admission = json.loads(self._store.get(keys["admission"]))
        self.members, self._num_meetings = admission["members"], admission["meetings"]
        with self._lock:  # others may have been settled while this one waited
            self._settled.update(self.members)
            fates = {number: f"fate/{number // self.replica_size}" for number in self.returning}
            self._settled |= {number for number, fate in fates.items() if self._store.check([fate])}
            self.returning = self.returning.union(admission["returning"]) - self._settled
            for number in self.returning:
                self._store.set(f"seen/{number}/{self.rank}", "")
        self.is_alone = False
        return ""


# --- the group in which one that returns prepares ---------------------------------------------------------------------


_NAME = "alike"
_ProcessGroup: Any = dist.ProcessGroup
"""Without the overloads of torch's stubs: of each the one that functions of `dist` and DDP call is here."""


class _AlikeGroup(_ProcessGroup):
    """One rank of a group: it gathers its own as often as there are ranks, and sums to so many times that."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._num_ranks = size

    def getBackendName(self) -> str:
        return _NAME

    # torch keeps the name in a group's backends, of which a group in Python has none, and a mesh asks for it.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._num_ranks)
        return completed_work(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=False):  # a rank that gathers nothing gives no outputs
            for part in parts:
                part.copy_(own)
        return completed_work(outputs)

    gather = allgather

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        output.view(self._num_ranks, -1).copy_(own.reshape(1, -1).expand(self._num_ranks, -1))
        return completed_work(output)

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        for part, parts in zip(outputs, inputs, strict=True):
            part.copy_(parts[self.rank()])
        return completed_work(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return completed_work(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return completed_work([])


def join_alike_group(rank: int, world_size: int, timeout_seconds: float) -> None:
    """Join a job as one of so many ranks that are not there, and would have what this one has. Not collective.

    What is prepared in it - data in shards, a model in DDP, schedules by numbers of ranks - is what it would be in a
    job of so many ranks, and no other process is waited for.
    """
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(
            _NAME, lambda store, rank, size, timeout: _AlikeGroup(rank, size), devices=["cpu"]
        )
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=rank, world_size=world_size, timeout=timeout)
