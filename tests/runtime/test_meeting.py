"""A meeting that any rank calls: at one position of all ranks, however far apart they are, and without a hang."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime import collectives, meeting
from accel_trainer.runtime.meeting import Meeting
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from accel_trainer.runtime.torch_private import default_group, set_group_timeout
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.runtime.meeting")


def join() -> ProcessContext:
    return init_process(read_environment(), use_cpu=True, timeout_seconds=30)


def walk(num_positions: int, called: dict[int, list[int]], in_step: bool, seed: int) -> list[int]:
    """Pass positions at a pace of this rank's own; return those at which the ranks met.

    Args:
        called: by rank, the positions at which it calls a meeting.
        in_step: the ranks wait for each other between two positions, as updates on the CPU do.
    """
    process = join()
    pace = random.Random(seed * 100 + process.rank)
    one = Meeting(process)
    met = []
    for position in range(1, num_positions + 1):
        if in_step:
            collectives.all_gather_integers([position], process)()
        time.sleep(pace.choice((0.0, 0.001, 0.01)))
        if one.meets(position, calls=position in called.get(process.rank, ())):
            places = collectives.all_gather_integers([position], process)()
            assert places == [[position]] * process.world_size
            met.append(position)
            one.adjourn(position)
    collectives.all_gather_integers([0], process)()
    one.close(is_failed=False)
    return met


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_run_apart_meet_at_the_same_positions(seed: int):
    called = {0: [40], 1: [10, 11, 30], 2: [30, 60]}
    places = run_ranks(walk, 3, 200, called, False, seed)
    assert places[0] == places[1] == places[2]
    assert 10 <= places[0][0] < places[0][-1]
    assert places[0][-1] >= 60  # every call is answered
    assert len(places[0]) <= 6  # one may answer several: how many depends on how far apart the ranks are


def test_ranks_that_run_in_step_meet_at_once_or_at_the_next_position():
    (places, *others) = run_ranks(walk, 3, 60, {1: [10, 30], 2: [50]}, True, 1)
    assert others == [places, places]
    assert {place - call for place, call in zip(places, (10, 30, 50), strict=True)} <= {0, 1}


def test_a_position_that_all_ranks_call_is_the_place_and_nobody_meets_without_a_call():
    called = {rank: [10, 30, 31] for rank in range(3)}
    assert run_ranks(walk, 3, 60, called, True, 1) == [[10, 30, 31]] * 3
    assert run_ranks(walk, 2, 50, {}, False, 1) == [[], []]


def leave_with_an_error() -> Any:
    process = join()
    one = Meeting(process)
    collectives.all_gather_integers([0], process)()
    if process.rank:
        one.close(is_failed=True)
        return None
    one.call(1)
    with pytest.raises(ProcessGroupError, match=r"rank 1 left the training with an error, and rank 0 had something"):
        one.is_at(1)
    one.close(is_failed=True)
    return None


def test_a_rank_that_left_with_an_error_is_named_to_those_that_wait_for_it():
    run_ranks(leave_with_an_error, 2)


def meet_alone() -> list[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    one = Meeting(init_process(read_environment(), use_cpu=True))
    met = []
    for position in range(1, 7):
        if position in (2, 5):
            one.call(position)
        if one.is_called and one.is_at(position):
            met.append(position)
            one.adjourn(position)
        one.passed = position
    one.close(is_failed=False)
    return met


def test_a_rank_of_a_fake_group_meets_alone():
    environ = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert run_ranks(meet_alone, 1, env=environ) == [[2, 5]]


def never_answer() -> Any:
    meeting._POLL_SECONDS = 1000.0
    process = join()
    one = Meeting(process)
    set_group_timeout(default_group(), 1.0)  # here: a busy machine may take a second to connect
    if process.rank == 0:
        one.call(1)
        one.is_at(1)
    time.sleep(3)


def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout():
    with pytest.raises(RankFailure, match=r"not every rank answered within 1 s when rank 0 had something to decide"):
        run_ranks(never_answer, 2)
