"""Fine-tune with Hugging Face's Trainer or a native PyTorch loop, and run the same script on a laptop or a cluster.

Names are resolved at first use: importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from accel_trainer.moved import find_moved_modules

__version__ = "0.1.0"

_EXPORTS = {
    "AcceleratedOptimizer": "accel_trainer.optimizer",
    "AcceleratedScheduler": "accel_trainer.scheduler",
    "Accelerator": "accel_trainer.accelerator",
    "AcceleratorState": "accel_trainer.state",
    "AutocastKwargs": "accel_trainer.plugins",
    "DDPCommunicationHookType": "accel_trainer.plugins",
    "DataLoaderConfiguration": "accel_trainer.plugins",
    "DeepSpeedPlugin": "accel_trainer.plugins",
    "DistributedDataParallelKwargs": "accel_trainer.plugins",
    "DistributedType": "accel_trainer.state",
    "DummyOptim": "accel_trainer.plugins",
    "DummyScheduler": "accel_trainer.plugins",
    "FullyShardedDataParallelPlugin": "accel_trainer.plugins",
    "GradScalerKwargs": "accel_trainer.plugins",
    "GradientAccumulationPlugin": "accel_trainer.plugins",
    "GradientState": "accel_trainer.state",
    "InitProcessGroupKwargs": "accel_trainer.plugins",
    "PartialState": "accel_trainer.state",
    "ProfileKwargs": "accel_trainer.plugins",
    "ProjectConfiguration": "accel_trainer.plugins",
    "Seq2SeqTrainer": "accel_trainer.trainer",
    "Seq2SeqTrainingArguments": "accel_trainer.trainer",
    "TorchDynamoPlugin": "accel_trainer.plugins",
    "Trainer": "accel_trainer.trainer",
    "TrainingArguments": "accel_trainer.trainer",
    "debug_launcher": "accel_trainer.launch.notebook",
    "find_executable_batch_size": "accel_trainer.utils",
    "init_empty_weights": "accel_trainer.utils",
    "init_on_device": "accel_trainer.utils",
    "load_checkpoint_and_dispatch": "accel_trainer.utils",
    "load_checkpoint_in_model": "accel_trainer.utils",
    "notebook_launcher": "accel_trainer.launch.notebook",
    "prepare_data_loader": "accel_trainer.data_loader",
    "set_seed": "accel_trainer.utils",
    "skip_first_batches": "accel_trainer.data_loader",
    "synchronize_rng_states": "accel_trainer.utils",
}

__all__ = ["__version__", *_EXPORTS]

find_moved_modules()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
