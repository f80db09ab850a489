"""How many collectives a step costs beside those of plain PyTorch: none in the common path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from tests.ranks import run_ranks


class Stream(IterableDataset):
    num_shards = 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


class Shards(Stream):
    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream()


def count(function: Callable[[], Any]) -> int:
    """Return how many collectives of the default group a function starts; the group numbers them."""
    group = dist.distributed_c10d._get_default_group()
    before = group._get_sequence_number_for_group()
    function()
    return group._get_sequence_number_for_group() - before


def count_steps(accelerator: Accelerator, dataset: Any, **options: Any) -> int:
    loader = accelerator.prepare(DataLoader(dataset, 4, **options))
    return count(lambda: [None for _ in loader])


def count_everything() -> dict[str, int]:
    accelerator = Accelerator(cpu=True)
    counts = {
        "map": count_steps(accelerator, range(32), shuffle=True),
        "stream": count_steps(accelerator, Stream()),
        "shards": count_steps(accelerator, Shards()),
    }
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    counts["dispatch"] = count_steps(dispatching, range(32))
    pair = (torch.ones(4, 3), torch.ones(4))
    for _ in accelerator.prepare(DataLoader(range(16), 4)):
        counts["gather_for_metrics"] = count(lambda: accelerator.gather_for_metrics(pair))
        counts["ragged"] = count(lambda: accelerator.gather_for_metrics(pair, pad_index=0))
        counts["strings"] = count(lambda: accelerator.gather_for_metrics((*pair, ["a"] * 4)))
    return counts


def train() -> tuple[int, int]:
    """Count the collectives of two updates of two micro-batches, by hand with DDP and with an Accelerator."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = torch.ones(2, 4)
    by_hand = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    ours = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))

    def hand_step() -> None:
        for _ in range(2):
            with by_hand.no_sync():
                by_hand(inputs).sum().backward()
            by_hand(inputs).sum().backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
            by_hand.zero_grad()

    def our_step() -> None:
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    hand_step()
    our_step()
    return count(hand_step), count(our_step)


def count_all() -> tuple[dict[str, int], tuple[int, int]]:
    return count_everything(), train()


@pytest.mark.multirank
def test_the_common_path_adds_no_collective_to_a_step() -> None:
    for counts, (by_hand, ours) in run_ranks(count_all, 2):
        assert (counts["map"], counts["stream"]) == (0, 0)
        assert counts["gather_for_metrics"] == 2, "one for each tensor"
        assert counts["shards"] >= 4, "one exchange for each step"
        assert counts["dispatch"] >= 4
        assert counts["ragged"] > counts["gather_for_metrics"]
        assert counts["strings"] > counts["gather_for_metrics"]
        assert ours == by_hand == 2
