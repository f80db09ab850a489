"""A loop of HSDP goes on without the replica that has lost a rank: the same samples in each update, and weights."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_trainer.config.dialects.environment import RETURNS_VARIABLE
from accel_trainer.runtime.process import find_rank
from accel_trainer.runtime.rank_loss import Survivors
from accel_trainer.strategies.fsdp2.unit import FSDP2Unit
from tests.accelerator import test_lost_ranks
from tests.accelerator.test_lost_ranks import (
    CONTINUE,
    REPLACE,
    Killed,
    Setup,
    build,
    check,
    kill_oneself,
    train,
    train_joining,
)
from tests.cells import beyond, crossed, is_beyond
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")
pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 begins a forward of FSDP2 again"
)

HSDP = Setup(strategy="fsdp2", num_replicas=2)
PLACES = ["data", "forward", "backward", "reduction", "optimizer", "vote", "step", "gather", "callback"]


def without(*ranks: int, size: int = 2, world_size: int = 4) -> list[int]:
    """Return the ranks of replicas that have lost none."""
    gone = {rank // size for rank in ranks}
    return [rank for rank in range(world_size) if rank // size not in gone]


# Beyond the sample what the tests below lose ranks at, too; before a backward as within it, where the others wait, and
# before a micro-batch as behind the one before.
BELOW = ("data", "forward", "backward", "reduction", "vote", "callback")


@pytest.mark.parametrize(
    ("place", "rank"),
    [cell if is_beyond(cell) or cell.values[0] not in BELOW else beyond(cell) for cell in crossed(PLACES, [0, 3])],
)
def test_updates_are_those_of_the_run_without_a_loss(place: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, (Killed(rank, 3, place),), HSDP, left=without(rank))


WINDOWS = [
    HSDP._replace(num_steps=2, by_tokens=True, even_batches=False),
    HSDP._replace(num_steps=3, gathers=False, ema_decay=0.5),
]


@pytest.mark.parametrize(
    ("place", "setup"),
    [*crossed(["reduction", "vote"], WINDOWS), *(beyond(("forward", setup)) for setup in WINDOWS)],
    ids=str,
)
def test_windows_of_several_micro_batches_begin_again(place: str, setup: Setup, tmp_path: Path) -> None:
    number = 2 if (place, setup.num_steps) == ("vote", 3) else 5  # in each case a micro-batch that ends a window
    check(tmp_path, (Killed(1, number, place),), setup, left=[2, 3])


def test_loses_replica_after_replica_until_one_is_left(tmp_path: Path) -> None:
    killed = (Killed(3, 2, "forward"), Killed(0, 6, "vote"))
    check(tmp_path, killed, HSDP._replace(num_replicas=3), world_size=6, left=[4, 5])


def train_voting(killed: tuple[Killed, ...], setup: Setup, folder: Path) -> Any:
    """Train; on rank 1 the vote of its third update fails when the others have passed it."""
    wait, calls = Survivors.wait_for_all, itertools.count(1)

    def fail_once(self: Survivors) -> None:
        wait(self)
        if next(calls) == 3 and find_rank() == 1:
            raise dist.DistNetworkError("Connection closed by peer")

    Survivors.wait_for_all = fail_once  # type: ignore[method-assign]
    return train(killed, setup, folder)


@pytest.mark.parametrize("place", [beyond("forward"), "gather", "callback"])
def test_a_rank_that_had_voted_steps_where_others_have(place: str, tmp_path: Path) -> None:
    number = 3 if place == "forward" else 2
    setup = HSDP._replace(gathers=place == "gather")
    check(tmp_path, (Killed(2, number, place),), setup, left=[0, 1], run=functools.partial(run_ranks, train_voting))


def test_no_replica_is_left(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died without an answer"):
        run_ranks(
            train, 4, (Killed(0, 3, "data"), Killed(2, 3, "data")), HSDP, env=CONTINUE, outlives=True, grace_seconds=0.5
        )


@pytest.mark.parametrize(
    ("rank", "setup"),
    [
        beyond((3, HSDP._replace(waits=(4,)))),
        (0, HSDP._replace(waits=(5,), ema_decay=0.5)),
        # Behind the last update of an epoch.
        (2, HSDP._replace(waits=(2,), num_steps=2, by_tokens=True, even_batches=False)),
    ],
    ids=str,
)
def test_a_replica_returns_between_two_updates(rank: int, setup: Setup, tmp_path: Path) -> None:
    left = [2, 3, 0, 1] if rank == 0 else [0, 1, 2, 3]
    check(tmp_path, (Killed(rank, 3, "forward"),), setup, left=left)


def test_replicas_return_one_after_the_other(tmp_path: Path) -> None:
    """One of them is lost again, and the first one in the end, which is not replaced then."""
    killed = (Killed(2, 1, "backward"), Killed(3, 8, "reduction"), Killed(0, 15, "vote"))
    check(tmp_path, killed, HSDP._replace(waits=(3, 6)), left=[2, 3])


def test_a_rank_is_lost_while_its_replica_connects(tmp_path: Path) -> None:
    """The others of it end, and those that took it in go on."""
    run = functools.partial(run_ranks, train_joining, lost=4)
    check(tmp_path, (Killed(2, 3, "backward"),), HSDP._replace(waits=(4,)), left=[0, 1], run=run)


def train_meshing(killed: tuple[Killed, ...], setup: Setup, folder: Path) -> Any:
    """Train; the first process that is started in the place of rank 2 is killed where the others make its groups."""
    rejoin = FSDP2Unit.rejoin

    def rejoin_or_die(self: FSDP2Unit) -> None:
        if os.environ.get(RETURNS_VARIABLE, "").startswith("4/"):
            kill_oneself()
        rejoin(self)

    FSDP2Unit.rejoin = rejoin_or_die  # type: ignore[method-assign]
    return train(killed, setup, folder)


def test_a_rank_is_lost_while_groups_of_its_replica_are_made(tmp_path: Path) -> None:
    run = functools.partial(run_ranks, train_meshing)
    check(tmp_path, (Killed(2, 3, "backward"),), HSDP._replace(waits=(4,)), left=[0, 1], run=run)


def die_at_first(killed: tuple[Killed, ...], setup: Setup, folder: Path) -> Any:
    """Train; the first process that is started in the place of rank 2 is killed before it waits to join."""
    number = os.environ.get(RETURNS_VARIABLE, "")
    if number.startswith("4/"):
        kill_oneself()
    if number.startswith(("6/", "7/")):
        test_lost_ranks.wait_for_others = lambda *_: None  # they wait for the first replica already
    return train(killed, setup, folder)


def test_a_rank_is_lost_before_its_replica_returns(tmp_path: Path) -> None:
    """The others of it, which wait to join, end, and another replica is started."""
    setup = HSDP._replace(waits=(4, 99))  # two replicas, of which one gets there
    run = functools.partial(run_ranks, die_at_first)
    check(tmp_path, (Killed(2, 3, "backward"),), setup, left=[0, 1, 2, 3], run=run)


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
    assert (able, takes) == ("yes", "yes")
    assert of_torch.endswith("cannot begin a forward of FSDP2 again (2.13 can)")
    assert of_fp16 == "the ranks of a replica exchange overflows of fp16 in each step"
    assert of_optimizers == "its model has several optimizers, and a rank may be lost between their steps"
