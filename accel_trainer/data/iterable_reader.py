"""Streams of steps over an iterable dataset, iterated in the workers or in the main process.

Every rank reads a full dataset and keeps its slice of each global batch (`SlicedStream`), or the dataset has shards of
its own, and each rank reads some of them (`ShardedStream`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding, get_all_graph_pipes

from accel_trainer.data.plan import BatchRows, mix_seed, seed_for_epoch
from accel_trainer.data.randomness import PrivateStreams, StepStreams
from accel_trainer.runtime.rng import stream_index


@dataclass(frozen=True, slots=True)
class StreamRule:
    """How the samples of a stream become rounds: shard r takes the r-th slice of every global batch."""

    shards: int
    shard: int | None
    """The shard that is read; None reads the slices of all of them."""
    per_shard: int
    """Samples in a full slice."""
    even: bool = True
    drop_last: bool = False

    @property
    def per_round(self) -> int:
        """Samples in a full global batch."""
        return self.shards * self.per_shard

    def rows(self, num_samples: int) -> BatchRows:
        """Return the rows of each shard's slice of a global batch of `num_samples`."""
        rows = tuple(min(max(num_samples - s * self.per_shard, 0), self.per_shard) for s in range(self.shards))
        if self.shards == 1:
            return BatchRows(rows, rows)
        sizes = (self.per_shard,) * self.shards if self.even else tuple(max(1, count) for count in rows)
        return BatchRows(rows, sizes)

    def slice_of(self, samples: list[Any], shard: int, rows: BatchRows) -> list[Any]:
        """Return a shard's slice, filled to its size with samples of the same global batch."""
        begin = shard * self.per_shard
        mine = samples[begin : begin + self.per_shard]
        return [*mine, *islice(cycle(samples), rows.sizes[shard] - len(mine))]


@dataclass(slots=True, eq=False)
class Step:
    """The samples of one step, which are collated in place, with their rows and the end of the reader's stream.

    Nearly all steps of a stream are full ones, whose rows are known: of those, readers hand over the samples alone,
    because making an object for each costs a tenth of a small batch.
    """

    content: Any
    """Lists of samples, one for each shard that the reader serves; collated, a batch or a list of batches."""
    rows: BatchRows | None
    """None where there is no batch, because its step is skipped or the reader's stream is empty."""
    ends_reader: bool = False
    """Whether the stream that this came from (one for each worker) has nothing more."""
    is_step: bool = True
    """False for the one message of a reader whose stream is empty."""
    dataset_state: Any = None
    """The dataset's `state_dict()` after these samples, where the stream keeps it."""
    is_collated: bool = False


