"""Sources over iterable datasets: a slice of every global batch, or shards of the stream's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.index_source import begin_pass, check_length, length_of
from accel_trainer.data.iterable_reader import (
    ShardedStream,
    SlicedStream,
    Step,
    StepCollate,
    StreamRule,
    can_resume_itself,
    is_sharded_by_rank,
    num_shards_of,
    set_dataset_epoch,
)
from accel_trainer.data.plan import BatchRows, check_can_split
from accel_trainer.data.position import Position, Progress
from accel_trainer.data.randomness import init_worker
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.collectives import all_gather_integers, broadcast_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import stream_index
from accel_trainer.runtime.torch_private import LOADER_AT_REST


def build_stream_source(
    loader: DataLoader[Any], *, process: ProcessContext, config: DataConfig, seed: int, shards: int, shard: int | None
) -> SliceSource | ShardSource:
    """Return an iterable's source of one shard, or of all for None; all ranks read it unless it has enough shards."""
    batch_size = loader.batch_size or 1
    splits = config.split_batches and loader.batch_size is not None
    if splits:
        check_can_split(batch_size, shards)
    per_shard = batch_size // shards if splits else batch_size
    rule = StreamRule(shards, shard, per_shard, even=config.even_batches, drop_last=loader.drop_last)
    worker_seed = seed if loader.generator is None else loader.generator.initial_seed()
    own = _own_shard(loader.dataset, process, config, shards, shard)
    if own is not None:
        own_stream = ShardedStream(own, rule, seed)
        return ShardSource(_reader(loader, own_stream, in_order=loader.in_order), own_stream, worker_seed, process)
    keeps_state = config.use_stateful_dataloader and loader.num_workers == 0 and can_resume_itself(loader.dataset)
    stream = SlicedStream(loader.dataset, rule, seed, keeps_state=keeps_state)
    # Every rank must meet the same steps in the same order, whichever worker is ready first.
    return SliceSource(_reader(loader, stream, in_order=loader.in_order or shards > 1), stream, worker_seed)


def _own_shard(dataset: Any, process: ProcessContext, config: DataConfig, shards: int, shard: int | None) -> Any:
    """Return the stream of this rank's samples alone; None where a stream of all samples is to be read."""
    is_sharded = is_sharded_by_rank(dataset)
    if shard is None:
        if is_sharded:
            raise ConfigError(
                f"dispatch_batches=True has rank 0 read for all ranks, and this {type(dataset).__name__} yields the "
                "part of one rank; leave dispatch_batches off, or give the loader the whole stream"
            )
        return None
    if not 1 < shards == process.world_size:
        return None
    if is_sharded:
        return dataset
    # A loader that resumes by itself reads all samples: in shards, their order would depend on the number of ranks.
    if config.use_stateful_dataloader or num_shards_of(dataset) < shards:
        return None
    return dataset.shard(num_shards=shards, index=shard)


def _reader(loader: DataLoader[Any], stream: SlicedStream | ShardedStream, *, in_order: bool) -> DataLoader[Any]:
    """Return the user's loader, of the same class and with the same settings, over a stream of steps."""
    if loader.num_workers > 0:
        stream.share()
    reader = type(loader).__new__(type(loader))
    reader.__dict__.update(
        loader.__dict__,
        dataset=stream,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        collate_fn=StepCollate(loader.collate_fn, stream.rule.shard is None, loader.batch_size is None, stream),
        in_order=in_order,
        worker_init_fn=partial(init_worker, loader.worker_init_fn),
        **LOADER_AT_REST,
    )
    return reader


