"""`save_state` in the middle of an epoch, and `load_state` on another number of processes: the same samples go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.utils import set_seed
from tests.cells import beyond
from tests.loops import take_update
from tests.number_sets import hub_stream
from tests.ranks import preload, run_ranks

preload("datasets")

SAMPLES, GLOBAL_BATCH, EPOCHS = 21, 4, 2


def prepare(seed: int, is_stateful: bool = True, samples: int = SAMPLES, **options: Any) -> tuple[Accelerator, list]:
    configuration = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, data_seed=seed, **options)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    shuffled = DataLoader(list(range(samples)), batch_size, shuffle=True)
    streamed = DataLoader(hub_stream(samples, num_shards=3), batch_size)
    return accelerator, list(accelerator.prepare(shuffled, streamed))


def read(accelerator: Accelerator, loader: DataLoader, stop: int | None = None) -> list[int]:
    """Return what all ranks read until the last epoch, or in the first steps."""
    ids: list[int] = []
    while loader.epoch < EPOCHS:
        for step, batch in enumerate(loader, 1):
            column = batch["id"] if isinstance(batch, dict) else batch
            ids += accelerator.gather_for_metrics(column).tolist()
            if step == stop:
                return ids
    return ids


def save(directory: Path, stop: int) -> list[list[int]]:
    """Save after some steps of every loader."""
    accelerator, loaders = prepare(seed=3)
    heads = [read(accelerator, loader, stop) for loader in loaders]
    accelerator.save_state(directory)
    return heads


def resume(directory: Path) -> list[list[int]]:
    accelerator, loaders = prepare(seed=77)
    accelerator.load_state(directory)
    return [read(accelerator, loader) for loader in loaders]


def resume_by_hand(directory: Path, stop: int) -> list[int]:
    accelerator, (shuffled, _) = prepare(seed=77, is_stateful=False)
    accelerator.load_state(directory)
    return read(accelerator, accelerator.skip_first_batches(shuffled, stop))


def whole_and_saved(directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    accelerator, loaders = prepare(seed=3)
    return [read(accelerator, loader) for loader in loaders], save(directory, 2)


def resume_both(of_two: Path, of_one: Path) -> list[Any]:
    return [resume(of_two), resume(of_one), resume_by_hand(of_one, 3)]


@pytest.mark.multirank
def test_r7_save_state_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    (whole, head_of_two), again = run_ranks(whole_and_saved, 2, tmp_path / "two")
    assert again == (whole, head_of_two)
    head_of_one = save(tmp_path / "one", 3)
    assert [sorted(ids) for ids in whole] == [sorted([*range(SAMPLES)] * EPOCHS)] * 2

    for result in run_ranks(resume_both, 2, tmp_path / "two", tmp_path / "one"):
        for index in range(2):
            assert [*head_of_two[index], *result[0][index]] == whole[index]
            assert [*head_of_one[index], *result[1][index]] == whole[index]
        assert [*head_of_one[0], *result[2]] == whole[0]
    assert [[*head, *tail] for head, tail in zip(head_of_two, resume(tmp_path / "two"), strict=True)] == whole


def test_a_state_of_another_dataset_is_refused_when_loaders_resume_by_themselves(tmp_path: Path) -> None:
    save(tmp_path / "state", 2)
    accelerator, _ = prepare(seed=3, samples=9)

    with pytest.raises(IncompatibleCheckpointError, match=r"after 8 samples of a dataset of 21, .* dataset has 9"):
        accelerator.load_state(tmp_path / "state")
    accelerator, (loader, _) = prepare(seed=3, is_stateful=False, samples=9)
    accelerator.load_state(tmp_path / "state")
    assert sorted(read(accelerator, loader)) == sorted([*range(9)] * EPOCHS)


def train(parts: tuple[Any, ...], stop: int | None = None) -> list[float]:
    accelerator, model, optimizer, loader = parts
    losses = []
    while loader.epoch < EPOCHS:
        for step, batch in enumerate(loader, 1):
            loss = model(batch).square().mean()
            take_update(loss, optimizer, accelerator)
            losses.append(loss.item())
            if step == stop:
                return losses
    return losses


class Noisy(Dataset):
    """Numbers, which are disturbed when they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, float]:
        return disturb({"id": index})


def disturb(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "noise": random.random() + float(np.random.rand()) + torch.rand(()).item()}


