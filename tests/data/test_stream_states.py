"""Streams that go on at states of their own: the samples of the run that never stopped, and hardly a row read again."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from accel_trainer.config.schema import DataConfig
from accel_trainer.data import PreparedDataLoader, iterable_reader, prepare_data_loader
from accel_trainer.data.packing import STRATEGIES, pack_dataset
from accel_trainer.data.shuffle_buffer import with_window_shuffles
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.collectives import gather_object
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from tests.cells import crossed
from tests.number_sets import SEED, prepare
from tests.ranks import preload, run_ranks

preload("datasets", "scipy.io")

SAMPLES, GLOBAL_BATCH, BUFFER = 90, 6, 8
SHARD_SIZES = (23, 3, 17, 0, 31, 16)

num_read = torch.zeros(8, dtype=torch.int64).share_memory_()
"""Rows that have been read in this process, and in each of its workers: two that added to one number could lose one."""


def read_shards(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        begin = sum(SHARD_SIZES[:shard])
        yield from ({"id": index} for index in range(begin, begin + SHARD_SIZES[shard]))


def count_row(row: dict[str, int]) -> dict[str, int]:
    worker = get_worker_info()
    num_read[0 if worker is None else 1 + worker.id] += 1
    return row


def counted() -> Any:
    """A stream of six shards of unequal sizes that counts what is read of them, beyond the place to go on at."""
    shards = {"shards": list(range(len(SHARD_SIZES)))}
    return datasets.IterableDataset.from_generator(read_shards, gen_kwargs=shards).map(count_row)


def table_stream() -> Any:
    return datasets.Dataset.from_dict({"id": list(range(SAMPLES))}).to_iterable_dataset(num_shards=5)


def words(row: dict[str, int]) -> dict[str, Any]:
    """Tokens that are the number of the row, some of them more than are in a packed row."""
    return {"input_ids": [row["id"]] * (1 + row["id"] % 19)}


def packed(strategy: str) -> Any:
    return pack_dataset(counted().map(words, remove_columns=["id"]), 16, strategy, buffer_size=BUFFER)


KINDS = {
    "plain": counted,
    "mapped": lambda: counted().map(lambda row: {"id": row["id"]}).filter(lambda row: row["id"] % 7 != 3),
    "batched": lambda: counted().map(lambda rows: {"id": rows["id"]}, batched=True, batch_size=4),
    "shuffled": lambda: counted().shuffle(seed=3, buffer_size=BUFFER),
    "shuffled by tables": lambda: table_stream().shuffle(seed=3, buffer_size=BUFFER),
    "shuffled, then mapped": lambda: counted().shuffle(seed=3, buffer_size=BUFFER).map(lambda row: {"id": row["id"]}),
    "mixed": lambda: datasets.interleave_datasets([counted(), table_stream()], [0.7, 0.3], seed=2),
    **{strategy: partial(packed, strategy) for strategy in STRATEGIES},
}


def collate(samples: list[Any]) -> list[int]:
    """The numbers of samples; of packed rows, the tokens of each document."""
    return [
        tuple(tuple(document["input_ids"]) for document in sample) if isinstance(sample, list) else sample["id"]
        for sample in samples
    ]


def in_workers(number: int) -> dict[str, Any]:
    """Return the options of a loader whose workers no server starts, which Python 3.14 would have do so.

    They are given lambdas, and count into the memory of their process.
    """
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


def loaders_of(
    kind: str, ranks: int, workers: int, *, global_batch: int = GLOBAL_BATCH, **options: Any
) -> list[PreparedDataLoader]:
    """The loaders of all ranks, which read the whole stream and do not communicate."""
    return [
        prepare(
            DataLoader(KINDS[kind](), global_batch // ranks, **in_workers(workers), collate_fn=collate, **options),
            rank,
            ranks,
            use_stateful_dataloader=True,
        )
        for rank in range(ranks)
    ]


def steps(loaders: list[PreparedDataLoader], until: int = 2) -> Iterator[list[int]]:
    """Yield the ids of every step until an epoch."""
    while loaders[0].epoch < until:
        for batches in zip(*loaders, strict=True):
            rows = loaders[0].rows.rows
            yield [index for batch, count in zip(batches, rows, strict=True) for index in batch[:count]]


def stop(loaders: list[PreparedDataLoader], after: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Read some steps; return them and the state, which is plain JSON and the same on every rank."""
    head = list(islice(steps(loaders), after))
    states = {json.dumps(loader.state_dict()) for loader in loaders}
    assert len(states) == 1
    return head, json.loads(states.pop())


