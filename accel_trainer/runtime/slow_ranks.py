"""Which rank the others wait for, and in which phase of its work: seen by a thread beside each loop, and told at logs.

An all-reduce makes the steps of all ranks equally long. What tells them apart is the work before a rank arrives at a
collective: a thread looks at the frames of its loop up to twenty times a step, adds the time since its last look to a
phase, or to what the rank waits, and the ranks exchange these sums where a loop logs. Nothing is added to a step, no
clocks are compared, and every engine is seen alike. It looks often at first and while a rank is slow, else rarely. On
an accelerator the host is watched, which runs ahead: what slows a host down is named, a device that is slow by itself
is not.

P phases, without what one rank does for all, which has a column behind them; R ranks
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_trainer import logging
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.torch_private import begun_collectives
from accel_trainer.runtime.whereabouts import FOR_ALL, PHASES, activity_of

logger = logging.get_logger(__name__)

_KINDS = (*PHASES, FOR_ALL)
_LOOKS_PER_STEP = 20
# A look takes 30 us and its thread's waking 20; beside steps that fill the caches, 160 to 250 us together.
OFTEN, RARELY, _MAX_SECONDS = 0.025, 0.1, 0.25
_SHARE = 0.1
"""Of the time, from which on a rank is slow: noise between processes of one machine is several per cent."""
_LOOKS_PER_WINDOW = 80
"""At least, between two logs that are compared, 2 s of looking often: of fewer looks, chance is a large part."""
_NUM_WINDOWS = 3
"""Between two logs each, in which a rank was slow before a warning: a single one may be a hiccup of its machine."""


def uneven_waits() -> Iterator[float]:
    """Yield waits between looks, in periods, 1 on average: in a rhythm like the steps' all would see one phase."""
    own = random.Random(0)  # of nobody's stream
    while True:
        yield own.uniform(0.5, 1.5)


class PhaseSampler:
    """The seconds of a thread by phase, without those in which it waits for other ranks. Of this rank alone."""

    def __init__(self, thread_id: int, min_seconds: float = OFTEN) -> None:
        """Begin to look at a thread, every `min_seconds`, which may be set anew, or less often where steps are long."""
        self._thread_id = thread_id
        self.min_seconds = min_seconds
        self._seconds = [0.0] * (len(_KINDS) + 1)
        """By phase, for all ranks, and in all."""
        self._backward: list[tuple[float, int]] = []
        """Looks at the present backward within torch's engine: seconds, and collectives begun until then."""
        self._begun = 0
        """Collectives at the last look before it."""
        self._period = min_seconds
        self._looked_at = self._updated_at = time.perf_counter()
        self._updates = PROGRESS.updates
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phase-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join(1.0)

    def read(self) -> list[float]:
        """Return the seconds of work in each of `PHASES` and for all since the last call, and the seconds in all."""
        seconds, self._seconds = self._seconds, [0.0] * (len(_KINDS) + 1)
        return seconds

    def _run(self) -> None:
        waits = uneven_waits()
        while not self._is_over.wait(self._period * next(waits)):
            self._look(time.perf_counter())

    def _look(self, now: float) -> None:
        phase, waits_in = activity_of(self._thread_id)
        passed, self._looked_at = now - self._looked_at, now
        self._seconds[-1] += passed
        is_new = PROGRESS.updates != self._updates
        if phase != "backward" or is_new:
            self._end_backward()
        if is_new:
            self._time_updates(now)
        begun = sum(begun_collectives().values())
        if phase != "backward":
            self._begun = begun
        if waits_in == "backward":
            self._backward.append((passed, begun))
        elif not waits_in:
            self._seconds[_KINDS.index(phase)] += passed

    def _end_backward(self) -> None:
        """Add the backward that has ended, until it began its last collective."""
        # DDP computes and waits within one call of torch's engine. Its last bucket is exchanged once all gradients are
        # there: from then on, the rank waits for others.
        if not self._backward:
            return
        last = self._backward[-1][1]
        # Of a micro-batch that exchanges nothing, all is work.
        work = [seconds for seconds, begun in self._backward if begun < last or last == self._begun]
        self._seconds[PHASES.index("backward")] += sum(work)
        self._backward, self._begun = [], last

    def _time_updates(self, now: float) -> None:
        number = max(PROGRESS.updates - self._updates, 1)
        self._period = min(max((now - self._updated_at) / number / _LOOKS_PER_STEP, self.min_seconds), _MAX_SECONDS)
        self._updates, self._updated_at = PROGRESS.updates, now


class SlowRank(NamedTuple):
    """The rank that the others have waited for."""

    rank: int
    phase: str
    """The one of `PHASES` in which it takes longer than the others by most."""
    seconds: float
    """That the job would have been faster without it: than with the next slow one."""


def find_slow_rank(work: Sequence[Sequence[float]]) -> SlowRank:
    """Return the slowest of several ranks, by the seconds of each in each of `PHASES`."""
    totals = [sum(row) for row in work]
    rank = totals.index(max(totals))
    others = [row for number, row in enumerate(work) if number != rank]
    excess = [own - median(column) for own, column in zip(work[rank], zip(*others, strict=True), strict=True)]
    return SlowRank(rank, PHASES[excess.index(max(excess))], totals[rank] - max(map(sum, others)))


