"""Loaders whose ranks talk to each other: own shards of a stream, and rank 0 reading for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer.config.schema import DataConfig
from accel_trainer.data import prepare_data_loader, skip_first_batches, trim_gathered
from accel_trainer.data.iterable_source import ShardSource, SliceSource
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from tests.number_sets import EndsWithin, context, prepare
from tests.scenarios import Scenarios

pytestmark = pytest.mark.multirank

SCENARIOS = Scenarios()


class Shards(IterableDataset):
    """A stream in shards of given sizes; shard i holds 100 * i, 100 * i + 1, ..."""

    def __init__(self, sizes: list[int], kept: list[int] | None = None) -> None:
        self.sizes = sizes
        self.kept = list(range(len(sizes))) if kept is None else kept
        self.num_read = 0

    @property
    def num_shards(self) -> int:
        return len(self.kept)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.sizes, self.kept[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        kept = self.kept if worker is None else self.kept[worker.id :: worker.num_workers]
        for shard in kept:
            for index in range(self.sizes[shard]):
                self.num_read += 1
                yield 100 * shard + index


class Declared(IterableDataset):
    """Reads its own part of the numbers and says so."""

    is_sharded_by_rank = True

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 10, self.world_size))


def join() -> ProcessContext:
    return init_process(read_environment(), use_cpu=True, timeout_seconds=30)


def passes(prepared: Any, process: ProcessContext, count: int = 2) -> list[Any]:
    results = []
    for _ in range(count):
        ids, steps = [], []
        for batch in prepared:
            rows = prepared.rows
            assert len(batch) == rows.sizes[process.rank]
            ids += trim_gathered(torch.as_tensor(batch), rows, process).tolist()
            steps.append((rows.rows, rows.sizes, rows.is_last))
        results.append((ids, steps))
    return results


def read_shards(sizes: list[int], *, skip: int = 0, even: bool = False, **options: Any) -> Any:
    process = join()
    loader = DataLoader(Shards(sizes), 2, **options)
    prepared = prepare_data_loader(loader, process=process, config=DataConfig(even_batches=even), seed=1)
    assert isinstance(prepared._source, ShardSource)
    assert prepared.steps_per_epoch is None
    if skip:
        prepared = skip_first_batches(prepared, skip)
    results = passes(prepared, process, 1 if skip else 2)
    return results, prepared.dataset.num_read


EVERYTHING = {
    "equal": [4, 4],
    "uneven": [7, 2],
    "rank 1 has none": [3, 0],
    "rank 0 has none": [0, 3],
    "nobody has any": [0, 0],
    "three shards": [3, 2, 4],
}


SHARED_BY_WORKERS = [3, 4, 1, 2, 5, 3]


@SCENARIOS.add
def read_everything() -> dict[str, Any]:
    return {
        "even": {name: read_shards(sizes, even=True) for name, sizes in EVERYTHING.items()},
        "uneven": {name: read_shards(sizes) for name, sizes in EVERYTHING.items()},
        "drop last": read_shards([7, 5], drop_last=True),
        "workers": read_shards(SHARED_BY_WORKERS, num_workers=2, persistent_workers=True),
        "skipped": read_shards([7, 2], skip=2),
    }


def results_of(scenario: str, name: Any) -> list[Any]:
    """Return one of a scenario's results, by rank."""
    return [found[name] for found in SCENARIOS.results(scenario)]


def by_name(samples: list[int]) -> dict[str, Any]:
    return {"ids": samples, "labels": {"of": samples}}


@SCENARIOS.add
def take_apart() -> list[list[list[int]]]:
    process, found = join(), []
    for sizes in ([6, 2], [6, 0]):
        loader = DataLoader(Shards(sizes), 2, collate_fn=by_name)
        prepared = prepare_data_loader(loader, process=process, config=DataConfig(), seed=1)
        found.append([batch["labels"].pop("of") for batch in prepared if batch.pop("ids")])
    return found


def test_a_batch_that_is_lent_again_is_whole_whatever_was_taken_out_of_it_before() -> None:
    first, second = SCENARIOS.results("take_apart")

    assert first == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert second == [[[100, 101]] * 3, [[0, 1]] * 3]


