"""How often ranks exchange something in a step: as often as plain PyTorch, unless a feature is used that needs more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, profiler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration, PartialState
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

NUM_STEPS = 4


class Stream(IterableDataset):
    """Samples in a row; every rank reads all of them and keeps its part."""

    num_shards = 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(4 * NUM_STEPS, 4)


class Shards(Stream):
    """Two shards, one for each rank."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream()


def count(run: Callable[[], None]) -> int:
    """Run a pass to warm up, then another one; return how many collectives the second took."""
    run()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recorder:
        run()
    return sum(event.count for event in recorder.key_averages() if event.key.startswith("c10d::"))


def plain(sharded: bool) -> int:
    """Count those of a loop in plain PyTorch."""
    PartialState(cpu=True)
    model = nn.Linear(4, 1)
    if sharded:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(4 * NUM_STEPS, 4))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))

    def run() -> None:
        for (batch,) in loader:
            model(batch).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return count(run)


def ours(feature: str = "", strategy: str = "ddp", stream: Stream | None = None, **options: Any) -> int:
    """Count those of the same loop with an Accelerator, and with one feature more."""
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = stream or torch.ones(4 * NUM_STEPS, 4)
    loader = DataLoader(data, batch_size=2, shuffle=None if stream else True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def run() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                losses = model(batch)
                loss = losses.mean()
                if feature == "global_token_mean":
                    loss = accelerator.global_token_mean(losses.sum(), len(batch))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if feature == "check_trigger":
                accelerator.check_trigger()
            if feature == "gather_for_metrics":
                accelerator.gather_for_metrics(losses)
            if feature == "gather_for_metrics of a pair":
                accelerator.gather_for_metrics((batch, losses))
            if feature == "gather_for_metrics of logits":
                accelerator.gather_for_metrics((losses, torch.ones(len(batch), 1000)))
            if feature == "gather_for_metrics, padded":
                accelerator.gather_for_metrics(losses, pad_index=0)
            if feature == "gather_for_metrics of strings":
                accelerator.gather_for_metrics({"loss": losses, "text": ["a"] * len(batch)})

    return count(run)


def count_everything() -> dict[str, int]:
    """Count all loops on this rank."""
    uneven = DataLoaderConfiguration(even_batches=False)
    return {
        "plain ddp": plain(sharded=False),
        "plain fsdp2": plain(sharded=True),
        "ddp": ours(),
        "fsdp2": ours(strategy="fsdp2"),
        "uneven": ours(dataloader_config=uneven),
        "stream": ours(stream=Stream()),
        "shards": ours(stream=Shards()),
        "bf16": ours(mixed_precision="bf16"),
        "accumulation": ours(gradient_accumulation_steps=2),
        "global_token_mean": ours("global_token_mean"),
        "check_trigger": ours("check_trigger"),
        "gather_for_metrics": ours("gather_for_metrics"),
        **{
            name: ours(name)
            for name in (
                f"gather_for_metrics{what}" for what in (" of a pair", " of logits", ", padded", " of strings")
            )
        },
        "dispatch": ours(stream=Stream(), dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
        "rng_types": ours(rng_types=["torch"]),
        "debug": ours("gather_for_metrics", config={"debug": True}),
    }


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    """What one of two ranks counted."""
    return run_ranks(count_everything, 2, timeout=100)[0]


@pytest.mark.parametrize("loop", ["ddp", "uneven", "stream", "bf16"])
def test_a_step_takes_the_collectives_of_plain_pytorch(counts: dict[str, int], loop: str):
    assert counts[loop] == counts["plain ddp"] == NUM_STEPS


def test_a_sharded_step_takes_those_of_fully_shard(counts: dict[str, int]):
    assert counts["fsdp2"] == counts["plain fsdp2"]


def test_accumulation_exchanges_once_for_each_window(counts: dict[str, int]):
    assert counts["accumulation"] == NUM_STEPS // 2


@pytest.mark.parametrize(
    ("feature", "per_step", "per_pass"),
    [
        ("global_token_mean", 1, 0),
        ("check_trigger", 1, 0),
        ("gather_for_metrics", 1, 0),
        ("gather_for_metrics of a pair", 1, 0),  # small tensors travel with the comparison of shapes
        ("gather_for_metrics of logits", 2, 0),
        ("rng_types", 0, 1),
    ],
)
def test_a_feature_adds_what_the_page_says(counts: dict[str, int], feature: str, per_step: int, per_pass: int):
    assert counts[feature] - counts["ddp"] == per_step * NUM_STEPS + per_pass


def test_debug_compares_calls_beside_the_collectives(counts: dict[str, int]):
    assert counts["debug"] == counts["gather_for_metrics"]


@pytest.mark.parametrize(
    ("feature", "per_step"),
    [("gather_for_metrics of strings", 2), ("gather_for_metrics, padded", 2), ("dispatch", 2), ("shards", 1)],
)
def test_what_sends_objects_or_shapes_takes_more(counts: dict[str, int], feature: str, per_step: int):
    assert counts[feature] >= counts["ddp"] + per_step * NUM_STEPS