@dataclass(slots=True)
class _Streak:
    """Windows in a row in which one rank was slow in one phase; those without the phase do not count."""

    rank: int
    begun_at: float
    """Seconds of the run."""
    windows: int = 0
    updates: int = 0
    lost: float = 0.0
    is_told: bool = False


class SlowRanks:
    """The look-out for a slow rank, at each log. Every rank has one, and gives it the same figures.

    A warning comes after `min_updates` updates in which a rank was slow.
    """

    def __init__(self, find_sampler: Callable[[], PhaseSampler | None], min_updates: int) -> None:
        self._find_sampler = find_sampler
        self._min_updates = min_updates
        self._streaks: dict[str, _Streak] = {}
        self._window = torch.zeros(0)
        """Seconds of all ranks, until there are enough, (R, P + 2)."""
        self._totals = torch.zeros(0)
        """The same since the beginning."""
        self._slow: dict[int, Counter[str]] = defaultdict(Counter)
        """By rank, the windows in which it was slow in a phase."""
        self._seconds = 0.0
        self._updates = 0
        self._is_begun = False
        self._min_seconds = OFTEN

    def read(self) -> Tensor:
        """Return this rank's seconds since the last call, (P + 2,), fp32, of which `judge` takes all ranks'."""
        sampler = self._find_sampler()
        return torch.tensor([0.0] * (len(_KINDS) + 1) if sampler is None else sampler.read())

    def judge(self, ranks: Tensor) -> dict[str, Any]:
        """Return the figures of a slow rank for a log, `perf/slow_rank` and `perf/slow_phase`; empty without one.

        Warns of a rank that was slow for long enough. `ranks`: the results of `read` at the same update,
        (R, P + 2).
        """
        before, ranks = self._updates, ranks.cpu()
        self._totals = ranks if self._totals.shape != ranks.shape else self._totals + ranks
        rows = self._window_with(ranks)
        if not rows:
            return {}
        seconds, updates = max(row[-1] for row in rows), self._updates - before
        begun_at, self._seconds = self._seconds, self._seconds + seconds
        work = [row[: len(PHASES)] for row in rows]
        found = find_slow_rank(work)
        is_slow = found.seconds >= _SHARE * seconds
        if is_slow:
            self._slow[found.rank][found.phase] += 1
        self._look_every(OFTEN if is_slow else RARELY)
        for phase, column in zip(PHASES, zip(*work, strict=True), strict=True):
            if is_slow and phase == found.phase:
                self._extend(found, begun_at, updates)
            elif any(column):
                self._streaks.pop(phase, None)
        return {"perf/slow_rank": found.rank, "perf/slow_phase": found.phase} if is_slow else {}

    def to_plain(self) -> list[dict[str, Any]]:
        """Return what each rank has done until the last log: seconds by phase and of waiting, and where it was slow."""
        plain = []
        for rank, (*work, total) in enumerate(self._totals.tolist()):
            seconds = {phase: round(each, 2) for phase, each in zip(_KINDS, work, strict=True)}
            waits = round(max(total - sum(work), 0.0), 2)
            plain.append({"seconds": {**seconds, "waits": waits}, "slow_windows": dict(self._slow[rank])})
        return plain

    def _look_every(self, min_seconds: float) -> None:
        """Look so often from now on; all ranks do, as they have judged the same figures."""
        self._min_seconds = min_seconds
        if (sampler := self._find_sampler()) is not None:
            sampler.min_seconds = min_seconds

    def _window_with(self, ranks: Tensor) -> list[list[float]]:
        """Return the seconds of all ranks in the window that ends here; empty where none does."""
        updates = PROGRESS.updates - self._updates
        self._window = ranks if self._window.shape != ranks.shape else self._window + ranks
        is_short = float(self._window[:, -1].max()) < _LOOKS_PER_WINDOW * self._min_seconds
        if is_short and self._is_begun and updates > 0:
            return []
        rows, self._window, self._updates = self._window.tolist(), torch.zeros(0), PROGRESS.updates
        # The first window has the start in it, and there a rank may compile, or find its data, alone.
        is_begun, self._is_begun = self._is_begun, True
        return rows if is_begun and updates > 0 else []

    def _extend(self, found: SlowRank, begun_at: float, updates: int) -> None:
        streak = self._streaks.get(found.phase)
        if streak is None or streak.rank != found.rank:
            streak = self._streaks[found.phase] = _Streak(found.rank, begun_at)
        streak.windows += 1
        streak.updates += updates
        streak.lost += found.seconds
        total = self._seconds - streak.begun_at
        is_long = streak.windows >= _NUM_WINDOWS and streak.updates >= self._min_updates
        if streak.is_told or not is_long or streak.lost < _SHARE * total:
            return
        streak.is_told = True
        logger.warning(
            "rank %d is slow in %s: for %d updates the other ranks have waited for it, %.0f %% of the time. Without "
            "that the job would be %.2f times as fast. Look at that rank's machine and its part of the data; "
            "slow_rank_updates=0 does not look for slow ranks",
            found.rank, found.phase, streak.updates, 100 * streak.lost / total, total / max(total - streak.lost, 1e-9),
        )  # fmt: skip
