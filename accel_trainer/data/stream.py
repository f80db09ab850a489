"""Reading streams: what runs where an iterable dataset is iterated, in the workers or in the main process.

A stream can be read once per rank, each rank keeping its slice of every global batch (`SlicedStream`), or it offers
shards of its own and each rank reads its part of them (`OwnShards`). Both say how many rows of a batch are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_trainer.data.plan import BatchRows, seed_for_epoch
from accel_trainer.data.randomness import PrivateStreams

__all__ = [
    "Collated",
    "OwnShards",
    "SliceCollate",
    "SlicedStream",
    "StreamRule",
    "reads_own_part",
    "set_dataset_epoch",
    "shards_of",
]


@dataclass(frozen=True, slots=True)
class StreamRule:
    """How the samples of a stream become rounds: shard r takes the r-th slice of every global batch."""

    shards: int
    shard: int | None
    """The shard that reads; None reads the slices of all of them."""
    per_shard: int
    """Samples in a full slice."""
    even: bool = True
    drop_last: bool = False

    @property
    def per_round(self) -> int:
        """Samples in a full global batch."""
        return self.shards * self.per_shard

    def rows(self, num_samples: int) -> BatchRows:
        """Return what each shard's slice of a global batch of `num_samples` holds."""
        rows = tuple(min(max(num_samples - s * self.per_shard, 0), self.per_shard) for s in range(self.shards))
        if self.shards == 1:
            return BatchRows(rows, rows)
        sizes = (self.per_shard,) * self.shards if self.even else tuple(max(1, count) for count in rows)
        return BatchRows(rows, sizes)

    def cut(self, samples: list[Any], shard: int, rows: BatchRows) -> list[Any]:
        """Return a shard's slice, filled to its size with samples of the same global batch."""
        begin = shard * self.per_shard
        mine = samples[begin : begin + self.per_shard]
        return [*mine, *islice(cycle(samples), rows.sizes[shard] - len(mine))]


@dataclass(slots=True)
class Collated:
    """What a reader hands over for one step: a batch (or one for each shard), and what is known of it."""

    batch: Any
    rows: BatchRows | None
    """None where there is no batch, because its step is skipped or the reader's stream is empty."""
    ends_reader: bool = False
    """Whether the stream that this came from (one for each worker) has nothing more."""
    is_step: bool = True
    """False for the one message of a reader whose stream is empty."""


@dataclass(slots=True)
class _Slice:
    """The samples of one step, before they are collated."""

    samples: list[list[Any]]
    rows: BatchRows | None
    ends_reader: bool = False
    is_step: bool = True


