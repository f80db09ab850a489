"""Loaders and samplers that a script constructs by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from accel_trainer import Accelerator, DataLoaderConfiguration, GradientState
from accel_trainer.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    PreparedDataLoader,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_trainer.errors import ConfigError
from tests.number_sets import Sized
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "accel_trainer.data_loader")


@settings(max_examples=40)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_shards_of_a_stream_are_the_stream_in_rounds(
    length: int, batch_size: int, ranks: int, drop_last: bool, split: bool
):
    size = batch_size * ranks if split else batch_size
    shards = [IterableDatasetShard(Sized(length), size, drop_last, ranks, rank, split) for rank in range(ranks)]
    read = [list(shard) for shard in shards]
    assert {len(each) for each in read} == {len(shards[0])}
    pieces = [[each[i : i + batch_size] for i in range(0, len(each), batch_size)] for each in read]
    joined = [item for step in zip(*pieces, strict=True) for piece in step for item in piece]
    full = length // (batch_size * ranks) * batch_size * ranks
    wanted = range(full if drop_last else length)
    assert joined[: len(wanted)] == list(wanted)
    repeats = joined[len(wanted) :]
    assert repeats == list(itertools.islice(itertools.cycle(range(min(length, batch_size * ranks))), len(repeats)))
    assert len(repeats) < batch_size * ranks


@pytest.mark.parametrize("batch_size", [1, 3])  # of 1, every shard would get nothing
def test_a_stream_that_shards_cannot_share_is_refused(batch_size: int):
    with pytest.raises(ConfigError, match=f"batch_size={batch_size} is no round multiple of 2; choose such"):
        IterableDatasetShard(Sized(4), batch_size, num_processes=2, split_batches=True)


def test_a_batch_sampler_without_its_first_batches():
    sampler = SkipBatchSampler(BatchSampler(range(10), 4, drop_last=False), 2)
    assert (list(sampler), list(sampler), len(sampler), sampler.total_length) == ([[8, 9]], [[8, 9]], 1, 3)
    shards = [BatchSamplerShard(BatchSampler(range(10), 2, False), 2, rank, even_batches=True) for rank in range(2)]
    assert [list(shard)[-1] for shard in shards] == [[8, 9], [0, 1]]


def test_a_seed_by_either_name():
    data = range(20)
    assert list(SeedableRandomSampler(data, 3)) == list(SeedableRandomSampler(data, data_seed=3))
    torch.manual_seed(5)
    assert list(SeedableRandomSampler(data)) == list(SeedableRandomSampler(data, 5))


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_made_by_hand_tells_where_a_pass_ends(kind: Any):
    loader = kind(list(range(10)), batch_size=4)
    assert isinstance(loader, kind)
    assert isinstance(loader, DataLoader | DataLoaderStateMixin)
    assert isinstance(loader.base_dataloader, DataLoader)
    assert not hasattr(kind, "base_dataloader")
    for _ in range(2):
        ends = [(batch.tolist()[0], loader.end_of_dataloader, loader.gradient_state.in_dataloader) for batch in loader]
        assert ends == [(0, False, True), (4, False, True), (8, True, True)]
    assert loader.iteration == 2
    assert not loader.gradient_state.in_dataloader
    assert GradientState().__dict__ is loader.gradient_state.__dict__


def test_loaders_of_prepare_are_instances_by_how_they_are_read():
    for dispatch in (None, False, True):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(range(4)))
        assert isinstance(loader, DataLoaderDispatcher if dispatch else DataLoaderShard)
        assert not isinstance(loader, DataLoaderShard if dispatch else DataLoaderDispatcher)
        assert loader.gradient_state is accelerator.gradient_state
    assert not isinstance(DataLoader(range(4)), DataLoaderShard)


def test_first_batches_are_skipped():
    assert [each.tolist() for each in SkipDataLoader(range(8), batch_size=3, skip_batches=2)] == [[6, 7]]
    assert [each.tolist() for each in DataLoaderShard(range(8), batch_size=3, skip_batches=1)] == [[3, 4, 5], [6, 7]]
    skipping = skip_first_batches(skip_first_batches(DataLoader(range(8), batch_size=2), 1), 2)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    prepared = accelerator.prepare(skipping)
    assert [each.tolist() for each in prepared] == [[6, 7]]
    assert len(list(prepared)) == 4
    assert prepared.dispatches


def test_shards_without_an_accelerator_of_a_loader_with_a_generator_of_its_own():
    shards = [
        prepare_data_loader(
            DataLoader(range(8), 2, shuffle=True, generator=torch.Generator().manual_seed(3)), None, 2, rank
        )
        for rank in range(2)
    ]
    first, second = ([batch.tolist() for batch in shard] for shard in shards)
    whole = DataLoader(range(8), 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert [batch for pair in zip(first, second, strict=True) for batch in pair] == [each.tolist() for each in whole]


@pytest.mark.parametrize("even", [False, True])
def test_shards_without_an_accelerator(even: bool):
    loader = DataLoader(range(10), batch_size=4)
    shards = [prepare_data_loader(loader, None, 2, rank, even_batches=even) for rank in range(2)]
    read = [[batch.tolist() for batch in shard] for shard in shards]
    assert read[0] == [[0, 1, 2, 3], [8, 9, 0, 1] if even else [8, 9]]
    assert read[1][0] == [4, 5, 6, 7]
    loader = DataLoader(range(8), sampler=RandomSampler(range(8)), batch_size=2)
    prepared = prepare_data_loader(loader, use_seedable_sampler=False, data_seed=1, even_batches=even)
    assert get_sampler(prepared) is get_sampler(loader) is loader.sampler


def on_two_ranks() -> Any:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="left out 1 batches of a DataLoader that was not prepared, and a step of 2"):
        accelerator.prepare(skip_first_batches(DataLoader(range(8), batch_size=2), 1))
    with pytest.raises(ConfigError, match=r"DataLoaderDispatcher\(split_batches=True\)"):
        DataLoaderDispatcher(range(8), split_batches=True)
    rank = accelerator.process_index
    own = accelerator.prepare(DataLoaderShard([10 * rank + i for i in range(4)], batch_size=2))
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in own]
    dispatched: Any = DataLoaderDispatcher(range(8), batch_size=2)
    assert isinstance(own, PreparedDataLoader)
    batches: list[Tensor] = list(dispatched)
    return gathered, [batch.tolist() for batch in batches]


def test_batches_made_by_hand_are_a_ranks_own_and_dispatched_ones_are_shared_out():
    first, second = run_ranks(on_two_ranks, 2)
    assert first[0] == second[0] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert (first[1], second[1]) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])


class _Counting(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(16))


def prepare_own_shards() -> tuple[list[int], str]:
    accelerator = Accelerator(cpu=True)
    number, rank = accelerator.num_processes, accelerator.process_index
    stream = IterableDatasetShard(_Counting(), batch_size=2, num_processes=number, process_index=rank)
    read = [row for batch in accelerator.prepare(DataLoader(stream, batch_size=2)) for row in batch.tolist()]
    sampler = DistributedSampler(range(8), shuffle=False)
    own = DataLoaderShard(range(8), batch_size=2, sampler=sampler, generator=torch.Generator())
    if accelerator.is_main_process:  # no other rank is asked
        assert [batch.tolist() for batch in accelerator.prepare(own)] == [[0, 2], [4, 6]]
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(16)), 2, False), number, rank)
    with pytest.raises(ConfigError) as refused:
        accelerator.prepare(DataLoader(list(range(16)), batch_sampler=shard))
    return read, str(refused.value)


def test_shards_that_were_made_by_hand_are_not_cut_again():
    (first, message), (second, _) = run_ranks(prepare_own_shards, 2)
    assert sorted(first + second) == list(range(16))
    assert "ShardedBatchSampler shards by rank already (num_replicas=2)" in message