@pytest.mark.parametrize("batches", ["even", "uneven"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_each_rank_reads_its_own_shards_and_all_take_the_same_steps(name: str, batches: str) -> None:
    results = [found[name] for found in results_of("read_everything", batches)]

    expected = sorted(100 * shard + index for shard, size in enumerate(EVERYTHING[name]) for index in range(size))
    assert results[0][0] == results[1][0]
    for ids, steps in results[0][0]:
        assert sorted(ids) == expected
        assert [is_last for *_, is_last in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)
        for rows, shard_sizes, _ in steps:
            assert all(0 < size <= 2 for size in shard_sizes)
            assert shard_sizes == (2, 2) or batches == "uneven" or max(rows) == 0
    if name == "uneven":
        assert [rows for rows, *_ in results[0][0][0][1]] == [(2, 2), (2, 0), (2, 0), (1, 0)]
    assert all(num_read == 0 for _, num_read in results), "the user's own object is not the one that is read"


def test_drop_last_ends_where_one_rank_has_no_full_batch() -> None:
    (first, _), (second, _) = results_of("read_everything", "drop last")

    assert first == second
    ids, steps = first[0]
    assert sorted(ids) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert [is_last for *_, is_last in steps] == [False, True]


def test_workers_of_a_rank_share_its_shards() -> None:
    (first, _), (second, _) = results_of("read_everything", "workers")

    assert first == second
    expected = sorted(100 * shard + index for shard, size in enumerate(SHARED_BY_WORKERS) for index in range(size))
    assert [sorted(ids) for ids, _ in first] == [expected, expected]


def test_skipping_leaves_out_steps_of_every_rank() -> None:
    (first, _), (second, _) = results_of("read_everything", "skipped")

    assert first == second
    assert first[0][0] == [4, 5, 6]


@SCENARIOS.add
def read_pre_sharded() -> dict[str, Any]:
    process = join()
    whole = datasets.Dataset.from_dict({"id": list(range(10))}).to_iterable_dataset(num_shards=2)
    streams = {
        "declared": Declared(process.rank, process.world_size),
        "split by node": split_dataset_by_node(whole, process.rank, process.world_size),
        "shards": whole,
    }
    found = {}
    for kind, stream in streams.items():
        collate = None if kind == "declared" else lambda samples: [sample["id"] for sample in samples]
        loader = DataLoader(stream, 2, collate_fn=collate)
        prepared = prepare_data_loader(loader, process=process, config=DataConfig(), seed=1)
        assert isinstance(prepared._source, ShardSource)
        found[kind] = sorted(passes(prepared, process, 1)[0][0]), prepared.epoch
    return found


@pytest.mark.parametrize("kind", ["declared", "split by node", "shards"])
def test_a_stream_that_shards_itself_is_not_cut_again(kind: str) -> None:
    assert results_of("read_pre_sharded", kind) == [(list(range(10)), 1)] * 2


@SCENARIOS.add
def leave_early() -> list[Any]:
    process = join()
    prepared = prepare_data_loader(DataLoader(Shards([6, 6]), 2), process=process, config=DataConfig(), seed=1)
    for _ in prepared:
        break
    return passes(prepared, process, 1)[0][0]


def test_a_pass_over_own_shards_can_be_left_early() -> None:
    first, second = SCENARIOS.results("leave_early")
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]


# --- rank 0 reads for all ------------------------------------------------------------------------------------------


class Records(IterableDataset):
    def __init__(self, num_samples: int, breaks_at: int | None = None) -> None:
        self.num_samples, self.breaks_at = num_samples, breaks_at
        self.num_read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.num_samples):
            if index == self.breaks_at:
                raise ValueError("the disk is gone")
            self.num_read += 1
            yield {"text": f"t{index}", "ids": torch.arange(index)}


def collate(samples: list[Any]) -> list[tuple[str, int]]:
    return [(sample["text"], len(sample["ids"])) for sample in samples]


def dispatch(num_samples: int, skip: int = 0, **config: Any) -> Any:
    process = join()
    loader = DataLoader(Records(num_samples), 2, collate_fn=collate)
    prepared = prepare_data_loader(loader, process=process, config=DataConfig(dispatch_batches=True, **config), seed=1)
    assert prepared._dispatch == process
    if skip:
        prepared = skip_first_batches(prepared, skip)
    taken = [(batch, prepared.rows.rows, prepared.end_of_dataloader) for batch in prepared]
    return taken, loader.dataset.num_read, prepared.epoch


@SCENARIOS.add
def dispatch_everything() -> dict[str, Any]:
    return {"five": dispatch(5, even_batches=True), "none": dispatch(0), "seven, skipped": dispatch(7, skip=1)}


def test_d22_rank_0_reads_and_strings_and_ragged_samples_travel() -> None:
    first, second = results_of("dispatch_everything", "five")

    assert first[0] == [([("t0", 0), ("t1", 1)], (2, 2), False), ([("t4", 4), ("t4", 4)], (1, 0), True)]
    assert second[0][0] == ([("t2", 2), ("t3", 3)], (2, 2), False)
    assert (first[1], second[1]) == (5, 0)
    assert (first[2], second[2]) == (1, 1)


def test_an_empty_stream_ends_on_every_rank() -> None:
    assert [taken for taken, *_ in results_of("dispatch_everything", "none")] == [[], []]


def test_skipping_and_uneven_batches_of_rank_0() -> None:
    first, second = results_of("dispatch_everything", "seven, skipped")

    assert first[0] == [([("t4", 4), ("t5", 5)], (2, 1), True)]
    assert second[0] == [([("t6", 6)], (2, 1), True)]


