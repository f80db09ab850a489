from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from accel_trainer.config.schema import DataConfig
from accel_trainer.data import (
    PreparedDataLoader,
    SeedableRandomSampler,
    ShardedBatchSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accel_trainer.errors import ConfigError
from tests import warm
from tests.cells import crossed
from tests.number_sets import SEED, Batches, EndsWithin, Numbers, context, prepare, valid_ids
from tests.ranks import run_ranks


class Told(Numbers):
    """Remembers the epoch it was told."""

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def collate(samples: list[int]) -> dict[str, Any]:
    return {"ids": torch.tensor(samples), "names": [str(sample) for sample in samples]}


# --- every sample exactly once -------------------------------------------------------------------------------------


# tests/data/test_metrics_property.py has the others.
LOADERS = {
    "longer shuffle": lambda: DataLoader(Numbers(5), 3, sampler=RandomSampler(range(5), num_samples=11)),
    "own batch sampler": lambda: DataLoader(Numbers(11), batch_sampler=Batches(1, 2, 3, 4, 1)),
    "bulk": lambda: DataLoader(torch.arange(11), batch_size=None, sampler=BatchSampler(range(11), 2, False)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_all_ranks_together_see_what_one_process_sees(name: str) -> None:
    for world_size, even in product([1, 2, 3], [True, False]):
        alone = prepare(LOADERS[name]())
        loaders = [prepare(LOADERS[name](), rank, world_size, even_batches=even) for rank in range(world_size)]
        for _ in range(2):
            assert valid_ids(loaders) == [int(i) for batch in alone for i in batch], (world_size, even)


@pytest.mark.parametrize(
    ("workers", "options"),
    crossed([1, 2], [{}, {"persistent_workers": True}, {"prefetch_factor": 1}, {"in_order": False}]),
)
def test_workers_change_nothing(workers: int, options: dict[str, Any]) -> None:
    def build(num_workers: int, **extra: Any) -> DataLoader:
        return DataLoader(Numbers(13), 2, shuffle=True, collate_fn=collate, num_workers=num_workers, **extra)

    alone = [prepare(build(0), rank, 2) for rank in range(2)]
    loaders = [prepare(build(workers, **options), rank, 2) for rank in range(2)]

    for _ in range(2):
        expected, taken = valid_ids(alone, "ids"), valid_ids(loaders, "ids")
        assert sorted(taken) == sorted(expected)
        if options.get("in_order", True):
            assert taken == expected


class SlowFirst(Numbers):
    def __getitem__(self, index: int) -> int:
        import time

        time.sleep(0.2 if index == 0 else 0.0)
        return index


@pytest.mark.parametrize(("num_samples", "prefetch"), crossed([1, 2, 5, 11], [1, 3]))
def test_out_of_order_workers_keep_the_short_batch_last(num_samples: int, prefetch: int) -> None:
    loader = prepare(DataLoader(SlowFirst(num_samples), 2, num_workers=2, in_order=False, prefetch_factor=prefetch))

    batches = [(batch.tolist(), loader.rows, loader.end_of_dataloader) for batch in loader]

    assert sorted(index for ids, _, _ in batches for index in ids) == list(range(num_samples))
    assert all(rows.sizes == (len(ids),) for ids, rows, _ in batches)
    assert [is_last for _, _, is_last in batches] == [False] * (len(batches) - 1) + [True]


def test_split_batches_cuts_the_batch() -> None:
    loaders = [prepare(DataLoader(Numbers(10), 4), rank, 2, split_batches=True, even_batches=True) for rank in range(2)]

    assert [batch.tolist() for batch in loaders[1]] == [[2, 3], [6, 7], [0, 1]]
    assert loaders[0].total_batch_size == 4
    assert valid_ids(loaders) == list(range(10))


def test_ranks_that_share_their_data_read_the_same_part() -> None:
    loaders = [
        prepare_data_loader(
            DataLoader(Numbers(8), 2),
            process=context(rank, 4),
            config=DataConfig(),
            seed=SEED,
            shards=2,
            shard=rank // 2,
        )
        for rank in range(4)
    ]

    assert [[batch.tolist() for batch in loader] for loader in loaders[:2]] == [[[0, 1], [4, 5]]] * 2
    assert [batch.tolist() for batch in loaders[3]] == [[2, 3], [6, 7]]


# --- orders and epochs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sampler", "seed"),
    [
        ({}, SeedableRandomSampler, SEED),
        ({"data_seed": 5}, SeedableRandomSampler, 5),
        ({"use_seedable_sampler": False}, RandomSampler, SEED),
    ],
    ids=["the loader's seed", "data_seed", "the user's own sampler"],
)
def test_shuffling_is_a_randperm_of_seed_and_epoch(config: dict[str, Any], sampler: type, seed: int) -> None:
    loader = prepare(DataLoader(Numbers(13), 4, shuffle=True), **config)

    assert type(loader.sampler) is sampler
    for epoch in range(2):
        expected = torch.randperm(13, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        assert [index for batch in loader for index in batch.tolist()] == expected


def test_set_epoch_reaches_samplers_and_datasets_through_any_wrapping() -> None:
    data = Told(4), Told(5)
    wrapped = Subset(ConcatDataset(data), range(9))
    wrapped.by_name = {"another": Told(1)}
    data = (*data, wrapped.by_name["another"])
    loader = prepare(DataLoader(wrapped, 2, shuffle=True))

    loader.set_epoch(6)

    assert loader.epoch == loader.sampler.epoch == 6
    assert [inner.epoch for inner in data] == [6, 6, 6]
    list(loader)
    assert [inner.epoch for inner in data] == [7, 7, 7]


class Growing(Told):
    """Has one more batch of two in each epoch."""

    def __getitem__(self, index: int) -> int:
        return 100 * (self.epoch or 0) + index

    def __len__(self) -> int:
        return 2 + 2 * (self.epoch or 0)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_epoch_reaches_the_dataset_wherever_it_is_read(options: dict[str, Any]) -> None:
    loader = prepare(DataLoader(Growing(0), 2, **options))

    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1], [100, 101], [102, 103]]
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == [[200, 201], [202, 203], [204, 205]]


def test_the_epoch_moves_on_after_a_whole_pass_only() -> None:
    loader = prepare(DataLoader(Numbers(8), 2, shuffle=True))

    for _ in loader:
        break
    assert loader.epoch == 0
    first = [batch.tolist() for batch in loader]
    assert loader.epoch == 1
    assert [batch.tolist() for batch in loader] != first
    assert loader.epoch == 2


def test_an_epoch_that_is_chosen_while_an_iterator_is_held_holds() -> None:
    loader, orders = prepare(DataLoader(Numbers(8), 2, shuffle=True)), []
    for epoch in range(4):
        loader.set_epoch(epoch)
        iterator = iter(loader)  # the one before is closed only here
        orders.append([next(iterator).tolist() for _ in range(len(loader))])
    again = prepare(DataLoader(Numbers(8), 2, shuffle=True))
    assert orders == [[batch.tolist() for batch in again] for _ in range(4)]


def test_a_pass_left_early_does_not_move_a_sampler_that_counts_epochs_itself() -> None:
    class Wrapping:
        def __init__(self) -> None:
            self.sampler = SeedableRandomSampler(range(4), SEED)

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([index] for index in self.sampler)

    loader = prepare(DataLoader(Numbers(4), batch_sampler=Wrapping(), num_workers=2, prefetch_factor=4))

    iterator = iter(loader)
    first = next(iterator).tolist()
    iterator.close()

    assert loader.epoch == 0
    assert next(iter(loader)).tolist() == first


def test_d6_d7_an_epoch_is_resumed_in_its_own_order_and_the_next_one_has_its_own() -> None:
    reference = prepare(DataLoader(Numbers(24), 2, shuffle=True), 1, 2)
    passes = [[batch.tolist() for batch in reference] for _ in range(4)]

    loader = prepare(DataLoader(Numbers(24), 2, shuffle=True), 1, 2)
    loader.load_state_dict({"epoch": 2})

    assert [batch.tolist() for batch in skip_first_batches(loader, 4)] == passes[2][4:]
    assert [batch.tolist() for batch in loader] == passes[3]


# --- skipping ------------------------------------------------------------------------------------------------------


def test_skipping_keeps_every_setting_and_says_what_is_left() -> None:
    original = DataLoader(
        Numbers(13), 2, drop_last=True, num_workers=2, persistent_workers=True, prefetch_factor=3, collate_fn=collate
    )
    skipped = skip_first_batches(prepare(original, 1, 2), 1)

    for name in ("batch_size", "drop_last", "num_workers", "persistent_workers", "prefetch_factor", "collate_fn"):
        assert getattr(skipped, name) == getattr(original, name), name
    assert len(skipped) == 2
    assert [(batch["ids"].tolist(), skipped.remaining) for batch in skipped] == [([6, 7], 2), ([10, 11], 1)]


def test_a_skip_is_for_one_pass() -> None:
    loader = skip_first_batches(prepare(DataLoader(Numbers(8), 2)), 3)

    assert [len(list(loader)), len(list(loader)), len(loader)] == [1, 4, 4]


def test_a_skip_survives_set_epoch_and_adds_up() -> None:
    loader = skip_first_batches(skip_first_batches(prepare(DataLoader(Numbers(8), 2)), 1), 2)
    loader.set_epoch(4)

    assert [batch.tolist() for batch in loader] == [[6, 7]]


def test_skipping_works_for_a_loader_that_is_not_prepared() -> None:
    assert [batch.tolist() for batch in skip_first_batches(DataLoader(Numbers(8), 2), 2)] == [[4, 5], [6, 7]]
    assert list(skip_first_batches(DataLoader(Numbers(8), 2), 9)) == []
    with pytest.raises(ConfigError, match="num_batches=-1 cannot be skipped"):
        skip_first_batches(DataLoader(Numbers(8), 2), -1)


def test_skipping_on_a_map_style_dataset_reads_nothing() -> None:
    class Forbidden(Numbers):
        def __getitem__(self, index: int) -> int:
            assert index >= 6
            return index

    assert [b.tolist() for b in skip_first_batches(prepare(DataLoader(Forbidden(8), 2)), 3)] == [[6, 7]]


# --- what the loader knows -----------------------------------------------------------------------------------------


def test_rows_remaining_and_the_last_step_are_known_at_every_step() -> None:
    loader = prepare(DataLoader(Numbers(13), 4), 1, 2)
    assert (loader.rows, loader.remaining, loader.end_of_dataloader) == (None, None, False)

    seen = [(loader.rows.rows, loader.remaining, loader.end_of_dataloader) for _ in loader]

    assert seen == [((4, 4), 2, False), ((4, 1), 1, True)]
    assert (loader.rows, loader.remaining, loader.end_of_dataloader) == (None, None, False)
    assert (len(loader), loader.steps_per_epoch, loader.total_batch_size, loader.total_dataset_length) == (2, 2, 8, 13)


def test_batches_of_varying_size_have_no_total() -> None:
    loader = prepare(DataLoader(Numbers(11), batch_sampler=Batches(1, 2, 3, 4, 1)), 0, 2)

    assert loader.total_batch_size is None
    assert [loader.rows.sizes for _ in loader] == [(1, 2), (3, 4), (1, 1)]


def test_no_data_is_read_ahead() -> None:
    read = []

    class Recording(Numbers):
        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    iterator = iter(prepare(DataLoader(Recording(8), 2)))
    next(iterator)

    assert read == [0, 1]


def test_d17_a_pass_that_is_left_early_leaves_nothing_behind() -> None:
    events: list[str] = []
    loader = prepare(
        DataLoader(Numbers(8), 2), on_begin=lambda _: events.append("begin"), on_end=lambda _: events.append("end")
    )

    for _ in range(3):
        for _ in loader:
            break
    assert events == ["begin", "end"] * 3
    assert loader.rows is None

    def fail() -> None:
        for _ in loader:
            raise RuntimeError("from the loop")

    with pytest.raises(RuntimeError, match="from the loop"):
        fail()
    assert events == ["begin", "end"] * 4


def test_nested_loaders_and_nested_passes_do_not_disturb_each_other() -> None:
    train, other = prepare(DataLoader(Numbers(8), 2)), prepare(DataLoader(Numbers(3), 2))
    taken = []
    for step, batch in enumerate(train):
        for _ in other:
            pass
        if step == 1:
            for _ in train:
                break
        taken.append((batch.tolist(), train.remaining, train.end_of_dataloader))

    assert taken == [([0, 1], 4, False), ([2, 3], 3, False), ([4, 5], 2, False), ([6, 7], 1, True)]


def test_an_iterator_that_is_closed_late_does_not_disturb_a_later_pass() -> None:
    loader = prepare(DataLoader(Numbers(4), 2))
    forgotten = iter(loader)
    next(forgotten)

    seen = []
    for batch in loader:
        forgotten.close()
        seen.append((batch.tolist(), loader.rows.is_last))

    assert seen == [([0, 1], False), ([2, 3], True)]
    assert loader.epoch == 1


# --- a real DataLoader ---------------------------------------------------------------------------------------------


class OwnLoader(DataLoader):
    """A loader class of the user's own."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 10

    def describe(self) -> str:
        return f"{self.batch_size} a batch"


def test_it_is_a_loader_of_the_users_class_with_its_methods_and_reading() -> None:
    loader = prepare(OwnLoader(Numbers(4), 2), 1, 2)

    assert isinstance(loader, PreparedDataLoader)
    assert isinstance(loader, OwnLoader)
    assert loader.describe() == "2 a batch"
    assert [batch.tolist() for batch in loader] == [[20, 30]]


@pytest.mark.parametrize(("loader_class", "workers"), crossed([DataLoader, OwnLoader], [0, 2]))
def test_it_pickles_and_copies_where_the_original_does(loader_class: type, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = prepare(loader_class(Numbers(9), 2, shuffle=True, **options), on_begin=lambda _: None)
    list(loader)

    clones = [pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)]
    expected = [batch.tolist() for batch in loader]

    for clone in clones:
        assert isinstance(clone, loader_class)
        assert [batch.tolist() for batch in clone] == expected


def test_preparing_twice_changes_nothing() -> None:
    loader = prepare(DataLoader(Numbers(9), 2), 1, 2)

    assert prepare(loader, 0, 3) is loader


def test_the_original_loader_is_left_as_it_was() -> None:
    original = DataLoader(Numbers(9), 2, shuffle=True)
    batch_sampler, sampler = original.batch_sampler, original.sampler

    list(prepare(original, 1, 2))

    assert (original.batch_sampler, original.sampler) == (batch_sampler, sampler)
    assert len(list(original)) == 5


def test_a_rank_aware_batch_sampler_can_be_let_through() -> None:
    """transformers writes these two attributes for samplers that know their rank."""
    own = Batches(1, 2, 3, 4, 1)
    loader = prepare(DataLoader(Numbers(11), batch_sampler=own), 1, 2)
    assert isinstance(loader.batch_sampler, ShardedBatchSampler)
    assert loader.batch_sampler.batch_sampler is own
    loader.batch_sampler.num_processes = 1
    loader.batch_sampler.process_index = 0

    assert [len(batch) for batch in loader] == [1, 2, 3, 4, 1]


def test_batches_go_to_the_device() -> None:
    loader = prepare(DataLoader(Numbers(4), 2, collate_fn=collate), device=torch.device("meta"), non_blocking=True)

    batch = next(iter(loader))

    assert batch["ids"].device.type == "meta"
    assert batch["names"] == ["0", "1"]


def test_a_batch_on_the_cpu_is_the_very_object_of_the_collate_function() -> None:
    made = []

    def remember(samples: list[int]) -> list[int]:
        made.append(samples)
        return samples

    loader = prepare(DataLoader(Numbers(4), 2, collate_fn=remember), device=torch.device("cpu"))

    assert all(batch is made[-1] for batch in loader)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Numbers(0), 2), r"the dataset has 0 samples \(Numbers of a DataLoader\); check its path"),
        ([1, 2], "expected a torch DataLoader, got list; wrap the dataset in a DataLoader"),
    ],
)
def test_what_has_no_samples_or_is_no_loader_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(loader)


def test_a_sampler_that_shards_by_rank_is_not_cut_again() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1)
    for options in ({"batch_size": 2, "sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 2, False)}):
        with pytest.raises(ConfigError, match=r"DistributedSampler shards by rank already \(num_replicas=2\)"):
            prepare(DataLoader(Numbers(8), **options), 1, 2)
        assert len(list(prepare(DataLoader(Numbers(8), **options)))) == 2


def test_a_loader_that_keeps_its_own_iterator_is_refused() -> None:
    loader = DataLoader(Numbers(8), 2)
    loader.kept = iter(DataLoader(Numbers(8), 2))
    with pytest.raises(ConfigError, match="keeps an iterator that reads the whole dataset"):
        prepare(loader, 1, 2)


def test_a_loader_without_a_single_step_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = prepare(DataLoader(Numbers(3), 2, drop_last=True), 0, 2)

    assert "a loader has no steps: drop_last leaves out what does not fill a batch of 2 on each of 2 pr" in caplog.text
    assert list(loader) == []


def test_a_loader_over_a_stream_keeps_torchs_endless_sampler() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = prepare(DataLoader(Stream(), 2))

    assert type(loader.sampler).__name__ == "_InfiniteConstantSampler"
    assert isinstance(loader.dataset, Stream)
    with pytest.raises(TypeError):
        len(loader)


class Collecting(Numbers):
    """Sample i is the number i, of a worker with threads that collects its garbage."""

    def __getitem__(self, index: int) -> int:
        for _ in range(3):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        gc.collect()
        return index


class CollectingStream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return map(Collecting(4).__getitem__, range(4))


def read_beside_garbage() -> list[list[Any]]:
    gc.disable()
    cycle: list[Any] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    cycle.append(cycle)
    del cycle
    loaders = [prepare(DataLoader(dataset, 2, num_workers=1)) for dataset in (Collecting(4), CollectingStream())]
    return [[batch.tolist() for batch in loader] for loader in loaders]


def test_workers_do_not_collect_the_garbage_of_their_rank() -> None:
    # A store in a cycle waits for its thread as it is destroyed, which a fork does not have: torch aborts.
    assert run_ranks(read_beside_garbage, 1) == [[[[0, 1], [2, 3]]] * 2]


DATASET = """
import os
from pathlib import Path

IMPORTED_BY = os.getpid()


class Parents:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        server = os.getppid()
        return server == IMPORTED_BY, "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text()
"""
SERVED = """
import multiprocessing
import sys

from parents import Parents

if __name__ == "__main__":
    from torch.utils.data import DataLoader

    from accel_trainer import Accelerator

    for late in ("datasets", "transformers.trainer"):
        sys.modules.pop(late, None)  # of the process that this one is forked from; the server would import them, too
    if own := sys.argv[1:]:
        multiprocessing.set_forkserver_preload(own)
    loader = DataLoader(Parents(), num_workers=1, multiprocessing_context="forkserver")
    print([each.item() for batch in Accelerator(cpu=True).prepare(loader) for each in batch])
"""


@pytest.mark.parametrize(("own", "is_imported"), [([], True), (["__main__", "json"], False)])
def test_a_server_of_workers_imports_torch_and_the_dataset_unless_a_user_chose_what_it_imports(
    own: list[str], is_imported: bool, tmp_path: Path
) -> None:
    (tmp_path / "parents.py").write_text(DATASET)
    (tmp_path / "served.py").write_text(SERVED)
    command = [sys.executable, "-m", "served", *own]
    printed = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True).stdout
    assert printed.splitlines()[-1] == str([is_imported] * 4)


class FirstThree(DataLoader[Any]):
    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number == 3:
                return
            yield batch


@pytest.mark.parametrize(("at", "ended", "workers"), crossed([(0, 0), (7, 3), (11, 5)], [0, 1]))
def test_a_dataset_that_ends_a_pass_by_a_stop_iteration_is_an_error(
    at: int, ended: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For which torch waits for a worker that has ended its pass.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = prepare(DataLoader(EndsWithin(at), batch_size=2, num_workers=workers))
    said = ""
    try:
        list(loader)
    except ConfigError as error:  # not kept, and with it the iterator that has the workers
        said = str(error)
    gc.collect()
    assert f"a pass over the EndsWithin ended after {ended} batches, and the sampler had asked for more" in said
    assert len(list(prepare(FirstThree(EndsWithin(-1), batch_size=2)))) == 3


def test_a_generator_of_a_sampler_that_is_no_plain_shuffle_is_said_to_be_not_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * 8, 8, generator=generator)
    loader = prepare(DataLoader(Numbers(8), sampler=sampler))
    first = list(loader)
    assert not caplog.text
    generator.manual_seed(4)
    loader.set_epoch(0)
    with caplog.at_level(logging.WARNING):
        again = list(loader)
        list(loader)
    assert "of a loader's WeightedRandomSampler was seeded with 4 after prepare(), and its order" in caplog.text
    assert "follows the seed 3" in caplog.text
    assert caplog.text.count("was seeded") == 1
    assert torch.equal(torch.cat(again), torch.cat(first))


class Scenes(Dataset):
    """Items that are found by a name."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.full((4,), float(len(name)))

    def __len__(self) -> int:
        return 3


def test_names_of_items_that_are_batches_are_one_row_each() -> None:
    names = ["a", "scene-2", "c3"]
    loaders = [prepare(DataLoader(Scenes(), sampler=names, batch_size=None), rank, 2) for rank in range(2)]

    steps = [([int(batch[0]) for batch in batches], loaders[0].rows.rows) for batches in zip(*loaders, strict=True)]

    assert steps == [([1, 7], (1, 1)), ([2, 1], (1, 0))]
