"""The prepared data loader: the user's loader, which yields this shard's batches and knows the rows of every step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.index_source import IndexSource, build_index_source, length_of, torch_iteration
from accel_trainer.data.iterable_source import ShardSource, SliceSource, build_stream_source
from accel_trainer.data.metrics import keep_one_for_each
from accel_trainer.data.plan import BatchRows, RanksLeft
from accel_trainer.data.position import Position, Progress
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.collectives import scatter_objects
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.side_stream import DeviceCopies, has_streams
from accel_trainer.runtime.torch_private import LOADER_AT_REST, keeps_iterator, over_batches
from accel_trainer.runtime.whereabouts import section

logger = get_logger(__name__)

Source = IndexSource | SliceSource | ShardSource
Hook = Callable[["PreparedDataLoader"], None]
"""Called with the loader when a pass over it begins or ends."""


class _Bookmark:
    """The pass begun last over a loader or over one that `skip_first_batches` made of it, until it is complete."""

    current: Progress | None = None
    is_open = False
    noted: Position | None = None
    """A loaded position within an epoch, at which no pass has begun yet."""
    chosen: int | None = None
    """The epoch that the user has chosen last."""

    def begin(self, current: Progress, batch_size: int | None) -> None:
        """Take a pass that begins, in steps of so many samples; None where they vary."""
        self.current, self.is_open = current, True
        if self.noted is not None:
            noted, self.noted = self.noted, None
            if current.epoch == noted.epoch and not noted.is_complete:
                # On another number of ranks a step has another number of samples.
                steps, rest = divmod(noted.samples, batch_size) if batch_size else (noted.steps, 0)
                by_hand = (
                    "" if rest else f"skip_first_batches(loader, {steps}), or let loaders do it by themselves with "
                )
                logger.warning(
                    f"the state that was loaded had read {noted.samples} samples ({noted.steps} steps) of epoch "
                    f"{noted.epoch}, and this pass begins at the beginning of epoch {current.epoch}; go on with "
                    f"{by_hand}DataLoaderConfiguration(use_stateful_dataloader=True)"
                )

    def end(self, current: Progress, is_complete: bool) -> None:
        """Drop a pass that ends. One that is left early keeps its position until another begins."""
        if current is self.current:
            self.is_open = False
            if is_complete:
                self.current = None

    def forget(self) -> None:
        """Drop everything: another position has been chosen."""
        self.current, self.is_open, self.noted = None, False, None


class PreparedDataLoader(DataLoader[Any]):
    """A `DataLoader` that yields the batches of one shard; made by `prepare_data_loader`.

    It has every setting of the loader it was made from, and is an instance of that loader's class. A pass that runs to
    its end moves `epoch` on by one; a pass that is left early does not, and the next one begins where it began.

    `state_dict` counts the samples of the epoch that loops have been given, over all shards; with `load_state_dict` the
    next pass begins after them, on any number of shards.
    """

    _is_accelerate_prepared = True
    _source: Source
    _dispatch: ProcessContext | None = None
    """The ranks for which rank 0 reads; None where each rank reads for itself."""
    _bookmark: _Bookmark
    _resumes: bool
    _device: torch.device | None
    _config: DataConfig
    _on_begin: tuple[Hook, ...]
    _on_end: tuple[Hook, ...]
    _passes: list[Progress]
    _plain: tuple[DataLoader[Any], int] | None = None
    """The loader of the user, and the steps to skip, where no Accelerator has prepared it."""
    _by_hand = False
    """Whether the user constructed this loader, of batches that are this rank's own."""
    gradient_state: Any = None
    """The `GradientState` of the Accelerator that prepared it; None without one."""
    admit: Callable[[PreparedDataLoader], object] | None = None
    """Called before a pass and after each of its batches but the last: ranks that return may join there."""
    watch: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    """Given the batches of each pass, yields them again: the meters of that Accelerator, where it has some."""

    @property
    def current_pass(self) -> Progress | None:
        """The pass under way; None without one."""
        return self._passes[-1] if self._passes else None

    @property
    def bookmark(self) -> object:
        """An object that this loader shares with those that `skip_first_batches` makes of it."""
        return self._bookmark

    @property
    def rows(self) -> BatchRows | None:
        """Rows of the batch yielded last, for every shard; None when no pass is under way."""
        return self._passes[-1].rows if self._passes else None

    @property
    def full_size(self) -> int | None:
        """Samples of a rank's full batch, alike on all ranks; None where the present batch may hold more than those."""
        rows, total = self.rows, self.total_batch_size
        if rows is None or rows.weights is not None or total is None or self.yields_items:
            return None
        return total // len(rows.sizes)

    def one_for_each(self, data: Any, rank: int) -> Any:
        """Return a rank's results of its batch, a value repeated to a full batch cut to its samples."""
        rows, full = self.rows, self.full_size
        if rows is None or full is None or rank >= len(rows.sizes):
            return data
        return keep_one_for_each(data, rows.sizes[rank], full, self._passes[-1].gathered_rows)

    @property
    def dispatches(self) -> bool:
        """Whether rank 0 reads for all ranks."""
        return bool(self._config.dispatch_batches)

    @property
    def even_batches(self) -> bool:
        """Whether the last step is filled up with samples from the beginning."""
        return self._config.even_batches

    @property
    def yields_items(self) -> bool:
        """Whether a batch is one item of the dataset (`batch_size=None`), which may hold any number of rows."""
        return self.batch_sampler is None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch yielded last is the last one of its pass."""
        rows = self.rows
        return rows is not None and rows.is_last

    @property
    def remainder(self) -> int:
        """Valid rows of the last step of a pass when it holds padding; -1 when it holds none, and before it."""
        rows = self.rows
        return sum(rows.rows) if rows is not None and rows.is_last and rows.padded else -1

    @property
    def num_given(self) -> int:
        """Batches that the current pass has yielded; 0 outside of one."""
        return self._passes[-1].num_yielded if self._passes else 0

    @property
    def remaining(self) -> int | None:
        """Steps left of the current pass, the one yielded last included; None where the length is not known."""
        current = self._passes[-1] if self._passes else None
        if current is not None and current.is_complete:
            return 1
        return None if current is None or current.total is None else current.total - current.num_yielded + 1

    @property
    def epoch(self) -> int:
        """The epoch whose order the next pass takes, or the present one is reading."""
        return self._source.epoch

    iteration = epoch  # the name that other libraries give it

    @functools.cached_property  # which leaves a loader class of the user's own an attribute of that name
    def device(self) -> torch.device:
        """Where batches are moved to; the host where they stay as they are collated."""
        return self._device or torch.device("cpu")

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether `load_state` lets the next pass begin at the position that it finds."""
        return self._resumes

    @property
    def skip_batches(self) -> int:
        """Steps that the next pass leaves out."""
        return self._source.start

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """This loader: it is the user's own class, and wraps no other one."""
        return self

    @property
    def begins_within_epoch(self) -> bool:
        """Whether the next pass leaves out steps of its epoch."""
        return self._source.start > 0 or self._source.loaded is not None

    def indices_at(self, epoch: int, step: int) -> list[int] | None:
        """Return the dataset's indices in this rank's batch at a step of an epoch; None where they are not known."""
        return self._source.sampler.indices_at(epoch, step) if isinstance(self._source, IndexSource) else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in the samplers and in the dataset, through whatever wraps them."""
        self._bookmark.chosen = epoch
        self._source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass under way, or of the one left early last; else the next one's beginning.

        Passes of loaders that `skip_first_batches` made of this one count, batches that have been read ahead do not.
        The same on every rank. Ranks communicate only over a stream with states of its own in shards of theirs, where
        every rank has to call it.
        """
        return self.noted_state_dict()()

    def noted_state_dict(self) -> Callable[[], dict[str, Any]]:
        """Return a function that gives the `state_dict` of now whenever it is called, if it is: a tenth of its cost."""
        epoch, current = self.epoch, self._bookmark.current
        if current is not None and not self._bookmark.is_open and current.epoch != epoch:
            current = None
        if current is None:
            return self._source.position(epoch, None).to_dict
        reached, source = current.copy(), self._source
        return lambda: source.position(reached.epoch, reached).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass over this loader exactly where `state_dict` was taken; later passes are full.

        After the last batch of an epoch that is an empty pass. `skip_first_batches` chooses another position instead.

        Raises:
            IncompatibleCheckpointError: the dataset, its batches or its readers are others, so that it cannot.
        """
        self._source.resume(Position.read(state_dict))
        self._bookmark.forget()

    def note_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take epoch and order from `state_dict`; `skip_first_batches` moves within the epoch.

        After the last batch of an epoch, the next pass is the following epoch's.

        Raises:
            IncompatibleCheckpointError: it is no state of a loader.
        """
        position = Position.read(state_dict)
        beginning = Position(
            epoch=position.epoch + position.is_complete, seed=position.seed, generator=position.generator
        )
        self._source.resume(beginning)
        self._bookmark.forget()
        self._bookmark.noted = position if position.samples else None

    @property
    def gathers_state(self) -> bool:
        """Whether `state_dict` is collective."""
        return isinstance(self._source, ShardSource) and self._source.gathers_state

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards; None where batches vary in size."""
        return self._source.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, whatever the sampler draws from it."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a full pass, or None where the length is not known."""
        try:
            return self._source.num_steps()
        except TypeError:
            return None

    def __len__(self) -> int:
        return self._source.num_left()

    @section("data loading")
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.admit is not None:
            self.admit(self)
        current = Progress(self.epoch, length_of(self) if self._source.has_exact_length else None)
        is_complete = False
        self._passes.append(current)
        self._bookmark.begin(current, self.total_batch_size)
        try:
            for hook in self._on_begin:
                hook(self)
            batches = self._batches(current)
            yield from batches if self.watch is None else self.watch(batches)
            is_complete = True
        finally:
            self._passes.remove(current)
            self._bookmark.end(current, is_complete)
            if isinstance(self._source, IndexSource):
                self._source.end_pass()
            self._advance_epoch(current.epoch, is_complete)
            for hook in self._on_end:
                hook(self)

    def _batches(self, current: Progress) -> Iterator[Any]:
        """Return the batches of a pass where they are to be used."""
        if self._device is None:
            return self._read(current)
        if self.num_workers > 0 and self._dispatch is None and self._config.prefetch_to_device:
            return self._one_ahead(current, DeviceCopies(self._device, self._config))
        # Batches that this process makes itself are not made ahead of use: what they draw from its random streams would
        # come before what the step in between draws, and before a checkpoint that it saves. The copy of one still runs
        # beside the steps before it, which the host only enqueues.
        copies = DeviceCopies(self._device, self._config, pins=True)
        return (copies.begin(batch)() for batch in self._read(current))

    def _one_ahead(self, current: Progress, copies: DeviceCopies) -> Iterator[Any]:
        """Yield batches that workers have made, each once the copy of the next one has begun."""
        reading = current.copy()
        begun = ((copies.begin(batch), reading.copy()) for batch in self._read(reading))
        following = next(begun, None)
        failure: Exception | None = None
        while following is not None:
            copied, reached = following
            try:
                following = next(begun, None)
            except Exception as error:  # raised in its turn: this batch is good
                following, failure = None, error
            current.move_to(reached)
            yield copied()
        if failure is not None:
            raise failure

    def _read(self, progress: Progress) -> Iterator[Any]:
        if self._dispatch is None:
            batches = self._read_own(progress)
        else:
            assert not isinstance(self._source, ShardSource)
            batches = _read_for_all(self._source.rounds(self, progress), progress, self._dispatch)
        if self.keeps_plan or isinstance(self._source, IndexSource):
            return batches
        # What makes the batches of a stream has no place for an `__iter__` of the user's class: it goes over them here.
        return super(PreparedDataLoader, over_batches(self, batches)).__iter__()

    def _read_own(self, progress: Progress) -> Iterator[Any]:
        """Yield this rank's batches, from another step on whenever the pass has been moved there."""
        progress.is_moved = True
        while progress.is_moved:
            progress.is_moved = False
            for batch in self._source.read(self, progress):
                yield batch
                if self.admit is not None and not progress.is_complete:
                    self.admit(self)
                if progress.is_moved:
                    break

    def why_not_shared_out(self) -> str:
        """Return why `share_out` cannot be called; empty where it can."""
        if not isinstance(self._source, IndexSource):
            return "a loader reads an iterable dataset, whose samples cannot be dealt out anew"
        if self._dispatch is not None:
            return "rank 0 reads for all ranks (dispatch_batches)"
        if self._device is not None and self.num_workers > 0:
            return "workers read ahead for a device"
        if len(self._passes) > 1:
            return "a loader is read twice at the same time"
        return ""

    def share_out(self, left: RanksLeft, samples: int, rounds: int) -> None:
        """Deal the batches of all shards out to the ranks that are left, in this pass and in later ones.

        Every one of them calls it at the same step. Updates stay the same: see `share_windows`.

        Args:
            samples: of the epoch that were trained, over all shards.
            rounds: of the pass under way that were trained, since it began or since the last call.
        """
        assert isinstance(self._source, IndexSource)
        self._source.share_out(left, rounds if self._passes else 0)
        for current in self._passes:
            current.restart(samples, self._source.start, self._source.num_left())

    def hand_over(self) -> dict[str, Any]:
        """Return where reading is, as plain data, for a rank that joins the others."""
        assert isinstance(self._source, IndexSource)
        current = self.current_pass
        return self._source.hand_over(self.epoch if current is None else current.epoch)

    def take_over(self, given: Mapping[str, Any]) -> None:
        """Begin the next pass where the others are, by the `hand_over` of one of them."""
        assert isinstance(self._source, IndexSource)
        self._source.take_over(given)

    def resize(self, num_ranks: int, rank: int) -> None:
        """Cut the data of later passes into as many shards as there are ranks now."""
        assert isinstance(self._source, IndexSource)
        self._source.sampler.num_processes, self._source.sampler.process_index = num_ranks, rank

    def native_iterator(self) -> Iterator[Any]:
        """Return the iterator of the user's own loader class, over this loader's samplers."""
        return super().__iter__()

    @property
    def keeps_plan(self) -> bool:
        """Whether the user's loader class leaves it to torch's to yield a batch for each that its sampler plans."""
        iterate: Any = super().__iter__
        return iterate.__func__ is torch_iteration(type(self))

    def _get_iterator(self) -> Any:
        """Return torch's iterator of the batches; every way of reading a loader comes here for it."""
        reader = self
        if self.num_workers > 0 and isinstance(self._source, IndexSource):
            reader = type(self).__new__(type(self))
            reader.__dict__.update(self.__dict__, **self._source.seeded_reading(self))
        return super(PreparedDataLoader, reader)._get_iterator()

    def _advance_epoch(self, epoch: int, is_complete: bool) -> None:
        """Move to the next epoch after a full pass, unless the user has chosen one meanwhile.

        A sampler that counts epochs itself may have moved on while workers were still reading.
        """
        if is_complete:
            self._source.rewind()
        # An iterator that is still held ends when the user has chosen the next epoch already.
        if self.epoch in (epoch, epoch + 1) and (is_complete or self.epoch not in (epoch, self._bookmark.chosen)):
            self._source.set_epoch(epoch + is_complete)

    def add_hooks(self, config: DataConfig, on_begin: Hook | None, on_end: Hook | None) -> None:
        """Call hooks of another Accelerator, too, when passes begin and end."""
        differing = [f.name for f in fields(config) if getattr(config, f.name) != getattr(self._config, f.name)]
        if differing and not self._by_hand:
            said = ", ".join(f"{name}={getattr(self._config, name)!r}" for name in differing)
            asked = ", ".join(f"{name}={getattr(config, name)!r}" for name in differing)
            raise ConfigError(
                f"this {type(self).__name__} was prepared with {said}, and is to be prepared with {asked}; prepare the "
                "DataLoader that it was made from, or use the same DataLoaderConfiguration"
            )
        if on_begin is not None and on_begin not in self._on_begin:
            self._on_begin += (on_begin,)
        if on_end is not None and on_end not in self._on_end:
            self._on_end += (on_end,)

    @contextmanager
    def without_filling(self) -> Iterator[None]:
        """Context in which passes begin that fill nothing up, whatever `even_batches` says.

        Every batch then holds samples that count, or is lent to a shard that has none and counts nothing.
        """
        before = self._source.fill(False)
        try:
            yield
        finally:
            self._source.fill(before)

    def skipping(self, num_batches: int) -> PreparedDataLoader:
        """Return a loader with all settings of this one whose next pass begins `num_batches` steps later.

        Where a state was loaded, the steps count from the beginning of its epoch, and not from its position.
        """
        loaded, self._bookmark.noted = self._bookmark.noted or self._source.loaded, None
        if loaded is not None and loaded.is_complete and self.epoch in (loaded.epoch, loaded.epoch + 1):
            # Fewer steps than that epoch had can only be meant for the next one.
            self._source.set_epoch(loaded.epoch + (num_batches < loaded.steps))
        self._source.forget()
        moved = type(self).__new__(type(self))
        source = self._source.starting_at(self._source.start + num_batches)
        moved.__dict__.update(self.__dict__, _source=source, _passes=[], **LOADER_AT_REST, **source.settings(self))
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        fresh = {
            "_passes": [],
            "_on_begin": (),
            "_on_end": (),
            "_bookmark": _Bookmark(),
            "gradient_state": None,
            "admit": None,
            "watch": None,
        }
        # A prepared class is PreparedDataLoader, below DataLoader, or one made of it and the user's class.
        return _restore, (type(self).__bases__[-1], {**self.__dict__, **LOADER_AT_REST, **fresh})


