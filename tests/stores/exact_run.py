"""A loop that copies each save to a bucket, with exact updates: one process takes those of two, to the last bit."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.runtime import rank_watch
from tests.checkpoint.crash_job import acknowledged
from tests.ranks import preload

preload("accel_trainer.accelerator", "tests.stores.exact_run", "s3fs", "torch._dynamo", "torch.nn.parallel.distributed")

URI = "s3://bucket/run"
_ROWS, _WIDTH = 8, 64
# Sums and halves of small whole numbers are exact in fp64: one process takes the updates of two to the last bit.
_RATE, _MOMENTUM = 0.25, 0.5


def rows_of(update: int) -> torch.Tensor:
    """Return the rows of an update, of all processes."""
    generator = torch.Generator().manual_seed(update)
    return torch.randint(-8, 8, (_ROWS, _WIDTH), generator=generator).double()


def noise_of(rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return what a process adds to its rows, from its stream of random numbers."""
    return torch.randint(-8, 8, rows.shape, generator=generator).double()


def expected_weights(num_updates: int, *, is_noisy: bool) -> list[float]:
    """Return the weights after some updates of a plain loop over the rows of both processes."""
    weight, velocity = (torch.zeros(_WIDTH, dtype=torch.float64) for _ in range(2))
    streams = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for update in range(num_updates):
        shards = rows_of(update).chunk(2)
        if is_noisy:
            shards = tuple(rows + noise_of(rows, stream) for rows, stream in zip(shards, streams, strict=True))
        velocity = _MOMENTUM * velocity + torch.cat(shards).mean(0)
        weight -= _RATE * velocity
    return [float(value) for value in weight]


class Counted:
    """The next update, and the last that was saved, as a registered object."""

    def __init__(self) -> None:
        self.update = 0

    def state_dict(self) -> dict[str, int]:
        return {"update": self.update}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.update = state["update"]


def check_weights(model: nn.Module, num_updates: int, *, is_noisy: bool) -> None:
    found = [float(value) for value in next(model.parameters()).detach().flatten()]
    assert found == expected_weights(num_updates, is_noisy=is_noisy), f"other weights after {num_updates} updates"


def train(
    directory: Path, kill: Sequence[tuple[int, float] | None] = (None, None), num_updates: int = 100, *, is_noisy: bool
) -> int:
    """Go on from what there is, and save after each update; rank 0 notes in `acknowledged` one whose upload has ended.

    Args:
        kill: by rank, the update from the resume on in which it kills itself, and after how many seconds.

    Returns:
        The update that it begins with; `num_updates` more are done.

    Raises:
        AssertionError: an acknowledged update is lost, or weights are not those of a plain loop.
    """
    rank_watch._POLL_SECONDS = 0.1
    accelerator = Accelerator(
        cpu=True,
        config={"checkpoint_uri": URI},
        project_config=ProjectConfiguration(str(directory / "disk"), automatic_checkpoint_naming=True, total_limit=2),
    )
    rank, draw = accelerator.process_index, random.Random(0)
    last = kill[rank]
    model = nn.Linear(_WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    model, optimizer = accelerator.prepare(model, optimizer)
    counted = Counted()
    accelerator.register_for_checkpointing(counted)
    torch.manual_seed(rank)
    accelerator.load_state("auto")
    begun, last_sent = counted.update, acknowledged(directory)
    assert begun >= last_sent, f"the upload of update {last_sent} was acknowledged, and {begun} is what the store has"
    check_weights(model, begun, is_noisy=is_noisy)
    for update in range(begun, begun + num_updates):
        if last is not None and last[0] == update - begun:
            killer = threading.Timer(last[1], os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()
        rows = rows_of(update).chunk(accelerator.num_processes)[rank]
        accelerator.backward(model(rows + noise_of(rows, None) if is_noisy else rows).mean())
        optimizer.step()
        optimizer.zero_grad()
        counted.update = update + 1
        accelerator.save_state(async_=draw.random() < 0.5)
        waits = draw.random() < 0.5
        accelerator.wait_for_checkpoint()
        uploads = accelerator._checkpointer._uploads
        if uploads is not None and waits:
            uploads.wait()
            if uploads.error is None:
                (directory / "acknowledged").write_text(str(counted.update))
    check_weights(model, begun + num_updates, is_noisy=is_noisy)
    accelerator.end_training()
    return begun
