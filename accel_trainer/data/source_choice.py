"""Which source serves a loader: decided once, when it is prepared, from its dataset and the configuration."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_trainer.config.schema import DataConfig
from accel_trainer.data.index_source import DispatchSource, IndexSource, Source
from accel_trainer.data.iterable_reader import (
    OwnShards,
    SliceCollate,
    SlicedStream,
    StreamRule,
    keeps_own_state,
    reads_own_part,
    shards_of,
)
from accel_trainer.data.iterable_source import ShardSource, SliceSource
from accel_trainer.data.sampler import SeedableRandomSampler, ShardedBatchSampler, find_generator, find_replicated
from accel_trainer.errors import ConfigError
from accel_trainer.logging import get_logger
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import LOADER_AT_REST, LOADER_ITERATOR, is_loader_iterator

__all__ = ["build_source"]

logger = get_logger(__name__)


def build_source(
    loader: DataLoader[Any], *, process: ProcessContext, config: DataConfig, seed: int, shards: int, shard: int
) -> Source:
    """Return the source of this shard's batches. The loader itself is not changed.

    Raises:
        ConfigError: as `prepare_data_loader` says.
    """
    _check(loader, config, shards)
    dispatches = bool(config.dispatch_batches) and process.is_distributed
    if dispatches and shards != process.world_size:
        raise ConfigError(
            f"dispatch_batches=True sends each of {process.world_size} ranks its own batch, and the data is cut into "
            f"{shards} parts; leave dispatch_batches off when ranks share their data"
        )
    if dispatches and isinstance(loader.dataset, IterableDataset) and reads_own_part(loader.dataset):
        raise ConfigError(
            f"dispatch_batches=True has rank 0 read for all ranks, and this {type(loader.dataset).__name__} yields the "
            "part of one rank; leave dispatch_batches off, or give the loader the whole stream"
        )
    part = None if dispatches else shard
    source: IndexSource | SliceSource | ShardSource
    if not isinstance(loader.dataset, IterableDataset):
        source = _index_source(loader, process, config, seed, shards, part)
    elif not dispatches and shards > 1 and _has_own_part(loader.dataset, process, config, shards):
        source = _shard_source(loader, process, config, seed, shards, shard)
    else:
        source = _slice_source(loader, config, seed, shards, part)
    if not dispatches:
        return source
    assert not isinstance(source, ShardSource)
    return DispatchSource(source, process)


def _check(loader: DataLoader[Any], config: DataConfig, shards: int) -> None:
    dataset = loader.dataset
    if any(is_loader_iterator(value) for name, value in vars(loader).items() if name != LOADER_ITERATOR):
        raise ConfigError(
            f"this {type(loader).__name__} keeps an iterator that reads the whole dataset; use a loader that makes its "
            "iterator in __iter__"
        )
    if isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ConfigError(
            f"the dataset has 0 samples ({type(dataset).__name__} of a {type(loader).__name__}); "
            "check its path, split and filters"
        )
    sharding = find_replicated(loader.sampler) or find_replicated(loader.batch_sampler)
    if sharding is not None and shards > 1:
        raise ConfigError(
            f"the loader's sampler {type(sharding).__name__} shards by rank already (num_replicas="
            f"{sharding.num_replicas}), and each part would be cut again into {shards}; give the loader a sampler over "
            "the whole dataset"
        )


def _index_source(
    loader: DataLoader[Any], process: ProcessContext, config: DataConfig, seed: int, shards: int, shard: int | None
) -> IndexSource:
    base: Any = _plain(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, loader)
    generator = find_generator(base)
    order_seed = seed if generator is None else broadcast_object(generator.initial_seed(), process)
    if config.use_seedable_sampler:
        if type(base) is BatchSampler and _is_plain_shuffle(shuffle := base.sampler):
            base = BatchSampler(SeedableRandomSampler(shuffle.data_source, order_seed), base.batch_size, base.drop_last)
        elif _is_plain_shuffle(base):
            base = SeedableRandomSampler(base.data_source, order_seed)
    sampler = ShardedBatchSampler(
        base, shards, shard, config.split_batches, config.even_batches, join=True, seed=order_seed
    )
    if len_or_none(sampler) == 0:
        logger.warning(
            f"a loader has no steps: drop_last leaves out what does not fill a batch of {sampler.batch_size} "
            f"{'over all' if config.split_batches else 'on each'} of {shards} processes"
        )
    in_order = loader.in_order or type(base) is not BatchSampler
    if not in_order:
        sampler.num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    is_batched = loader.batch_sampler is not None
    return IndexSource(sampler, loader.dataset, _worker_seed(loader, seed), is_batched=is_batched, in_order=in_order)


def _plain(sampler: Any, loader: DataLoader[Any]) -> Any:
    """Return torch's own sampler in the place of torchdata's, which adds a state that prepared loaders do not need."""
    if not type(sampler).__module__.startswith("torchdata."):
        return sampler
    if isinstance(sampler, BatchSampler):
        return BatchSampler(_plain(sampler.sampler, loader), sampler.batch_size, sampler.drop_last)
    if type(sampler).__name__ == "RandomSampler":  # no subclass of torch's
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, loader.generator)
    return sampler


def _is_plain_shuffle(sampler: Any) -> TypeGuard[RandomSampler]:
    """Whether a sampler is what `shuffle=True` makes: every sample once, in random order."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _stream_rule(loader: DataLoader[Any], config: DataConfig, shards: int, shard: int | None) -> StreamRule:
    batch_size = loader.batch_size or 1
    if config.split_batches and loader.batch_size is not None and batch_size % shards != 0:
        raise ConfigError(
            f"split_batches=True cuts each batch over {shards} processes, and batch_size={batch_size} is not a "
            f"multiple of {shards}; choose such a batch size, or split_batches=False"
        )
    per_shard = batch_size // shards if config.split_batches and loader.batch_size is not None else batch_size
    return StreamRule(shards, shard, per_shard, even=config.even_batches, drop_last=loader.drop_last)


