"""Re-exports: options, collectives and small functions, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.accelerator.gathering import (
    GatheredParameters,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_states,
    wait_for_everyone,
)
from accel_trainer.accelerator.shared_state import DistributedType
from accel_trainer.checkpoint.weights.into_model import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.meta_device import init_empty_weights, init_on_device
from accel_trainer.logging import tqdm
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig
from accel_trainer.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_trainer.plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
from accel_trainer.runtime.rng import set_seed
from accel_trainer.runtime.tensor_trees import concatenate, find_batch_size, recursively_apply, send_to_device
from accel_trainer.tree import honor_type
from accel_trainer.unsupported import explain_missing

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GatheredParameters",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HfDeepSpeedConfig",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProfileKwargs",
    "ProjectConfiguration",
    "ReduceOp",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
