"""Models larger than a device, on one process: placement, hooks that bring weights in, offloading to host and disk.

As `accel_trainer.hooks` it is where users of similar libraries look for the hooks.
"""

from accel_trainer.big_models.alignment import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accel_trainer.big_models.module_hooks import (
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "ModelHook", "SequentialHook", "UserCpuOffloadHook",
    "add_hook_to_module", "attach_align_device_hook", "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook", "attach_layerwise_casting_hooks", "remove_hook_from_module",
    "remove_hook_from_submodules",
]  # fmt: skip
