from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from accel_trainer.data import SeedableRandomSampler, ShardedBatchSampler
from accel_trainer.errors import ConfigError
from tests.cells import crossed
from tests.number_sets import Batches


def shards_of(batch_sampler: Any, num_processes: int, **options: Any) -> list[list[Any]]:
    return [list(ShardedBatchSampler(batch_sampler, num_processes, rank, **options)) for rank in range(num_processes)]


def batches(num_samples: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(num_samples), batch_size, drop_last)


# Whole batches, round robin. Users and Trainer rely on these lists: rank by rank, what each yields.
@pytest.mark.parametrize(
    ("num_samples", "batch_size", "num_processes", "options", "expected"),
    [
        (13, 4, 2, {}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 0, 1, 2]]]),
        (13, 4, 2, {"even_batches": False}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12]]]),
        (9, 4, 2, {"even_batches": False}, [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7]]]),
        (10, 2, 2, {}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        (2, 3, 2, {}, [[[0, 1, 0]], [[1, 0, 1]]]),
        (2, 3, 2, {"even_batches": False}, [[[0, 1]], []]),
        (13, 4, 2, {"split_batches": True}, [[[0, 1], [4, 5], [8, 9], [12, 0]], [[2, 3], [6, 7], [10, 11], [1, 2]]]),
        (9, 4, 2, {"split_batches": True, "even_batches": False}, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]),
        (2, 4, 2, {"split_batches": True}, [[[0, 1]], [[0, 1]]]),
    ],
)
def test_golden_batches(
    num_samples: int, batch_size: int, num_processes: int, options: dict[str, Any], expected: list[Any]
) -> None:
    assert shards_of(batches(num_samples, batch_size), num_processes, **options) == expected


def test_drop_last_leaves_out_the_whole_incomplete_round() -> None:
    assert shards_of(batches(14, 4, drop_last=True), 2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert shards_of(batches(14, 4, drop_last=True), 2, even_batches=False) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_batches_of_varying_size_are_recycled_whole() -> None:
    shards = shards_of(Batches(1, 2, 3), 2)

    assert shards == [[[0], [3, 4, 5]], [[1, 2], [0]]]


class ByTokens(BatchSampler):
    """At most `batch_size` tokens in a batch, of samples that have one more each."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            if sum(batch) + index > self.batch_size:
                yield batch
                batch = []
            batch.append(index)
        if not self.drop_last:
            yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


def test_drop_last_keeps_the_batches_of_a_sampler_that_counts_something_else() -> None:
    sampler = ByTokens(SequentialSampler(range(10)), 10, True)
    shards = shards_of(sampler, 2)

    assert list(sampler) == [[0, 1, 2, 3, 4], [5], [6], [7], [8]]
    assert shards == [[[0, 1, 2, 3, 4], [6]], [[5], [7]]]
    assert len(ShardedBatchSampler(sampler, 2, 0)) == 2


def test_one_process_takes_everything_as_it_is() -> None:
    assert shards_of(batches(13, 4), 1) == [list(batches(13, 4))]
    assert shards_of(batches(13, 4), 1, split_batches=True) == [list(batches(13, 4))]


@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"even_batches": False, "join": True}])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_length_is_the_number_of_batches(split: bool, drop_last: bool, options: dict[str, Any]) -> None:
    if split and options and not drop_last and not options.get("join"):
        return  # the short last batch may have nothing for a rank: the length is that of the first rank
    for num_samples, start, num_processes in product([1, 8, 9, 13, 20, 24], [0, 1], [1, 2, 4]):
        inner = batches(num_samples, 4, drop_last)
        for rank in range(num_processes):
            sampler = ShardedBatchSampler(inner, num_processes, rank, split_batches=split, **options).starting_at(start)
            assert len(list(sampler)) == len(sampler), (num_samples, start, num_processes, rank)


def test_a_batch_size_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"over 2 processes, and batch_size=3 is no round multiple of 2"):
        ShardedBatchSampler(batches(9, 3), 2, 0, split_batches=True)


# --- orders --------------------------------------------------------------------------------------------------------


def test_seedable_order_is_a_seeded_randperm_that_moves_on_with_each_pass() -> None:
    sampler = SeedableRandomSampler(range(11), seed=7)

    passes = [list(sampler), list(sampler)]

    for epoch, taken in enumerate(passes):
        assert taken == torch.randperm(11, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
    sampler.set_epoch(0)
    assert list(sampler) == passes[0]


class LazyShuffle(Sampler[int]):
    """Draws from a global stream when iteration begins, as samplers of one's own do."""

    def __init__(self, num_samples: int, library: str) -> None:
        self.num_samples = num_samples
        self.library = library

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))
        if self.library == "python":
            random.shuffle(order)
        elif self.library == "numpy":
            order = np.random.permutation(self.num_samples).tolist()
        else:
            order = torch.randperm(self.num_samples).tolist()
        yield from order

    def __len__(self) -> int:
        return self.num_samples


