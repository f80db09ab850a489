"""A pass that goes on where another stopped: the concatenated sample ids are those of the run that never stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from accel_trainer.data import PreparedDataLoader, skip_first_batches
from accel_trainer.errors import IncompatibleCheckpointError
from tests.cells import crossed
from tests.number_sets import Batches, Drawing, Numbers, Odd, Sized, Stream, hub_stream, prepare

SAMPLES, GLOBAL_BATCH, EPOCHS = 37, 8, 2
GROWING = (1, 2, 3, 4) * 3 + (1, 2, 3, 1)


class Keeping(Stream):
    """A stream with a state: it goes on after the number that it has yielded last."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)
        self.next, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[int]:
        begin, self.next = self.next, 0
        for index in range(begin, SAMPLES):
            self.num_read += 1
            self.next = index + 1
            yield (index + self.epoch) % SAMPLES
        self.next = 0


def collate(samples: list[Any]) -> list[int]:
    return [sample["id"] if isinstance(sample, dict) else sample for sample in samples]


def build(kind: str, batch_size: int, workers: int = 0, **options: Any) -> DataLoader:
    options = {"collate_fn": collate, "num_workers": workers, **options}
    if kind == "batches":
        return DataLoader(Numbers(SAMPLES), batch_sampler=Batches(*GROWING), **options)
    makers: dict[str, Any] = {
        "sequential": lambda: DataLoader(Numbers(SAMPLES), batch_size, **options),
        "shuffled": lambda: DataLoader(Numbers(SAMPLES), batch_size, shuffle=True, **options),
        "weighted": lambda: DataLoader(
            Numbers(SAMPLES), batch_size, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **options
        ),
        "random": lambda: DataLoader(Numbers(SAMPLES), batch_size, sampler=RandomSampler(range(SAMPLES)), **options),
        "odd": lambda: DataLoader(Numbers(SAMPLES), batch_size, sampler=Odd(SAMPLES), **options),
        "stream": lambda: DataLoader(Stream(SAMPLES), batch_size, **options),
        "sized": lambda: DataLoader(Sized(SAMPLES), batch_size, **options),
        "drawing": lambda: DataLoader(Drawing(SAMPLES), batch_size, **options),
        "keeping": lambda: DataLoader(Keeping(), batch_size, **options),
        "hub": lambda: DataLoader(hub_stream(SAMPLES, 3), batch_size, **options),
        "hub shuffled": lambda: DataLoader(
            hub_stream(SAMPLES, 4).shuffle(seed=5, buffer_size=7), batch_size, **options
        ),
    }
    return makers[kind]()


