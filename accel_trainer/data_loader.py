"""Re-exports: prepared loaders and their samplers, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.accelerator.own_loaders import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)
from accel_trainer.data.loader import PreparedDataLoader, skip_first_batches
from accel_trainer.data.mixture import load_mixture, mix_datasets
from accel_trainer.data.packing import PackingCollator, check_packing, pack_dataset
from accel_trainer.data.sampler import SeedableRandomSampler, ShardedBatchSampler
from accel_trainer.unsupported import explain_missing

__all__ = [
    "BatchSamplerShard", "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard", "DataLoaderStateMixin",
    "IterableDatasetShard", "PackingCollator", "PreparedDataLoader", "SeedableRandomSampler", "ShardedBatchSampler",
    "SkipBatchSampler", "SkipDataLoader", "check_packing", "get_sampler", "load_mixture", "mix_datasets",
    "pack_dataset", "prepare_data_loader", "skip_first_batches",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
