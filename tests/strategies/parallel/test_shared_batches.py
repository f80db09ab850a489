"""Ranks that compute one model together read the same samples, and draw the same numbers."""

from __future__ import annotations

import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from accel_trainer import Accelerator, ParallelismConfig, set_seed
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(np.random.rand())


def read(accelerator: Accelerator, loader: DataLoader[Any]) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in accelerator.prepare(loader)]


def share_batches() -> tuple[Any, list[str]]:
    """Return what this rank reads and draws, which has to be what the other does, and what is refused."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    data = TensorDataset(torch.arange(8))
    drawn: list[Any] = [read(accelerator, DataLoader(Augmented(), batch_size=2))]  # nobody has seeded
    generator = torch.Generator()
    generator.seed()
    shuffled = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True, generator=generator))
    drawn += [[batch[0].tolist() for batch in shuffled] for _ in range(2)]
    drawn.append(read(accelerator, DataLoader(data, batch_size=2, shuffle=True)))
    set_seed(1, device_specific=True)
    drawn += [torch.rand(2).tolist(), random.random(), float(np.random.rand())]
    with accelerator.state.split_between_processes(["a", "b"]) as part:
        drawn.append(part)
    by_rank = {"rank": accelerator.process_index, "world_size": 2}
    stream = split_dataset_by_node(
        datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2), **by_rank
    )
    refused = []
    for options in ({"dataset": data, "sampler": DistributedSampler(data)}, {"dataset": stream}):
        with pytest.raises(ConfigError) as error:
            accelerator.prepare(DataLoader(batch_size=2, **options))
        refused.append(str(error.value))
    return drawn, refused


def test_ranks_of_one_model_read_and_draw_the_same() -> None:
    (first, refused), (second, _) = run_ranks(share_batches, 2)
    assert first == second
    assert "DistributedSampler shards by rank already (num_replicas=2), and 2 ranks read the same batches" in refused[0]
    assert "yields the part of one rank of 2, and ranks of one model share batches here, so that 1 of" in refused[1]


def draw_apart(seed: int | None) -> tuple[float, float]:
    if seed is not None:
        set_seed(seed)
    Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    return random.random(), torch.rand(1).item()


def test_streams_that_were_seeded_alike_are_left_as_they_are() -> None:
    first, second = run_ranks(draw_apart, 2, 7)
    set_seed(7)
    assert first == second == (random.random(), torch.rand(1).item())


def sizes_of_axes() -> tuple[int, int, int, int]:
    accelerator = Accelerator(cpu=True, config={"strategy": "fsdp2", "parallel": {"dp_replicate_size": 1}})
    found = accelerator.parallelism_config
    return found.dp_shard_size, found.total_size, found.data_parallel_size, accelerator.torch_device_mesh.size()


def test_a_size_that_takes_the_ranks_that_are_left_is_shown_as_it_is() -> None:
    assert run_ranks(sizes_of_axes, 2) == [(2, 2, 2, 2)] * 2


def test_what_is_not_offered_of_tensor_parallelism_is_refused() -> None:
    handler = {"enable_async_tp": True}
    with pytest.raises(ConfigError, match="parallelism_config has enable_async_tp=True, and tensor parallelism here"):
        ParallelismConfig.of({"tp_size": 2, "tp_handler": handler}).explicit()
