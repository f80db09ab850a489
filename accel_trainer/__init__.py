"""Fine-tune with Hugging Face's Trainer or a native PyTorch loop, and run the same script on a laptop or a cluster.

Names are resolved at first use: importing this package does not import torch.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

from accel_trainer.aliases import find_aliases

__version__ = "0.1.0"

_NAMES = {
    "accelerator": "Accelerator",
    "big_modeling": (
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map init_empty_weights "
        "init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model"
    ),
    "data_loader": "prepare_data_loader skip_first_batches",
    "launch.notebook": "debug_launcher notebook_launcher",
    "optimizer": "AcceleratedOptimizer",
    "plugins": (
        "AORecipeKwargs AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
        "DistributedDataParallelKwargs DummyOptim DummyScheduler FullyShardedDataParallelPlugin "
        "GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ParallelismConfig ProfileKwargs "
        "ProjectConfiguration TorchDynamoPlugin"
    ),
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState DistributedType GradientState PartialState",
    "trainer": "Seq2SeqTrainer Seq2SeqTrainingArguments Trainer TrainingArguments",
    "utils": "find_executable_batch_size is_rich_available set_seed synchronize_rng_states",
}
"""Public names by the module that has them."""

_MODULES = [
    "accelerator", "big_modeling", "data_loader", "hooks", "launchers", "logging", "optimizer", "parallelism_config",
    "scheduler", "state", "tracking", "utils",
]  # fmt: skip
"""Modules that are there after `import accel_trainer` alone, like those of similar libraries."""

_EXPORTS = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_EXPORTS]

find_aliases()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(f"{__name__}.{name}")
    if name not in _EXPORTS:
        # Not at the top: inspect, which it imports, takes longer than all of this package.
        unsupported = importlib.import_module(f"{__name__}.unsupported")
        raise unsupported.explain_missing(__name__, name)
    value = getattr(_load(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def _load(module: str) -> Any:
    """Import a module while no garbage is collected, since an import's objects stay."""
    # Collections took 0.8 of 2.3 s of a core for `Accelerator`, 1.2 of 4 s for `Trainer` (torch 2.13).
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collects:
            # Else those that the user has frozen would come back. Python 3.12 starts with 375 of its own.
            if gc.get_freeze_count() < 1000:
                # Both together move 700,000 objects to the oldest generation without a look at them, in microseconds;
                # as young ones they would be looked at three times.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
