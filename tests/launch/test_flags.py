"""Flags: every option has one, both dashes, accelerate's spellings, and where the script begins."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from accel_trainer.config import field_specs, resolve
from accel_trainer.config.schema import get_value
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options, launch_flags, options_parser, parse_options

# Frozen: a flag that disappears from here breaks somebody's command line.
FLAGS = [
    "accumulation_keep_global_batch",
    "accumulation_sync_each_batch",
    "accumulation_sync_with_dataloader",
    "compile_backend",
    "compile_dynamic",
    "compile_fullgraph",
    "compile_mode",
    "compile_regional",
    "config_file",
    "cpu",
    "data_data_seed",
    "data_dispatch_batches",
    "data_even_batches",
    "data_non_blocking",
    "data_pin_memory",
    "data_prefetch_to_device",
    "data_split_batches",
    "data_use_seedable_sampler",
    "data_use_stateful_dataloader",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_gradient_as_bucket_view",
    "ddp_static_graph",
    "debug",
    "deepspeed_config_file",
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
    "dry_run",
    "dynamo_backend",
    "dynamo_mode",
    "dynamo_use_dynamic",
    "dynamo_use_fullgraph",
    "dynamo_use_regional_compilation",
    "enable_cpu_affinity",
    "fp8_backend",
    "fp8_emulate",
    "fp8_enable_fsdp_float8_all_gather",
    "fp8_pad_inner_dim",
    "fsdp_activation_checkpointing",
    "fsdp_backward_prefetch",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_forward_prefetch",
    "fsdp_ignored_modules",
    "fsdp_min_num_params",
    "fsdp_offload_params",
    "fsdp_replicate_per_node",
    "fsdp_replicate_size",
    "fsdp_reshard_after_forward",
    "fsdp_state_dict_type",
    "fsdp_wrap_classes",
    "fsdp_wrap_policy",
    "gpu_ids",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "hang_evaluation_seconds",
    "hang_save_seconds",
    "hang_startup_seconds",
    "hang_step_seconds",
    "hang_user_seconds",
    "image",
    "kubernetes",
    "local_steps",
    "local_steps_after",
    "log_dir",
    "m",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "max_restarts",
    "max_rollbacks",
    "min_processes",
    "mixed_precision",
    "module",
    "monitor_interval",
    "multi_gpu",
    "no_python",
    "num_cpu_threads_per_process",
    "num_machines",
    "num_processes",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "on_changed_run",
    "on_nonfinite",
    "outer_optimizer_lr",
    "outer_optimizer_momentum",
    "outer_optimizer_nesterov",
    "output_dtype",
    "parallel_cp_comm_strategy",
    "parallel_cp_size",
    "parallel_dp_replicate_size",
    "parallel_dp_shard_size",
    "parallel_ep_size",
    "parallel_loss_parallel",
    "parallel_sp_size",
    "parallel_tp_plan",
    "parallel_tp_size",
    "parallelism_config_cp_comm_strategy",
    "parallelism_config_cp_size",
    "parallelism_config_dp_replicate_size",
    "parallelism_config_dp_shard_size",
    "parallelism_config_ep_size",
    "parallelism_config_sp_size",
    "parallelism_config_tp_size",
    "preemption_grace_seconds",
    "preemption_signals",
    "q",
    "quiet",
    "rdzv_backend",
    "rdzv_conf",
    "role",
    "same_network",
    "scheduler_steps",
    "slurm",
    "strategy",
    "submit",
    "t",
    "tee",
    "timeout_seconds",
    "use_cpu",
    "use_deepspeed",
    "use_fsdp",
    "use_parallelism_config",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "zero_stage",
]


def parse(*words: str) -> Options:
    return parse_options(words, "accel-trainer launch")


def test_the_flags_are_these() -> None:
    assert sorted(launch_flags()) == FLAGS


def test_every_option_has_a_flag_with_a_line_of_help() -> None:
    flags = {flag.path: flag for flag in launch_flags().values() if flag.preset is None}
    assert set(flags) - {None, "parallelism_config"} == set(field_specs())
    assert all(flag.help for flag in flags.values())
    text = options_parser("usage", "description").format_help()
    assert "--fsdp_wrap_classes A,B" in text
    assert "{no,bf16,fp16,fp8}" in text


def test_flags_of_every_type_reach_the_configuration() -> None:
    words = (
        "--mixed-precision=bf16 --num_processes 2 --monitor_interval 0.5 --fsdp_wrap_classes A,B --debug --cpu false"
    )
    config = resolve(flags=parse(*shlex.split(words)).flags).config
    assert config.mixed_precision == "bf16"
    assert config.launch.num_processes == 2
    assert config.launch.monitor_interval_seconds == 0.5
    assert config.fsdp.wrap_classes == ("A", "B")
    assert config.debug
    assert not config.use_cpu


@pytest.mark.parametrize("spelling", ["--num_processes", "--num-processes"])
@pytest.mark.parametrize("equals", [True, False])
def test_dashes_and_underscores_are_the_same(spelling: str, equals: bool) -> None:
    words = [f"{spelling}=4"] if equals else [spelling, "4"]
    assert parse(*words, "train.py") == Options(flags={"launch.num_processes": "4"}, rest=("train.py",))


def test_everything_behind_the_script_belongs_to_the_script() -> None:
    rest = ("train.py", "--num_processes", "9", "--", "--cpu", "-m", "--unknown=1")
    assert parse("--cpu", *rest) == Options(flags={"use_cpu": True}, rest=rest)


def test_two_dashes_end_our_options() -> None:
    assert parse("--cpu", "--", "-odd-name.py", "--", "x").rest == ("-odd-name.py", "--", "x")


def test_a_switch_takes_true_and_false_and_no_other_word() -> None:
    assert parse("--cpu", "train.py") == Options(flags={"use_cpu": True}, rest=("train.py",))
    assert parse("--cpu", "False", "train.py") == Options(flags={"use_cpu": "False"}, rest=("train.py",))
    assert resolve(flags=parse("--cpu=no").flags).config.use_cpu is False


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--fsdp_reshard_after_forward SHARD_GRAD_OP", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward full_shard", "fsdp.reshard_after_forward", True),
        ("--fsdp_reshard_after_forward=SHARD_GRAD_OP", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward no", "fsdp.reshard_after_forward", False),
        ("--fsdp_reshard_after_forward", "fsdp.reshard_after_forward", True),
        ("--fsdp_offload_params 1", "fsdp.offload_params", True),
        ("--fsdp_offload_params no", "fsdp.offload_params", False),
    ],
)
def test_a_switch_takes_what_accelerate_takes_where_it_has_a_value_there(words: str, path: str, value: bool) -> None:
    options = parse("--use_fsdp", *words.split(), "train.py")
    assert options.rest == ("train.py",)
    assert get_value(resolve(flags=options.flags).config, path) is value
    options_parser(None, "").parse_args(["--use_fsdp", *words.split()])  # as other libraries parse them


def test_a_switch_with_a_wrong_word_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--debug is 'maybe'; expected true or false"):
        resolve(flags=parse("--debug=maybe").flags)


def test_a_module_and_a_program() -> None:
    assert parse("-m", "package.train", "x") == Options(module=True, rest=("package.train", "x"))
    assert parse("--no_python", "./run.sh").no_python


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--mixed_presision", "--mixed_precision"),
        ("--num-proces", "--num_processes"),
        ("--fsdp_wrap_clases", "--fsdp_wrap_classes"),
        ("-num_processes", "--num_processes"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_name(word: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown option '{word}' of accel-trainer launch; did you mean '{nearest}'"
    ):
        parse(word, "2", "train.py")


def test_a_flag_like_no_other_is_unknown_too() -> None:
    with pytest.raises(ConfigError, match=r"there is none like it\. Options of the script stand behind"):
        parse("--zzz", "train.py")


@pytest.mark.parametrize("words", [["--num_processes"], ["--num_processes", "--cpu", "train.py"]])
def test_a_flag_without_its_value_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="option --num_processes of accel-trainer launch needs a value"):
        parse(*words)


def test_values_may_begin_with_a_dash() -> None:
    assert parse("--main_process_port", "-1").flags == {"launch.main_process_port": "-1"}


def test_use_fsdp_stands_for_the_strategy() -> None:
    assert parse("--use_fsdp").flags == {"strategy": "fsdp2"}
    assert parse("--use_fsdp=false").flags == {}


def test_two_strategies_contradict() -> None:
    with pytest.raises(ConfigError, match="--multi_gpu asks for strategy 'ddp', and another option for 'fsdp2'"):
        parse("--use_fsdp", "--multi_gpu")


def test_accelerate_s_spellings_of_fsdp_flags_are_translated() -> None:
    words = (
        "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer "
        "--fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_use_orig_params true"
    )
    options = parse(*shlex.split(words))
    config = resolve(flags=options.flags).config
    assert config.strategy == "fsdp2"
    assert config.fsdp.wrap_classes == ("BertLayer",)
    assert config.fsdp.wrap_policy == "transformer"
    assert config.fsdp.state_dict_type == "sharded"
    assert not config.fsdp.reshard_after_forward
    assert "mapped: fsdp_sharding_strategy; without effect: fsdp_use_orig_params" in options.notes[0]


@pytest.mark.parametrize("flag", ["--fsdp_sharding_strategy", "--fsdp_reshard_after_forward"])
def test_strategies_of_fsdp1_mean_all_that_they_mean_under_either_flag(flag: str) -> None:
    hybrid = resolve(flags=parse("--use_fsdp", flag, "HYBRID_SHARD_ZERO2").flags).config
    assert (hybrid.strategy, hybrid.fsdp.replicate_per_node, hybrid.fsdp.reshard_after_forward) == (
        "fsdp2",
        True,
        False,
    )
    options = parse("--use_fsdp", flag, "NO_SHARD")
    assert resolve(flags=options.flags).config.strategy == "ddp"
    assert "every rank keeps the whole model, so strategy 'ddp' is used" in options.notes[0]


def test_a_wrong_value_in_accelerate_s_spelling_is_named() -> None:
    with pytest.raises(
        ConfigError, match="--fsdp_auto_wrap_policy is 'LAYERS'; expected one of TRANSFORMER_BASED_WRAP"
    ):
        parse("--fsdp_auto_wrap_policy", "LAYERS")


def test_a_wrong_value_of_our_own_spelling_is_named() -> None:
    with pytest.raises(ConfigError, match="--fsdp_state_dict_type is 'SHARDS'; expected one of"):
        parse("--fsdp_state_dict_type", "SHARDS")


ACCELERATES = json.loads((Path(__file__).parents[1] / "migration" / "launch_flags_1_15.json").read_text())


@pytest.mark.parametrize("name", ACCELERATES)
def test_a_flag_of_accelerates_launcher_is_taken_or_refused_with_the_way_out(name: str) -> None:
    message = ""
    try:
        parse(f"--{name}=1", "train.py")
    except ConfigError as error:
        message = str(error)
    assert "unknown option" not in message
    if "not offered" in message:
        assert name.replace("-", "_") not in launch_flags()
        assert ";" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--use_megatron_lm", "--use_megatron_lm is an option of accelerate .*; use --use_fsdp, with --par"),
        ("--megatron_lm_tp_degree 2", "there is no Megatron-LM strategy"),
        ("--fp8_format E4M3", "it is an option of TransformerEngine or MS-AMP, and fp8 is torchao's here"),
        ("--mpirun_hostfile hosts", r"start the launcher or the script with mpirun itself"),
        ("--env X=1", "it is for pods of TPUs; leave it out"),
        ("--aws_access_key_id K", "jobs are not started on SageMaker"),
        ("--parallelism_config_cp_backend torch", "each way to share sequences has one backend"),
        (
            "--parallelism_config_cp_size 2 --parallelism_config_cp_comm_strategy ring",
            "cp_comm_strategy is 'ring'; expected one of 'allgather', 'alltoall'",
        ),
        ("--parallelism_config_tp_size two", "--parallelism_config_tp_size is 'two'; expected a whole number"),
    ],
)
def test_what_is_not_offered_says_why(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words.split(), "train.py")


def test_sizes_of_a_mesh_are_those_of_fsdp() -> None:
    words = "-q --quiet --use_fsdp --use_parallelism_config --parallelism_config_dp_replicate_size 2 "
    options = parse(
        *words.split(), "--parallelism_config_dp_shard_size", "4", "--parallelism_config_tp_size", "1", "x.py"
    )
    config = resolve(flags=options.flags).config
    assert (config.strategy, config.parallel.dp_replicate_size, options.rest) == ("fsdp2", 2, ("x.py",))