def _slice_source(
    loader: DataLoader[Any], config: DataConfig, seed: int, shards: int, shard: int | None
) -> SliceSource:
    is_resumable = config.use_stateful_dataloader
    stream = SlicedStream(
        loader.dataset,
        _stream_rule(loader, config, shards, shard),
        seed,
        draws_alike=shards > 1 or is_resumable,
        keeps_state=is_resumable and loader.num_workers == 0 and keeps_own_state(loader.dataset),
    )
    # Every rank must meet the same steps in the same order, whichever worker is ready first.
    reader = _reader(loader, stream, is_all=shard is None, in_order=loader.in_order or shards > 1)
    return SliceSource(reader, stream, _worker_seed(loader, seed))


def _shard_source(
    loader: DataLoader[Any], process: ProcessContext, config: DataConfig, seed: int, shards: int, shard: int
) -> ShardSource:
    dataset: Any = loader.dataset
    if not reads_own_part(dataset):
        dataset = dataset.shard(num_shards=shards, index=shard)
    stream = OwnShards(dataset, _stream_rule(loader, config, shards, shard), seed)
    reader = _reader(loader, stream, is_all=False, in_order=loader.in_order)
    return ShardSource(reader, stream, _worker_seed(loader, seed), process)


def _has_own_part(dataset: Any, process: ProcessContext, config: DataConfig, shards: int) -> bool:
    """Whether each rank reads its own part of a stream: it does already, or the stream has enough shards.

    A loader that resumes by itself leaves a stream whole: in shards, its order would depend on the number of ranks.
    """
    if shards != process.world_size:
        return False
    return reads_own_part(dataset) or (not config.use_stateful_dataloader and shards_of(dataset) >= shards)


def _worker_seed(loader: DataLoader[Any], seed: int) -> int:
    return seed if loader.generator is None else loader.generator.initial_seed()


def _reader(
    loader: DataLoader[Any], stream: SlicedStream | OwnShards, *, is_all: bool, in_order: bool
) -> DataLoader[Any]:
    """The user's loader, of the same class and with the same settings, over a stream of ready-made steps."""
    if loader.num_workers > 0:
        stream.share()
    reader = type(loader).__new__(type(loader))
    collate = SliceCollate(loader.collate_fn, is_all=is_all, is_single=loader.batch_size is None)
    reader.__dict__.update(
        loader.__dict__,
        dataset=stream,
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        collate_fn=collate,
        in_order=in_order,
        **LOADER_AT_REST,
    )
    return reader


def len_or_none(sized: Any) -> int | None:
    """Return the length of something that may not have one."""
    try:
        return len(sized)
    except TypeError:
        return None
