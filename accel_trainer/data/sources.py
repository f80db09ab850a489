"""Where a prepared loader's batches come from: this shard's indices, its slice of a stream, its own shards, or rank 0.

A source reads one pass at a time and writes into the pass what each batch holds. It knows nothing of hooks or devices.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_trainer.data.plan import BatchRows, mix_seed
from accel_trainer.data.sampler import Clock, ShardedBatchSampler
from accel_trainer.data.stream import Collated, OwnShards, SlicedStream, set_dataset_epoch
from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.collectives import broadcast_object, exchange_integers, scatter_objects
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import stream_of

__all__ = ["DispatchSource", "IndexSource", "Pass", "ShardSource", "SliceSource", "Source"]


class Pass:
    """One iteration over a loader: how many batches it has handed out, and what the last one holds."""

    __slots__ = ("epoch", "rows", "taken", "total")

    def __init__(self, epoch: int, total: int | None) -> None:
        self.epoch = epoch
        self.total = total
        self.taken = 0
        self.rows: BatchRows | None = None


class Source(Protocol):
    """What a prepared loader asks of the place its batches come from."""

    start: int
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

    def starting_at(self, step: int) -> Source:
        """Return this source with its next pass beginning at `step`; the epoch stays shared."""

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return which settings of the user's loader the prepared one replaces."""

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield the batches of one pass, and keep `progress` up to date."""


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

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""
        return self.sampler.start

    @start.setter
    def start(self, step: int) -> None:
        self.sampler.start = step

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

    def starting_at(self, step: int) -> IndexSource:
        """Return this source with its next pass beginning at `step`."""
        moved = copy.copy(self)
        moved.sampler = self.sampler.starting_at(step)
        return moved

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
            progress.rows = planned.popleft() if planned else None
            progress.taken += 1
            yield batch

    def rounds(self, loader: Any, progress: Pass) -> Iterator[tuple[list[Any], BatchRows]]:
        """Yield the batches of all shards at each step; for a sampler that draws them in turn."""
        batches = self._begin(loader, progress)
        planned: deque[BatchRows] | None = None
        while together := list(islice(batches, self.sampler.num_processes)):
            if planned is None:
                planned = self.sampler.take_planned()
            yield together, planned.popleft()

    def _begin(self, loader: Any, progress: Pass) -> Iterator[Any]:
        if loader.num_workers > 0:
            # Workers derive their streams from one draw of this generator: augmentation differs per shard and worker.
            shard = stream_of(self.sampler.process_index or 0)
            loader.generator = torch.Generator().manual_seed(mix_seed(self._seed, progress.epoch, shard))
        return loader.native_iterator()


class _StreamSource:
    """What sources over iterable datasets share: a reader, which is the user's loader over a stream of steps."""

    def __init__(self, reader: DataLoader[Any], stream: SlicedStream | OwnShards, seed: int) -> None:
        self.start = 0
        self._reader = reader
        self._stream = stream
        self._seed = seed
        self._clock = Clock()

    @property
    def has_exact_length(self) -> bool:
        """Whether the length is what a pass will take: with several workers it is an estimate, as it is torch's."""
        return self._reader.num_workers <= 1

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: the dataset's, where it tells."""
        dataset = self._stream.dataset
        epoch = getattr(dataset, "epoch", None) if hasattr(dataset, "set_epoch") else None
        return epoch if isinstance(epoch, int) else self._clock.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards."""
        return self._stream.rule.per_round

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in the dataset and in what it wraps."""
        self._clock.epoch = epoch
        set_dataset_epoch(self._stream.dataset, epoch)

    def num_steps(self) -> int:
        """Steps of a whole pass, from the length of the dataset."""
        full, rest = divmod(len(self._stream.dataset), self._stream.rule.per_round)
        return full if self._stream.rule.drop_last or not rest else full + 1

    def starting_at(self, step: int) -> Any:
        """Return this source with its next pass beginning at `step`."""
        moved = copy.copy(self)
        moved.start = step
        return moved

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return what changes in the loader's settings: nothing; only the reader is another."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        reader = copy.copy(self._reader)
        reader._iterator = None
        return {**self.__dict__, "_reader": reader}

    def _begin(self, progress: Pass, shard: int) -> Iterator[Collated]:
        self._stream.begin_epoch(progress.epoch)
        if self._reader.num_workers > 0:
            self._reader.generator = torch.Generator().manual_seed(mix_seed(self._seed, progress.epoch, shard))
        return iter(self._reader)


