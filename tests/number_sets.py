"""Data sets of their own indices, map-style and streams: what a loader read is what it yields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from accel_trainer.data import metrics
from accel_trainer.data.plan import BatchRows
from accel_trainer.tree import map_leaves


class Numbers(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.num_samples


class Stream(IterableDataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Sized(Stream):
    def __len__(self) -> int:
        return self.num_samples


def keep_valid(data: Any, rows: BatchRows) -> Any:
    """Keep the valid rows of columns gathered from every shard, in the order of the shards."""
    return map_leaves(lambda leaf: metrics._keep(leaf, rows.rows, rows.sizes), data, is_leaf=metrics._is_column)
