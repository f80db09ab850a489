"""What workers of a map-style loader draw: by the batch's number, and not by what they have read before."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accel_trainer.data import PreparedDataLoader, skip_first_batches
from accel_trainer.runtime.rng import KeptStreams
from tests import number_sets
from tests.cells import crossed


class Drawn(Dataset):
    """Sample i is i with a number of each stream, and what its worker says of the dataset."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> list[float]:
        info = get_worker_info()
        assert info is None or isinstance(info.dataset, Drawn)
        return [index, random.random(), float(np.random.rand()), torch.rand(()).item()]


class DrawnTogether(Drawn):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        first = random.random()
        return [[*self[index], first] for index in indices]


def collate(samples: Any) -> tuple[Any, float]:
    return samples, random.random()


def seed_by_hand(worker_id: int) -> None:
    """As PyTorch's notes on randomness recommend, and transformers' seed_worker does."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def seed_alike(worker_id: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)


def prepare(dataset: Dataset, *, shard: int = 0, shards: int = 1, seed: int = 3, **options: Any) -> PreparedDataLoader:
    loader = DataLoader(dataset, **{"batch_size": 2, "num_workers": 2, "collate_fn": collate, **options})
    return number_sets.prepare(loader, shard, shards, seed=seed)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "three": {"num_workers": 3, "prefetch_factor": 1},
    "persistent": {"persistent_workers": True},
    "single samples": {"batch_size": None},
    "initialised": {"worker_init_fn": seed_by_hand},
}


@pytest.mark.parametrize(("name", "drawn"), crossed(CASES, [Drawn, DrawnTogether]))
def test_a_pass_that_begins_within_an_epoch_draws_what_a_full_one_draws(name: str, drawn: type[Dataset]) -> None:
    dataset = drawn()
    whole = prepare(dataset, **CASES[name])
    epochs = [list(whole), list(whole)]
    numbers = [noise for epoch in epochs for _, noise in epoch]
    assert len(set(numbers)) == len(numbers)

    for skipped in (4, 5):  # of two workers and of three, which begin with different ones
        again = skip_first_batches(prepare(dataset, **CASES[name]), skipped)
        assert list(again) == epochs[0][skipped:], skipped
    assert list(again) == epochs[1]


def test_a_loaded_position_draws_what_a_full_pass_draws() -> None:
    loader, again = prepare(Drawn(), shuffle=True), prepare(Drawn(), shuffle=True)
    batches = iter(loader)
    head = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    whole = [*head, *batches]
    assert whole == list(prepare(Drawn(), shuffle=True))

    again.load_state_dict(state)

    assert [*head, *again] == whole


def test_draws_differ_by_shard_epoch_worker_and_seed() -> None:
    loaders = [prepare(Drawn(), shards=2), prepare(Drawn(), shards=2, shard=1), prepare(Drawn(), shards=2, seed=4)]

    numbers = []
    for loader in loaders:
        torch.manual_seed(0)  # as set_seed(0) on every rank
        samples = [sample for _ in range(2) for batch, _ in loader for sample in batch]
        numbers += [number for _, *drawn in samples for number in drawn]

    assert len(set(numbers)) == len(numbers)


def test_streams_that_a_worker_init_function_seeds_are_its_own() -> None:
    first, second = (list(prepare(Drawn(), seed=seed, worker_init_fn=seed_alike)) for seed in (3, 4))

    assert first == second


def test_what_workers_are_sent_travels_to_those_that_are_spawned() -> None:
    loader = prepare(Drawn(), worker_init_fn=seed_by_hand)
    reading = loader._source.seeded_reading(loader)  # type: ignore[union-attr]
    sent = {name: reading[name] for name in ("dataset", "collate_fn", "worker_init_fn")}

    received = pickle.loads(pickle.dumps(sent))

    batches = []
    for read in (sent, received):
        seed_alike(0)
        with KeptStreams():
            batches.append(read["collate_fn"](read["dataset"].__getitems__(([4], 2, 0))))
    assert batches[0] == batches[1]