def _read_for_all(
    rounds: Iterator[tuple[Any, BatchRows]], progress: Progress, process: ProcessContext
) -> Iterator[Any]:
    """Yield this rank's batches, which rank 0 reads and sends as objects: anything that pickles travels.

    Collective: one scatter for each step. `rounds` are read on rank 0 only; an error there ends the pass on all ranks.
    """
    parcels = _parcels(rounds, progress, process.world_size) if process.is_main else None
    while True:
        parcel = scatter_objects(next(parcels) if parcels is not None else None, process)
        if isinstance(parcel, str):
            if parcels is not None:
                next(parcels)  # raises the error itself
            raise ProcessGroupError(f"rank 0, which reads for all ranks, failed: {parcel}; see its traceback")
        if parcel is None:
            return
        batch, rows, progress.start = parcel
        progress.change(rows)
        progress.num_yielded += 1
        yield batch
        if rows.is_last:
            return


def _parcels(rounds: Iterator[tuple[Any, BatchRows]], progress: Progress, num_ranks: int) -> Iterator[list[Any]]:
    """Yield, for each rank, its batch with rows and start of the pass; an error's text; or None at the end."""
    try:
        for batches, rows in rounds:
            yield [(batch, rows, progress.start) for batch in batches]
    except Exception as error:
        yield [f"{type(error).__name__}: {error}"] * num_ranks
        raise
    yield [None] * num_ranks


