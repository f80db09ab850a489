"""Random streams in the workers of a map-style loader: they begin anew at every batch, by its number in the epoch.

They would otherwise depend on all that a worker has read before, and so on where a pass begins. What a batch draws is a
function of the loader's seed, epoch, shard and step, of the number of workers, and of what a `worker_init_fn` seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, dropwhile, repeat
from typing import Any

from torch.utils.data import get_worker_info

from accel_trainer.data.randomness import StepStreams

__all__ = ["CollateInTurn", "NumberedItems", "SeededDataset", "WorkerInit", "without_turns"]


class Turn:
    """Takes the place of a batch where a worker is left out."""


_TURN: tuple[Any, int, int] = (None, -1, 0)


class NumberedItems:
    """A sampler's items, each with its number in the epoch, and the epoch.

    Args:
        begin: called when a pass begins; returns the epoch and the number of the first item, and how many workers to
            leave out before it: each item is then read by the worker that reads it in a full pass.
    """

    def __init__(self, sampler: Any, begin: Callable[[], tuple[int, int, int]]) -> None:
        self._sampler = sampler
        self._begin = begin

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        items = iter(self._sampler)
        epoch, first, num_turns = self._begin()
        # The items come first: their iterator may go on after a StopIteration, and then no number has been lost.
        numbered = zip(items, count(first), repeat(epoch), strict=False)
        return chain(repeat(_TURN, num_turns), numbered) if num_turns else numbered

    def __len__(self) -> int:
        return len(self._sampler)


def without_turns(batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches from the first one on that is one."""
    return dropwhile(lambda batch: type(batch) is Turn, batches)


class SeededDataset:
    """A dataset in a worker, asked for numbered items: its streams begin anew before it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._streams = StepStreams()

    def __getitems__(self, numbered: tuple[list[Any], int, int]) -> Any:
        indices, number, epoch = numbered
        if number < 0:
            return Turn()
        self._streams.begin(epoch, number)
        # As torch's fetcher does.
        read_all = getattr(self.dataset, "__getitems__", None)
        return read_all(indices) if read_all else [self.dataset[index] for index in indices]

    def __getitem__(self, numbered: tuple[Any, int, int]) -> Any:
        index, number, epoch = numbered
        if number < 0:
            return Turn()
        self._streams.begin(epoch, number)
        return self.dataset[index]


class CollateInTurn:
    """A loader's collate function, which is not called where a worker is left out."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return a batch, or its stand-in."""
        return samples if type(samples) is Turn else self._collate(samples)


class WorkerInit:
    """A loader's `worker_init_fn`, which finds the user's dataset in `get_worker_info()`."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Initialise a worker, which calls it once."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
        if self._init is not None:
            self._init(worker_id)
