"""Files as users have them: of accelerate since 0.11, fsdp_config, DeepSpeed's own, as TRL and axolotl have them.

Each loads to the values that it says, or fails with the line that is wrong; test_bad_files.py has more of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.config import resolve
from accel_trainer.config.deepspeed_block import read_block
from accel_trainer.config.schema import get_key, get_value
from accel_trainer.errors import ConfigError

HEAD_0_11 = """\
compute_environment: LOCAL_MACHINE
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
num_machines: 1
num_processes: 4
use_cpu: false
"""
HEAD_0_14 = f"{HEAD_0_11}downcast_bf16: 'no'\ngpu_ids: all\nrdzv_backend: static\nsame_network: true\n"
HEAD_0_16 = (
    f"{HEAD_0_14}command_file: null\ncommands: null\nmegatron_lm_config: {{}}\ntpu_name: null\ntpu_zone: null\n"
    "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\n"
)
HEAD_1_0 = (
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndowncast_bf16: 'no'\nenable_cpu_affinity: false\n"
    "machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nnum_processes: 8\nrdzv_backend: static\n"
    "same_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
)
FSDP1 = f"{HEAD_0_16}distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n"
FSDP2 = f"{HEAD_1_0}distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
ZERO = f"{HEAD_1_0}distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"

ACCELERATE: dict[str, tuple[str, dict[str, Any]]] = {
    "0.11 one process": (
        f"{HEAD_0_11}distributed_type: 'NO'\nmixed_precision: 'no'\n".replace("processes: 4", "processes: 1"),
        {"strategy": "single", "launch.num_processes": 1},
    ),
    "0.11 GPUs": (
        f"{HEAD_0_11}deepspeed_config: {{}}\nfsdp_config: {{}}\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\n",
        {"strategy": "ddp", "mixed_precision": "fp16", "launch.num_processes": 4},
    ),
    "0.11 fp16 before mixed_precision": (
        f"{HEAD_0_11}distributed_type: MULTI_GPU\nfp16: true\n",
        {"strategy": "ddp", "mixed_precision": "fp16"},
    ),
    "0.11 CPUs": (
        f"{HEAD_0_11}distributed_type: MULTI_CPU\nmixed_precision: 'no'\n".replace("cpu: false", "cpu: true"),
        {"strategy": "ddp", "use_cpu": True},
    ),
    "0.11 FSDP by number": (
        f"{HEAD_0_11}distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n  min_num_params: 2000\n"
        "  offload_params: false\n  sharding_strategy: 2\n",
        {"strategy": "fsdp2", "fsdp.reshard_after_forward": False, "fsdp.min_num_params": 2000},
    ),
    "0.11 ZeRO": (
        f"{HEAD_0_11}distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n"
        "  gradient_accumulation_steps: 2\n  offload_optimizer_device: none\n  zero_stage: 2\n",
        {"strategy": "deepspeed", "accumulation.num_steps": 2, "zero_optimization.stage": 2},
    ),
    "0.12 FSDP by policy": (
        f"{HEAD_0_11}distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
        "  fsdp_offload_params: true\n  fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n",
        {"fsdp.wrap_classes": ("BertLayer",), "fsdp.offload_params": True, "fsdp.reshard_after_forward": True},
    ),
    "0.14 two machines": (
        f"{HEAD_0_14}distributed_type: MULTI_GPU\nmixed_precision: fp16\n".replace("machines: 1", "machines: 2")
        .replace("ip: null", "ip: 10.0.0.1")
        .replace("port: null", "port: 29501"),
        {"launch.num_machines": 2, "launch.main_process_ip": "10.0.0.1", "launch.main_process_port": 29501},
    ),
    "0.14 dynamo_backend": (
        f"{HEAD_0_14}distributed_type: MULTI_GPU\nmixed_precision: 'no'\ndynamo_backend: INDUCTOR\n",
        {"compile.backend": "inductor"},
    ),
    "0.14 dynamo_backend NO": (
        f"{HEAD_0_14}distributed_type: MULTI_GPU\nmixed_precision: 'no'\ndynamo_backend: 'NO'\n",
        {"compile.backend": "no"},
    ),
    "0.15 gpu_ids": (
        f"{HEAD_0_14}distributed_type: MULTI_GPU\nmixed_precision: 'no'\n".replace("gpu_ids: all", "gpu_ids: 0,1,3,5"),
        {"launch.gpu_ids": "0,1,3,5"},
    ),
    "0.16 dynamo_config": (
        f"{HEAD_0_16}distributed_type: MULTI_GPU\nmixed_precision: bf16\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
        "  dynamo_mode: reduce-overhead\n  dynamo_use_dynamic: true\n  dynamo_use_fullgraph: false\n",
        {"compile.backend": "inductor", "compile.mode": "reduce-overhead", "compile.dynamic": True},
    ),
    "0.17 c10d": (
        f"{HEAD_0_16}distributed_type: MULTI_GPU\nmixed_precision: bf16\n".replace("static", "c10d"),
        {"launch.rdzv_backend": "c10d"},
    ),
    "0.17 without ipex": (
        f"{HEAD_0_16}distributed_type: MULTI_CPU\nmixed_precision: bf16\nipex_config:\n  ipex: false\n",
        {"strategy": "ddp", "use_cpu": False},
    ),
    "0.18 FSDP": (
        f"{FSDP1}  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 100000000\n"
        "  fsdp_offload_params: false\n  fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n",
        {"fsdp.wrap_policy": "size", "fsdp.min_num_params": 100_000_000, "fsdp.state_dict_type": "sharded"},
    ),
    "0.20 FSDP of one's own policy": (
        f"{FSDP1}  fsdp_auto_wrap_policy: NO_WRAP\n  fsdp_forward_prefetch: true\n  fsdp_sharding_strategy: 1\n"
        "  fsdp_sync_module_states: true\n  fsdp_use_orig_params: true\n",
        {"fsdp.wrap_policy": "none", "fsdp.forward_prefetch": True},
    ),
    "0.21 several classes": (
        f"{FSDP1}  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,MistralDecoderLayer\n",
        {"fsdp.wrap_classes": ("LlamaDecoderLayer", "MistralDecoderLayer")},
    ),
    "0.24 strategy by name": (
        f"{FSDP1}  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_backward_prefetch: NO_PREFETCH\n",
        {
            "fsdp.reshard_after_forward": False,
            "fsdp.cpu_ram_efficient_loading": True,
            "fsdp.backward_prefetch": False,
        },
    ),
    "0.25 hybrid": (
        f"{FSDP1}  fsdp_sharding_strategy: HYBRID_SHARD\n",
        {"fsdp.replicate_per_node": True, "fsdp.reshard_after_forward": True},
    ),
    "0.25 no shard": (f"{FSDP1}  fsdp_sharding_strategy: NO_SHARD\n", {"strategy": "ddp"}),
    "0.29 checkpointing": (
        f"{FSDP1}  fsdp_activation_checkpointing: true\n  fsdp_sharding_strategy: FULL_SHARD\n",
        {"fsdp.activation_checkpointing": True},
    ),
    "0.28 affinity": (
        f"{HEAD_1_0}distributed_type: MULTI_GPU\nmixed_precision: bf16\n".replace("affinity: false", "affinity: true"),
        {"launch.enable_cpu_affinity": True, "launch.num_processes": 8},
    ),
    "0.20 debug": (
        f"{HEAD_1_0}distributed_type: MULTI_GPU\nmixed_precision: bf16\n".replace("debug: false", "debug: true"),
        {"debug": True},
    ),
    "1.0 NPUs": (f"{HEAD_1_0}distributed_type: MULTI_NPU\nmixed_precision: fp16\n", {"strategy": "ddp"}),
    "1.0 XPUs": (f"{HEAD_1_0}distributed_type: MULTI_XPU\nmixed_precision: bf16\n", {"strategy": "ddp"}),
    "1.0 ZeRO-3": (
        f"{ZERO}  gradient_accumulation_steps: 8\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: cpu\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3\n",
        {
            "accumulation.num_steps": 8,
            "zero_optimization.stage": 3,
            "zero_optimization.offload_param.device": "cpu",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
            "gradient_clipping": 1.0,
        },
    ),
    "1.0 ZeRO-3 with experts": (
        f"{ZERO}  deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock\n  zero_stage: 3\n",
        {"zero_optimization.leaf_module.classes": ["MixtralSparseMoeBlock"]},
    ),
    "1.0 launcher of DeepSpeed": (
        f"{ZERO}  deepspeed_multinode_launcher: standard\n  offload_optimizer_device: none\n  zero_stage: 2\n",
        {"zero_optimization.stage": 2},
    ),
    "1.0 accumulation auto": (
        f"{ZERO}  gradient_accumulation_steps: auto\n  zero_stage: 1\n",
        {"accumulation.num_steps": 1, "zero_optimization.stage": 1},
    ),
    "1.5 FSDP2": (
        f"{FSDP2}  fsdp_reshard_after_forward: false\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n",
        {"fsdp.reshard_after_forward": False, "fsdp.wrap_classes": ("Qwen2DecoderLayer",)},
    ),
    "1.8 regional": (
        f"{HEAD_1_0}distributed_type: MULTI_GPU\nmixed_precision: bf16\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
        "  dynamo_use_regional_compilation: true\n",
        {"compile.regional": True},
    ),
    "1.10 parallelism": (
        f"{FSDP2}parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 1\n  parallelism_config_cp_size: 2\n"
        "  parallelism_config_cp_comm_strategy: alltoall\n",
        {"parallel.dp_replicate_size": 2, "parallel.cp_size": 2, "parallel.cp_comm_strategy": "alltoall"},
    ),
    "1.15 ignored modules": (
        f"{FSDP2}  fsdp_ignored_modules: .*router\n  fsdp_offload_params: true\n",
        {"fsdp.ignored_modules": (".*router",), "fsdp.offload_params": True},
    ),
    "1.15 num_processes -1": (
        f"{HEAD_1_0}distributed_type: MULTI_GPU\nmixed_precision: bf16\n".replace("processes: 8", "processes: -1"),
        {"launch.num_processes": None},
    ),
    "TRL multi_gpu": (
        f"{HEAD_1_0}distributed_type: MULTI_GPU\ngpu_ids: all\nmixed_precision: 'bf16'\n",
        {"strategy": "ddp", "mixed_precision": "bf16"},
    ),
    "TRL deepspeed_zero3": (
        f"{ZERO}  deepspeed_multinode_launcher: standard\n  offload_optimizer_device: none\n"
        "  offload_param_device: none\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3\n",
        {"strategy": "deepspeed", "zero_optimization.stage": 3},
    ),
    "TRL fsdp1": (
        f"{FSDP1}  fsdp_activation_checkpointing: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_forward_prefetch: true\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: FULL_SHARD\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_sync_module_states: true\n  fsdp_use_orig_params: true\n"
        "  fsdp_version: 1\n",
        {"fsdp.reshard_after_forward": True, "fsdp.forward_prefetch": True, "fsdp.state_dict_type": "full"},
    ),
    "TRL fsdp2": (
        f"{FSDP2}  fsdp_activation_checkpointing: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n",
        {"strategy": "fsdp2", "fsdp.cpu_ram_efficient_loading": True},
    ),
    "axolotl's fsdp_config": (
        "fsdp_version: 2\noffload_params: true\nstate_dict_type: SHARDED_STATE_DICT\n"
        "auto_wrap_policy: TRANSFORMER_BASED_WRAP\ntransformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
        "reshard_after_forward: true\nactivation_checkpointing: true\n",
        {"strategy": "fsdp2", "fsdp.wrap_classes": ("LlamaDecoderLayer",), "fsdp.activation_checkpointing": True},
    ),
}
JSON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp_config with prefixes": (
        {"fsdp_transformer_layer_cls_to_wrap": ["A"], "fsdp_backward_prefetch": "backward_post"},
        {"strategy": "fsdp2", "fsdp.wrap_classes": ("A",), "fsdp.backward_prefetch": True},
    ),
    "fsdp_config without bound": ({"min_num_params": 0, "xla": False}, {"fsdp.min_num_params": 100_000_000}),
    "fsdp_config of version 2": (
        {"version": 2, "reshard_after_forward": False, "cpu_ram_efficient_loading": "true"},
        {"fsdp.reshard_after_forward": False, "fsdp.cpu_ram_efficient_loading": True},
    ),
    "DeepSpeed, all auto": (
        {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 1e9},
            "gradient_accumulation_steps": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        },
        {"strategy": "deepspeed", "zero_optimization.stage": 3, "accumulation.num_steps": 1},
    ),
    "DeepSpeed fp16 with scale": (
        {
            "fp16": {"enabled": True, "initial_scale_power": 16},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.5,
        },
        {"mixed_precision": "fp16", "gradient_clipping": 0.5},
    ),
    "DeepSpeed with optimizer": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "zero_optimization": {"stage": 2}},
        {"optimizer.type": "AdamW", "optimizer.params.lr": 3e-4},
    ),
    "DeepSpeed offload to disk": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
                "offload_param": {"device": "cpu"},
            },
            "aio": {"block_size": 262144},
        },
        {"zero_optimization.offload_optimizer.device": "nvme", "aio.block_size": 262144},
    ),
    "DeepSpeed accumulation": (
        {"gradient_accumulation_steps": 16, "zero_optimization": {"stage": 0}},
        {"accumulation.num_steps": 16, "zero_optimization.stage": 0},
    ),
}
WRONG: dict[str, tuple[str, str]] = {
    "TPU": (f"{HEAD_0_11}distributed_type: TPU\n", r":9 is 'TPU', which is not offered: torch_xla ends at torch 2.9"),
    "context parallel": (
        f"{FSDP2}parallelism_config:\n  parallelism_config_cp_size: 2\n  parallelism_config_sp_size: 2\n",
        r"parallel.cp_size=2 .*:20\) contradicts parallel.sp_size=2 .*:21\): both share out the tokens",
    ),
    "wrong strategy": (f"{FSDP1}  fsdp_sharding_strategy: 7\n", r":24 is 7; expected one of FULL_SHARD"),
    "wrong precision": (f"{HEAD_0_11}distributed_type: MULTI_GPU\nmixed_precision: bf61\n", r":10 is 'bf61'.*'bf16'"),
    "ZeRO stage 4": (f"{ZERO}  zero_stage: 4\n", r":18\) is 4; expected 0, 1, 2 or 3"),
}


def check(source: Path, expected: Mapping[str, Any]) -> None:
    config = resolve(file=source).config
    block = read_block(config.deepspeed).data
    for path, value in expected.items():
        is_ours = path.partition(".")[0] in type(config).__dataclass_fields__ and path != "optimizer"
        assert (get_value(config, path) if is_ours else get_key(block, path)) == value, path


@pytest.mark.parametrize("name", ACCELERATE)
def test_a_yaml_file_loads_to_what_it_says(name: str, tmp_path: Path) -> None:
    text, expected = ACCELERATE[name]
    (tmp_path / "run.yaml").write_text(text)
    check(tmp_path / "run.yaml", expected)


@pytest.mark.parametrize("name", JSON)
def test_a_json_file_loads_to_what_it_says(name: str, tmp_path: Path) -> None:
    content, expected = JSON[name]
    (tmp_path / "run.json").write_text(json.dumps(content, indent=2))
    check(tmp_path / "run.json", expected)


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_run_fails_with_the_line(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_block(resolve(file=tmp_path / "run.yaml").config.deepspeed)
    assert re.search(message, str(caught.value)), str(caught.value)