class Dice(LazyShuffle):
    """Draws from a global stream for every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_samples):
            yield {
                "python": lambda: random.randrange(100),
                "numpy": lambda: int(np.random.normal() * 100),
                "torch": lambda: int(torch.randint(100, ())),
            }[self.library]()


class Stuck(LazyShuffle):
    """Has an epoch that nothing can set."""

    epoch = 0


class OwnEpochs(LazyShuffle):
    """Keeps the epoch itself, as samplers with set_epoch do."""

    def __init__(self) -> None:
        super().__init__(9, "torch")
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(9, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class WrappingBatches:
    """A batch sampler of one's own around a sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            yield [index]

    def __len__(self) -> int:
        return len(self.sampler)


class ReadOnly(BatchSampler):
    """Batches whose sampler cannot be set."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.batch_size, self.drop_last = sampler, 2, False

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        return self._sampler


class OwnGenerator(Sampler[int]):
    """Shuffles by a generator of some library, and not at all without one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(9))
        if self.generator is not None:
            self.generator.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return 9


class SharedGenerator(BatchSampler):
    """A batch sampler with the generator of the sampler that it wraps, as that of sentence-transformers."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator or torch.Generator().manual_seed(3)
        super().__init__(RandomSampler(range(9), generator=self.generator), 2, False)


class OneAfterTheOther(BatchSampler):
    """Batches of several batch samplers, drawn in a random order from the generator that they share."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.batch_samplers = [SharedGenerator(self.generator), SharedGenerator(self.generator)]

    def __iter__(self) -> Iterator[list[int]]:
        turns = torch.randint(0, 2, (len(self),), generator=self.generator).tolist()
        own = [iter(sampler) for sampler in self.batch_samplers]
        for turn in turns:
            batch = next(own[turn], None)
            if batch is not None:
                yield batch

    def __len__(self) -> int:
        return sum(map(len, self.batch_samplers))


RANDOM_SAMPLERS = [
    lambda: RandomSampler(range(9)),
    lambda: RandomSampler(range(9), replacement=True, num_samples=70),
    lambda: RandomSampler(range(9), num_samples=20),
    lambda: SubsetRandomSampler([3, 1, 4, 8]),
    lambda: WeightedRandomSampler([0.1, 0.5, 0.4], 17),
    lambda: SeedableRandomSampler(range(9), 5),
    *(partial(kind, 9, library) for kind in (LazyShuffle, Dice) for library in ("python", "numpy", "torch")),
    lambda: Stuck(9, "torch"),
    OwnEpochs,
]


@pytest.mark.parametrize(
    ("build", "wrap"),
    crossed(RANDOM_SAMPLERS, [lambda sampler: BatchSampler(sampler, 2, False), WrappingBatches, ReadOnly]),
)
def test_any_random_sampler_has_one_order_for_all_ranks_that_moves_on_with_the_epoch(build: Any, wrap: Any) -> None:
    orders = []
    for rank in range(2):  # two "ranks" whose global streams differ
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        sampler = ShardedBatchSampler(wrap(build()), seed=11)
        by_epoch = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            by_epoch.append([])
            for batch in sampler:
                by_epoch[-1].append(batch)
                random.random(), np.random.rand(), torch.rand(())
        orders.append(by_epoch)

    assert orders[0] == orders[1]
    assert orders[0][0] == orders[0][2]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("generator", [lambda: np.random.default_rng(0), lambda: random.Random(0), lambda: None])
