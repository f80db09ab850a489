"""Sources over iterable datasets: a slice of every global batch, or shards of the stream's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.index_source import begin_pass, check_length, length_of, torch_iteration
from accel_trainer.data.iterable_reader import (
    LaneOrigin,
    Origin,
    ShardedStream,
    SlicedStream,
    Step,
    StepCollate,
    StreamRule,
    can_resume_itself,
    is_sharded_by_rank,
    made_resumable,
    num_shards_of,
)
from accel_trainer.data.plan import BatchRows, check_can_split
from accel_trainer.data.position import Position, Progress
from accel_trainer.data.randomness import init_worker
from accel_trainer.data.wrapped import set_dataset_epoch
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.collectives import all_gather_integers, broadcast_object, gather_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import stream_index
from accel_trainer.runtime.torch_private import LOADER_AT_REST
from accel_trainer.tree import map_leaves


def build_stream_source(
    loader: DataLoader[Any],
    *,
    process: ProcessContext,
    job: ProcessContext,
    config: DataConfig,
    seed: int,
    shards: int,
    shard: int | None,
) -> SliceSource | ShardSource:
    """Return an iterable's source of one shard, or of all for None; all ranks read it unless it has enough shards."""
    batch_size = loader.batch_size or 1
    splits = config.split_batches and loader.batch_size is not None
    if splits:
        check_can_split(batch_size, shards)
    per_shard = batch_size // shards if splits else batch_size
    rule = StreamRule(shards, shard, per_shard, even=config.even_batches, drop_last=loader.drop_last)
    worker_seed = seed if loader.generator is None else loader.generator.initial_seed()
    dataset = made_resumable(loader.dataset)
    if job.world_size > process.world_size:
        _check_shared(dataset, shards)
    own = _own_shard(dataset, process, config, shards, shard)
    read = dataset if own is None else own
    options: Any = {
        "num_lanes": loader.num_workers,
        "keeps_state": can_resume_itself(read, loader.num_workers),
        "init_lane": loader.worker_init_fn,
    }
    if own is not None:
        own_stream = ShardedStream(own, rule, seed, **options)
        full = None if own is dataset else _slices(loader, SlicedStream(dataset, rule, seed, **options), worker_seed)
        reader = _reader(loader, own_stream, in_order=loader.in_order)
        return ShardSource(reader, own_stream, worker_seed, process, full)
    return _slices(loader, SlicedStream(dataset, rule, seed, **options), worker_seed)


def _slices(loader: DataLoader[Any], stream: SlicedStream, seed: int) -> SliceSource:
    # Every rank must meet the same steps in the same order, whichever worker is ready first.
    return SliceSource(_reader(loader, stream, in_order=loader.in_order or stream.rule.shards > 1), stream, seed)


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
    own = dataset.shard(num_shards=shards, index=shard)
    if hasattr(dataset, "_epoch"):  # one tensor for both, so that the user's `set_epoch` holds here
        own._epoch = dataset._epoch
    return own


def _check_shared(dataset: Any, shards: int) -> None:
    """Refuse a stream of one rank's part where several ranks share a batch."""
    parts = getattr(getattr(dataset, "_distributed", None), "world_size", None)
    if is_sharded_by_rank(dataset) and (parts != shards if parts is not None else shards == 1):
        raise ConfigError(
            f"this {type(dataset).__name__} yields the part of one rank{f' of {parts}' if parts else ''}, and ranks of "
            f"one model share batches here, so that {shards} of them differ; give the loader the whole stream"
        )


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
        worker_init_fn=partial(init_worker, stream.init_worker),
        **LOADER_AT_REST,
    )
    return reader


