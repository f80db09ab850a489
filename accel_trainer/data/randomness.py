"""Random numbers that repeat: private streams in place of the process's global ones, and streams that begin anew.

In the workers of a map-style loader they begin anew at every batch, by its number in the epoch. They would otherwise
depend on all that a worker has read before, and so on where a pass begins. What a batch draws is a function of the
loader's seed, epoch, shard and step, of the number of workers, and of what a `worker_init_fn` seeds.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, count, dropwhile, islice, repeat
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import get_worker_info

from accel_trainer.data.plan import mix_seed
from accel_trainer.data.wrapped import set_dataset_epoch
from accel_trainer.runtime.preemption import outlive_signals


class PrivateStreams:
    """A context in which Python's, NumPy's and torch's CPU streams are private ones that begin at a seed.

    It can be entered again and again: the private streams go on where the last block left them. The global ones stay
    where they are; only a second normal number that NumPy holds back from a pair is dropped.
    """

    def __init__(self, seed: int) -> None:
        # Swapping NumPy's bit generator costs 1 us, copying its state out and in four times 150 us.
        self._numpy = np.random.MT19937(seed % 2**64)
        self._python: Any = random.Random(seed).getstate()
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._begin = self._states()
        self._outer: tuple[Any, torch.Tensor, Any] | None = None

    def _states(self) -> tuple[Any, torch.Tensor, Any]:
        numpy_state: Any = self._numpy.state["state"]
        return self._python, self._torch, (numpy_state["pos"], numpy_state["key"].tolist())

    @property
    def were_used(self) -> bool:
        """Whether anything has been drawn from the private streams."""
        python_state, torch_state, numpy_state = self._states()
        return python_state != self._begin[0] or not torch_state.equal(self._begin[1]) or numpy_state != self._begin[2]

    def __enter__(self) -> None:
        self._outer = random.getstate(), torch.get_rng_state(), get_bit_generator()
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        set_bit_generator(self._numpy)

    def __exit__(self, *exception: object) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        assert self._outer is not None
        python_state, torch_state, numpy_generator = self._outer
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        set_bit_generator(numpy_generator)


class StepStreams:
    """Python's, NumPy's and torch's CPU streams of a loader's worker, which begin anew at every step.

    A step's numbers depend on its place, and on where the worker's streams are when the first one begins: a
    `worker_init_fn` that seeds some of them is respected, and what was read before makes no difference.
    """

    def __init__(self) -> None:
        self._seeds: tuple[int, int, int] | None = None

    def begin(self, *place: int) -> None:
        """Begin the streams of a place: an epoch and a step, for instance. 15 us."""
        if self._seeds is None:
            self._seeds = random.getrandbits(63), int(np.random.randint(2**63)), int(torch.randint(2**63 - 1, ()))
        python_seed, numpy_seed, torch_seed = self._seeds
        random.seed(mix_seed(python_seed, *place))
        np.random.seed(mix_seed(numpy_seed, *place) % 2**32)
        # Not torch.manual_seed: it goes through all kinds of accelerators, in 100 us.
        torch.default_generator.manual_seed(mix_seed(torch_seed, *place))


def draw_alike(source: Any, seed: int) -> Iterator[Any]:
    """Iterate `source` with private streams at `seed` for its draws; directly where its first item draws nothing."""
    streams = PrivateStreams(seed)
    with streams:
        items = iter(source)
        upcoming = list(islice(items, 1))
    private = streams if streams.were_used else nullcontext()
    while upcoming:
        yield upcoming[0]
        with private:
            upcoming = list(islice(items, 1))


# --- workers of a map-style loader ------------------------------------------------------------------------------------


class Turn:
    """Takes the place of a batch where a worker is left out."""


_TURN: tuple[Any, int, int] = (None, -1, 0)


class NumberedItems:
    """A sampler's items with their numbers; `begin()` gives the epoch, the first number and the workers to skip."""

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
    """A dataset in a worker, asked for numbered items: its streams begin anew before it is read.

    A persistent worker holds a copy of the dataset from the first pass on, which later epochs are told to here.
    """

    def __init__(self, dataset: Any, epoch: int) -> None:
        self.dataset = dataset
        self._epoch = epoch
        self._streams = StepStreams()

    def __getitems__(self, numbered: tuple[list[Any], int, int]) -> Any:
        # As torch's fetcher does.
        read_all = getattr(self.dataset, "__getitems__", None)
        return self._read(numbered, read_all or (lambda indices: [self.dataset[index] for index in indices]))

    def __getitem__(self, numbered: tuple[Any, int, int]) -> Any:
        return self._read(numbered, self.dataset.__getitem__)

    def _read(self, numbered: tuple[Any, int, int], read: Callable[[Any], Any]) -> Any:
        item, number, epoch = numbered
        if number < 0:
            return Turn()
        if epoch != self._epoch:
            set_dataset_epoch(self.dataset, epoch)
            self._epoch = epoch
        self._streams.begin(epoch, number)
        return read(item)


def collate_in_turn(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Return a batch, or its stand-in where the worker is left out."""
    return samples if type(samples) is Turn else collate(samples)


def init_worker(init: Callable[[int], Any] | None, worker_id: int) -> None:
    """Make a worker independent of the rank that it was forked from, and call the user's `worker_init_fn`.

    Whoever asks `get_worker_info()` from then on finds the user's dataset, of which the worker's own reads.
    """
    # The rank's garbage stays the rank's: a process group or a store in a reference cycle waits for its threads when it
    # is destroyed, which a fork does not have: torch aborts ("std::system_error: Invalid argument") or hangs.
    gc.freeze()
    outlive_signals()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
    if init is not None:
        init(worker_id)
