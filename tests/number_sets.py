"""Data sets of their own indices, map-style and streams, and their loaders: what a loader read is what it yields."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from accel_trainer.config.schema import DataConfig
from accel_trainer.data import PreparedDataLoader, metrics, prepare_data_loader
from accel_trainer.data.plan import BatchRows
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.tree import map_leaves


class Numbers(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.num_samples


class Stream(IterableDataset):
    """Workers share the numbers out; `num_read` of them have been read in this process."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.num_read = num_samples, 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.num_samples, step):
            self.num_read += 1
            yield index


class Sized(Stream):
    def __len__(self) -> int:
        return self.num_samples


class Drawing(Stream):
    """Shuffles with Python's global random numbers, as many streams do."""

    def __iter__(self) -> Iterator[int]:
        ids = list(super().__iter__())
        random.shuffle(ids)
        yield from ids


class Odd(Sampler[int]):
    """A sampler of the user's own, drawing from torch's global stream."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_samples).tolist()

    def __len__(self) -> int:
        return self.num_samples


class EndsWithin(Numbers):
    """Raises StopIteration for one index, as `next()` in a dataset may."""

    def __init__(self, at: int) -> None:
        super().__init__(12)
        self.at = at

    def __getitem__(self, index: int) -> int:
        return next(iter([] if index == self.at else [index]))


class Batches:
    """A batch sampler of the user's own, with batches of these sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for size in self.sizes:
            yield list(range(begin, begin + size))
            begin += size

    def __len__(self) -> int:
        return len(self.sizes)


def hub_stream(num_samples: int, num_shards: int) -> Any:
    """A stream of Hugging Face's datasets, in shards."""
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(num_samples))}).to_iterable_dataset(num_shards=num_shards)


SEED = 17


def context(rank: int = 0, world_size: int = 1) -> ProcessContext:
    """A rank of a job that does not communicate."""
    return ProcessContext(rank, rank, world_size, world_size, torch.device("cpu"), None)


def prepare(
    loader: DataLoader, rank: int = 0, world_size: int = 1, *, seed: int = SEED, **options: Any
) -> PreparedDataLoader:
    """Prepare a loader for one rank of a job; `options` are those of DataConfig, and hooks and the device."""
    others = {name: options.pop(name) for name in ("on_begin", "on_end", "device") if name in options}
    process, config = context(rank, world_size), DataConfig(**options)
    return prepare_data_loader(loader, process=process, config=config, seed=seed, **others)


def valid_ids(loaders: list[PreparedDataLoader], key: str | None = None) -> list[int]:
    """Iterate the loaders of all ranks in step, and return the valid ids in the order of gathering."""
    ids: list[int] = []
    for batches in zip(*loaders, strict=True):
        for rank, batch in enumerate(batches):
            rows = loaders[rank].rows
            assert rows == loaders[0].rows
            values = torch.as_tensor(batch[key] if key else batch).view(-1)
            assert len(values) == rows.sizes[rank]
            ids += values[: rows.rows[rank]].tolist()
    return ids


def keep_valid(data: Any, rows: BatchRows) -> Any:
    """Keep the valid rows of columns gathered from every shard, in the order of the shards."""
    return map_leaves(lambda leaf: metrics._keep(leaf, rows.rows, rows.sizes), data, is_leaf=metrics._is_column)
