"""The prepared data loader: the user's loader, reading this shard's part, and knowing what every step holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.plan import BatchRows, mix_seed
from accel_trainer.data.sampler import SeedableRandomSampler, ShardedBatchSampler, find_generator
from accel_trainer.errors import ConfigError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.collectives import broadcast_object, send_to_device
from accel_trainer.runtime.process import ProcessContext

__all__ = ["PreparedDataLoader", "prepare_data_loader", "skip_first_batches"]

logger = get_logger(__name__)

Hook = Callable[["PreparedDataLoader"], None]
"""Called with the loader when a pass over it begins or ends."""


class _Pass:
    """One iteration over a loader: how many batches it has handed out, and what the last one holds."""

    __slots__ = ("rows", "taken", "total")

    def __init__(self, total: int | None) -> None:
        self.rows: BatchRows | None = None
        self.taken = 0
        self.total = total


class PreparedDataLoader(DataLoader[Any]):
    """A `DataLoader` that reads one shard's part of its dataset; made by `prepare_data_loader`.

    It has every setting of the loader it was made from, and is an instance of that loader's class. A pass that runs to
    its end moves `epoch` on by one; a pass that is left early does not.
    """

    _sharder: ShardedBatchSampler
    _device: torch.device | None
    _non_blocking: bool
    _worker_seed: int
    _shard: int
    _on_begin: Hook | None
    _on_end: Hook | None
    _passes: list[_Pass]

    @property
    def rows(self) -> BatchRows | None:
        """What the batch yielded last holds, for every shard; None when no pass is under way."""
        return self._passes[-1].rows if self._passes else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch yielded last is the last one of its pass."""
        rows = self.rows
        return rows is not None and rows.is_last

    @property
    def remaining(self) -> int | None:
        """Steps left of the current pass, the one handed out last included; None where the length is not known."""
        current = self._passes[-1] if self._passes else None
        if current is None or (current.rows is not None and current.rows.is_last):
            return None if current is None else 1
        return None if current.total is None else current.total - current.taken + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch whose order is being read, or will be read next."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the epoch of `state_dict`; `skip_first_batches` moves within it."""
        self.set_epoch(state_dict["epoch"])

    @property
    def epoch(self) -> int:
        """The epoch whose order the next pass takes."""
        return self._sharder.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in the samplers and in the dataset, through whatever wraps them."""
        self._sharder.set_epoch(epoch)
        _set_dataset_epoch(self.dataset, epoch)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards; None where batches vary in size."""
        size = self._sharder.batch_size
        if size is None or self._sharder.split_batches:
            return size
        return size * self._sharder.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, whatever the sampler draws from it."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole pass, or None where the length is not known."""
        return _length(self._sharder.starting_at(0))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = _Pass(_length(self))
        epoch = self.epoch
        is_complete = False
        self._passes.append(progress)
        try:
            if self._on_begin is not None:
                self._on_begin(self)
            yield from self._read(progress, epoch)
            is_complete = True
        finally:
            self._passes.remove(progress)
            self._settle_epoch(epoch, is_complete)
            if self._on_end is not None:
                self._on_end(self)

    def _read(self, progress: _Pass, epoch: int) -> Iterator[Any]:
        if self.num_workers > 0:
            # Workers derive their streams from one draw of this generator: augmentation differs per shard and worker.
            self.generator = torch.Generator().manual_seed(mix_seed(self._worker_seed, epoch, self._shard))
        batches = super().__iter__()
        planned = self._sharder.take_planned()
        if self._device is None:
            for batch in batches:
                progress.rows = planned.popleft()
                progress.taken += 1
                yield batch
        else:
            for batch in batches:
                progress.rows = planned.popleft()
                progress.taken += 1
                yield send_to_device(batch, self._device, non_blocking=self._non_blocking)

    def _settle_epoch(self, epoch: int, is_complete: bool) -> None:
        """Move to the next epoch after a whole pass, unless somebody has chosen one meanwhile.

        A sampler that counts epochs itself may have moved on while workers were still reading.
        """
        if is_complete:
            self._sharder.start = 0
        if self.epoch in (epoch, epoch + 1):
            settled = epoch + 1 if is_complete else epoch
            if is_complete or self.epoch != settled:
                self.set_epoch(settled)

    def _skipping(self, num_batches: int) -> PreparedDataLoader:
        moved = _blank(type(self))
        moved.__dict__.update(self.__dict__)
        sharder = self._sharder.starting_at(self._sharder.start + num_batches)
        moved.__dict__["batch_sampler" if self.batch_sampler is self._sharder else "sampler"] = sharder
        moved.__dict__.update(_sharder=sharder, _passes=[], _iterator=None)
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**self.__dict__, "_passes": [], "_iterator": None, "_on_begin": None, "_on_end": None}
        return _restore, (_user_class(type(self)), state)


_PREPARED_CLASSES: dict[type, type[PreparedDataLoader]] = {DataLoader: PreparedDataLoader}


def _prepared_class(user_class: type[DataLoader[Any]]) -> type[PreparedDataLoader]:
    """The prepared loader as a subclass of the user's own loader class, which keeps its methods and its reading."""
    if user_class not in _PREPARED_CLASSES:
        name = f"Prepared{user_class.__name__}"
        _PREPARED_CLASSES[user_class] = type(name, (PreparedDataLoader, user_class), {})
    return _PREPARED_CLASSES[user_class]


def _user_class(prepared_class: type[PreparedDataLoader]) -> type[DataLoader[Any]]:
    return DataLoader if prepared_class is PreparedDataLoader else prepared_class.__bases__[1]


