from __future__ import annotations

from collections import Counter
from itertools import islice, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_trainer.data.plan import BatchRows, RoundRule, batch_indices, full_rounds, mix_seed, permutation, plan_rounds


def rounds_of(batches: list[Any], rule: RoundRule, start: int = 0) -> list[Any]:
    width = rule.batches_per_round
    return list(plan_rounds(batches[:width], batches[start * width :], rule))


def rounds_of_epoch(num_samples: int, rule: RoundRule, seed: int | None, epoch: int, start: int = 0) -> list[Any]:
    order = range(num_samples) if seed is None else permutation(num_samples, seed, epoch)
    assert rule.batch_size is not None
    return rounds_of(list(batch_indices(order, rule.batch_size, rule.drop_last)), rule, start)


def valid_in_order(rounds: list[Any]) -> list[int]:
    return [
        index
        for batches, rows in rounds
        for batch, count in zip(batches, rows.rows, strict=True)
        if batch is not None
        for index in batch[:count]
    ]


def chunks(num_samples: int, batch_size: int, drop_last: bool = False) -> list[list[int]]:
    return list(batch_indices(range(num_samples), batch_size, drop_last))


@settings(max_examples=300, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    shards=st.integers(1, 4),
    drop_last=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
    seed=st.none() | st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 3),
)
def test_all_shards_together_see_what_one_process_sees(
    num_samples: int, batch_size: int, shards: int, drop_last: bool, even: bool, split: bool, seed: Any, epoch: int
) -> None:
    size = batch_size * shards if split else batch_size
    rule = RoundRule(shards, size, split=split, even=even, drop_last=drop_last)
    rounds = rounds_of_epoch(num_samples, rule, seed, epoch)
    alone = rounds_of_epoch(num_samples, RoundRule(1, batch_size * shards, drop_last=drop_last), seed, epoch)

    assert len(rounds) == len(alone)
    for (batches, rows), ((global_batch,), alone_rows) in zip(rounds, alone, strict=True):
        assert valid_in_order([(batches, rows)]) == global_batch
        assert rows.is_last == alone_rows.is_last
        assert rows.sizes == tuple(map(len, batches))
        assert rows.num_samples == len(global_batch)
        if even:
            assert set(rows.sizes) == {batch_size} or shards == 1
        if rows.padded:
            assert rows.is_last


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), max_size=14),
    shards=st.integers(1, 4),
    even=st.booleans(),
    split=st.booleans(),
    known_size=st.booleans(),
    start=st.integers(0, 4),
)
def test_batches_of_any_size_are_shared_out_exactly_once(
    sizes: list[int], shards: int, even: bool, split: bool, known_size: bool, start: int
) -> None:
    numbers = iter(range(100))
    batches = [list(islice(numbers, size)) for size in sizes]
    rule = RoundRule(shards, max(sizes, default=1) if known_size else None, split=split, even=even)

    rounds = rounds_of(batches, rule, start)

    expected = [index for batch in batches[start * rule.batches_per_round :] for index in batch]
    assert valid_in_order(rounds) == expected
    for batches_of_round, rows in rounds:
        assert len(batches_of_round) == shards
        assert tuple(len(batch) for batch in batches_of_round) == rows.sizes
        assert all(size > 0 for size in rows.sizes)
    assert [rows.is_last for _, rows in rounds] == [False] * (len(rounds) - 1) + [True] * bool(rounds)


@pytest.mark.parametrize("even", [False, True])
def test_drop_last_leaves_no_batch_out_for_being_short_in_a_round_of_as_many_as_shards(even: bool) -> None:
    batches = [[0, 1], [2], [3], [4, 5], [6, 7, 8]]
    rounds = rounds_of(batches, RoundRule(2, 3, even=even, drop_last=True))

    assert rounds == [
        ([[0, 1], [2]], BatchRows((2, 1), (2, 1))),
        ([[3], [4, 5]], BatchRows((1, 2), (1, 2), is_last=True)),
    ]


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    batch_size=st.integers(1, 5),
    shards=st.integers(1, 3),
    start=st.integers(0, 20),
    drop_last=st.booleans(),
    seed=st.none() | st.just(3),
)
def test_starting_later_leaves_out_steps_and_changes_nothing_else(
    num_samples: int, batch_size: int, shards: int, start: int, drop_last: bool, seed: int | None
) -> None:
    rule = RoundRule(shards, batch_size, drop_last=drop_last)

    assert rounds_of_epoch(num_samples, rule, seed, 1, start) == rounds_of_epoch(num_samples, rule, seed, 1)[start:]


