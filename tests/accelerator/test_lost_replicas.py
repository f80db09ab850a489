"""A loop of HSDP goes on without the replica that has lost a rank: the same samples in each update, and weights."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_trainer.runtime.process import find_rank
from accel_trainer.runtime.rank_loss import Survivors
from accel_trainer.strategies.fsdp2.unit import FSDP2Unit
from tests.accelerator.test_lost_ranks import CONTINUE, REPLACE, Killed, Setup, build, check, train
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


# Beyond the sample what the tests below lose ranks at, too; before a backward as within it, where the others wait.
BELOW = ("forward", "backward", "reduction", "vote", "callback")


@pytest.mark.parametrize(
    ("place", "rank"),
    [cell if is_beyond(cell) or cell.values[0] not in BELOW else beyond(cell) for cell in crossed(PLACES, [0, 3])],
)
def test_updates_are_those_of_the_run_without_a_loss(place: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, (Killed(rank, 3, place),), HSDP, left=without(rank))


@pytest.mark.parametrize(
    ("place", "setup"),
    crossed(
        ["forward", "reduction", "vote"],
        [
            HSDP._replace(num_steps=3, gathers=False),
            HSDP._replace(num_steps=2, by_tokens=True, even_batches=False),
            HSDP._replace(ema_decay=0.5),
        ],
    ),
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


@pytest.mark.parametrize("place", ["forward", "gather", "callback"])
def test_a_rank_that_had_voted_steps_where_others_have(place: str, tmp_path: Path) -> None:
    number = 3 if place == "forward" else 2
    setup = HSDP._replace(gathers=place == "gather")
    check(tmp_path, (Killed(2, number, place),), setup, left=[0, 1], run=functools.partial(run_ranks, train_voting))


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