class _StreamSource:
    """An iterable dataset, read through the user's loader over a stream of steps."""

    def __init__(self, reader: DataLoader[Any], stream: SlicedStream | ShardedStream, seed: int) -> None:
        self.start = 0
        """Steps left out at the beginning of the next pass."""
        self._reader = reader
        self._num_workers = reader.num_workers
        self._stream = stream
        self._seed = seed
        self._clock = SimpleNamespace(epoch=0)  # shared with copies that begin elsewhere
        self._resumed: Position | None = None

    @property
    def has_exact_length(self) -> bool:
        """Whether a pass takes exactly `num_steps`: with several workers that is an estimate, as torch's is."""
        return self._stream.num_lanes <= 1

    @property
    def _slices(self) -> bool:
        return isinstance(self._stream, SlicedStream)

    @property
    def _can_begin_anywhere(self) -> bool:
        """Whether a pass can begin at any sample, and not only where a global batch does."""
        return self._slices and not self._stream.num_lanes

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
        return max(1, self._stream.num_lanes)

    def position(self, epoch: int, progress: Progress | None) -> Position:
        """Return the position of a pass, with the dataset's own state where the stream keeps it."""
        return Position.at(
            progress or self.loaded,
            epoch,
            seed=self._stream.seed,
            dataset_length=length_of(self._stream.dataset),
            global_batch=self.total_batch_size,
            readers=self.readers,
            workers=self._stream.num_lanes,
        )

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch at `position`."""
        stream = self._stream
        check_length(self, stream.dataset, position)
        if position.samples:
            self._check_resumable(position)
        if position.seed is not None:
            if self._seed == stream.seed:
                self._seed = position.seed
            stream.seed = position.seed
        if position.workers is not None:
            stream.num_lanes = position.workers
        self.set_epoch(position.epoch)
        self.start, self._resumed = 0, position if position.samples else None
        self._divide_lanes(stream.num_lanes)

    def _check_resumable(self, position: Position) -> None:
        """Refuse a position that only a loader of other readers, or other batches, can find again."""
        parts, readers, workers = _parts_of(position), self.readers, position.workers
        has_state = position.dataset_state is not None and self._stream.keeps_state
        if has_state and (parts is None or self._can_read(parts)):
            return
        if workers is not None:  # other workers can read the lanes of those
            readers = readers // max(1, self._stream.num_lanes) * max(1, workers)
        if position.readers != readers:
            raise IncompatibleCheckpointError(
                f"the state was saved after {position.samples} samples of a stream read in {position.readers} parts, "
                f"and this loader reads it in {readers}: their order is not the same. Use as many workers, and where "
                "each process reads shards of its own, as many processes"
            )
        anywhere = self._can_begin_anywhere if workers is None else self._slices and not workers
        if position.global_batch != self.total_batch_size and not anywhere:
            raise IncompatibleCheckpointError(
                f"the state was saved after {position.steps} steps of {position.global_batch} samples, and a step of "
                f"this loader has {self.total_batch_size}: what several readers have prepared cannot be cut anew. Keep "
                "batch size times processes, or read with num_workers=0"
            )

    def _can_read(self, parts: int) -> bool:
        """Whether a pass can go on from states of a dataset in so many parts, one for each rank of then."""
        return parts == 1 or parts <= num_shards_of(self._stream.dataset)

    def _divide_lanes(self, num_lanes: int) -> None:
        """Have lanes read by as many workers as there are and divide their number, from the next pass on."""
        count, asked = max(1, num_lanes), self._num_workers
        self._reader.num_workers = max((n for n in range(1, asked + 1) if count % n == 0), default=0)
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

    def _note(self, known: Any, step: Step) -> Any:
        """Return the state of a position after a step: the dataset's own, or those of all lanes; None if not known."""
        if (states := _LaneStates.read(known)) is not None:
            return states.after(step)
        return None if self._stream.num_lanes else step.dataset_state

    def _locate(self, progress: Progress) -> int:
        """Note in `progress` where the pass begins, and return the steps before it."""
        origin = self.loaded
        steps = self.start if origin is None else origin.steps
        progress.start = steps * self.total_batch_size if origin is None else origin.samples, steps
        return steps

    def _begin(self, progress: Progress, shard: int, origin: Origin | None, skip: int) -> Iterator[Any]:
        self._stream.begin_pass(progress.epoch, origin, skip)
        is_mid_epoch = progress.start[1] > 0
        # Without what the user's class adds: that comes where its batches are complete.
        begin = partial(torch_iteration(type(self._reader)), self._reader)
        return begin_pass(self._reader, begin, self._seed, progress.epoch, stream_index(shard), is_drawn=is_mid_epoch)


