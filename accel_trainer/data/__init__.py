"""Reading data: the samples of each rank, and the rows of each step."""

from accel_trainer.data.loader import PreparedDataLoader, prepare_data_loader, skip_first_batches
from accel_trainer.data.metrics import trim_gathered
from accel_trainer.data.plan import BatchRows
from accel_trainer.data.sampler import SeedableRandomSampler, ShardedBatchSampler

__all__ = [
    "BatchRows", "PreparedDataLoader", "SeedableRandomSampler", "ShardedBatchSampler", "prepare_data_loader",
    "skip_first_batches", "trim_gathered",
]  # fmt: skip
