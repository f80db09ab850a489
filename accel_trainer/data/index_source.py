"""Where a prepared loader's batches come from: this shard's indices of a dataset, or rank 0, which reads for all.

Sources over iterable datasets are in `streaming`. A source reads one pass at a time and writes into the pass what each
batch holds. It knows nothing of hooks or devices.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_trainer.data.iterable_reader import set_dataset_epoch
from accel_trainer.data.plan import BatchRows, mix_seed
from accel_trainer.data.position import Pass, Place, Position
from accel_trainer.data.sampler import ShardedBatchSampler
from accel_trainer.errors import IncompatibleCheckpointError, ProcessGroupError
from accel_trainer.runtime.collectives import scatter_objects
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import stream_index

__all__ = ["DispatchSource", "IndexSource", "ReadingSource", "Source"]


class Source(Protocol):
    """What a prepared loader asks of the place its batches come from."""

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""

    @property
    def has_exact_length(self) -> bool:
        """Whether `num_steps` is what a pass will really take."""

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards; None where batches vary in size."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in samplers and datasets."""

    def num_steps(self) -> int:
        """Steps of a whole pass; TypeError where that is not known."""

    def num_left(self) -> int:
        """Steps of the next pass; TypeError where that is not known."""

    def starting_at(self, step: int) -> Source:
        """Return this source with its next pass beginning at `step`; the epoch stays shared."""

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return which settings of the user's loader the prepared one replaces."""

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield the batches of one pass, and keep `progress` up to date."""

    def position(self, epoch: int, progress: Pass | None) -> Position:
        """Return where a pass stands, or where the next one begins."""

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch where `position` says.

        Raises:
            IncompatibleCheckpointError: this source cannot go on there exactly; nothing has changed.
        """

    @property
    def loaded(self) -> Position | None:
        """The position that the next pass will begin at, if it came from `resume`."""

    def forget(self) -> None:
        """Leave out the position that came from `resume`."""


class ReadingSource(Source, Protocol):
    """A source that rank 0 can read for all."""

    def rounds(self, loader: Any, progress: Pass) -> Iterator[tuple[Any, BatchRows]]:
        """Yield the batches of all shards at each step, and what they hold."""


