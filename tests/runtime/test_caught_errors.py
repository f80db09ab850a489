"""After an error that every rank has caught the group works if the ranks agreed on it, or says that it does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_trainer import Accelerator
from accel_trainer.errors import HangError, ProcessGroupError
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_trainer

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")


def sum_of_ones() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


class Rows(Dataset):
    """Samples, one of which cannot be read on one rank."""

    def __init__(self, bad_rank: int | None) -> None:
        self.is_bad = bad_rank == dist.get_rank()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_bad and index > 3:
            raise ValueError(f"sample {index} cannot be read")
        return torch.full((2,), float(index))


def gather_misfits() -> None:
    """Gather what does not fit together: every rank raises."""
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(Rows(None), 2)):
        accelerator.gather_for_metrics(batch[:, : 1 + accelerator.process_index])


def read_for_all() -> None:
    """Rank 0 reads for all, and cannot."""
    accelerator = Accelerator(config={"use_cpu": True, "data": {"dispatch_batches": True}})
    for batch in accelerator.prepare(DataLoader(Rows(0), 2)):
        accelerator.gather_for_metrics(batch)


def compute_metrics(directory: str) -> None:
    """Compute metrics that fail on one rank, in a Trainer's evaluation."""

    def fail(prediction: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no metric")
        return {}

    build_trainer(directory, options={"compute_metrics": fail}).evaluate()


def catch_agreed_errors(directory: str) -> list[tuple[str, float]]:
    """Return the name of each error, and a sum over the ranks behind it."""
    caught = []
    for call, args in ((gather_misfits, ()), (read_for_all, ()), (compute_metrics, (directory,))):
        with pytest.raises(Exception) as error:  # noqa: PT011  its name is returned
            call(*args)
        caught.append((error.typename, sum_of_ones()))
    return caught


@pytest.mark.multirank
def test_after_an_error_that_ranks_agreed_on_the_group_works(tmp_path: Path) -> None:
    of_gather, of_read, of_metrics = zip(*run_ranks(catch_agreed_errors, 2, str(tmp_path)), strict=True)
    assert of_gather == (("DistributedOperationException", 2.0),) * 2
    assert of_read == (("ValueError", 2.0), ("ProcessGroupError", 2.0))
    assert of_metrics == (("RemoteRankError", 2.0), ("ValueError", 2.0))


def fail_alone(directory: str) -> list[str]:
    """Evaluate; on rank 1 a sample cannot be read. All ranks catch what they get, and go on to a collective."""
    accelerator = Accelerator(config={"use_cpu": True, "timeout_seconds": 2.0})
    loader = accelerator.prepare(DataLoader(Rows(1), 2))
    said = []
    try:
        for batch in loader:
            accelerator.gather_for_metrics(batch)
    except (ValueError, HangError, ProcessGroupError) as error:
        said.append(f"{type(error).__name__}: {error}")
    rank, closed = accelerator.process_index, Path(directory, "closed")
    if rank == 0:
        closed.touch()
    while not closed.exists():  # until rank 0 has given up, and closed the connections
        time.sleep(0.05)
    try:
        accelerator.reduce(torch.ones(1))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    Path(directory, str(rank)).touch()
    while len(list(Path(directory).iterdir())) < 3:
        time.sleep(0.05)  # both live: neither is gone
    return said


@pytest.mark.multirank
def test_after_a_timeout_that_all_ranks_caught_the_message_says_that_the_group_is_closed(tmp_path: Path) -> None:
    first, second = run_ranks(fail_alone, 2, str(tmp_path))
    assert second[0] == "ValueError: sample 6 cannot be read"
    assert first[0].startswith("HangError: rank 0 waits in")
    assert "Rank 0 gives up after 2 s (timeout_seconds). No collective of the group works from here on" in first[0]
    for rank, said in enumerate((first[1], second[1])):
        assert said.startswith("ProcessGroupError: all ranks are alive, and their connections are closed"), said
        assert "let the processes end, and resume from a checkpoint (--max_restarts starts them again)" in said
        assert f"Rank {rank} stopped in" in said
