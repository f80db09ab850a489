"""Re-exports: options, collectives and small functions, at the path that users of similar libraries expect.

Submodules of theirs (`utils.operations`, `utils.dataclasses`, ...) are this module under another name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.accelerator.accelerated_scheduler import DeepSpeedSchedulerWrapper
from accel_trainer.accelerator.gathering import (
    GatheredParameters,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_state,
    synchronize_rng_states,
    wait_for_everyone,
)
from accel_trainer.accelerator.prepared import extract_model_from_parallel
from accel_trainer.accelerator.shared_state import DistributedType
from accel_trainer.accelerator.single_files import (
    clean_state_dict_for_safetensors,
    load,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accel_trainer.big_models.alignment import align_module_device, has_offloaded_params
from accel_trainer.big_models.device_map import (
    CustomDtype,
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    fallback_allocate,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_module_leaves,
    get_module_size_with_ties,
    infer_auto_device_map,
)
from accel_trainer.big_models.dispatch import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    load_checkpoint_and_dispatch,
    load_offloaded_weights,
    load_state_dict,
)
from accel_trainer.big_models.module_tensors import (
    check_device_same,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_trainer.checkpoint.weights.adapters import is_peft_model
from accel_trainer.checkpoint.weights.into_model import init_empty_weights, init_on_device, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.offloaded import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_trainer.errors import CannotPadNestedTensorWarning, DistributedOperationException
from accel_trainer.launch.config_file import write_basic_config
from accel_trainer.logging import tqdm
from accel_trainer.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DummyOptim,
    DummyScheduler,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    HfDeepSpeedConfig,
    InitProcessGroupKwargs,
    KwargsHandler,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_trainer.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_trainer.precision import (
    ConvertOutputsToFp32,
    convert_model_to_fp8_ao,
    convert_outputs_to_fp32,
    convert_to_fp32,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_trainer.runtime import availability
from accel_trainer.runtime.availability import *  # noqa: F403  # its own list says which
from accel_trainer.runtime.collectives import ReduceOp
from accel_trainer.runtime.launchers import get_free_port, is_port_in_use
from accel_trainer.runtime.memory import clear_device_cache, find_executable_batch_size, release_memory
from accel_trainer.runtime.memory import is_out_of_memory as should_reduce_batch_size
from accel_trainer.runtime.model_wrappers import (
    get_model_tp_size,
    get_module_children_bottom_up,
    get_module_class_from_name,
    get_parameters_from_modules,
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)
from accel_trainer.runtime.rng import set_seed
from accel_trainer.runtime.tensor_trees import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    initialize_tensors,
    is_tensor_information,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accel_trainer.runtime.tensor_trees import find_batch_size as ignorant_find_batch_size
from accel_trainer.runtime.tensor_trees import is_tensor as is_torch_tensor
from accel_trainer.strategies.comm_hooks import DDPCommunicationHookType
from accel_trainer.strategies.compile import compile_regions, has_repeated_blocks, is_repeated_blocks
from accel_trainer.tree import honor_type, is_namedtuple, merge_dicts, recursive_getattr
from accel_trainer.unsupported import explain_missing
from accel_trainer.utils import constants
from accel_trainer.utils.constants import *  # noqa: F403  # its own list says which

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "CannotPadNestedTensorWarning", "ConvertOutputsToFp32", "CustomDtype",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin", "DeepSpeedSchedulerWrapper",
    "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs", "DistributedOperationException",
    "DistributedType", "DummyOptim", "DummyScheduler", "FullyShardedDataParallelPlugin", "GatheredParameters",
    "GradScalerKwargs", "GradientAccumulationPlugin", "HfDeepSpeedConfig", "InitProcessGroupKwargs", "KwargsHandler",
    "OffloadedWeightsLoader", "ParallelismConfig", "PrefixedDataset", "ProfileKwargs", "ProjectConfiguration",
    "ReduceOp", "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig",
    "align_module_device", "broadcast", "broadcast_object_list", "calculate_maximum_sizes", "check_device_map",
    "check_device_same", "check_tied_parameters_in_config", "check_tied_parameters_on_same_device",
    "clean_device_map", "clean_state_dict_for_safetensors", "clear_device_cache", "compile_regions",
    "compute_module_sizes", "compute_module_total_buffer_size", "concatenate", "convert_bytes",
    "convert_file_size_to_int", "convert_model_to_fp8_ao", "convert_outputs_to_fp32", "convert_to_fp32",
    "copy_tensor_to_devices", "dtype_byte_size", "extract_model_from_parallel", "extract_submodules_state_dict",
    "fallback_allocate", "filter_linear_layers", "find_batch_size", "find_device", "find_executable_batch_size",
    "find_first_last_linear_layers", "find_tied_parameters", "gather", "gather_object", "get_balanced_memory",
    "get_data_structure", "get_free_port", "get_max_layer_size", "get_max_memory", "get_model_tp_size",
    "get_module_children_bottom_up", "get_module_class_from_name", "get_module_leaves", "get_module_size_with_ties",
    "get_non_persistent_buffers", "get_parameters_from_modules", "get_pretty_name", "get_state_dict_from_offload",
    "get_state_dict_offloaded_model", "has_ao_layers", "has_compiled_regions", "has_offloaded_params",
    "has_repeated_blocks", "honor_type", "id_tensor_storage", "ignorant_find_batch_size", "infer_auto_device_map",
    "init_empty_weights", "init_on_device", "initialize_tensors", "is_compiled_module", "is_namedtuple",
    "is_peft_model", "is_port_in_use", "is_repeated_blocks", "is_tensor_information", "is_torch_tensor", "listify",
    "load", "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_fsdp_model", "load_fsdp_optimizer",
    "load_offloaded_weight", "load_offloaded_weights", "load_state_dict", "merge_dicts", "merge_fsdp_weights",
    "model_has_dtensor", "named_module_tensors", "offload_state_dict", "offload_weight", "pad_across_processes",
    "pad_input_tensors", "recursive_getattr", "recursively_apply", "reduce", "release_memory", "retie_parameters",
    "save", "save_fsdp_model", "save_fsdp_optimizer", "save_offload_index", "send_to_device",
    "set_module_tensor_to_device", "set_seed", "should_reduce_batch_size", "slice_tensors", "synchronize_rng_state",
    "synchronize_rng_states", "tqdm", "wait_for_everyone", "write_basic_config",
]  # fmt: skip
__all__ += availability.__all__
__all__ += constants.__all__


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