class IndexSource:
    """A map-style dataset: the loader's own sampler hands out this shard's indices."""

    has_exact_length = True

    def __init__(
        self, sampler: ShardedBatchSampler, dataset: Any, seed: int, *, is_batched: bool, in_order: bool
    ) -> None:
        self.sampler = sampler
        self._is_batched = is_batched
        self._in_order = in_order
        self._dataset = dataset
        self._seed = seed
        self._resumed: Position | None = None

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""
        return self.sampler.start

    @property
    def epoch(self) -> int:
        """The epoch of the next pass, as the sampler has it."""
        return self.sampler.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards."""
        size = self.sampler.batch_size
        return size if size is None or self.sampler.split_batches else size * self.sampler.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in the samplers and in the dataset, through whatever wraps them."""
        self.sampler.set_epoch(epoch)
        set_dataset_epoch(self._dataset, epoch)

    def num_steps(self) -> int:
        """Steps of a whole pass."""
        return len(self.sampler.starting_at(0))

    def num_left(self) -> int:
        """Steps of the next pass."""
        return len(self.sampler)

    def starting_at(self, step: int) -> IndexSource:
        """Return this source with its next pass beginning at `step`."""
        moved = copy.copy(self)
        moved.sampler, moved._resumed = self.sampler.starting_at(step), None
        return moved

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""
        self.sampler.begin_at(0)
        self._resumed = None

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return what changes in the loader's settings: the sampler that decides, and the shuffle below it."""
        if not self._is_batched:
            return {"sampler": self.sampler, "in_order": self._in_order}
        base = self.sampler.batch_sampler
        inner = {"sampler": base.sampler} if type(base) is BatchSampler else {}
        return {"batch_sampler": self.sampler, "in_order": self._in_order, **inner}

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield this shard's batches."""
        planned: deque[BatchRows] | None = None
        for batch in self._begin(loader, progress):
            if planned is None:  # a loader class of the user's own may ask for indices as late as for its first batch
                planned = self.sampler.take_planned()
                progress.start = self.sampler.began_at
            rows = planned.popleft() if planned else None
            if rows is not progress.rows:
                progress.change(rows)
            progress.taken += 1
            yield batch

    def rounds(self, loader: Any, progress: Pass) -> Iterator[tuple[list[Any], BatchRows]]:
        """Yield the batches of all shards at each step; for a sampler that draws them in turn."""
        batches = self._begin(loader, progress)
        planned: deque[BatchRows] | None = None
        while together := list(islice(batches, self.sampler.num_processes)):
            if planned is None:
                planned = self.sampler.take_planned()
                progress.start = self.sampler.began_at
            yield together, planned.popleft()

    def position(self, epoch: int, progress: Pass | None) -> Position:
        """Return where a pass stands, or where the next one begins."""
        resumed, place = self.loaded, Place()
        if progress is not None:
            place = Place(progress.start.samples + progress.num_samples, progress.start.steps + progress.taken)
        elif resumed is not None:
            place = Place(resumed.samples, resumed.steps)
        return Position(
            epoch=epoch,
            samples=place.samples,
            steps=place.steps,
            is_complete=resumed.is_complete if progress is None and resumed else is_at_end(progress),
            seed=self.sampler.order_seed,
            dataset_length=length_of(self._dataset),
            global_batch=self.total_batch_size,
        )

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch where `position` says."""
        check_length(self._dataset, position)
        sampler, before = self.sampler, (self.epoch, self.sampler.order_seed)
        self.set_epoch(position.epoch)
        if position.seed is not None:
            sampler.order_seed = position.seed
        try:
            origin = sampler.origin_of(position.samples)
        except IncompatibleCheckpointError:
            self.set_epoch(before[0])
            sampler.order_seed = before[1]
            raise
        if self._seed == before[1]:
            self._seed = position.seed if position.seed is not None else self._seed
        sampler.begin_at(0, (position.epoch, origin))
        self._resumed = position if position.samples else None

    @property
    def loaded(self) -> Position | None:
        """The position that the next pass will begin at, if it came from `resume`."""
        resumed = self._resumed
        return resumed if resumed is not None and resumed.epoch == self.epoch else None

    def forget(self) -> None:
        """Leave out the position that came from `resume`."""
        self.sampler.begin_at(self.sampler.start)
        self._resumed = None

    def _begin(self, loader: Any, progress: Pass) -> Iterator[Any]:
        if loader.num_workers > 0:
            # Workers derive their streams from one draw of this generator: augmentation differs per shard and worker.
            shard = stream_index(self.sampler.process_index or 0)
            loader.generator = torch.Generator().manual_seed(mix_seed(self._seed, progress.epoch, shard))
        elif self.sampler.start or self.sampler.origin:
            return begin_silently(loader, loader.native_iterator)
        return loader.native_iterator()


class DispatchSource:
    """Rank 0 reads, and sends each rank its own batch as an object: anything that pickles travels.

    One scatter for each step.
    """

    def __init__(self, inner: ReadingSource, process: ProcessContext) -> None:
        self._inner = inner
        self._process = process
        self.has_exact_length = inner.has_exact_length

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""
        return self._inner.start

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._inner.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all ranks."""
        return self._inner.total_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; rank 0's is the one that counts."""
        self._inner.set_epoch(epoch)

    def num_steps(self) -> int:
        """Steps of a whole pass."""
        return self._inner.num_steps()

    def num_left(self) -> int:
        """Steps of the next pass."""
        return self._inner.num_left()

    def starting_at(self, step: int) -> DispatchSource:
        """Return this source with its next pass beginning at `step`."""
        moved: Any = self._inner.starting_at(step)
        return DispatchSource(moved, self._process)

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""
        self._inner.rewind()

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return what changes in the loader's settings. Ranks take turns in a fixed order."""
        return {**self._inner.settings(loader), "in_order": True}

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield this rank's batches. Collective at every step.

        Raises:
            ProcessGroupError: rank 0 could not read; it raises the error itself.
        """
        parcels = self._parcels(loader, progress) if self._process.is_main else None
        while True:
            parcel = scatter_objects(next(parcels) if parcels is not None else None, self._process)
            if isinstance(parcel, str):
                if parcels is not None:
                    next(parcels)  # raises what went wrong here
                raise ProcessGroupError(f"rank 0, which reads for all ranks, failed: {parcel}; see its traceback")
            if parcel is None:
                return
            batch, rows, progress.start = parcel
            progress.change(rows)
            progress.taken += 1
            yield batch
            if rows.is_last:
                return

    def position(self, epoch: int, progress: Pass | None) -> Position:
        """Return where a pass stands. What a dataset says of itself is known to rank 0."""
        return self._inner.position(epoch, progress)

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch where `position` says."""
        self._inner.resume(position)

    @property
    def loaded(self) -> Position | None:
        """The position that the next pass will begin at, if it came from `resume`."""
        return self._inner.loaded

    def forget(self) -> None:
        """Leave out the position that came from `resume`."""
        self._inner.forget()

    def _parcels(self, loader: Any, progress: Pass) -> Iterator[list[Any]]:
        """What rank 0 sends at each step: a batch and its rows for each rank, an error's text, or None at the end."""
        size = self._process.world_size
        try:
            for batches, rows in self._inner.rounds(loader, progress):
                yield [(batch, rows, progress.start) for batch in batches]
        except Exception as error:
            yield [f"{type(error).__name__}: {error}"] * size
            raise
        yield [None] * size


def begin_silently(loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Begin a pass in the middle of an epoch without a draw from torch's global stream.

    A loader without workers draws a number there when an epoch begins. It is drawn already in the random state that a
    run goes on with, and another one would change every dropout after it.
    """
    kept, loader.generator = loader.generator, torch.Generator()
    try:
        return begin()
    finally:
        loader.generator = kept


def is_at_end(progress: Pass | None) -> bool:
    """Return whether a pass has handed out its last batch."""
    return progress is not None and progress.is_complete


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def check_length(dataset: Any, position: Position) -> None:
    """Raise unless a dataset is as long as the one that a position was taken from, where both lengths are known.

    Raises:
        IncompatibleCheckpointError: it is not; a place in one dataset says nothing about another.
    """
    length = length_of(dataset)
    if None not in (length, position.dataset_length) and length != position.dataset_length:
        raise IncompatibleCheckpointError(
            f"the state was saved after {position.samples} samples of a dataset of {position.dataset_length}, and this "
            f"loader's dataset has {length}; prepare the loader over the same dataset. To go over to another one, turn "
            "off use_stateful_dataloader for load_state, or give load_state_dict of the loader an epoch alone"
        )
