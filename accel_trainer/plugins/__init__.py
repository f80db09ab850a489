"""Option objects that are passed to `Accelerator(...)`: they hold values, and the rooms below act on them."""

from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig
from accel_trainer.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_trainer.plugins.kwargs import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_trainer.plugins.parallelism import ParallelismConfig
from accel_trainer.strategies.comm_hooks import DDPCommunicationHookType

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
    "DistributedDataParallelKwargs", "DummyOptim", "DummyScheduler", "FullyShardedDataParallelPlugin",
    "GradScalerKwargs", "GradientAccumulationPlugin", "HfDeepSpeedConfig", "InitProcessGroupKwargs", "KwargsHandler",
    "ParallelismConfig", "ProfileKwargs", "ProjectConfiguration", "TorchDynamoPlugin",
]  # fmt: skip