@pytest.mark.parametrize(("join", "lent", "size"), [(False, None, 0), (True, [0], 1)])
def test_with_join_a_shard_without_samples_has_one_that_is_not_valid(join: bool, lent: Any, size: int) -> None:
    (_, full), (batches, rows) = rounds_of(chunks(9, 4), RoundRule(2, 4, even=False, join=join))

    assert full == BatchRows((4, 4), (4, 4))
    assert batches == [[8], lent]
    assert rows == BatchRows((1, 0), (1, size), is_last=True)
    assert rows.padded is rows.is_even is join


@pytest.mark.parametrize(
    ("num_samples", "size", "split", "lent"), [(12, 4, False, [0, 1]), (12, 8, True, [0, 1]), (3, 2, True, [0])]
)
def test_a_shard_without_samples_is_lent_two_where_another_has_them(
    num_samples: int, size: int, split: bool, lent: list[int]
) -> None:
    batches, rows = rounds_of(chunks(num_samples, size), RoundRule(2, size, split, even=False))[-1]

    assert batches[1] == lent
    assert (rows.rows[1], rows.sizes) == (0, (rows.rows[0], len(lent)))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_samples", [0, 11, 36, 41])
def test_one_shards_full_rounds_are_those_of_all(num_samples: int, split: bool) -> None:
    rule = RoundRule(3, 6, split=split)
    for seed, start in product((None, 4), (0, 1)):
        order = range(num_samples) if seed is None else permutation(num_samples, seed, 0)
        rounds = rounds_of_epoch(num_samples, rule, seed, 0, start)
        # The last full round is left to those who look at what follows it.
        num_full = max(0, num_samples // (6 if split else 18) - 1 - start)
        for shard in range(3):
            expected = [(batches[shard], rows) for batches, rows in rounds[:num_full]]
            assert list(full_rounds(order, rule, shard, start)) == expected


def test_full_steps_share_one_object() -> None:
    rounds = rounds_of(chunks(80, 4), RoundRule(2, 4))

    assert len({id(rows) for _, rows in rounds[:-1]}) == 1


def test_the_stream_is_read_one_round_ahead() -> None:
    taken = []

    def stream() -> Any:
        for batch in chunks(40, 2):
            taken.append(batch)
            yield batch

    rounds = plan_rounds(chunks(4, 2), stream(), RoundRule(2, 2))
    next(rounds)

    assert len(taken) == 4


def test_indices_that_are_no_lists_count_as_one_row() -> None:
    rounds = rounds_of([0, 1, 2], RoundRule(2, None))

    assert rounds == [([0, 1], BatchRows((1, 1), (1, 1))), ([2, 0], BatchRows((1, 0), (1, 1), is_last=True))]


@pytest.mark.parametrize("keys", [["a", "scene-2", "c3"], [(0, 5), (1, 2), (7, 7)]])
def test_a_key_of_any_length_is_one_row_and_is_lent_as_it_is(keys: list[Any]) -> None:
    rule = RoundRule(2, None, even=False, is_batched=False)
    first, second, third = keys

    assert rounds_of(keys, rule) == [
        ([first, second], BatchRows((1, 1), (1, 1))),
        ([third, first], BatchRows((1, 0), (1, 1), is_last=True)),
    ]
    assert rounds_of([keys], RoundRule(1, None, is_batched=False)) == [((keys,), BatchRows((3,), (3,), is_last=True))]


def test_the_permutation_is_a_function_of_seed_and_epoch() -> None:
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(42 + 3))

    assert permutation(10, 42, 3).equal(expected)
    assert permutation(10, 2**64 - 1, 1).equal(permutation(10, 0, 0))


def test_mixed_seeds_differ_for_neighbours() -> None:
    seeds = [mix_seed(seed, epoch, rank) for seed in range(4) for epoch in range(4) for rank in range(4)]

    assert Counter(seeds).most_common(1)[0][1] == 1
    assert all(0 <= seed < 2**63 for seed in seeds)
