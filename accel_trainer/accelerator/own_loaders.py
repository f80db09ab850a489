"""Loaders, samplers and shards that a script constructs by itself, on the plan of those that `prepare` makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_trainer.accelerator.shared_state import GradientState
from accel_trainer.config.schema import DataConfig
from accel_trainer.data.loader import PreparedDataLoader, skip_first_batches
from accel_trainer.data.loader import prepare_data_loader as prepare_for_job
from accel_trainer.data.plan import check_can_split
from accel_trainer.data.sampler import ShardedBatchSampler
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext, current_process
from accel_trainer.runtime.rng import check_rng_types, synchronize_rng

BatchSamplerShard = ShardedBatchSampler
DataLoaderStateMixin = DataLoaderAdapter = PreparedDataLoader


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, in every pass."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    @property
    def total_length(self) -> int:
        """Batches of the sampler, the skipped ones included."""
        return len(self.batch_sampler)


class IterableDatasetShard(IterableDataset):
    """One shard of a stream that every shard reads from its beginning.

    A round of `batch_size` samples for each shard (of `batch_size` in all with `split_batches`) is cut into contiguous
    slices. The last round is filled up from the stream's first samples, or left out with `drop_last`.

    Raises:
        ConfigError: `split_batches` with a batch size that the shards cannot share evenly.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_can_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    @property
    def is_sharded_by_rank(self) -> bool:
        """Whether this is one of several shards, which `prepare` leaves as it is."""
        return self.num_processes > 1

    @property
    def _round_size(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, where the dataset has any."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples, size = len(self.dataset), self._round_size  # type: ignore[arg-type]
        rounds = samples // size if self.drop_last else -(-samples // size)
        return rounds * size // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        size = self._round_size
        share = size // self.num_processes
        own = slice(self.process_index * share, (self.process_index + 1) * share)
        samples, first = iter(self.dataset), None
        while current := list(islice(samples, size)):
            first = first or current
            if len(current) == size:
                yield from current[own]
            elif not self.drop_last:
                yield from list(islice(chain(current, cycle(first)), size))[own]


class _MadeByHand(type):
    """Metaclass of a name that constructs a PreparedDataLoader, and that prepared loaders are instances of."""

    is_dispatched: bool | None

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PreparedDataLoader) and cls.is_dispatched in (None, instance.dispatches)


def _prepare(
    loader: DataLoader[Any],
    reader: ProcessContext,
    config: DataConfig,
    device: Any,
    rng_types: Sequence[str] | None,
    job: ProcessContext | None = None,
) -> PreparedDataLoader:
    """Return a loader of a shard, with a state of its own, that sets the named streams to rank 0's in each pass."""
    process = current_process()
    names = check_rng_types(rng_types or (), process.device)
    state = GradientState()

    def begin(loader: PreparedDataLoader) -> None:
        if process.is_distributed:
            synchronize_rng(names, process)
        state.begin(loader)

    prepared = prepare_for_job(
        loader,
        process=reader,
        job=job,
        config=config,
        device=None if device is None else torch.device(device),
        seed=torch.initial_seed(),
        on_begin=begin,
        on_end=state.end,
    )
    prepared.gradient_state = state
    return prepared


class DataLoaderShard(metaclass=_MadeByHand):
    """A prepared loader of batches that are this rank's own; loaders of `prepare` are instances, too."""

    is_dispatched = False

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        device: Any = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> PreparedDataLoader:
        """Return a `DataLoader(dataset, **kwargs)` that moves its batches and tells where a pass ends.

        `synchronized_generator` (order depends on seed and epoch alone) and `torch_device_mesh` are not used.

        Args:
            device: where batches are moved to; None leaves them.
            rng_types: streams that are set to rank 0's when a pass begins. Collective then.
            skip_batches: batches left out of the first pass.
        """
        reader = ProcessContext(0, 0, 1, 1, current_process().device, None)
        config = DataConfig(non_blocking=_non_blocking, use_stateful_dataloader=use_stateful_dataloader)
        prepared = _prepare(DataLoader(dataset, **kwargs), reader, config, device, rng_types)
        prepared._by_hand = True
        return prepared.skipping(skip_batches) if skip_batches else prepared


class DataLoaderDispatcher(metaclass=_MadeByHand):
    """A prepared loader whose batches rank 0 reads for all; loaders with `dispatch_batches=True` are instances."""

    is_dispatched = True

    def __new__(  # type: ignore[misc]
        cls,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        **kwargs: Any,
    ) -> PreparedDataLoader:
        """Return a `DataLoader(dataset, **kwargs)` that rank 0 reads and collates for all. Collective in each step."""
        if split_batches:
            raise ConfigError(
                "DataLoaderDispatcher(split_batches=True): a batch is collated for its rank here, and never cut; "
                "divide batch_size by the number of processes, or use DataLoaderConfiguration(split_batches=True)"
            )
        config = DataConfig(
            dispatch_batches=True, non_blocking=_non_blocking, use_stateful_dataloader=use_stateful_dataloader
        )
        prepared = _prepare(DataLoader(dataset, **kwargs), current_process(), config, None, None)
        prepared._by_hand = True
        return prepared.skipping(skip_batches) if skip_batches else prepared


class SkipDataLoader(metaclass=_MadeByHand):
    """A loader without its first batches."""

    is_dispatched = None

    def __new__(  # type: ignore[misc]
        cls, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> PreparedDataLoader:
        """Return a `DataLoader(dataset, **kwargs)` whose first pass begins `skip_batches` later."""
        return skip_first_batches(DataLoader(dataset, **kwargs), skip_batches)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler that a loader draws indices from, inside of the one that shards its batches."""
    sampler: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    while (inner := getattr(sampler, "batch_sampler", None)) is not None:
        sampler = inner
    return getattr(sampler, "sampler", sampler)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = False,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = True,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedDataLoader:
    """Return a loader with the batches of one shard, without an Accelerator; see `Accelerator.prepare_data_loader`.

    Collective with `dispatch_batches` or `rng_types`.

    Args:
        device: where batches are moved to with `put_on_device`; None is this rank's.
        num_processes: number of shards; the number of ranks by default.
        process_index: the shard that is read; this rank's by default.
        slice_fn_for_dispatch: not used, nor is `torch_device_mesh`: batches are collated for their rank, and never cut.
        data_seed: seed of shuffling; torch's by default. Other options as of `DataConfig`.

    Raises:
        ConfigError: it cannot be sharded; see `accel_trainer.data.prepare_data_loader`.
    """
    process = current_process()
    world_size = process.world_size if num_processes is None else num_processes
    rank = process.rank if process_index is None else process_index
    reader = process if dispatch_batches else dataclasses.replace(process, rank=rank, world_size=world_size)
    config = DataConfig(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    own_device = (device or process.device) if put_on_device else None
    return _prepare(dataloader, reader, config, own_device, rng_types, job=process)
