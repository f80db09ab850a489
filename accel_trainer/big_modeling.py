"""Re-exports: models without memory, or larger than a device, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.big_models.device_map import (
    check_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from accel_trainer.big_models.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accel_trainer.big_models.module_hooks import LAYERS_TO_CAST as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from accel_trainer.big_models.module_hooks import attach_layerwise_casting_hooks
from accel_trainer.checkpoint.weights.into_model import init_empty_weights, init_on_device, load_checkpoint_in_model
from accel_trainer.unsupported import explain_missing

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "attach_layerwise_casting_hooks", "check_device_map", "cpu_offload",
    "cpu_offload_with_hook", "disk_offload", "dispatch_model", "get_balanced_memory", "get_max_memory",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