class LoaderCheckpoint:
    """A loader as `save_state` and `load_state` treat it.

    With `use_stateful_dataloader` the next pass begins at a loaded position; without it, `skip_first_batches` moves
    there: loops that are written for it would otherwise leave samples out twice.
    """

    def __init__(self, loader: PreparedDataLoader) -> None:
        self.state_dict = loader.state_dict
        self.load_state_dict = loader.load_state_dict if loader._resumes else loader.note_state_dict


_PREPARED_CLASSES: dict[type, type[PreparedDataLoader]] = {DataLoader: PreparedDataLoader}


def _prepared_class(user_class: type[DataLoader[Any]]) -> type[PreparedDataLoader]:
    """Return the prepared loader as a subclass of the user's own loader class, which keeps its methods."""
    if user_class not in _PREPARED_CLASSES:
        name = f"Prepared{user_class.__name__}"
        _PREPARED_CLASSES[user_class] = type(name, (PreparedDataLoader, user_class), {})
    return _PREPARED_CLASSES[user_class]


def _restore(user_class: type[DataLoader[Any]], state: dict[str, Any]) -> PreparedDataLoader:
    prepared_class = _prepared_class(user_class)
    loader = prepared_class.__new__(prepared_class)
    loader.__dict__.update(state)
    return loader


