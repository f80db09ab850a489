"""A loop goes on without a rank that was killed: the same samples in each update, and the same weights."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_trainer import Accelerator
from accel_trainer.runtime.process import find_rank
from tests.cells import crossed
from tests.ranks import RankFailure, preload, run_ranks

preload("accel_trainer.accelerator")

CONTINUE = {"ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "continue"}


class Setup(NamedTuple):
    """A run of two epochs."""

    num_steps: int = 1
    batch_size: int = 2
    even_batches: bool = True
    by_tokens: bool = False
    num_workers: int = 0
    strategy: str = "ddp"


class Killed(NamedTuple):
    """Where a rank is killed: before which call of its micro-batch `number`, counted from 0 over the epochs."""

    rank: int
    number: int
    place: str


class Centered(nn.Module):
    """Takes the mean of the micro-batch off, so that the loss is none of single samples, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return x - x.mean(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Centered(), nn.Linear(8, 1))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - x.sum(1, keepdim=True)).square()


def build(setup: Setup) -> Any:
    torch.manual_seed(0)
    options = {"data": {"even_batches": setup.even_batches}, "strategy": setup.strategy}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setup.num_steps, config=options)
    data = [{"index": i, "x": torch.randn(4, generator=torch.Generator().manual_seed(i)).double()} for i in range(30)]
    net = Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, setup.batch_size, shuffle=True, num_workers=setup.num_workers)
    return accelerator, net, *accelerator.prepare(net, optimizer, loader, scheduler)


def train(killed: tuple[Killed, ...], setup: Setup, folder: Path | None = None, spoils: bool = False) -> Any:
    """Return parameters, updates, size of the job and rank; write which samples were taken into which update."""
    accelerator, net, model, optimizer, loader, scheduler = build(setup)
    launched_as, number, updates, attempt = find_rank(), 0, 0, 0

    def pass_place(name: str) -> None:
        if Killed(launched_as, number, name) in killed:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):
        for inputs in loader:
            valid = loader.rows.rows[accelerator.process_index]
            if folder is not None:
                with open(folder / str(launched_as), "a") as file:
                    file.write(json.dumps([updates, attempt, inputs["index"][:valid].tolist()]) + "\n")
            pass_place("data")
            with accelerator.accumulate(model):
                losses = model(**inputs)
                pass_place("backward")
                loss = losses.mean()
                if setup.by_tokens:
                    loss = accelerator.global_token_mean(losses.sum(), losses.numel())
                accelerator.backward(loss)
                pass_place("optimizer")
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if spoils and launched_as == 0 and number == 2:
                accelerator.lost_ranks.num_updates += 1
            pass_place("gather")
            assert len(accelerator.gather(torch.ones(1))) == accelerator.num_processes
            if accelerator.sync_gradients:
                updates, attempt = updates + 1, 0
            elif loader.num_given == 0:  # a rank was lost
                attempt += 1
            pass_place("callback")
            number += 1
    values = {name: value.detach().clone() for name, value in net.named_parameters()}
    assert updates == scheduler.last_epoch
    facts = updates, accelerator.num_processes, accelerator.process_index
    accelerator.end_training()
    return values, *facts


def samples_of_updates(folder: Path) -> list[list[int]]:
    """Return the samples of each update's last attempt, over all ranks, those that were killed included."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in folder.iterdir():
        for update, attempt, samples in map(json.loads, path.read_text().splitlines()):
            found.setdefault((update, attempt), []).extend(samples)
    return [sorted(found[each]) for each in dict(sorted(found)).items()]  # the last attempt of each update


@cache
def undisturbed(setup: Setup, world_size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train, world_size, (), setup, Path(folder))[0], samples_of_updates(Path(folder))


def check(folder: Path, killed: tuple[Killed, ...], setup: Setup, world_size: int = 4) -> None:
    (expected, *_), samples = undisturbed(setup, world_size)
    results = run_ranks(train, world_size, killed, setup, folder, env=CONTINUE, outlives=True, timeout=90)
    left = [rank for rank in range(world_size) if rank not in {each.rank for each in killed}]
    assert samples_of_updates(folder) == samples
    for number, rank in enumerate(left):
        values, *numbers = results[rank]
        assert numbers == [len(samples), len(left), number]
        for name, value in expected.items():
            bound = 1e-6 if setup.by_tokens else 1e-12  # the factor of tokens is float32
            assert (values[name] - value).abs().max() < bound, name
        assert all(map(torch.equal, values.values(), results[left[0]][0].values()))


@pytest.mark.parametrize(("place", "rank"), crossed(["data", "backward", "optimizer", "gather", "callback"], [0, 2]))
def test_updates_are_those_of_the_run_without_a_loss(place: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, (Killed(rank, 3, place),), Setup())


@pytest.mark.parametrize(
    "setup",
    [
        Setup(num_steps=3),
        Setup(num_steps=2, batch_size=3, even_batches=False),
        Setup(num_steps=2, by_tokens=True, even_batches=False),
        Setup(num_workers=2),
    ],
    ids=str,
)
def test_windows_of_several_micro_batches_begin_again(setup: Setup, tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 4, "backward"),), setup)


def test_loses_rank_after_rank_until_one_is_left(tmp_path: Path) -> None:
    check(tmp_path, (Killed(3, 2, "data"), Killed(0, 6, "backward"), Killed(1, 15, "callback")), Setup())


def test_begins_the_first_update_again(tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 0, "backward"),), Setup(), world_size=2)


def test_ranks_at_different_updates_give_up_together() -> None:
    with pytest.raises(
        RankFailure, match="some had completed an update, or a collective, that others had not"
    ) as failed:
        run_ranks(train, 4, (Killed(2, 3, "backward"),), Setup(), spoils=True, env=CONTINUE, outlives=True)
    assert len(failed.value.failures) == 3
