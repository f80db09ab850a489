"""Files that must be refused, each with the exact text of its message: ours, accelerate's and transformers'."""

from __future__ import annotations

import pytest

from accel_trainer.config import read_file
from accel_trainer.errors import ConfigError

# Content and message, by what is wrong.
OWN = {
    "unknown key": (
        "strategy: fsdp2\n"
        "mixed_precision: bf16\n"
        "accumulation:\n"
        "  num_steps: 2\n"
        "\n"
        "# a comment\n"
        "\n"
        "gradient_acumulation_steps: 2\n",
        "unknown key 'gradient_acumulation_steps' at train.yaml:8; did you mean 'gradient_accumulation_steps'?",
    ),
    "unknown nested": (
        "strategy: fsdp2\nfsdp:\n  wrap_polcy: size\n",
        "unknown key 'wrap_polcy' in 'fsdp' at train.yaml:3; did you mean 'wrap_policy'?",
    ),
    "hf spelling in own": (
        "strategy: fsdp2\nfsdp:\n  sharding_strategy: FULL_SHARD\n",
        "unknown key 'sharding_strategy' in 'fsdp' at train.yaml:3; here it is called 'reshard_after_forward'",
    ),
    "section key at top": (
        "strategy: ddp\nnum_processes: 2\n",
        "unknown key 'num_processes' at train.yaml:2; it belongs into the section 'launch'",
    ),
    "unquoted no": (
        "mixed_precision: no\n",
        "mixed_precision at train.yaml:1 is false; expected one of 'no', 'bf16', 'fp16', 'fp8'; YAML reads "
        "an unquoted no as false: write 'no' in quotes",
    ),
    "enum typo": (
        "mixed_precision: bf61\n",
        "mixed_precision at train.yaml:1 is 'bf61'; expected one of 'no', 'bf16', 'fp16', 'fp8'; did you mean 'bf16'?",
    ),
    "wrong type int": (
        "accumulation:\n  num_steps: two\n",
        "accumulation.num_steps at train.yaml:2 is 'two'; expected a whole number",
    ),
    "quoted int": (
        "accumulation:\n  num_steps: '2'\n",
        "accumulation.num_steps at train.yaml:2 is '2'; expected a whole number without quotes",
    ),
    "quoted bool": (
        "use_cpu: 'true'\n",
        "use_cpu at train.yaml:1 is 'true'; expected true or false without quotes",
    ),
    "leading zero": (
        "launch:\n  num_processes: 010\n",
        "launch.num_processes at train.yaml:2 is '010'; expected a whole number; a leading zero means "
        "octal to some readers: write 10",
    ),
    "range": (
        "accumulation: {num_steps: 0}\n",
        "accumulation.num_steps at train.yaml:1 is 0; expected a whole number of at least 1",
    ),
    "too many": (
        "launch: {num_processes: 99999999999999999999999999}\n",
        "launch.num_processes at train.yaml:1 is 99999999999999999999999999; expected a whole number of at most "
        "1000000",
    ),
    "too many steps": (
        "accumulation: {num_steps: 2147483648}\n",
        "accumulation.num_steps at train.yaml:1 is 2147483648; expected a whole number of at most 2147483647",
    ),
    "float": (
        "timeout_seconds: soon\n",
        "timeout_seconds at train.yaml:1 is 'soon'; expected a number",
    ),
    "negative timeout": (
        "timeout_seconds: -1e-5\n",
        "timeout_seconds at train.yaml:1 is -1e-05; expected a positive number of seconds, 1e9 at most",
    ),
    "endless timeout": (
        '{"timeout_seconds": 1' + "0" * 400 + "}",
        f"timeout_seconds at train.json:1 is 1{'0' * 76}...; expected a finite number",
    ),
    "timeout of torch": (
        "timeout_seconds: 1e10\n",
        "timeout_seconds at train.yaml:1 is 10000000000.0; expected a positive number of seconds, 1e9 at most",
    ),
    "tee": (
        "launch: {tee: both}\n",
        "launch.tee at train.yaml:1 is 'both'; expected a number from 0 to 3 (1 output, 2 errors, 3 both), or one for "
        "each local rank: '0:3,1:2'",
    ),
    "section scalar": (
        "fsdp: true\n",
        "fsdp at train.yaml:1 is true; expected a section with the keys reshard_after_forward, "
        "wrap_policy, wrap_classes, min_num_params, offload_params, activation_checkpointing, "
        "cpu_ram_efficient_loading, state_dict_type, ignored_modules, backward_prefetch, forward_prefetch, "
        "replicate_size, replicate_per_node",
    ),
    "duplicate": (
        "strategy: ddp\nuse_cpu: true\nstrategy: fsdp2\n",
        "key 'strategy' at train.yaml:3 was already given at line 1; keep one of the two",
    ),
    "dup json": (
        '{\n "strategy": "ddp",\n "strategy": "fsdp2"\n}',
        "key 'strategy' at train.json:3 was already given at line 2; keep one of the two",
    ),
    "self alias": (
        "fsdp: &x\n  fsdp: *x\n",
        "alias *x at train.yaml:2 has no finished anchor &x before it; write the value out, and note that "
        "an anchor cannot contain itself",
    ),
    "merge": (
        "base: &b\n  num_steps: 2\naccumulation:\n  <<: *b\n",
        "merge key << at train.yaml:4 is not supported; write the keys out",
    ),
    "tag": (
        "strategy: !!python/object/apply:os.system ['true']\n",
        "2 problems in train.yaml:\n"
        "  - tag !!python/object/apply:os.system at train.yaml:1 is refused: a configuration holds plain "
        "values only\n"
        "  - strategy at train.yaml:1 is ['true']; expected text",
    ),
    "two docs": (
        "strategy: ddp\n---\nstrategy: fsdp2\n",
        "train.yaml:2 starts a second document; a configuration is one document",
    ),
    "syntax": (
        "fsdp:\n  wrap_policy: size\n wrap_classes: []\n",
        "train.yaml:3 is not valid YAML: expected <block end>, but found '<block mapping start>'; check "
        "the indentation",
    ),
    "tab": (
        "fsdp:\n\twrap_policy: size\n",
        "train.yaml:2 is not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
    ),
    "empty": (
        "# nothing\n",
        "train.yaml is empty; expected a mapping of options",
    ),
    "list": (
        "- strategy\n",
        "train.yaml holds ['strategy']; expected a mapping of options",
    ),
    "json trailing comma": (
        '{\n "strategy": "ddp",\n}',
        "train.json:3 is not valid JSON: Expecting property name enclosed in double quotes (column 1)",
    ),
    "json nan": (
        '{"timeout_seconds": NaN}',
        "train.json holds NaN, which is not a value of JSON; use a finite number",
    ),
    "regex": (
        "fsdp:\n  ignored_modules: ['(']\n",
        "fsdp.ignored_modules at train.yaml:2 is ['(']; expected a list of valid regular expressions for module names",
    ),
    "classes": (
        "fsdp:\n  wrap_classes: [1, 2]\n",
        "fsdp.wrap_classes at train.yaml:2 is [1, 2]; expected a list of names",
    ),
    "unknown key only": (
        "num_proceses: 2\n",
        "unknown key 'num_proceses' at train.yaml:1; did you mean 'num_processes'?",
    ),
    "several problems": (
        "strategy: fsdp2\n"
        "mixed_precision: fp61\n"
        "fsdp:\n"
        "  wrap_policy: big\n"
        "  offload: true\n"
        "launch:\n"
        "  num_processes: -2\n"
        "  main_process_port: 70000\n",
        "5 problems in train.yaml:\n"
        "  - mixed_precision at train.yaml:2 is 'fp61'; expected one of 'no', 'bf16', 'fp16', 'fp8'; did "
        "you mean 'fp16'?\n"
        "  - fsdp.wrap_policy at train.yaml:4 is 'big'; expected one of 'transformer', 'size', 'none'\n"
        "  - unknown key 'offload' in 'fsdp' at train.yaml:5; did you mean 'offload_params'?\n"
        "  - launch.num_processes at train.yaml:7 is -2; expected a whole number of at least 1\n"
        "  - launch.main_process_port at train.yaml:8 is 70000; expected a port number from 0 to 65535",
    ),
}
OF_HUGGING_FACE = {
    "accelerate typo top": (
        "distributed_type: FSDP\nnum_proceses: 2\n",
        "unknown key 'num_proceses' at train.yaml:2; did you mean 'num_processes'?",
    ),
    "accelerate typo nested": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_ofload_params: true\n",
        "unknown key 'fsdp_ofload_params' in 'fsdp_config' at train.yaml:3; did you mean 'fsdp_offload_params'?",
    ),
    "accelerate own key": (
        "distributed_type: FSDP\naccumulation:\n  num_steps: 2\n",
        "unknown key 'accumulation' at train.yaml:2; it is a key of accel_trainer's own files, and this one "
        "is an accelerate file: use one of the two",
    ),
    "accelerate type": (
        "distributed_type: FSPD\n",
        "distributed_type at train.yaml:1 is 'FSPD'; expected one of NO, MULTI_CPU, MULTI_GPU, MULTI_NPU, "
        "MULTI_MLU, MULTI_SDAA, MULTI_MUSA, MULTI_XPU, MULTI_HPU, MULTI_NEURON, FSDP, DEEPSPEED; did you "
        "mean 'FSDP'?",
    ),
    "accelerate tpu": (
        "distributed_type: 'NO'\ntpu_use_cluster: true\ndowncast_bf16: 'yes'\n",
        "2 problems in train.yaml:\n"
        "  - tpu_use_cluster at train.yaml:2 is true, which is not offered: chips are found where torch-tpu is; remove "
        "the TPU keys\n"
        "  - downcast_bf16 at train.yaml:3 is 'yes', which is not offered: it exists on TPUs only; use "
        "mixed_precision: bf16",
    ),
    "accelerate xla": (
        "distributed_type: XLA\n",
        "distributed_type at train.yaml:1 is 'XLA', which is not offered: torch_xla ends at torch 2.9, and 2.11 is "
        "needed; with torch-tpu use FSDP, MULTI_GPU or NO",
    ),
    "accelerate megatron": (
        "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n"
        "  megatron_lm_gradient_clipping: 1.0\n  megatron_lm_recompute_activations: true\n"
        "  megatron_lm_attention_backend: true\n",
        "4 problems in train.yaml:\n"
        "  - megatron_lm_config.megatron_lm_pp_degree at train.yaml:4 is 2, which is not offered: there are no "
        "pipelines; set it to 1\n"
        "  - megatron_lm_config.megatron_lm_gradient_clipping at train.yaml:5 is 1.0, which is not offered: remove "
        "it, and clip in the script (clip_grad_norm_) or with max_grad_norm\n"
        "  - megatron_lm_config.megatron_lm_recompute_activations at train.yaml:6 is true, which is not offered: set "
        "it to false, and use distributed_type FSDP with fsdp_activation_checkpointing\n"
        "  - megatron_lm_config.megatron_lm_attention_backend at train.yaml:7 is true, which is not offered: it is "
        "an option of Megatron-LM alone; remove it",
    ),
    "accelerate sagemaker": (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n",
        "compute_environment at train.yaml:1 is 'AMAZON_SAGEMAKER', which is not offered: start the job with "
        "SageMaker's own tools and a file for LOCAL_MACHINE",
    ),
    "accelerate fp8": (
        "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: AO\n  fp8_format: E4M3\n",
        "fp8_config.fp8_format at train.yaml:5 is 'E4M3', which is not offered: it is an option of TransformerEngine "
        "or MS-AMP; use backend: AO without it",
    ),
    "accelerate mpirun": (
        "distributed_type: MULTI_CPU\nmpirun_config:\n  mpirun_hostfile: hosts\n",
        "mpirun_config at train.yaml:2 is {'mpirun_hostfile': 'hosts'}, which is not offered: start the "
        "script with mpirun itself, the ranks are detected; remove the block",
    ),
    "accelerate cp": (
        "distributed_type: FSDP\n"
        "parallelism_config:\n"
        "  parallelism_config_cp_size: two\n"
        "  parallelism_config_dp_shard_siz: 2\n",
        "2 problems in train.yaml:\n"
        "  - parallelism_config.parallelism_config_cp_size at train.yaml:3 is 'two'; expected a whole number of at "
        "least 1\n"
        "  - unknown key 'parallelism_config_dp_shard_siz' in 'parallelism_config' at train.yaml:4; did you "
        "mean 'parallelism_config_dp_shard_size'?",
    ),
    "accelerate strat": (
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHRD\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER\n"
        "  fsdp_state_dict_type: LOCAL_STATE_DICT\n"
        "  fsdp_version: 3\n"
        "  fsdp_backward_prefetch: sometimes\n"
        "  fsdp_offload_params: maybe\n",
        "5 problems in train.yaml:\n"
        "  - fsdp_config.fsdp_sharding_strategy at train.yaml:3 is 'FULL_SHRD'; expected one of FULL_SHARD, "
        "SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or 1 to 5; did you mean 'FULL_SHARD'?\n"
        "  - fsdp_config.fsdp_state_dict_type at train.yaml:5 is 'LOCAL_STATE_DICT', which FSDP2 does not "
        "have; use SHARDED_STATE_DICT\n"
        "  - fsdp_config.fsdp_version at train.yaml:6 is 3; expected 2 (FSDP2), or 1 to have a file for "
        "FSDP1 mapped\n"
        "  - fsdp_config.fsdp_backward_prefetch at train.yaml:7 is 'sometimes'; expected one of "
        "BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH\n"
        "  - fsdp_config.fsdp_offload_params at train.yaml:8 is 'maybe'; expected true or false",
    ),
    "accelerate contradict": (
        "distributed_type: FSDP\n"
        "fsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_reshard_after_forward: false\n",
        "fsdp_config.fsdp_reshard_after_forward at train.yaml:4 contradicts "
        "fsdp_config.fsdp_sharding_strategy at train.yaml:3: they set fsdp.reshard_after_forward to false "
        "and to true; keep one of the two",
    ),
    "accelerate offload ac": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing_offload: perhaps\n",
        "fsdp_config.fsdp_activation_checkpointing_offload at train.yaml:3 is 'perhaps'; expected true or false",
    ),
    "accelerate size": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 0\n",
        "fsdp_config.fsdp_min_num_params at train.yaml:4 is 0; expected a whole number of at least 1",
    ),
    "accelerate unquoted no": (
        "distributed_type: NO\nmixed_precision: no\n",
        "mixed_precision at train.yaml:2 is false; expected one of 'no', 'bf16', 'fp16', 'fp8'; YAML reads "
        "an unquoted no as false: write 'no' in quotes",
    ),
    "accelerate block": (
        "distributed_type: FSDP\nfsdp_config: FULL_SHARD\n",
        "fsdp_config at train.yaml:2 is 'FULL_SHARD'; expected a block of keys, or null",
    ),
    "accelerate ds": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stge: 3\n",
        "unknown key 'zero_stge' in 'deepspeed_config' at train.yaml:3; did you mean 'zero_stage'?",
    ),
    "accelerate dynamo": (
        "distributed_type: 'NO'\ndynamo_config:\n  dynamo_bakend: INDUCTOR\n  dynamo_mode: fast\n",
        "2 problems in train.yaml:\n"
        "  - unknown key 'dynamo_bakend' in 'dynamo_config' at train.yaml:3; did you mean 'dynamo_backend'?\n"
        "  - dynamo_config.dynamo_mode at train.yaml:4 is 'fast'; expected one of 'default', "
        "'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'",
    ),
    "accelerate unused block": (
        "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_state_dict_type: WHOLE\n",
        "fsdp_config.fsdp_state_dict_type at train.yaml:3 is 'WHOLE'; expected one of FULL_STATE_DICT, "
        "SHARDED_STATE_DICT",
    ),
    "flat": (
        '{\n  "fsdp_offload_params": true,\n  "cpu_offload": false,\n  "xla": true,\n  "min_num_parms": 3\n}',
        "3 problems in train.json:\n"
        "  - cpu_offload at train.json:3 contradicts fsdp_offload_params at train.json:2: they set "
        "fsdp.offload_params to false and to true; keep one of the two\n"
        "  - xla at train.json:4 is true, which is not offered: there is no XLA strategy; remove the xla "
        "keys\n"
        "  - unknown key 'min_num_parms' at train.json:5; did you mean 'min_num_params'?",
    ),
    "flat twice": (
        '{\n  "fsdp_min_num_params": 5,\n  "min_num_params": 6}',
        "min_num_params at train.json:3 contradicts fsdp_min_num_params at train.json:2: they give 6 and 5; "
        "keep one of the two",
    ),
    "accelerate ipex": (
        "distributed_type: MULTI_CPU\nipex_config:\n  ipex: true\n",
        "ipex_config at train.yaml:2 is {'ipex': True}, which is not offered: Intel's extension is not used, PyTorch "
        "has it built in; remove the block",
    ),
    "accelerate tpu pod": (
        "distributed_type: MULTI_GPU\ntpu_name: pod\n",
        "tpu_name at train.yaml:2 is 'pod', which is not offered: chips are found where torch-tpu is; remove the TPU "
        "keys",
    ),
}


@pytest.mark.parametrize(
    ("content", "message"), [*OWN.values(), *OF_HUGGING_FACE.values()], ids=[*OWN, *OF_HUGGING_FACE]
)
def test_a_bad_file_is_refused_with_this_message(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    name = "train.json" if content.startswith("{") else "train.yaml"
    (tmp_path / name).write_text(content, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_file(name)

    assert str(caught.value) == message
