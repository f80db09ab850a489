"""A run that saves again and again, to be killed; and what must be found on disk afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint.manifest import Manifest, check_files, refuse_extra_files
from accel_trainer.checkpoint.store import numbered_checkpoints
from accel_trainer.errors import CheckpointNotFoundError
from accel_trainer.runtime import rank_watch
from tests.ranks import RankFailure, preload, run_ranks

preload(
    "accel_trainer.accelerator",
    "accel_trainer.strategies.ddp",
    "tests.checkpoint.crash_job",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
)


class SavedRun:
    """Every number in it is the step: a checkpoint with two different ones is a mixture."""

    def __init__(self, directory: Path, total_limit: int | None = 1, config: dict[str, Any] | None = None) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            config=config,
            project_config=ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=total_limit),
        )
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.count = -1
        self.accelerator.register_for_checkpointing(counter=self)
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def numbers(self) -> list[torch.Tensor]:
        momenta = [entry["momentum_buffer"] for entry in self.optimizer.state.values()]
        return [*(parameter.data for parameter in self.model.parameters()), *momenta]

    def fill(self, step: int) -> None:
        self.count = step
        for tensor in self.numbers():
            tensor.fill_(step)

    def step_held(self) -> int:
        held = {self.count, *(value for tensor in self.numbers() for value in tensor.flatten().tolist())}
        assert len(held) == 1, f"a mixture of the steps {sorted(held)}"
        return self.count


def save_repeatedly(
    directory: Path,
    saves: int,
    *,
    first: int = 0,
    explicit: bool = False,
    kill: tuple[float | None, ...] = (),
    async_: bool = False,
) -> list[str]:
    """Save `saves` times; rank 0 notes in `acknowledged` what was told to be saved. Returns the paths.

    Args:
        first: the first step's number.
        explicit: to one directory, over and over, instead of numbered ones of which the last is kept.
        kill: seconds after which a rank kills itself, None for never, by rank.
    """
    rank_watch._POLL_SECONDS = 0.1  # who is gone is known after five of them
    run = SavedRun(directory)
    rank = run.accelerator.process_index
    if kill and kill[rank] is not None:
        killer = threading.Timer(kill[rank], os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    paths = []
    for step in range(first, first + saves):
        run.fill(step)
        target = directory / "explicit" if explicit else None
        paths.append(str(run.accelerator.save_state(target, async_=async_)))
        if async_:
            run.fill(-5)
            run.accelerator.wait_for_checkpoint()
        if rank == 0:
            (directory / "acknowledged").write_text(str(step))
    return paths


def acknowledged(directory: Path) -> int:
    path = directory / "acknowledged"
    # A kill can fall between the file's creation and its text: the step before was told then.
    return int(path.read_text() or "0") if path.exists() else -1


def assert_survived(directory: Path, *, explicit: bool = False) -> int:
    """The newest good checkpoint is at least the last acknowledged one, of one step, and nothing published is broken.

    Then a new run saves, and what the dead one left is gone. Returns the step.
    """
    last = acknowledged(directory)
    run = SavedRun(directory)
    source = directory / "explicit" if explicit else None
    try:
        run.accelerator.load_state(source)
        held = run.step_held()
    except CheckpointNotFoundError:
        held = -1
    assert held >= last, f"step {last} was acknowledged, and {held} is what is left"
    assert not list(directory.rglob("_bad-*"))
    for _, path in numbered_checkpoints(directory / "checkpoints"):
        manifest = Manifest.read(path)
        refuse_extra_files(path, manifest)
        check_files(path, manifest, manifest.files, "full", 1)
    run.fill(held + 1)
    run.accelerator.save_state(source)
    assert not list(directory.rglob(".*"))
    return held


def kill_at_random(directory: Path, seed: int) -> bool:
    """Kill one rank or both at a random moment of a run that saves all the time; whether it is to one directory."""
    draw = random.Random(seed)
    delay = draw.uniform(0.0, 0.5)
    kill = draw.choice([(delay, delay), (delay, delay), (delay, None), (None, delay)])
    explicit, async_ = draw.random() < 0.4, draw.random() < 0.4
    try:
        run_ranks(save_repeatedly, 2, directory, 10_000, explicit=explicit, async_=async_, kill=kill, timeout=30)
    except RankFailure:
        return explicit
    raise AssertionError("nothing was killed")


def random_kill(directory: Path, seed: int) -> int:
    """Kill a run as `kill_at_random` does; return the step that survived."""
    return assert_survived(directory, explicit=kill_at_random(directory, seed))
