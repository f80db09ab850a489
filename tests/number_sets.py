"""Data sets of their own indices, map-style and streams: what a loader read is what it yields."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset

__all__ = ["Numbers", "Sized", "Stream"]


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
