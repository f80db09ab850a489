"""Streams of steps over an iterable dataset, iterated in the workers or in the main process.

Every rank reads a full dataset and keeps its slice of each global batch (`SlicedStream`), or the dataset has shards of
its own, and each rank reads some of them (`ShardedStream`).
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding, get_all_graph_pipes

from accel_trainer.data.packing import PackedStream
from accel_trainer.data.plan import BatchRows, mix_seed, seed_for_epoch
from accel_trainer.data.randomness import PrivateStreams, StepStreams
from accel_trainer.data.wrapped import set_dataset_epoch, with_wrapped
from accel_trainer.logging import get_logger
from accel_trainer.runtime.rng import KeptStreams, stream_index
from accel_trainer.runtime.torch_private import AsWorker
from accel_trainer.tree import map_leaves

logger = get_logger(__name__)


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
        # Two for a shard without samples, as in `RoundRule.join`.
        sizes = (self.per_shard,) * self.shards if self.even else tuple(count or min(2, rows[0]) for count in rows)
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
    because making an object for each costs a tenth of a small batch. A stream with states of its own has one for each.
    """

    content: Any
    """Lists of samples, one for each shard that the reader serves; collated, a batch or a list of batches."""
    rows: BatchRows | None
    """None where there is no batch, because its step is skipped or the reader's stream is empty."""
    ends_reader: bool = False
    """Whether the stream that this came from (one for each worker) has nothing more."""
    is_step: bool = True
    """False for a message without a step: of a reader whose stream is empty, or of a lane that has no more."""
    lane: int = 0
    ends_lane: bool = False
    number: int = 0
    """Steps of its lane, this one included."""
    dataset_state: Any = None
    """The dataset's `state_dict()` after these samples, where the stream keeps it."""
    is_collated: bool = False

    def pin_memory(self) -> Step:
        """Pin the tensors of the batch, as the thread of torch's loader asks for."""
        pin = lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf  # noqa: E731
        self.content = map_leaves(pin, self.content, is_leaf=lambda node: hasattr(node, "pin_memory"))
        return self


class LaneOrigin(NamedTuple):
    """Where a lane begins: at a state of the dataset, or after some samples, which are read again."""

    steps: int = 0
    samples: int = 0
    state: Any = None


class Origin(NamedTuple):
    """Where a pass begins in each lane. Those of one worker in all parts of the dataset follow each other."""

    lanes: Sequence[LaneOrigin | None]
    """None of a lane that has no more."""
    turn: int = 0
    """The lane of the first step."""
    parts: int = 1
    """Into how many parts, each of some shards, the dataset was cut."""
    workers: int = 0
    """Lanes of each part; 0 for one in a process that is no worker."""


