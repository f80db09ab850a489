"""Models larger than a device, on one process: placement, hooks that bring weights in, offloading to host and disk.

As `accel_trainer.hooks` it is where users of similar libraries look for the hooks.
"""

from accel_trainer.big_models.alignment import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accel_trainer.big_models.cpu_offload_hook import CpuOffload, UserCpuOffloadHook
from accel_trainer.big_models.layerwise_casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from accel_trainer.big_models.module_hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
