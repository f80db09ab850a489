"""A job goes on without the ranks that it has lost: how those that are left learn of it, agree, and meet again.

The launcher, which sees its workers end, writes the numbers of those that were killed to the job's store. On every
other rank a thread reads them and closes the connections of the process group, so that the collective which waits for a
lost rank raises, wherever the connections lead. Nothing else is interrupted: those that are left meet at the collective
in which the rank was lost. Ranks are named here by the numbers that the launcher gave them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accel_trainer.errors import RankLostError

PREFIX = "accel_trainer/rank_loss"
"""Of the keys below in the job's store: of the store itself, whatever prefixes the ranks' own keys have."""
_POLL_SECONDS = 0.1
_WORD_SECONDS = 2.0
"""For the launcher, to say that a rank is gone whose connections have broken. It looks every 0.1 s by default."""
_MEETING_SECONDS = 30.0
"""For ranks that have agreed, to connect: a second one may be killed meanwhile."""

_Connections = dict[int, tuple[Any, Any]]
_connections: _Connections = {}
"""File descriptors of the process group's connections, with the addresses of both ends."""


def _sockets() -> _Connections:
    """Return this process's connections; empty where the system does not list them."""
    found: _Connections = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return found
    for number in numbers:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            found[number] = copy.getsockname(), copy.getpeername()
    return found


@contextmanager
def noting_connections() -> Iterator[None]:
    """Note the connections that the process group opens in the block."""
    global _connections
    before = _sockets()
    yield
    _connections = {number: ends for number, ends in _sockets().items() if before.get(number) != ends}


def has_connections() -> bool:
    """Whether the connections of the process group are known: on Linux, and of a group that was made here."""
    return bool(_connections) or dist.get_world_size() == 1


def close_connections() -> None:
    """Close the process group's connections, so that its collectives raise, those that have begun, too."""
    # ProcessGroupGloo.abort() of torch 2.13 lets a collective that has begun wait on. A descriptor that gloo has closed
    # may be somebody else's by now: the addresses tell.
    present = _sockets()
    for number, ends in _connections.items():
        if present.get(number) == ends:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                copy.shutdown(socket.SHUT_RDWR)


class LossNotice:
    """The launcher's side: which ranks could go on, and the word that some are lost."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self.lost: list[int] = []

    def why_not(self, ranks: Sequence[int]) -> str:
        """Return why these ranks cannot go on by themselves; empty where they can."""
        keys = [f"able/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return "its model was not prepared yet"
        reasons = [text.decode() for text in self._store.multi_get(keys)]
        return next((reason for reason in reasons if reason != "yes"), "")

    def tell(self, rank: int) -> None:
        """Say that a rank is lost."""
        self.lost.append(rank)
        self._store.set("lost", json.dumps(self.lost))
        self._store.add("count", 1)

    def is_taken(self) -> bool:
        """Whether the others have met since the last loss."""
        verdict = f"{len(self.lost)}/verdict"
        return not self.lost or self._store.check([verdict]) and self._store.get(verdict) == b"met"


class Survivors:
    """The ranks that are left of a job, as one of them knows them.

    Args:
        store: a connection to the job's store, of its own.
        rank: this rank's number by the launcher.
        world_size: how many the launcher has started.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._base = store
        self._store = dist.PrefixStore(PREFIX, store)
        self.rank = rank
        self.members = list(range(world_size))
        """Of the present process group, in its order."""
        self.lost: frozenset[int] = frozenset()
        """All that the launcher has named so far."""
        self.users = weakref.WeakSet[Any]()
        """Those in this process that begin updates again."""
        self._said = ""
        self._is_over = threading.Event()
        listening: dist.Store = dist.PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._listen, args=(listening,), name="rank-loss", daemon=True)
        self._thread.start()

    def announce(self, reason: str) -> None:
        """Tell the launcher whether this rank could go on without others: `reason` is empty, or says why not."""
        said = reason or "yes"
        if said != self._said:
            self._said = said
            self._store.set(f"able/{self.rank}", said)

    def close(self) -> None:
        """End the thread, and have the launcher end the others with a rank that is lost from here on."""
        with suppress(RuntimeError):  # the launcher is gone
            self.announce("the run has come to its end")
            self._store.set("ended", str(self.rank))
        self._is_over.set()
        self._thread.join(_WORD_SECONDS)

    def _listen(self, store: dist.Store) -> None:
        known = 0
        try:
            while not self._is_over.wait(_POLL_SECONDS):
                count = store.add("count", 0)
                if count == known:
                    continue
                known = count
                self.lost = frozenset(json.loads(store.get("lost")))
                if self.has_lost():
                    close_connections()
        except RuntimeError:  # the launcher is gone
            return

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

    def agree(self, facts: Mapping[str, Any], timeout_seconds: float) -> list[dict[str, Any]]:
        """Wait until all ranks that are left have come, and return their answers, in the order of `members`.

        Every rank that is left calls it. They agree on who they are, also where more are lost meanwhile.

        Raises:
            RankLostError: one of them does not come within `timeout_seconds`.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            lost = self.lost
            left = [rank for rank in self.members if rank not in lost]
            meeting = f"{len(lost)}"
            keys = [f"{meeting}/facts/{rank}" for rank in left]
            self._store.set(f"{meeting}/facts/{self.rank}", json.dumps(facts))
            while not (are_here := self._store.check(keys)) and self.lost == lost:
                if time.monotonic() > deadline:
                    raise RankLostError(f"{self._missing(left, keys)} did not come within {timeout_seconds:g} s")
                if self._store.check(["ended"]):
                    raise RankLostError(f"rank {self._store.get('ended').decode()} has ended, and does not go on")
                time.sleep(_POLL_SECONDS / 20)
            # One that is lost now may have come before, and some may have gone on: the first to see either decides.
            verdict = self._store.compare_set(f"{meeting}/verdict", "", "met" if are_here else "void").decode()
            if verdict == "met":
                self.members = left
                return [json.loads(text) for text in self._store.multi_get(keys)]

    def _missing(self, left: Sequence[int], keys: Sequence[str]) -> str:
        absent = [str(rank) for rank, key in zip(left, keys, strict=True) if not self._store.check([key])]
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"

    def form_group(self, timeout_seconds: float) -> tuple[int, int]:
        """Join the group of `members`, in the place of the present one; return this rank's number in it, and its size.

        Collective over `members`.

        Raises:
            RankLostError: another of them is lost meanwhile.
        """
        rank, size = self.members.index(self.rank), len(self.members)
        dist.destroy_process_group()
        store = dist.PrefixStore(f"{PREFIX}/group {len(self.lost)}", self._base.clone())  # type: ignore[attr-defined]
        # A rank that is lost while they connect never answers.
        bound = timedelta(seconds=min(timeout_seconds, _MEETING_SECONDS))
        try:
            with noting_connections():
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=bound)
        except RuntimeError as error:
            raise RankLostError(f"the ranks that were left could not connect: {error}") from error
        if self.has_lost():  # since they agreed: the thread may have closed the old connections
            close_connections()
        return rank, size