class _EpochStream(IterableDataset[Any]):
    """A stream that sets its dataset's epoch when a pass begins, in whatever process it is iterated."""

    def __init__(self, dataset: Any, rule: StreamRule, seed: int) -> None:
        self.dataset = dataset
        self.rule = rule
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._num_begun = 0
        self._step_streams = StepStreams()

    def share(self) -> None:
        """Share the epoch with worker processes: persistent ones hold a copy of the stream from the first pass on."""
        self._epoch.share_memory_()

    def begin_epoch(self, epoch: int) -> None:
        """Choose the epoch of the pass that begins next."""
        self._epoch.fill_(epoch)

    def begin_step(self) -> None:
        """Begin the worker's random streams of the step whose samples it has read last."""
        self._step_streams.begin(int(self._epoch), self._num_begun)

    def _private_streams(self, *shard: int) -> PrivateStreams:
        """Return the streams that the dataset draws from, alike on all ranks unless a shard is given."""
        epoch, worker = int(self._epoch), get_worker_info()
        if worker is None and not shard:
            return PrivateStreams(seed_for_epoch(self.seed, epoch))
        return PrivateStreams(mix_seed(self.seed, epoch, -1 if worker is None else worker.id, *shard))

    def _open(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        set_dataset_epoch(self.dataset, epoch)
        seed = seed_for_epoch(self.seed, epoch)
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(seed)
        if isinstance(self.dataset, IterDataPipe):
            _prepare_pipe(self.dataset, seed)
        return iter(self.dataset)


class SlicedStream(_EpochStream):
    """All samples of a dataset, of which this shard keeps its slice of every global batch.

    Args:
        keeps_state: ask the dataset for its `state_dict()` at every step.

    While the dataset is read, private random streams that begin at seed and epoch take the place of the global ones:
    another rank, or a later run that reads up to where it goes on, draws the same.
    """

    def __init__(self, dataset: Any, rule: StreamRule, seed: int, *, keeps_state: bool = False) -> None:
        super().__init__(dataset, rule, seed)
        self.keeps_state = keeps_state
        self._skip = torch.zeros((), dtype=torch.int64)
        self._origin: tuple[int, Any] = (0, None)

    def share(self) -> None:
        """Share the epoch and the steps to skip with worker processes."""
        super().share()
        self._skip.share_memory_()

    def skip(self, num_steps: int) -> None:
        """Leave out steps at the beginning of the next pass. The stream is read there, and nothing is collated."""
        self._skip.fill_(num_steps)

    def begin_at(self, num_samples: int, dataset_state: Any) -> None:
        """Begin the next pass after some samples: the dataset loads its state, or is read up to there."""
        self._origin = (num_samples, dataset_state)

    def __iter__(self) -> Iterator[Step | list[list[Any]]]:
        step, unseen, rule, worker = 0, int(self._skip), self.rule, get_worker_info()
        if worker is not None:
            # Workers take turns, so the j-th step of any worker is at most the (j * workers + worker)-th step of all.
            unseen = -(-max(0, unseen - worker.id) // worker.num_workers)
        is_alone, keeps_state = rule.shards == 1, self.keeps_state
        shards = range(rule.shards) if rule.shard is None else (rule.shard,)
        rows = rule.rows(rule.per_round)
        for chunk, is_last, state in self._chunks():
            step += 1
            self._num_begun = step
            if step <= unseen:
                yield Step([], None, is_last)
                continue
            if is_last:
                rows = rule.rows(len(chunk))
            slices = [chunk] if is_alone else [rule.slice_of(chunk, shard, rows) for shard in shards]
            yield Step(slices, rows, is_last, True, state) if is_last or keeps_state else slices
        if step == 0:
            yield Step([], None, ends_reader=True, is_step=False)

    def _chunks(self) -> Iterator[tuple[list[Any], bool, Any]]:
        """Yield global batches, whether each is the last, and the dataset's state; reads a sample or a batch ahead."""
        size, is_alone = self.rule.per_round, self.rule.shards == 1
        ahead = size if self.rule.drop_last else 1
        num_samples, loaded = self._origin
        streams = self._private_streams()
        with streams:
            if loaded is not None:
                self.dataset.load_state_dict(loaded)
                num_samples = 0
            samples = islice(self._open(), num_samples, None)
            upcoming = list(islice(samples, ahead))
        draws = streams.were_used
        private = streams if draws or not is_alone else nullcontext()  # 23 us a step
        while len(upcoming) == ahead:
            with private:
                chunk = [*upcoming, *islice(samples, size - ahead)]
                # A dataset that draws is read again up to there: its own state does not hold the streams.
                state = self.dataset.state_dict() if self.keeps_state and not draws else None
                upcoming = list(islice(samples, ahead))
            yield chunk, len(upcoming) < ahead, state


class StepCollate:
    """Collate the samples of a step with the user's function."""

    def __init__(self, collate: Callable[[Any], Any], is_all: bool, is_single: bool, stream: _EpochStream) -> None:
        self.collate = collate
        self.is_all = is_all
        self.is_single = is_single
        self._is_plain = not is_all and not is_single
        self._stream = stream

    def __call__(self, step: Step | list[list[Any]]) -> Any:
        """Return the samples of a step collated, or the step with its batch in the place of its samples."""
        if get_worker_info() is not None:
            # What is skipped is not collated: the streams must not depend on how many steps were.
            self._stream.begin_step()
        if type(step) is list:
            return self.collate(step[0]) if self._is_plain else self._collate(step)
        if isinstance(step, Step) and not step.is_collated:
            step.content = self._collate(step.content) if step.content else None
            step.is_collated = True
        return step

    def _collate(self, slices: list[list[Any]]) -> Any:
        batches = [self.collate(samples[0] if self.is_single else samples) for samples in slices]
        return batches if self.is_all else batches[0]


class ShardedStream(_EpochStream):
    """The samples of this rank's own shards, one list for each step."""

    def __iter__(self) -> Iterator[Step]:
        size = self.rule.per_shard
        streams = self._private_streams(stream_index(self.rule.shard or 0))
        with streams:
            samples = self._open()
            chunk = list(islice(samples, size))
        private = streams if streams.were_used else nullcontext()
        self._num_begun = 0
        while chunk:
            if len(chunk) < size and self.rule.drop_last:
                return
            self._num_begun += 1
            count = len(chunk)
            filled = [*chunk, *islice(cycle(chunk), size - count)] if self.rule.even else chunk
            yield Step([filled], BatchRows((count,), (len(filled),)))
            with private:
                chunk = list(islice(samples, size))


# Steps of `datasets` that sharding changes: they take, skip or interleave other samples then, or all in each shard.
_UNSHARDABLE = ("Cycling", "HorizontallyConcatenated", "RandomlyCycling", "Skip", "Step", "Take")


def num_shards_of(dataset: Any) -> int:
    """Return the number of shards for `shard(num_shards, index)`; 0 where those of `datasets` yield other samples."""
    count = getattr(dataset, "num_shards", 0)
    for node in _nodes_of(dataset):
        if type(node).__name__.startswith(_UNSHARDABLE) or getattr(node, "drop_last_batch", False):
            return 0
    return count if isinstance(count, int) and callable(getattr(dataset, "shard", None)) else 0


def _nodes_of(dataset: Any) -> Iterator[Any]:
    """Yield the steps that a stream of `datasets` is made of."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            waiting += [*getattr(node, "ex_iterables", ()), getattr(node, "ex_iterable", None)]


def is_sharded_by_rank(dataset: Any) -> bool:
    """Return whether a stream yields this rank's samples only, so that slicing it would lose data.

    By its own word (`is_sharded_by_rank`), by `split_dataset_by_node` of datasets, or a pipe's `apply_sharding`.
    """
    declared = getattr(dataset, "is_sharded_by_rank", None)
    if declared is not None:
        return bool(declared)
    for node in _with_wrapped(dataset):
        split = getattr(node, "_distributed", None)
        is_split = split is not None and getattr(split, "world_size", 2) > 1
        if is_split or getattr(node, "is_sharded_by_rank", False):
            return True
    pipes = get_all_graph_pipes(traverse_dps(dataset)) if isinstance(dataset, IterDataPipe) else []
    return any(hasattr(pipe, "apply_sharding") and getattr(pipe, "num_of_instances", 1) > 1 for pipe in pipes)


def _prepare_pipe(pipe: IterDataPipe[Any], seed: int) -> None:
    """Seed and shard a pipe as torch's loader does: one seed for all its readers, and a shard for each worker."""
    # Workers that shuffle before a sharding_filter must shuffle alike, or samples are lost.
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    worker = get_worker_info()
    if worker is not None:
        apply_sharding(pipe, worker.num_workers, worker.id, SHARDING_PRIORITIES.MULTIPROCESSING)


def can_resume_itself(dataset: Any) -> bool:
    """Return whether a stream goes on exactly at its state: `datasets` loses the samples in shuffle buffers."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not any("Shuffled" in type(node).__name__ for node in _nodes_of(dataset))


def set_dataset_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` on a dataset and, through any wrapping, on those it holds."""
    for node in _with_wrapped(dataset):
        if callable(getattr(node, "set_epoch", None)):
            node.set_epoch(epoch)


def _with_wrapped(dataset: Any, at_most: int = 64) -> Iterator[Any]:
    """Yield a dataset and those it holds: `.dataset` of a subset, `.datasets` of a concatenation, or any attribute."""
    seen: dict[int, Any] = {}
    waiting = [dataset]
    while waiting and len(seen) < at_most:
        node = waiting.pop(0)
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        inner = getattr(node, "datasets", None)
        waiting += [getattr(node, "dataset", None), *(inner if isinstance(inner, (list, tuple)) else ())]
        for value in getattr(node, "__dict__", {}).values():
            waiting += _datasets_in(value)


def _datasets_in(value: Any) -> list[Any]:
    """Return an attribute's value that is a dataset, or the entries of one that holds datasets."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    # By the first one: lists of samples are long.
    return list(entries) if isinstance(next(iter(entries), None), Dataset) else []
