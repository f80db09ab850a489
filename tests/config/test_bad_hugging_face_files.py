"""Files of accelerate and transformers that must be refused, each with the exact text of its message."""

from __future__ import annotations

import pytest

from accel_trainer.config import read_file
from accel_trainer.errors import ConfigError

# name of the case, file name, content, message
BAD_FILES = [
    (
        "accelerate-typo-top",
        "acc.yaml",
        "distributed_type: FSDP\nnum_proceses: 2\n",
        "unknown key 'num_proceses' at acc.yaml:2; did you mean 'num_processes'?",
    ),
    (
        "accelerate-typo-nested",
        "acc.yaml",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_ofload_params: true\n",
        "unknown key 'fsdp_ofload_params' in 'fsdp_config' at acc.yaml:3; did you mean 'fsdp_offload_params'?",
    ),
    (
        "accelerate-own-key",
        "acc.yaml",
        "distributed_type: FSDP\naccumulation:\n  num_steps: 2\n",
        "unknown key 'accumulation' at acc.yaml:2; it is a key of accel_trainer's own files, and this one "
        "is an accelerate file: use one of the two",
    ),
    (
        "accelerate-type",
        "acc.yaml",
        "distributed_type: FSPD\n",
        "distributed_type at acc.yaml:1 is 'FSPD'; expected one of NO, MULTI_CPU, MULTI_GPU, MULTI_NPU, "
        "MULTI_MLU, MULTI_SDAA, MULTI_MUSA, MULTI_XPU, MULTI_HPU, MULTI_NEURON, FSDP, DEEPSPEED; did you "
        "mean 'FSDP'?",
    ),
    (
        "accelerate-tpu",
        "acc.yaml",
        "distributed_type: 'NO'\ntpu_use_cluster: true\ndowncast_bf16: 'yes'\n",
        "2 problems in acc.yaml:\n"
        "  - tpu_use_cluster at acc.yaml:2 is true, which is not offered: chips are found where torch-tpu is; remove "
        "the TPU keys\n"
        "  - downcast_bf16 at acc.yaml:3 is 'yes', which is not offered: it exists on TPUs only; use "
        "mixed_precision: bf16",
    ),
    (
        "accelerate-xla",
        "acc.yaml",
        "distributed_type: XLA\n",
        "distributed_type at acc.yaml:1 is 'XLA', which is not offered: torch_xla ends at torch 2.9, and 2.11 is "
        "needed; with torch-tpu use FSDP, MULTI_GPU or NO",
    ),
    (
        "accelerate-megatron",
        "acc.yaml",
        "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n"
        "  megatron_lm_gradient_clipping: 1.0\n  megatron_lm_recompute_activations: true\n"
        "  megatron_lm_attention_backend: true\n",
        "4 problems in acc.yaml:\n"
        "  - megatron_lm_config.megatron_lm_pp_degree at acc.yaml:4 is 2, which is not offered: there are no "
        "pipelines; set it to 1\n"
        "  - megatron_lm_config.megatron_lm_gradient_clipping at acc.yaml:5 is 1.0, which is not offered: remove "
        "it, and clip in the script (clip_grad_norm_) or with max_grad_norm\n"
        "  - megatron_lm_config.megatron_lm_recompute_activations at acc.yaml:6 is true, which is not offered: set "
        "it to false, and use distributed_type FSDP with fsdp_activation_checkpointing\n"
        "  - megatron_lm_config.megatron_lm_attention_backend at acc.yaml:7 is true, which is not offered: it is "
        "an option of Megatron-LM alone; remove it",
    ),
    (
        "accelerate-sagemaker",
        "acc.yaml",
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n",
        "compute_environment at acc.yaml:1 is 'AMAZON_SAGEMAKER', which is not offered: start the job with "
        "SageMaker's own tools and a file for LOCAL_MACHINE",
    ),
    (
        "accelerate-fp8",
        "acc.yaml",
        "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n  fp8_format: E4M3\n",
        "fp8_config.fp8_format at acc.yaml:5 is 'E4M3', which is not offered: it is an option of TransformerEngine "
        "or MS-AMP; use backend: AO without it",
    ),
    (
        "accelerate-mpirun",
        "acc.yaml",
        "distributed_type: MULTI_CPU\nmpirun_config:\n  mpirun_hostfile: hosts\n",
        "mpirun_config at acc.yaml:2 is {'mpirun_hostfile': 'hosts'}, which is not offered: start the "
        "script with mpirun itself, the ranks are detected; remove the block",
    ),
    (
        "accelerate-cp",
        "acc.yaml",
        "distributed_type: FSDP\n"
        "parallelism_config:\n"
        "  parallelism_config_cp_size: two\n"
        "  parallelism_config_dp_shard_siz: 2\n",
        "2 problems in acc.yaml:\n"
        "  - parallelism_config.parallelism_config_cp_size at acc.yaml:3 is 'two'; expected a whole number of at "
        "least 1\n"
        "  - unknown key 'parallelism_config_dp_shard_siz' in 'parallelism_config' at acc.yaml:4; did you "
        "mean 'parallelism_config_dp_shard_size'?",
    ),
    (
        "accelerate-strat",
        "acc.yaml",
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHRD\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER\n"
        "  fsdp_state_dict_type: LOCAL_STATE_DICT\n"
        "  fsdp_version: 3\n"
        "  fsdp_backward_prefetch: sometimes\n"
        "  fsdp_offload_params: maybe\n",
        "5 problems in acc.yaml:\n"
        "  - fsdp_config.fsdp_sharding_strategy at acc.yaml:3 is 'FULL_SHRD'; expected one of FULL_SHARD, "
        "SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or 1 to 5; did you mean 'FULL_SHARD'?\n"
        "  - fsdp_config.fsdp_state_dict_type at acc.yaml:5 is 'LOCAL_STATE_DICT', which FSDP2 does not "
        "have; use SHARDED_STATE_DICT\n"
        "  - fsdp_config.fsdp_version at acc.yaml:6 is 3; expected 2 (FSDP2), or 1 to have a file for "
        "FSDP1 mapped\n"
        "  - fsdp_config.fsdp_backward_prefetch at acc.yaml:7 is 'sometimes'; expected one of "
        "BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH\n"
        "  - fsdp_config.fsdp_offload_params at acc.yaml:8 is 'maybe'; expected true or false",
    ),
    (
        "accelerate-contradict",
        "acc.yaml",
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_reshard_after_forward: false\n",
        "fsdp_config.fsdp_reshard_after_forward at acc.yaml:4 contradicts "
        "fsdp_config.fsdp_sharding_strategy at acc.yaml:3: they set fsdp.reshard_after_forward to false "
        "and to true; keep one of the two",
    ),
    (
        "accelerate-offload-ac",
        "acc.yaml",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing_offload: true\n",
        "fsdp_config.fsdp_activation_checkpointing_offload at acc.yaml:3 is true, which is not offered: "
        "activations are kept on the device or computed again; remove the key",
    ),
    (
        "accelerate-size",
        "acc.yaml",
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 0\n",
        "fsdp_config.fsdp_min_num_params at acc.yaml:4 is 0; expected a whole number of at least 1",
    ),
    (
        "accelerate-unquoted-no",
        "acc.yaml",
        "distributed_type: NO\nmixed_precision: no\n",
        "mixed_precision at acc.yaml:2 is false; expected one of 'no', 'bf16', 'fp16', 'fp8'; YAML reads "
        "an unquoted no as false: write 'no' in quotes",
    ),
    (
        "accelerate-block",
        "acc.yaml",
        "distributed_type: FSDP\nfsdp_config: FULL_SHARD\n",
        "fsdp_config at acc.yaml:2 is 'FULL_SHARD'; expected a block of keys, or null",
    ),
    (
        "accelerate-ds",
        "acc.yaml",
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stge: 3\n",
        "unknown key 'zero_stge' in 'deepspeed_config' at acc.yaml:3; did you mean 'zero_stage'?",
    ),
    (
        "accelerate-dynamo",
        "acc.yaml",
        "distributed_type: 'NO'\ndynamo_config:\n  dynamo_bakend: INDUCTOR\n  dynamo_mode: fast\n",
        "2 problems in acc.yaml:\n"
        "  - unknown key 'dynamo_bakend' in 'dynamo_config' at acc.yaml:3; did you mean 'dynamo_backend'?\n"
        "  - dynamo_config.dynamo_mode at acc.yaml:4 is 'fast'; expected one of 'default', "
        "'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'",
    ),
    (
        "accelerate-unused-block",
        "acc.yaml",
        "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_state_dict_type: WHOLE\n",
        "fsdp_config.fsdp_state_dict_type at acc.yaml:3 is 'WHOLE'; expected one of FULL_STATE_DICT, "
        "SHARDED_STATE_DICT",
    ),
    (
        "flat",
        "flat.json",
        '{\n  "fsdp_offload_params": true,\n  "cpu_offload": false,\n  "xla": true,\n  "min_num_parms": 3\n}',
        "3 problems in flat.json:\n"
        "  - cpu_offload at flat.json:3 contradicts fsdp_offload_params at flat.json:2: they set "
        "fsdp.offload_params to false and to true; keep one of the two\n"
        "  - xla at flat.json:4 is true, which is not offered: there is no XLA strategy; remove the xla "
        "keys\n"
        "  - unknown key 'min_num_parms' at flat.json:5; did you mean 'min_num_params'?",
    ),
    (
        "flat-twice",
        "flat.json",
        '{\n  "fsdp_min_num_params": 5,\n  "min_num_params": 6}',
        "min_num_params at flat.json:3 contradicts fsdp_min_num_params at flat.json:2: they give 6 and 5; "
        "keep one of the two",
    ),
]


@pytest.mark.parametrize(
    ("file_name", "content", "message"), [case[1:] for case in BAD_FILES], ids=[c[0] for c in BAD_FILES]
)
def test_a_bad_file_is_refused_with_this_message(tmp_path, monkeypatch, file_name, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file_name).write_text(content, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_file(file_name)

    assert str(caught.value) == message


def test_there_are_bad_files_of_every_kind_and_each_case_has_its_own_name():
    names = [case[0] for case in BAD_FILES]

    assert len(names) == len(set(names)) >= 20