@functools.cache
def whole_run(kind: str, workers: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of every step of two epochs that one process reads."""
    loaders = loaders_of(kind, 1, workers)
    return list(steps(loaders, 1)), list(steps(loaders, 2))


def go_on(loaders: list[PreparedDataLoader], state: dict[str, Any], until: int = 2) -> list[list[int]]:
    for loader in loaders:
        loader.load_state_dict(state)
    return list(steps(loaders, until))


WORKERS = [(0, 0), (2, 2), (2, 0), (3, 2), (0, 2)]
STOPS = [((1, 2), (-1, 1)), ((7, 3), (3, 2))]
"""Two each: after how many steps of the first epoch on how many ranks, and how many steps from its end."""


@pytest.mark.parametrize(("kind", "before", "after", "first", "second"), crossed(KINDS, WORKERS, STOPS))
def test_a_stream_goes_on_with_other_workers_and_ranks(
    kind: str, before: int, after: int, first: tuple[int, int], second: tuple[int, int]
) -> None:
    epoch, following = whole_run(kind, before)
    if kind not in (*STRATEGIES, "mixed"):
        expected = [index for index in range(SAMPLES) if kind != "mapped" or index % 7 != 3]
        assert sorted(chain.from_iterable(epoch)) == expected
    head, state = stop(loaders_of(kind, first[1], before), first[0])
    assert [*head, *go_on(loaders_of(kind, 2, after), state, 1)] == epoch
    head, state = stop(loaders_of(kind, second[1], before), len(epoch) + second[0])
    assert [*head, *go_on(loaders_of(kind, 2, after), state)] == [*epoch, *following]


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["shuffled", *STRATEGIES]),
    ranks=st.sampled_from([1, 2, 3]),
    workers=st.sampled_from([0, 1, 2]),
    kill=st.integers(1, 8),
    ranks_after=st.sampled_from([1, 2, 3, 6]),
    workers_after=st.sampled_from([0, 1, 2, 3]),
)
def test_a_killed_run_reads_what_one_that_never_stopped_does(
    kind: str, ranks: int, workers: int, kill: int, ranks_after: int, workers_after: int
) -> None:
    whole, _ = whole_run(kind, workers)
    head, state = stop(loaders_of(kind, ranks, workers), min(kill, len(whole) - 1))
    assert [*head, *go_on(loaders_of(kind, ranks_after, workers_after), state, 1)] == whole


_AGAIN = {"plain": 0, "shuffled": BUFFER, "wrapped": 1, "bfd": BUFFER, "bfd_split": BUFFER}


@pytest.mark.parametrize(("kind", "workers"), crossed(_AGAIN, [0, 2]))
def test_at_most_a_buffer_is_read_again_in_each_worker(kind: str, workers: int) -> None:
    whole, _ = whole_run(kind, workers)
    for after_steps in range(1, len(whole) - 1, 1 + workers):
        head, state = stop(loaders_of(kind, 1, workers), after_steps)
        num_read.zero_()
        assert [*head, *go_on(loaders_of(kind, 1, workers), state, 1)] == whole
        left = {document[0] if isinstance(document, tuple) else document
                for step in whole[after_steps:] for row in step
                for document in (row if isinstance(row, tuple) else (row,))}  # fmt: skip
        assert len(left) <= int(num_read.sum()) <= len(left) + _AGAIN[kind] * max(1, workers)


def test_a_pass_over_the_same_epoch_again_begins_at_its_beginning() -> None:
    whole, _ = whole_run("plain", 0)
    _, state = stop(loaders_of("plain", 1, 0), 4)
    loader = loaders_of("plain", 1, 0)[0]

    assert go_on([loader], state, 1) == whole[4:]
    loader.set_epoch(0)
    assert list(steps([loader], 1)) == whole


def test_a_shuffle_buffer_mixes_each_epoch_anew_and_shows_the_epoch_of_the_users_stream() -> None:
    loader = prepare(DataLoader(KINDS["shuffled"](), GLOBAL_BATCH, collate_fn=collate))
    first, second = (list(chain.from_iterable(steps([loader], epoch))) for epoch in (1, 2))

    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert len({tuple(first), tuple(second), tuple(range(SAMPLES))}) == 3
    assert loader.dataset.epoch == 2


@pytest.mark.parametrize("buffer_size", [1, 2, 5, 1000])
@pytest.mark.parametrize("by_tables", [False, True])
def test_a_shuffle_buffer_gives_each_row_once_and_none_early(buffer_size: int, by_tables: bool) -> None:
    stream = (table_stream() if by_tables else counted()).shuffle(seed=1, buffer_size=buffer_size)
    ids = [row["id"] for row in with_window_shuffles(stream)]

    assert sorted(ids) == list(range(SAMPLES))
    assert ids == [row["id"] for row in with_window_shuffles(stream)]


def test_a_release_of_datasets_without_its_private_nodes_is_named_once_and_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = whole_run("plain", 0)
    monkeypatch.setattr(iterable_reader, "_NODES", (iterable_reader._NODES[0], "_GoneIterable"))
    iterable_reader._missing_nodes.cache_clear()
    try:
        head, state = stop(loaders_of("plain", 1, 0), 4)
        num_read.zero_()
        assert [*head, *go_on(loaders_of("plain", 1, 0), state, 1)] == whole
        assert int(num_read.sum()) == SAMPLES
        assert iterable_reader.num_shards_of(counted()) == 0
        assert iterable_reader.made_resumable(stream := KINDS["shuffled"]()) is stream
    finally:
        iterable_reader._missing_nodes.cache_clear()
    (said,) = (text for text in caplog.messages if "_GoneIterable" in text)
    assert "has no _GoneIterable, by which the steps of a stream are known: each process reads all of it" in said


# --- shards of each rank -------------------------------------------------------------------------------------------


def shard_loader(kind: str, process: ProcessContext, workers: int, global_batch: int = 12) -> PreparedDataLoader:
    batch_size = global_batch // process.world_size
    loader = DataLoader(KINDS[kind](), batch_size, **in_workers(workers), collate_fn=collate)
    return prepare_data_loader(loader, process=process, config=DataConfig(), seed=SEED)


def valid_steps(loader: PreparedDataLoader, process: ProcessContext, until: int) -> Iterator[list[list[int]]]:
    """Yield the valid ids of every step, by rank."""
    while loader.epoch < until:
        for batch in loader:
            mine = batch[: loader.rows.rows[process.rank]]
            yield gather_object({"ids": mine}, process)


def part_of_a_run(
    kind: str, workers: int, state: dict[str, Any] | None = None, num_steps: int | None = None, until: int = 2
) -> tuple[list[list[list[int]]], list[dict[str, Any]], int]:
    """Read some steps on all ranks; return their ids, the state after each, and the rows read on this rank."""
    global num_read  # what was shared before the ranks were forked counts for all of them
    num_read = torch.zeros_like(num_read).share_memory_()
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    loader = shard_loader(kind, process, workers)
    if state is not None:
        loader.load_state_dict(state)
    ids, states = [], []
    for parts in islice(valid_steps(loader, process, until), num_steps):
        ids.append([part["ids"] for part in parts])
        states.append(json.loads(json.dumps(loader.state_dict())))
    return ids, states, int(num_read.sum())


def parts_of_runs(kind: str, workers: int, states: list[dict[str, Any]]) -> list[Any]:
    """Return the parts that begin at each of some states: a job of ranks costs more than to read in it."""
    return [part_of_a_run(kind, workers, state) for state in states]


def whole_and_parts(kind: str, workers: int) -> tuple[Any, list[int], list[Any]]:
    """Read two epochs, and once more from two states of the first: the numbers of their steps, and what is read."""
    whole = part_of_a_run(kind, workers)
    (last,) = (number for number, state in enumerate(whole[1]) if state["is_complete"] and not state["epoch"])
    numbers = [0, last - 1]
    return whole, [*numbers, last], parts_of_runs(kind, workers, [whole[1][number] for number in numbers])


def flat(read: list[list[list[int]]]) -> list[int]:
    return [index for step in read for ids in step for index in ids]


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "workers"), crossed(["plain", "shuffled"], [0, 2]))
def test_shards_of_ranks_go_on_on_as_many_exactly_and_on_others_with_each_sample_once(kind: str, workers: int) -> None:
    ((whole, states, _), (*numbers, last), mine), (other, _, others_part) = run_ranks(whole_and_parts, 2, kind, workers)
    assert other[1] == states
    assert sorted(flat(whole[: last + 1])) == sorted(flat(whole[last + 1 :])) == list(range(SAMPLES))
    stops, same = [states[number] for number in numbers], (mine, others_part)
    others = [run_ranks(parts_of_runs, ranks, kind, 1 if workers else 2, stops)[0] for ranks in (1, 3)]
    for number, *on_two, rest_of_one, rest_of_three in zip(numbers, *same, *others, strict=True):
        head = flat(whole[: number + 1])
        assert on_two[0][0] == whole[number + 1 :]
        read_again = sum(num_read for *_, num_read in on_two) - (2 * SAMPLES - len(head))
        assert 0 <= read_again <= (BUFFER if kind == "shuffled" else 0) * 2 * max(1, workers)
        for rest in (rest_of_one, rest_of_three):
            cut = next(index for index, state in enumerate(rest[1], 1) if state["is_complete"])
            assert sorted([*head, *flat(rest[0][:cut])]) == list(range(SAMPLES))
            assert sorted(flat(rest[0][cut:])) == list(range(SAMPLES))


@pytest.mark.multirank
def test_what_one_process_began_goes_on_on_two_and_back_in_the_same_order() -> None:
    whole, states, _ = run_ranks(part_of_a_run, 1, "shuffled", 2, until=1)[0]
    rest, later, _ = run_ranks(part_of_a_run, 2, "shuffled", 2, states[2], 3, until=1)[0]
    end, _, _ = run_ranks(part_of_a_run, 1, "shuffled", 0, later[2], until=1)[0]

    assert [flat([step]) for step in rest] == [flat([step]) for step in whole[3:6]]
    assert end == whole[6:]


@pytest.mark.multirank
def test_a_stream_without_states_in_shards_of_other_ranks_is_refused() -> None:
    state = {"epoch": 0, "samples": 12, "steps": 1, "seed": SEED, "global_batch": 12, "readers": 2, "workers": 0}
    with pytest.raises(IncompatibleCheckpointError, match="of a stream read in 2 parts, and this loader reads it in 1"):
        loaders_of("plain", 1, 0, global_batch=12)[0].load_state_dict(state)
