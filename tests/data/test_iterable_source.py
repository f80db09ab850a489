from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_sharding

from accel_trainer.data import PreparedDataLoader, skip_first_batches
from accel_trainer.data.iterable_reader import is_sharded_by_rank, num_shards_of
from accel_trainer.errors import ConfigError
from tests.cells import crossed
from tests.number_sets import SEED, Drawing, Sized, Stream, hub_stream, prepare, valid_ids


class Epochs(Stream):
    """Starts at 100 times the epoch it was told."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.told = 0

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.told, 100 * self.told + self.num_samples))


class OwnGenerator(Stream):
    """Draws its order from an attribute called generator."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_samples, generator=self.generator).tolist())


@pytest.mark.parametrize(
    ("num_samples", "options", "workers"),
    crossed([1, 2, 17, 5], [{}, {"persistent_workers": True}, {"in_order": False}], [1, 2]),
)
def test_every_sample_once_over_ranks_and_workers(num_samples: int, options: dict[str, Any], workers: int) -> None:
    loaders = [
        prepare(DataLoader(Stream(num_samples), 2, num_workers=workers, **options), rank, 2) for rank in range(2)
    ]

    for _ in range(2):
        assert sorted(valid_ids(loaders)) == list(range(num_samples))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("num_samples", [0, 1, 4, 9, 16])
def test_exactly_the_last_step_is_the_last(num_samples: int, workers: int) -> None:
    loader = prepare(DataLoader(Stream(num_samples), 2, num_workers=workers))

    ends = [loader.end_of_dataloader for _ in loader]

    assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_takes_full_global_batches_only(world_size: int) -> None:
    loader = DataLoader(Stream(13), 12 // world_size, drop_last=True)

    assert valid_ids([prepare(loader, rank, world_size) for rank in range(world_size)]) == list(range(12))


def test_one_sample_at_a_time_without_batches() -> None:
    loaders = [prepare(DataLoader(Stream(5), batch_size=None), rank, 2) for rank in range(2)]

    assert valid_ids(loaders) == list(range(5))


def test_strings_and_nested_samples_travel() -> None:
    class Records(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for index in range(5):
                yield {"text": f"t{index}", "parts": {"ids": [index] * index}}

    loaders = [prepare(DataLoader(Records(), 2, collate_fn=list), rank, 2) for rank in range(2)]

    first = [next(iter(loader)) for loader in loaders]

    assert first[1] == [{"text": "t2", "parts": {"ids": [2, 2]}}, {"text": "t3", "parts": {"ids": [3, 3, 3]}}]


def test_a_stream_is_read_one_sample_ahead() -> None:
    read = []

    class Recording(Stream):
        def __iter__(self) -> Iterator[int]:
            for index in range(self.num_samples):
                read.append(index)
                yield index

    iterator = iter(prepare(DataLoader(Recording(9), 2)))
    next(iterator)

    assert read == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_draws_from_global_streams_is_one_stream_for_all_ranks(workers: int) -> None:
    loaders = []
    for rank in range(2):
        random.seed(rank)
        loaders.append(prepare(DataLoader(Drawing(8), 2, num_workers=workers), rank, 2))
    state = random.getstate()

    ids = valid_ids(loaders)

    assert sorted(ids) == list(range(8))
    assert ids[:8] != list(range(8))
    assert random.getstate() == state


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_the_epoch_reaches_the_stream_wherever_it_is_read(options: dict[str, Any]) -> None:
    loader = prepare(DataLoader(Epochs(2), 2, **options))

    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1], [100, 101]]
    loader.set_epoch(7)
    assert [batch.tolist() for batch in loader] == [[700, 701]]
    assert loader.epoch == 8