ENDS = {0: 0, 3: 1, 7: 3, 11: 5}
"""By the sample that ends a pass: how many batches have been read."""


def refused_dispatch(dataset: Any, *kinds: type[Exception], **options: Any) -> str:
    """Return what every rank says of a pass of rank 0 over the dataset, which fails."""
    process, config = join(), DataConfig(dispatch_batches=True)
    prepared = prepare_data_loader(DataLoader(dataset, 2, **options), process=process, config=config, seed=1)
    with pytest.raises(kinds) as caught:
        list(prepared)
    return str(caught.value)


@SCENARIOS.add
def dispatch_what_ends() -> dict[int, str]:
    return {at: refused_dispatch(EndsWithin(at), ConfigError, ProcessGroupError) for at in ENDS}


@pytest.mark.parametrize("at", ENDS)
def test_a_dataset_that_ends_the_pass_of_rank_0_by_a_stop_iteration_is_an_error_on_all(at: int) -> None:
    said = f"a pass over the EndsWithin ended after {ENDS[at]} batches, and the sampler had asked for more"
    assert all(said in message for message in results_of("dispatch_what_ends", at))


@SCENARIOS.add
def fail_on_rank_0() -> str:
    kind = ValueError if join().is_main else ProcessGroupError
    return refused_dispatch(Records(9, breaks_at=5), kind, collate_fn=collate)


def test_what_goes_wrong_on_rank_0_is_known_to_all() -> None:
    first, second = SCENARIOS.results("fail_on_rank_0")

    assert first == "the disk is gone"
    assert second == "rank 0, which reads for all ranks, failed: ValueError: the disk is gone; see its traceback"


@pytest.mark.parametrize(
    ("dataset", "shards", "message"),
    [
        (Records(9), {"shards": 1, "shard": 0}, "dispatch_batches=True sends each of 2 ranks its own batch, and the"),
        (Declared(0, 2), {}, "rank 0 read for all ranks, and this Declared yields the part of one"),
    ],
)
def test_dispatch_needs_a_whole_stream_and_a_part_for_each_rank(dataset: Any, shards: Any, message: str) -> None:
    config = DataConfig(dispatch_batches=True)
    with pytest.raises(ConfigError, match=message):
        prepare_data_loader(DataLoader(dataset, 2), process=context(0, 2), config=config, seed=1, **shards)


def test_one_process_reads_for_itself() -> None:
    assert isinstance(prepare(DataLoader(Shards([2, 2]), 2), dispatch_batches=True)._source, SliceSource)


# --- going on in the middle ----------------------------------------------------------------------------------------


def ids_from(loader: Any, process: ProcessContext, stop: int | None = None) -> list[int]:
    ids: list[int] = []
    for step, batch in enumerate(loader, 1):
        ids += trim_gathered(torch.as_tensor(batch), loader.rows, process).tolist()
        if step == stop:
            break
    return ids


def go_on(kind: str, stop: int) -> tuple[list[int], list[int], dict[str, Any], list[int]]:
    """Return what a whole pass reads, what two parts of one read, the state between, and the pass after."""
    process = join()

    def build() -> Any:
        datasets_by_kind = {
            "own part": lambda: Declared(process.rank, process.world_size),
            "shards": lambda: Shards([7, 2]),
            "dispatched stream": lambda: Shards([7, 2]),
            "dispatched": lambda: range(9),
        }
        config = DataConfig(use_stateful_dataloader=True, dispatch_batches=kind.startswith("dispatched") or None)
        options = {"shuffle": True} if kind == "dispatched" else {}
        loader = DataLoader(datasets_by_kind[kind](), 2, **options)
        return prepare_data_loader(loader, process=process, config=config, seed=1)

    whole = ids_from(build(), process)
    loader = build()
    head = ids_from(loader, process, stop)
    state = loader.state_dict()
    again = build()
    again.load_state_dict(state)
    tail = ids_from(again, process)
    return whole, [*head, *tail], state, sorted(ids_from(again, process))


@SCENARIOS.add
def go_on_everywhere() -> dict[str, Any]:
    kinds = ("own part", "shards", "dispatched stream", "dispatched")
    return {f"{kind} {stop}": go_on(kind, stop) for kind in kinds for stop in (1, 2, 3)}


def test_r7_ranks_that_share_reading_go_on_where_they_stopped() -> None:
    results = SCENARIOS.results("go_on_everywhere")
    for result in results:
        for name, (whole, parts, state, after) in result.items():
            assert parts == whole, name
            assert after == sorted(whole), name
            assert state["samples"] == min(len(whole), 4 * int(name[-1])), name
    states = [{name: state for name, (_, _, state, _) in result.items()} for result in results]
    assert states[0] == states[1]
    assert states[0]["own part 1"]["readers"] == 2
    assert states[0]["shards 1"]["readers"] == 1, "in shards, the order would depend on the number of ranks"
