"""Loaders on one process: what a prepared loader adds to a batch, and what it costs to begin in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from timing import SHORT, Row, interleave, ratio_row
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer import Accelerator

BATCH_SIZE = 16
NUM_BATCHES, SKIPPED = 200_000, 190_000
SKIP_BOUND_SECONDS = 0.010


class Numbers(IterableDataset[int]):
    """The cheapest stream there is: bare integers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def _iteration(accelerator: Accelerator, build: Callable[[], DataLoader], rounds: int) -> dict[str, list[float]]:
    def read(loader: DataLoader) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                pass

        return run

    return interleave({"plain": read(build()), "ours": read(accelerator.prepare(build()))}, SHORT * rounds)


def _skip(accelerator: Accelerator, batch_size: int, shuffle: bool, rounds: int) -> list[float]:
    loader = accelerator.prepare(DataLoader(range(NUM_BATCHES * batch_size), batch_size, shuffle=shuffle))
    skip = {"skip": lambda: next(iter(accelerator.skip_first_batches(loader, SKIPPED)))}
    return interleave(skip, rounds)["skip"]


def measure(rounds: int) -> list[Row]:
    """Compare passes with those of the `DataLoader` that was prepared, and skipping with 10 ms."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    tensors = TensorDataset(torch.randn(6400, 32), torch.randn(6400, 1))
    loaders: dict[str, Callable[[], DataLoader]] = {
        "prepared loader, shuffled": lambda: DataLoader(tensors, BATCH_SIZE, shuffle=True),
        "prepared loader, bare integers": lambda: DataLoader(range(32_000), BATCH_SIZE),
        "prepared stream of bare integers": lambda: DataLoader(Numbers(32_000), BATCH_SIZE),
    }
    rows = []
    for name, build in loaders.items():
        seconds = _iteration(accelerator, build, rounds)
        rows.append(ratio_row(name, "plain DataLoader", seconds["ours"], seconds["plain"], 1.10))
    limit = [SKIP_BOUND_SECONDS] * rounds
    for name, batch_size, shuffle in (("in order", 16, False), ("shuffled", 4, True)):
        taken = _skip(accelerator, batch_size, shuffle, rounds)
        rows.append(ratio_row(f"skip to batch 190,000, {name}", "10 ms", taken, limit, 1.0))
    return rows