class SliceSource(_StreamSource):
    """A stream that every rank reads from its beginning, keeping its slice of each global batch. No communication."""

    _stream: SlicedStream

    def rounds(self, loader: Any, progress: Pass) -> Iterator[tuple[Any, BatchRows]]:
        """Yield the batch (or, for a rule without a shard, the batches of all shards) of each step, and its rows."""
        self._stream.skip(self.start)
        # All ranks read the same stream, so their workers are seeded alike.
        items = _mark_last(self._begin(progress, shard=0), max(1, self._reader.num_workers))
        for item, is_last in islice(items, self.start, None) if self.start else items:
            rows = item.rows
            assert rows is not None
            yield item.batch, BatchRows(rows.rows, rows.sizes, is_last=True) if is_last else rows

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield this shard's slices."""
        for batch, rows in self.rounds(loader, progress):
            progress.rows = rows
            progress.taken += 1
            yield batch


def _mark_last(items: Iterator[Collated], num_readers: int) -> Iterator[tuple[Collated, bool]]:
    """Tell which step is the last of all readers' streams, when each reader says only where its own ends.

    A step that ends one reader's stream is held back while others are open: what they send next may be that they
    have nothing.
    """
    held: Collated | None = None
    for item in items:
        num_readers -= item.ends_reader
        if not item.is_step:
            continue
        if held is not None:
            yield held, False
            held = None
        if item.ends_reader and num_readers > 0:
            held = item
        else:
            yield item, num_readers == 0
    if held is not None:
        yield held, True


class ShardSource(_StreamSource):
    """A stream that offers shards: each rank reads its own, and the ranks agree at every step on who has samples.

    That agreement is one exchange of three integers for each step. It is under way while the step before it is used.
    """

    has_exact_length = False
    _stream: OwnShards

    def __init__(self, reader: DataLoader[Any], stream: OwnShards, seed: int, process: ProcessContext) -> None:
        super().__init__(reader, stream, seed)
        self._process = process

    def read(self, loader: Any, progress: Pass) -> Iterator[Any]:
        """Yield this rank's batches, and its last one again, without valid rows, while other ranks have more.

        Collective at every step.
        """
        drop_last = self._stream.rule.drop_last
        steps = islice(self._begin(progress, stream_of(self._process.rank)), self.start, None)
        current, following = next(steps, None), next(steps, None)
        spare: Collated | None = None
        pending = self._announce(current, following, spare)
        while True:
            table = pending()
            rows, sizes, more = (tuple(column) for column in zip(*table, strict=True))
            if not any(rows) or (drop_last and not all(rows)):
                return
            if not all(sizes):
                spare, sizes = self._lend(current, rows, sizes)
            goes_on = all(more) if drop_last else any(more)
            present, current = current or spare, following
            spare = present
            assert present is not None
            if goes_on:
                following = next(steps, None) if current is not None else None
                pending = self._announce(current, following, spare)
            progress.rows = BatchRows(rows, sizes, is_last=not goes_on)
            progress.taken += 1
            yield present.batch
            if not goes_on:
                return

    def _announce(self, current: Collated | None, following: Collated | None, spare: Collated | None) -> Any:
        """Start telling the others: valid rows of this rank's next batch, its size, and whether another follows."""
        shown = current or spare
        size = shown.rows.sizes[0] if shown is not None and shown.rows is not None else 0
        valid = current.rows.rows[0] if current is not None and current.rows is not None else 0
        return exchange_integers([valid, size, int(following is not None)], self._process)

    def _lend(
        self, current: Collated | None, rows: tuple[int, ...], sizes: tuple[int, ...]
    ) -> tuple[Collated, tuple[int, ...]]:
        """Give ranks that never had a sample the first batch of one that has, so that they can take part."""
        donor = next(rank for rank, count in enumerate(rows) if count)
        spare = broadcast_object(current if self._process.rank == donor else None, self._process, donor)
        return spare, tuple(size or sizes[donor] for size in sizes)


class DispatchSource:
    """Rank 0 reads, and sends each rank its own batch as an object: anything that pickles travels.

    One scatter for each step.
    """

    def __init__(self, inner: IndexSource | SliceSource, process: ProcessContext) -> None:
        self._inner = inner
        self._process = process
        self.has_exact_length = inner.has_exact_length

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""
        return self._inner.start

    @start.setter
    def start(self, step: int) -> None:
        self._inner.start = step

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

    def starting_at(self, step: int) -> DispatchSource:
        """Return this source with its next pass beginning at `step`."""
        return DispatchSource(self._inner.starting_at(step), self._process)

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
            batch, progress.rows = parcel
            progress.taken += 1
            yield batch
            if progress.rows.is_last:
                return

    def _parcels(self, loader: Any, progress: Pass) -> Iterator[list[Any]]:
        """What rank 0 sends at each step: a batch and its rows for each rank, an error's text, or None at the end."""
        size = self._process.world_size
        try:
            for batches, rows in self._inner.rounds(loader, progress):
                yield [(batch, rows) for batch in batches]
        except Exception as error:
            yield [f"{type(error).__name__}: {error}"] * size
            raise
        yield [None] * size
