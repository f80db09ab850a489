"""Re-exports: options, collectives and small functions, at the path that users of similar libraries expect.

Submodules of theirs (`utils.operations`, `utils.constants`, ...) are this module under another name. Names of files and
releases and closed sets of words, which nothing of ours reads, stand here.
"""

from __future__ import annotations

import importlib
from enum import Enum, EnumMeta
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
from accel_trainer.aliases import ALIASES
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
from accel_trainer.big_models.module_hooks import LAYERS_TO_CAST
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
    DDPCommunicationHookType,
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
from accel_trainer.strategies.compile import compile_regions, has_repeated_blocks, is_repeated_blocks
from accel_trainer.tree import honor_type, is_namedtuple, merge_dicts, recursive_getattr
from accel_trainer.unsupported import explain_missing

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION", "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION", "CUDA_DISTRIBUTED_TYPES", "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION", "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE", "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH", "FSDP_MODEL_NAME",
    "FSDP_PYTORCH_VERSION", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MODEL_NAME", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
    "SAGEMAKER_PARALLEL_EC2_INSTANCES", "SAGEMAKER_PYTHON_VERSION", "SAGEMAKER_PYTORCH_VERSION",
    "SAGEMAKER_TRANSFORMERS_VERSION", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_DYNAMO_MODES",
    "TORCH_LAUNCH_PARAMS", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "AORecipeKwargs", "AutocastKwargs", "BaseEnum",
    "CannotPadNestedTensorWarning", "ComputeEnvironment", "ConvertOutputsToFp32", "CustomDtype",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin", "DeepSpeedSchedulerWrapper",
    "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs", "DistributedOperationException",
    "DistributedType", "DummyOptim", "DummyScheduler", "DynamoBackend", "EnumWithContains", "FP8BackendType",
    "FullyShardedDataParallelPlugin", "GatheredParameters", "GradScalerKwargs", "GradientAccumulationPlugin",
    "HfDeepSpeedConfig", "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "OffloadedWeightsLoader",
    "ParallelismConfig", "PrecisionType", "PrefixedDataset", "ProfileKwargs", "ProjectConfiguration", "RNGType",
    "ReduceOp", "SageMakerDistributedType", "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin",
    "TorchTensorParallelConfig", "align_module_device", "broadcast", "broadcast_object_list", "calculate_maximum_sizes",
    "check_device_map", "check_device_same", "check_tied_parameters_in_config", "check_tied_parameters_on_same_device",
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


# --- names of files, releases and closed sets of words, as scripts that use accelerate read them ----------------------


SCALER_NAME = "scaler.pt"
MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
RNG_STATE_NAME = "random_states"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
FSDP_MODEL_NAME = "pytorch_model_fsdp"

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"

CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
_PLUGIN_DEVICES = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")
TORCH_DISTRIBUTED_OPERATION_TYPES = [*CUDA_DISTRIBUTED_TYPES, *(f"MULTI_{device}" for device in _PLUGIN_DEVICES)]
TORCH_LAUNCH_PARAMS = [
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone", "max_restarts",
    "monitor_interval", "start_method", "role", "module", "m", "no_python", "run_path", "log_dir", "r", "redirects",
    "t", "tee", "node_rank", "master_addr", "master_port",
]  # fmt: skip
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = LAYERS_TO_CAST

SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"
SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]


class EnumWithContains(EnumMeta):
    """Metaclass of an enumeration that is asked for words: `in` is false for any other word."""

    def __contains__(cls, item: Any) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(str, Enum, metaclass=EnumWithContains):  # noqa: UP042  # str() gives the word in Python 3.11, too
    """An enumeration of words, each equal to its member, so that options take either; `str` gives the word."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the words, in their order."""
        return [str(member) for member in cls]


class PrecisionType(BaseEnum):
    """Words of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(BaseEnum):
    """Words of `log_with`."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(BaseEnum):
    """Words of `rng_types`: streams of random numbers."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class FP8BackendType(BaseEnum):
    """Packages that compute in fp8."""

    NO = "NO"
    AO = "AO"
    TE = "TE"
    MSAMP = "MSAMP"


class ComputeEnvironment(BaseEnum):
    """Places where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(BaseEnum):
    """Kinds of distributed training that SageMaker has."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DynamoBackend(BaseEnum):
    """Backends of `torch.compile`, in capitals."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        if f"utils.{name}" in ALIASES:  # a submodule of theirs that nobody has imported by itself
            return importlib.import_module(f"{__name__}.{name}")
        raise explain_missing(__name__, name)