class Between(IterableDataset):
    """The numbers between two, as of the page of `torch.utils.data.IterableDataset`."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def share_numbers(worker_id: int) -> None:
    random.seed(worker_id)
    info: Any = get_worker_info()
    info.dataset.start += 4 * worker_id
    info.dataset.end = min(info.dataset.start + 4, info.dataset.end)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_init_function_finds_the_stream_and_shares_it_out(ranks: int) -> None:
    loaders = [
        prepare(DataLoader(Between(3, 10), 2, num_workers=2, worker_init_fn=share_numbers), rank, ranks)
        for rank in range(ranks)
    ]

    assert sorted(valid_ids(loaders)) == list(range(3, 10))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (2, 0), (1, 0), (0, 2)])
def test_a_stream_that_a_worker_init_function_shares_out_goes_on_with_other_workers(before: int, after: int) -> None:
    def build(workers: int) -> PreparedDataLoader:
        loader = DataLoader(Between(3, 10), 2, num_workers=workers, worker_init_fn=share_numbers)
        return prepare(loader, use_stateful_dataloader=True)

    loader = build(before)
    whole = [[batch.tolist() for batch in loader] for _ in range(2)]
    stopped = build(before)
    next(iter(stopped))
    resumed = build(after)
    resumed.load_state_dict(stopped.state_dict())
    random_state = random.getstate()

    assert [[batch.tolist() for batch in resumed] for _ in range(2)] == [whole[0][1:], whole[1]]
    assert random.getstate() == random_state


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (batch * 2 for batch in super().__iter__() if len(batch))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_class_goes_over_the_batches_of_a_stream_itself(options: dict[str, Any]) -> None:
    loaders = [prepare(Doubled(Between(0, 7), 2, **options), rank, 2) for rank in range(2)]
    for _ in range(2):
        assert valid_ids(loaders) == [0, 2, 4, 6, 8, 10, 12]
    assert [batch.tolist() for batch in prepare(Doubled(Between(0, 3), 2, **options))] == [[0, 2], [4]]


def test_a_generator_attribute_is_seeded_for_the_epoch() -> None:
    loaders = [prepare(DataLoader(OwnGenerator(8), 2), rank, 2) for rank in range(2)]

    passes = [valid_ids(loaders) for _ in range(2)]

    assert sorted(passes[0]) == sorted(passes[1]) == list(range(8))
    assert passes[0] == torch.randperm(8, generator=torch.Generator().manual_seed(SEED)).tolist()
    assert passes[0] != passes[1]


@pytest.mark.parametrize(
    ("skip", "options"),
    crossed([1, 3, 50], [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]),
)
def test_skipping_leaves_out_steps_of_one_pass(skip: int, options: dict[str, Any]) -> None:
    def build() -> list[PreparedDataLoader]:
        return [prepare(DataLoader(Stream(17), 2, **options), rank, 2) for rank in range(2)]

    whole = [[batch.tolist() for batch in loader] for loader in build()]
    skipped = [skip_first_batches(loader, skip) for loader in build()]

    assert [[batch.tolist() for batch in loader] for loader in skipped] == [steps[skip:] for steps in whole]
    assert [[batch.tolist() for batch in loader] for loader in skipped] == whole


def test_what_is_skipped_is_not_collated() -> None:
    collated = []

    def collate(samples: list[int]) -> list[int]:
        collated.append(samples)
        return samples

    assert list(skip_first_batches(prepare(DataLoader(Stream(8), 2, collate_fn=collate)), 3)) == [[6, 7]]
    assert collated == [[6, 7]]


def test_the_length_of_a_sized_stream() -> None:
    loader = prepare(DataLoader(Sized(13), 2), 0, 2)

    assert (len(loader), loader.steps_per_epoch, loader.total_batch_size) == (4, 4, 4)
    assert len(prepare(DataLoader(Sized(13), 2, drop_last=True), 0, 2)) == 3
    assert [loader.remaining for _ in loader] == [4, 3, 2, 1]
    assert len(skip_first_batches(loader, 3)) == 1
    unsized = prepare(DataLoader(Stream(5), 2))
    assert unsized.steps_per_epoch is None
    assert [unsized.remaining for _ in unsized] == [None, None, 1]


def test_an_early_break_and_nested_passes() -> None:
    loader = prepare(DataLoader(Stream(6), 2))
    for _ in loader:
        break
    assert (loader.epoch, loader.rows) == (0, None)
    seen = []
    for batch in loader:
        assert len(list(loader)) == 3
        seen.append((batch.tolist(), loader.end_of_dataloader))
    assert seen == [([0, 1], False), ([2, 3], False), ([4, 5], True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_pickles(workers: int) -> None:
    loader = prepare(DataLoader(Stream(9), 2, num_workers=workers, persistent_workers=workers > 0), 1, 2)
    expected = [batch.tolist() for batch in loader]

    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == expected


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="over 2 processes, and batch_size=3 is no round multiple of 2"):
        prepare(DataLoader(Stream(9), 3), 0, 2, split_batches=True)


# --- datasets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_datasets_with_too_few_shards_is_sliced(workers: int) -> None:
    loaders = [prepare(DataLoader(hub_stream(13, 2), 2, num_workers=workers), rank, 3) for rank in range(3)]

    ids = [
        index
        for batches in zip(*loaders, strict=True)
        for rank, batch in enumerate(batches)
        for index in batch["id"][: loaders[rank].rows.rows[rank]].tolist()
    ]

    assert sorted(ids) == list(range(13))
    if not workers:
        assert ids == list(range(13))


def test_a_shuffled_stream_of_datasets_follows_the_epoch() -> None:
    loader = prepare(DataLoader(hub_stream(12, 3).shuffle(seed=1, buffer_size=4), 12))

    orders = [batch["id"].tolist() for _ in range(2) for batch in loader]

    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]
    assert loader.epoch == loader.dataset.epoch == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_that_is_set_on_a_stream_of_datasets_is_its_loaders(ranks: int) -> None:
    stream = hub_stream(12, 2).shuffle(seed=1, buffer_size=4)
    loader = prepare(DataLoader(stream, 2), ranks - 1, ranks)

    stream.set_epoch(5)
    assert loader.epoch == 5
    loader.set_epoch(7)
    assert stream.epoch == 7


NOT_BY_SHARDS = {
    "take": lambda stream: stream.take(5),
    "skip": lambda stream: stream.skip(3),
    "interleave": lambda stream: datasets.interleave_datasets([stream, hub_stream(12, 4)]),
    "beside": lambda stream: datasets.concatenate_datasets([stream, stream.rename_column("id", "other")], axis=1),
    "full batches": lambda stream: stream.map(lambda rows: rows, batched=True, batch_size=3, drop_last_batch=True),
}


@pytest.mark.parametrize("kind", NOT_BY_SHARDS)
def test_a_stream_whose_samples_sharding_would_change_is_read_whole(kind: str) -> None:
    def build(rank: int, world_size: int) -> PreparedDataLoader:
        stream = NOT_BY_SHARDS[kind](hub_stream(10, 4))
        loader = DataLoader(stream, 2, collate_fn=lambda rows: torch.tensor([row["id"] for row in rows]))
        return prepare(loader, rank, world_size)

    alone = valid_ids([build(0, 1)])
    assert alone
    assert valid_ids([build(rank, 3) for rank in range(3)]) == alone


@pytest.mark.parametrize(("workers", "shuffle"), crossed([0, 2], [False, True]))
def test_a_sharding_filter_is_not_cut_twice(workers: int, shuffle: bool) -> None:
    def build(rank: int) -> PreparedDataLoader:
        pipe = IterableWrapper(range(13))
        pipe = pipe.shuffle().sharding_filter().map(int) if shuffle else pipe.sharding_filter()
        return prepare(DataLoader(pipe, 2, num_workers=workers, shuffle=shuffle), rank, 2)

    orders = [valid_ids(loaders) for loaders in [[build(0), build(1)]] for _ in range(2)]

    assert [sorted(ids) for ids in orders] == [list(range(13))] * 2
    assert (orders[0] != orders[1]) == shuffle
    assert shuffle or workers or orders[0] == list(range(13))
    fresh = [build(0), build(1)]
    assert valid_ids(fresh) == orders[0]


def test_a_pipe_that_is_cut_already_reads_its_own_part() -> None:
    pipe = IterableWrapper(range(13)).sharding_filter()
    assert not is_sharded_by_rank(DataLoader(pipe, 2).dataset)
    apply_sharding(pipe, 2, 1)
    assert is_sharded_by_rank(DataLoader(pipe.map(int), 2).dataset)


def test_what_reads_its_own_part_is_recognised() -> None:
    declared = Stream(4)
    declared.is_sharded_by_rank = True
    split = split_dataset_by_node(hub_stream(8, 4), rank=0, world_size=2)

    tokenized, packed = Stream(4), Stream(4)
    tokenized.rows, packed.parts = split, [declared]
    whole = split_dataset_by_node(hub_stream(8, 4), rank=0, world_size=1)

    assert is_sharded_by_rank(declared)
    assert is_sharded_by_rank(split)
    assert is_sharded_by_rank(tokenized)
    assert is_sharded_by_rank(packed)
    packed.is_sharded_by_rank = False
    assert not is_sharded_by_rank(packed)
    assert not is_sharded_by_rank(whole)
    assert not is_sharded_by_rank(hub_stream(8, 4))
    assert (num_shards_of(hub_stream(8, 4)), num_shards_of(Stream(4))) == (4, 0)