def build_with_dropout(kind: str, workers: int, seed: int = 0, is_stateful: bool = True) -> tuple[Any, ...]:
    set_seed(seed)
    accelerator, _ = prepare(seed=3, is_stateful=is_stateful)
    model = nn.Sequential(nn.Linear(SAMPLES, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    dataset: Any = Noisy()
    if kind == "stream":
        dataset = hub_stream(SAMPLES, num_shards=2).map(disturb)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(dataset, batch_size, kind == "map" or None, num_workers=workers, collate_fn=mask)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def mask(samples: list[dict[str, float]]) -> torch.Tensor:
    """Return noise in the columns of the samples, of which some are masked at random."""
    noise = torch.zeros(len(samples), SAMPLES)
    for row, sample in zip(noise, samples, strict=True):
        row[int(sample["id"])] = sample["noise"]
    return noise * (torch.rand(len(samples), 1) < 0.7) * random.random() * np.random.rand()


class Cells(NamedTuple):
    """What is read, by how many workers, and where a run stops: the sixth step is the last of the epoch."""

    by_itself: list[tuple[str, int, tuple[int, ...]]]
    by_hand: list[tuple[str, int]]


# In the sample: on two ranks, of two of these three each pair; on one, each value.
ON_ONE = Cells([("map", 0, (6,)), ("stream", 2, (2,))], [("stream", 0)])
ON_TWO = Cells([("map", 0, (2, 6)), ("stream", 0, (2, 6)), ("stream", 2, (2,))], [("map", 2), ("stream", 0)])
OTHERS_ON_ONE = Cells(
    [("map", 0, (2,)), ("stream", 0, (2, 6)), ("map", 2, (2,))], [("map", 0), ("map", 2), ("stream", 2)]
)
OTHERS_ON_TWO = Cells([("map", 2, (2,))], [("map", 0), ("stream", 2)])


def lose_alike(folder: Path, cells: Cells) -> dict[str, tuple[list[float], list[float]]]:
    results = {}
    for kind, workers, stops in cells.by_itself:
        whole = train(build_with_dropout(kind, workers))
        for stop in stops:
            parts = build_with_dropout(kind, workers)
            head = train(parts, stop)
            parts[0].save_state(folder / f"{kind}{workers}{stop}")
            again = build_with_dropout(kind, workers, seed=5)
            again[0].load_state(folder / f"{kind}{workers}{stop}")
            results[f"{kind} {workers} {stop}"] = (whole, [*head, *train(again)])
    for kind, workers in cells.by_hand:
        # A loader that does not resume by itself may read shards of the stream's own, hence a whole run of its kind.
        whole = train(build_with_dropout(kind, workers, is_stateful=False))
        parts = build_with_dropout(kind, workers, is_stateful=False)
        head = train(parts, 3)
        parts[0].save_state(folder / f"by hand {kind}{workers}")
        parts = build_with_dropout(kind, workers, seed=5, is_stateful=False)
        parts[0].load_state(folder / f"by hand {kind}{workers}")
        tail = train((*parts[:3], parts[0].skip_first_batches(parts[3], 3)))
        results[f"by hand {kind} {workers}"] = (whole, [*head, *tail])
    return results


@pytest.mark.multirank
@pytest.mark.parametrize(("on_one", "on_two"), [(ON_ONE, ON_TWO), beyond((OTHERS_ON_ONE, OTHERS_ON_TWO))])
def test_r8_losses_with_dropout_and_augmentation_are_those_of_the_run_that_never_stopped(
    tmp_path: Path, on_one: Cells, on_two: Cells
) -> None:
    alone = lose_alike(tmp_path / "one", on_one)
    for results in (alone, *run_ranks(lose_alike, 2, tmp_path / "two", on_two, timeout=110)):
        for name, (whole, parts) in results.items():
            assert parts == whole, name


def sync_and_go_on(folder: Path) -> list[float]:
    """Draw on each rank otherwise, save within the epoch, and go on; return the next number of both runs."""
    drawn = []
    for is_again in (False, True):
        configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, rng_types=["torch"], dataloader_config=configuration)
        loader = accelerator.prepare(DataLoader(list(range(SAMPLES)), 2))
        if is_again:
            accelerator.load_state(folder)
        batches = iter(loader)
        next(batches)
        if not is_again:
            torch.rand(1 + accelerator.process_index)
            accelerator.save_state(folder)
        drawn.append(torch.rand(()).item())
        batches.close()
    return drawn


@pytest.mark.multirank
def test_streams_are_not_set_to_rank_0s_where_a_run_goes_on_within_an_epoch(tmp_path: Path) -> None:
    first, second = run_ranks(sync_and_go_on, 2, tmp_path / "state")

    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second
