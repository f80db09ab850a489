"""How far this rank's loop is, for how long it has stood there and may; and facts that are the same on all ranks."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import torch.distributed as dist

from accel_trainer.config import HangConfig
from accel_trainer.runtime.whereabouts import Whereabouts, position_of

_NUM_DURATIONS = 31
# A step may take as many median updates: others' data may be slow, or a shape new.
_MEDIANS = 10
# Of the limit of a step: until then nobody reads the loop's frames to see whether it moves.
_SAMPLED_AFTER = 0.1
_STEP = ("forward", "backward", "optimizer step")
_KEPT_FACTS = 4


class Progress:
    """Count of this rank's updates since the process began, set by the loops; a Trainer's global step."""

    def __init__(self) -> None:
        self.updates = 0
        self._begun_at = 0

    @property
    def is_starting(self) -> bool:
        """Whether no update has been done since a model was prepared: compilers take their time in the first."""
        return self.updates == self._begun_at

    def begin(self) -> None:
        """Begin to train a model."""
        self._begun_at = self.updates


PROGRESS = Progress()
"""Of this process."""


class Pace:
    """The loop of this rank as another thread sees it, which looks now and then. Nothing of it is in the loop.

    Attributes:
        idle_seconds: for how long no collective has been begun and no update done.
        still_seconds: for how long the loop's thread has been at one line, with all its callers.
    """

    def __init__(self, hang: HangConfig, now: float) -> None:
        self.hang = hang
        self.idle_seconds = 0.0
        self.still_seconds = 0.0
        self._loop_thread = threading.get_ident()
        self._looked_at = now
        self._seen: tuple[int, ...] = ()
        self._position = 0
        self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)
        self._updates, self._updated_at = 0, math.inf

    def look(self, now: float, begun: tuple[int, ...], longest_seconds: float) -> bool:
        """Look at the loop, which counts `longest_seconds` at most; return whether it has made progress."""
        # A later look is that of a machine that was suspended, and has waited for nobody.
        passed = min(now - self._looked_at, longest_seconds)
        self._looked_at = now
        seen = (PROGRESS.updates, *begun)
        has_moved = seen != self._seen
        self._seen = seen
        self.idle_seconds = 0.0 if has_moved else self.idle_seconds + passed
        if PROGRESS.updates != self._updates:
            self._time_updates(now)
        if self.idle_seconds < _SAMPLED_AFTER * self.hang.step_seconds:
            self.still_seconds = self._position = 0
            return has_moved
        position = position_of(self._loop_thread)
        self.still_seconds = self.still_seconds + passed if position == self._position else 0.0
        self._position = position
        return has_moved

    def _time_updates(self, now: float) -> None:
        number, self._updates = PROGRESS.updates - self._updates, PROGRESS.updates
        # The number falls where a run goes back to a checkpoint.
        if number > 0 and self._updated_at < now:
            self._durations.append((now - self._updated_at) / number)
        self._updated_at = now

    @property
    def step_seconds(self) -> float:
        """How long a step may make no progress."""
        usual = _MEDIANS * median(self._durations) if self._durations else 0.0
        return max(self.hang.step_seconds, usual, self.hang.startup_seconds if PROGRESS.is_starting else 0.0)

    @property
    def first_report_seconds(self) -> float:
        """After which time without progress ranks are asked where they are: half of a step's limit."""
        limit = self.step_seconds / 2
        # Ranks that compile need not end it together.
        return min(limit, self.hang.step_seconds) if PROGRESS.is_starting else limit

    def limit_seconds(self, where: Whereabouts) -> float:
        """Return how long this rank may make no progress where it is: by its section; where it waits, as in a step."""
        sections = where.section.split(" > ")
        if "save" in sections or "load" in sections:
            return self.hang.save_seconds
        if "evaluation" in sections:
            return self.hang.evaluation_seconds
        if where.operation:
            return self.step_seconds
        is_users = any(name == "data loading" or name.startswith("callback") for name in sections)
        return self.step_seconds if sections[-1] in _STEP and not is_users else self.hang.user_seconds


def find_difference(everyone: Sequence[Mapping[str, str]]) -> str:
    """Return, in words, the first fact by name in which two ranks that have it differ; empty where all agree."""
    for name in {name: None for facts in everyone for name in facts}:
        known = [(rank, facts[name]) for rank, facts in enumerate(everyone) if name in facts]
        first_rank, first = known[0]
        for rank, value in known:
            if value != first:
                return f"{name} is {first} on rank {first_rank}, and {value} on rank {rank}"
    return ""


class FactBoard:
    """Facts that all ranks' loops post and their threads compare; rank 0 puts differences into `difference`."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self.difference = ""
        self._store = store
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._posted: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=_KEPT_FACTS)
        self._open: deque[int] = deque(maxlen=_KEPT_FACTS)
        """Updates whose facts are not known of all ranks yet; of rank 0."""

    def post(self, update: int, facts: Mapping[str, str]) -> None:
        """Give the facts of this rank after an update, which all ranks post. From the loop; returns at once."""
        # No lock: append() and popleft() of a deque are atomic, and the loop waits for no thread.
        self._posted.append((update, facts))

    def pass_on(self) -> bool:
        """Write posted facts down; return whether rank 0, here, has found a difference. From the thread."""
        while self._posted:
            update, facts = self._posted.popleft()
            self._store.set(f"{self._name}/{update}/{self._rank}", json.dumps(facts))
            if self._rank == 0:
                self._open.append(update)
        for update in list(self._open):
            keys = [f"{self._name}/{update}/{rank}" for rank in range(self._world_size)]
            if self._store.check(keys):
                self._open.remove(update)
                difference = find_difference([json.loads(text) for text in self._store.multi_get(keys)])
                # By rank 0, which alone reads them: the store would grow with the run.
                for key in keys:
                    self._store.delete_key(key)
                if difference:
                    self._store.set(f"{self._name}/difference", f"after update {update} {difference}")
                    return True
        return False

    def look(self) -> None:
        """Read rank 0's result. From the thread."""
        key = f"{self._name}/difference"
        if self._store.check([key]):
            self.difference = self._store.get(key).decode()
