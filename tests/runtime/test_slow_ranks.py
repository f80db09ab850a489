"""Slow ranks: which one is named, in which phase, and when; what must not be taken for one."""

from __future__ import annotations

import threading
from itertools import accumulate, islice
from typing import Any

import pytest
import torch

from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.slow_ranks import OFTEN, RARELY, PhaseSampler, SlowRanks, find_slow_rank, uneven_waits
from accel_trainer.runtime.whereabouts import FOR_ALL, PHASES
from tests.cells import beyond
from tests.ranks import map_jobs, run_ranks
from tests.slow_rank_trials import EVERYONE, run_trial


def _row(seconds: float = 10.0, **phases: float) -> list[float]:
    return [phases.get(phase, 0.1) for phase in PHASES] + [phases.get("for_all", 0.0), seconds]


def test_the_slow_rank_is_the_one_with_most_work_and_its_phase_the_one_that_differs_most():
    work = [
        _row(forward=3, backward=5)[:-2],
        _row(forward=3, backward=5, data=2)[:-2],
        _row(forward=3.5, backward=4)[:-2],
    ]
    found = find_slow_rank(work)
    assert (found.rank, found.phase) == (1, "data")
    assert found.seconds == pytest.approx(1.9)  # without it the job has the pace of rank 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> SlowRanks:
    monkeypatch.setattr(PROGRESS, "updates", 0)
    return SlowRanks(lambda: None, 20)


def _judge(watch: SlowRanks, *rows: list[float], updates: int = 10) -> dict[str, int | str]:
    PROGRESS.updates += updates
    return dict(watch.judge(torch.tensor(rows)))


_SLOW, _FAST = _row(save=4, forward=3), _row(forward=3)


def test_a_rank_is_warned_of_after_three_windows_and_once(watch, caplog):
    """Of 40 s, 3.9 in each 10 s window are lost after the first, which is the start."""
    assert _judge(watch, _FAST, _SLOW) == {}
    for _ in range(2):
        assert _judge(watch, _FAST, _SLOW) == {"perf/slow_rank": 1, "perf/slow_phase": "save"}
    assert not caplog.records
    for _ in range(2):
        _judge(watch, _FAST, _SLOW)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 is slow in save: for 30 updates the other ranks have waited for it, 39 % of the time. Without that the "
        "job would be 1.64 times as fast. Look at that rank's machine and its part of the data; slow_rank_updates=0 "
        "does not look for slow ranks"
    ]


def test_what_each_rank_has_done_since_the_beginning_is_kept(watch):
    for _ in range(3):
        _judge(watch, _FAST, _SLOW)
    fast, slow = watch.to_plain()
    assert fast["seconds"]["forward"] == slow["seconds"]["forward"] == pytest.approx(9)
    assert slow["seconds"]["save"] == pytest.approx(12)
    for rank in (fast, slow):  # of 30 s each
        assert sum(rank["seconds"].values()) == pytest.approx(30, abs=0.1)
    assert (fast["slow_windows"], slow["slow_windows"]) == ({}, {"save": 2})  # the first window is the start's


def test_what_one_rank_does_for_all_neither_makes_it_slow_nor_hides_another(watch, caplog):
    """Rank 0 writes for 5 s what all wait for, and rank 1 its own for 4 s more than others: one after the other."""
    for _ in range(4):
        _judge(watch, _row(for_all=5), _row())
    assert watch.to_plain()[0]["seconds"][FOR_ALL] == pytest.approx(20)
    assert not caplog.records
    for _ in range(4):
        found = _judge(watch, _row(for_all=5), _row(save=4))
    assert found == {"perf/slow_rank": 1, "perf/slow_phase": "save"}
    assert "rank 1 is slow in save: for 30 updates the other ranks have waited for it, 39 %" in caplog.text


def test_another_rank_or_a_fast_window_between_ends_a_streak(watch, caplog):
    for rows in 3 * [(_FAST, _SLOW), (_FAST, _SLOW), (_SLOW, _FAST), (_SLOW, _SLOW)]:
        _judge(watch, *rows)
    assert not caplog.records