class SliceSource(_StreamSource):
    """A stream that every rank reads from its beginning, keeping its slice of each global batch. No communication."""

    _stream: SlicedStream

    def rounds(self, loader: Any, progress: Progress) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of all shards at each step, or this shard's slice, and the rows."""
        full = self._stream.rule.rows(self.total_batch_size)
        for item in self._steps(progress):
            if type(item) is not Step:
                yield item, full
                continue
            progress.dataset_state = self._note(progress.dataset_state, item)
            yield item.content, item.rows

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield this shard's slices."""
        for batch, rows in self.rounds(loader, progress):
            if rows is not progress.rows:
                progress.change(rows)
            progress.num_yielded += 1
            yield batch

    def _steps(self, progress: Progress) -> Iterator[Any]:
        """Yield the steps of a pass: full ones as a bare batch, others as `Step`."""
        stream, position, skip = self._stream, self.loaded, self._locate(progress)
        origin: Origin | None = None
        if position is not None:
            if position.is_complete:
                return iter(())
            origin = self._origin_at(position)
            progress.dataset_state = None if origin is None else position.dataset_state
            self._divide_lanes(stream.num_lanes if origin is None else len(origin.lanes))
        elif stream.keeps_state and stream.num_lanes and not skip:
            progress.dataset_state = asdict(_LaneStates.at_begin(1, stream.num_lanes))
        skip = 0 if origin is not None else skip
        # All ranks read the same stream, so their workers are seeded alike.
        items = _last_marked(self._begin(progress, 0, origin, skip), max(1, self._reader.num_workers))
        return islice(items, skip, None) if skip else items

    def _origin_at(self, position: Position) -> Origin | None:
        """Return where the stream begins at a position; None where steps are to be skipped to get there."""
        if (states := _LaneStates.read(position.dataset_state)) is not None:
            return states.origin()
        if not self._can_begin_anywhere:
            return None
        state = position.dataset_state if self._stream.keeps_state else None
        return Origin([LaneOrigin(position.steps, position.samples, state)])


def _parts_of(position: Position) -> int | None:
    """Return into how many parts, one for each rank, a stream was cut; None where a position does not say."""
    if (states := _LaneStates.read(position.dataset_state)) is not None:
        return states.parts
    return None if position.workers is None else position.readers // max(1, position.workers)


@dataclass(frozen=True, slots=True)
class _LaneStates:
    """The dataset's states in all lanes after a step, as they are saved: plain data if the dataset's are."""

    parts: int
    workers: int
    turns: list[int]
    """By part, the worker of the next step."""
    lanes: list[Any]
    """By worker and part: None at the beginning, False at the end, else steps and the dataset's state after them."""

    @classmethod
    def at_begin(cls, parts: int, workers: int) -> _LaneStates:
        return cls(parts, workers, [0] * parts, [None] * (parts * max(1, workers)))

    @classmethod
    def read(cls, state: Any) -> _LaneStates | None:
        return cls(**state) if isinstance(state, Mapping) and state.keys() == _LANE_KEYS else None

    def of(self, part: int) -> _LaneStates:
        """Return those of one part."""
        return _LaneStates(1, self.workers, self.turns[part : part + 1], self.lanes[part :: self.parts])

    @classmethod
    def joined(cls, parts: Sequence[_LaneStates | None]) -> dict[str, Any] | None:
        """Return those of all parts, if they are known."""
        known = [each for each in parts if each is not None]
        if len(known) < len(parts):
            return None
        lanes = [lane for lanes in zip(*(each.lanes for each in known), strict=True) for lane in lanes]
        return asdict(cls(len(known), known[0].workers, [each.turns[0] for each in known], lanes))

    def origin(self) -> Origin:
        """Return where a pass over all lanes begins."""
        lanes = [
            None if entry is False else LaneOrigin() if entry is None else LaneOrigin(entry[0], 0, entry[1])
            for entry in self.lanes
        ]
        return Origin(lanes, self.turns[0] if self.parts == 1 else 0, self.parts, self.workers)

    def after(self, step: Step) -> dict[str, Any] | None:
        """Return them after a step; None where the dataset has none."""
        if not step.ends_lane and step.dataset_state is None:
            return None
        lanes, turns = [*self.lanes], [*self.turns]
        lanes[step.lane] = False if step.ends_lane else [step.number, step.dataset_state]
        worker, part = divmod(step.lane, self.parts)
        turns[part] = (worker + 1) % max(1, self.workers)
        return {"parts": self.parts, "workers": self.workers, "turns": turns, "lanes": lanes}


_LANE_KEYS = {field.name for field in fields(_LaneStates)}


def _last_marked(items: Iterator[Any], num_readers: int) -> Iterator[Any]:
    """Yield steps with the last one marked: one that ends a lane waits until another comes."""
    held: Step | None = None
    for item in items:
        if type(item) is not Step:
            if held is not None:
                yield held
                held = None
            yield item
            continue
        num_readers -= item.ends_reader
        if item.is_step:
            if held is not None:
                yield held
            held = item if item.ends_lane else None
            if held is None:
                yield item
        if num_readers == 0:
            break
    if held is not None:
        yield _as_last(held)


