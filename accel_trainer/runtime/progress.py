"""How far this rank's loop is, for how long it has stood there, and how long it may."""

from __future__ import annotations

import math
import threading
from collections import deque
from statistics import median

from accel_trainer.config import HangConfig
from accel_trainer.runtime.whereabouts import Whereabouts, position_of

_NUM_DURATIONS = 31
# A step may take as many median updates: others' data may be slow, or a shape new.
_MEDIANS = 10
# Of the limit of a step: until then nobody reads the loop's frames to see whether it moves.
_SAMPLED_AFTER = 0.1
_STEP = ("forward", "backward", "optimizer step")


class Progress:
    """Count of this rank's updates; the loops set it.

    Attributes:
        updates: optimizer steps of a loop of the user's own since the process began; of a Trainer, its global step.
    """

    __slots__ = ("_begun_at", "updates")

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
        """Look at the loop; return whether it has made progress since the last look.

        Args:
            begun: numbers of collectives begun.
            longest_seconds: what a look counts for at most.
        """
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
