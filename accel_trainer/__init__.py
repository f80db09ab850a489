"""Fine-tune with Hugging Face's Trainer or a native PyTorch loop, and run the same script on a laptop or a cluster.

Names are resolved at first use: importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accel_trainer.moved import find_moved_modules

__version__ = "0.1.0"

if TYPE_CHECKING:
    # The same names for type checkers and editors, which do not follow `__getattr__`.
    from accel_trainer.accelerator import Accelerator as Accelerator
    from accel_trainer.data_loader import prepare_data_loader as prepare_data_loader
    from accel_trainer.data_loader import skip_first_batches as skip_first_batches
    from accel_trainer.launch.notebook import debug_launcher as debug_launcher
    from accel_trainer.launch.notebook import notebook_launcher as notebook_launcher
    from accel_trainer.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_trainer.plugins import AutocastKwargs as AutocastKwargs
    from accel_trainer.plugins import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_trainer.plugins import DDPCommunicationHookType as DDPCommunicationHookType
    from accel_trainer.plugins import DeepSpeedPlugin as DeepSpeedPlugin
    from accel_trainer.plugins import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accel_trainer.plugins import DummyOptim as DummyOptim
    from accel_trainer.plugins import DummyScheduler as DummyScheduler
    from accel_trainer.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accel_trainer.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_trainer.plugins import GradScalerKwargs as GradScalerKwargs
    from accel_trainer.plugins import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_trainer.plugins import ProfileKwargs as ProfileKwargs
    from accel_trainer.plugins import ProjectConfiguration as ProjectConfiguration
    from accel_trainer.plugins import TorchDynamoPlugin as TorchDynamoPlugin
    from accel_trainer.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from accel_trainer.state import AcceleratorState as AcceleratorState
    from accel_trainer.state import DistributedType as DistributedType
    from accel_trainer.state import GradientState as GradientState
    from accel_trainer.state import PartialState as PartialState
    from accel_trainer.trainer import AccelTrainerMixin as AccelTrainerMixin
    from accel_trainer.trainer import Seq2SeqTrainer as Seq2SeqTrainer
    from accel_trainer.trainer import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from accel_trainer.trainer import Trainer as Trainer
    from accel_trainer.trainer import TrainingArguments as TrainingArguments
    from accel_trainer.utils import find_executable_batch_size as find_executable_batch_size
    from accel_trainer.utils import init_empty_weights as init_empty_weights
    from accel_trainer.utils import init_on_device as init_on_device
    from accel_trainer.utils import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accel_trainer.utils import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_trainer.utils import set_seed as set_seed
    from accel_trainer.utils import synchronize_rng_states as synchronize_rng_states

_NAMES = {
    "accelerator": "Accelerator",
    "data_loader": "prepare_data_loader skip_first_batches",
    "launch.notebook": "debug_launcher notebook_launcher",
    "optimizer": "AcceleratedOptimizer",
    "plugins": (
        "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DummyOptim DummyScheduler FullyShardedDataParallelPlugin "
        "GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs "
        "ProjectConfiguration TorchDynamoPlugin"
    ),
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState DistributedType GradientState PartialState",
    "trainer": "AccelTrainerMixin Seq2SeqTrainer Seq2SeqTrainingArguments Trainer TrainingArguments",
    "utils": (
        "find_executable_batch_size init_empty_weights init_on_device load_checkpoint_and_dispatch "
        "load_checkpoint_in_model set_seed synchronize_rng_states"
    ),
}
"""Public names by the module that has them."""

_EXPORTS = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_EXPORTS]

find_moved_modules()


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