def test_a_sampler_of_ones_own_keeps_a_generator_that_is_none_of_torch(generator: Any) -> None:
    sampler = ShardedBatchSampler(BatchSampler(OwnGenerator(generator()), 2, False), seed=3)
    plain = BatchSampler(OwnGenerator(generator()), 2, False)

    assert [list(sampler) for _ in range(2)] == [list(plain) for _ in range(2)]


@pytest.mark.parametrize("build", [SharedGenerator, OneAfterTheOther])
def test_samplers_that_share_a_generator_resume_within_their_epoch(build: Any) -> None:
    sampler = ShardedBatchSampler(build(), seed=3)
    first_of_torch = list(build()) if build is SharedGenerator else None
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        whole = list(sampler)
        resumed = ShardedBatchSampler(build(), seed=3)
        resumed.set_epoch(epoch)
        resumed.begin_at(0, (epoch, resumed.origin_of(sum(map(len, whole[:3])))))
        assert list(resumed) == whole[3:]
        assert list(sampler) == whole
        assert first_of_torch in (None, whole)
        first_of_torch = None


@pytest.mark.parametrize("build", RANDOM_SAMPLERS)
def test_drawing_an_order_leaves_the_global_streams_and_the_users_sampler_alone(build: Any) -> None:
    inner = build()
    sampler = ShardedBatchSampler(BatchSampler(inner, 2, False), seed=11)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    generator = getattr(inner, "generator", None)

    list(sampler)

    assert random.getstate() == before[0]
    assert torch.get_rng_state().equal(before[1])
    assert np.random.get_state()[1].tolist() == before[2]
    assert getattr(inner, "generator", None) is generator


def test_transformers_sampler_by_length_has_one_order_for_all_ranks() -> None:
    lengths = torch.randint(1, 50, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    orders = []
    for rank in range(2):
        torch.manual_seed(rank)
        inner = LengthGroupedSampler(4, lengths=lengths)
        orders.append(list(ShardedBatchSampler(BatchSampler(inner, 2, False), seed=3)))

    assert orders[0] == orders[1]
    assert sorted(index for batch in orders[0] for index in batch) == list(range(21))


def test_without_a_seed_samplers_draw_as_they_always_do() -> None:
    torch.manual_seed(0)
    expected = list(BatchSampler(RandomSampler(range(9)), 2, False))
    torch.manual_seed(0)

    assert list(ShardedBatchSampler(BatchSampler(RandomSampler(range(9)), 2, False))) == expected


def test_the_epoch_is_the_one_of_the_sampler_that_has_it() -> None:
    inner = SeedableRandomSampler(range(9), 5)
    sampler = ShardedBatchSampler(BatchSampler(inner, 2, False), seed=5)
    inner.set_epoch(4)

    assert sampler.epoch == 4
    assert [i for batch in sampler for i in batch] == inner.order.tolist()


def test_two_passes_at_a_time_do_not_disturb_each_other() -> None:
    sampler = ShardedBatchSampler(BatchSampler(RandomSampler(range(99), replacement=True), 4, False), seed=3)
    alone = list(sampler)

    outer = iter(sampler)
    taken = [next(outer)]
    assert list(sampler) == alone
    assert taken + list(outer) == alone


def test_a_sampler_pickles_with_its_position() -> None:
    sampler = ShardedBatchSampler(batches(16, 4), 2, 1).starting_at(1)
    next(iter(sampler))

    assert list(pickle.loads(pickle.dumps(sampler))) == [[12, 13, 14, 15]]


def test_skipping_reads_no_order_that_is_known() -> None:
    """Skipping 190,000 of 200,000 batches is index arithmetic: no index before the position is ever made."""

    sampler = ShardedBatchSampler(BatchSampler(SequentialSampler(range(10**15)), 10**3, False), 2, 1)

    moved = iter(sampler.starting_at(10**11))

    assert next(moved)[0] == (2 * 10**11 + 1) * 10**3