class _StreamSource:
    """An iterable dataset, read through the user's loader over a stream of steps."""

    def __init__(self, reader: DataLoader[Any], stream: SlicedStream | ShardedStream, seed: int) -> None:
        self.start = 0
        """Steps left out at the beginning of the next pass."""
        self._reader = reader
        self._stream = stream
        self._seed = seed
        self._clock = SimpleNamespace(epoch=0)  # shared with copies that begin elsewhere
        self._resumed: Position | None = None
        # At any sample, and not only where a global batch begins.
        self._can_begin_anywhere = isinstance(stream, SlicedStream) and reader.num_workers == 0

    @property
    def has_exact_length(self) -> bool:
        """Whether a pass takes exactly `num_steps`: with several workers that is an estimate, as torch's is."""
        return self._reader.num_workers <= 1

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: the dataset's own, if it has one."""
        dataset = self._stream.dataset
        epoch = getattr(dataset, "epoch", None) if hasattr(dataset, "set_epoch") else None
        return epoch if isinstance(epoch, int) else int(self._clock.epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full step over all shards."""
        return self._stream.rule.per_round

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in the dataset and in those it wraps."""
        self._clock.epoch = epoch
        set_dataset_epoch(self._stream.dataset, epoch)

    def fill(self, even: bool) -> bool:
        """Choose whether passes that begin from now on fill short steps up; return the setting before."""
        before = self._stream.rule
        if even != before.even:
            self._stream.rule = replace(before, even=even)
            self._reader.__dict__.update(LOADER_AT_REST)  # workers that live on hold a copy of the stream as it was
        return before.even

    def num_steps(self, after: int = 0) -> int:
        """Steps of a full pass, or of one after some samples, from the length of the dataset."""
        full, rest = divmod(max(0, len(self._stream.dataset) - after), self.total_batch_size)
        return full + (rest > 0 and not self._stream.rule.drop_last)

    def num_left(self) -> int:
        """Steps of the next pass, from the length of the dataset."""
        origin = self.loaded
        return max(0, self.num_steps() - self.start) if origin is None else self.num_steps(origin.samples)

    def starting_at(self, step: int) -> Any:
        """Return this source with its next pass beginning at `step`."""
        moved = copy.copy(self)
        moved.start, moved._resumed = step, None
        return moved

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""
        self.start, self._resumed = 0, None

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return no attributes: only the reader differs from the user's loader."""
        return {}

    @property
    def readers(self) -> int:
        """Number of readers that share the stream, where its order depends on that."""
        return max(1, self._reader.num_workers)

    def position(self, epoch: int, progress: Progress | None) -> Position:
        """Return the position of a pass, with the dataset's own state where the stream keeps it."""
        return Position.at(
            progress or self.loaded,
            epoch,
            seed=self._stream.seed,
            dataset_length=length_of(self._stream.dataset),
            global_batch=self.total_batch_size,
            readers=self.readers,
        )

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch at `position`."""
        check_length(self._stream.dataset, position)
        if position.samples and position.readers != self.readers:
            raise IncompatibleCheckpointError(
                f"the state was saved after {position.samples} samples of a stream read in {position.readers} parts, "
                f"and this loader reads it in {self.readers}: their order is not the same. Use as many workers, and "
                "where each process reads shards of its own, as many processes"
            )
        if position.samples and position.global_batch != self.total_batch_size and not self._can_begin_anywhere:
            raise IncompatibleCheckpointError(
                f"the state was saved after {position.steps} steps of {position.global_batch} samples, and a step of "
                f"this loader has {self.total_batch_size}: what several readers have prepared cannot be cut anew. Keep "
                "batch size times processes, or read with num_workers=0"
            )
        if position.seed is not None:
            if self._seed == self._stream.seed:
                self._seed = position.seed
            self._stream.seed = position.seed
        self.set_epoch(position.epoch)
        self.start, self._resumed = 0, position if position.samples else None
        self._reader.__dict__.update(LOADER_AT_REST)  # workers that live on hold a copy of the stream as it was

    @property
    def loaded(self) -> Position | None:
        """The position at which the next pass begins, if it came from `resume`."""
        return self._resumed if self._resumed is not None and self._resumed.epoch == self.epoch else None

    def forget(self) -> None:
        """Drop the position that came from `resume`."""
        self._resumed = None

    def __getstate__(self) -> dict[str, Any]:
        reader = copy.copy(self._reader)
        reader.__dict__.update(LOADER_AT_REST)
        return {**self.__dict__, "_reader": reader}

    def _locate(self, progress: Progress) -> int:
        """Note in `progress` where the pass begins, and return the steps before it."""
        origin = self.loaded
        steps = self.start if origin is None else origin.steps
        progress.start = steps * self.total_batch_size if origin is None else origin.samples, steps
        return steps

    def _begin(self, progress: Progress, shard: int) -> Iterator[Any]:
        self._stream.begin_epoch(progress.epoch)
        is_mid_epoch = progress.start[1] > 0
        begin = self._reader.__iter__
        return begin_pass(self._reader, begin, self._seed, progress.epoch, stream_index(shard), is_drawn=is_mid_epoch)


class SliceSource(_StreamSource):
    """A stream that every rank reads from its beginning, keeping its slice of each global batch. No communication."""

    _stream: SlicedStream

    def rounds(self, loader: Any, progress: Progress) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of all shards at each step, or this shard's slice, and the rows."""
        full = self._stream.rule.rows(self.total_batch_size)
        for item in self._steps(progress):
            if self._stream.keeps_state:
                progress.dataset_state = item.dataset_state
            yield (item.content, item.rows) if type(item) is Step else (item, full)

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield this shard's slices."""
        for batch, rows in self.rounds(loader, progress):
            if rows is not progress.rows:
                progress.change(rows)
            progress.num_yielded += 1
            yield batch

    def _steps(self, progress: Progress) -> Iterator[Any]:
        """Yield the steps of a pass: full ones as a bare batch, others as `Step`."""
        stream, origin, skip = self._stream, self.loaded, self._locate(progress)
        stream.begin_at(0, None)
        if origin is not None:
            progress.dataset_state = origin.dataset_state
            if origin.is_complete:
                return iter(())
            if self._can_begin_anywhere:
                stream.begin_at(origin.samples, origin.dataset_state if can_resume_itself(stream.dataset) else None)
                skip = 0
        stream.skip(skip)
        # All ranks read the same stream, so their workers are seeded alike.
        items = _last_marked(self._begin(progress, shard=0), max(1, self._reader.num_workers))
        if skip:
            items = islice(items, skip, None)
        return items


def _last_marked(items: Iterator[Any], num_readers: int) -> Iterator[Any]:
    """Yield steps with the last one marked: one that ends a reader's stream waits until the others' are seen."""
    held: Step | None = None
    for item in items:
        is_marked = type(item) is Step and item.ends_reader
        if is_marked:
            num_readers -= 1
            if not item.is_step:
                continue
        if held is not None:
            yield held
        held = item if is_marked else None
        if not is_marked:
            yield item
        elif num_readers == 0:
            break
    if held is not None:
        if held.rows is not None:
            held.rows = BatchRows(held.rows.rows, held.rows.sizes, is_last=True)
        yield held


def _as_it_is(step: Step) -> Step:
    return step


class ShardSource(_StreamSource):
    """A stream in shards: each rank reads its own; at every step ranks exchange three integers, a step ahead of use."""

    has_exact_length = False
    _stream: ShardedStream

    def __init__(self, reader: DataLoader[Any], stream: ShardedStream, seed: int, process: ProcessContext) -> None:
        super().__init__(reader, stream, seed)
        self._process = process
        self._collate: Any = reader.collate_fn
        if reader.num_workers == 0:
            # Two batches are read ahead, and what collating draws belongs to the step that is yielded.
            reader.collate_fn = _as_it_is

    @property
    def readers(self) -> int:
        """Number of readers that share the stream: ranks times workers."""
        return super().readers * self._process.world_size

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield this rank's batches, and the last without valid rows while others have more. Collective each step."""
        origin, skip = self.loaded, self._locate(progress)
        if origin is not None and origin.is_complete:
            return
        suffices = all if self._stream.rule.drop_last else any
        steps = islice(self._begin(progress, self._process.rank), skip, None)
        current, following = next(steps, None), next(steps, None)
        spare: Step | None = None
        pending = self._announce(current, following, spare)
        while True:
            rows, sizes, more = zip(*pending(), strict=True)
            if not suffices(rows):
                return
            if not all(sizes):
                spare, sizes = self._lend(current, rows, sizes)
            goes_on = suffices(more)
            present, current = current or spare, following
            spare = present
            assert present is not None
            if goes_on:
                following = next(steps, None)
                pending = self._announce(current, following, spare)
            progress.change(BatchRows(rows, sizes, is_last=not goes_on))
            progress.num_yielded += 1
            yield self._collated(present).content
            if not goes_on:
                return

    def _collated(self, step: Step) -> Step:
        """Return a step collated, whoever does it: a worker, or this process now."""
        collated: Step = step if step.is_collated else self._collate(step)
        return collated

    def _announce(self, current: Step | None, following: Step | None, spare: Step | None) -> Any:
        """Begin the exchange of this rank's next batch: its valid rows, its size, and whether another follows."""
        shown = current or spare
        size = shown.rows.sizes[0] if shown and shown.rows else 0
        valid = current.rows.rows[0] if current and current.rows else 0
        return all_gather_integers([valid, size, int(following is not None)], self._process)

    def _lend(self, current: Step | None, rows: Sequence[int], sizes: Sequence[int]) -> tuple[Step, tuple[int, ...]]:
        """Lend ranks that never had a sample the first batch of one that has. Collective."""
        donor = next(rank for rank, count in enumerate(rows) if count)
        own = self._collated(current) if current is not None and self._process.rank == donor else None
        spare = broadcast_object(own, self._process, donor)
        return spare, tuple(size or sizes[donor] for size in sizes)