def _blank(prepared_class: type[PreparedDataLoader]) -> PreparedDataLoader:
    return prepared_class.__new__(prepared_class)


def _restore(user_class: type[DataLoader[Any]], state: dict[str, Any]) -> PreparedDataLoader:
    loader = _blank(_prepared_class(user_class))
    loader.__dict__.update(state)
    return loader


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    process: ProcessContext,
    config: DataConfig,
    device: torch.device | None = None,
    seed: int,
    shards: int | None = None,
    shard: int | None = None,
    on_begin: Hook | None = None,
    on_end: Hook | None = None,
) -> PreparedDataLoader:
    """Return the loader as this shard reads it. A loader that is prepared already is returned as it is.

    Collective when a sampler has a generator of its own: rank 0's seed counts. Otherwise ranks do not communicate.

    Args:
        device: where batches are put; None, or a CPU device, leaves them where the loader's workers put them.
        seed: the same on every rank; the order of an epoch depends on it, on the epoch and on the dataset alone.
        shards: into how many parts the data is cut; the number of ranks by default.
        shard: which of them this rank reads; its rank by default.
        on_begin: called when a pass over the loader begins.
        on_end: called when a pass ends, at its last batch or before.

    Raises:
        ConfigError: the object is no DataLoader, its dataset is empty, its sampler shards by rank already, or its batch
            size cannot be split.
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"expected a torch DataLoader, got {type(loader).__name__}; wrap the dataset in a DataLoader")
    shards = process.world_size if shards is None else shards
    shard = process.rank if shard is None else shard
    _check(loader, shards)
    seed = config.data_seed if config.data_seed is not None else seed
    prepared = _blank(_prepared_class(type(loader)))
    prepared.__dict__.update(loader.__dict__)
    sharder = _shard_sampler(loader, prepared.__dict__, process, config, seed, shards, shard)
    prepared.__dict__.update(
        _sharder=sharder,
        _device=None if device is None or device.type == "cpu" else device,
        _non_blocking=config.non_blocking,
        _worker_seed=seed if loader.generator is None else loader.generator.initial_seed(),
        _shard=shard,
        _on_begin=on_begin,
        _on_end=on_end,
        _passes=[],
        _iterator=None,
    )
    return prepared


def skip_first_batches(loader: DataLoader[Any], num_batches: int) -> PreparedDataLoader:
    """Return the loader with the first `num_batches` steps of its next pass left out; later passes are whole.

    Nothing is read to get there: the steps are skipped where the indices are drawn. The loader that is returned has
    every setting of `loader` and shares its epoch.

    Raises:
        ConfigError: `num_batches` is negative.
    """
    if num_batches < 0:
        raise ConfigError(f"num_batches={num_batches} cannot be skipped; give a number from 0 on")
    if not isinstance(loader, PreparedDataLoader):
        alone = ProcessContext(0, 0, 1, 1, torch.device("cpu"), None)
        loader = prepare_data_loader(loader, process=alone, config=DataConfig(), seed=torch.initial_seed())
    return loader._skipping(num_batches)


def _check(loader: DataLoader[Any], shards: int) -> None:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ConfigError(
            f"the dataset has 0 samples ({type(dataset).__name__} of a {type(loader).__name__}); "
            "check its path, split and filters"
        )
    if any(isinstance(value, torch.utils.data.dataloader._BaseDataLoaderIter) for value in loader.__dict__.values()):
        raise ConfigError(
            f"this {type(loader).__name__} holds an iterator that reads the whole dataset already; "
            "prepare the loader before its first pass"
        )
    replicas = getattr(loader.sampler, "num_replicas", 1)
    if replicas > 1 and shards > 1:
        raise ConfigError(
            f"the loader's sampler {type(loader.sampler).__name__} shards by rank already (num_replicas={replicas}), "
            f"and prepare() would cut each part again into {shards}; give the loader a sampler over the whole dataset"
        )


def _shard_sampler(
    loader: DataLoader[Any],
    settings: dict[str, Any],
    process: ProcessContext,
    config: DataConfig,
    seed: int,
    shards: int,
    shard: int,
) -> ShardedBatchSampler:
    """Build this shard's sampler and put it into the settings of the prepared loader."""
    base: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    generator = find_generator(base)
    if generator is not None:
        seed = broadcast_object(generator.initial_seed(), process)
    if config.use_seedable_sampler:
        if type(base) is BatchSampler and _is_plain_shuffle(shuffle := base.sampler):
            settings["sampler"] = SeedableRandomSampler(shuffle.data_source, seed)
            base = BatchSampler(settings["sampler"], base.batch_size, base.drop_last)
        elif _is_plain_shuffle(base):
            base = SeedableRandomSampler(base.data_source, seed)
    sharder = ShardedBatchSampler(
        base, shards, shard, config.split_batches, config.even_batches, join=not config.even_batches, seed=seed
    )
    settings["sampler" if loader.batch_sampler is None else "batch_sampler"] = sharder
    return sharder


def _is_plain_shuffle(sampler: Any) -> TypeGuard[RandomSampler]:
    """Whether a sampler is what `shuffle=True` makes: every sample once, in random order."""
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None


def _set_dataset_epoch(dataset: Any, epoch: int, depth: int = 8) -> None:
    """Call `set_epoch` on a dataset and on those it wraps (`.dataset` of a subset, `.datasets` of a concatenation)."""
    if dataset is None or depth == 0:
        return
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        _set_dataset_epoch(inner, epoch, depth - 1)
