"""The states of Hugging Face accelerate, which say what ours say wherever another library has imported it.

accelerate is a dependency of TRL and sentence-transformers. Their Trainers call functions of it that look up the rank,
the device and the engine in its global states (`get_logger`, `gather_object`, `broadcast_object_list`, `set_seed`,
`PartialState().main_process_first()`), and its own TrainingArguments and Accelerator, which would make those states,
are not in use. It is not imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.accelerator.shared_state import PartialState

_MODULE = "accelerate.state"


def share_process(state: PartialState, *, keep: bool = False) -> None:
    """Have an imported accelerate's `PartialState()` show this process; states of another device go unless `keep`."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    shown, described = module.PartialState._shared_state, _describe_process(module, state)
    is_same = shown and all(shown.get(name) == described[name] for name in ("device", "process_index", "num_processes"))
    if is_same or (shown and keep):
        return
    # It has a copy of what PartialState shows: of a device and a rank that are no more.
    module.AcceleratorState._shared_state.clear()
    shown.clear()
    shown.update(described)


def share_accelerator(accelerator: Accelerator) -> None:
    """Have `accelerate.AcceleratorState()` show the settings of this Accelerator, and of the process it runs in."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return
    state = accelerator.state
    process = _describe_process(module, state)
    settings = {
        "_mixed_precision": state.mixed_precision,
        "deepspeed_plugins": state.deepspeed_plugin,
        "fsdp_plugin": state.fsdp_plugin,
        "parallelism_config": state.parallelism_config,
        **dict.fromkeys(("device_mesh", "dynamo_plugin", "torch_tp_plugin")),
    }
    # Into the dictionaries that all instances share: a constructor would choose device and process group itself.
    for shown, content in ((module.PartialState, process), (module.AcceleratorState, process | settings)):
        shown._shared_state.clear()
        shown._shared_state.update(content)


def _describe_process(module: Any, state: PartialState) -> dict[str, Any]:
    return {
        "_cpu": state.device.type == "cpu",
        "backend": state.backend,
        "debug": False,
        "device": state.device,
        "distributed_type": module.DistributedType(state.distributed_type.value),
        "fork_launched": False,
        "local_process_index": state.local_process_index,
        "num_processes": state.num_processes,
        "process_index": state.process_index,
    }
