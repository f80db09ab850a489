"""A loop of HSDP goes on without the replica that has lost a rank: the same samples in each update, and weights."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_trainer.accelerator import lost_ranks
from accel_trainer.accelerator.accumulation import TokenWindow
from accel_trainer.runtime.process import find_rank
from accel_trainer.strategies.fsdp2.unit import FSDP2Unit
from tests.accelerator.test_lost_ranks import (
    CONTINUE,
    REPLACE,
    Killed,
    Setup,
    build,
    check,
    die_levelling,
    train,
)
from tests.cells import crossed
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")

HSDP = Setup(strategy="fsdp2", num_replicas=2)
PLACES = ["data", "forward", "backward", "reduction", "optimizer", "norm", "vote", "step", "gather", "callback"]


def without(*ranks: int, size: int = 2, world_size: int = 4) -> list[int]:
    """Return the ranks of replicas that have lost none."""
    gone = {rank // size for rank in ranks}
    return [rank for rank in range(world_size) if rank // size not in gone]


@pytest.mark.parametrize(("place", "rank"), crossed(PLACES, [0, 3]))
def test_updates_are_those_of_the_run_without_a_loss(place: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, (Killed(rank, 3, place),), HSDP, left=without(rank))


@pytest.mark.parametrize(
    ("place", "setup"),
    crossed(
        ["forward", "reduction", "norm", "vote"],
        [
            HSDP._replace(num_steps=3, gathers=False),
            HSDP._replace(num_steps=2, by_tokens=True, even_batches=False),
            HSDP._replace(ema_decay=0.5),
        ],
    ),
    ids=str,
)
def test_windows_of_several_micro_batches_begin_again(place: str, setup: Setup, tmp_path: Path) -> None:
    number = 2 if place in ("norm", "vote") and setup.num_steps == 3 else 5  # a micro-batch that ends a window
    check(tmp_path, (Killed(1, number, place),), setup, left=[2, 3])


def test_loses_replica_after_replica_until_one_is_left(tmp_path: Path) -> None:
    killed = (Killed(3, 2, "forward"), Killed(0, 6, "vote"))
    check(tmp_path, killed, HSDP._replace(num_replicas=3), world_size=6, left=[4, 5])


@pytest.mark.parametrize(("place", "num_norms"), crossed(["reduction", "norm", "vote", "step"], [0, 2]))
def test_updates_whose_norm_is_not_taken_once(place: str, num_norms: int, tmp_path: Path) -> None:
    place = "vote" if (place, num_norms) == ("norm", 0) else place
    check(tmp_path, (Killed(3, 3, place),), HSDP._replace(num_norms=num_norms), left=[0, 1])


def train_voting(killed: tuple[Killed, ...], setup: Setup, folder: Path) -> Any:
    """Train; on rank 1 the vote of its third update fails when the others have passed it."""
    vote, calls = dist.all_reduce, itertools.count(1)

    def fail_once(*args: Any, **kwargs: Any) -> None:
        vote(*args, **kwargs)
        if next(calls) == 3 and find_rank() == 1:
            raise RuntimeError("gloo: Connection closed by peer")

    lost_ranks.vote_over_ranks = fail_once  # type: ignore[assignment]
    return train(killed, setup, folder)


@pytest.mark.parametrize("place", ["forward", "gather", "callback"])
def test_a_rank_that_had_voted_steps_where_others_have(place: str, tmp_path: Path) -> None:
    number = 3 if place == "forward" else 2
    setup = HSDP._replace(gathers=place == "gather", num_norms=0)
    check(tmp_path, (Killed(2, number, place),), setup, left=[0, 1], run=functools.partial(run_ranks, train_voting))


class Failing(NamedTuple):
    """Ranks whose last exchange of update 3 fails when the others have had what they send."""

    backward: tuple[int, ...] = ()
    norm: tuple[int, ...] = ()


def fail_in_third(failing: Failing, num_backwards: int) -> None:
    """Have the exchange of this rank fail in the third update, which ends with so many backwards."""
    fail_in(FSDP2Unit, "backward", find_rank() in failing.backward, num_backwards)
    fail_in(FSDP2Unit, "clip_grad_norm", find_rank() in failing.norm, 3)


def fail_in(owner: Any, name: str, fails: bool, number: int) -> None:
    method, calls = getattr(owner, name), itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        is_due = fails and next(calls) == number
        if is_due and name == "clip_grad_norm":  # the factor is left out
            args = (*args[:2], float("inf"), *args[3:])
        result = method(*args, **kwargs)
        if is_due:
            raise RuntimeError("gloo: Connection closed by peer")
        return result

    setattr(owner, name, failing)


def train_failing(killed: tuple[Killed, ...], setup: Setup, folder: Path, failing: Failing) -> Any:
    if setup.by_tokens:  # their sum is the last exchange then, and comes after one for the first window
        fail_in(TokenWindow, "_over_ranks", find_rank() in failing.backward, 4)
        failing = failing._replace(backward=())
    fail_in_third(failing, 3)
    return train(killed, setup, folder)


IN_REPLICAS = [
    Failing(norm=(1,)),  # which steps with the norm of rank 0
    Failing(norm=(0, 2, 3)),  # a replica of which none has stepped, and all can
    Failing(backward=(2,)),  # rank 3 waits for it in the norm: both are given states
    Failing(backward=(2,), norm=(1,)),  # rank 3 is given the gradients of rank 1
    Failing(backward=(3,), norm=(0,)),
    Failing(backward=(2, 3), norm=(1,)),
]


@pytest.mark.parametrize("failing", IN_REPLICAS, ids=str)
def test_an_update_that_some_ranks_have_completed_is_that_of_all(failing: Failing, tmp_path: Path) -> None:
    setup = HSDP._replace(num_replicas=3, gathers=False)
    run = functools.partial(run_ranks, train_failing, failing=failing)
    check(tmp_path, (Killed(4, 3, "forward"),), setup, world_size=6, left=[0, 1, 2, 3], run=run)


@pytest.mark.parametrize(
    "setup",
    [
        HSDP._replace(num_replicas=3),
        HSDP._replace(num_replicas=3, num_steps=2, batch_size=1, by_tokens=True, even_batches=False, gathers=False),
        HSDP._replace(num_replicas=3, ema_decay=0.5, gathers=False),
        HSDP._replace(num_replicas=3, scale=0.01, gathers=False),
    ],
    ids=str,
)
def test_gradients_and_states_are_given_with_all_that_is_theirs(setup: Setup, tmp_path: Path) -> None:
    run = functools.partial(run_ranks, train_failing, failing=Failing(backward=(2,), norm=(1,)))
    killed = Killed(4, 2, "gather") if setup.gathers else Killed(4, 3 * setup.num_steps, "forward")
    check(tmp_path, (killed,), setup, world_size=6, left=[0, 1, 2, 3], run=run)


def train_levelling(killed: tuple[Killed, ...], setup: Setup, folder: Path, failing: Failing, third: int) -> Any:
    """Train; rank `third` is killed while replicas are given what they lack."""
    die_levelling(third)
    return train_failing(killed, setup, folder, failing)


@pytest.mark.parametrize(
    ("third", "failing"),
    [
        (1, Failing(backward=(2,))),  # all that have it: it begins again
        (1, Failing(norm=(2, 3))),  # of the others all have the gradients
        (1, Failing(backward=(2,), norm=(1, 4, 5))),  # two of the others have, and two are given theirs
        (2, Failing(backward=(2,), norm=(1,))),
    ],
    ids=str,
)
def test_a_replica_is_lost_while_an_update_is_given(third: int, failing: Failing, tmp_path: Path) -> None:
    setup = HSDP._replace(num_replicas=4 if 5 in failing.norm else 3, gathers=False)
    world_size = setup.num_replicas * 2
    run = functools.partial(run_ranks, train_levelling, failing=failing, third=third)
    killed = Killed(world_size - 2, 3, "forward")
    check(tmp_path, (killed,), setup, world_size, without(killed.rank, third, world_size=world_size), run=run)


def test_no_replica_is_left(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died without an answer"):
        run_ranks(train, 4, (Killed(0, 3, "data"), Killed(2, 3, "data")), HSDP, env=CONTINUE, outlives=True)


def test_none_is_started_in_the_place_of_a_lost_rank(tmp_path: Path) -> None:
    killed = (Killed(2, 3, "forward"),)
    results = run_ranks(train, 4, killed, HSDP, tmp_path, env=REPLACE, replaces=2, timeout=60)
    assert [result is None for result in results] == [False, False, True, True]


def train_exchanging(killed: tuple[Killed, ...], setup: Setup) -> Any:
    step = FSDP2Unit.step

    def exchange(*args: Any, **kwargs: Any) -> Any:
        dist.all_reduce(torch.zeros(1))
        return step(*args, **kwargs)

    FSDP2Unit.step = exchange  # type: ignore[method-assign]
    return train(killed, setup)


def test_a_loss_within_a_step_that_exchanges_ends_all_together() -> None:
    with pytest.raises(RankFailure, match="its optimizer exchanges values in its steps, and the rank was lost in one"):
        run_ranks(train_exchanging, 4, (Killed(2, 3, "step"),), HSDP, env=CONTINUE, outlives=True)


def say_why() -> list[str]:
    accelerator, _, model, *_ = build(HSDP)
    accelerator.load_state("nowhere", missing_ok=True)
    survivors, unit = accelerator.lost_ranks._survivors, accelerator.unit_of(model)
    said = [survivors._said["able"], survivors._said["takes"]]
    unit._root = nn.Linear(1, 1)  # as a release of torch without it
    said.append(unit.why_irreplaceable())
    unit._scale = object()
    said.append(unit.why_irreplaceable())
    unit.optimizers *= 2
    return [*said, unit.why_irreplaceable()]


def test_refuses_by_name() -> None:
    able, takes, of_torch, of_fp16, of_optimizers = run_ranks(say_why, 4, env=REPLACE)[0]
    assert (able, takes) == ("yes", "replicas of shards take in none")
    assert of_torch.endswith("cannot begin a forward of FSDP2 again (2.13 can)")
    assert of_fp16 == "the ranks of a replica exchange overflows of fp16 in each step"
    assert of_optimizers == "its model has several optimizers, and a rank may be lost between their steps"