def _as_last(step: Step) -> Step:
    if step.rows is not None:
        step.rows = BatchRows(step.rows.rows, step.rows.sizes, is_last=True)
    return step


def _as_it_is(step: Step) -> Step:
    return step


class ShardSource(_StreamSource):
    """A stream in shards: each rank reads its own; at every step ranks exchange three integers, a step ahead of use."""

    has_exact_length = False
    _stream: ShardedStream

    def __init__(
        self,
        reader: DataLoader[Any],
        stream: ShardedStream,
        seed: int,
        process: ProcessContext,
        full: SliceSource | None,
    ) -> None:
        """`full` reads the whole stream: the rest of an epoch that was begun in other shards, if that is possible."""
        super().__init__(reader, stream, seed)
        self._process = process
        self._full = full
        self._reads_full = False
        self._collate: Any = reader.collate_fn
        if reader.num_workers == 0:
            # Two batches are read ahead, and what collating draws belongs to the step that is yielded.
            reader.collate_fn = _as_it_is

    @property
    def readers(self) -> int:
        """Number of readers that share the stream: ranks times workers."""
        return super().readers * self._process.world_size

    @property
    def gathers_state(self) -> bool:
        """Whether the stream has states, of which each rank knows those of its own shard."""
        return self._stream.keeps_state and not (self._reads_full and self._full is not None)

    def position(self, epoch: int, progress: Progress | None) -> Position:
        """Return the position of a pass, with the states of all ranks. Collective where it `gathers_state`."""
        if self._reads_full and self._full is not None:
            return self._full.position(epoch, progress)
        position = super().position(epoch, progress)
        if progress is None or not self._stream.keeps_state:
            return position
        # Each rank knows those of its own lanes.
        known = map(_LaneStates.read, gather_object([position.dataset_state], self._process))
        return replace(position, dataset_state=_LaneStates.joined(list(known)))

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch at `position`."""
        other_parts = position.samples and not self._can_read(_parts_of(position) or self._process.world_size)
        full = self._full if other_parts else None
        if full is None:
            super().resume(position)
        else:
            full.resume(position)
            super().resume(replace(position, samples=0, workers=None))
            self._resumed = position
        self._reads_full = full is not None

    def _can_read(self, parts: int) -> bool:
        return parts == self._process.world_size

    def fill(self, even: bool) -> bool:
        """Choose whether passes that begin from now on fill short steps up; return the setting before."""
        if self._full is not None:
            self._full.fill(even)
        return super().fill(even)

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield this rank's batches, and the last without valid rows while others have more. Collective each step."""
        origin = self.loaded
        self._reads_full = self._reads_full and origin is not None
        if origin is not None and origin.is_complete:
            self._locate(progress)
        elif self._reads_full and self._full is not None:
            yield from self._full.read(loader, progress)
            self._full.rewind()
            self._reads_full = False
        else:
            yield from self._read_shards(progress)

    def _read_shards(self, progress: Progress) -> Iterator[Any]:
        suffices = all if self._stream.rule.drop_last else any
        steps = self._steps(progress)
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
            if current is not None:
                progress.dataset_state = self._note(progress.dataset_state, current)
            present, current = current or spare, following
            spare = present
            assert present is not None
            if goes_on:
                following = next(steps, None)
                pending = self._announce(current, following, spare)
            progress.change(BatchRows(rows, sizes, is_last=not goes_on))
            progress.num_yielded += 1
            content = self._collated(present).content
            # This step is lent again: whoever changes the batch has one of its own.
            yield map_leaves(lambda leaf: leaf, content) if goes_on and current is None else content
            if not goes_on:
                return

    def _steps(self, progress: Progress) -> Iterator[Step]:
        """Return the steps of this rank's shards, from the state of them on that was loaded."""
        stream, position, skip = self._stream, self.loaded, self._locate(progress)
        known = position is not None and stream.keeps_state and _LaneStates.read(position.dataset_state) or None
        states = _LaneStates.at_begin(1, stream.num_lanes) if known is None else known.of(self._process.rank)
        if known is not None:
            skip = 0
        progress.dataset_state = asdict(states) if stream.keeps_state and not skip else None
        reading = self._begin(progress, self._process.rank, None if known is None else states.origin(), 0)
        return islice((step for step in reading if step.is_step), skip, None)

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