def _build_source(
    loader: DataLoader[Any],
    process: ProcessContext,
    job: ProcessContext | None,
    config: DataConfig,
    seed: int,
    shards: int,
    shard: int | None,
) -> Source:
    """Return the source of one shard's batches; of those of all shards, which rank 0 sends, where `shard` is None."""
    if keeps_iterator(loader):
        raise ConfigError(
            f"this {type(loader).__name__} keeps an iterator that reads the whole dataset; use a loader that makes its "
            "iterator in __iter__"
        )
    if shard is None and shards != process.world_size:
        raise ConfigError(
            f"dispatch_batches=True sends each of {process.world_size} ranks its own batch, and the data is cut into "
            f"{shards} parts; leave dispatch_batches off when ranks share their data"
        )
    options: Any = {"config": config, "seed": seed, "shards": shards, "shard": shard}
    if isinstance(loader.dataset, IterableDataset):
        return build_stream_source(loader, process=process, job=job or process, **options)
    return build_index_source(loader, process=job or process, **options)


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    process: ProcessContext,
    config: DataConfig,
    device: torch.device | None = None,
    seed: int,
    shards: int | None = None,
    shard: int | None = None,
    job: ProcessContext | None = None,
    on_begin: Hook | None = None,
    on_end: Hook | None = None,
) -> PreparedDataLoader:
    """Return the loader with the batches of this shard; one that is prepared already is returned with the hooks added.

    Collective when a sampler has a generator of its own: rank 0's counts, here and where passes begin. Otherwise ranks
    do not communicate.

    Args:
        device: target device of the batches; None, or a CPU device, leaves them where the loader's workers put them.
            On one with streams they are pinned and copied as `config` says.
        seed: the same on every rank; the order of an epoch depends on it, on the epoch and on the dataset alone.
        shards: number of shards of the data; the number of ranks by default.
        shard: the index of the one that this rank reads; its rank by default.
        job: this process among all ranks, where some of `process` are groups that read the same.
        on_begin: called when a pass over the loader begins.
        on_end: called when a pass ends, at its last batch or before.

    Raises:
        ConfigError: the object is no DataLoader, its dataset is empty, its sampler shards by rank already, its batch
            size cannot be split, or it was prepared with another `config`.
    """
    loader, skipped = _without_skips(loader, process)
    if isinstance(loader, PreparedDataLoader):
        loader.add_hooks(config, on_begin, on_end)
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"expected a torch DataLoader, got {type(loader).__name__}; wrap the dataset in a DataLoader")
    loader = _pinning(loader, config, device)
    dispatch = bool(config.dispatch_batches) and process.is_distributed
    own = None if dispatch else (process.rank if shard is None else shard)
    data_seed = seed if config.data_seed is None else config.data_seed
    source = _build_source(loader, process, job, config, data_seed, shards or process.world_size, own)
    state = dict(
        loader.__dict__,
        _source=source,
        _dispatch=process if dispatch else None,
        _device=None if device is None or device.type == "cpu" else device,
        _config=config,
        _on_begin=(),
        _on_end=(),
        _bookmark=_Bookmark(),
        _resumes=config.use_stateful_dataloader,
        _passes=[],
        **LOADER_AT_REST,
        **source.settings(loader),
    )
    prepared = _restore(type(loader), state)
    prepared.add_hooks(config, on_begin, on_end)
    return prepared.skipping(skipped) if skipped else prepared


