"""Uneven data never hangs and never counts wrongly: a step's gradient is the mean over the samples that it holds."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import ConfigError, ProcessGroupError
from tests.cells import crossed
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Ready(IterableDataset):
    """Batches that are ready, of unequal sizes."""

    def __iter__(self) -> Any:
        for begin, size in ((0, 4), (4, 3), (7, 1)):
            yield torch.arange(begin, begin + size)


class Rows(IterableDataset):
    """The samples of a dataset as a stream."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return map(self.dataset.__getitem__, range(len(self.dataset)))


def build(num_samples: int = 13) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return a model, its optimizer and samples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.randn(num_samples, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, x.sum(dim=1, keepdim=True))


def plain_loop(num_samples: int) -> list[float]:
    """Train on global batches of 4."""
    model, optimizer, data = build(num_samples)
    for x, y in DataLoader(data, batch_size=4):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def train_uneven(strategy: str, is_default: bool, num_samples: int) -> dict[str, Any]:
    """Train by default, or filled up but for the context; return weights, batch sizes, and the setting afterwards."""
    filled_up = None if is_default else DataLoaderConfiguration(even_batches=True)
    accelerator = Accelerator(cpu=True, strategy=strategy, dataloader_config=filled_up)
    model, optimizer, data = build(num_samples)
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    context = nullcontext() if is_default else accelerator.join_uneven_inputs([model], even_batches=False)
    with context:
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics(y).flatten().tolist())
    weights = [value for t in accelerator.get_state_dict(model).values() for value in t.flatten().tolist()]
    ready = accelerator.prepare(DataLoader(Ready(), batch_size=None))
    items = [(accelerator.gather_for_metrics(batch).tolist(), len(accelerator.gather(batch))) for batch in ready]
    return {
        "weights": weights,
        "sizes": [len(rows) for rows in seen],
        "after": loader.batch_sampler.even_batches,
        "ready": [number for numbers, _ in items for number in numbers],
        "gathered": sum(count for _, count in items),
    }


@pytest.mark.parametrize(
    ("strategy", "ranks", "rest", "is_default"),
    crossed([("single", 1, 1), ("ddp", 2, 1), ("ddp", 2, 2), ("ddp", 2, 3), ("fsdp2", 2, 1)], [True, False]),
)
def test_ranks_with_fewer_samples_or_none_take_part_and_count_those(
    strategy: str, ranks: int, rest: int, is_default: bool
):
    results = run_ranks(train_uneven, ranks, strategy, is_default, 12 + rest)
    assert results[0]["weights"] == pytest.approx(plain_loop(12 + rest), abs=1e-6)
    for result in results:
        assert result["sizes"] == [4, 4, 4, rest]
        assert result["after"] is not is_default
        assert result["ready"] == list(range(8))
        assert result["gathered"] >= 8  # the last batch is lent to a rank that has none


def test_loaders_are_left_as_they_are_unless_told(caplog: pytest.LogCaptureFixture):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    loader, stream = accelerator.prepare(DataLoader(build()[2]), DataLoader(Ready()))
    with accelerator.join_uneven_inputs():
        assert loader.batch_sampler.even_batches
    with caplog.at_level(logging.WARNING), accelerator.join_uneven_inputs(even_batches=False):
        assert not loader.batch_sampler.even_batches
    assert loader.batch_sampler.even_batches
    assert "leaves loaders of iterable datasets alone" in caplog.text
    assert len(list(stream)) == 3


def train_with_batch_norm(is_stream: bool, splits: bool, num_samples: int) -> list[int]:
    """Train with statistics of each batch, and return how many samples counted in each step."""
    accelerator = Accelerator(cpu=True, split_batches=splits)
    data = build(num_samples)[2]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Rows(data) if is_stream else data, batch_size=8 if splits else 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts = []
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(accelerator.gather_for_metrics(y)))
    return counts


@pytest.mark.multirank
@pytest.mark.parametrize(("is_stream", "splits"), [(False, False), (False, True), (True, False)])
def test_a_rank_without_samples_trains_a_batch_norm_that_wants_several(is_stream: bool, splits: bool):
    assert run_ranks(train_with_batch_norm, 2, is_stream, splits, 12) == [[8, 4]] * 2


def gather_repeated(num_samples: int) -> tuple[list[float], list[float], list[float]]:
    """Gather each batch's mean, repeated as for a full batch of 4, and two rows for each sample, in separate passes."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(float(num_samples)), batch_size=4))
    means = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
    both = [accelerator.gather_for_metrics((batch.mean().repeat(4), batch)) for batch in loader]
    twice = [accelerator.gather_for_metrics(batch.repeat_interleave(2)) for batch in loader]
    assert torch.cat([batch for _, batch in both]).tolist() == list(range(num_samples))
    return torch.cat(means).tolist(), torch.cat([mean for mean, _ in both]).tolist(), torch.cat(twice).tolist()


@pytest.mark.multirank
@pytest.mark.parametrize("num_samples", [9, 10, 12, 13, 15])
def test_a_loss_repeated_for_each_sample_of_a_full_batch_counts_each_sample_once(num_samples: int):
    batches = [range(begin, min(begin + 4, num_samples)) for begin in range(0, num_samples, 4)]
    expected = [sum(batch) / len(batch) for batch in batches for _ in batch]
    twice = [float(sample) for sample in range(num_samples) for _ in range(2)]
    alone = run_ranks(gather_repeated, 1, num_samples)
    for means, both, rows in [*alone, *run_ranks(gather_repeated, 2, num_samples)]:
        assert means == both == expected
        assert rows == twice


def gather_single_step(num_samples: int) -> tuple[list[float], list[float], str]:
    """Gather a mean of one step as for a full batch of 4, two equal rows for each sample, and four that differ."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(float(num_samples)), batch_size=4))
    means, twice, error = torch.empty(0), torch.empty(0), ""
    for batch in loader:
        means = accelerator.gather_for_metrics(batch.mean().repeat(4))
        twice = accelerator.gather_for_metrics(torch.ones(2 * len(batch)))
        try:
            accelerator.gather_for_metrics(torch.arange(4.0))
        except (ConfigError, ProcessGroupError) as raised:
            error = str(raised)
    return means.tolist(), twice.tolist(), error


@pytest.mark.multirank
@pytest.mark.parametrize("num_samples", [3, 5, 6])
def test_a_repeated_loss_of_a_pass_of_one_step_counts_each_sample_once(num_samples: int):
    batches = [range(begin, min(begin + 4, num_samples)) for begin in range(0, num_samples, 4)]
    expected = [sum(batch) / len(batch) for batch in batches for _ in batch]
    for means, twice, error in run_ranks(gather_single_step, 2, num_samples):
        assert means == expected
        assert twice == [1.0] * 2 * num_samples
        assert "row(s)" in error or "cannot be gathered" in error