class _EpochStream(IterableDataset[Any]):
    """A stream that sets its dataset's epoch when a pass begins, in whatever process it is iterated.

    Its order is that of `num_lanes` workers that take turns, or of one process for 0, whatever reads it: another number
    of workers reads several lanes each, in each of which the dataset finds itself in the worker of that lane.

    Args:
        keeps_state: ask the dataset for its `state_dict()` at every step.
        init_lane: the user's `worker_init_fn`, called with the lane's worker; it may cut the dataset that it finds.
    """

    def __init__(
        self,
        dataset: Any,
        rule: StreamRule,
        seed: int,
        *,
        num_lanes: int = 0,
        keeps_state: bool = False,
        init_lane: Callable[[int], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.rule = rule
        self.seed = seed
        self.num_lanes = num_lanes
        self.keeps_state = keeps_state
        self._init_lane = init_lane
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._skip = torch.zeros((), dtype=torch.int64)
        self._begins_within = torch.zeros((), dtype=torch.int64)
        self._origin: Origin | None = None
        self._num_begun = 0
        self._step_streams = StepStreams()

    def share(self) -> None:
        """Share where passes begin with worker processes: persistent ones hold a copy of the stream from the first."""
        for each in (self._epoch, self._skip, self._begins_within):
            each.share_memory_()

    def begin_pass(self, epoch: int, origin: Origin | None = None, skip: int = 0) -> None:
        """Choose the epoch of the pass that begins next, and where it begins.

        Workers that live already know no `origin`. The steps to `skip` are read, and not collated.
        """
        self._epoch.fill_(epoch)
        self._skip.fill_(skip)
        self._begins_within.fill_(origin is not None)
        self._origin = origin

    def init_worker(self, worker_id: int) -> None:
        """Call the user's `worker_init_fn` in a worker that reads one lane, its own; else each lane calls it."""
        if self._init_lane is not None and self._reads_own_lane:
            self._init_lane(worker_id)

    @property
    def _reads_own_lane(self) -> bool:
        worker = get_worker_info()
        return self.num_lanes == (0 if worker is None else worker.num_workers)

    def begin_step(self) -> None:
        """Begin the worker's random streams of the step whose samples it has read last."""
        self._step_streams.begin(int(self._epoch), self._num_begun)

    def __iter__(self) -> Iterator[Step | list[list[Any]]]:
        worker = get_worker_info()
        share, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        origin = self._origin if self._begins_within else None
        if origin is None and self._reads_own_lane:
            return self._read_lane(self.dataset, share, LaneOrigin())
        if origin is None:
            origin = Origin([LaneOrigin()] * max(1, self.num_lanes), workers=self.num_lanes)
        return self._take_turns(range(share, len(origin.lanes), step), origin)

    def _take_turns(self, lanes: range, origin: Origin) -> Iterator[Step | list[list[Any]]]:
        """Yield a step of each lane in turn, or a message where a lane has none, so that lanes of others keep step."""
        turn = origin.turn
        readers = {lane: self._reader(lane, origin, len(lanes)) for lane in lanes if origin.lanes[lane] is not None}
        if not readers:
            yield Step([], None, ends_reader=True, is_step=False)
        while readers:
            for lane in lanes:
                item: Step | list[list[Any]] = Step([], None, is_step=False)
                if lane in readers and lane >= turn:
                    place, reader = readers[lane]
                    with place:
                        item = next(reader)
                if isinstance(item, Step) and item.ends_lane:
                    del readers[lane]
                    item.ends_reader = not readers
                yield item
                if not readers:
                    return
            turn = 0

    def _reader(self, lane: int, origin: Origin, num_read: int) -> tuple[AsWorker, Iterator[Any]]:
        """Return the place at which a lane is read, among so many that are read here, and its steps."""
        dataset, begin, index = self.dataset, origin.lanes[lane], lane // origin.parts
        init = None if self._reads_own_lane or not origin.workers else self._init_lane
        if origin.parts > 1:
            dataset = dataset.shard(num_shards=origin.parts, index=lane % origin.parts)
        elif num_read > 1 or init is not None:
            dataset = copy.deepcopy(dataset)
        assert begin is not None
        place = AsWorker(index, origin.workers, dataset)
        if init is not None:
            # What it seeds is a worker's: dropout must not begin anew where the process itself reads.
            with KeptStreams() if get_worker_info() is None else nullcontext(), place:
                init(index)
        return place, self._read_lane(dataset, lane, begin)

    def _read_lane(self, dataset: Any, lane: int, begin: LaneOrigin) -> Iterator[Step | list[list[Any]]]:
        """Yield the steps of a lane, of which the last one ends it."""
        raise NotImplementedError

    def _chunks(
        self, dataset: Any, lane: int, size: int, begin: LaneOrigin, streams: PrivateStreams, *, is_alone: bool
    ) -> Iterator[tuple[list[Any], bool, Any]]:
        """Yield samples `size` at a time, whether they are the last, and the state; reads a sample or a batch ahead."""
        ahead = size if self.rule.drop_last else 1
        with streams:
            if begin.state is not None:
                dataset.load_state_dict(begin.state)
            samples = islice(self._open(dataset), begin.samples if begin.state is None else 0, None)
            upcoming = list(islice(samples, ahead))
        for node in with_wrapped(dataset) if begin.state is not None else ():
            if hasattr(node, "_starting_state_dict"):
                node.load_state_dict(None)  # `datasets` would begin each pass of this epoch there
        draws = streams.were_used
        private = streams if draws or not is_alone else nullcontext()  # 23 us a step
        while len(upcoming) == ahead:
            with private:
                chunk = [*upcoming, *islice(samples, size - ahead)]
                # A dataset that draws is read again up to there: its own state does not hold the streams.
                state = dataset.state_dict() if self.keeps_state and not draws else None
                upcoming = list(islice(samples, ahead))
            yield chunk, len(upcoming) < ahead, state

    def _private_streams(self, lane: int, *shard: int) -> PrivateStreams:
        """Return the streams that the dataset draws from, alike on all ranks unless a shard is given."""
        epoch = int(self._epoch)
        if not self.num_lanes and not shard:
            return PrivateStreams(seed_for_epoch(self.seed, epoch))
        return PrivateStreams(mix_seed(self.seed, epoch, lane if self.num_lanes else -1, *shard))

    def _open(self, dataset: Any) -> Iterator[Any]:
        epoch = int(self._epoch)
        set_dataset_epoch(dataset, epoch)
        seed = seed_for_epoch(self.seed, epoch)
        generator = getattr(dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(dataset, "set_epoch"):
            generator.manual_seed(seed)
        if isinstance(dataset, IterDataPipe):
            _prepare_pipe(dataset, seed)
        return iter(dataset)


class SlicedStream(_EpochStream):
    """All samples of a dataset, of which this shard keeps its slice of every global batch.

    While the dataset is read, private random streams that begin at seed and epoch take the place of the global ones:
    another rank, or a later run that reads up to where it goes on, draws the same.
    """

    def _read_lane(self, dataset: Any, lane: int, begin: LaneOrigin) -> Iterator[Step | list[list[Any]]]:
        step, rule, keeps_state = begin.steps, self.rule, self.keeps_state
        # Lanes take turns, so the j-th step of any is at most the (j * lanes + lane)-th step of all.
        unseen = -(-max(0, int(self._skip) - lane) // max(1, self.num_lanes))
        is_alone = rule.shards == 1
        shards = range(rule.shards) if rule.shard is None else (rule.shard,)
        rows = rule.rows(rule.per_round)
        streams = self._private_streams(lane)
        for chunk, is_last, state in self._chunks(dataset, lane, rule.per_round, begin, streams, is_alone=is_alone):
            step += 1
            self._num_begun = step
            is_seen = step > unseen
            if is_last:
                rows = rule.rows(len(chunk))
            slices = [] if not is_seen else [chunk] if is_alone else [rule.slice_of(chunk, s, rows) for s in shards]
            if is_seen and not is_last and not keeps_state:
                yield slices
            else:
                yield Step(slices, rows if is_seen else None, is_last, True, lane, is_last, step, state)
        if step == begin.steps:
            yield Step([], None, ends_reader=True, is_step=False, ends_lane=True)


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

    def _read_lane(self, dataset: Any, lane: int, begin: LaneOrigin) -> Iterator[Step | list[list[Any]]]:
        size, step = self.rule.per_shard, begin.steps
        streams = self._private_streams(lane, stream_index(self.rule.shard or 0))
        for chunk, is_last, state in self._chunks(dataset, lane, size, begin, streams, is_alone=True):
            step += 1
            self._num_begun = step
            count = len(chunk)
            filled = [*chunk, *islice(cycle(chunk), size - count)] if self.rule.even else chunk
            rows = BatchRows((count,), (len(filled),))
            yield Step([filled], rows, is_last, True, lane, is_last, step, state)
        if step == begin.steps:
            yield Step([], None, ends_reader=True, is_step=False, ends_lane=True)


_NODES = ("BufferShuffledExamplesIterable", "_BaseExamplesIterable")


@functools.cache
def _missing_nodes() -> tuple[str, ...]:
    """Return the private names of `datasets`, of those that streams are known by here, that this release lacks."""
    module: Any = importlib.import_module("datasets.iterable_dataset")
    missing = tuple(name for name in _NODES if not hasattr(module, name))
    if missing:
        logger.warning(
            f"datasets {importlib.import_module('datasets').__version__} has no {' and no '.join(missing)}, by which "
            "the steps of a stream are known: each process reads all of it, and a resume reads it again up to where it "
            "goes on; datasets 3.6 to 5.2 have them"
        )
    return missing


def _is_unknown(dataset: Any) -> bool:
    """Whether a stream is of a release of `datasets` whose steps cannot be looked at."""
    is_of_datasets = any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)
    return is_of_datasets and (bool(_missing_nodes()) or not hasattr(dataset, "_ex_iterable"))


# Steps of `datasets` that sharding changes: they take, skip or interleave other samples then, or all in each shard.
_UNSHARDABLE = ("Cycling", "HorizontallyConcatenated", "RandomlyCycling", "Skip", "Step", "Take")


def num_shards_of(dataset: Any) -> int:
    """Return the number of shards for `shard(num_shards, index)`; 0 where those of `datasets` yield other samples."""
    if _is_unknown(dataset):
        return 0
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
    for node in with_wrapped(dataset):
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


def can_resume_itself(dataset: Any, num_workers: int) -> bool:
    """Return whether a stream goes on exactly at its state: shuffle buffers of `datasets` lose their rows.

    In workers, it loads the state of a concatenation before it has dealt out its parts, and fails.
    """
    has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    if not has_state or _is_unknown(dataset):
        return False
    if isinstance(dataset, PackedStream):
        return can_resume_itself(dataset.dataset, num_workers)
    lossy = ("Shuffled", "VerticallyConcatenated") if num_workers else ("Shuffled",)
    return not any(word in type(node).__name__ for node in _nodes_of(dataset) for word in lossy)


def made_resumable(dataset: Any) -> Any:
    """Return a stream with shuffle buffers of `datasets` replaced by some that it can go on in; else as it is."""
    if isinstance(dataset, PackedStream):
        inner = made_resumable(dataset.dataset)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset
    if any(type(node).__name__ == _NODES[0] for node in _nodes_of(dataset)) and not _is_unknown(dataset):
        from accel_trainer.data.shuffle_buffer import with_window_shuffles

        return with_window_shuffles(dataset)
    return dataset