def _pinning(loader: DataLoader[Any], config: DataConfig, device: torch.device | None) -> DataLoader[Any]:
    """Return the loader as it is, or one whose thread pins batches of workers that a device copies beside its work.

    Without workers they are pinned where they are copied: torch's loader fails over those that lie on a device already.
    """
    is_copied_beside = device is not None and config.prefetch_to_device and has_streams(device)
    if is_copied_beside and config.pin_memory and loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.pin_memory = True
    return loader


def _without_skips(loader: DataLoader[Any], process: ProcessContext) -> tuple[DataLoader[Any], int]:
    """Return the user's own loader inside of one by `skip_first_batches`, and the number of batches left out."""
    if not isinstance(loader, PreparedDataLoader) or loader._plain is None:
        return loader, 0
    plain, skipped = loader._plain
    if process.is_distributed:
        raise ConfigError(
            f"skip_first_batches left out {skipped} batches of a {type(plain).__name__} that was not prepared, and a "
            f"step of {process.world_size} processes has {process.world_size} batches; prepare the loader first, then "
            "skip steps of what prepare() returned"
        )
    return plain, skipped


@contextmanager
def keeping_epoch(loader: Any) -> Iterator[None]:
    """Context after which a prepared loader is in the epoch that it was in, though a pass over it has ended.

    Evaluations draw alike then, however many there have been before; of another loader, nothing is known.
    """
    epoch = loader.epoch if isinstance(loader, PreparedDataLoader) else None
    try:
        yield
    finally:
        if epoch is not None and loader.epoch != epoch:
            loader.set_epoch(epoch)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedDataLoader:
    """Return the loader with the first `num_batches` steps of its next pass left out; later passes are full.

    A map-style dataset is not read to get there: the steps are skipped where the indices are drawn. A stream is read
    and not collated. The loader that is returned has every setting of `dataloader` and shares its epoch.

    Raises:
        ConfigError: `num_batches` is negative.
    """
    if num_batches < 0:
        raise ConfigError(f"num_batches={num_batches} cannot be skipped; give a number from 0 on")
    prepared, plain = dataloader, None
    if isinstance(prepared, PreparedDataLoader):
        plain = prepared._plain
    else:
        alone = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
        prepared = prepare_data_loader(dataloader, process=alone, config=DataConfig(), seed=torch.initial_seed())
        plain = (dataloader, 0)
    skipping = prepared.skipping(num_batches)
    if plain is not None:
        skipping._plain = (plain[0], plain[1] + num_batches)
    return skipping