def test_windows_without_the_phase_do_not_end_its_streak(watch, caplog):
    quiet = _row(save=0, forward=3)
    _judge(watch, quiet, quiet)
    for rows in 3 * [(quiet, quiet), (_row(save=0, forward=3), _SLOW)]:
        _judge(watch, *rows)
    assert "for 30 updates the other ranks have waited for it, 24 % of the time" in caplog.text  # 12 of 50 s


def test_windows_of_less_than_two_seconds_are_added_up(watch):
    _judge(watch, _FAST, _SLOW)
    small = [[value / 10 for value in row] for row in (_FAST, _SLOW)]
    assert _judge(watch, *small) == {}
    assert _judge(watch, *small) == {"perf/slow_rank": 1, "perf/slow_phase": "save"}


def test_while_no_rank_is_slow_looks_are_rare_and_windows_as_much_longer():
    sampler = PhaseSampler(threading.get_ident())
    watch = SlowRanks(lambda: sampler, 20)
    try:
        for row, judged, seconds, pace in [
            (_SLOW, False, 10, OFTEN),  # the start, of which nothing is said
            (_SLOW, True, 2, OFTEN),
            (_FAST, True, 2, RARELY),
            (_SLOW, False, 4, RARELY),
            (_SLOW, True, 4, OFTEN),
            (_SLOW, True, 2, OFTEN),
        ]:
            rows = [[value * seconds / 10 for value in each] for each in (_FAST, row)]
            found = _judge(watch, *rows)
            assert (found.get("perf/slow_rank"), sampler.min_seconds) == (1 if judged and row is _SLOW else None, pace)
    finally:
        sampler.close()


@pytest.mark.parametrize("step", [0.25, 1 / 3, 0.5, 1, 2, 3.25])
def test_looks_have_no_rhythm_in_which_each_step_would_be_seen_in_one_phase(step: float):
    """At steps of so many periods each tenth of a step has its share of the time between looks."""
    waits = [*islice(uneven_waits(), 2000)]
    assert sum(waits) == pytest.approx(2000, rel=0.02)
    shares = [0.0] * 10
    for now, wait in zip(accumulate(waits), waits, strict=True):
        shares[int(now / step % 1 * 10)] += wait / sum(waits)
    assert shares == pytest.approx([0.1] * 10, abs=0.03)


def test_a_run_that_goes_back_to_a_checkpoint_begins_a_new_window(watch):
    _judge(watch, _FAST, _SLOW)
    assert _judge(watch, _FAST, _SLOW, updates=-5) == {}
    assert _judge(watch, _FAST, _SLOW) == {"perf/slow_rank": 1, "perf/slow_phase": "save"}


# `make test-slow-ranks` tries every phase.
SLEEPING, ALIKE = (1, "optimizer", "fsdp2"), (EVERYONE, "forward", "ddp")


@pytest.fixture(scope="module")
def trials() -> dict[Any, Any]:
    """Both at once: each sleeps for eight seconds."""
    return map_jobs(lambda case: run_trial(*case), [SLEEPING, ALIKE])


@pytest.mark.parametrize(("rank", "phase", "strategy"), [SLEEPING, beyond((0, "backward", "ddp"))])
def test_a_rank_that_sleeps_is_named_with_its_phase(trials: dict[Any, Any], rank: int, phase: str, strategy: str):
    figures, warnings, ranks = trials.get((rank, phase, strategy)) or run_trial(rank, phase, strategy)
    assert [text.partition(":")[0] for text in warnings] == [f"rank {rank} is slow in {phase}"]
    assert figures[1:4] == [(rank, phase)] * 3
    assert [each["slow_windows"].get(phase, 0) >= 3 for each in ranks] == [rank == 0, rank == 1]
    assert ranks[rank]["seconds"][phase] > ranks[1 - rank]["seconds"][phase] + 4  # of 41 times 0.2 s
    assert ranks[1 - rank]["seconds"]["waits"] > 4


def test_ranks_that_are_all_as_slow_are_no_alarm(trials: dict[Any, Any]):
    assert trials[ALIKE][1] == []


def looks_out() -> list[bool]:
    from accel_trainer import Accelerator

    accelerators = [Accelerator(cpu=True, config={"slow_rank_updates": number}) for number in (0, 20)]
    return [accelerator.slow_ranks is not None for accelerator in accelerators]


def test_the_look_out_can_be_turned_off():
    assert run_ranks(looks_out, 2) == [[False, True]] * 2
