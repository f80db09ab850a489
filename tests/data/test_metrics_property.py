"""`gather_for_metrics` for random loaders: every sample once, in the order of one process.

The ranks of a job are simulated in one process, in step; tests/data/test_metrics.py has the same on real ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_trainer.data import PreparedDataLoader, skip_first_batches
from tests import number_sets
from tests.number_sets import Numbers, Odd, Sized, Stream, keep_valid


class Cut(BatchSampler):
    """A batch sampler of the user's own class, with batches of one size."""


def collate(samples: Any) -> Any:
    ids = samples if isinstance(samples, list) else [samples]
    return {"ids": torch.tensor(ids), "nested": [(torch.tensor(ids)[:, None], [f"t{index}" for index in ids])]}


KINDS = ["sequential", "shuffled", "subset", "short", "long", "weighted", "odd", "cut", "single", "stream", "sized"]


def build(kind: str, num_samples: int, batch_size: int, drop_last: bool) -> DataLoader:
    data, options = Numbers(num_samples), {"drop_last": drop_last, "collate_fn": collate}
    samplers: dict[str, Any] = {
        "subset": lambda: SubsetRandomSampler(range(0, num_samples, 2)),
        "short": lambda: SequentialSampler(range(max(1, num_samples // 2))),
        "long": lambda: RandomSampler(data, replacement=True, num_samples=num_samples + 3),
        "weighted": lambda: WeightedRandomSampler([1.0] * num_samples, num_samples + 1),
        "odd": lambda: Odd(num_samples),
    }
    if kind in samplers:
        return DataLoader(data, batch_size, sampler=samplers[kind](), **options)
    if kind == "cut":
        return DataLoader(data, batch_sampler=Cut(SequentialSampler(data), batch_size, drop_last), collate_fn=collate)
    if kind == "single":
        return DataLoader(data, batch_size=None, shuffle=True, collate_fn=collate)
    if kind in ("stream", "sized"):
        return DataLoader(Stream(num_samples) if kind == "stream" else Sized(num_samples), batch_size, **options)
    return DataLoader(data, batch_size, shuffle=kind == "shuffled", **options)


@dataclass(frozen=True)
class Case:
    kind: str
    num_samples: int
    batch_size: int
    world_size: int
    drop_last: bool
    even: bool
    split: bool
    skip: int
    epoch: int


CASES = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 3),
    drop_last=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
    skip=st.integers(0, 3),
    epoch=st.integers(0, 2),
)


def prepare(case: Case, rank: int, world_size: int, batch_size: int, drop_last: bool) -> PreparedDataLoader:
    loader = build(case.kind, case.num_samples, batch_size, drop_last)
    splits = case.split and world_size > 1
    source = number_sets.prepare(loader, rank, world_size, seed=3, even_batches=case.even, split_batches=splits)
    source.set_epoch(case.epoch)
    return source


def gather(loaders: list[PreparedDataLoader]) -> tuple[list[int], list[int], list[str]]:
    ids: list[int] = []
    column: list[int] = []
    texts: list[str] = []
    for batches in zip(*loaders, strict=True):
        rows = loaders[0].rows
        assert all(loader.rows == rows for loader in loaders)
        ids += keep_valid(torch.cat([batch["ids"] for batch in batches]), rows).tolist()
        nested = [batch["nested"][0] for batch in batches]
        joined = [(torch.cat([part[0] for part in nested]), [text for part in nested for text in part[1]])]
        kept = keep_valid(joined, rows)[0]
        column += kept[0][:, 0].tolist()
        texts += kept[1]
    return ids, column, texts


@settings(max_examples=300, deadline=None)
@given(case=CASES)
def test_every_sample_once_for_any_loader_on_any_number_of_processes(case: Case) -> None:
    is_single = case.kind == "single"
    world_size = case.world_size
    per_step = world_size if is_single else case.batch_size * world_size
    given_batch = per_step if case.split and world_size > 1 else case.batch_size
    drop_last = case.drop_last and not is_single
    if is_single and case.split:
        return  # a single sample is no batch to split

    whole = gather([prepare(case, 0, 1, case.batch_size, False)])[0]
    loaders = [prepare(case, rank, world_size, given_batch, drop_last) for rank in range(world_size)]
    ids, column, texts = gather([skip_first_batches(loader, case.skip) if case.skip else loader for loader in loaders])

    end = len(whole) // per_step * per_step if drop_last else len(whole)
    assert ids == column == whole[case.skip * per_step : end]
    assert texts == [f"t{index}" for index in ids]
