"""What was measured to go wrong elsewhere and must not here, by the numbers of the ledger of defects."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accel_trainer import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    set_seed,
)
from accel_trainer.errors import ConfigError, ProcessGroupError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def test_d13_a_schedule_is_adjusted_to_accumulation_or_the_option_is_refused():
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == 2
    message = r"adjust_scheduler=False\): a prepared scheduler steps once per update; pass"
    with pytest.raises(ConfigError, match=message):
        GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False)


def resume_in_second_epoch(folder: str, seedable: bool, seed: int) -> tuple[list[list[float]], list[list[float]]]:
    """What three epochs hold, and what is left of them after a restart in the middle of the second one."""

    def build() -> tuple[Accelerator, Any]:
        set_seed(seed)
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=7)
        )
        loader = DataLoader(torch.arange(24.0), batch_size=3, shuffle=True)
        return accelerator, accelerator.prepare(nn.Linear(1, 1), loader)[1]

    accelerator, loader = build()
    whole = []
    for epoch in range(3):
        whole.append([])
        for step, batch in enumerate(loader):
            whole[-1] += batch.tolist()
            if (epoch, step) == (1, 1):
                accelerator.save_state(folder)
    accelerator, loader = build()
    accelerator.load_state(folder)
    rest = [value for batch in accelerator.skip_first_batches(loader, 2) for value in batch.tolist()]
    return whole, [rest, [value for batch in loader for value in batch.tolist()]]


@pytest.mark.parametrize("seedable", [True, False])
def test_d6_d7_a_resumed_second_epoch_has_its_own_order_and_so_has_the_third(tmp_path: Path, seedable: bool):
    for whole, (rest, following) in run_ranks(resume_in_second_epoch, 2, str(tmp_path / "state"), seedable, 3):
        assert rest == whole[1][6:]
        assert following == whole[2]
        assert sorted(map(str, whole)) == sorted({*map(str, whole)})


def test_d17_loops_that_were_left_early_add_and_skip_no_update():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(6, 1), batch_size=1))
    for last in (0, 5, 2):
        for number, _ in enumerate(loader):
            if number == last:
                break
        assert not accelerator.gradient_state.in_dataloader
        assert accelerator.gradient_state.active_dataloader is None
    synced = []
    for _ in range(2):  # without a loader, windows are full
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    for _ in loader:
        with accelerator.accumulate(model):
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True, False, False, True, False, True]


def draw_streams(kind: str, workers: int, **options: Any) -> dict[str, Any]:
    """What a rank draws before and after its model is prepared, and in the workers of a loader."""
    accelerator = Accelerator(cpu=True, strategy="ddp")
    set_seed(3, **options)
    weights = nn.Linear(4, 4).weight.flatten().tolist()
    accelerator.prepare(nn.Linear(4, 4))
    own = [torch.rand(1).item(), float(np.random.rand()), random.random()]
    mask = nn.functional.dropout(torch.ones(64)).tolist()
    data: Any = {"map": Augmented, "shards": AugmentedShards}[kind]()
    shuffle = True if kind == "map" else None
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=shuffle, num_workers=workers))
    rows = torch.cat(list(loader))
    return {"weights": weights, "own": own, "mask": mask, "order": rows[:, 0].tolist(), "noise": rows[:, 1].tolist()}


class Augmented(torch.utils.data.Dataset):
    """Eight samples, each beside a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(1).item()])


class AugmentedShards(torch.utils.data.IterableDataset):
    """The same in two shards, of which each rank reads one."""

    def __init__(self, kept: tuple[int, ...] = (0, 1)) -> None:
        self.kept = kept
        self.num_shards = len(kept)

    def shard(self, num_shards: int, index: int) -> AugmentedShards:
        return AugmentedShards(self.kept[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in self.kept:
            yield from (Augmented()[4 * shard + index] for index in range(4))


def draw_in_each_way(kind: str, workers: int) -> list[dict[str, Any]]:
    return [draw_streams(kind, workers, **options) for options in ({}, {}, {"same_on_all_ranks": True})]


@pytest.mark.parametrize(("kind", "workers"), [("map", 0), ("map", 1), ("shards", 1)])
def test_d21_streams_are_each_ranks_own_or_equal_where_that_is_asked_for(kind: str, workers: int):
    drawn, again, same = zip(*run_ranks(draw_in_each_way, 2, kind, workers), strict=True)
    first, second = drawn
    assert first["weights"] == second["weights"]
    assert first["mask"] != second["mask"]
    assert not set(first["own"] + first["noise"]) & set(second["own"] + second["noise"])
    assert sorted(first["order"] + second["order"]) == list(range(8))
    assert again == drawn
    first, second = same
    assert first.pop("order") != second.pop("order")
    assert first == second


class RootParameter(nn.Module):
    """A parameter of its own beside that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.scale


def save_offloaded(folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True, auto_wrap_policy=lambda m: isinstance(m, nn.Linear))
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.save_model(accelerator.prepare(RootParameter()), folder)


def test_d23_an_offloaded_model_is_saved_with_the_parameters_of_its_root(tmp_path: Path):
    run_ranks(save_offloaded, 2, str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    assert sorted(weights) == ["layer.weight", "scale"]
    assert weights["scale"].tolist() == [2.0] * 4


def wrapped_blocks() -> int:
    """How many modules a policy of the user's has made units of sharding."""
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    return sum(isinstance(module, torch.distributed.fsdp.FSDPModule) for module in model.modules())


def test_d32_a_wrap_policy_of_the_users_is_followed():
    assert run_ranks(wrapped_blocks, 2) == [3, 3]


def environment_after_sharding() -> dict[str, str]:
    """What a rank's environment holds more than before, once a plugin has made a job a sharded one.

    Without what torch itself writes on its first compilation.
    """
    before = dict(os.environ)
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, state_dict_type="FULL_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.prepare(nn.Linear(2, 2))
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {name: value for name, value in changed.items() if not name.startswith("TORCHINDUCTOR_")}


def test_d33_a_sharded_job_leaves_the_environment_alone():
    assert run_ranks(environment_after_sharding, 2) == [{}, {}]


def gather_in_uneven_loop() -> tuple[list[list[float]], list[list[float]], str]:
    """What gather() returns in each step of a loop whose last one is uneven, and what it says of shapes that differ."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(torch.arange(7.0), batch_size=2))
    rows, losses, message = [], [], ""
    for batch in loader:
        rows.append(accelerator.gather(batch).tolist())
        losses.append(accelerator.gather({"loss": batch.sum()})["loss"].tolist())
        if loader.end_of_dataloader:
            with pytest.raises(ProcessGroupError) as error:
                accelerator.gather(torch.ones(len(batch), 1 + accelerator.process_index))
            message = str(error.value)
    return rows, losses, message


def test_d36_gathering_in_an_uneven_step_returns_all_rows():
    for rows, losses, message in run_ranks(gather_in_uneven_loop, 2):
        assert rows == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        assert losses == [[1.0, 5.0], [9.0, 6.0]]
        assert (
            "the ranks do not agree on leaf 0 of gather: rank 0 has rows of (1,) and torch.float32, rank 1" in message
        )