def prepare_ranks(
    kind: str, world_size: int, workers: int = 0, *, seed: int = 3, global_batch: int = GLOBAL_BATCH, **options: Any
) -> list[PreparedDataLoader]:
    """The loaders of all ranks of a job, in one process: these kinds of loaders do not communicate."""
    config = options.pop("config", {})
    loaders = [build(kind, global_batch // world_size, workers, **options) for _ in range(world_size)]
    return [
        prepare(loader, rank, world_size, seed=seed, use_stateful_dataloader=True, **config)
        for rank, loader in enumerate(loaders)
    ]


def steps(loaders: list[PreparedDataLoader], until: int = EPOCHS) -> Iterator[tuple[list[int], str]]:
    """Yield the valid ids of every step until an epoch, and the state, which all ranks must agree on, as JSON."""
    while loaders[0].epoch < until:
        for batches in zip(*loaders, strict=True):
            rows = loaders[0].rows
            ids = [index for batch, count in zip(batches, rows.rows, strict=True) for index in batch[:count]]
            states = {json.dumps(loader.state_dict()) for loader in loaders}
            assert len(states) == 1
            yield ids, states.pop()


def load(loaders: list[PreparedDataLoader], state: str) -> list[PreparedDataLoader]:
    for loader in loaders:
        loader.load_state_dict(json.loads(state))
    return loaders


def ids_of(read: Iterator[tuple[list[int], str]] | list[tuple[list[int], str]]) -> list[int]:
    return [index for ids, _ in read for index in ids]


MAP_KINDS = ["sequential", "shuffled", "weighted", "random", "odd"]
STREAM_KINDS = ["stream", "sized", "drawing", "keeping", "hub", "hub shuffled"]


@pytest.mark.parametrize(
    ("kind", "before", "after"), crossed([*MAP_KINDS, *STREAM_KINDS], [(1, 2), (2, 1), (4, 2), (2, 2), (1, 1)])
)
def test_r7_stopping_anywhere_and_going_on_with_other_ranks_reads_every_sample_once(
    kind: str, before: int, after: int
) -> None:
    whole = list(steps(prepare_ranks(kind, before)))
    assert sorted(ids_of(whole)) == sorted([*range(SAMPLES)] * EPOCHS) or kind == "weighted"
    for stop in (1, 3, 5, 6):  # within the first epoch, at its last step, and just after it
        head = list(islice(steps(prepare_ranks(kind, before)), stop))
        tail = steps(load(prepare_ranks(kind, after, seed=99), head[-1][1]))
        assert [*ids_of(head), *ids_of(tail)] == ids_of(whole), stop


@pytest.mark.parametrize(("kind", "after"), crossed(["shuffled", "stream", "hub", "hub shuffled"], [2, 1]))
def test_r7_what_workers_have_read_ahead_does_not_count(kind: str, after: int) -> None:
    whole = ids_of(steps(prepare_ranks(kind, 2, 2), until=1))
    head = list(islice(steps(prepare_ranks(kind, 2, 2)), 2))

    assert [*ids_of(head), *ids_of(steps(load(prepare_ranks(kind, after, 2), head[-1][1]), until=1))] == whole


@pytest.mark.parametrize("options", [{"drop_last": True}, {"config": {"even_batches": False}}])
def test_r7_a_position_holds_for_uneven_and_dropped_batches(options: dict[str, Any]) -> None:
    whole = ids_of(steps(prepare_ranks("shuffled", 2, **options)))
    for stop in (2, 5):
        head = list(islice(steps(prepare_ranks("shuffled", 2, **options)), stop))
        assert [*ids_of(head), *ids_of(steps(load(prepare_ranks("shuffled", 1, **options), head[-1][1])))] == whole


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_the_users_own_are_counted_whole(world_size: int) -> None:
    whole = list(steps(prepare_ranks("batches", 2)))
    head = list(islice(steps(prepare_ranks("batches", 2)), 3))
    loaders = load(prepare_ranks("batches", world_size), head[-1][1])

    assert json.loads(head[-1][1])["samples"] == 1 + 2 + 3 + 4 + 1 + 2
    assert len(loaders[0]) == -(-(len(GROWING) - 6) // world_size)
    assert [*ids_of(head), *ids_of(steps(loaders))] == ids_of(whole)


def test_another_batch_size_goes_on_with_the_next_sample() -> None:
    for kind in ("shuffled", "random", "stream", "hub"):
        whole = ids_of(steps(prepare_ranks(kind, 2), until=1))
        head = list(islice(steps(prepare_ranks(kind, 2)), 2))
        loaders = load(prepare_ranks(kind, 2, global_batch=6), head[-1][1])
        if kind == "shuffled":
            assert len(loaders[0]) == -(-(SAMPLES - 2 * GLOBAL_BATCH) // 6)
        assert [*ids_of(head), *ids_of(steps(loaders, until=1))] == whole


def test_a_stream_with_a_state_is_not_read_again() -> None:
    loader = prepare_ranks("keeping", 1)[0]
    head = list(islice(steps([loader]), 3))
    again = load(prepare_ranks("keeping", 1), head[-1][1])

    assert ids_of(steps(again, until=1)) == list(range(3 * GLOBAL_BATCH, SAMPLES))
    assert again[0].dataset.num_read == SAMPLES - 3 * GLOBAL_BATCH
    assert ids_of(steps(again, until=2)) == [*range(1, SAMPLES), 0]
    without = load(prepare_ranks("stream", 1), head[-1][1])
    assert ids_of(steps(without, until=1)) == list(range(3 * GLOBAL_BATCH, SAMPLES))
    assert without[0].dataset.num_read == SAMPLES


def test_the_state_tells_samples_epoch_and_seed() -> None:
    loader = prepare_ranks("shuffled", 1)[0]
    assert loader.state_dict()["samples"] == 0
    for step, _ in enumerate(loader, 1):
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == (0, min(step * GLOBAL_BATCH, SAMPLES))
        assert state["is_complete"] == (step == 5)
    assert (state["seed"], state["dataset_length"]) == (3, SAMPLES)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)


def test_a_loop_left_early_keeps_its_place_until_another_begins() -> None:
    loader = prepare_ranks("sequential", 1)[0]
    for _ in loader:
        break
    assert loader.state_dict()["samples"] == GLOBAL_BATCH
    for _ in loader:  # a pass within the same run begins anew
        assert loader.state_dict()["samples"] == GLOBAL_BATCH
        break
    loader.set_epoch(4)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (4, 0)


def test_a_state_saved_before_the_pass_goes_on_is_the_one_loaded() -> None:
    for kind in ("shuffled", "hub"):
        head = list(islice(steps(prepare_ranks(kind, 1)), 2))
        loader = load(prepare_ranks(kind, 1), head[-1][1])[0]
        again = load(prepare_ranks(kind, 1), json.dumps(loader.state_dict()))[0]
        assert again.state_dict()["samples"] == 2 * GLOBAL_BATCH
        assert ids_of(steps([again])) == ids_of(steps([loader]))


def test_after_the_last_step_of_an_epoch_the_next_pass_is_empty() -> None:
    *_, (_, state) = steps(prepare_ranks("sequential", 2), until=1)
    loader = load(prepare_ranks("sequential", 1), state)[0]

    assert (loader.epoch, len(loader), list(loader), loader.epoch) == (0, 0, [], 1)
    assert len(list(loader)) == 5


def test_a_position_is_for_its_epoch_and_for_one_pass() -> None:
    head = list(islice(steps(prepare_ranks("sequential", 1)), 2))
    loader = load(prepare_ranks("sequential", 1), head[-1][1])[0]
    loader.set_epoch(0)  # the epoch that it stands in: loops call this at the beginning of each
    assert len(loader) == 3
    loader.set_epoch(1)
    assert len(list(loader)) == 5
    loader.load_state_dict(json.loads(head[-1][1]))
    assert [len(list(loader)) for _ in range(2)] == [3, 5]


def test_a_noted_state_stays_that_of_its_moment() -> None:
    loader = prepare_ranks("sequential", 1)[0]
    noted, expected = [loader.noted_state_dict()], [loader.state_dict()]
    for _ in loader:
        noted.append(loader.noted_state_dict())
        expected.append(loader.state_dict())

    assert [note() for note in noted] == expected
    assert len({json.dumps(state) for state in expected}) == len(expected)


# --- with skip_first_batches ---------------------------------------------------------------------------------------


def test_skipping_by_hand_replaces_a_loaded_position() -> None:
    for kind in ("sequential", "stream", "keeping"):
        head = list(islice(steps(prepare_ranks(kind, 1)), 2))
        loader = load(prepare_ranks(kind, 1), head[-1][1])[0]

        rest = skip_first_batches(loader, 2)

        assert ids_of(steps([rest], until=1)) == list(range(2 * GLOBAL_BATCH, SAMPLES))
        assert len(list(loader)) == 5


def test_skipping_by_hand_is_seen_in_the_state_of_the_loader() -> None:
    for kind in ("shuffled", "weighted", "stream"):
        loader = prepare_ranks(kind, 1)[0]
        for _ in skip_first_batches(loader, 2):
            assert loader.state_dict()["samples"] == 3 * GLOBAL_BATCH
            break


def test_steps_counted_by_the_user_lead_to_the_right_epoch_at_its_end() -> None:
    *_, (_, state) = steps(prepare_ranks("shuffled", 1), until=1)
    whole = ids_of(steps(prepare_ranks("shuffled", 1)))
    for take in ("load_state_dict", "note_state_dict"):
        fresh = prepare_ranks("shuffled", 1, seed=9)[0]
        getattr(fresh, take)(json.loads(state))
        assert ids_of(steps([skip_first_batches(fresh, 0)])) == whole[SAMPLES:]
        fresh = prepare_ranks("shuffled", 1, seed=9)[0]
        getattr(fresh, take)(json.loads(state))
        assert ids_of(steps([skip_first_batches(fresh, 5)])) == whole[SAMPLES:]


def test_a_noted_position_waits_for_skip_first_batches_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    whole = ids_of(steps(prepare_ranks("shuffled", 1), until=1))
    head = list(islice(steps(prepare_ranks("shuffled", 1)), 2))
    loader = prepare_ranks("shuffled", 1, seed=9)[0]

    loader.note_state_dict(json.loads(head[-1][1]))
    assert ids_of(steps([skip_first_batches(loader, 2)], until=1)) == whole[2 * GLOBAL_BATCH :]
    assert not caplog.records
    loader.note_state_dict(json.loads(head[-1][1]))
    assert ids_of(steps([loader], until=1)) == whole
    assert "had read 16 samples (2 steps) of epoch 0, and this pass begins at the beginning" in caplog.text
    assert "skip_first_batches(loader, 2), or let loaders do it by themselves" in caplog.text


@pytest.mark.parametrize(
    ("global_batch", "words"),
    [
        (GLOBAL_BATCH // 2, "go on with skip_first_batches(loader, 4), or let loaders do it by themselves with Data"),
        (5, "of epoch 0; go on with DataLoaderConfiguration(use_stateful_dataloader=True)"),
    ],
)
def test_the_advice_counts_steps_of_the_size_that_they_have_now(
    global_batch: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = list(islice(steps(prepare_ranks("shuffled", 1)), 2))
    loader = prepare_ranks("shuffled", 1, global_batch=global_batch)[0]
    loader.note_state_dict(json.loads(head[-1][1]))
    next(iter(loader))
    assert words in caplog.text


# --- what cannot be gone on from -----------------------------------------------------------------------------------


def refuse(loader: PreparedDataLoader, state: dict[str, Any], message: str) -> None:
    before = loader.state_dict()
    with pytest.raises(IncompatibleCheckpointError, match=message):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


def test_another_dataset_another_reading_and_another_kind_are_refused() -> None:
    state = json.loads(list(islice(steps(prepare_ranks("sequential", 1)), 2))[-1][1])
    sequential = prepare_ranks("sequential", 1)[0]
    refuse(sequential, {**state, "dataset_length": 50}, "after 16 samples of a dataset of 50, .* dataset has 37")
    refuse(sequential, {**state, "colour": 1}, "holds .*'colour'.* and this version knows")
    refuse(sequential, {"samples": 3}, "load what state_dict")
    refuse(
        prepare_ranks("batches", 1)[0],
        {**state, "samples": 15},
        "15 samples, and 7 batches of this loader's Batches have 16",
    )
    stream = prepare_ranks("stream", 1, 2)[0]
    refuse(stream, {**state, "dataset_length": None}, "stream read in 1 parts, .* reads it in 2")
    refuse(stream, {**state, "readers": 2, "global_batch": 4}, "2 steps of 4 samples, and a step of this loader has 8")
    sequential.load_state_dict({"epoch": 3})
    assert sequential.epoch == 3


class Growing:
    """Has a sample more in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.num_samples = SAMPLES + epoch


class GrowingNumbers(Growing, Numbers):
    pass


class GrowingStream(Growing, Sized):
    pass


@pytest.mark.parametrize("kind", [GrowingNumbers, GrowingStream])
def test_a_dataset_whose_length_depends_on_the_epoch_goes_on_in_it(kind: type) -> None:
    def loader() -> PreparedDataLoader:
        return prepare(DataLoader(kind(SAMPLES), GLOBAL_BATCH, collate_fn=collate), use_stateful_dataloader=True)

    begun, resumed = loader(), loader()
    begun.set_epoch(2)
    reading = iter(begun)
    read = [next(reading), next(reading)]
    state = begun.state_dict()
    resumed.load_state_dict(state)
    assert [number for batch in (*read, *resumed) for number in batch] == list(range(SAMPLES + 2))
    refuse(loader(), {**state, "dataset_length": SAMPLES + 1}, "dataset of 38, .* dataset has 39")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_is_one_of_torch(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def build(world_size: int) -> list[PreparedDataLoader]:
        options = {"shuffle": True, "num_workers": workers, "collate_fn": collate}
        size = GLOBAL_BATCH // world_size
        loaders = [stateful.StatefulDataLoader(Numbers(SAMPLES), size, **options) for _ in range(world_size)]
        return [prepare(loader, rank, world_size, seed=3) for rank, loader in enumerate(loaders)]

    whole = ids_of(steps(prepare_ranks("shuffled", 2)))
    head = list(islice(steps(build(2)), 2))
    assert [*ids_of(head), *ids_of(steps(load(build(1), head[-1][1])))] == whole
