"""The source of a map-style dataset: the indices of this shard, drawn by the loader's own sampler.

A source (here and in `iterable_source`) reads one pass at a time and writes into the pass's `Progress` which rows each
batch holds. It knows nothing of hooks or devices. `starting_at` returns a copy whose next pass begins later.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.plan import BatchRows, RanksLeft, mix_seed
from accel_trainer.data.position import Position, Progress
from accel_trainer.data.randomness import (
    NumberedItems,
    SeededDataset,
    collate_in_turn,
    init_worker,
    without_turns,
)
from accel_trainer.data.sampler import (
    GeneratorRandomSampler,
    SeedableRandomSampler,
    ShardedBatchSampler,
    find_generator,
    find_replicated,
    num_shares,
)
from accel_trainer.data.wrapped import set_dataset_epoch
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import stream_index

logger = get_logger(__name__)


def build_index_source(
    loader: DataLoader[Any], *, process: ProcessContext, config: DataConfig, seed: int, shards: int, shard: int | None
) -> IndexSource:
    """Return a map-style source of one shard, or of all for None. Collective where the order comes from a rank.

    `process`: this one among all ranks, those that read the same batches, too.
    """
    _check(loader, shards, process)
    base: Any = _without_torchdata(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, loader)
    generator = find_generator(base)
    base, order_seed = _with_known_order(base, generator, loader, process, config, seed)
    is_batched = loader.batch_sampler is not None
    sampler = ShardedBatchSampler(
        base, shards, shard, config.split_batches, config.even_batches,
        join=True, seed=order_seed, is_batched=is_batched,
    )  # fmt: skip
    if length_of(sampler) == 0:
        logger.warning(
            f"a loader has no steps: drop_last leaves out what does not fill a batch of {sampler.batch_size} "
            f"{'over all' if config.split_batches else 'on each'} of {shards} processes"
        )
    # Rank 0, when it reads for all, deals the batches out in turn.
    in_order = loader.in_order or shard is None or type(base) is not BatchSampler
    if not in_order:
        sampler.num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    worker_seed = seed if loader.generator is None else loader.generator.initial_seed()
    # Rank 0 alone begins passes where it reads for all.
    asked = None if shard is None else process
    source = IndexSource(sampler, loader.dataset, worker_seed, asked, in_order=in_order)
    source.note_generator(generator)
    return source


def _with_known_order(
    base: Any,
    generator: torch.Generator | None,
    loader: DataLoader[Any],
    process: ProcessContext,
    config: DataConfig,
    seed: int,
) -> tuple[Any, int]:
    """Return a sampler whose plain shuffle has the same order on all ranks, known for every epoch, and its seed."""
    shuffle = getattr(base, "sampler", base)
    if isinstance(shuffle, SeedableRandomSampler) and shuffle.has_torch_seed:
        # Other ranks have streams of their own since their first model.
        shuffle.seed = broadcast_object(shuffle.seed, process)
    if generator is not None:
        seed, state = broadcast_object((generator.initial_seed(), generator.get_state()), process)
        draws: Any = {"draws_seed": generator is loader.generator, "keeps_workers": loader.persistent_workers}
        base = _with_shuffle(base, lambda data: GeneratorRandomSampler(data, generator, state, **draws))
    elif config.use_seedable_sampler:
        base = _with_shuffle(base, lambda data: SeedableRandomSampler(data, seed))
    return base, seed


def _check(loader: DataLoader[Any], shards: int, process: ProcessContext) -> None:
    dataset: Any = loader.dataset
    if length_of(dataset) == 0:
        raise ConfigError(
            f"the dataset has 0 samples ({type(dataset).__name__} of a {type(loader).__name__}); "
            "check its path, split and filters"
        )
    sharding = find_replicated(loader.sampler) or find_replicated(loader.batch_sampler)
    ranks = process.world_size
    if sharding is not None and (shards > 1 or ranks > 1):
        again = f"each part would be cut again into {shards}" if shards > 1 else f"{ranks} ranks read the same batches"
        raise ConfigError(
            f"the loader's sampler {type(sharding).__name__} shards by rank already (num_replicas="
            f"{num_shares(sharding)}), and {again}; give the loader a sampler over the whole dataset"
        )


def _without_torchdata(sampler: Any, loader: DataLoader[Any]) -> Any:
    """Return torch's own sampler in the place of torchdata's, which adds a state that prepared loaders do not need."""
    if not type(sampler).__module__.startswith("torchdata."):
        return sampler
    if isinstance(sampler, BatchSampler):
        return BatchSampler(_without_torchdata(sampler.sampler, loader), sampler.batch_size, sampler.drop_last)
    if type(sampler).__name__ == "RandomSampler":  # no subclass of torch's
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, loader.generator)
    return sampler


def _with_shuffle(base: Any, build: Callable[[Sized], Sampler[int]]) -> Any:
    """Return a sampler or batch sampler with a plain shuffle replaced by one whose order is known for every epoch."""
    is_batched = type(base) is BatchSampler
    shuffle = base.sampler if is_batched else base
    # The one of shuffle=True: every sample once, in random order.
    if type(shuffle) is not RandomSampler or shuffle.replacement or shuffle.num_samples != len(shuffle.data_source):
        return base
    seeded = build(shuffle.data_source)
    return BatchSampler(seeded, base.batch_size, base.drop_last) if is_batched else seeded


class IndexSource:
    """A map-style dataset: the loader's own sampler yields this shard's indices."""

    has_exact_length = True

    def __init__(
        self,
        sampler: ShardedBatchSampler,
        dataset: Any,
        seed: int,
        process: ProcessContext | None,
        *,
        in_order: bool,
    ) -> None:
        """`process` of the ranks that begin passes together; None for one that reads for all."""
        self.sampler = sampler
        self._in_order = in_order
        self._dataset = dataset
        self._seed = seed
        self._process = process
        self._resumed: Position | None = None
        self._moved = 0
        """Steps of the pass under way that `share_out` left out."""
        self._seeded: tuple[torch.Generator, int] | None = None

    def note_generator(self, generator: torch.Generator | None) -> None:
        """Keep a generator that is not followed: the order is made of the seed that it has now."""
        self._seeded = None
        if generator is not None and self._followed is None:
            self._seeded = generator, generator.initial_seed()

    @property
    def _followed(self) -> GeneratorRandomSampler | None:
        shuffle = self.sampler.shuffle
        return shuffle if isinstance(shuffle, GeneratorRandomSampler) else None

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

    def fill(self, even: bool) -> bool:
        """Choose whether passes that begin from now on fill a short last step up; return the setting before."""
        before, self.sampler.even_batches = self.sampler.even_batches, even
        return before

    def num_steps(self) -> int:
        """Steps of a full pass."""
        return len(self.sampler.starting_at(0))

    def num_left(self) -> int:
        """Steps of the next pass."""
        return len(self.sampler)

    def starting_at(self, step: int) -> IndexSource:
        """Return this source with its next pass beginning at `step`."""
        moved = copy.copy(self)
        moved.sampler, moved._resumed, moved._moved = self.sampler.starting_at(step), None, 0
        return moved

    def share_out(self, left: RanksLeft, num_rounds: int) -> None:
        """Let reading go on after the next rounds of the pass under way, whose shards the ranks that are left share."""
        self.sampler.left = left
        self.sampler.start += num_rounds
        self._moved += num_rounds

    def hand_over(self, epoch: int) -> dict[str, Any]:
        """Return where this source is in an epoch, as plain data, for a rank that joins the others; see `take_over`."""
        sampler, followed = self.sampler, self._followed
        return {
            "epoch": epoch,
            "begin": (sampler.start, sampler.origin if self.epoch == epoch else 0),
            "moved": self._moved,
            "seeds": (sampler.order_seed, self._seed),
            "generator": None if followed is None else followed.saved_at(epoch),
            "resumed": None if self._resumed is None else self._resumed.to_dict(),
        }

    def take_over(self, given: Mapping[str, Any]) -> None:
        """Go on where another rank's source is, by its `hand_over`."""
        self.set_epoch(given["epoch"])
        self.sampler.order_seed, self._seed = given["seeds"]
        if self._followed is not None and given["generator"] is not None:
            self._followed.load(given["generator"])
        start, origin = given["begin"]
        self.sampler.begin_at(start, (given["epoch"], origin) if origin else None)
        self._moved = given["moved"]
        self._resumed = None if given["resumed"] is None else Position.read(given["resumed"])

    def end_pass(self) -> None:
        """Begin the next pass where this one began, and not where the ranks that are left went on in it."""
        self.sampler.start -= self._moved
        self._moved = 0

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""
        self.sampler.begin_at(0)
        self._resumed = None

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the sampler that shards, the shuffle below it, and whether batches come in order."""
        if not self.sampler.is_batched:
            return {"sampler": self.sampler, "in_order": self._in_order}
        base = self.sampler.batch_sampler
        inner = {"sampler": base.sampler} if type(base) is BatchSampler else {}
        return {"batch_sampler": self.sampler, "in_order": self._in_order, **inner}

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield this shard's batches."""
        for (batch,), rows in self._groups(loader, progress, 1):
            if rows is not progress.rows:
                progress.change(rows)
            progress.num_yielded += 1
            yield batch

    def rounds(self, loader: Any, progress: Progress) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of all shards at each step; for a sampler that draws them in turn. Errors as in `read`."""
        return self._groups(loader, progress, self.sampler.num_processes)

    def _groups(self, loader: Any, progress: Progress, size: int) -> Iterator[tuple[list[Any], Any]]:
        """Yield the batches of a pass in groups, each with the rows of its step."""
        batches, num_read = self._begin(loader, progress), 0
        planned: deque[BatchRows] | None = None
        while together := list(islice(batches, size)):
            if planned is None:  # a loader class of the user's own may ask for indices as late as for its first batch
                planned, progress.start = self.sampler.planned, self.sampler.began_at
            num_read += len(together)
            if len(together) < size and loader.keeps_plan:
                break
            yield together, planned.popleft() if planned else None
        if (self.sampler.planned if planned is None else planned) and loader.keeps_plan:
            raise ConfigError(
                f"a pass over the {type(self._dataset).__name__} ended after {num_read} batches, and the sampler had "
                "asked for more: the dataset or the collate function raised StopIteration, by which Python ends a loop "
                "without an error. Return a sample for each index, or raise another error"
            )

    def position(self, epoch: int, progress: Progress | None) -> Position:
        """Return the position of a pass, or of the beginning of the next one."""
        return Position.at(
            progress or self.loaded,
            epoch,
            seed=self.sampler.order_seed,
            generator=None if self._followed is None else self._followed.saved_at(epoch),
            dataset_length=length_of(self._dataset),
            global_batch=self.total_batch_size,
        )

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch at `position`."""
        before = self.epoch, self.sampler.order_seed
        check_length(self, self._dataset, position)
        followed = self._followed
        if position.seed is not None and (followed is None) != (position.generator is None):
            has = "no generator of its own" if followed is None else "a generator of its own"
            raise IncompatibleCheckpointError(
                f"the state is that of a loader {'with' if followed is None else 'without'} a generator of its own, "
                f"which draws the order, and this one has {has}; give the DataLoader what it had then"
            )
        sampler = self.sampler
        self.set_epoch(position.epoch)
        if position.seed is not None:
            sampler.order_seed = position.seed
        try:
            origin = sampler.origin_of(position.samples)
        except IncompatibleCheckpointError:
            self.set_epoch(before[0])
            sampler.order_seed = before[1]
            raise
        if position.seed is not None and self._seed == before[1]:
            self._seed = position.seed
        if followed is not None and position.generator is not None:
            followed.load(position.generator)
        sampler.begin_at(0, (position.epoch, origin))
        self._resumed = position if position.samples else None

    @property
    def loaded(self) -> Position | None:
        """The position at which the next pass begins, if it came from `resume`."""
        return self._resumed if self._resumed is not None and self._resumed.epoch == self.epoch else None

    def forget(self) -> None:
        """Drop the position that came from `resume`."""
        self.sampler.begin_at(self.sampler.start)
        self._resumed = None

    def seeded_reading(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the attributes of a loader whose workers begin their random streams anew at every batch."""
        sampler = "batch_sampler" if self.sampler.is_batched else "sampler"
        return {
            "dataset": SeededDataset(self._dataset, self.epoch),
            sampler: NumberedItems(self.sampler, partial(self._begin_numbers, loader.num_workers)),
            "collate_fn": partial(collate_in_turn, loader.collate_fn),
            "worker_init_fn": partial(init_worker, loader.worker_init_fn),
        }

    def _begin_numbers(self, num_workers: int) -> tuple[int, int, int]:
        """Return the epoch and the number of the next pass's first item, and the workers left out before it."""
        sampler, loaded = self.sampler, self.loaded
        first = sampler.start if loaded is None else loaded.steps
        if sampler.process_index is None:
            first *= sampler.num_processes
        return self.epoch, first, first % num_workers if self._in_order else 0

    def _begin(self, loader: Any, progress: Progress) -> Iterator[Any]:
        if self._seeded is not None and self._seeded[0].initial_seed() != self._seeded[1]:
            logger.warning(
                f"the generator of a loader's {type(self.sampler.shuffle).__name__} was seeded with "
                f"{self._seeded[0].initial_seed()} after prepare(), and its order follows the seed {self._seeded[1]} "
                "that it had then, and the epoch: seed it before prepare(), or choose another order with set_epoch()"
            )
            self.note_generator(self._seeded[0])  # once for each new seed
        followed = self._followed
        if followed is not None:
            followed.take(self._process)
        is_mid_epoch = bool(self.sampler.start or self.sampler.origin)
        is_drawn = is_mid_epoch or followed is not None and followed.draws_seed
        shard = stream_index(self.sampler.process_index or 0)
        batches = begin_pass(loader, loader.native_iterator, self._seed, progress.epoch, shard, is_drawn=is_drawn)
        return without_turns(batches) if is_mid_epoch and loader.num_workers else batches


def begin_pass(
    loader: DataLoader[Any], begin: Callable[[], Iterator[Any]], seed: int, epoch: int, shard: int, *, is_drawn: bool
) -> Iterator[Any]:
    """Return the iterator of a loader; where the number that one without workers draws `is_drawn`, without it.

    It comes from torch's global stream, or from the loader's generator, when an epoch begins. In the middle of one it
    is drawn already in the random state that a run goes on with: another would change every dropout after it.
    """
    if loader.num_workers > 0:
        # Workers derive their streams from one draw of this generator: augmentation differs per shard and worker.
        # Persistent ones draw it in the first pass, and it is the same in whatever epoch that is.
        worker_seed = mix_seed(seed, 0 if loader.persistent_workers else epoch, shard)
        loader.generator = torch.Generator().manual_seed(worker_seed)
        _import_for_workers(loader)
    if loader.num_workers > 0 or not is_drawn:
        return begin()
    kept, loader.generator = loader.generator, torch.Generator()
    try:
        return begin()
    finally:
        loader.generator = kept


def torch_iteration(loader_class: type) -> Callable[[Any], Iterator[Any]]:
    """Return the `__iter__` that a class of loaders has from torch, or from torchdata, below what a user has added."""
    above = (cls for cls in loader_class.__mro__ if cls.__module__.startswith(("torch.", "torchdata.")))
    found: Callable[[Any], Iterator[Any]] = next(vars(cls)["__iter__"] for cls in above if "__iter__" in vars(cls))
    return found


def _import_for_workers(loader: DataLoader[Any]) -> None:
    """Have the server that forks workers import what each of them would, unless it runs or was told what to import.

    From Python 3.14 on a loader's workers come from one. It imports the program's script, and nothing where that is a
    module (`python -m`) or a notebook: with torch 2.15 two workers began after 4 s then, in each pass. Nor does it know
    what the script imports late, as a collator of transformers, which took 3 s. Names that it does not find it skips.
    """
    if (loader.multiprocessing_context or multiprocessing.get_context()).get_start_method() == "forkserver":
        from multiprocessing.forkserver import _forkserver  # nothing else tells

        server: Any = _forkserver
        if getattr(server, "_preload_modules", None) == ["__main__"] and server._forkserver_pid is None:
            unpickled = [str(getattr(part, "__module__", None)) for part in (loader.dataset, loader.collate_fn)]
            modules = {"datasets", "transformers.trainer"} & sys.modules.keys()
            server.set_forkserver_preload(["__main__", __name__, *unpickled, *modules])


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def check_length(source: Any, dataset: Any, position: Position) -> None:
    """Raise unless a dataset is as long as the one that a position was taken from, where both lengths are known."""
    if length_of(dataset) in (None, position.dataset_length) or position.dataset_length is None:
        return
    before = source.epoch
    source.set_epoch(position.epoch)  # some are as long as their epoch says
    if (length := length_of(dataset)) != position.dataset_length:
        source.set_epoch(before)
        raise IncompatibleCheckpointError(
            f"the state was saved after {position.samples} samples of a dataset of {position.dataset_length}, and this "
            f"loader's dataset has {length}; prepare the loader over the same dataset. To go over to another one, turn "
            "off use_stateful_dataloader for load_state, or give load_state_dict of the loader an epoch alone"
        )