class _EpochStream(IterableDataset[Any]):
    """A stream that tells its dataset the epoch when a pass begins, in whatever process it is iterated."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64)

    def share(self) -> None:
        """Let worker processes see what changes between passes: persistent ones hold a copy from the first pass on."""
        self._epoch.share_memory_()

    def begin_epoch(self, epoch: int) -> None:
        """Choose the epoch of the pass that begins next."""
        self._epoch.fill_(epoch)

    def _open(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        set_dataset_epoch(self.dataset, epoch)
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(seed_for_epoch(self._seed, epoch))
        return iter(self.dataset)


class SlicedStream(_EpochStream):
    """The whole stream, of which this shard keeps its slice of every global batch."""

    def __init__(self, dataset: Any, rule: StreamRule, seed: int) -> None:
        super().__init__(dataset, seed)
        self.rule = rule
        self._skip = torch.zeros((), dtype=torch.int64)

    def share(self) -> None:
        """Let worker processes see what changes between passes."""
        super().share()
        self._skip.share_memory_()

    def skip(self, num_steps: int) -> None:
        """Leave out steps at the beginning of the next pass. The stream is read there, and nothing is collated."""
        self._skip.fill_(num_steps)

    def __iter__(self) -> Iterator[_Slice]:
        worker = get_worker_info()
        alike: AbstractContextManager[None] = nullcontext()
        if worker is None and self.rule.shards > 1:
            # The ranks must draw the same stream. In workers they do: those of all ranks are seeded alike.
            alike = PrivateStreams(seed_for_epoch(self._seed, int(self._epoch)))
        skip = int(self._skip)
        # Workers take turns, so the j-th step of any worker is at most the (j * workers + worker)-th step of all.
        unseen = skip if worker is None else -(-max(0, skip - worker.id) // worker.num_workers)
        step = 0
        rule = self.rule
        shards = range(rule.shards) if rule.shard is None else (rule.shard,)
        rows = rule.rows(rule.per_round)
        for chunk, is_last in self._chunks(alike):
            step += 1
            if step <= unseen:
                yield _Slice([], None, is_last)
                continue
            if is_last:
                rows = rule.rows(len(chunk))
            slices = [chunk] if rule.shards == 1 else [rule.cut(chunk, shard, rows) for shard in shards]
            yield _Slice(slices, rows, is_last)
        if step == 0:
            yield _Slice([], None, ends_reader=True, is_step=False)

    def _chunks(self, alike: AbstractContextManager[None]) -> Iterator[tuple[list[Any], bool]]:
        """Yield global batches, and whether each is the last. Reads one sample ahead, or a batch with `drop_last`."""
        size = self.rule.per_round
        ahead = size if self.rule.drop_last else 1
        with alike:
            samples = self._open()
            upcoming = list(islice(samples, ahead))
        while len(upcoming) == ahead:
            with alike:
                chunk = [*upcoming, *islice(samples, size - ahead)]
                upcoming = list(islice(samples, ahead))
            yield chunk, len(upcoming) < ahead


class SliceCollate:
    """Collate the samples of a step with the user's function."""

    def __init__(self, collate: Callable[[Any], Any], is_all: bool, is_single: bool) -> None:
        self.collate = collate
        self.is_all = is_all
        self.is_single = is_single

    def __call__(self, piece: _Slice) -> Collated:
        """Return what was cut for this step, collated."""
        batches = [self.collate(samples[0] if self.is_single else samples) for samples in piece.samples]
        batch = batches if self.is_all or not batches else batches[0]
        return Collated(batch, piece.rows, piece.ends_reader, piece.is_step)


class OwnShards(_EpochStream):
    """This rank's own part of a stream, one list of samples for each step."""

    def __init__(self, dataset: Any, rule: StreamRule, seed: int) -> None:
        super().__init__(dataset, seed)
        self.rule = rule

    def __iter__(self) -> Iterator[_Slice]:
        samples = self._open()
        size = self.rule.per_shard
        while chunk := list(islice(samples, size)):
            if len(chunk) < size and self.rule.drop_last:
                return
            count = len(chunk)
            filled = [*chunk, *islice(cycle(chunk), size - count)] if self.rule.even else chunk
            yield _Slice([filled], BatchRows((count,), (len(filled),)))


def shards_of(dataset: Any) -> int:
    """Return how many shards a stream offers through `num_shards` and `shard(num_shards, index)`, or 0."""
    count = getattr(dataset, "num_shards", 0)
    return count if isinstance(count, int) and callable(getattr(dataset, "shard", None)) else 0


def reads_own_part(dataset: Any) -> bool:
    """Return whether a stream yields this rank's samples only, so that cutting it again would lose data.

    It says so itself (`is_sharded_by_rank = True`), or `datasets.distributed.split_dataset_by_node` made it.
    """
    return bool(getattr(dataset, "is_sharded_by_rank", False)) or getattr(dataset, "_distributed", None) is not None


def set_dataset_epoch(dataset: Any, epoch: int, depth: int = 8) -> None:
    """Call `set_epoch` on a dataset and on those it wraps (`.dataset` of a subset, `.datasets` of a concatenation)."""
    if dataset is None or depth == 0:
        return
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    inner = getattr(dataset, "datasets", None)
    for wrapped in (getattr(dataset, "dataset", None), *(inner if isinstance(inner, Iterable) else ())):
        set_dataset_epoch(wrapped, epoch, depth - 1)
